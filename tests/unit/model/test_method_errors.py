"""Errors of methods against sums over single tokens in float64."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from tests.unit.core.reference import ReferenceRow, log_features
from torch import Tensor

from residual_mass.core.accounting import merge
from residual_mass.core.measures import rel_l1
from residual_mass.decode.prefix import build_prefix, map_heads, summarise_prefix
from residual_mass.decode.terms import arm_rows, prefix_terms
from residual_mass.diagnostics.errors import ReadLayer
from residual_mass.methods import names
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec, MapSpec

HEADS, KV_HEADS, QUERIES, LENGTH, D = 4, 2, 3, 60, 8
ANCHORS = AnchorSpec(2, 3)
BUDGETS = (5.0, 10.0, 40.0, 100.0)
KS = (0, 1, 19, 55)
"""Of `BUDGETS` at `LENGTH`: none, one, some, and the whole mid-region."""
SCALE = 0.7


@pytest.fixture(scope="module")
def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values; values follow keys, so that moments have something to find."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys = random(KV_HEADS, LENGTH, D)
    values = keys @ random(KV_HEADS, D, D) + random(KV_HEADS, LENGTH, D)
    return random(HEADS, QUERIES, D), keys, values


@pytest.fixture(scope="module")
def maps() -> PhiMaps:
    torch.manual_seed(1)
    return PhiMaps(HeadShape(1, HEADS, KV_HEADS, D), MapSpec(d_emb=12, d_phi=6)).requires_grad_(False)


@pytest.fixture(scope="module")
def read(tokens: tuple[Tensor, Tensor, Tensor], maps: PhiMaps) -> ReadLayer:
    return ReadLayer(*tokens, SCALE, BUDGETS, ANCHORS, maps.folded()[0])


@pytest.mark.parametrize("method", ["topk", "topk_phi", "topk_phi_nosub"])
def test_errors_are_those_of_every_row_by_itself(
    method: str, read: ReadLayer, tokens: tuple[Tensor, Tensor, Tensor], maps: PhiMaps
) -> None:
    queries, keys, values = (x.double().numpy() for x in tokens)
    errors = read.errors(method)
    assert {name: value.shape for name, value in errors.items()} == dict.fromkeys(
        ("error", "log_z_error", "residual_share_hat", "recall", "tokens_read"), (HEADS, QUERIES, len(BUDGETS))
    )
    for head, query, (b, k) in product(range(HEADS), range(QUERIES), enumerate(KS)):
        kv = head * KV_HEADS // HEADS
        log_query = log_features(maps.query[0], "rezero", head, queries[head, query][None])[0]
        log_keys = log_features(maps.key[0], "rezero", kv, keys[kv])
        row = ReferenceRow.of(queries[head, query], keys[kv], values[kv], SCALE, ANCHORS, log_query, log_keys)
        expected = row.at(k)
        estimated = {"topk": [], "topk_phi": row.mid[k:], "topk_phi_nosub": row.mid}[method]
        log_hat = float(np.logaddexp.reduce(row.kernel[estimated])) if len(estimated) else -math.inf
        log_exact = float(np.logaddexp.reduce(row.scores[[*row.anchors, *row.mid[:k]]]))
        error = expected[{"topk": "e_topk", "topk_phi": "e_sub", "topk_phi_nosub": "e_nosub"}[method]]
        assert float(errors["error"][head, query, b]) == pytest.approx(error, rel=1e-3, abs=2e-6)
        share = math.exp(log_hat - np.logaddexp(log_exact, log_hat))
        assert float(errors["residual_share_hat"][head, query, b]) == pytest.approx(share, rel=1e-3, abs=2e-6)
        found, gap = float(errors["log_z_error"][head, query, b]), log_hat - expected["log_z_true"]
        assert found == pytest.approx(gap, abs=2e-3) if math.isfinite(gap) else not math.isfinite(found)


@pytest.mark.parametrize("method", names()[1:])
def test_terms_are_those_of_the_engine(
    method: str, read: ReadLayer, tokens: tuple[Tensor, Tensor, Tensor], maps: PhiMaps
) -> None:
    queries, keys, values = (x[None] for x in tokens)
    query_map, key_map = maps.folded()[0]
    layer = build_prefix(keys, values, torch.ones(1, LENGTH, dtype=torch.bool), ANCHORS)
    rows = queries.unflatten(1, (KV_HEADS, -1)).flatten(2, 3)
    log_query = map_heads(query_map, queries).unflatten(1, (KV_HEADS, -1)).flatten(2, 3)
    full = torch.softmax(rows @ keys.mT * SCALE, -1) @ values
    for b, budget in enumerate(BUDGETS):
        arms = arm_rows([ArmSpec(method, budget)], rows.shape[2], [LENGTH], ANCHORS, LENGTH, keys.device, QUERIES)
        terms = prefix_terms(rows, log_query, layer, summarise_prefix(layer, key_map), arms, SCALE)
        expected = rel_l1(merge(terms), full).reshape(HEADS, QUERIES)
        torch.testing.assert_close(read.errors(method)["error"][..., b], expected, rtol=1e-4, atol=2e-6)


def test_recall_is_the_share_of_the_best_tokens_mass_and_tokens_read_are_counted_once(
    read: ReadLayer, tokens: tuple[Tensor, Tensor, Tensor]
) -> None:
    queries, keys, _ = (x.double() for x in tokens)
    bounds = {}
    for kv, start in product(range(KV_HEADS), range(0, LENGTH, 16)):
        page = keys[kv, max(start, ANCHORS.sink) : min(start + 16, LENGTH - ANCHORS.tail)]
        bounds[kv, start // 16] = (page.amin(0), page.amax(0)) if len(page) else (torch.zeros(D), torch.zeros(D))
    found = read.errors("pages")
    mid = range(ANCHORS.sink, LENGTH - ANCHORS.tail)

    def pages_read(head: int, query: int, k: int) -> list[int]:
        q, kv = SCALE * queries[head, query], head * KV_HEADS // HEADS
        upper = [float(torch.maximum(q * bounds[kv, n][0], q * bounds[kv, n][1]).sum()) for n in range(4)]
        return sorted(mid, key=lambda i: (-upper[i // 16], i))[:k]

    for head, query, (b, k) in product(range(HEADS), range(QUERIES), enumerate(KS)):
        kv = head * KV_HEADS // HEADS
        scores = SCALE * keys[kv] @ queries[head, query]
        best = sorted(mid, key=lambda i: -float(scores[i]))[:k]
        both = [i for i in best if i in pages_read(head, query, k)]
        recall = float(scores[both].exp().sum() / scores[best].exp().sum()) if k else math.nan
        assert float(found["recall"][head, query, b]) == pytest.approx(recall, rel=1e-4, nan_ok=True)
        of_group = [pages_read(other, query, k) for other in range(HEADS) if other * KV_HEADS // HEADS == kv]
        assert float(found["tokens_read"][head, query, b]) == len(set().union(*of_group)) + 5


def test_values_that_a_bound_lets_heads_read_are_counted_once(tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    """By exact scores, from which those of 8-bit keys differ by 0.11 at most; without a bound none."""
    queries, keys, values = (x.double() for x in tokens)
    read = ReadLayer(queries, keys, values, 3 * SCALE, BUDGETS, ANCHORS, None)
    found = read.errors("cache8_sparse_v_1e-4")["tokens_read"]
    mid = range(ANCHORS.sink, LENGTH - ANCHORS.tail)

    def values_read(head: int, query: int, bound: float) -> set[int]:
        scores = 3 * SCALE * keys[head * KV_HEADS // HEADS] @ queries[head, query]
        return {i for i in mid if float((scores[i] - scores.max()).exp()) > bound}

    for head, query in product(range(HEADS), range(QUERIES)):
        group = [other for other in range(HEADS) if other * KV_HEADS // HEADS == head * KV_HEADS // HEADS]
        least, most = (len(set().union(*(values_read(other, query, 1e-4 * off) for other in group))) + 5
                       for off in (1.25, 0.8))  # fmt: skip
        assert all(least <= count <= most for count in found[head, query].tolist())
        assert 5 < least and most < LENGTH
    assert (read.errors("cache8")["tokens_read"] == 5).all()


def test_facts_are_those_of_the_scores(read: ReadLayer, tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    queries, keys, _ = (x.double() for x in tokens)
    facts = read.facts()
    for head, query in product(range(HEADS), range(QUERIES)):
        scores = (keys[head * KV_HEADS // HEADS] @ queries[head, query] * SCALE).tolist()[2:-3]
        mean = sum(scores) / len(scores)
        second, third, fourth = (sum((x - mean) ** power for x in scores) / len(scores) for power in (2, 3, 4))
        p = [math.exp(x) / sum(map(math.exp, scores)) for x in scores]
        expected = {
            "h_mid": -sum(x * math.log(x) for x in p) / math.log(len(p)),
            "skewness": third / second**1.5,
            "kurtosis": fourth / second**2 - 3,
        }
        assert {name: float(value[head, query]) for name, value in facts.items()} == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("length", [1, 5, 6, 7])
@pytest.mark.parametrize("method", names()[1:])
def test_prefixes_of_few_tokens_have_finite_errors(
    length: int, method: str, tokens: tuple[Tensor, Tensor, Tensor], maps: PhiMaps
) -> None:
    """Within the anchors, which are 5 tokens, nothing is left out."""
    queries, keys, values = tokens
    read = ReadLayer(queries, keys[:, :length], values[:, :length], SCALE, (1.0, 100.0), ANCHORS, maps.folded()[0])
    found = read.errors(method)
    assert found["error"].isfinite().all()
    if length <= 5:
        assert found["error"].max() < 1e-5 and not found["log_z_error"].isfinite().any()


def test_state_bytes_are_counted_by_kv_head(read: ReadLayer) -> None:
    assert read.state_bytes("topk") == 0
    assert read.state_bytes("topk_phi") == read.state_bytes("topk_phi_nosub") == 6 * (D + 1) * 4
    assert read.state_bytes("topk_moments") == (2 * D * D + 2 * D + 2) * 4
    assert read.state_bytes("topk_moments_8") == 8 * read.state_bytes("topk_moments")
