"""Rotary frequencies that depend on the length of the text: LongRoPE (Phi-3 128k, Phi-4 mini) and dynamic NTK scaling.

One rule holds everywhere: the frequencies of a text are those of its prompt, and what would change them within it is
refused. LongRoPE has two sets, one on each side of a length, and a text keeps to its side. Dynamic scaling has others
with every token beyond that length, so texts end there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel


class Frequencies(NamedTuple):
    """How the frequencies of a model depend on the length of the text.

    Its methods that require something raise ValueError in one line, which names the length and the remedy.
    """

    model: str
    """Class of the model."""
    kind: str
    """Name in transformers: longrope, dynamic or another with dynamic in it."""
    limit: float
    """Largest number of tokens of a text before they change; infinity if they never do."""

    @property
    def change(self) -> bool:
        return self.limit < math.inf

    def same(self, lengths: Iterable[int]) -> bool:
        """Returns whether they are constant in texts of all these lengths, and the same in all."""
        beyond = {length > self.limit for length in lengths}
        return beyond <= {False} or (self.kind == "longrope" and len(beyond) == 1)

    def require(self, lengths: Iterable[int]) -> None:
        """Raises ValueError unless they are constant in texts of all these lengths, and the same in all.

        Args:
            lengths: tokens of texts that are read together, at their prompts and at their ends.
        """
        lengths = list(lengths)
        if self.same(lengths):
            return
        shortest = min(lengths)
        longest = max(lengths)
        asked = f"{longest} tokens" if shortest == longest else f"{shortest} to {longest} tokens"
        place = "on one side of" if self.kind == "longrope" else "within"
        raise ValueError(
            f"{self.model}'s rotary frequencies change beyond {self.limit} tokens ({self.kind}), and this asks for "
            f"texts of {asked}: keep prompts and answers {place} {self.limit} tokens"
        )

    def require_growing(self, prompts: Sequence[int], further: Sequence[int]) -> None:
        """Raises ValueError unless texts of so many tokens keep them, and share them, while further tokens are read."""
        lengths = []
        for prompt, more in zip(prompts, further, strict=True):
            lengths += [prompt, prompt + max(0, more)]
        self.require(lengths)

    def require_call(self, positions: Tensor) -> None:
        """Raises ValueError if they change in a row at the tokens of a call, or differ between rows.

        Args:
            positions: [B, T], of the new tokens.
        """
        if not self.change:
            return  # without a look at the device
        # Rows that begin with this call have no earlier frequencies to keep.
        before = [position for position in positions[:, 0].tolist() if position > 0]
        after = positions[:, -1] + 1
        self.require([*before, *after.tolist()])


def frequencies_of(model: PreTrainedModel) -> Frequencies:
    """Returns how the frequencies of a model depend on the length of the text."""
    name = type(model).__name__
    found = [Frequencies(name, *each) for module in model.modules() for each in _changing(module)]
    return min(found, key=lambda each: (each.limit, each.kind), default=Frequencies(name, "", math.inf))


def changing_rotations(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the rotary embeddings of a model whose frequencies depend on the length of the text."""
    return [module for module in model.modules() if changes_with_length(module)]


def changes_with_length(module: nn.Module) -> bool:
    """Returns whether a module holds frequencies that depend on the length of the text."""
    return any(_changing(module))


def _changing(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yields kind and limit of the frequencies of a rotary embedding that depend on the length, by type of layer."""
    kinds = getattr(module, "rope_type", None)
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
        if kind == "longrope":
            yield kind, _original_length(module.config, layer_type)
        elif isinstance(kind, str) and "dynamic" in kind:
            yield kind, module.original_max_seq_len


def _original_length(config: Any, layer_type: str | None) -> int:
    """Returns the length from which on LongRoPE takes its long factors, where transformers looks it up."""
    parameters = getattr(config, "rope_parameters", None) or {}
    own = parameters.get(layer_type, parameters)
    if "original_max_position_embeddings" in own:
        return own["original_max_position_embeddings"]
    return getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings  # as in 4.57


def require_constant_frequencies(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, max_length: int | None
) -> None:
    """Raises ValueError unless texts keep a model's frequencies, and share them, while they are generated.

    Args:
        ids: [B, L], the prompts.
        mask: [B, L], 0 on padding; None without padding.
        max_length: most columns of a text in the end, the last of which is not read; None where nothing says so.
    """
    frequencies = frequencies_of(model)
    if not frequencies.change:
        return
    columns = ids.shape[1]
    prompts = [columns] * len(ids) if mask is None or mask.ndim != 2 else mask.bool().sum(1).tolist()
    further = 0 if max_length is None else max_length - 1 - columns
    frequencies.require_growing(prompts, [further] * len(ids))


@contextmanager
def frequencies_of_each_call(rotations: Iterable[nn.Module]) -> Iterator[None]:
    """Makes the frequencies of each call within the context those of its own positions.

    transformers keeps dynamically scaled frequencies of an earlier, longer text in the module, and other threads change
    those of either kind.

    Args:
        rotations: as `changing_rotations` returns them.
    """
    with ExitStack() as undo:
        for module in rotations:
            handle = module.register_forward_hook(_rotated_afresh, with_kwargs=True)
            undo.callback(handle.remove)
        yield


def _rotated_afresh(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Returns the rotations of a call by a rotary embedding that has seen no other text."""
    fresh = copy.copy(rotary)
    # copy.copy shares this dict, into which the forward pass registers other frequencies.
    fresh._buffers = dict(rotary._buffers)
    for name in rotary._buffers:
        original = getattr(rotary, name.replace("inv_freq", "original_inv_freq"), None)
        if original is not None:
            fresh._buffers[name] = original.clone()  # LongRoPE writes into it
    for name in vars(rotary):
        # A longer text raises it; below it the frequencies of that text would be used again.
        if name.endswith("max_seq_len_cached"):
            setattr(fresh, name, rotary.original_max_seq_len)
    return type(rotary).forward(fresh, *args, **kwargs)
