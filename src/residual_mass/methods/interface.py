"""What a method is made of, and what its parts are asked for. The paper's own parts, `TopK` and `Phi`, are here too.

Shape letters: R = query rows sharing keys, L = keys, K = retrieved tokens, D = head dimension of keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from residual_mass.methods.lazy import selection

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
    """[..., R, L], what the selector saw of every token's score; zeros where it looks at none."""


class Layout(NamedTuple):
    """The order of rows: by arm, then by query head of the KV head, then by token."""

    heads: int
    tokens: int = 1


class Step(NamedTuple):
    """Sizes of a decode step in one layer and KV head, which give the bytes that it reads."""

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


class Seen(NamedTuple):
    """What selection leaves to a residual. One that uses scores of tokens that were not read, other than those that it
    reads itself, is an oracle.
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


class Part:
    """A selector or a residual: a frozen dataclass of its parameters."""

    title: ClassVar[str] = ""
    """What legends call parts of this class, with mathematics in dollars; its name where it is empty."""
    limits: ClassVar[Mapping[str, int | None]] = {}
    """Largest values of parameters that are counts, of which the least is 1; None for no limit."""
    recipe: ClassVar[int] = 1
    """Raised when a change to the code alters the numbers: rows that were decoded before are decoded again."""
    former: ClassVar[Mapping[str, Any]] = {}
    """Parameters that there are no more, at the values that they have in the keys of stored rows."""
    fused: ClassVar[bool] = False
    """Whether `core.fused` has a fast decode step for it; for a residual, the state is then a `MomentState`, and the
    terms are `truncated_terms` of it.
    """

    def __post_init__(self) -> None:
        """Raises ValueError for a parameter outside its limits."""
        for name, most in self.limits.items():
            value = getattr(self, name)
            if value < 1 or (most is not None and value > most):
                raise ValueError(f"{name} is {value}, not {'1 or more' if most is None else f'between 1 and {most}'}")

    @property
    def identity(self) -> dict[str, Any]:
        """Class, recipe and parameters, also of a part that it is made of."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: value.identity if isinstance(value, Part) else value for name, value in values.items()}
        return {"name": type(self).__name__, "recipe": self.recipe, **self.former, **values}


class Selector(Part, ABC):
    """Chooses the mid-region tokens that are read exactly. One that keeps a summary of the keys overrides both
    `prepare` and `update`.
    """

    reads_keys: ClassVar[bool] = False
    """Whether it reads every key, so that those of chosen tokens are not read again."""
    cuts: ClassVar[bool] = False
    """Whether no token that it leaves unread scores above the threshold, in what it saw."""
    scans: ClassVar[bool] = False
    """Whether it sees a score of every token."""
    replaces_cache: ClassVar[bool] = False
    """Whether what it keeps takes the place of keys and values, so that no token of the mid-region is read exactly."""

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        """Summarises a prompt's keys [..., L, D] once per layer; mid [..., L] bool is the mid-region."""
        return ()

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        """Brings the summary up to date with keys and mid-region of a prompt that has grown; before column `start`
        neither has changed.
        """
        return ()

    @abstractmethod
    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        """Chooses up to k tokens per row.

        Args:
            queries: [..., R, D], scaled.
            scores: [..., R, L], exact; a selector that uses more than a few of them scores every key, and is an oracle.
            mid: [..., 1 or R, L] bool.
            k: [..., 1 or R] integer.
            layout: which rows are the query heads of one token.
        """

    @abstractmethod
    def scan_bytes(self, step: Step) -> float:
        """Returns what a step reads to select, where keys have 2 bytes a number."""

    def kept_bytes(self, step: Step) -> float:
        """Returns what is kept of a prompt to select, besides keys and values."""
        return 0 if self.reads_keys else self.scan_bytes(step)


