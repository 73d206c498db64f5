"""Generations of every arm for every frozen prompt; what the store holds is not decoded again.

The unit is a batch: its composition never depends on the store, so that an interrupted run ends with the bytes of an
undisturbed one. A batch that lacks a row is decoded whole, and the rows it lacked are added.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residual_mass.backbones.loading import backbone_identity, load_backbone, load_tokenizer
from residual_mass.benchmarks.prompts import Prompt, load_manifest, load_prompts
from residual_mass.benchmarks.store import GenerationStore, Row, row_key
from residual_mass.files import jsonl, sha256_of, write_meta, write_text
from residual_mass.specs import ArmSpec, GenerateSpec, to_json, tokens_of

if TYPE_CHECKING:
    from residual_mass.backbones.engine import Generation
    from residual_mass.backbones.loading import Backbone

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Consecutive examples of one task, decoded together under all arms whatever the store already holds."""

    prompts: list[Prompt]
    keys: list[list[str]]
    """Row keys by [example][arm]."""
    limits: list[int]
    """Generated tokens at most, per example."""

    def missing_from(self, store: GenerationStore) -> bool:
        return any(key not in store.rows for example in self.keys for key in example)


def run(spec: GenerateSpec, assets: Path, prompts: Path, phi: Path, store: Path, out: Path) -> None:
    """Computes the missing rows into `store`, then writes all rows of `spec` to `out`: by task, example, arm."""
    started = time.monotonic()
    _check_lengths(spec)
    tasks = _tasks_there(spec, prompts)
    examples = {task: load_prompts(prompts, task, spec.examples) for task in tasks}
    phi_sha = _sha256_of(phi, "train the phi maps first") if any(arm.uses_phi for arm in spec.arms) else None
    identity = backbone_identity(spec.backbone, assets)
    source = spec.backbone
    tokenizer = load_tokenizer(source.model_id, source.revision, source.source, assets)
    batches = [batch for task in tasks for batch in _batches(spec, examples[task], tokenizer, identity, phi_sha)]
    with GenerationStore(store) as rows:
        todo = [batch for batch in batches if batch.missing_from(rows)]
        logger.info("%d of %d batches to compute; %d rows in %s", len(todo), len(batches), len(rows.rows), store)
        ran_on = _compute(spec, assets, phi, phi_sha, identity, todo, rows) if todo else {}
        write_text(out, jsonl(rows.rows[key] for batch in batches for example in batch.keys for key in example))
    write_meta(out, spec=json.loads(to_json(spec)), phi_sha=phi_sha, seconds=time.monotonic() - started, **ran_on)


def _check_lengths(spec: GenerateSpec) -> None:
    length = tokens_of(spec.length)
    if length > spec.backbone.context:
        context = f"the context of {spec.backbone.name} ({spec.backbone.context} tokens)"
        raise ValueError(f"length {spec.length}: longer than {context}; choose a shorter one")
    longer = length > spec.maps.length and any(arm.uses_phi for arm in spec.arms)
    if longer and not spec.allow_extrapolation:
        raise ValueError(
            f"length {spec.length}: longer than what the maps {spec.maps.label} were trained on ({spec.maps.length}); "
            "train longer ones or set allow_extrapolation"
        )


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


def _sha256_of(path: Path, remedy: str) -> str:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {remedy}")
    return sha256_of(path)


def _batches(
    spec: GenerateSpec, prompts: Sequence[Prompt], tokenizer: Any, identity: str, phi_sha: str | None
) -> Iterator[Batch]:
    for start in range(0, len(prompts), spec.batch_examples):
        batch = list(prompts[start : start + spec.batch_examples])
        limits = [_limit(prompt, tokenizer, spec.answer_margin) for prompt in batch]
        keys = [
            [_key(spec, prompt, arm, limit, identity, phi_sha) for arm in spec.arms]
            for prompt, limit in zip(batch, limits, strict=True)
        ]
        yield Batch(batch, keys, limits)


