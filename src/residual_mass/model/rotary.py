"""Rotary frequencies that depend on the length of the text: LongRoPE (Phi-3 128k, Phi-4 mini) and dynamic NTK scaling.

transformers takes the length from the largest position of a call. Rows of a batch with other lengths, and tokens that
are read in another call than the text before them, then get other frequencies than those of their own text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Frequencies(NamedTuple):
    """Frequencies of a model that are constant up to a length."""

    kind: str
    """Name in transformers: longrope, dynamic or another with dynamic in it."""
    limit: int
    """Largest number of tokens of a text before they change."""
    grows: bool
    """Whether they change again with every further token, as dynamic NTK scaling does; LongRoPE changes them once."""

    def same(self, one: int, other: int) -> bool:
        """Returns whether they are the same in texts of two lengths."""
        if self.grows:
            return max(one, self.limit) == max(other, self.limit)
        return (one > self.limit) == (other > self.limit)

    def room(self, length: int) -> int | None:
        """Returns how many tokens can follow a text before the frequencies change; None for any number."""
        if length <= self.limit:
            return self.limit - length
        return 0 if self.grows else None


def frequencies_of(model: PreTrainedModel) -> Frequencies | None:
    """Returns how the frequencies of a model depend on the length of the text, None if they do not."""
    found = [each for module in model.modules() for each in _changing(module)]
    if not found:
        return None
    first = min(found, key=lambda each: each.limit)
    return first._replace(grows=any(each.grows for each in found))


def changes_with_length(module: nn.Module) -> bool:
    """Returns whether a module holds frequencies that depend on the length of the text."""
    return any(_changing(module))


def _changing(module: nn.Module) -> Iterator[Frequencies]:
    """Yields the frequencies of a rotary embedding that depend on the length, by type of layer."""
    kinds = getattr(module, "rope_type", None)
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
        if kind == "longrope":
            yield Frequencies(kind, _original_length(module.config, layer_type), grows=False)
        elif isinstance(kind, str) and "dynamic" in kind:
            yield Frequencies(kind, module.original_max_seq_len, grows=True)


def _original_length(config: Any, layer_type: str | None) -> int:
    """Returns the length from which on LongRoPE takes its long factors, where transformers looks it up."""
    parameters = getattr(config, "rope_parameters", None) or {}
    own = parameters.get(layer_type, parameters)
    if "original_max_position_embeddings" in own:
        return own["original_max_position_embeddings"]
    return getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings  # as in 4.57


def require_read_once(model: PreTrainedModel, length: int, last: int, text: str = "the text") -> None:
    """Raises ValueError if a text that grows from `length` to `last` tokens has to be read again on the way."""
    frequencies = frequencies_of(model)
    if frequencies is not None and not frequencies.grows and not frequencies.same(length, last):
        name = type(model).__name__
        change = f"{name}'s rotary frequencies change beyond {frequencies.limit} tokens ({frequencies.kind})"
        raise ValueError(
            f"{change}, and {text} grows from {length} to {last}: generate within partial_kv, where all is read again "
            "then, or fewer tokens"
        )


@contextmanager
def text_lengths(model: PreTrainedModel, lengths: Sequence[int]) -> Iterator[None]:
    """Makes the frequencies of each row of a batch those of a text of its own number of tokens, whatever texts were
    read before, within the context. A single position, shared by all rows, needs equal lengths.
    """
    modules = [module for module in model.modules() if changes_with_length(module)]
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = _by_length(module.forward, lengths)
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            del module.forward
            if own is not None:  # such as the one of accelerate's hooks
                module.forward = own


def _by_length(forward: Callable[..., Any], lengths: Sequence[int]) -> Callable[..., Any]:
    """Wraps the forward pass of a rotary embedding, which returns cosines and sines or complex numbers [..., N, T, C]
    for positions [..., N, T].
    """

    def rotated(x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        rows_of: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            rows_of.setdefault(length, []).append(row)
        parts = []
        for length, rows in rows_of.items():
            own = position_ids if len(rows_of) == 1 else position_ids[..., rows, :]
            last = torch.full_like(own[..., :1], length - 1)
            forward(x, torch.zeros_like(last), *args, **options)  # dynamic scaling forgets longer texts
            with_last = torch.cat((own, last), -1)
            rotation = forward(x, with_last, *args, **options)
            parts.append(_first_columns(rotation))
        if len(parts) == 1:
            return parts[0]
        rows_by_length = [row for rows in rows_of.values() for row in rows]
        order = torch.tensor(rows_by_length, device=position_ids.device).argsort()  # back to the order of the batch
        if isinstance(parts[0], Tensor):
            return torch.cat(parts, -3)[..., order, :, :]
        joined = []
        for each in zip(*parts, strict=True):  # the cosines of all lengths, then their sines
            joined.append(torch.cat(each, -3)[..., order, :, :])
        return tuple(joined)

    return rotated


def _first_columns(rotation: Any) -> Any:
    """Drops the column of the text's last position."""
    if isinstance(rotation, Tensor):
        return rotation[..., :-1, :]
    return tuple(part[..., :-1, :] for part in rotation)
