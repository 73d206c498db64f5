"""Forced continuations under every arm, compared with full attention by token; stored rows are not decoded again.

Texts are held-out documents with their own continuation, and a benchmark's prompts with their right answer and with the
greedy answer of full attention. The last token before a continuation is decoded and not prefilled, so that every token
of the continuation is predicted under the arm.

Shape letters: T = tokens of a continuation, V = vocabulary.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from residual_mass.benchmarks.generate import encoded
from residual_mass.benchmarks.store import ROW_REMEDY, RowStore, StoredRow, row_key
from residual_mass.files import sha256_of, sha256_text, write_parquet
from residual_mass.model.loading import Backbone, backbone_identity, load_backbone, load_tokenizer
from residual_mass.model.phi_maps import PhiMaps, files_by_label
from residual_mass.model.rotary import frequencies_of
from residual_mass.provenance import Record
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.columns import DENSE, FOLLOWING, FORCED_COLUMNS, GOLD, GREEDY
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import ForceSpec
from residual_mass.texts.corpora import held_out_corpus
from residual_mass.texts.frozen_prompts import (
    gold_answer,
    gold_continuation,
    load_manifest,
    load_prompts,
    require_prompts_of,
)

if TYPE_CHECKING:
    from residual_mass.decode.forced import ForcedDecoder

log = logging.getLogger(__name__)

PER_TOKEN = ("token", "nll", "full_nll", "kl", "same_top", "first")
"""Values of a stored row that are lists with one entry per token."""
FORCED_FIELDS = frozenset({"key", "k", *PER_TOKEN})
NATS_DECIMALS = 9
"""Decimal places of stored nats."""


@dataclass(frozen=True)
class Continuation:
    """A text and its continuation.

    Attributes:
        text: corpus or benchmark.
        task: of a benchmark, else empty.
        index: number of the document or of the example in its task.
        kind: one of FOLLOWING, GOLD, GREEDY.
        prompt: token ids before the continuation.
        answer: token ids of the continuation; None if full attention generates it.
        limit: maximum length of the continuation in tokens.
        nominal_length: L in the budget formula; None takes the prefix's own length.
        rows: the arms that it is decoded under, each with the state of its forced tokens.
    """

    text: str
    task: str
    index: int
    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None
    limit: int
    nominal_length: int | None
    rows: tuple[tuple[str, ArmSpec], ...]

    def key(self, spec: ForceSpec, arm: ArmSpec, state: str, identity: str, shas: Mapping[str, str]) -> str:
        answer = None if self.answer is None else sha256_text(json.dumps(self.answer))
        prompt = sha256_text(json.dumps(self.prompt))
        of_text = {"prompt": prompt, "answer": answer, "limit": self.limit, "state": state}
        return row_key(spec, arm, identity, shas, self.nominal_length, **of_text)

    @property
    def name(self) -> str:
        kind = "example" if self.task else "document"
        return f"{self.task or self.text} {kind} {self.index}"

    def seen(self, answer: Sequence[int]) -> Iterator[int]:
        """Yields for every token whether the prompt has it: 0 no, 1 the token, 2 the bigram that it ends."""
        tokens, bigrams = self._in_prompt
        for bigram in pairwise((self.prompt[-1], *answer)):
            # The prompt has the tokens of its bigrams, so the sum is 0, 1 or 2.
            yield (bigram[1] in tokens) + (bigram in bigrams)

    @cached_property
    def _in_prompt(self) -> tuple[set[int], set[tuple[int, int]]]:
        return set(self.prompt), set(pairwise(self.prompt))


@dataclass(frozen=True)
class ForcedRow:
    """One row: a continuation under an arm."""

    continuation: Continuation
    arm: ArmSpec
    state: str
    key: str


def run(spec: ForceSpec, assets: Path, prompts: Sequence[Path], phi: Sequence[Path], store: Path, out: Path) -> None:
    """The `force` stage: adds the missing rows to `store`, then writes a row per token to `out`.

    Args:
        prompts: manifests of the frozen prompts, in the order of `spec.asked`.
        phi: files of the feature maps, in the order of `spec.maps`.
    """
    record = Record("force", spec, [assets / MANIFEST, *prompts, *phi])
    maps = files_by_label(phi, spec.maps, (*spec.arms, *spec.arms_of_documents))
    source = spec.backbone
    tokenizer = load_tokenizer(source.model_id, source.revision, source.source, assets)
    identity = backbone_identity(source, assets)
    continuations = [*_documents(spec, tokenizer, assets), *_answers(spec, tokenizer, prompts)]

    shas = {label: sha256_of(path) for label, path in maps.items()}
    rows = []
    for continuation in continuations:
        for state, arm in continuation.rows:
            key = continuation.key(spec, arm, state, identity, shas)
            rows.append(ForcedRow(continuation, arm, state, key))
    with RowStore(store, FORCED_FIELDS) as stored:
        missing = [row for row in rows if row.key not in stored.rows]
        log.info("%d of %d rows to compute; %d in %s", len(missing), len(rows), len(stored.rows), store)
        device = _compute(spec, load_backbone(source, assets), maps, missing, stored) if missing else None
        tokens = pd.DataFrame(_token_rows(rows, stored, shas), columns=list(FORCED_COLUMNS))
        write_parquet(out, tokens)
    record.write(out, identity=identity, rows=len(rows), rows_computed=len(missing), device=device)


def _documents(spec: ForceSpec, tokenizer: Any, assets: Path) -> Iterator[Continuation]:
    """Yields the documents of the spec's held-out corpora."""
    length = tokens_of(spec.length)
    for corpus in spec.corpora:
        tokens = length + 1 + spec.tokens
        texts = held_out_corpus(corpus, tokenizer, tokens, spec.seed, assets)
        sequences = texts.disjoint(spec.documents)
        if len(sequences) < spec.documents:
            log.warning("%d documents instead of %d: corpus %s holds no more", len(sequences), spec.documents, corpus)
        yield from following(spec, corpus, sequences, spec.rows_of_document)


