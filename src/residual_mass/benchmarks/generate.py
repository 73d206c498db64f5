"""Generations of every arm for every frozen prompt; what the store holds is not decoded again.

The unit is a batch: its composition never depends on the store, so that an interrupted run ends with the bytes of an
undisturbed one (unless memory runs out and batches are halved). A batch that lacks a row is decoded whole, and the rows
it lacked are added.
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

from residual_mass.backbones.loading import (
    backbone_identity,
    encode,
    encode_chat,
    load_backbone,
    load_tokenizer,
    special_prefix,
)
from residual_mass.backbones.phi_maps import PhiMaps, require_one_file_each
from residual_mass.benchmarks.scorers import saturated
from residual_mass.benchmarks.store import GenerationStore, Row, row_key
from residual_mass.core.settings import ArmSpec, MapsSpec, tokens_of
from residual_mass.files import jsonl, sha256_of, sha256_text, write_text
from residual_mass.frozen_prompts import Prompt, load_manifest, load_prompts
from residual_mass.provenance import MANIFEST, Record
from residual_mass.study.specs import GenerateSpec

if TYPE_CHECKING:
    from residual_mass.backbones.engine import Generation, Saturated, SharedPrefillEngine
    from residual_mass.backbones.loading import Backbone

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """A frozen prompt, ready to be decoded."""

    prompt: Prompt
    ids: list[int]
    """Token ids, `cut` of them taken out behind BOS or behind the chat template's opening."""
    cut: int
    limit: int
    """Generated tokens at most."""


@dataclass(frozen=True)
class Batch:
    """Examples of any tasks, decoded together under all arms whatever the store already holds."""

    examples: list[Example]
    keys: list[list[str]]
    """Row keys by [example][arm]."""

    def missing_from(self, store: GenerationStore) -> bool:
        return any(key not in store.rows for example in self.keys for key in example)


def run(spec: GenerateSpec, assets: Path, prompts: Path, phi: Sequence[Path], store: Path, out: Path) -> None:
    """Computes the missing rows into `store`, then writes all rows of `spec` to `out`: by task, example, arm.

    Args:
        phi: files of the feature maps, in the order of `spec.maps`.
    """
    record = Record("generate", spec, [assets / MANIFEST, prompts, *phi])
    maps = _maps_of(spec, phi)
    _check_lengths(spec)
    tasks = _tasks_there(spec, prompts)
    frozen = {task: load_prompts(prompts, task, spec.examples) for task in tasks}
    shas = {label: _sha256_of(path) for label, path in maps.items()}
    identity = backbone_identity(spec.backbone, assets)
    source = spec.backbone
    tokenizer = load_tokenizer(source.model_id, source.revision, source.source, assets)
    batches = list(_batches(spec, [one for task in tasks for one in frozen[task]], tokenizer, identity, shas))
    _tell_of_extrapolation(spec, batches)
    with GenerationStore(store) as rows:
        for batch in batches:
            for (e, example), (a, arm) in product(enumerate(batch.examples), enumerate(spec.arms)):
                rows.require(batch.keys[e][a], _known_fields(example, arm, shas))
        todo = sorted((batch for batch in batches if batch.missing_from(rows)), key=_longest, reverse=True)
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
    for arm in spec.arms:
        if arm.uses_phi and arm.maps not in files:
            raise ValueError(f"arm {arm.method}: maps {arm.maps!r} is not in spec.maps, which has {', '.join(files)}")
    return {maps.label: files[maps.label] for maps in _maps_used(spec)}


def _maps_used(spec: GenerateSpec) -> list[MapsSpec]:
    """Those of `spec.maps` that arms use."""
    used = {arm.maps for arm in spec.arms}
    return [maps for maps in spec.maps if maps.label in used]


def _longest(batch: Batch) -> int:
    """Longest first: what does not fit into memory fails at once, and the estimate of the time left errs upwards."""
    return max(len(example.ids) for example in batch.examples)


def _task_label(batch: Batch) -> str:
    """The first of its tasks, and how many more there are."""
    first, *more = dict.fromkeys(example.prompt.task for example in batch.examples)
    return f"{first} and {len(more)} more" if more else first


def _check_lengths(spec: GenerateSpec) -> None:
    """Prompts are as long as the label says, or without a nominal length as long as truncation lets them be."""
    key = "length" if spec.budget_length == "nominal" else "truncate_to"
    label = spec.length if key == "length" else spec.truncate_to
    if tokens_of(label) > spec.backbone.context:
        context = f"the context of {spec.backbone.name} ({spec.backbone.context} tokens)"
        raise ValueError(f"{key} {label}: longer than {context}; choose a shorter one")
    for maps in _maps_used(spec):
        if tokens_of(label) > maps.length and not spec.allow_extrapolation:
            raise ValueError(
                f"{key} {label}: longer than what the maps {maps.label} were trained on ({maps.length}); "
                "train longer ones or set allow_extrapolation"
            )


