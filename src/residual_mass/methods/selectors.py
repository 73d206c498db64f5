"""Selectors that do not read every key: scans of all tokens, whole pages and clusters, and wrappers of other selectors.

Shape letters: R = query rows sharing keys, L = keys, K = retrieved tokens, N = blocks or pages, S = tokens of
a block, P = clusters, C = channels, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from residual_mass.methods.interface import BFLOAT16, INDEX, Choice, Layout, Selector, Step, best_of
from residual_mass.methods.lazy import moments, selection, torch

if TYPE_CHECKING:
    from torch import Tensor


# ---- blocks of adjacent rows: tokens of keys, or channels of values --------------------------------------------------


def blocks_of(x: Tensor, size: int) -> Tensor:
    """Splits rows into blocks: [..., L, C] -> [..., N, S, C], the last block padded with zeros."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size))


def bounds_of(x: Tensor, members: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns minima and maxima of x [..., L, C] over the rows `members` [..., L] bool of each block: [..., N, C]
    twice, zeros for a block without members.
    """
    blocks, inside = blocks_of(x, size), blocks_of(members.unsqueeze(-1), size)
    low, high = torch.where(inside, blocks, torch.inf).amin(-2), torch.where(inside, blocks, -torch.inf).amax(-2)
    return low.masked_fill(low == torch.inf, 0), high.masked_fill(high == -torch.inf, 0)


class Codes(NamedTuple):
    """Keys or values as integers, with a scale for each channel of a block of tokens, [..., N, D] (keys), or for each
    token and group of channels, [..., L, N] (values).
    """

    codes: Tensor  # [..., L, D] uint8, from 0 to 2^bits - 1
    low: Tensor  # bfloat16, the value of code 0
    step: Tensor  # bfloat16, the difference between the values of adjacent codes


def quantised(x: Tensor, members: Tensor, size: int, bits: int) -> Codes:
    """Quantises x [..., L, C] column by column over blocks, between the limits of `bounds_of`."""
    low, high = bounds_of(x, members, size)
    low, most = low.bfloat16(), 2**bits - 1
    step = ((high - low.to(x.dtype)) / most).bfloat16()
    width = step.to(x.dtype).clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-2)
    codes = ((blocks_of(x, size) - low.to(x.dtype).unsqueeze(-2)) / width).round().clamp(0, most)
    return Codes(codes.to(torch.uint8).flatten(-3, -2)[..., : x.shape[-2], :], low, step)


def restored(state: Codes, size: int, dtype: torch.dtype) -> Tensor:
    """Inverse of `quantised`, up to rounding."""
    low, step = (x.to(dtype).unsqueeze(-2) for x in (state.low, state.step))
    return (low + step * blocks_of(state.codes, size).to(dtype)).flatten(-3, -2)[..., : state.codes.shape[-2], :]


def appended(state: Sequence[Tensor], new: Sequence[Tensor], kept: Sequence[int]) -> tuple[Tensor, ...]:
    """Appends the tensors of a later summary to the first `kept` rows of the tensors of an earlier one."""
    return tuple(torch.cat((old[..., :n, :], part), -2) for old, part, n in zip(state, new, kept, strict=True))


# ---- scans of all tokens: unread tokens score below the K-th best in the same scan -----------------------------------


@dataclass(frozen=True)
class QuantisedScan(Selector):
    """Chooses the K mid-region tokens with the highest scores of quantised keys, asymmetric and per channel over blocks
    of tokens, as KIVI (arXiv 2402.02750) stores keys.

    The threshold keeps its meaning: unread tokens score below the K-th best in the same scan. The chosen tokens are
    then read exactly. A step reads bits / 8 D + 4 D / S bytes of each key.
    """

    title = "scan of few bits"
    cuts = scans = True
    bits: int = 4
    block: int = 64
    """S, tokens that share a scale. An update quantises whole blocks."""
    limits = {"bits": 8, "block": None}

    @property
    def fused(self) -> bool:
        return self.bits == 4

    def prepare(self, keys: Tensor, mid: Tensor) -> Codes:
        """Quantises keys. Anchors, which are always read, do not widen the range of a block."""
        return quantised(keys, mid, self.block, self.bits)

    def update(self, state: Codes, keys: Tensor, mid: Tensor, start: int) -> Codes:
        first = start // self.block
        column = first * self.block
        return Codes(*appended(state, self.prepare(keys[..., column:, :], mid[..., column:]), (column, first, first)))

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        return best_of(queries @ restored(state, self.block, queries.dtype).transpose(-1, -2), mid, k)

    def scan_bytes(self, step: Step) -> float:
        return step.tokens * step.width * (self.bits / 8 + 2 * BFLOAT16 / self.block)


@dataclass(frozen=True)
class Channels(Selector):
    """Chooses the K mid-region tokens with the highest scores by the principal channels of the prompt's keys (Loki,
    arXiv 2406.02542, takes the channels from other texts, and SparQ, arXiv 2312.04985, from the query).
    """

    title = "principal channels"
    cuts = scans = True
    channels: int = 16
    """C."""
    limits = {"channels": None}

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        """Returns the mean key [..., D] of the mid-region, the eigenvectors [..., D, C] of its covariance with the
        largest eigenvalues, and the centred keys [..., L, C] in that basis.
        """
        weights = mid.expand(keys.shape[:-1]).to(keys.dtype).unsqueeze(-1)
        mean = (weights * keys).sum(-2) / weights.sum(-2).clamp_min(1)
        centred = keys - mean.unsqueeze(-2)
        covariance = (weights * centred).transpose(-1, -2) @ centred
        basis = torch.linalg.eigh(covariance.double()).eigenvectors.flip(-1)[..., : self.channels].to(keys.dtype)
        return mean, basis, centred @ basis

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        """Keeps mean and basis."""
        mean, basis, reduced = state
        return mean, basis, *appended([reduced], [(keys[..., start:, :] - mean.unsqueeze(-2)) @ basis], [start])

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        mean, basis, reduced = state
        return best_of((queries @ basis) @ reduced.transpose(-1, -2) + queries @ mean.unsqueeze(-1), mid, k)

    def scan_bytes(self, step: Step) -> float:
        channels = min(self.channels, step.width)
        return BFLOAT16 * (step.tokens * channels + step.width * (channels + 1))


# ---- whole pages and clusters: unread tokens may score above those read ----------------------------------------------


@dataclass(frozen=True)
class Pages(Selector):
    """Chooses pages of adjacent tokens in the order of Quest's upper bound of their scores (arXiv 2406.10774).

    Whole pages are read up to K tokens, of the last page the first tokens. Unread tokens may score above those read.
    """

    title = "pages by bounds"
    scans = True
    size: int = 16
    """S."""
    limits = {"size": None}

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, Tensor]:
        return bounds_of(keys, mid, self.size)

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        first = start // self.size
        column = first * self.size
        return appended(state, self.prepare(keys[..., column:, :], mid[..., column:]), (first, first))

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        low, high = (x.transpose(-1, -2) for x in state)
        bounds = queries.clamp_min(0) @ high + queries.clamp_max(0) @ low  # [..., R, N]
        page = torch.arange(scores.shape[-1], device=scores.device) // self.size
        return whole_groups(bounds, page.expand(scores.shape), scores, mid, k)

    def scan_bytes(self, step: Step) -> float:
        return 2 * BFLOAT16 * step.width * -(-step.tokens // self.size)


@dataclass(frozen=True)
class WholeClusters(Selector):
    """Chooses k-means clusters of keys in the order of the scores of their mean keys, as RetroInfer (arXiv 2505.02922)
    and Squeezed Attention (arXiv 2411.09688) do.

    Whole clusters are read up to K tokens, of the last cluster the first tokens. Unread tokens may score above those
    read.
    """

    title = "whole clusters"
    scans = True
    size: int = 16
    """Mean number of tokens in a cluster: P = ceil(|M| / size)."""
    recipe = 2
    limits = {"size": None}

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean keys [..., P, D] and every token's cluster [..., L, 1] int32, 0 outside the mid-region."""
        cluster, clusters = moments.clusters_of(keys, mid, self.size), -(-keys.shape[-2] // self.size)
        _, centroids = moments.centroids_of(keys, cluster, clusters)
        return centroids, cluster.clamp_min(0).int().unsqueeze(-1)

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        """Clusters the tokens from column `start` on separately, and appends these clusters."""
        clusters = state[0].shape[-2]
        centroids, cluster = self.prepare(keys[..., start:, :], mid[..., start:])
        return appended(state, (centroids, cluster + clusters), (clusters, start))

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        centroids, cluster = state
        group = cluster.long().transpose(-1, -2).expand(scores.shape)
        return whole_groups(queries @ centroids.transpose(-1, -2), group, scores, mid, k)

    def scan_bytes(self, step: Step) -> float:
        return BFLOAT16 * step.width * -(-step.tokens // self.size)

    def kept_bytes(self, step: Step) -> float:
        """Adds the cluster of every token."""
        return self.scan_bytes(step) + INDEX * step.tokens


def whole_groups(group_scores: Tensor, group: Tensor, scores: Tensor, mid: Tensor, k: Tensor) -> Choice:
    """Chooses whole groups in the order of their scores; of the last group, the first tokens.

    Args:
        group_scores: [..., R, N]; of groups with equal scores, the first is chosen first.
        group: [..., R, L] int64, the group of every token.
        scores, mid, k: as in `Selector.select`.
    """
    tokens, groups = scores.shape[-1], group_scores.shape[-1]
    exact = torch.float32 if groups * tokens <= 2**24 else torch.float64  # represents all ranks exactly
    rank = group_scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1).to(exact)
    order = (-tokens * rank).gather(-1, group) - torch.arange(tokens, device=scores.device, dtype=exact)
    read, _ = selection.unordered_topk(order, mid, k)
    return Choice(read, selection.least_read(scores, mid, read), group_scores.gather(-1, group))


# ---- selectors made of another selector ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrapped(Selector):
    """Base of selectors that use the summary of another one, `scan`."""

    scan: Selector

    @property
    def reads_keys(self) -> bool:
        return self.scan.reads_keys

    @property
    def cuts(self) -> bool:
        return self.scan.cuts

    @property
    def scans(self) -> bool:
        return self.scan.scans

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        return self.scan.prepare(keys, mid)

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        return self.scan.update(state, keys, mid, start)

    def scan_bytes(self, step: Step) -> float:
        return self.scan.scan_bytes(step)

    def kept_bytes(self, step: Step) -> float:
        return self.scan.kept_bytes(step)


@dataclass(frozen=True)
class Reranked(Wrapped):
    """Chooses the K best tokens by exact scores among the K + margin best of a scan.

    The threshold is the K-th best exact score. In `Choice.scanned`, the K + margin tokens have their exact scores.
    """

    margin: int = 16
    """Tokens whose keys a query head reads in addition to the budget."""
    limits = {"margin": None}

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        wider = self.scan.select(queries, scores, state, mid, k + self.margin, layout)
        candidates = wider.read.mask(scores.shape[-1])
        best = best_of(scores, candidates, k)
        mixed = best_of(torch.where(candidates, scores, wider.scanned), mid, k)
        return Choice(best.read, torch.where(k > 0, best.threshold, mixed.threshold), mixed.scanned)

    def scan_bytes(self, step: Step) -> float:
        return self.scan.scan_bytes(step) + BFLOAT16 * step.width * step.heads * self.margin


@dataclass(frozen=True)
class CacheOnly(Wrapped):
    """Replaces the keys by the summary of a scan: at every budget, of the mid-region only the last `tail` tokens are
    read exactly. With `QuantisedValues` it is a quantised cache, which every step reads whole, and the only one.

    Anchors and generated tokens are read exactly, as by all methods.
    """

    title = "quantised cache"
    replaces_cache = True
    tail: int = 0

    def __post_init__(self) -> None:
        if self.tail < 0:
            raise ValueError(f"tail is {self.tail}, not 0 or more")
        if self.scan.reads_keys:
            raise ValueError(f"CacheOnly needs a scan that does not read the keys, not {type(self.scan).__name__}")

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        """Chooses the last `tail` tokens; the threshold is the highest score of the mid-region."""
        found = self.scan.select(queries, scores, state, mid, k * 0, layout)
        behind = mid.flip(-1).cumsum(-1).flip(-1)  # tokens from each one to the end of the mid-region
        newest = selection.members(mid & (behind <= self.tail), self.tail)
        read = (part.expand(*scores.shape[:-1], -1) for part in newest)
        return found._replace(read=selection.Selected(*read))


@dataclass(frozen=True)
class Rotated(Wrapped):
    """Rotates keys and queries before a scan, which does not change their products (QuaRot, arXiv 2404.00456): by the
    Hadamard matrix of the largest power of two that divides D, block by block.
    """

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        return self.scan.prepare(_rotated(keys), mid)

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        return self.scan.update(state, _rotated(keys), mid, start)

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        return self.scan.select(_rotated(queries), scores, state, mid, k, layout)


def _rotated(x: Tensor) -> Tensor:
    """Rotates x [..., D] by the fast Walsh-Hadamard transform."""
    width = x.shape[-1] & -x.shape[-1]
    blocks, half = x.unflatten(-1, (-1, width)), 1
    while half < width:
        low, high = blocks.unflatten(-1, (-1, 2, half)).unbind(-2)
        blocks = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return blocks.flatten(-2) * width**-0.5


@dataclass(frozen=True)
class PerGroup(Wrapped):
    """Chooses the same K tokens for all query heads of a KV head, as serving engines do: those with the largest share
    of attention by a scan, with softmax over the mid-region, summed over the heads.

    Unread tokens of a head may score above those that it reads.
    """

    title = "scan per KV group"
    cuts = False

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        scanned = self.scan.select(queries, scores, state, mid, k * 0, layout).scanned
        share = scanned.masked_fill(~mid, torch.finfo(scanned.dtype).min).softmax(-1)
        by_head = share.unflatten(-2, (-1, layout.heads, layout.tokens))
        read, _ = selection.unordered_topk(by_head.sum(-3, keepdim=True).expand_as(by_head).flatten(-4, -2), mid, k)
        return Choice(read, selection.least_read(scanned, mid, read), scanned)
