"""Generations of every arm for every frozen prompt; rows in the store are not decoded again.

Batches never depend on the store, so that an interrupted run ends with the bytes of an undisturbed one (unless memory
runs out and batches are halved). A batch with a missing row is decoded whole, and its missing rows are added.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from residual_mass.benchmarks.catalogue import saturated
from residual_mass.benchmarks.store import GENERATED, Row, RowStore, row_key
from residual_mass.files import jsonl, sha256_of, sha256_text, write_text
from residual_mass.model.loading import backbone_identity, encode, encode_chat, load_backbone, load_tokenizer
from residual_mass.model.phi_maps import PhiMaps, files_by_label
from residual_mass.provenance import Record
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.sections import Decoding
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import GenerateSpec
from residual_mass.texts.corpora import special_prefix
from residual_mass.texts.frozen_prompts import Prompt, load_manifest, load_prompts, require_prompts_of

if TYPE_CHECKING:
    from residual_mass.decode.engine import Generation, SharedPrefillEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """A frozen prompt, ready to be decoded.

    Attributes:
        ids: token ids, without the `cut` tokens removed after BOS or after the chat template's opening.
        limit: maximum number of generated tokens.
    """

    prompt: Prompt
    ids: list[int]
    cut: int
    limit: int


@dataclass(frozen=True)
class Wanted:
    """An example, and its row under each arm as far as it is known before decoding."""

    example: Example
    rows: list[Row]

    @property
    def name(self) -> str:
        return f"{self.example.prompt.task} example {self.example.prompt.index}"


def run(spec: GenerateSpec, assets: Path, prompts: Path, phi: Sequence[Path], store: Path, out: Path) -> None:
    """The `generate` stage: adds the missing rows to `store`, then writes all rows of `spec` to `out`, ordered by task,
    example and arm.

    Args:
        phi: files of the feature maps, in the order of `spec.maps`.
    """
    record = Record("generate", spec, [assets / MANIFEST, prompts, *phi])
    maps = files_by_label(phi, spec.maps, spec.arms)
    _require_trained_at(spec)
    require_prompts_of(prompts, spec.benchmark, spec.length, spec.backbone.tokenizer)
    left_out = load_manifest(prompts)["left_out"]
    for task in (task for task in spec.tasks if task in left_out):
        logger.info("%s is left out: %s", task, left_out[task])
    frozen = [load_prompts(prompts, task, spec.examples) for task in spec.tasks if task not in left_out]
    identity, source = backbone_identity(spec.backbone, assets), spec.backbone
    tokenizer = load_tokenizer(source.model_id, source.revision, source.source, assets)
    shas = {label: sha256_of(path) for label, path in maps.items()}
    examples = [encoded(spec, spec.truncate_to, prompt, tokenizer) for of_task in frozen for prompt in of_task]
    wanted = [Wanted(x, [_known(spec, x, arm, identity, shas) for arm in spec.arms]) for x in examples]
    batches = list(_batches(wanted, spec.batch_tokens))
    _warn_of_extrapolation(spec, [len(example.ids) for example in examples])
    with RowStore(store, GENERATED) as rows:
        todo = [batch for batch in batches if any(row["key"] not in rows.rows for item in batch for row in item.rows)]
        # Longest first, so that out of memory shows at once and the estimated time left errs upwards.
        todo.sort(key=_longest, reverse=True)
        logger.info("%d of %d batches to compute; %d rows in %s", len(todo), len(batches), len(rows.rows), store)
        facts = _compute(spec, assets, maps, todo, rows) if todo else {}
        # What a key determines is taken from the spec, so that no damage of the store reaches later stages.
        write_text(out, jsonl(rows.rows[row["key"]] | row for item in wanted for row in item.rows))
    record.write(out, identity=identity, batches=len(batches), batches_computed=len(todo), **facts)


def _require_trained_at(spec: GenerateSpec) -> None:
    """Raises ValueError for maps that were trained on less than the prompts' length: the nominal one, or `truncate_to`
    if budgets do not use the nominal one.
    """
    key = "length" if spec.budget_length == "nominal" else "truncate_to"
    label = spec.length if key == "length" else spec.truncate_to
    for maps in spec.maps:
        if tokens_of(label) > maps.length and not spec.allow_extrapolation:
            raise ValueError(
                f"{key} {label}: longer than what the maps {maps.label} were trained on ({maps.length}); "
                "train longer ones or set allow_extrapolation"
            )


def _warn_of_extrapolation(spec: GenerateSpec, lengths: Sequence[int]) -> None:
    """Warns of prompts longer than the maps' training length, as templates and few-shot examples lengthen prompts."""
    for maps in spec.maps:
        beyond = [length for length in lengths if length > maps.length]
        if beyond and not spec.allow_extrapolation:
            logger.warning(
                "%d of %d prompts are longer than the %d tokens that the maps %s were trained on, the longest %d",
                len(beyond), len(lengths), maps.length, maps.label, max(beyond),
            )  # fmt: skip


