"""Random decode steps with padding and poison, and the slow reference's answer to them."""

from __future__ import annotations

import torch
from reference import attention, split, top, topk_moments, topk_phi
from torch import Tensor

from residual_mass.core.fused.cache import DecodeCache, build_cache, with_moments, with_scan, with_summary
from residual_mass.core.moments import MomentState, truncated_terms
from residual_mass.core.parts import blocks, clusters
from residual_mass.methods import Moments, QuantisedScan
from residual_mass.methods.interface import Layout

MOMENTS = {
    "moments": Moments(),
    "moments of blocks": Moments(4, "blocks"),
    "moments of clusters": Moments(3),
    "shared moments": Moments(3, shared=True),
}
"""Residuals of truncated moments, by what tests call their methods."""
SCAN = QuantisedScan(4, block=16)
SCANS = {"scan": None, "scan, moments": Moments(), "scan, shared moments": Moments(3, shared=True)}
"""Residuals beside SCAN, likewise. Its blocks are small, so that few columns make several and the last is not full."""


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
        dtype: torch.dtype = torch.float64,
    ) -> None:
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        batch = len(spans)
        self.spans, self.sink, self.tail, self.generated, self.groups = spans, sink, tail, generated, groups
        self.scale = d**-0.5
        self.query = (draw(batch, kv_heads * groups, d) * spread).to(dtype)
        self.log_query = draw(batch, kv_heads * groups, features).to(dtype)
        keys, values = draw(batch, kv_heads, length, d) * spread, draw(batch, kv_heads, length, d)
        self.log_features = draw(batch, kv_heads, length, features)
        for row, (first, last) in enumerate(spans):
            for x in (keys, values, self.log_features):
                x[row, :, :first], x[row, :, last:] = torch.nan, torch.nan
        first, last = torch.tensor(spans, dtype=torch.int32).T
        bare = build_cache(keys.to(dtype), values.to(dtype), first, last, room)
        self.cache = with_summary(bare, self.log_features.to(dtype), sink, tail)
        for buffer in (self.cache.keys, self.cache.values):
            buffer[:, :, length:] = torch.nan
            buffer[:, :, length : length + generated] = draw(batch, kv_heads, generated, d).to(dtype)

    def arguments(self, k: int, method: str) -> dict[str, object]:
        """Of decode_attention, for topk, topk_phi, topk_phi_nosub or one of MOMENTS or SCANS."""
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
            bare = with_scan(bare, SCAN.prepare, SCAN.block, self.sink, self.tail)
        residual = (MOMENTS | SCANS).get(method)
        return bare if residual is None else with_moments(bare, residual.prepare, self.sink, self.tail)

    def expected(self, k: int, method: str) -> Tensor:
        """[B, Hq, D] float64, from the buffers as they are, so that their rounding is no difference."""
        rows = range(len(self.spans))
        heads = range(self.query.shape[1])
        return torch.tensor([[self._row(b, h, k, method) for h in heads] for b in rows], dtype=torch.float64)

    def _row(self, b: int, h: int, k: int, method: str) -> list[float]:
        kv, (first, last), length = h // self.groups, self.spans[b], self.cache.length
        if method in SCANS:
            return self._scanned_row(b, h, k, SCANS[method])
        query = self.query[b, h].double().tolist()
        old_k, new_k = _split(self.cache.keys[b, kv], first, last, length, self.generated)
        old_v, new_v = _split(self.cache.values[b, kv], first, last, length, self.generated)
        if method == "topk":
            keys, values = old_k + new_k, old_v + new_v
            anchors, mid = split(len(old_k), self.sink, self.tail)
            scores = [self.scale * sum(x * y for x, y in zip(query, key, strict=True)) for key in keys]
            tokens = anchors + top(scores, mid, k) + list(range(len(old_k), len(keys)))
            return attention(query, keys, values, self.scale, tokens)
        if method in MOMENTS:
            parts = _parts(MOMENTS[method], self.cache.keys[b, kv, first:last].float(), self.sink, self.tail)
            return topk_moments(
                query, old_k, old_v, self.scale, self.sink, self.tail, k, parts, MOMENTS[method].shared, (new_k, new_v)
            )
        assert self.cache.features is not None and self.cache.log_shift is not None
        phi_k = self.cache.features[b, kv, first:last].double() * self.cache.log_shift[b, kv].double().exp()
        phi_q = self.log_query[b, h].float().double().exp().tolist()
        return topk_phi(
            query, old_k, old_v, self.scale, self.sink, self.tail, k, phi_q, phi_k.tolist(), method == "topk_phi",
            (new_k, new_v),
        )  # fmt: skip

    def chosen(self, b: int, h: int, k: int) -> tuple[list[int], float, Tensor]:
        """Columns that the method's own selector chooses in float64, its threshold, and the scores it saw [L]."""
        keys, mid = self._mid_region(b, h // self.groups)
        state = SCAN.prepare(keys.float(), mid)
        query = self.query[b, h].double().unsqueeze(0) * self.scale
        scores, layout = query @ keys.T, Layout(1)
        read, threshold, _ = SCAN.select(query, scores, state, mid.unsqueeze(0), torch.tensor([k]), layout)
        return read.indices[read.valid].tolist(), float(threshold), (query @ SCAN.keys(state, query.dtype).T)[0]

    def _mid_region(self, b: int, kv: int) -> tuple[Tensor, Tensor]:
        """Keys [L, D] float64, zero outside the mid-region [L]."""
        first, last = self.spans[b]
        column = torch.arange(self.cache.length)
        mid = (column >= first + self.sink) & (column < last - self.tail)
        return torch.where(mid.unsqueeze(-1), self.cache.keys[b, kv, : self.cache.length].double(), 0), mid

    def _scanned_row(self, b: int, h: int, k: int, residual: Moments | None) -> list[float]:
        """Chosen by the scan, read exactly, the rest by `truncated_terms`."""
        kv, (first, last), length = h // self.groups, self.spans[b], self.cache.length
        mid_keys, mid = self._mid_region(b, kv)
        columns, threshold, _ = self.chosen(b, h, k)
        anchors = [i for i in range(first, last) if not mid[i]]
        read = [*anchors, *columns, *range(length, length + self.generated)]
        keys, values = (x[b, kv, read].double() for x in (self.cache.keys, self.cache.values))
        query = self.query[b, h].double() * self.scale
        scores = keys @ query
        if residual is not None and len(columns) < mid.sum():
            mid_values = torch.where(mid.unsqueeze(-1), self.cache.values[b, kv, :length].double(), 0)
            state = residual.prepare(mid_keys.float(), mid_values.float(), mid)
            moments = MomentState(*(part.double() for part in state))
            terms = truncated_terms(query.unsqueeze(0), moments, torch.tensor([threshold], dtype=torch.float64))
            scores = torch.cat((scores, terms.denominator.log() + terms.shift))
            values = torch.cat((values, terms.numerator / terms.denominator.unsqueeze(-1)))
        return (scores.softmax(0) @ values).tolist()


def tolerance(method: str) -> float:
    """Of a step in float32. Where a cluster is a single token, its mass is cut within 1e-4 of its score, and a rounding
    of 1e-7 of the score is one of 1e-3 of the mass.
    """
    return 1e-3 if method in ("moments of clusters", "shared moments", "scan, shared moments") else 2e-5


def nearly_all_retrieved(k: int, share: float) -> DecodeProblem:
    """One head. What it leaves has `share` of phi's mass in the mid-region, but weighs as much as all that is exact."""
    p = DecodeProblem(seed=21, spans=[(0, 24)], length=24, groups=1, kv_heads=1, d=16, dtype=torch.float32)
    filled = p.cache.length + p.generated
    scores = (p.cache.keys[0, 0, :filled] @ p.query[0, 0] * p.scale).double()
    _, mid = split(24, p.sink, p.tail)
    chosen = top(scores.tolist(), mid, k)
    left = [i for i in mid if i not in chosen]
    log_features, log_query = p.log_features[0, 0], p.log_query[0, 0].double()
    z = (log_query + log_features).exp().sum(-1)
    log_features[left] += (share / (1 - share) * z[chosen].sum() / z[left].sum()).log()
    exact = [i for i in range(filled) if i not in left]
    p.log_query += (scores[exact].exp().sum() / (log_query + log_features[left]).exp().sum()).log()
    p.cache = with_summary(p.cache, p.log_features, p.sink, p.tail)
    return p


def _parts(residual: Moments, keys: Tensor, sink: int, tail: int) -> list[list[int]]:
    """The mid-region's tokens of each part, of one head's prefix [L, D]."""
    _, mid = split(len(keys), sink, tail)
    if residual.parts == 1 or not mid:
        return [mid]
    inside, keys = torch.ones(len(mid), dtype=torch.bool), keys[mid]
    part = blocks(inside, residual.parts) if residual.split == "blocks" else clusters(keys, inside, residual.parts)
    return [[mid[i] for i in (part == p).nonzero().flatten().tolist()] for p in range(residual.parts)]


def _split(
    x: Tensor, first: int, last: int, length: int, generated: int
) -> tuple[list[list[float]], list[list[float]]]:
    """One head's prefix tokens and generated tokens."""
    x = x.double()
    return x[first:last].tolist(), x[length : length + generated].tolist()
