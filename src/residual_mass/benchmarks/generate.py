"""Generations of every arm for every frozen prompt; rows in the store are not decoded again.

Batches never depend on the store, so that an interrupted run ends with the bytes of an undisturbed one (unless memory
runs out and batches are halved). A batch with a missing row is decoded whole, and its missing rows are added.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from residual_mass.benchmarks.encoded import Example, encoded, reference_texts
from residual_mass.benchmarks.scorers import saturated
from residual_mass.benchmarks.store import GENERATED, Row, RowStore, row_key
from residual_mass.core.settings import MapsSpec, tokens_of
from residual_mass.files import jsonl, sha256_of, sha256_text, write_text
from residual_mass.frozen_prompts import Prompt, load_manifest, load_prompts, require_prompts_of
from residual_mass.methods.arms import ArmSpec
from residual_mass.model.loading import backbone_identity, load_backbone, load_tokenizer
from residual_mass.model.phi_maps import PhiMaps, require_maps_of, require_one_file_each
from residual_mass.provenance import MANIFEST, Record
from residual_mass.study.specs import GenerateSpec

if TYPE_CHECKING:
    from residual_mass.model.engine import Generation, SharedPrefillEngine
    from residual_mass.model.loading import Backbone

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Examples of any tasks, decoded together under all arms.

    Attributes:
        keys: row keys by [example][arm].
    """

    examples: list[Example]
    keys: list[list[str]]

    def missing_from(self, store: RowStore) -> bool:
        return any(key not in store.rows for example in self.keys for key in example)


def run(spec: GenerateSpec, assets: Path, prompts: Path, phi: Sequence[Path], store: Path, out: Path) -> None:
    """The `generate` stage: adds the missing rows to `store`, then writes all rows of `spec` to `out`, ordered by task,
    example and arm.

    Args:
        phi: files of the feature maps, in the order of `spec.maps`.
    """
    record = Record("generate", spec, [assets / MANIFEST, prompts, *phi])
    maps = _maps_of(spec, phi)
    _check_lengths(spec)
    require_prompts_of(prompts, spec.benchmark, spec.length, spec.backbone.tokenizer)
    left_out = load_manifest(prompts)["left_out"]
    for task in (task for task in spec.tasks if task in left_out):
        logger.info("%s is left out: %s", task, left_out[task])
    tasks = [task for task in spec.tasks if task not in left_out]
    frozen = {task: load_prompts(prompts, task, spec.examples) for task in tasks}
    shas = {label: sha256_of(path) for label, path in maps.items()}
    identity = backbone_identity(spec.backbone, assets)
    source = spec.backbone
    tokenizer = load_tokenizer(source.model_id, source.revision, source.source, assets)
    batches = list(_batches(spec, [one for task in tasks for one in frozen[task]], tokenizer, identity, shas))
    _warn_of_extrapolation(spec, batches)
    with RowStore(store, GENERATED) as rows:
        for batch in batches:
            for (e, example), (a, arm) in product(enumerate(batch.examples), enumerate(spec.arms)):
                rows.require(batch.keys[e][a], _known_fields(example, arm, shas))
        todo = [batch for batch in batches if batch.missing_from(rows)]
        # Longest first, so that out of memory shows at once and the estimated time left errs upwards.
        todo.sort(key=lambda batch: max(len(example.ids) for example in batch.examples), reverse=True)
        logger.info("%d of %d batches to compute; %d rows in %s", len(todo), len(batches), len(rows.rows), store)
        ran_on = _compute(spec, assets, maps, shas, identity, todo, rows) if todo else {}
        keys = {
            (e.prompt.task, e.prompt.index): keys for b in batches for e, keys in zip(b.examples, b.keys, strict=True)
        }
        ordered = [keys[prompt.task, prompt.index] for task in tasks for prompt in frozen[task]]
        write_text(out, jsonl(rows.rows[key] for of_example in ordered for key in of_example))
    record.write(out, identity=identity, batches=len(batches), batches_computed=len(todo), **ran_on)


def _maps_of(spec: GenerateSpec, phi: Sequence[Path]) -> dict[str, Path]:
    """The files of the maps that arms use, by label."""
    require_one_file_each(phi, spec.maps)
    files = {maps.label: path for maps, path in zip(spec.maps, phi, strict=True)}
    require_maps_of(spec.arms, files)
    return {maps.label: files[maps.label] for maps in _maps_used(spec)}


