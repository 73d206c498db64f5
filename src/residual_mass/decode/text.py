"""Texts that a model reads and continues: a `Text` is the only thing that calls a model, and its backend the only thing
that computes attention.

The model is called without a cache, at given positions. Its attention is one registered function (`model.hook`), which
asks the text whose call is running in this thread. Other threads get the model's own attention, and so does this one
outside of these calls.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, T = new tokens, C = columns so far with the new ones, V =
vocabulary, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from residual_mass.decode.backend import Backend, LayerCall
from residual_mass.decode.compiled import CompiledStep, logits_of
from residual_mass.model.hook import configs_of, exact_attention, kernel_attention, running, switched
from residual_mass.model.layers import AttentionWindow, attention_layers, has_recurrent_layers, keeps_states, window_of
from residual_mass.model.memory import kept_memory
from residual_mass.model.rotary import changing_rotations, frequencies_of, frequencies_of_each_call

PIECE = 1024
"""Queries that a layer with a window reads at once."""
LONG_PROMPT = 2048
"""Tokens read at once from which memory is kept meanwhile, and given back to the system afterwards: below, tensors are
small.
"""


class Text:
    """A batch of texts that a model reads and continues through a backend.

    For a decoding loop of your own:

        text = Text(model, backend_for(model, arm_of("scan4_regression_64", 0.02)))
        logits = text.read(ids)  # [1, 1, V]
        while ...:
            logits = text.step(logits[:, -1:].argmax(-1))

    Args:
        model: one that `attention_layers` does not refuse.
        backend: owns the keys and values; it may hold earlier turns.
        real: [B, C] bool, False on padding, of the columns that are held and of those to read; None without padding. It
            may be anywhere, but before all tokens if layers have windows or states.
        compiled: takes single steps, if the backend does not replay them; None calls the model itself.

    Attributes:
        tokens: number of columns that the backend holds, padding included.
        frequencies: of the model; where they depend on the length of the text, a prompt is read in one piece.
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
        self.real = None if real is None else real.bool()  # an attention mask may have other dtypes
        self.tokens = backend.tokens
        layers = attention_layers(model)
        self.layers = {layer.layer_idx: layer for layer in layers}
        self.configs = configs_of(model, layers)
        self.windows = {layer.layer_idx: window_of(layer) for layer in layers}
        self.compiled = compiled
        self.frequencies = frequencies_of(model)
        self.rotations = changing_rotations(model)
        self.states = States(self) if keeps_states(model) else None
        if self.real is not None and not backend.knows_columns:
            self._require_padding_first(self.real)
        self.has_images = False
        """Whether the prompt is more than ids or vectors of tokens: the model then makes positions itself."""
        self.reads_images = False
        """Whether the running call reads them: the model then makes masks itself, too."""
        self.last_positions: Tensor | None = None
        """[N, B, 1] of the last token in N dimensions, if the caller gave positions of a prompt with images."""
        self._called: set[int] = set()
        self._attend: Callable[[LayerCall], Tensor] = backend.read
        self._masks: dict[tuple[AttentionWindow | None, int, int], Tensor | None] = {}

    def _require_padding_first(self, real: Tensor) -> None:
        """Raises ValueError for padding behind a token, which windows and recurrent states would take for one."""
        counts_columns = self.states is not None or len(self.full_layers) < len(self.windows)
        if counts_columns and bool((real[:, :-1] & ~real[:, 1:]).any()):
            raise ValueError(
                f"{type(self.model).__name__} has layers with windows or states, which count padding behind a token: "
                'pad on the left (padding_side="left")'
            )

    @property
    def full_layers(self) -> list[int]:
        """Indices of the layers that read the whole text, in which a method attends."""
        return [index for index, window in self.windows.items() if window is None]

    def read(self, ids: Tensor, keep: int = 1, **inputs: Any) -> Tensor:
        """Reads a prompt, or more of it, exactly.

        Args:
            ids: [B, T].
            keep: number of last tokens whose logits are computed.
            inputs: of the model's forward pass, for a whole prompt: `inputs_embeds` [B, T, ...] in place of the ids, or
                images beside them; and `position_ids` [N, B, T] of a model that counts in N dimensions.

        Returns:
            The logits [B, keep, V] after the last tokens.
        """
        if self.tokens and not inputs and has_recurrent_layers(self.model):
            pieces = ids.split(1, 1)  # some recurrent layers take several tokens only where there is no state yet
        else:
            pieces = (ids,)
        if self.tokens and self.real is not None:
            self.backend.require_seen(self.real[:, : self.tokens + ids.shape[1]])
        with kept_memory() if ids.numel() >= LONG_PROMPT else nullcontext():
            logits = []
            for piece in pieces:
                logits.append(self._forward(self.backend.read, piece, keep, **inputs))
                self.tokens += piece.shape[1]
        return torch.cat(logits[-keep:], 1)

    def step(self, ids: Tensor) -> Tensor:
        """Reads tokens [B, T] of which each attends through the method: one new token, or a given continuation.

        Returns:
            The logits [B, T, V] after each of them.
        """
        count = ids.shape[1]
        if count > 1 and self.states is not None:  # layers with states may take one token at a time alone
            return torch.cat([self.step(token) for token in ids.split(1, 1)], 1)
        if count > 1:
            logits = self._forward(self.backend.step, ids, 0)
        else:
            logits = self.backend.replayed(self._step, ids, self._positions(ids))
        self.tokens += count
        return logits

    def _step(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Calls the model for one token of each text, which a backend may record."""
        return self._forward(self.backend.step, ids, 1, positions)

    def copy(self) -> Text:
        """Returns a text that goes on by itself."""
        other = Text(self.model, self.backend.copy(), self.real, self.compiled)
        other.has_images = self.has_images
        other.last_positions = self.last_positions
        return other

    def crop(self, tokens: int) -> None:
        """Forgets the last tokens of every row, which were steps.

        Raises:
            ValueError: the model has layers with states, or with windows that hold no longer the whole text; or the
                tokens have joined the prompt. Nothing is forgotten then.
        """
        sizes = [window.size for window in self.windows.values() if window is not None]
        if tokens and (self.states is not None or self.tokens >= min(sizes, default=self.tokens + 1)):
            raise ValueError(
                f"{type(self.model).__name__} cannot go back: layers with states or windows keep no earlier tokens"
            )
        self.backend.crop(tokens)
        self.tokens -= tokens
        if self.last_positions is not None:
            self.last_positions = self.last_positions - tokens

    def _forward(
        self,
        attend: Callable[[LayerCall], Tensor],
        ids: Tensor,
        keep: int,
        positions: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Calls the model; returns the logits after the last `keep` tokens, 0 means all."""
        self._attend = attend
        self._called.clear()
        self._masks.clear()
        positions = self._positions(ids) if positions is None else positions
        self.frequencies.require_call(positions)
        single = attend == self.backend.step and ids.shape[1] == 1  # `==`: every access makes a new bound method
        with called(self):
            if self.states is not None or inputs:
                logits = self._logits_with_states(ids, positions, keep, inputs)
            elif self.compiled is not None and single:
                logits = self._compiled_logits(self.compiled, ids, positions)
            else:
                logits = logits_of(self.model, ids, positions, unmasked(ids), None, keep)
        if len(self._called) < len(self.windows):
            missing = sorted(set(self.windows) - self._called)
            name = type(self.model).__name__
            raise ValueError(f"{name} bypasses transformers' attention interface in layers {missing}")
        return logits

    def _logits_with_states(self, ids: Tensor, positions: Tensor, keep: int, inputs: dict[str, Any]) -> Tensor:
        """Calls a model that keeps states, counts its tokens, or takes more than token ids."""
        self.reads_images = bool(set(inputs) - {"inputs_embeds", "position_ids"})
        self.has_images = self.has_images or self.reads_images
        own = inputs.pop("position_ids", None)
        if own is None and self.last_positions is not None:
            # After images, every dimension counts on from the last token: [N, B, T].
            own = self.last_positions + torch.arange(1, ids.shape[1] + 1, device=ids.device)
        if own is not None:
            self.last_positions = own[..., -1:]
            positions = own
        elif self.has_images:
            positions = None
        mask = None if self.real is None else self.real[:, : self.tokens + ids.shape[1]].long()
        output = self.model(
            input_ids=None if "inputs_embeds" in inputs else ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.states,
            use_cache=self.states is not None,
            logits_to_keep=keep,
            return_dict=True,
            **inputs,
        )
        return output.logits

    def _compiled_logits(self, compiled: CompiledStep, ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits of a compiled step; of the model itself from now on, if it cannot be compiled."""
        # A graph is for one memory layout, and these can be views of longer tensors.
        ids = ids.clone(memory_format=torch.contiguous_format)
        positions = positions.clone(memory_format=torch.contiguous_format)
        mask = unmasked(ids)
        try:
            return compiled(ids, positions, mask)
        except Exception as error:
            if self._called:
                raise  # of the step itself, which has begun
            self.compiled = None
            logits = logits_of(self.model, ids, positions, mask, None, 1)
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

    def attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
    ) -> Tensor:
        """Computes the attention [B, T, Hq, D] of a layer.

        Args:
            query, key, value, scale: as in `LayerCall`.
            mask: of the model's own, bool [B, 1, T, C], for a prompt with images; None for causal attention.
        """
        module = self.layers[index]
        if index in self._called:
            raise ValueError(
                f"{type(self.model).__name__} attends several times to one token in a layer, which no method follows"
            )
        self._called.add(index)
        call = LayerCall(module, query, key, value, mask, scale)
        window = self.windows[index]
        if window is None or self.backend.knows_columns:
            if mask is None and not self.backend.knows_columns:
                call = call._replace(mask=self._mask(None, 0, self.tokens, query))
            return self._attend(call)
        keys, values = self.backend.stored(call)
        if mask is not None:
            return exact_attention(module, query, keys, values, mask[..., -keys.shape[2] :], scale)
        if self.real is None and not window.chunked:
            output = kernel_attention(module, query, keys, values, scale, window.size)
            if output is not None:
                return output
        outputs = []
        for first in range(0, query.shape[2], PIECE):
            # A piece of the queries at a time, so that masks are as wide as a window and a piece, not as the text.
            piece = query[:, :, first : first + PIECE]
            asking = self.tokens + first
            # Columns of the first stored key, and of the first one that this piece's first query may see.
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
        # A single query sees all keys from `low` on, unless a chunk begins among them.
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
            start = self.real.int().argmax(1)[:, None, None, None]  # windows and chunks begin after the padding
        if window is not None:
            visible = visible & (held - start >= window.first(queries - start))
        if self.real is not None:  # padding that sees no token sees itself: without any column its output would be NaN
            visible = visible | ((held == queries) & ~visible.any(-1, keepdim=True))
        return visible


class States(Cache):
    """What a model keeps of a text beside keys and values, in the layers of the backend's cache: recurrent states, and
    the number of tokens. Keys and values pass through it to the attention.
    """

    def __init__(self, text: Text) -> None:
        held = getattr(text.backend, "cache", None) or DynamicCache(config=text.model.config)
        super().__init__(layers=held.layers)
        self.text = text

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self.text.tokens

    def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.text.tokens + int(query_length), 0


def unmasked(ids: Tensor) -> Tensor:
    """Returns the mask [B, 1, 1, 1] of a call whose attention knows what it may see; it stands for all tokens."""
    return torch.ones(len(ids), 1, 1, 1, dtype=torch.bool, device=ids.device)


@contextmanager
def called(text: Text) -> Iterator[None]:
    """Sends the attention of one call of the text's model, in this thread, to the text."""
    before = getattr(running, "text", None)
    with switched(text.configs), frequencies_of_each_call(text.rotations):
        running.text = text
        try:
            yield
        finally:
            running.text = before