def following(
    spec: ForceSpec, text: str, sequences: Iterable[Sequence[int]], rows: tuple[tuple[str, ArmSpec], ...]
) -> Iterator[Continuation]:
    """Yields sequences of token ids as documents: a prefix of the length, one token, and the continuation."""
    length = tokens_of(spec.length)
    for index, ids in enumerate(sequences):
        prompt = tuple(ids[: length + 1])
        answer = tuple(ids[length + 1 :])
        yield Continuation(text, "", index, FOLLOWING, prompt, answer, spec.tokens, length, rows)


def _answers(spec: ForceSpec, tokenizer: Any, prompts: Sequence[Path]) -> Iterator[Continuation]:
    """Yields a benchmark's prompts, each with its right answer and with one that full attention generates."""
    for asked, manifest in zip(spec.asked, prompts, strict=True):
        content = load_manifest(manifest)
        require_prompts_of(manifest, asked.benchmark, spec.length, spec.backbone.tokenizer)
        for task, entry in content["tasks"].items():
            for prompt in load_prompts(manifest, task, min(asked.examples, entry["examples"])):
                example = encoded(asked, spec.truncate_to, prompt, tokenizer)
                right = gold_answer if asked.chat_template else gold_continuation  # no blank follows a template
                gold = tokenizer(right(task, prompt.doc), add_special_tokens=False).input_ids
                gold = gold[: spec.tokens]
                nominal = tokens_of(spec.length) if asked.budget_length == "nominal" else None
                place = (asked.benchmark, task, prompt.index)
                ids = tuple(example.ids)
                rows = spec.rows_of_answer
                if gold:  # an empty answer has no token to measure
                    yield Continuation(*place, GOLD, ids, tuple(gold), len(gold), nominal, rows)
                limit = min(example.limit, spec.tokens)
                yield Continuation(*place, GREEDY, ids, None, limit, nominal, rows)


def _compute(
    spec: ForceSpec,
    backbone: Backbone,
    maps: Mapping[str, Path],
    missing: Sequence[ForcedRow],
    store: RowStore,
) -> torch.device:
    """Computes the missing rows, prompt by prompt, and adds them to the store."""
    from tqdm import tqdm

    from residual_mass.decode.engine import NotFiniteError, SharedPrefillEngine
    from residual_mass.decode.forced import ForcedDecoder

    require_vocabulary(backbone, [(*row.continuation.prompt, *(row.continuation.answer or ())) for row in missing])
    frequencies = frequencies_of(backbone.model)
    for row in missing:
        frequencies.require_growing([len(row.continuation.prompt) - 1], [row.continuation.limit])
    log.info("%s on %s, %s", spec.backbone.model_id, backbone.device, spec.backbone.dtype)
    phi = {label: PhiMaps.load(path) for label, path in maps.items()}

    @cache
    def engine(arms: tuple[ArmSpec, ...], nominal: int | None) -> SharedPrefillEngine:
        return SharedPrefillEngine(backbone, arms, spec.anchors, phi, nominal)

    def prompt_of(row: ForcedRow) -> tuple[tuple[int, ...], int | None]:
        return row.continuation.prompt, row.continuation.nominal_length

    with tqdm(total=len(missing), unit="row") as bar:
        for (prompt, nominal), group in groupby(missing, prompt_of):
            rows = list(group)
            name = rows[0].continuation.name
            bar.set_postfix_str(name)
            arms = dict.fromkeys(row.arm for row in rows)
            try:
                decoder = ForcedDecoder(engine(tuple(arms), nominal), prompt[:-1])
                for done in _rows(decoder, rows):
                    store.append(done)
                    bar.update(len(done))
            except (NotFiniteError, torch.OutOfMemoryError) as error:
                raise ValueError(f"{name}: {str(error).partition('. ')[0]}") from None
    return backbone.device


