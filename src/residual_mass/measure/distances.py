"""Distances of methods from full attention along the documents' own continuations, and the bytes that a step reads.

A document is a prompt, one token, and a continuation. The prompt is read once; then full attention, and every method by
what serves it here, read the token and the continuation, whose logits are compared.

Shape letters: B = budgets, T = tokens of a continuation, V = vocabulary.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from residual_mass.benchmarks.force import require_vocabulary, token_measures
from residual_mass.benchmarks.store import ROW_REMEDY, RowStore, StoredRow
from residual_mass.core.selection import retrieved_count
from residual_mass.decode.backend import Prefill
from residual_mass.decode.backends import ANCHORS, backend_for
from residual_mass.decode.engine import NotFiniteError, SharedPrefillEngine
from residual_mass.decode.forced import ForcedDecoder
from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.decode.text import Text
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.diagnostics.errors import ReadLayer
from residual_mass.diagnostics.packs import visit_layers
from residual_mass.files import sha256_text
from residual_mass.kernels.layout import BLOCK
from residual_mass.kernels.library import LAYOUT
from residual_mass.measure.models import Side
from residual_mass.measure.request import BASELINE, Request
from residual_mass.measure.texts import Documents
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm
from residual_mass.methods.step_bytes import full_bytes, kept_bytes, step_bytes
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.recipes import RECIPES
from residual_mass.spec.arms import ArmSpec
from residual_mass.statistics import skewed_interval

log = logging.getLogger(__name__)

DISTANCES = ("kl", "same_top")
"""Values of a stored row that are lists with one entry per token."""
ROW_FIELDS = frozenset({"key", *DISTANCES})
ARM_COLUMNS = ["method", "budget_percent"]
ARM_OF_TEXT = ["text", *ARM_COLUMNS]
TAIL = 1000
"""Minimum number of tokens whose 99.9 % point differs from their largest value."""
QUERIES = 8
"""Number of tokens after a prompt whose reads are counted."""
Measures = dict[str, list[Any]]
"""DISTANCES of a document."""


# ---- KL, token by token ----------------------------------------------------------------------------------------------


def token_distances(
    request: Request,
    backbone: Backbone,
    texts: Sequence[Documents],
    sides: Sequence[Side],
    phi_sha: str | None,
    store: RowStore,
) -> pd.DataFrame:
    """Measures all sides on all documents; rows in the store are not computed again.

    Args:
        phi_sha: sha256 of the feature maps' file, if there is one.

    Returns:
        A row for each text, `document`, method, budget and `position`: `kl`, KL(full || method) of the next token in
        nats, and `same_top`, whether both have the same likeliest token.

    Raises:
        ValueError: the model does not know a token, or returns a NaN or an infinity; names the document.
    """
    keys = {}
    for text in texts:
        require_vocabulary(backbone, text.sequences)
        for number, sequence in enumerate(text.sequences):
            for side in sides:
                keys[text.name, number, side] = key_of(request, backbone, sequence, side, phi_sha)
    missing = sum(key not in store.rows for key in keys.values())
    log.info("%d of %d rows to compute; %d in %s", missing, len(keys), len(store.rows), store.path)
    engine = engine_of(backbone, sides)
    with tqdm(total=missing, unit="row") as bar:
        for text in texts:
            for number, sequence in enumerate(text.sequences):
                name = f"{text.name} document {number}"
                bar.set_postfix_str(name)
                wanted = {side: keys[text.name, number, side] for side in sides}
                lacking = {side: key for side, key in wanted.items() if key not in store.rows}
                # All of a document together: a resumed run then computes the same arms together, and rounds as an
                # undisturbed one.
                store.append(_rows(request, engine, name, sequence, lacking, bar.update))
    return _by_token(keys, store, request.tokens)


def engine_of(backbone: Backbone, sides: Sequence[Side]) -> SharedPrefillEngine:
    arms = [spec_of(side) for side in sides]
    phi = next((side.phi for side in sides if side.phi is not None), None)
    return SharedPrefillEngine(backbone, arms, ANCHORS, phi, None)


def spec_of(side: Side) -> ArmSpec:
    return ArmSpec(side.rule.name, side.budget_percent)


def key_of(request: Request, backbone: Backbone, sequence: Sequence[int], side: Side, phi_sha: str | None) -> str:
    """Returns a hash of everything that determines a row: model and versions, document, arm, and what serves it."""
    facts = {
        "backbone": backbone.identity,
        "document": list(sequence),
        "tokens": request.tokens,
        "arm": {**side.rule.identity, "budget_percent": side.budget_percent},
        "phi": phi_sha if side.rule.needs_maps else None,
        "anchors": asdict(ANCHORS),
        "by": f"packed {LAYOUT}" if side.backend == PackedBackend.name else TorchBackend.name,
        "recipe": RECIPES["force"],
    }
    return sha256_text(json.dumps(facts, sort_keys=True))


def _rows(
    request: Request,
    engine: SharedPrefillEngine,
    name: str,
    sequence: Sequence[int],
    lacking: Mapping[Side, str],
    done: Callable[[], object],
) -> list[StoredRow]:
    """Computes rows of one document.

    Args:
        lacking: keys of the rows by side.
        done: called after each row.
    """
    rows: list[StoredRow] = []
    if not lacking:
        return rows
    prompt = sequence[: request.prompt_tokens]
    read = sequence[request.prompt_tokens : -1]
    answer = torch.tensor(sequence[-request.tokens :], device=engine.backbone.device)
    try:
        decoder = ForcedDecoder(engine, prompt)
        logits, _ = decoder.full(read)
        full = logits.double().log_softmax(-1)
        for side, logits in logits_of(decoder, list(lacking), read):
            rows.append({"key": lacking[side], **measures_of(full, logits.double().log_softmax(-1), answer)})
            done()
    except (NotFiniteError, torch.OutOfMemoryError) as error:
        raise ValueError(f"{name}: {str(error).partition('. ')[0]}") from None
    return rows


@torch.no_grad()
def logits_of(decoder: ForcedDecoder, sides: Sequence[Side], tokens: Sequence[int]) -> Iterator[tuple[Side, Tensor]]:
    """Yields the logits [T, V] of each side after each of given tokens, by what serves it when it decodes.

    Sides that torch serves take a short continuation together, which is several times as fast. Generated tokens then
    never join the prefix; along BLOCK tokens they do not either where a backend decodes.
    """
    packed = [side for side in sides if side.backend == PackedBackend.name]
    others = [side for side in sides if side not in packed]
    for side in packed:
        yield side, decoder.served(spec_of(side), tokens)
    if len(tokens) <= BLOCK:
        arms = [spec_of(side) for side in others]
        yield from zip(others, decoder.logits(arms, tokens), strict=True)
        return
    model = decoder.engine.backbone.model
    ids = torch.tensor([list(tokens)], device=decoder.engine.backbone.device)
    read = Prefill({index: (layer.keys, layer.values) for index, layer in enumerate(decoder.prefix)})
    for side in others:
        backend = backend_for(model, side.arm, phi=side.phi, kinds=[TorchBackend])
        backend.take(read)
        text = Text(model, backend)
        # In pieces, which bounds the memory of the scores.
        logits = torch.cat([text.step(piece)[0] for piece in ids.split(BLOCK, 1)])
        if not logits.isfinite().all():
            raise decoder.engine.not_finite(0, "the continuation", spec_of(side))
        yield side, logits


def measures_of(full: Tensor, arm: Tensor, answer: Tensor) -> Measures:
    """Returns DISTANCES of log-probabilities [T, V]; the continuation `answer` [T] is what both predict."""
    measures = token_measures(full, arm, answer)
    return {name: measures[name] for name in DISTANCES}


def _by_token(keys: Mapping[tuple[str, int, Side], str], store: RowStore, tokens: int) -> pd.DataFrame:
    """Returns stored rows token by token."""
    lines = []
    for (text, document, side), key in keys.items():
        row = stored(store, key, tokens)
        for position, (kl, same_top) in enumerate(zip(row["kl"], row["same_top"], strict=True)):
            lines.append((text, *side.key, document, position, kl, same_top))
    return pd.DataFrame(lines, columns=[*ARM_OF_TEXT, "document", "position", *DISTANCES])


def stored(store: RowStore, key: str, tokens: int) -> StoredRow:
    """Returns a row of the store; raises ValueError unless its lists hold a number for each of so many tokens."""
    row = store.rows[key]
    for name in DISTANCES:
        values = row[name]
        if (
            not isinstance(values, list)
            or len(values) != tokens
            or not all(type(x) in (bool, float, int) for x in values)
        ):
            raise ValueError(f"{store.path}: row {key} has no {name} of {tokens} tokens; {ROW_REMEDY}")
    return row


# ---- means and intervals ---------------------------------------------------------------------------------------------


def tail_of(request: Request, texts: Sequence[Documents]) -> tuple[str, float]:
    """Returns name and share of the quantile of tokens that shows the worst of them."""
    fewest = min(len(text.sequences) for text in texts)
    return ("largest", 1.0) if fewest * request.tokens < TAIL else ("99.9 % point", 0.999)


def summary(request: Request, tokens: pd.DataFrame, tail: float) -> pd.DataFrame:
    """Returns by ARM_OF_TEXT the columns `kl` to `same_top` of `Measured.table`.

    Args:
        tokens: as `token_distances` returns it.
        tail: share of the quantile `kl_tail`.
    """
    lines = []
    for arm, part in tokens.groupby(ARM_OF_TEXT, sort=False):
        documents = part.groupby("document")[[*DISTANCES]].mean()
        low, high = interval_of(documents["kl"])
        same_top = documents["same_top"].mean()
        lines.append((*arm, documents["kl"].mean(), low, high, part["kl"].quantile(tail), same_top))
    columns = [*ARM_OF_TEXT, "kl", "ci_low", "ci_high", "kl_tail", "same_top"]
    table = pd.DataFrame(lines, columns=columns).set_index(ARM_OF_TEXT)
    ratios = []
    for (text, method, budget), kl in table["kl"].items():
        whole = not method_named(method).chooses or not leaves_some(request, budget)
        baseline = 0.0 if whole else table["kl"][text, BASELINE, budget]
        ratios.append(kl / baseline if baseline > 0 else math.nan)
    return table.assign(kl_over_topk=ratios)


def leaves_some(request: Request, budget_percent: float) -> bool:
    """Returns whether a budget leaves tokens of the prompt unread."""
    fixed = ANCHORS.sink + ANCHORS.tail
    return retrieved_count(budget_percent, request.prompt_tokens, fixed) < max(request.prompt_tokens - fixed, 0)


def interval_of(kl: pd.Series) -> tuple[float, float]:
    """Returns the interval of the mean of documents' KL; rounding can make one negative. NaN for a single document."""
    return (math.nan, math.nan) if len(kl) == 1 else skewed_interval([kl.clip(0).to_numpy()])


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_of_steps(
    request: Request, backbone: Backbone, text: Documents, sides: Sequence[Side], phi: PhiMaps | None
) -> pd.DataFrame:
    """Returns by ARM_OF_TEXT `read` and `kept`, as shares of full attention's bytes in bfloat16, for the prompt of the
    first document: of packed caches what they hold, of other methods by count.
    """
    shape = backbone.shape
    features = 0 if phi is None else phi.map.d_phi
    step = shape.step(request.prompt_tokens, anchors=ANCHORS.sink + ANCHORS.tail, features=features)
    full = full_bytes(step)  # of a KV head and layer
    document = text.sequences[0]
    lines = []
    for side, read, kept, layers in _packed_bytes(request, backbone, document, sides):
        whole = full * shape.kv_heads * layers
        lines.append((text.name, *side.key, read / whole, kept / whole))
    counted = [side for side in sides if side.backend != PackedBackend.name]
    tokens = tokens_read(request, backbone, document, [side.rule.name for side in counted], phi)
    for side in counted:
        # A cache that is read whole reads as much at every budget.
        place = request.budgets.index(side.budget_percent) if side.rule.chooses else 0
        retrieved = tokens[side.rule.name][place] - ANCHORS.sink - ANCHORS.tail
        read = step_bytes(side.rule, step._replace(retrieved=retrieved)).total
        kept = kept_bytes(side.rule, step).total
        lines.append((text.name, *side.key, read / full, kept / full))
    return pd.DataFrame(lines, columns=[*ARM_OF_TEXT, "read", "kept"]).set_index(ARM_OF_TEXT)