def _maps_used(spec: GenerateSpec) -> list[MapsSpec]:
    """Those of `spec.maps` that arms use."""
    used = {arm.maps for arm in spec.arms}
    return [maps for maps in spec.maps if maps.label in used]


def _check_lengths(spec: GenerateSpec) -> None:
    """Compares the length that maps were trained on with that of the prompts: nominal, or without that what they are
    truncated to.
    """
    key = "length" if spec.budget_length == "nominal" else "truncate_to"
    label = spec.length if key == "length" else spec.truncate_to
    for maps in _maps_used(spec):
        if tokens_of(label) > maps.length and not spec.allow_extrapolation:
            raise ValueError(
                f"{key} {label}: longer than what the maps {maps.label} were trained on ({maps.length}); "
                "train longer ones or set allow_extrapolation"
            )


def _warn_of_extrapolation(spec: GenerateSpec, batches: Sequence[Batch]) -> None:
    """Template and few-shot examples may make a prompt longer than its nominal length."""
    lengths = [len(example.ids) for batch in batches for example in batch.examples]
    for maps in _maps_used(spec):
        beyond = [length for length in lengths if length > maps.length]
        if beyond and not spec.allow_extrapolation:
            logger.warning(
                "%d of %d prompts are longer than the %d tokens that the maps %s were trained on, the longest %d",
                len(beyond), len(lengths), maps.length, maps.label, max(beyond),
            )  # fmt: skip


def _batches(
    spec: GenerateSpec, prompts: Sequence[Prompt], tokenizer: Any, identity: str, shas: dict[str, str]
) -> Iterator[Batch]:
    """Batches of examples with similar answer lengths, then similar prompt lengths. A step costs little more for many
    rows than for few, so batches should stay full to their end, with little padding.
    """
    examples = [encoded(spec, spec.truncate_to, prompt, tokenizer) for prompt in prompts]
    examples.sort(key=lambda e: (-e.limit, -len(e.ids)))
    while examples:
        size = _fitting(examples, spec.batch_tokens)
        batch, examples = examples[:size], examples[size:]
        yield Batch(batch, [[_key(spec, example, arm, identity, shas) for arm in spec.arms] for example in batch])


def _fitting(examples: Sequence[Example], tokens: int) -> int:
    """How many of the examples, at least one, fit into so many prompt tokens, padding included."""
    size = 1
    while size < len(examples) and _padded(examples[: size + 1]) <= tokens:
        size += 1
    return size


def _padded(examples: Sequence[Example]) -> int:
    return len(examples) * max(len(example.ids) for example in examples)


def _key(spec: GenerateSpec, example: Example, arm: ArmSpec, identity: str, shas: dict[str, str]) -> str:
    prompt = example.prompt
    return row_key(
        task=prompt.task,
        index=prompt.index,
        prompt=prompt.sha256,
        ids=sha256_text(json.dumps(example.ids)),
        backbone=identity,
        phi=shas[arm.maps] if arm.maps else None,
        arm={**arm.rule.identity, "budget_percent": arm.budget_percent},
        anchors=asdict(spec.anchors),
        nominal_length=tokens_of(spec.length) if spec.budget_length == "nominal" else None,
        decoding={
            "greedy": True,
            "max_new_tokens": example.limit,
            "stop": prompt.stop,
            "settled_by": reference_texts(prompt.doc) if spec.stop_when_saturated else None,
        },
        recipe=spec.recipe,
    )