def _known(spec: GenerateSpec, example: Example, arm: ArmSpec, identity: str, shas: dict[str, str]) -> Row:
    prompt = example.prompt
    key = row_key(
        spec, arm, identity, shas, tokens_of(spec.length) if spec.budget_length == "nominal" else None,
        task=prompt.task, index=prompt.index, prompt=prompt.sha256, ids=sha256_text(json.dumps(example.ids)),
        decoding={
            "greedy": True, "max_new_tokens": example.limit, "stop": prompt.stop,
            "settled_by": reference_texts(prompt.doc) if spec.stop_when_saturated else None,
        },
    )  # fmt: skip
    return {
        "key": key, "task": prompt.task, "index": prompt.index, "method": arm.method,
        "budget_percent": arm.budget_percent, "maps": arm.maps, "prompt_tokens": len(example.ids),
        "cut_tokens": example.cut, "phi_sha": shas.get(arm.maps or ""), "prompt_sha": prompt.sha256,
    }  # fmt: skip


def _batches(wanted: Sequence[Wanted], tokens: int) -> Iterator[list[Wanted]]:
    """Yields batches of examples with similar answer lengths, then similar prompt lengths. A step costs little more for
    many rows than for few, so batches should stay full to their end, with little padding.
    """
    rest = sorted(wanted, key=lambda item: (-item.example.limit, -len(item.example.ids)))
    while rest:
        size = _fitting(rest, tokens)
        yield rest[:size]
        rest = rest[size:]


def _fitting(batch: Sequence[Wanted], tokens: int) -> int:
    """Returns how many of the first examples, at least one, fit into `tokens` prompt tokens, padding included."""
    longest = accumulate((len(item.example.ids) for item in batch), max)
    return max(1, sum(size * length <= tokens for size, length in enumerate(longest, start=1)))


def _longest(batch: Sequence[Wanted]) -> int:
    return max(len(item.example.ids) for item in batch)


def _compute(
    spec: GenerateSpec, assets: Path, maps: dict[str, Path], batches: Sequence[list[Wanted]], store: RowStore
) -> dict[str, Any]:
    """Decodes `batches` and adds their missing rows to the store; returns facts for the record."""
    from tqdm import tqdm

    from residual_mass.decode.engine import SharedPrefillEngine

    backbone = load_backbone(spec.backbone, assets)
    logger.info("%s on %s, %s", spec.backbone.model_id, backbone.device, spec.backbone.dtype)
    phi = {label: PhiMaps.load(path) for label, path in maps.items()}
    nominal = tokens_of(spec.length) if spec.budget_length == "nominal" else None
    engine = SharedPrefillEngine(backbone, spec.arms, spec.anchors, phi, nominal)
    room, decode = spec.batch_tokens, backbone.tokenizer.decode
    with tqdm(total=sum(map(len, batches)), unit="example") as bar:
        for batch in batches:
            generations, room = _decoded(spec, engine, backbone.tokenizer, batch, room)
            rows = (
                {**row, "k": generation.k, "tokens": generation.tokens, "finish": generation.finish,
                 "text": cut_at(decode(generation.tokens, skip_special_tokens=True), item.example.prompt.stop)}
                for item, by_arm in zip(batch, generations, strict=True)
                for row, generation in zip(item.rows, by_arm, strict=True)
                if row["key"] not in store.rows
            )  # fmt: skip
            store.append(rows)
            rate = engine.work.decode_rows / max(engine.work.decode_seconds, 1e-9)
            first, *more = dict.fromkeys(item.example.prompt.task for item in batch)
            bar.set_postfix_str(f"{first}{f' and {len(more)} more' if more else ''}, {rate:.1f} tokens/s")
            bar.update(len(batch))
    return {"device": backbone.device, **asdict(engine.work)}