def _packed_bytes(
    request: Request, backbone: Backbone, document: Sequence[int], sides: Sequence[Side]
) -> Iterator[tuple[Side, int, int, int]]:
    """Yields, of sides over packed caches, the bytes that the first step after a prompt reads, those kept before it,
    both of layers without a window, and the number of these layers.
    """
    packed = [side for side in sides if side.backend == PackedBackend.name]
    if not packed:
        return
    length = request.prompt_tokens
    decoder = ForcedDecoder(engine_of(backbone, packed), document[:length])
    for side in packed:
        cache = copy.deepcopy(decoder.served_cache(spec_of(side)))
        layers = [layer.packed for layer in cache.packed_layers]
        kept = sum(layer.bytes for layer in layers)
        decoder.served(spec_of(side), document[length : length + 1], cache)
        yield side, sum(layer.read_bytes(backbone.shape.group) for layer in layers), kept, len(layers)


def tokens_read(
    request: Request, backbone: Backbone, document: Sequence[int], methods: Iterable[str], phi: PhiMaps | None
) -> dict[str, list[float]]:
    """Counts the tokens that the query heads of a KV head read together in a step, by method and budget: means over
    layers, heads and queries, which hardly vary between documents.
    """
    folded = None if phi is None else phi.on(backbone.model).folded()
    counts: dict[str, list[Tensor]] = {method: [] for method in methods}

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        maps = None if folded is None else folded[layer]
        read = ReadLayer(queries, keys, values, scale, request.budgets, ANCHORS, maps)
        for method, by_layer in counts.items():
            tokens = read.errors(method)["tokens_read"]
            by_layer.append(tokens.double().mean((0, 1)))  # [B]

    if counts:
        length = request.prompt_tokens
        visit_layers(backbone, document[: length + QUERIES], length, visit, hybrid=True)
    return {method: torch.stack(by_layer).mean(0).tolist() for method, by_layer in counts.items()}


