"""Interface of backends: what computes attention for a `Text` (`decode.text`), which is what calls the model.

The text says what each call is: a prompt or more of it (`read`), or tokens that each attend by the method (`step`). A
backend guesses nothing from sizes.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, T = new tokens, C = columns held with the new ones, D = head
dimension.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from residual_mass.methods.arms import Arm
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.settings import AnchorSpec


class LayerCall(NamedTuple):
    """What a layer asks of attention for T new tokens of each of B texts."""

    module: nn.Module
    """The attention layer; its `layer_idx` names it."""
    query: Tensor
    """[B, Hq, T, D], rotary-applied."""
    key: Tensor
    """[B, Hkv, T, D] of the new tokens, rotary-applied."""
    value: Tensor
    """[B, Hkv, T, D] of the new tokens."""
    mask: Tensor | None
    """bool [B or 1, 1, T, C], True where a query may look; None is plain causal attention without padding."""
    scale: float
    """Factor of the scores."""

    @property
    def index(self) -> int:
        """Index of the layer."""
        return self.module.layer_idx


class Backend(ABC):
    """Computes attention over a batch of texts whose keys and values it holds.

    `read` and `step` take the call of a layer that reads the whole text, store its keys and values, and return outputs
    [B, T, Hq, D] in the dtype of the queries. In layers with a window the text attends, over what `stored` returns.
    """

    name: ClassVar[str]
    knows_columns: ClassVar[bool] = False
    """Whether the backend itself knows which columns a query sees. It then gets calls of all layers, without masks."""
    repeats = False
    """Whether steps will be taken again after `crop`, so that each is worth recording."""
    records = False
    """Whether steps are replayed from a recording."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Number of columns that are held, padding included."""

    @abstractmethod
    def read(self, call: LayerCall) -> Tensor:
        """Reads a prompt, or more of it, by full attention."""

    @abstractmethod
    def step(self, call: LayerCall) -> Tensor:
        """Reads tokens of which each attends through the method: one when decoding, T of a given continuation."""

    @abstractmethod
    def stored(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values of a layer; returns its keys and values that are held, the new ones last."""

    def replayed(self, call: Callable[[Tensor, Tensor], Tensor], ids: Tensor, positions: Tensor) -> Tensor:
        """Runs `call`, one step of the model, which returns logits; a backend may record it once and replay it."""
        return call(ids, positions)

    def require_seen(self, real: Tensor) -> None:  # noqa: B027  most backends follow every mask
        """Raises ValueError unless a further turn reads the columns that are real, [B, C] bool of those that are held
        and of those to read, and no others.
        """

    def crop(self, tokens: int) -> None:
        """Forgets the last tokens of every row, which were steps."""
        raise ValueError(f"the {self.name} backend forgets no tokens")


class Prefill(NamedTuple):
    """State of a model after prompts of equal length."""

    layers: dict[int, tuple[Tensor, Tensor]]
    """Keys and values [B, Hkv, L, D] by layer."""
    next_token: Tensor = torch.tensor(0)
    """[B], the greedy continuation."""
    finite: Tensor = torch.tensor(True)
    """[B] bool, False where its logits are not finite."""


class CacheBackend(Backend):
    """A backend that decodes: it serves an arm on a model, over a cache.

    Attributes:
        cache: holds the keys and values; `generate` may hand it to a further turn as `past_key_values`.
    """

    cache: Cache
    reads_batches_in_parts: ClassVar[bool] = True
    """Whether several prompts, or one with padding, can be read piece by piece."""

    @classmethod
    @abstractmethod
    def refusal(cls, model: PreTrainedModel, arm: Arm, phi: PhiMaps | None = None) -> str | None:
        """Returns why the backend does not serve an arm on a model and its device, in one line; None if it does."""

    @classmethod
    @abstractmethod
    def open(
        cls, model: PreTrainedModel, arm: Arm, anchors: AnchorSpec, phi: PhiMaps | None, cache: Cache | None, room: int
    ) -> CacheBackend:
        """Returns a backend without tokens; arguments as for `backends.backend_for`, with an empty cache or None."""

    @property
    def tokens(self) -> int:
        return self.cache.get_seq_length()

    def stored(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        return self.cache.layers[call.index].update(call.key, call.value)

    def crop(self, tokens: int) -> None:
        if tokens:
            self.cache.crop(-tokens)

    def copy(self) -> Self:
        """Returns a backend that goes on by itself."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    @abstractmethod
    def take(self, read: Prefill) -> None:
        """Takes prompts without padding that were read elsewhere, in place of `read`."""

    @property
    @abstractmethod
    def kept_bytes(self) -> int:
        """Bytes of keys, values and summaries in memory."""
