"""Truncated moments: the unread tokens' terms in closed form, without training.

Shape letters: L = keys, N = tokens that join, P = parts, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from residual_mass.methods.interface import BFLOAT16, FLOAT32, Step

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.core.moments import MomentState
    from residual_mass.methods.interface import Seen


@dataclass(frozen=True)
class OnePart:
    """Keeps the moments of the mid-region's keys and values, 2 D^2 + 2 D + 2 numbers a KV head."""

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> MomentState:
        from residual_mass.core.moments import moments_of
        from residual_mass.core.parts import blocks

        return moments_of(keys, values, blocks(mid.expand(keys.shape[:-1]), 1))

    def update(self, state: MomentState, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> MomentState:
        from residual_mass.core.moments import merged

        return merged(state, OnePart.prepare(self, keys, values, joined))

    def summary_bytes(self, step: Step) -> float:
        return FLOAT32 * moment_numbers(step.width, 1, shared=False)


def moment_numbers(width: int, parts: int, shared: bool) -> int:
    """Counts the numbers of a `MomentState`."""
    return 2 * width**2 * (1 if shared else parts) + parts * (2 * width + 2)


@dataclass(frozen=True)
class Moments:
    """Gaussian scores cut at the selection threshold (`core.moments`). We found no earlier use of the cut.

    P parts of the mid-region have moments of their own, P (2 D^2 + 2 D + 2) numbers a KV head. With `shared` they have
    counts, means and spreads of their own and one covariance, 2 D^2 + P (2 D + 2) numbers.
    """

    parts: int = 1
    """P. With more parts than tokens some stay empty."""
    split: Literal["blocks", "clusters"] = "clusters"
    """Runs of neighbours, or k-means clusters of the keys."""
    shared: bool = False
    """Whether parts share their covariances, each scaled by its own spread."""
    takes_out: bool = False
    """Whether the tokens that were read are taken out of the moments first; with one part only."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What a step reads means and covariances in. They are kept in float32, so that tokens that join are not lost in
    rounding.
    """
    recipe: ClassVar[int] = 1
    needs_maps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts is {self.parts}, not 1 or more")
        if self.split not in ("blocks", "clusters"):
            raise ValueError(f"split {self.split!r} is unknown; known are blocks, clusters")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype {self.dtype!r} is unknown; known are float32, bfloat16")
        if self.takes_out and self.parts > 1:
            raise ValueError(f"takes_out needs parts=1, not {self.parts}: the parts of tokens are not kept")

    @property
    def fused(self) -> bool:
        """Whether `core.fused` has a fast decode step for it."""
        return not self.takes_out and self.dtype == "float32"

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> MomentState:
        from residual_mass.core import moments, parts

        mid, by_blocks = mid.expand(keys.shape[:-1]), self.parts == 1 or self.split == "blocks"
        part = parts.blocks(mid, self.parts) if by_blocks else parts.clusters(keys, mid, self.parts)
        return (moments.shared_moments_of if self.shared else moments.moments_of)(keys, values, part, self.parts)

    def update(self, state: MomentState, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> MomentState:
        """Adds tokens to the last block, or to the cluster with the nearest mean key."""
        from residual_mass.core import moments, parts

        present = state.count > 0
        if self.split == "blocks":
            present = present & (present.cumsum(-1) == present.sum(-1, keepdim=True))
        part = parts.nearest(keys, joined.expand(keys.shape[:-1]), state.mean_key, present)
        return moments.merged(state, moments.moments_of(keys, values, part, self.parts))

    def terms(self, seen: Seen, state: MomentState) -> Terms:
        from residual_mass.core.moments import MomentState, rest_terms, truncated_terms
        from residual_mass.core.rows import rows_at

        if self.dtype == "bfloat16":
            count, *means, spread = state
            state = MomentState(count, *(part.bfloat16().to(seen.queries.dtype) for part in means), spread)
        if not self.takes_out:
            return truncated_terms(seen.queries, state, seen.threshold)
        scores, values = seen.scores.gather(-1, seen.read.indices), rows_at(seen.values, seen.read.indices)
        return rest_terms(seen.queries, state, seen.threshold, scores, values, seen.read.valid)

    def summary_bytes(self, step: Step) -> float:
        size = FLOAT32 if self.dtype == "float32" else BFLOAT16
        return size * moment_numbers(step.width, self.parts, self.shared)