def _decoded(
    spec: GenerateSpec, engine: SharedPrefillEngine, tokenizer: Any, batch: Sequence[Wanted], room: int
) -> tuple[list[list[Generation]], int]:
    """Returns generations by [example][arm], and how many prompt tokens, padding included, are assumed to fit from here
    on: half of `room` or less after running out of memory.

    Raises:
        ValueError: a single example does not fit, or its values are not finite.
    """
    from residual_mass.decode.engine import NotFiniteError

    generations: list[list[Generation]] = []
    while rest := batch[len(generations) :]:
        part = rest[: _fitting(rest, room)]
        examples = [item.example for item in part]

        def settled(number: int, tokens: list[int], examples: Sequence[Example] = examples) -> bool:
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            return saturated(spec.benchmark, examples[number].prompt.doc, text)

        stops = settled if spec.stop_when_saturated else None
        try:
            generations += engine.generate([x.ids for x in examples], [x.limit for x in examples], stops)
            continue
        except torch.OutOfMemoryError as error:
            padded = len(part) * _longest(part)
            if len(part) == 1:
                needed, reason = f"{padded} tokens, {len(spec.arms)} arms", str(error).partition(". ")[0]
                raise ValueError(
                    f"{part[0].name}: out of memory with this prompt alone ({needed}): {reason}; use a device with "
                    "more memory, or shorter prompts (truncate_to)"
                ) from None
        except NotFiniteError as error:
            raise ValueError(f"{part[error.prompt].name}: {error}") from None
        torch.cuda.empty_cache()  # only here, after the tensors of the failed attempt are released
        room = padded // 2
        logger.warning(
            "out of memory with %d prompts of %d tokens together: continuing with at most %d tokens (batch_tokens)",
            len(part), padded, room,
        )  # fmt: skip
    return generations, room


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Returns `text` up to the first occurrence of any of the strings `stop`."""
    return text[: min((text.index(s) for s in stop if s in text), default=len(text))]


# ---- prompts as tokens -----------------------------------------------------------------------------------------------


def encoded(decoding: Decoding, truncate_to: str, prompt: Prompt, tokenizer: Any) -> Example:
    """Returns the prompt's tokens, cut on the left where they leave no room for the answer within `truncate_to`.

    Raises:
        ValueError: the answer alone is longer than `truncate_to`.
    """
    limit = prompt.max_generation_tokens
    if decoding.answer_margin is not None:  # references bound the answer
        references = [tokenizer(text, add_special_tokens=False).input_ids for text in reference_texts(prompt.doc)]
        limit = min(limit, max(map(len, references)) + decoding.answer_margin)
    room = tokens_of(truncate_to) - limit
    if room < 1:
        raise ValueError(
            f"truncate_to {truncate_to}: no room for a prompt in addition to the {limit} answer tokens of {prompt.task}"
        )
    if decoding.chat_template:
        ids, front = encode_chat(tokenizer, prompt.prompt)
    else:
        ids, front = encode(tokenizer, prompt.prompt), special_prefix(tokenizer)
    ids, cut = cut_to(ids, room, front)
    return Example(prompt, ids, cut, limit)


def cut_to(ids: list[int], room: int, front: Sequence[int]) -> tuple[list[int], int]:
    """Cuts `ids` on the left to `room` tokens; also returns the number of tokens removed. `front` is kept: without its
    BOS, a prompt loses its strongest attention sink.
    """
    cut = max(0, len(ids) - room)
    return ([*front, *ids[len(front) + cut :]] if cut else ids), cut


def reference_texts(doc: dict[str, Any]) -> list[str]:
    """Returns the right answers: RULER asks for all of its `outputs` at once, LongBench for one of its `answers`."""
    if "outputs" in doc:
        return [" ".join(doc["outputs"])]
    return list(doc["answers"]) if "answers" in doc else [doc["target"]]