def _tell_of_extrapolation(spec: GenerateSpec, batches: Sequence[Batch]) -> None:
    """Template and few-shot examples may make a prompt longer than its label says."""
    lengths = [len(example.ids) for batch in batches for example in batch.examples]
    for maps in _maps_used(spec):
        beyond = [length for length in lengths if length > maps.length]
        if beyond and not spec.allow_extrapolation:
            logger.warning(
                "%d of %d prompts are longer than the %d tokens that the maps %s were trained on, the longest %d",
                len(beyond), len(lengths), maps.length, maps.label, max(beyond),
            )  # fmt: skip


def _tasks_there(spec: GenerateSpec, prompts: Path) -> list[str]:
    """The spec's tasks without those that the prompts leave out; raises ValueError for prompts of something else."""
    manifest = load_manifest(prompts)
    for key, wanted in (("benchmark", spec.benchmark), ("length", spec.length), ("tokenizer", spec.backbone.tokenizer)):
        if manifest[key] != wanted:
            raise ValueError(f"{prompts}: {key} is {manifest[key]}, not {wanted}; give --prompts those of {wanted}")
    for task in spec.tasks:
        if task in manifest["left_out"]:
            logger.info("%s is left out: %s", task, manifest["left_out"][task])
    return [task for task in spec.tasks if task not in manifest["left_out"]]


