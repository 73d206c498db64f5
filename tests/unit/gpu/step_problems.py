"""Random decode steps with padding and poison, and reference attention in float64, column by column."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from residual_mass.core.accounting import CLAMP_RELATIVE
from residual_mass.core.moments import MomentState, truncated_terms
from residual_mass.gpu.cache import DecodeCache, build_cache, unpacked, with_moments, with_scan, with_summary
from residual_mass.methods import Moments, QuantisedScan

MOMENTS = {
    "moments": Moments(),
    "moments of clusters": Moments(3),
    "shared moments": Moments(3, shared=True),
}
"""Residuals of truncated moments, by what tests call their methods."""
SCAN = QuantisedScan(4, block=16)
SCANS = {"scan": None, "scan, moments": Moments(), "scan, shared moments": Moments(3, shared=True)}
"""Residuals beside SCAN, likewise. Its blocks are small, so that few columns make several and the last is not full."""
METHODS = ["topk", "topk_phi", "topk_phi_nosub", *MOMENTS, *SCANS]


class DecodeProblem:
    """One step of a batch whose rows have their real tokens at columns [first, last); everything else is NaN."""

    def __init__(
        self,
        seed: int,
        spans: list[tuple[int, int]],
        length: int,
        *,
        groups: int = 3,
        kv_heads: int = 2,
        d: int = 8,
        features: int = 8,
        sink: int = 2,
        tail: int = 3,
        generated: int = 2,
        room: int = 4,
        spread: float = 1.0,
        dtype: torch.dtype = torch.float32,
        scan: QuantisedScan = SCAN,
        device: str = "cpu",
    ) -> None:
        g = torch.Generator(device).manual_seed(seed)
        drawn = torch.float64 if device == "cpu" else torch.float32  # problems that fill a GPU have no room for more

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=drawn, device=device)

        batch = len(spans)
        self.sink, self.tail, self.generated, self.scan = sink, tail, generated, scan
        self.scale = d**-0.5
        self.query = (draw(batch, kv_heads * groups, d) * spread).to(dtype)
        self.log_query = draw(batch, kv_heads * groups, features).to(dtype)
        keys, values = draw(batch, kv_heads, length, d) * spread, draw(batch, kv_heads, length, d)
        self.log_features = draw(batch, kv_heads, length, features)
        for row, (first, last) in enumerate(spans):
            for x in (keys, values, self.log_features):
                x[row, :, :first], x[row, :, last:] = torch.nan, torch.nan
        first, last = torch.tensor(spans, dtype=torch.int32, device=device).T
        bare = build_cache(keys.to(dtype), values.to(dtype), first, last, room)
        self.cache = with_summary(bare, self.log_features.to(dtype), sink, tail)
        for buffer in (self.cache.keys, self.cache.values):
            buffer[:, :, length:] = torch.nan
            buffer[:, :, length : length + generated] = draw(batch, kv_heads, generated, d).to(dtype)

    def all_alike(self) -> DecodeProblem:
        """The same with copies of one token in the mid-region, so that all scores tie."""
        for buffer in (self.cache.keys, self.cache.values):
            buffer[:, :, self.sink : self.cache.length - self.tail] = buffer[:, :, self.sink, None]
        return self

    def arguments(self, k: int, method: str) -> dict[str, object]:
        """Of decode_attention, for one of METHODS."""
        maps = method.startswith("topk_phi")
        return {
            "query": self.query,
            "cache": self.cache if maps else self._without_maps(method),
            "log_query": self.log_query.float() if maps else None,
            "k": k,
            "sink": self.sink,
            "tail": self.tail,
            "subtracts": method == "topk_phi",
            "generated": self.generated,
            "scale": self.scale,
        }

    def _without_maps(self, method: str) -> DecodeCache:
        bare = self.cache._replace(features=None, summary=None, log_shift=None)
        if method in SCANS:
            bare = with_scan(bare, self.scan.prepare, self.scan.block, self.sink, self.tail)
        residual = (MOMENTS | SCANS).get(method)
        return bare if residual is None else with_moments(bare, residual.prepare, self.sink, self.tail)

    def expected(self, k: int, method: str) -> Tensor:
        """[B, Hq, D] float64, from the buffers as they are, so that their rounding is no difference."""
        return attention_in_float64(self.arguments(k, method))


def attention_in_float64(arguments: dict[str, object], chosen: Tensor | None = None) -> Tensor:
    """[B, Hq, D]: a softmax over all that is read, exactly or as an estimate of the tokens that are not.

    Retrieved are the tokens [B, Hq, L] `chosen`, or else those of the highest scores that the method sees. Moments and
    their terms are those of `core.moments`.
    """
    query, cache, log_query, k = (arguments[name] for name in ("query", "cache", "log_query", "k"))
    group, length, filled = query.shape[1] // cache.keys.shape[1], cache.length, cache.length + arguments["generated"]
    column = torch.arange(filled, device=query.device)
    prefix = (column >= cache.first[:, None]) & (column < cache.last[:, None])
    real, mid = prefix | (column >= length), mid_columns(arguments)

    def by_query_head(x: Tensor) -> Tensor:
        return x.double().repeat_interleave(group, dim=1)

    keys, values = (
        torch.where(real[:, None, :, None], by_query_head(x[:, :, :filled]), 0) for x in (cache.keys, cache.values)
    )
    queries = query.double() * arguments["scale"]
    seen = selecting_scores(arguments)
    if chosen is None:
        best = seen.topk(min(k, length)).indices
        chosen = torch.zeros_like(seen, dtype=torch.bool).scatter(-1, best, True) & mid[:, None]
    read = real[:, None].expand(-1, query.shape[1], -1).clone()
    read[..., :length] &= ~mid[:, None] | chosen
    scores = (keys @ queries.unsqueeze(-1)).squeeze(-1).masked_fill(~read, -torch.inf)
    if cache.moments is not None:
        threshold = torch.minimum(seen.masked_fill(~chosen, torch.inf).amin(-1), seen.amax(-1)).clamp(min=-1e9)
        moments = MomentState(*(by_query_head(x) for x in cache.moments))
        terms = truncated_terms(queries.unsqueeze(2), moments, threshold.unsqueeze(2))
        nothing_left = (mid.sum(-1)[:, None] == chosen.sum(-1)).unsqueeze(-1)
        scores = torch.cat((scores, terms.log_mass().masked_fill(nothing_left, -torch.inf)), dim=-1)
        values = torch.cat((values, (terms.numerator / terms.denominator.unsqueeze(-1)).nan_to_num()), dim=2)
    if log_query is not None:
        log_weights = log_query.double() + by_query_head(cache.log_shift)
        unit = log_weights.amax(-1, keepdim=True)
        z = by_query_head(cache.features) @ (log_weights - unit).exp().unsqueeze(-1)
        z = z.squeeze(-1).log() + unit
        left = mid[:, None] & ~chosen if arguments["subtracts"] else mid[:, None]
        whole, rest = (z.masked_fill(~tokens, -torch.inf) for tokens in (mid[:, None], left))
        dropped = rest.logsumexp(-1, keepdim=True) <= whole.logsumexp(-1, keepdim=True) + math.log(CLAMP_RELATIVE)
        scores = torch.cat((scores, rest.masked_fill(dropped, -torch.inf)), dim=-1)
        values = torch.cat((values, values[:, :, :length]), dim=2)
    return (scores.softmax(-1).unsqueeze(-2) @ values).squeeze(-2)


def mid_columns(arguments: dict[str, object]) -> Tensor:
    """The columns of the mid-region, [B, L] bool."""
    cache = arguments["cache"]
    column = torch.arange(cache.length, device=cache.first.device)
    first, last = cache.first[:, None] + arguments["sink"], cache.last[:, None] - arguments["tail"]
    return (column >= first) & (column < last)


def selecting_scores(arguments: dict[str, object], magnitudes: bool = False) -> Tensor:
    """The scores that tokens are chosen by, [B, Hq, L] float64, or the sums of their products' magnitudes; -inf outside
    the mid-region.
    """
    query, mid = arguments["query"], mid_columns(arguments)
    keys = torch.where(mid[:, None, :, None], selecting_keys(arguments["cache"]), 0)
    if magnitudes:
        query, keys = query.abs(), keys.abs()
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
    scores = (keys @ query.double().unsqueeze(-1)).squeeze(-1) * arguments["scale"]
    return scores.masked_fill(~mid[:, None], -torch.inf)


def selecting_keys(cache: DecodeCache) -> Tensor:
    """The keys of these scores, [B, Hkv, L, D] float64."""
    if cache.scan is None:
        return cache.keys[:, :, : cache.length].double()
    codes, low, step = unpacked(cache.scan.codes), cache.scan.low.double(), cache.scan.step.double()
    keys = low.unsqueeze(-1) + step.unsqueeze(-1) * codes
    return keys.transpose(-1, -2).flatten(2, 3)[:, :, : cache.length]


def tolerance(method: str) -> float:
    """Of a step in float32. Where a cluster is a single token, its mass is cut within 1e-4 of its score, and a rounding
    of 1e-7 of the score is one of 1e-3 of the mass.
    """
    return 1e-3 if method in ("moments of clusters", "shared moments", "scan, shared moments") else 2e-5


def nearly_all_retrieved(k: int, share: float) -> DecodeProblem:
    """One head. What it leaves has `share` of phi's mass in the mid-region, but weighs as much as all that is exact."""
    p = DecodeProblem(seed=21, spans=[(0, 24)], length=24, groups=1, kv_heads=1, d=16)
    filled = p.cache.length + p.generated
    scores = (p.cache.keys[0, 0, :filled] @ p.query[0, 0] * p.scale).double()
    mid = mid_columns(p.arguments(k, "topk_phi"))[0].nonzero().flatten()
    order = mid[scores[mid].argsort(descending=True)]
    chosen, left = order[:k], order[k:]
    log_features, log_query = p.log_features[0, 0], p.log_query[0, 0].double()
    z = (log_query + log_features).exp().sum(-1)
    log_features[left] += (share / (1 - share) * z[chosen].sum() / z[left].sum()).log()
    exact = torch.ones(filled, dtype=torch.bool).index_fill(0, left, False)
    p.log_query += (scores[exact].exp().sum() / (log_query + log_features[left]).exp().sum()).log()
    p.cache = with_summary(p.cache, p.log_features, p.sink, p.tail)
    return p