def require_vocabulary(backbone: Backbone, sequences: Iterable[Sequence[int]]) -> None:
    """Raises ValueError where the tokenizer knows tokens that the model does not."""
    vocabulary = backbone.model.get_input_embeddings().num_embeddings
    largest = max(map(max, sequences))
    if largest >= vocabulary:
        raise ValueError(
            f"{backbone.spec.name}: the texts hold token {largest}, but the model has {vocabulary} tokens; give the "
            "model the tokenizer that it was trained with"
        )


def _rows(decoder: ForcedDecoder, missing: Sequence[ForcedRow]) -> Iterator[list[StoredRow]]:
    """Yields the rows of one prompt's continuations, all of a state together: a resumed run then decodes the same arms
    together, and rounds as an undisturbed one.
    """
    for continuation in dict.fromkeys(row.continuation for row in missing):
        last = continuation.prompt[-1]
        answer = continuation.answer
        if answer is None:
            answer = tuple(decoder.greedy(last, continuation.limit))
        # Inputs are one token behind the targets that they predict.
        tokens = (last, *answer[:-1])
        targets = torch.tensor(answer, device=decoder.engine.backbone.device)
        logits, layers = decoder.full(tokens)
        # In float64: a small KL is a sum of differences of nearly equal logarithms.
        full = logits.double().log_softmax(-1)
        del logits  # [T, V], no longer needed while the arms' are in memory
        for state in dict.fromkeys(state for state, _ in continuation.rows):
            rows = [row for row in missing if row.continuation == continuation and row.state == state]
            partial = {_computation(row.arm): row.arm for row in rows if not row.arm.is_full}
            by_arm = decoder.logits(list(partial.values()), tokens, layers if state == DENSE else None)
            measures = {"full": token_measures(full, full, targets)}
            for computation, logits in zip(partial, by_arm, strict=True):
                measures[computation] = token_measures(full, logits.double().log_softmax(-1), targets)
            done = []
            for row in rows:
                of_row = measures[_computation(row.arm)]
                done.append({"key": row.key, "k": decoder.k(row.arm), "token": list(answer), **of_row})
            yield done


def _computation(arm: ArmSpec) -> ArmSpec | str:
    """Returns what an arm's numbers follow from: of a method that chooses no tokens its name, whatever the budget."""
    return arm if arm.rule.chooses else arm.method


def token_measures(full: Tensor, arm: Tensor, answer: Tensor) -> dict[str, list[Any]]:
    """Returns distances of an arm from full attention, token by token.

    Args:
        full, arm: [T, V] log-probabilities of the next token.
        answer: [T], the tokens that follow.

    Returns:
        `nll` and `full_nll`: negative log-likelihood of the token in nats; `kl`: KL(Full || arm) in nats; `same_top`:
        whether both have the same likeliest token; `first`: whether the arm's is the token that follows.
    """

    def of_answer(log_p: Tensor) -> Tensor:
        return -log_p.gather(-1, answer.unsqueeze(-1)).squeeze(-1)

    def rounded(nats: Tensor) -> list[float]:
        return [round(value, NATS_DECIMALS) for value in nats.tolist()]

    top = arm.argmax(-1)
    kl = (full.exp() * (full - arm)).sum(-1)
    return {
        "nll": rounded(of_answer(arm)),
        "full_nll": rounded(of_answer(full)),
        "kl": rounded(kl),
        "same_top": (top == full.argmax(-1)).tolist(),
        "first": (top == answer).tolist(),
    }


def _token_rows(rows: Sequence[ForcedRow], store: RowStore, shas: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yields the stored rows token by token, in FORCED_COLUMNS."""
    for forced in rows:
        stored = store.rows[forced.key]
        arm = forced.arm
        continuation = forced.continuation
        of_row = {
            "text": continuation.text,
            "task": continuation.task,
            "index": continuation.index,
            "continuation": continuation.kind,
            "state": forced.state,
            "method": arm.method,
            "budget_percent": arm.budget_percent,
            "maps": arm.maps or "",
            "phi_sha": shas[arm.maps] if arm.maps else "",
            "k": stored["k"],
        }
        # The tokens of a given answer are taken from it, so that no damage of the store reaches later stages.
        tokens = continuation.answer or stored["token"]
        per_token = {name: stored[name] for name in PER_TOKEN}
        per_token |= {"token": tokens, "seen": list(continuation.seen(tokens))}
        if len({len(values) for values in per_token.values()}) > 1:
            raise ValueError(f"{store.path}: row {forced.key} has lists of different lengths; {ROW_REMEDY}")
        for position, values in enumerate(zip(*per_token.values(), strict=True)):
            yield {**of_row, "position": position, **dict(zip(per_token, values, strict=True))}
