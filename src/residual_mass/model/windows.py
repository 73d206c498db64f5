"""Which layers of a model read the whole text, and which only a window of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

Position = TypeVar("Position", int, Tensor)

SLIDING = ("sliding_attention", "hybrid_sliding")
CHUNKED = ("chunked_attention",)
WHOLE = ("full_attention", "hybrid", "attention")
"""Layer types of transformers' configurations; `hybrid` ones have recurrent states beside their attention."""


@dataclass(frozen=True)
class Window:
    """The tokens that a query sees: the last `size` with its own, or those since the last multiple of `size`."""

    size: int
    chunked: bool = False

    def first(self, query: Position) -> Position:
        """Returns the first position that the query at a position sees, below 0 where the text is shorter."""
        return query // self.size * self.size if self.chunked else query - self.size + 1


def window_of(layer: nn.Module) -> Window | None:
    """Returns the window of an attention layer, None if it reads the whole text.

    Raises:
        ValueError: the layer is of another kind, such as one that chooses blocks of tokens itself.
    """
    kind = _layer_type(layer.config, layer.layer_idx)
    if kind in SLIDING:
        return Window(layer.config.sliding_window)
    if kind in CHUNKED:
        return Window(layer.config.attention_chunk_size, chunked=True)
    if kind not in WHOLE:
        raise ValueError(f"{type(layer).__name__} is a layer of type {kind}, which reads a choice of its own")
    return None


def _layer_type(config: Any, index: int) -> str:
    """Looks up a layer's type, as transformers' caches do."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return types[index]
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        return "sliding_attention"
    return "chunked_attention" if getattr(config, "attention_chunk_size", None) is not None else "full_attention"