def _sha256_of(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; train the phi maps first")
    return sha256_of(path)


def _batches(
    spec: GenerateSpec, prompts: Sequence[Prompt], tokenizer: Any, identity: str, shas: dict[str, str]
) -> Iterator[Batch]:
    """Examples with answers of like length together, and among these prompts of like length: a step costs little more
    for many rows than for few, so that batches should stay full to their end, and hold little padding.
    """
    examples = sorted((_example(spec, prompt, tokenizer) for prompt in prompts), key=lambda e: (-e.limit, -len(e.ids)))
    while examples:
        size = _fitting(examples, spec.batch_tokens)
        batch, examples = examples[:size], examples[size:]
        yield Batch(batch, [[_key(spec, example, arm, identity, shas) for arm in spec.arms] for example in batch])


def _fitting(examples: Sequence[Example], tokens: int) -> int:
    """How many of the examples, the first at least, have so many prompt tokens together, padding included."""
    size = 1
    while size < len(examples) and _padded(examples[: size + 1]) <= tokens:
        size += 1
    return size


def _padded(examples: Sequence[Example]) -> int:
    return len(examples) * max(len(example.ids) for example in examples)


def _example(spec: GenerateSpec, prompt: Prompt, tokenizer: Any) -> Example:
    limit = _limit(spec, prompt, tokenizer)
    room = tokens_of(spec.truncate_to) - limit
    if room < 1:
        raise ValueError(
            f"truncate_to {spec.truncate_to}: no room for a prompt beside the {limit} answer tokens of {prompt.task}"
        )
    if spec.chat_template:
        ids, front = encode_chat(tokenizer, prompt.prompt)
    else:
        ids, front = encode(tokenizer, prompt.prompt), special_prefix(tokenizer)
    ids, cut = cut_to(ids, room, front)
    return Example(prompt, ids, cut, limit)


def cut_to(ids: list[int], room: int, front: list[int]) -> tuple[list[int], int]:
    """`ids` with tokens taken out on the left until `room` are left, and how many were; what stands in `front` stays,
    for a prompt without its BOS has lost its strongest attention sink.
    """
    cut = max(0, len(ids) - room)
    return (front + ids[len(front) + cut :] if cut else ids), cut


def _limit(spec: GenerateSpec, prompt: Prompt, tokenizer: Any) -> int:
    """Generated tokens at most: the harness's limit, or less where the references tell how long an answer can be."""
    if spec.answer_margin is None:
        return prompt.max_generation_tokens
    references = [tokenizer(text, add_special_tokens=False).input_ids for text in reference_texts(prompt.doc)]
    return min(prompt.max_generation_tokens, max(map(len, references)) + spec.answer_margin)


def reference_texts(doc: dict[str, Any]) -> list[str]:
    """What right answers look like: RULER asks for all of its `outputs` at once, LongBench for one of its `answers`."""
    if "outputs" in doc:
        return [" ".join(doc["outputs"])]
    return list(doc["answers"]) if "answers" in doc else [doc["target"]]


def _key(spec: GenerateSpec, example: Example, arm: ArmSpec, identity: str, shas: dict[str, str]) -> str:
    prompt = example.prompt
    return row_key(
        task=prompt.task,
        index=prompt.index,
        prompt=prompt.sha256,
        ids=sha256_text(json.dumps(example.ids)),
        backbone=identity,
        phi=shas[arm.maps] if arm.maps else None,
        arm={"method": arm.method, "budget_percent": arm.budget_percent},
        anchors=asdict(spec.anchors),
        nominal_length=_nominal_length(spec),
        decoding={
            "greedy": True,
            "max_new_tokens": example.limit,
            "stop": prompt.stop,
            "settled_by": reference_texts(prompt.doc) if spec.stop_when_saturated else None,
        },
        recipe=spec.recipe,
    )


def _nominal_length(spec: GenerateSpec) -> int | None:
    return tokens_of(spec.length) if spec.budget_length == "nominal" else None


def _compute(
    spec: GenerateSpec,
    assets: Path,
    maps: dict[str, Path],
    shas: dict[str, str],
    identity: str,
    batches: Sequence[Batch],
    store: GenerationStore,
) -> dict[str, Any]:
    """Decodes `batches`, adds the rows that the store lacks, and tells what it ran on."""
    from tqdm import tqdm

    from residual_mass.backbones.engine import SharedPrefillEngine

    backbone = load_backbone(spec.backbone, assets)
    assert backbone.identity == identity
    logger.info("%s on %s, %s", spec.backbone.model_id, backbone.device, spec.backbone.dtype)
    phi = {label: PhiMaps.load(path) for label, path in maps.items()}
    engine = SharedPrefillEngine(backbone, spec.arms, spec.anchors, phi, _nominal_length(spec))
    room = Room(spec.batch_tokens)
    with tqdm(total=sum(len(batch.examples) for batch in batches), unit="example") as bar:
        for batch in batches:
            generations = _decoded(spec, engine, backbone.tokenizer, batch.examples, room)
            rows = _rows(spec.arms, batch, generations, backbone, shas)
            store.append(row for row in rows if row["key"] not in store.rows)
            rate = engine.work.decode_rows / max(engine.work.decode_seconds, 1e-9)
            bar.set_postfix_str(f"{_task_label(batch)}, {rate:.1f} tokens/s")
            bar.update(len(batch.examples))
    return {"device": backbone.device, "batch_tokens_used": room.used, **asdict(engine.work)}


@dataclass
class Room:
    """Prompt tokens, padding included, that fit into memory together as far as is known."""

    tokens: int
    used: int = 0
    """By the largest batch that was decoded."""


def _decoded(
    spec: GenerateSpec, engine: SharedPrefillEngine, tokenizer: Any, examples: Sequence[Example], room: Room
) -> list[list[Generation]]:
    """Generations by [example][arm]. What turns out not to fit into the GPU's memory is decoded in smaller parts, here
    and in later batches.

    Raises:
        ValueError: one example alone does not fit, or its text cannot be had, see `NotFiniteError`.
    """
    from residual_mass.backbones.engine import NotFiniteError

    generations: list[list[Generation]] = []
    while rest := examples[len(generations) :]:
        part = rest[: _fitting(rest, room.tokens)]
        settled = _settled(spec, part, tokenizer) if spec.stop_when_saturated else None
        try:
            generations += engine.generate([example.ids for example in part], [e.limit for e in part], settled)
            room.used = max(room.used, _padded(part))
            continue
        except torch.OutOfMemoryError as error:
            if len(part) == 1:
                raise ValueError(_too_large(part[0], len(spec.arms), error)) from None
        except NotFiniteError as error:
            prompt = part[error.prompt].prompt
            raise ValueError(f"{prompt.task} example {prompt.index}: {error}") from None
        torch.cuda.empty_cache()  # only here, where nothing holds on to what the failed try has made
        room.tokens = _padded(part) // 2
        logger.warning(
            "out of memory with %d prompts of %d tokens together: from here on at most %d tokens, as with batch_tokens "
            "%d",
            len(part),
            _padded(part),
            room.tokens,
            room.tokens,
        )
    return generations


def _too_large(example: Example, arms: int, error: Exception) -> str:
    prompt = example.prompt
    reason = str(error).partition(". ")[0]
    return (
        f"{prompt.task} example {prompt.index}: out of memory with this prompt alone ({len(example.ids)} tokens, "
        f"{arms} arms): {reason}; use a device with more memory, or shorter prompts (truncate_to)"
    )


def _settled(spec: GenerateSpec, examples: Sequence[Example], tokenizer: Any) -> Saturated:
    def settled(example: int, tokens: list[int]) -> bool:
        prompt = examples[example].prompt
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return saturated(spec.benchmark, prompt.doc, text)

    return settled


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
    """What a row says before anything is decoded."""
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
