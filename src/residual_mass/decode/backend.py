"""Interface of a decode step: a backend holds keys and values of a batch of texts and attends to them by one method.

The caller says what each call of the model is: a prompt or more of it (`read`), one new token of each text (`step`), or
drafts (`verify`). A backend guesses nothing from sizes. It attends in layers that read the whole text; the caller does
in layers with a window, whose keys and values its cache holds too.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, T = new tokens, C = columns held with the new ones, D = head
dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from residual_mass.methods.arms import Arm
from residual_mass.model.hook import Prefill
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.settings import AnchorSpec


class Backend(ABC):
    """Holds keys and values of a batch of texts in all layers, and computes the attention of one arm over them.

    `read`, `step` and `verify` take an attention module, whose `layer_idx` names the layer, rotary-applied queries
    [B, Hq, T, D], keys and values [B, Hkv, T, D] of the new tokens, a mask, and the factor of the scores. They store
    the keys and values, and return outputs [B, T, Hq, D] in the dtype of the queries. The mask is bool
    [B or 1, 1, T, C], True where a query may look; None is plain causal attention without padding.

    Attributes:
        cache: holds the keys and values; `generate` may hand it to a further turn as `past_key_values`.
        partial_calls: number of decode steps through the method, by index of the layer.
    """

    name: ClassVar[str]
    """As in `methods.served`."""
    cache: Cache
    partial_calls: dict[int, int]
    reads_batches_in_parts: ClassVar[bool] = True
    """Whether several prompts, or one with padding, can be read piece by piece."""
    repeats = False
    """Whether steps will be taken again after `crop`, so that each is worth recording."""
    records = False
    """Whether steps are replayed from a recording."""

    @classmethod
    @abstractmethod
    def refusal(cls, model: PreTrainedModel, arm: Arm, phi: PhiMaps | None = None) -> str | None:
        """Returns why the backend does not serve an arm on a model and its device, in one line; None if it does."""

    @classmethod
    @abstractmethod
    def crops(cls, model: PreTrainedModel, arm: Arm) -> bool:
        """Returns whether tokens of an arm can be removed from a backend that `open` returns."""

    @classmethod
    @abstractmethod
    def open(
        cls,
        model: PreTrainedModel,
        arm: Arm,
        anchors: AnchorSpec,
        phi: PhiMaps | None,
        cache: Cache | None,
        crop: bool,
        room: int,
    ) -> Backend:
        """Returns a backend without tokens; arguments as for `backends.backend_for`, with an empty cache or None."""

    @abstractmethod
    def read(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Reads a prompt, or more of it, by full attention."""

    @abstractmethod
    def step(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Reads one new token of each text (T = 1) through the method."""

    @abstractmethod
    def verify(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Reads drafts by full attention; `crop` may remove them again."""

    @abstractmethod
    def take(self, read: Prefill) -> None:
        """Takes prompts without padding that were prefilled elsewhere, in place of `read`."""

    def replayed(self, call: Callable[[Tensor, Tensor], Tensor], ids: Tensor, positions: Tensor) -> Tensor:
        """Runs `call`, one step of the model, which returns logits; a backend may record it once and replay it."""
        return call(ids, positions)

    @property
    @abstractmethod
    def can_crop(self) -> bool:
        """Whether `crop` can remove tokens."""

    def reserve(self, tokens: int) -> None:  # noqa: B027  # most backends have nothing to prepare
        """Prepares for up to this many tokens that `crop` may remove again."""

    def crop(self, tokens: int) -> None:
        """Removes the last tokens of every row."""
        if tokens:
            self.cache.crop(-tokens)

    @property
    @abstractmethod
    def kept_bytes(self) -> int:
        """Bytes of keys, values and summaries in memory."""