# ---- packed weights --------------------------------------------------------------------------------------------------


def weights_cost(
    request: Request, texts: Sequence[Documents], loaded: Backbone, packed: Backbone, store: RowStore
) -> pd.DataFrame:
    """Measures what packed weights cost on the tokens that the methods are measured on: the distance of full attention
    with them from full attention of the model as loaded. Rows in the store are not computed again.

    Returns:
        A row for each text: `text`; `kl` of the next token with the packed weights from the model as loaded, with the
        ends `ci_low` and `ci_high` of its interval (NaN for a single document); `same_top`; and `rounding`, the KL
        between two ways of reading a text with the same packed weights, in one pass or in two. Activations are rounded
        to bfloat16, so the KL of a method can hardly be smaller than that.
    """
    lines = []
    for text in texts:
        costs = []
        roundings = []
        for sequence in tqdm(text.sequences, desc=f"weights, {text.name}"):
            facts = [packed.identity, request.tokens, list(sequence)]
            of_weights = sha256_text(json.dumps(["full attention, from", loaded.identity, *facts]))
            of_rounding = sha256_text(json.dumps(["in two passes, from one", *facts]))
            if not {of_weights, of_rounding} <= store.rows.keys():
                cost, rounding = _weights_measures(sequence, request.tokens, loaded, packed)
                store.append([{"key": of_weights, **cost}, {"key": of_rounding, **rounding}])
            costs.append(stored(store, of_weights, request.tokens))
            roundings.append(stored(store, of_rounding, request.tokens))
        kl = _means(costs, "kl").clip(0)  # rounding can make one negative
        rounding = _means(roundings, "kl").clip(0).mean()
        lines.append((text.name, kl.mean(), *interval_of(kl), _means(costs, "same_top").mean(), rounding))
    return pd.DataFrame(lines, columns=["text", "kl", "ci_low", "ci_high", "same_top", "rounding"])


