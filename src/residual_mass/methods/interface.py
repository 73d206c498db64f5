"""What a residual is asked for, and what it may see.

Shape letters: R = query rows sharing keys, L = keys, D = head dimension of keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.core.selection import Selected


BFLOAT16, FLOAT32 = 2, 4
"""Bytes of a number."""
INDEX = 2
"""Bytes of the number of a token's cluster."""


class Choice(NamedTuple):
    """What a selector chose for query rows."""

    read: Selected
    """[..., R, K], mid-region tokens to read exactly."""
    threshold: Tensor
    """[..., R], the least score that the selector saw of a token that it chose, and the largest of all where it chose
    none.
    """
    scanned: Tensor
    """[..., R, L], what the selector saw of every token's score."""


class Layout(NamedTuple):
    """The order of rows: by arm, then by query head of the KV head, then by token."""

    heads: int
    """G."""
    tokens: int = 1


class Step(NamedTuple):
    """Sizes of a decode step in one layer and KV head, which tell the bytes that it reads."""

    tokens: int
    """L, of the prompt."""
    width: int
    """D."""
    heads: int
    """Query heads of the KV head."""
    anchors: int
    retrieved: float
    """Distinct tokens of the mid-region that the query heads read exactly."""
    features: int = 64
    """Of learned maps."""


class Selector(Protocol):
    """Chooses the mid-region tokens that are read exactly. A frozen dataclass with its own parameters."""

    recipe: ClassVar[int]
    """As for a residual."""
    reads_keys: ClassVar[bool]
    """Whether it reads every key, so that those of chosen tokens are not read again."""

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        """Summarises a prompt's keys [..., L, D] once per layer; mid [..., L] bool is the mid-region."""

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        """Brings the summary up to date with keys and mid-region of a prompt that has grown; before column `start`
        neither has changed.
        """

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        """Chooses up to k tokens per row.

        Args:
            queries: [..., R, D], scaled.
            scores: [..., R, L], exact; a selector that uses more than a few of them scores every key, and is an oracle.
            mid: [..., 1 or R, L] bool.
            k: [..., 1 or R] integer.
            layout: which rows are the query heads of one token.
        """

    def scan_bytes(self, step: Step) -> float:
        """Returns what a step reads to select, where keys have 2 bytes a number; what is kept to select is the same, or
        what a method `kept_bytes` returns.
        """


class Seen(NamedTuple):
    """What selection leaves to a residual.

    A residual that uses scores of tokens that were not read, other than those that it reads itself, is an oracle.
    """

    queries: Tensor
    """[..., R, D], scaled."""
    threshold: Tensor
    """[..., R], as in `Choice`."""
    read: Selected
    """[..., R, K], the mid-region tokens that were read."""
    unread: Tensor
    """[..., R, L] bool, those that were not; a row may be empty."""
    scores: Tensor
    """[..., R, L], of all tokens."""
    values: Tensor
    """[..., L, D]."""
    scanned: Tensor | None = None
    """[..., R, L], as in `Choice`, for a residual with `uses_scan = True`."""
    phi: Terms | None = None
    """The feature maps' terms for the unread tokens, for a residual that needs maps."""


class Residual(Protocol):
    """Estimates the terms of the unread tokens. A frozen dataclass with its own parameters, which importing must not
    load torch: the workflow lists methods with it.

    One with `fused = True` is decoded by `core.fused` too: its state is a `MomentState`, its terms `truncated_terms`.
    One with a method `fitted(selector)` takes parameters of its selector there, or raises ValueError.
    """

    recipe: ClassVar[int]
    """Raised when a change to the code alters the numbers: rows that were decoded before are decoded again."""
    needs_maps: ClassVar[bool]
    """Whether it uses the terms of feature maps."""

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        """Summarises a prompt once per layer: keys, values [..., L, D] and the mid-region [..., L] bool to a tuple of
        tensors, whose leading dimensions are those of the keys.
        """

    def update(self, state: Any, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> tuple[Tensor, ...]:
        """Adds tokens that have joined the mid-region.

        Args:
            keys, values: [..., N, D], of the columns from `start` on, none of which was in the mid-region.
            joined: [..., N] bool, those that are now.
        """

    def terms(self, seen: Seen, state: Any) -> Terms:
        """Returns numerator [..., R, D], denominator [..., R] and finite shift [..., R], as in `accounting.Terms`. A
        row with denominator 0 adds nothing; what is returned for a row without unread tokens is ignored.
        """

    def summary_bytes(self, step: Step) -> float:
        """Returns what a step reads of the summary, and of tokens besides those selected; what is kept is the same, or
        what a method `kept_bytes` returns.
        """


def state_bytes(state: tuple[Tensor, ...]) -> int:
    """Returns the size of a prepared state."""
    return sum(part.numel() * part.element_size() for part in state)
