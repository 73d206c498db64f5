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
from residual_mass.benchmarks.store import GENERATED_FIELDS, RowStore, StoredRow, row_key
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

log = logging.getLogger(__name__)


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
class PendingExample:
    """An example that is to be decoded, and its row under each arm as far as it is known before."""

    example: Example
    rows: list[StoredRow]

    def lacks_rows(self, store: RowStore) -> bool:
        return any(row["key"] not in store.rows for row in self.rows)

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
    examples = _examples(spec, prompts, assets)
    _warn_of_extrapolation(spec, [len(example.ids) for example in examples])
    identity = backbone_identity(spec.backbone, assets)
    shas = {label: sha256_of(path) for label, path in maps.items()}
    pending = []
    for example in examples:
        rows = [_row_before_decoding(spec, example, arm, identity, shas) for arm in spec.arms]
        pending.append(PendingExample(example, rows))
    batches = list(_batches(pending, spec.batch_tokens))
    with RowStore(store, GENERATED_FIELDS) as stored:
        todo = [batch for batch in batches if any(item.lacks_rows(stored) for item in batch)]
        # Longest first, so that out of memory shows at once and the estimated time left errs upwards.
        todo.sort(key=_longest, reverse=True)
        log.info("%d of %d batches to compute; %d rows in %s", len(todo), len(batches), len(stored.rows), store)
        work = _compute(spec, assets, maps, todo, stored) if todo else {}
        written = []
        for item in pending:
            # What a key determines is taken from the spec, so that no damage of the store reaches later stages.
            written += [stored.rows[row["key"]] | row for row in item.rows]
        write_text(out, jsonl(written))
    record.write(out, identity=identity, batches=len(batches), batches_computed=len(todo), **work)


def _examples(spec: GenerateSpec, prompts: Path, assets: Path) -> list[Example]:
    """Returns the examples of the spec's tasks; logs the tasks that the frozen prompts leave out."""
    left_out = load_manifest(prompts)["left_out"]
    backbone = spec.backbone
    tokenizer = load_tokenizer(backbone.model_id, backbone.revision, backbone.source, assets)
    examples = []
    for task in spec.tasks:
        if task in left_out:
            log.info("%s is left out: %s", task, left_out[task])
            continue
        for prompt in load_prompts(prompts, task, spec.examples):
            examples.append(encoded(spec, spec.truncate_to, prompt, tokenizer))
    return examples


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
            log.warning(
                "%d of %d prompts are longer than the %d tokens that the maps %s were trained on, the longest %d",
                len(beyond), len(lengths), maps.length, maps.label, max(beyond),
            )  # fmt: skip


def _row_before_decoding(
    spec: GenerateSpec, example: Example, arm: ArmSpec, identity: str, shas: dict[str, str]
) -> StoredRow:
    """Returns the key of a row, which is of everything that determines its text, and what is known of the row."""
    prompt = example.prompt
    decoding = {
        "greedy": True,
        "max_new_tokens": example.limit,
        "stop": prompt.stop,
        "settled_by": reference_texts(prompt.doc) if spec.stop_when_saturated else None,
    }
    ids = sha256_text(json.dumps(example.ids))
    of_example = {"task": prompt.task, "index": prompt.index, "prompt": prompt.sha256, "ids": ids}
    return {
        "key": row_key(spec, arm, identity, shas, _nominal_length(spec), decoding=decoding, **of_example),
        "task": prompt.task,
        "index": prompt.index,
        "method": arm.method,
        "budget_percent": arm.budget_percent,
        "maps": arm.maps,
        "prompt_tokens": len(example.ids),
        "cut_tokens": example.cut,
        "phi_sha": shas.get(arm.maps or ""),
        "prompt_sha": prompt.sha256,
    }


def _nominal_length(spec: GenerateSpec) -> int | None:
    """Returns L in the budget formula; None takes the prompt's own length."""
    return tokens_of(spec.length) if spec.budget_length == "nominal" else None


def _batches(pending: Sequence[PendingExample], tokens: int) -> Iterator[list[PendingExample]]:
    """Yields batches of examples with similar answer lengths, then similar prompt lengths. A step costs little more for
    many rows than for few, so batches should stay full to their end, with little padding.
    """

    def lengths(item: PendingExample) -> tuple[int, int]:
        return item.example.limit, len(item.example.ids)

    rest = sorted(pending, key=lengths, reverse=True)
    while rest:
        size = _fitting(rest, tokens)
        yield rest[:size]
        rest = rest[size:]


def _fitting(batch: Sequence[PendingExample], tokens: int) -> int:
    """Returns how many of the first examples, at least one, fit into `tokens` prompt tokens, padding included."""
    lengths = [len(item.example.ids) for item in batch]
    fitting = 0
    for size, longest in enumerate(accumulate(lengths, max), start=1):
        # The product never falls, so the number of sizes that fit is the largest of them.
        fitting += size * longest <= tokens
    return max(1, fitting)


