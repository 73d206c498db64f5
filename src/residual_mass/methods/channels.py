"""A scan of the principal channels of keys.

Shape letters: R = query rows sharing keys, L = keys, C = channels kept, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from residual_mass.methods.interface import BFLOAT16, Choice, Layout, Step
from residual_mass.methods.topk import best_of

if TYPE_CHECKING:
    from torch import Tensor


class PrincipalKeys(NamedTuple):
    """Keys by their principal channels."""

    mean: Tensor
    """[..., D], of the mid-region."""
    basis: Tensor
    """[..., D, C], the eigenvectors of its covariance with the largest eigenvalues."""
    reduced: Tensor
    """[..., L, C], keys from the mean on, in that basis."""


@dataclass(frozen=True)
class Channels:
    """The K mid-region tokens of the highest scores by the principal channels of the prompt's keys (Loki, arXiv
    2406.02542, which takes the channels from other texts); SparQ (arXiv 2312.04985) takes channels of the query.

    It keeps the meaning of a threshold, as any scan of all tokens does.
    """

    channels: int = 16
    """C."""
    recipe: ClassVar[int] = 1
    reads_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ValueError(f"channels is {self.channels}, not 1 or more")

    def prepare(self, keys: Tensor, mid: Tensor) -> PrincipalKeys:
        import torch

        weights = mid.expand(keys.shape[:-1]).to(keys.dtype).unsqueeze(-1)
        mean = (weights * keys).sum(-2) / weights.sum(-2).clamp_min(1)
        centred = keys - mean.unsqueeze(-2)
        covariance = (weights * centred).transpose(-1, -2) @ centred
        basis = torch.linalg.eigh(covariance.double()).eigenvectors.flip(-1)[..., : self.channels].to(keys.dtype)
        return PrincipalKeys(mean, basis, centred @ basis)

    def update(self, state: PrincipalKeys, keys: Tensor, mid: Tensor, start: int) -> PrincipalKeys:
        """Keeps mean and basis."""
        import torch

        new = (keys[..., start:, :] - state.mean.unsqueeze(-2)) @ state.basis
        return state._replace(reduced=torch.cat((state.reduced[..., :start, :], new), -2))

    def select(
        self, queries: Tensor, scores: Tensor, state: PrincipalKeys, mid: Tensor, k: Tensor, layout: Layout
    ) -> Choice:
        scanned = (queries @ state.basis) @ state.reduced.transpose(-1, -2)
        return best_of(scanned + queries @ state.mean.unsqueeze(-1), mid, k)

    def scan_bytes(self, step: Step) -> float:
        channels = min(self.channels, step.width)
        return BFLOAT16 * (step.tokens * channels + step.width * (channels + 1))
