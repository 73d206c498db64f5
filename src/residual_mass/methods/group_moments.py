"""Gaussian scores within pages or clusters.

Shape letters: R = query rows sharing keys, L = keys, P = groups, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from residual_mass.methods.blocks import check_size
from residual_mass.methods.interface import BFLOAT16, Step
from residual_mass.methods.pages import page_members

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.core.moments import MomentState
    from residual_mass.methods.interface import Seen


class GroupedMoments(NamedTuple):
    """A `MomentState` with one covariance, and the group of every token."""

    count: Tensor
    mean_key: Tensor
    mean_value: Tensor
    key_covariance: Tensor
    value_key_covariance: Tensor
    spread: Tensor
    """As in `MomentState`; covariances in bfloat16."""
    group: Tensor
    """[..., L] int32; -1 outside the mid-region."""

    def moments(self, dtype: torch.dtype) -> MomentState:
        from residual_mass.core.moments import MomentState

        return MomentState(*(part.to(dtype) for part in self[:-1]))


@dataclass(frozen=True)
class GroupMoments:
    """Page means or centroids as in `GroupSums`, and around each a Gaussian with one covariance scaled to the group's
    own spread, cut at what the largest of the group's n scores is like, z = sqrt(2 ln n) deviations above their mean:
    a token then weighs exp(m + s^2 / 2) Phi(z - s) / Phi(z) in the mean. A group counts with its unread tokens.

    For selectors that leave unread what may score above what was read.
    """

    size: int = 16
    """Tokens of a group in the mean, as the selector's."""
    split: Literal["pages", "clusters"] = "clusters"
    """As the selector's, so that a step has read the mean keys."""
    recipe: ClassVar[int] = 1
    needs_maps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_size(self.size)
        if self.split not in ("pages", "clusters"):
            raise ValueError(f"split {self.split!r} is unknown; known are pages, clusters")

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> GroupedMoments:
        import torch

        from residual_mass.core.moments import shared_moments_of
        from residual_mass.core.parts import clusters_of

        mid, by_pages = mid.expand(keys.shape[:-1]), self.split == "pages"
        members = page_members(mid, self.size) if by_pages else clusters_of(keys, mid, self.size)
        group = torch.where(members.any(-1), members.to(torch.int8).argmax(-1), -1)
        made = shared_moments_of(keys, values, members.to(keys.dtype))
        covariances = {name: getattr(made, name).bfloat16() for name in ("key_covariance", "value_key_covariance")}
        return GroupedMoments(*made._replace(**covariances), group.int())

    def update(self, state: GroupedMoments, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> GroupedMoments:
        """Adds groups of the new tokens to the others, whose covariance stays."""
        import torch

        new, groups = self.prepare(keys, values, joined), state.count.shape[-1]
        ratio = _trace(new, keys.dtype) / _trace(state, keys.dtype).clamp_min(torch.finfo(keys.dtype).tiny)
        group = torch.where(new.group < 0, new.group, new.group + groups)
        return state._replace(
            count=torch.cat((state.count, new.count), -1),
            mean_key=torch.cat((state.mean_key, new.mean_key), -2),
            mean_value=torch.cat((state.mean_value, new.mean_value), -2),
            spread=torch.cat((state.spread, new.spread * ratio), -1),
            group=torch.cat((state.group[..., :start], group), -1),
        )

    def terms(self, seen: Seen, state: GroupedMoments) -> Terms:
        import torch

        from residual_mass.core.moments import grouped_terms

        dtype, groups = seen.queries.dtype, torch.arange(state.count.shape[-1], device=seen.queries.device)
        left = seen.unread.to(dtype) @ (state.group.unsqueeze(-1) == groups).to(dtype)
        return grouped_terms(seen.queries, state.moments(dtype), left)

    def summary_bytes(self, step: Step) -> float:
        """Mean values, counts and spreads, and both covariances."""
        return BFLOAT16 * ((step.width + 2) * -(-step.tokens // self.size) + 2 * step.width**2)


def _trace(state: GroupedMoments, dtype: torch.dtype) -> Tensor:
    """Of the keys' covariance: [..., 1]."""
    return state.key_covariance.to(dtype).diagonal(dim1=-2, dim2=-1).sum(-1)