def _compute(
    spec: GenerateSpec,
    assets: Path,
    maps: dict[str, Path],
    shas: dict[str, str],
    identity: str,
    batches: Sequence[Batch],
    store: RowStore,
) -> dict[str, Any]:
    """Decodes `batches` and adds their missing rows to the store; returns facts for the record."""
    from tqdm import tqdm

    from residual_mass.model.engine import SharedPrefillEngine

    backbone = load_backbone(spec.backbone, assets)
    assert backbone.identity == identity
    logger.info("%s on %s, %s", spec.backbone.model_id, backbone.device, spec.backbone.dtype)
    phi = {label: PhiMaps.load(path) for label, path in maps.items()}
    nominal = tokens_of(spec.length) if spec.budget_length == "nominal" else None
    engine = SharedPrefillEngine(backbone, spec.arms, spec.anchors, phi, nominal)
    limit = BatchLimit(spec.batch_tokens)
    with tqdm(total=sum(len(batch.examples) for batch in batches), unit="example") as bar:
        for batch in batches:
            generations = _decoded(spec, engine, backbone.tokenizer, batch.examples, limit)
            rows = _rows(spec.arms, batch, generations, backbone, shas)
            store.append(row for row in rows if row["key"] not in store.rows)
            rate = engine.work.decode_rows / max(engine.work.decode_seconds, 1e-9)
            first, *more = dict.fromkeys(example.prompt.task for example in batch.examples)
            bar.set_postfix_str(f"{first}{f' and {len(more)} more' if more else ''}, {rate:.1f} tokens/s")
            bar.update(len(batch.examples))
    return {"device": backbone.device, "batch_tokens_used": limit.used, **asdict(engine.work)}


@dataclass
class BatchLimit:
    """Memory for a batch.

    Attributes:
        tokens: prompt tokens, padding included, that are assumed to fit.
        used: tokens of the largest decoded batch.
    """

    tokens: int
    used: int = 0


def _decoded(
    spec: GenerateSpec, engine: SharedPrefillEngine, tokenizer: Any, examples: Sequence[Example], limit: BatchLimit
) -> list[list[Generation]]:
    """Generations by [example][arm]. After running out of memory, this and later batches are decoded in smaller parts.

    Raises:
        ValueError: a single example does not fit, or its values are not finite.
    """
    from residual_mass.model.engine import NotFiniteError

    generations: list[list[Generation]] = []
    while rest := examples[len(generations) :]:
        part = rest[: _fitting(rest, limit.tokens)]

        def settled(example: int, tokens: list[int], part: Sequence[Example] = part) -> bool:
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            return saturated(spec.benchmark, part[example].prompt.doc, text)

        stops = settled if spec.stop_when_saturated else None
        try:
            generations += engine.generate([example.ids for example in part], [e.limit for e in part], stops)
            limit.used = max(limit.used, _padded(part))
            continue
        except torch.OutOfMemoryError as error:
            if len(part) == 1:
                name = f"{part[0].prompt.task} example {part[0].prompt.index}"
                raise ValueError(
                    f"{name}: out of memory with this prompt alone ({len(part[0].ids)} tokens, {len(spec.arms)} arms): "
                    f"{str(error).partition('. ')[0]}; use a device with more memory, or shorter prompts (truncate_to)"
                ) from None
        except NotFiniteError as error:
            prompt = part[error.prompt].prompt
            raise ValueError(f"{prompt.task} example {prompt.index}: {error}") from None
        torch.cuda.empty_cache()  # only here, after the tensors of the failed attempt are released
        limit.tokens = _padded(part) // 2
        logger.warning(
            "out of memory with %d prompts of %d tokens together: continuing with at most %d tokens (batch_tokens)",
            len(part), _padded(part), limit.tokens,
        )  # fmt: skip
    return generations


def _rows(
    arms: Sequence[ArmSpec],
    batch: Batch,
    generations: Sequence[Sequence[Generation]],
    backbone: Backbone,
    shas: dict[str, str],
) -> Iterator[Row]:
    for (e, example), (a, arm) in product(enumerate(batch.examples), enumerate(arms)):
        generation, prompt = generations[e][a], example.prompt
        text = backbone.tokenizer.decode(generation.tokens, skip_special_tokens=True)
        yield {
            "key": batch.keys[e][a],
            **_known_fields(example, arm, shas),
            "k": generation.k,
            "text": cut_at(text, prompt.stop),
            "tokens": generation.tokens,
            "finish": generation.finish,
        }


def _known_fields(example: Example, arm: ArmSpec, shas: dict[str, str]) -> Row:
    """The fields of a row that are known before decoding."""
    return {
        "task": example.prompt.task,
        "index": example.prompt.index,
        "method": arm.method,
        "budget_percent": arm.budget_percent,
        "maps": arm.maps,
        "prompt_tokens": len(example.ids),
        "cut_tokens": example.cut,
        "phi_sha": shas[arm.maps] if arm.maps else None,
        "prompt_sha": example.prompt.sha256,
    }


def cut_at(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first occurrence of any of the strings `stop`."""
    return text[: min((text.index(s) for s in stop if s in text), default=len(text))]