def _means(rows: Sequence[StoredRow], name: str) -> pd.Series:
    return pd.Series([pd.Series(row[name]).mean() for row in rows])


def _weights_measures(
    sequence: Sequence[int], tokens: int, loaded: Backbone, packed: Backbone
) -> tuple[Measures, Measures]:
    """Returns the distances of a document's row for the weights, and of that for the rounding."""
    answer = torch.tensor(sequence[-tokens:])
    whole = _log_p(packed, sequence, tokens)
    in_two = _log_p(packed, sequence, tokens, len(sequence) - 1 - tokens)
    reference = _log_p(loaded, sequence, tokens)
    return measures_of(reference, whole, answer), measures_of(whole, in_two, answer)


@torch.no_grad()
def _log_p(backbone: Backbone, sequence: Sequence[int], tokens: int, first: int = 0) -> Tensor:
    """Returns log-probabilities [T, V] after the last tokens under full attention, with `first` tokens of the document
    read apart.
    """
    ids = torch.tensor([list(sequence[:-1])])
    text = Text(backbone.model, backend_for(backbone.model, Arm(method_named("full"), None), kinds=[TorchBackend]))
    for part in (ids[:, :first], ids[:, first:]):
        if part.shape[1]:
            logits = text.read(part, keep=tokens)
    return logits[0].double().log_softmax(-1)
