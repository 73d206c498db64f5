"""Residuals made of the scores that a selector saw of the unread tokens.

Shape letters: R = query rows sharing keys, L = keys, P = clusters, N = groups of channels, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from residual_mass.methods.interface import BFLOAT16, Residual, Selector, Step, check_range
from residual_mass.methods.selectors import WholeClusters, behind

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.methods.interface import Seen


ROUNDING = 64
"""Deviations of scores within clusters below this many roundings of the largest score count as this many."""


class ClusteredMoments(NamedTuple):
    """Means of clusters, and covariances within them of all tokens together. A step reads them in bfloat16."""

    count: Tensor
    """[..., P]."""
    mean_key: Tensor
    """[..., P, D]; a step does not read it, only tokens that join do."""
    mean_value: Tensor
    """[..., P, D]."""
    value_key_covariance: Tensor
    """[..., D, D], C: values by keys."""
    value_variance: Tensor
    """[..., D], of values within clusters."""
    cluster: Tensor
    """[..., L] int16, of every token; -1 outside the mid-region."""


@dataclass(frozen=True)
class ScanRegression(Residual):
    """The mass of the scanned scores s, and values regressed on them: with weights w = e^s over the unread tokens and
    m_p the mean score of cluster p,

        Z  = sum_i w_i
        nu = sum_p Z_p v_p + sum_i w_i (s_i - m_p(i)) C q / var(s),

    v_p the clusters' mean values, C the covariance of values and keys within clusters, and var(s) the variance of
    scores within clusters. Any scan of all tokens gives s, m and var(s) for nothing, and whatever was read, no cut is
    needed: it serves selectors whose threshold is none. We found no earlier use. SparQ (arXiv 2312.04985) takes the
    mass from such scores, in the direction of the mean value.

    C is of exact keys, var(s) of scanned ones. Where keys differ by less than the scan resolves, var(s) vanishes and C
    does not: the slope C q / var(s) is then cut to sd(v) / sd(s), the largest that any values and scores can have.
    """

    clusters: int = 1
    """P, of k-means of the keys."""
    recipe: ClassVar[int] = 2
    uses_scan: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("clusters", self.clusters, 2**15 - 2)

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> ClusteredMoments:
        from residual_mass.core.parts import blocks, clusters

        mid = mid.expand(keys.shape[:-1])
        part = clusters(keys, mid, self.clusters) if self.clusters > 1 else blocks(mid, 1)
        return _clustered(keys, values, part, self.clusters)

    def update(
        self, state: ClusteredMoments, keys: Tensor, values: Tensor, joined: Tensor, start: int
    ) -> ClusteredMoments:
        """Adds tokens to the clusters of the nearest mean key."""
        import torch

        from residual_mass.core.parts import nearest

        part = nearest(keys, joined.expand(keys.shape[:-1]), state.mean_key, state.count > 0)
        new = _clustered(keys, values, part, self.clusters)
        count = state.count + new.count
        share = (new.count / count.clamp_min(1)).unsqueeze(-1)
        key_step, value_step = new.mean_key - state.mean_key, new.mean_value - state.mean_value
        between = count.unsqueeze(-1) * share * (1 - share) * value_step
        total, old, late = (x.sum(-1).clamp_min(1).unsqueeze(-1) for x in (count, state.count, new.count))
        variance = old * state.value_variance + late * new.value_variance + (between * value_step).sum(-2)
        covariance = old.unsqueeze(-1) * state.value_key_covariance + late.unsqueeze(-1) * new.value_key_covariance
        return ClusteredMoments(
            count,
            state.mean_key + share * key_step,
            state.mean_value + share * value_step,
            (covariance + between.transpose(-1, -2) @ key_step) / total.unsqueeze(-1),
            variance / total,
            torch.cat((state.cluster[..., :start], new.cluster), -1),
        )

    def terms(self, seen: Seen, state: ClusteredMoments) -> Terms:
        import torch

        from residual_mass.core.accounting import Terms
        from residual_mass.core.moments import LEAST_VARIANCE

        assert seen.scanned is not None, "the selector's scores are missing"
        dtype = seen.queries.dtype
        count = state.count.to(dtype)
        members = (state.cluster.unsqueeze(-1) == torch.arange(count.shape[-1], device=count.device)).to(dtype)
        inside = (state.cluster >= 0).unsqueeze(-2)  # [..., 1, L]
        offset = torch.where(inside, seen.scanned, 0)
        rounding = ROUNDING * torch.finfo(dtype).eps * torch.linalg.vector_norm(offset, torch.inf, dim=-1)
        mean = offset @ members / count.clamp_min(1).unsqueeze(-2)  # [..., R, P]
        offset -= mean @ members.transpose(-1, -2)  # stays 0 outside the mid-region
        variance = torch.linalg.vector_norm(offset, dim=-1).square() / count.sum(-1, keepdim=True).clamp_min(1)
        deviation = torch.maximum(variance.clamp_min(LEAST_VARIANCE).sqrt(), rounding).unsqueeze(-1)

        weights = torch.where(seen.unread, seen.scanned, -torch.inf)
        shift = weights.amax(-1)
        shift = torch.where(shift > -torch.inf, shift, 0)
        weights = weights.sub_(shift.unsqueeze(-1)).exp_()
        mean_value, covariance, value_variance = (x.bfloat16().to(dtype) for x in state[2:5])
        along = (weights * offset).sum(-1, keepdim=True) / deviation
        steepest = value_variance.sqrt().unsqueeze(-2)
        slope = (seen.queries @ covariance.transpose(-1, -2) / deviation).clamp(-steepest, steepest)
        return Terms((weights @ members) @ mean_value + along * slope, weights.sum(-1), shift)

    def summary_bytes(self, step: Step) -> float:
        """Mean values, counts, C, the values' variance, and with several clusters a byte or two for the cluster of
        every token.
        """
        cluster = 0 if self.clusters == 1 else 1 if self.clusters <= 2**8 else 2
        numbers = step.width * (step.width + 1) + self.clusters * (step.width + 1)
        return BFLOAT16 * numbers + cluster * step.tokens

    def kept_bytes(self, step: Step) -> float:
        """Mean keys besides, for tokens that join."""
        return self.summary_bytes(step) + BFLOAT16 * self.clusters * step.width


def _clustered(keys: Tensor, values: Tensor, part: Tensor, clusters: int) -> ClusteredMoments:
    """Summarises clusters, given that of every token, [..., L] int64, -1 for none."""
    import torch

    from residual_mass.core.moments import from_own, shared_moments_of

    made = shared_moments_of(keys, values, part, clusters)
    away = from_own(values, made.mean_value, part).square()
    variance = torch.where((part >= 0).unsqueeze(-1), away, 0).sum(-2)
    variance = variance / made.count.sum(-1, keepdim=True).clamp_min(1)
    covariance = made.value_key_covariance.squeeze(-3)
    return ClusteredMoments(*made[:3], covariance, variance, part.to(torch.int16))


@dataclass(frozen=True)
class GroupSums(Residual):
    """Every unread token has the score of its cluster: centroids with counts and value sums, less the tokens that were
    read (RetroInfer's estimation zone, arXiv 2505.02922).

    For `WholeClusters`. Sums over unread tokens are formed here token by token, which is the same as the clusters' sums
    less what was read.
    """

    size: int | None = None
    """Tokens of a cluster in the mean; a `Method` takes the selector's."""
    uses_scan: ClassVar[bool] = True

    def fitted(self, selector: Selector) -> GroupSums:
        inner = getattr(selector, "scan", selector)
        if not isinstance(inner, WholeClusters):
            raise ValueError(f"GroupSums needs WholeClusters, not {type(inner).__name__}")
        if self.size not in (None, inner.size):
            raise ValueError(f"GroupSums has size={self.size}, WholeClusters {inner.size}: leave it out of GroupSums")
        return replace(self, size=inner.size)

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> tuple[()]:
        return ()

    def update(self, state: tuple[()], keys: Tensor, values: Tensor, joined: Tensor, start: int) -> tuple[()]:
        return ()

    def terms(self, seen: Seen, state: tuple[()]) -> Terms:
        from residual_mass.core.accounting import exact_terms

        assert seen.scanned is not None, "the selector's scores are missing"
        return exact_terms(seen.scanned, seen.values, seen.unread)

    def summary_bytes(self, step: Step) -> float:
        """Value sums and counts."""
        return BFLOAT16 * (step.width + 1) * -(-step.tokens // self.size)


class ValueCodes(NamedTuple):
    """Values as integers, with a scale for each group of channels of each token."""

    codes: Tensor
    """[..., L, D] uint8, from 0 to 2^bits - 1."""
    low: Tensor
    """[..., L, N] bfloat16, the value of code 0."""
    step: Tensor
    """[..., L, N] bfloat16, the difference of neighbouring codes."""


@dataclass(frozen=True)
class QuantisedValues(Residual):
    """Every unread token with the score that the selector saw and its own value, quantised: asymmetric, per token over
    groups of channels, as KIVI (arXiv 2402.02750) stores values. Every value is read, in bits / 8 D + 4 N bytes.
    """

    bits: int = 4
    group: int = 64
    """Channels of a group, at most; D where it is less."""
    uses_scan: ClassVar[bool] = True
    holds_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("bits", self.bits, 8)
        check_range("group", self.group, of=" channels")

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> ValueCodes:
        import torch

        groups, most = values.split(self.group, -1), 2**self.bits - 1
        low = torch.stack([x.amin(-1) for x in groups], -1).bfloat16()
        step = ((torch.stack([x.amax(-1) for x in groups], -1) - low.to(values.dtype)) / most).bfloat16()
        width = self._by_channel(step, values).clamp_min(torch.finfo(torch.float32).tiny)
        codes = ((values - self._by_channel(low, values)) / width).round().clamp(0, most)
        return ValueCodes(codes.to(torch.uint8), low, step)

    def update(self, state: ValueCodes, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> ValueCodes:
        return ValueCodes(*behind(state, self.prepare(keys, values, joined), (start,) * 3))

    def terms(self, seen: Seen, state: ValueCodes) -> Terms:
        from residual_mass.core.accounting import exact_terms

        assert seen.scanned is not None, "the selector's scores are missing"
        codes = state.codes.to(seen.queries.dtype)
        values = self._by_channel(state.low, codes) + self._by_channel(state.step, codes) * codes
        return exact_terms(seen.scanned, values, seen.unread)

    def summary_bytes(self, step: Step) -> float:
        return step.tokens * (step.width * self.bits / 8 + 2 * BFLOAT16 * -(-step.width // self.group))

    def _by_channel(self, of_group: Tensor, x: Tensor) -> Tensor:
        """[..., L, N] -> [..., L, D], of the dtype of x [..., L, D]."""
        return of_group.to(x.dtype).repeat_interleave(self.group, dim=-1)[..., : x.shape[-1]]