class Residual(Part, ABC):
    """Estimates the terms of the unread tokens. One that keeps a summary of the prompt overrides both `prepare` and
    `update`.
    """

    uses_cut: ClassVar[bool] = False
    """Whether it takes the threshold for a cut: it goes with selectors that have `cuts = True`."""
    uses_scan: ClassVar[bool] = False
    """Whether it uses the scores that the selector saw: it goes with selectors that have `scans = True`."""
    holds_values: ClassVar[bool] = False
    """Whether its summary has a value for every token, so that none is read besides."""
    oracle: ClassVar[bool] = False
    """Whether it uses scores of tokens that it does not read: it does not compete with other methods."""

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        """Summarises a prompt once per layer: keys, values [..., L, D] and the mid-region [..., L] bool to a tuple of
        tensors, whose leading dimensions are those of the keys.
        """
        return ()

    def update(self, state: Any, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> tuple[Tensor, ...]:
        """Adds tokens that have joined the mid-region.

        Args:
            keys, values: [..., N, D], of the columns from `start` on, none of which was in the mid-region.
            joined: [..., N] bool, those that are now.
        """
        return ()

    @abstractmethod
    def terms(self, seen: Seen, state: Any) -> Terms:
        """Returns numerator [..., R, D], denominator [..., R] and finite shift [..., R], as in `accounting.Terms`. A
        row with denominator 0 adds nothing; what is returned for a row without unread tokens is ignored.
        """

    @abstractmethod
    def summary_bytes(self, step: Step) -> float:
        """Returns what a step reads of the summary, and of tokens besides those selected."""

    def kept_bytes(self, step: Step) -> float:
        """Returns what is kept of a prompt for the estimate."""
        return self.summary_bytes(step)

    def fitted(self, selector: Selector) -> Residual:
        """Returns the residual with the parameters that it takes from its selector; raises ValueError for one that it
        cannot serve.
        """
        return self


@dataclass(frozen=True)
class TopK(Selector):
    """The K mid-region tokens of the highest scores (the paper's eq. 2): an oracle, for it scores every key."""

    title = "Top-$K$ by exact scores"
    recipe = 0
    reads_keys = cuts = scans = True
    fused = True

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        return best_of(scores, mid, k)

    def scan_bytes(self, step: Step) -> float:
        return BFLOAT16 * step.tokens * step.width


def best_of(scanned: Tensor, mid: Tensor, k: Tensor) -> Choice:
    """Chooses the K mid-region tokens of the highest scores [..., R, L]; `k` as in `Selector.select`."""
    return Choice(*selection.unordered_topk(scanned, mid, k), scanned)


@dataclass(frozen=True)
class Phi:
    """Summaries of learned features, Z = <phi_q, u> and nu = S phi_q.

    It computes no terms of its own: the decode paths compute them together with the exact ones (`core.accounting`).
    """

    title: ClassVar[str] = r"$\phi$"
    subtracts: bool = True
    """Whether the retrieved tokens are subtracted from S and u first (TopK+phi) or not (NoSub)."""


@dataclass(frozen=True)
class Method:
    """What is read exactly, and what is added for the rest.

    Attributes:
        name: name in configuration and result files.
        title: what tables and figures call it, with mathematics in dollars; the name where it is empty.
        selector: None reads every prefix token (the unmodified backbone).
        residual: None adds nothing.

    Raises:
        ValueError: a selector or residual is no instance of a frozen dataclass that inherits from `Selector` or
            `Residual`, or has one of `prepare` and `update` alone; the residual does not fit the selector.
    """

    name: str
    title: str = ""
    selector: Selector | None = TopK()
    residual: Phi | Residual | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.title, str):
            raise ValueError(f"title {self.title!r} is no text: Method takes name, title, selector, residual")
        for part, base in ((self.selector, Selector), (self.own, Residual)):
            frozen = getattr(part, "__dataclass_params__", None)
            if part is not None and not (isinstance(part, base) and frozen is not None and frozen.frozen):
                raise ValueError(
                    f"{base.__name__.lower()} {part!r} is no instance of a frozen dataclass that inherits from "
                    f"{base.__name__} (see docs/extending.md)"
                )
            if part is not None and (type(part).prepare is base.prepare) != (type(part).update is base.update):
                raise ValueError(f"{base.__name__.lower()} {part!r} has one of prepare and update without the other")
        if self.selector is None and self.residual is not None:
            raise ValueError(f"method {self.name!r} reads the whole prompt, which leaves nothing for a residual")
        if self.selector is not None and self.selector.replaces_cache and not getattr(self.own, "holds_values", False):
            raise ValueError(f"method {self.name!r} keeps no values: CacheOnly goes with QuantisedValues")
        if self.own is not None:
            object.__setattr__(self, "residual", self.own.fitted(self.selector))
            for name, needed, given in (
                ("cuts", self.own.uses_cut, self.selector.cuts), ("scans", self.own.uses_scan, self.selector.scans)
            ):  # fmt: skip
                if needed and not given:
                    residual, selector = type(self.own).__name__, type(self.selector).__name__
                    raise ValueError(f"{residual} needs a selector with {name} = True, which {selector} has not")
        object.__setattr__(self, "title", self.title or self.name)

    @property
    def whole_prefix(self) -> bool:
        return self.selector is None

    @property
    def needs_maps(self) -> bool:
        return self.phi is not None

    @property
    def phi(self) -> Phi | None:
        """The paper's residual, which the decode paths compute together with the exact terms."""
        return self.residual if isinstance(self.residual, Phi) else None

    @property
    def subtracts(self) -> bool:
        """Whether the retrieved tokens are subtracted from the summaries of feature maps."""
        return self.phi is not None and self.phi.subtracts

    @property
    def own(self) -> Residual | None:
        """A residual that computes terms of its own."""
        return None if isinstance(self.residual, Phi) else self.residual

    @property
    def of_the_paper(self) -> bool:
        return self.selector in (None, TopK()) and self.own is None

    @property
    def oracle(self) -> bool:
        return self.own is not None and self.own.oracle

    @property
    def fused(self) -> bool:
        """Whether `core.fused` has a fast decode step for it."""
        with_own = self.own is None or self.own.fused
        return self.of_the_paper or (self.selector.fused and not self.needs_maps and with_own)

    @property
    def identity(self) -> dict[str, Any]:
        """What tells its numbers from those of another method, for the keys of stored rows. Of the paper's methods the
        name alone, for rows were stored before there were others.
        """
        parts = {"selector": None if self.selector == TopK() else self.selector, "residual": self.own}
        return {"method": self.name} | {part: one.identity for part, one in parts.items() if one is not None}


def state_bytes(state: tuple[Tensor, ...]) -> int:
    """Returns the size of a prepared state."""
    return sum(part.numel() * part.element_size() for part in state)
