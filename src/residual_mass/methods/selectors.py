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
    missing = -x.shape[-2] % size
    padded = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return padded.unflatten(-2, (-1, size))


def _rows_of(blocks: Tensor, rows: int) -> Tensor:
    """Inverse of `blocks_of`, which cuts the padding off: [..., N, S, C] -> [..., L, C] for L rows."""
    return blocks.flatten(-3, -2)[..., :rows, :]


def bounds_of(x: Tensor, members: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns minima and maxima of x [..., L, C] over the rows `members` [..., L] bool of each block: [..., N, C]
    twice, zeros for a block without members.
    """
    blocks = blocks_of(x, size)
    inside = blocks_of(members.unsqueeze(-1), size)
    low = torch.where(inside, blocks, torch.inf).amin(-2)
    low = low.masked_fill(low == torch.inf, 0)
    high = torch.where(inside, blocks, -torch.inf).amax(-2)
    high = high.masked_fill(high == -torch.inf, 0)
    return low, high


class Quantised(NamedTuple):
    """Keys or values as integers, with a scale for each channel of a block of tokens, [..., N, D] (keys), or for each
    token and group of channels, [..., L, N] (values).
    """

    codes: Tensor  # [..., L, D] uint8, from 0 to 2^bits - 1
    low: Tensor  # bfloat16, the value of code 0
    step: Tensor  # bfloat16, the difference between the values of adjacent codes


def quantised(x: Tensor, members: Tensor, size: int, bits: int) -> Quantised:
    """Quantises x [..., L, C] column by column over blocks, between the limits of `bounds_of`."""
    most = 2**bits - 1
    low, high = bounds_of(x, members, size)
    stored_low = low.bfloat16()
    low = stored_low.to(x.dtype)  # codes are relative to the rounded numbers, by which they are restored
    stored_step = ((high - low) / most).bfloat16()
    step = stored_step.to(x.dtype)
    step = step.clamp_min(torch.finfo(torch.float32).tiny)  # a block of equal numbers has a step of 0
    codes = blocks_of(x, size) - low.unsqueeze(-2)
    codes = codes / step.unsqueeze(-2)
    codes = codes.round_().clamp_(0, most)
    codes = _rows_of(codes.to(torch.uint8), x.shape[-2])
    return Quantised(codes, stored_low, stored_step)


def restored(state: Quantised, size: int, dtype: torch.dtype) -> Tensor:
    """Inverse of `quantised`, up to rounding."""
    low = state.low.to(dtype).unsqueeze(-2)
    step = state.step.to(dtype).unsqueeze(-2)
    numbers = blocks_of(state.codes, size).to(dtype)
    numbers = step * numbers
    numbers = low + numbers
    return _rows_of(numbers, state.codes.shape[-2])


def appended(state: Sequence[Tensor], new: Sequence[Tensor], kept: Sequence[int]) -> tuple[Tensor, ...]:
    """Appends the tensors of a later summary to the first `kept` rows of the tensors of an earlier one."""
    joined = []
    for old, part, rows in zip(state, new, kept, strict=True):
        unchanged = old[..., :rows, :]
        joined.append(torch.cat((unchanged, part), -2))
    return tuple(joined)


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

    def prepare(self, keys: Tensor, mid: Tensor) -> Quantised:
        """Quantises keys. Anchors, which are always read, do not widen the range of a block."""
        return quantised(keys, mid, self.block, self.bits)

    def update(self, state: Quantised, keys: Tensor, mid: Tensor, start: int) -> Quantised:
        first = start // self.block
        column = first * self.block
        new_keys = keys[..., column:, :]
        new = self.prepare(new_keys, mid[..., column:])
        return Quantised(*appended(state, new, (column, first, first)))

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        keys = restored(state, self.block, queries.dtype)
        return best_of(queries @ keys.transpose(-1, -2), mid, k)

    def scan_bytes(self, step: Step) -> float:
        bytes_per_number = self.bits / 8 + 2 * BFLOAT16 / self.block
        return step.tokens * step.width * bytes_per_number


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
        inside = mid.expand(keys.shape[:-1])
        weights = inside.to(keys.dtype).unsqueeze(-1)
        total = (weights * keys).sum(-2)
        mean = total / weights.sum(-2).clamp_min(1)
        centred = keys - mean.unsqueeze(-2)
        covariance = (weights * centred).transpose(-1, -2) @ centred
        ascending = torch.linalg.eigh(covariance.double()).eigenvectors
        principal = ascending.flip(-1)[..., : self.channels]
        basis = principal.to(keys.dtype)
        return mean, basis, centred @ basis

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        """Keeps mean and basis."""
        mean, basis, reduced = state
        centred = keys[..., start:, :] - mean.unsqueeze(-2)
        (reduced,) = appended([reduced], [centred @ basis], [start])
        return mean, basis, reduced

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        mean, basis, reduced = state
        scanned = (queries @ basis) @ reduced.transpose(-1, -2)
        scanned = scanned + queries @ mean.unsqueeze(-1)  # keys are stored less their mean
        return best_of(scanned, mid, k)

    def scan_bytes(self, step: Step) -> float:
        channels = min(self.channels, step.width)
        basis_and_mean = step.width * (channels + 1)
        return BFLOAT16 * (step.tokens * channels + basis_and_mean)


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
        new_keys = keys[..., column:, :]
        new = self.prepare(new_keys, mid[..., column:])
        return appended(state, new, (first, first))

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        low, high = state  # [..., N, D]
        # A channel's product with any key of the page is largest at `high` where the query is positive, else at `low`.
        from_high = queries.clamp_min(0) @ high.transpose(-1, -2)
        from_low = queries.clamp_max(0) @ low.transpose(-1, -2)
        bounds = from_high + from_low  # [..., R, N]
        columns = torch.arange(scores.shape[-1], device=scores.device)
        page = columns // self.size
        return whole_groups(bounds, page.expand(scores.shape), scores, mid, k)

    def scan_bytes(self, step: Step) -> float:
        pages = -(-step.tokens // self.size)
        return 2 * BFLOAT16 * step.width * pages


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
        clusters = -(-keys.shape[-2] // self.size)
        cluster = moments.clusters_of(keys, mid, self.size)
        _, centroids = moments.centroids_of(keys, cluster, clusters)
        return centroids, cluster.clamp_min(0).int().unsqueeze(-1)

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        """Clusters the tokens from column `start` on separately, and appends these clusters."""
        clusters = state[0].shape[-2]
        new_keys = keys[..., start:, :]
        centroids, cluster = self.prepare(new_keys, mid[..., start:])
        return appended(state, (centroids, cluster + clusters), (clusters, start))

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        centroids, cluster = state
        group = cluster.long().transpose(-1, -2).expand(scores.shape)
        group_scores = queries @ centroids.transpose(-1, -2)
        return whole_groups(group_scores, group, scores, mid, k)

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
    tokens = scores.shape[-1]
    groups = group_scores.shape[-1]
    exact = torch.float32 if groups * tokens <= 2**24 else torch.float64  # represents all ranks exactly
    descending = group_scores.argsort(dim=-1, descending=True, stable=True)
    rank = descending.argsort(dim=-1).to(exact)  # the inverse of the permutation
    columns = torch.arange(tokens, device=scores.device, dtype=exact)
    # Sorts tokens by the rank of their group, then by column: the K largest are the K first.
    order = (-tokens * rank).gather(-1, group) - columns
    read, _ = selection.unordered_topk(order, mid, k)
    threshold = selection.least_read(scores, mid, read)
    return Choice(read, threshold, group_scores.gather(-1, group))


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
        rows = scores.shape[:-1]
        indices = newest.indices.expand(*rows, -1)
        valid = newest.valid.expand(*rows, -1)
        return found._replace(read=selection.Selected(indices, valid))


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
    blocks = x.unflatten(-1, (-1, width))
    half = 1
    while half < width:
        pairs = blocks.unflatten(-1, (-1, 2, half))
        low, high = pairs.unbind(-2)
        pairs = torch.stack((low + high, low - high), -2)
        blocks = pairs.flatten(-3)
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
        found = self.scan.select(queries, scores, state, mid, k * 0, layout)
        scanned = found.scanned
        least = torch.finfo(scanned.dtype).min  # finite, so that a row without a mid-region is not NaN
        share = scanned.masked_fill(~mid, least).softmax(-1)
        by_head = share.unflatten(-2, (-1, layout.heads, layout.tokens))  # [..., arms, heads, tokens, L]
        of_group = by_head.sum(-3, keepdim=True).expand_as(by_head)
        of_group = of_group.flatten(-4, -2)  # [..., R, L]
        read, _ = selection.unordered_topk(of_group, mid, k)
        return Choice(read, selection.least_read(scanned, mid, read), scanned)