def _longest(batch: Sequence[PendingExample]) -> int:
    return max(len(item.example.ids) for item in batch)


def _compute(
    spec: GenerateSpec, assets: Path, maps: dict[str, Path], batches: Sequence[list[PendingExample]], store: RowStore
) -> dict[str, Any]:
    """Decodes `batches` and adds their missing rows to the store; returns facts for the record."""
    from tqdm import tqdm

    from residual_mass.decode.engine import SharedPrefillEngine

    backbone = load_backbone(spec.backbone, assets)
    log.info("%s on %s, %s", spec.backbone.model_id, backbone.device, spec.backbone.dtype)
    phi = {label: PhiMaps.load(path) for label, path in maps.items()}
    engine = SharedPrefillEngine(backbone, spec.arms, spec.anchors, phi, _nominal_length(spec))
    for batch in batches:
        engine.require_constant_frequencies(*_prompts_and_limits([item.example for item in batch]))
    room = spec.batch_tokens
    with tqdm(total=sum(map(len, batches)), unit="example") as bar:
        for batch in batches:
            generations, room = _decoded(spec, engine, backbone.tokenizer, batch, room)
            rows = []
            for item, by_arm in zip(batch, generations, strict=True):
                rows += _decoded_rows(item, by_arm, backbone.tokenizer)
            store.append(row for row in rows if row["key"] not in store.rows)
            rate = engine.work.decode_rows / max(engine.work.decode_seconds, 1e-9)
            first, *more = dict.fromkeys(item.example.prompt.task for item in batch)
            others = f" and {len(more)} more" if more else ""
            bar.set_postfix_str(f"{first}{others}, {rate:.1f} tokens/s")
            bar.update(len(batch))
    return {"device": backbone.device, **asdict(engine.work)}


def _decoded_rows(pending: PendingExample, generations: Sequence[Generation], tokenizer: Any) -> list[StoredRow]:
    """Returns the rows of an example with what was generated under each arm."""
    stop = pending.example.prompt.stop
    rows = []
    for row, generation in zip(pending.rows, generations, strict=True):
        text = tokenizer.decode(generation.tokens, skip_special_tokens=True)
        decoded = {"k": generation.k, "tokens": generation.tokens, "finish": generation.finish}
        rows.append({**row, **decoded, "text": cut_at(text, stop)})
    return rows


def _decoded(
    spec: GenerateSpec, engine: SharedPrefillEngine, tokenizer: Any, batch: Sequence[PendingExample], room: int
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

        # A default binds this part's examples; a closure would see those of later parts.
        def settled(number: int, tokens: list[int], examples: Sequence[Example] = examples) -> bool:
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            return saturated(spec.benchmark, examples[number].prompt.doc, text)

        prompts, limits = _prompts_and_limits(examples)
        try:
            generations += engine.generate(prompts, limits, settled if spec.stop_when_saturated else None)
            continue
        except torch.OutOfMemoryError as error:
            padded = len(part) * _longest(part)
            if len(part) == 1:
                needed = f"{padded} tokens, {len(spec.arms)} arms"
                reason = str(error).partition(". ")[0]
                raise ValueError(
                    f"{part[0].name}: out of memory with this prompt alone ({needed}): {reason}; use a device with "
                    "more memory, or shorter prompts (truncate_to)"
                ) from None
        except NotFiniteError as error:
            raise ValueError(f"{part[error.prompt].name}: {error}") from None
        torch.cuda.empty_cache()  # only here, after the tensors of the failed attempt are released
        room = padded // 2
        log.warning(
            "out of memory with %d prompts of %d tokens together: continuing with at most %d tokens (batch_tokens)",
            len(part), padded, room,
        )  # fmt: skip
    return generations, room


def _prompts_and_limits(examples: Sequence[Example]) -> tuple[list[list[int]], list[int]]:
    """Returns the token ids of examples, and the most tokens of their answers."""
    return [example.ids for example in examples], [example.limit for example in examples]


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Returns `text` up to the first occurrence of any of the strings `stop`."""
    ends = [text.index(word) for word in stop if word in text]
    return text[: min(ends, default=len(text))]


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
    if cut:
        ids = [*front, *ids[len(front) + cut :]]
    return ids, cut


def reference_texts(doc: dict[str, Any]) -> list[str]:
    """Returns the right answers: RULER asks for all of its `outputs` at once, LongBench for one of its `answers`."""
    if "outputs" in doc:
        return [" ".join(doc["outputs"])]
    return list(doc["answers"]) if "answers" in doc else [doc["target"]]
