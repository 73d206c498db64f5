"""Gaussian scores within pages or clusters.

Shape letters: R = query rows sharing keys, L = keys, P = groups, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from residual_mass.methods.blocks import check_size, with_groups_of
from residual_mass.methods.interface import BFLOAT16, Step
from residual_mass.methods.pages import page_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.core.moments import MomentState
    from residual_mass.methods.interface import Seen, Selector


class GroupedMoments(NamedTuple):
    """A `MomentState` with one covariance, and the group of every token."""

    count: Tensor
    mean_key: Tensor
    mean_value: Tensor
    key_covariance: Tensor
    value_key_covariance: Tensor
    spread: Tensor
    """As in `MomentState`."""
    group: Tensor
    """[..., L] int32; -1 outside the mid-region."""

    def moments(self, dtype: torch.dtype) -> MomentState:
        """What a step reads: covariances are rounded to bfloat16."""
        from residual_mass.core.moments import MomentState

        made = MomentState(*(part.to(dtype) for part in self[:-1]))
        names = ("key_covariance", "value_key_covariance")
        return made._replace(**{name: getattr(made, name).bfloat16().to(dtype) for name in names})


@dataclass(frozen=True)
class GroupMoments:
    """Page means or centroids as in `GroupSums`, and around each a Gaussian with one covariance scaled to the group's
    own spread, cut at what the largest of the group's n scores is like, z = sqrt(2 ln n) deviations above their mean:
    a token then weighs exp(m + s^2 / 2) Phi(z - s) / Phi(z) in the mean. A group counts with its unread tokens.

    For selectors that leave unread what may score above what was read.
    """

    size: int | None = None
    """Tokens of a group in the mean; a `Method` takes the selector's."""
    split: Literal["pages", "clusters"] | None = None
    """Likewise, so that a step has read the mean keys."""
    recipe: ClassVar[int] = 2
    needs_maps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.size is not None:
            check_size(self.size)
        if self.split not in ("pages", "clusters", None):
            raise ValueError(f"split {self.split!r} is unknown; known are pages, clusters")

    def fitted(self, selector: Selector | None) -> GroupMoments:
        return with_groups_of(self, selector)

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> GroupedMoments:
        from residual_mass.core.moments import shared_moments_of
        from residual_mass.core.parts import clusters_of

        mid, by_pages = mid.expand(keys.shape[:-1]), self.split == "pages"
        group = page_of(mid, self.size) if by_pages else clusters_of(keys, mid, self.size)
        return GroupedMoments(*shared_moments_of(keys, values, group, -(-mid.shape[-1] // self.size)), group.int())

    def update(self, state: GroupedMoments, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> GroupedMoments:
        """Adds groups of the new tokens to the others; the covariance is then that within all groups."""
        import torch

        from residual_mass.core.moments import LEAST_VARIANCE, trace

        new, groups = self.prepare(keys, values, joined), state.count.shape[-1]
        count = torch.cat((state.count, new.count), -1)
        share = (new.count.sum(-1) / count.sum(-1).clamp_min(1))[..., None, None, None]
        key_covariance, value_key = (old + share * (late - old) for old, late in zip(state[3:5], new[3:5], strict=True))
        spreads = [x.spread * trace(x.key_covariance).clamp_min(LEAST_VARIANCE) for x in (state, new)]
        group = torch.where(new.group < 0, new.group, new.group + groups)
        return GroupedMoments(
            count,
            torch.cat((state.mean_key, new.mean_key), -2),
            torch.cat((state.mean_value, new.mean_value), -2),
            key_covariance,
            value_key,
            torch.cat(spreads, -1) / trace(key_covariance).clamp_min(LEAST_VARIANCE),
            torch.cat((state.group[..., :start], group), -1),
        )

    def terms(self, seen: Seen, state: GroupedMoments) -> Terms:
        from residual_mass.core.moments import grouped_terms

        dtype, groups = seen.queries.dtype, state.count.shape[-1]
        slot = (state.group.long() % (groups + 1)).unsqueeze(-2).expand(seen.unread.shape)  # the last one for none
        left = seen.queries.new_zeros(*slot.shape[:-1], groups + 1).scatter_add_(-1, slot, seen.unread.to(dtype))
        return grouped_terms(seen.queries, state.moments(dtype), left[..., :groups])

    def summary_bytes(self, step: Step) -> float:
        """Mean values, counts and spreads, and both covariances."""
        return BFLOAT16 * ((step.width + 2) * -(-step.tokens // self.size) + 2 * step.width**2)