def _limit(prompt: Prompt, tokenizer: Any, answer_margin: int | None) -> int:
    """Generated tokens at most: the harness's limit, or less where the references tell how long an answer can be."""
    if answer_margin is None:
        return prompt.max_generation_tokens
    references = tokenizer(" ".join(prompt.doc["outputs"]), add_special_tokens=False).input_ids
    return min(prompt.max_generation_tokens, len(references) + answer_margin)


def _key(spec: GenerateSpec, prompt: Prompt, arm: ArmSpec, limit: int, identity: str, phi_sha: str | None) -> str:
    return row_key(
        task=prompt.task,
        index=prompt.index,
        prompt=prompt.sha256,
        backbone=identity,
        phi=phi_sha if arm.uses_phi else None,
        arm=asdict(arm),
        anchors=asdict(spec.anchors),
        nominal_length=_nominal_length(spec),
        decoding={"greedy": True, "max_new_tokens": limit, "stop": prompt.stop},
        recipe=spec.recipe,
    )


def _nominal_length(spec: GenerateSpec) -> int | None:
    return tokens_of(spec.length) if spec.budget_length == "nominal" else None


def _compute(
    spec: GenerateSpec,
    assets: Path,
    phi: Path,
    phi_sha: str | None,
    identity: str,
    batches: Sequence[Batch],
    store: GenerationStore,
) -> dict[str, Any]:
    """Decodes `batches`, adds the rows that the store lacks, and tells what it ran on."""
    from tqdm import tqdm

    from residual_mass.backbones.engine import SharedPrefillEngine
    from residual_mass.backbones.phi_maps import PhiMaps

    backbone = load_backbone(spec.backbone, assets)
    assert backbone.identity == identity
    logger.info("%s on %s, %s", spec.backbone.model_id, backbone.device, spec.backbone.dtype)
    maps = PhiMaps.load(phi) if phi_sha else None
    engine = SharedPrefillEngine(backbone, spec.arms, spec.anchors, maps, _nominal_length(spec))
    decoded, started = 0, time.monotonic()
    with tqdm(total=sum(len(batch.prompts) for batch in batches), unit="example") as bar:
        for batch in batches:
            ids = [backbone.encode(prompt.prompt) for prompt in batch.prompts]
            generations = engine.generate(ids, max(batch.limits))
            rows = list(_rows(spec.arms, batch, [len(i) for i in ids], generations, backbone, phi_sha))
            store.append(row for row in rows if row["key"] not in store.rows)
            decoded += sum(len(row["tokens"]) for row in rows)
            bar.set_postfix_str(f"{batch.prompts[0].task}, {decoded / (time.monotonic() - started):.1f} tokens/s")
            bar.update(len(batch.prompts))
    return {"device": str(backbone.device), "decoded_tokens": decoded, "decode_seconds": time.monotonic() - started}


def _rows(
    arms: Sequence[ArmSpec],
    batch: Batch,
    prompt_tokens: Sequence[int],
    generations: Sequence[Sequence[Generation]],
    backbone: Backbone,
    phi_sha: str | None,
) -> Iterator[Row]:
    for (e, prompt), (a, arm) in product(enumerate(batch.prompts), enumerate(arms)):
        generation = generations[e][a].cut(batch.limits[e])
        text = backbone.tokenizer.decode(generation.tokens, skip_special_tokens=True)
        yield {
            "key": batch.keys[e][a],
            "task": prompt.task,
            "index": prompt.index,
            "method": arm.method,
            "budget_percent": arm.budget_percent,
            "k": generation.k,
            "prompt_tokens": prompt_tokens[e],
            "text": cut_at(text, prompt.stop),
            "tokens": generation.tokens,
            "finish": generation.finish,
            "phi_sha": phi_sha if arm.uses_phi else None,
            "prompt_sha": prompt.sha256,
        }


def cut_at(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first occurrence of any of the strings `stop`."""
    return text[: min((text.index(s) for s in stop if s in text), default=len(text))]
