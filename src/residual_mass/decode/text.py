"""Calls of a model that holds no state: a `TextBatch` says what each call is, and a backend owns the keys and values.

The model is called without a cache, at given positions. Its attention is one registered function (`model.hook`), which
asks the text whose call is running in this thread. Other threads get the model's own attention, and so does this one
outside of these calls.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, T = new tokens, C = columns so far with the new ones, V =
vocabulary, D = head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from residual_mass.decode.backend import Backend
from residual_mass.decode.compiled import CompiledStep, logits_of
from residual_mass.model.hook import configs_of, exact_attention, running, switched
from residual_mass.model.layers import AttentionWindow, attention_layers, text_config, window_of
from residual_mass.model.memory import give_back_memory

PIECE = 1024
"""Queries that a layer with a window reads at once."""
LONG_PROMPT = 2048
"""Tokens read at once after which freed memory is given back to the system: below, there is little of it."""


class TextBatch:
    """A batch of texts that a model reads and continues through a backend.

    Args:
        model: one that `loop_refusal` does not refuse.
        backend: owns the keys and values; it may hold earlier turns.
        real: [B, C] bool, False on padding, of the columns that are held and of those to read; None without padding.
        compiled: takes steps, if the backend does not replay them; None calls the model itself.

    Attributes:
        tokens: number of columns that the backend holds, padding included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: Backend,
        real: Tensor | None = None,
        compiled: CompiledStep | None = None,
    ) -> None:
        self.model = model
        self.backend = backend
        self.real = real
        self.tokens = backend.cache.get_seq_length()
        layers = attention_layers(model)
        self.layers = {layer.layer_idx: layer for layer in layers}
        self.configs = configs_of(model, layers)
        self.windows = {layer.layer_idx: window_of(layer) for layer in layers}
        self.compiled = compiled
        self._count = TokenCount(self) if getattr(text_config(model), "attn_temperature_tuning", False) else None
        self._called: set[int] = set()
        self._attend: Callable[..., Tensor] = backend.read
        self._masks: dict[tuple[AttentionWindow | None, int, int], Tensor | None] = {}

    def read(self, ids: Tensor) -> Tensor:
        """Reads a prompt, or more of it, [B, T], exactly; returns the logits [B, 1, V] after its last token."""
        logits = self._forward(self.backend.read, ids, self._positions(ids), 1)
        self.tokens += ids.shape[1]
        if ids.numel() >= LONG_PROMPT:
            give_back_memory()
        return logits

    def step(self, ids: Tensor) -> Tensor:
        """Reads one new token of each text, [B, 1], through the method; returns the logits [B, 1, V] after it."""
        step = functools.partial(self._forward, self.backend.step, keep=1, compiled=self.compiled)
        logits = self.backend.replayed(step, ids, self._positions(ids))
        self.tokens += 1
        return logits

    def verify(self, ids: Tensor) -> Tensor:
        """Reads drafts [B, T] exactly; returns the logits [B, T, V] after each of them."""
        logits = self._forward(self.backend.verify, ids, self._positions(ids), 0)
        self.tokens += ids.shape[1]
        return logits

    def crop(self, tokens: int) -> None:
        """Removes the last tokens of every row."""
        self.backend.crop(tokens)
        self.tokens -= tokens

    def restart(self) -> None:
        """Forgets all tokens, so that the whole text can be read again."""
        if isinstance(self.backend.cache, DynamicCache):
            self.backend.cache.crop(-self.tokens)
        else:
            self.backend.cache.reset()
        self.tokens = 0

    def _forward(
        self,
        attend: Callable[..., Tensor],
        ids: Tensor,
        positions: Tensor,
        keep: int,
        compiled: CompiledStep | None = None,
    ) -> Tensor:
        self._attend = attend
        self._called.clear()
        self._masks.clear()
        mask = torch.ones(len(ids), 1, 1, 1, dtype=torch.bool, device=ids.device)
        with called(self):
            if compiled is None:
                logits = logits_of(self.model, ids, positions, mask, self._count, keep)
            else:
                logits = self._compiled_logits(compiled, ids, positions, mask)
        if len(self._called) < len(self.windows):
            missing = sorted(set(self.windows) - self._called)
            raise RuntimeError(f"layers {missing} of {type(self.model).__name__} bypassed the attention function")
        return logits

    def _compiled_logits(self, compiled: CompiledStep, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Returns the logits of a compiled step; of the model itself from now on, if it cannot be compiled."""
        # A graph is for one memory layout, and these can be views of longer tensors.
        ids = ids.clone(memory_format=torch.contiguous_format)
        positions = positions.clone(memory_format=torch.contiguous_format)
        try:
            return compiled(ids, positions, mask)
        except Exception as error:
            if self._called:
                raise  # of the step itself, which has begun
            self.compiled = None
            logits = logits_of(self.model, ids, positions, mask, self._count, 1)
            compiled.give_up(error)  # otherwise the error is the model's own, and was raised again
            return logits

    def _positions(self, ids: Tensor) -> Tensor:
        """Returns the positions [B, T] of new tokens, counted without padding; 0 on padding."""
        end = self.tokens + ids.shape[1]
        if self.real is None:
            columns = torch.arange(self.tokens, end, device=ids.device)
            return columns.expand(len(ids), -1)
        generated = end - self.real.shape[1]
        if generated > 0:
            self.real = nn.functional.pad(self.real, (0, generated), value=True)
        positions = self.real.cumsum(1) - 1
        return positions.clamp_min(0)[:, self.tokens : end]

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Computes the attention [B, T, Hq, D] of a layer; arguments as for `Backend.read`."""
        module = self.layers[index]
        if index in self._called:
            raise ValueError(f"{type(module).__name__} attends several times to one token, which is not supported")
        self._called.add(index)
        window = self.windows[index]
        if window is None:
            mask = self._mask(None, 0, self.tokens, query)
            return self._attend(module, query, key, value, mask, scale)
        keys, values = self.backend.cache.layers[index].update(key, value)
        outputs = []
        for first in range(0, query.shape[2], PIECE):
            # A piece of the queries at a time, so that masks are as wide as a window and a piece, not as the text.
            piece = query[:, :, first : first + PIECE]
            asking = self.tokens + first
            oldest = self.tokens + query.shape[2] - keys.shape[2]
            low = max(oldest, asking - window.size + 1)
            seen = slice(low - oldest, asking + piece.shape[2] - oldest)
            mask = self._mask(window, low, asking, piece)
            outputs.append(exact_attention(module, piece, keys[:, :, seen], values[:, :, seen], mask, scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _mask(self, window: AttentionWindow | None, low: int, asking: int, query: Tensor) -> Tensor | None:
        """Returns the mask [B or 1, 1, T, C] of T queries from column `asking` on, which look at the columns from `low`
        on; None for plain causal attention. Layers of a kind share it.
        """
        key = window, low, asking
        if key not in self._masks:
            self._masks[key] = self._made_mask(window, low, asking, query.shape[2], query.device)
        return self._masks[key]

    def _made_mask(
        self, window: AttentionWindow | None, low: int, asking: int, new: int, device: torch.device
    ) -> Tensor | None:
        total = asking + new
        in_window = window is None or total <= window.size or (new == 1 and not window.chunked)
        if self.real is None and in_window and (new == 1 or asking == 0):
            return None
        held = torch.arange(low, total, device=device)
        queries = torch.arange(asking, total, device=device).unsqueeze(1)
        visible = (held <= queries)[None, None]
        if self.real is None:
            start = torch.zeros((), dtype=torch.long, device=device)
        else:
            visible = visible & self.real[:, None, None, low:total]
            visible = visible | (held == queries)  # padding sees itself: without any column its output would be NaN
            start = self.real.int().argmax(1)[:, None, None, None]  # windows and chunks begin after the padding
        if window is not None:
            visible = visible & (held - start >= window.first(queries - start))
        return visible


class TokenCount(Cache):
    """Tells a model how many tokens there are, and holds none: for models that look only this up in their cache."""

    def __init__(self, text: TextBatch) -> None:
        super().__init__(layers=[])
        self.text = text

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        return self.text.tokens

    def get_mask_sizes(self, query_length: Any, *args: Any) -> tuple[int, int]:
        return self.text.tokens + int(query_length), 0


@contextmanager
def called(text: TextBatch) -> Iterator[None]:
    """Sends the attention of one call of the text's model, in this thread, to the text.

    Raises:
        ValueError: `partial_kv` or another context has hooked the model's attention.
    """
    if any(hasattr(layer, "residual_mass_handler") for layer in text.layers.values()):
        raise ValueError("the model's attention is hooked already; contexts on one model cannot be nested")
    before = getattr(running, "text", None)
    with switched(text.configs):
        running.text = text
        try:
            yield
        finally:
            running.text = before
