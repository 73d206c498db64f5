"""Interface of methods and of their parts, selectors and residuals; with the paper's own parts, `TopK` and `Phi`.

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

BFLOAT16 = 2
"""Bytes of a number."""
FLOAT32 = 4
"""Bytes of a number."""
INDEX = 2
"""Bytes of the index of a token's cluster."""


class Choice(NamedTuple):
    """Output of a selector for query rows."""

    read: Selected
    """[..., R, K], mid-region tokens to read exactly."""
    threshold: Tensor
    """[..., R], the lowest score of a chosen token, as the selector saw it; the highest of the mid-region if it chose
    none.
    """
    scanned: Tensor
    """[..., R, L], every token's score as the selector saw it; zeros if it sees no scores."""


class Layout(NamedTuple):
    """The order of rows: by arm, then by query head of the KV head, then by token."""

    heads: int
    tokens: int = 1


class Step(NamedTuple):
    """Sizes of a decode step in one layer and KV head, which give the bytes that it reads."""

    tokens: int
    """L, tokens of the prompt."""
    width: int
    """D."""
    heads: int
    """Query heads of the KV head."""
    anchors: int
    retrieved: float
    """Distinct tokens of the mid-region that the query heads read exactly, or whose stored values they read by
    choice.
    """
    features: int = 64
    """Number of features of learned maps."""


class Seen(NamedTuple):
    """Inputs of a residual. A residual that uses exact scores of unread tokens is an oracle, unless it reads these
    tokens itself.
    """

    queries: Tensor
    """[..., R, D], scaled."""
    threshold: Tensor
    """[..., R], as in `Choice`."""
    read: Selected
    """[..., R, K], the mid-region tokens that were read."""
    unread: Tensor
    """[..., R, L] bool, the mid-region tokens that were not read; a row may have none."""
    scores: Tensor
    """[..., R, L], of all tokens."""
    values: Tensor
    """[..., L, D]."""
    scanned: Tensor | None = None
    """[..., R, L], as in `Choice`; for residuals with `uses_scan = True`."""
    anchors: Tensor | None = None
    """[..., 1, L] bool, the tokens that every query reads; None for none."""


class Part:
    """A selector or a residual: a frozen dataclass of its parameters."""

    title: ClassVar[str] = ""
    """Name of the class in legends, with mathematics in dollars; the Python name if empty."""
    limits: ClassVar[Mapping[str, int | None]] = {}
    """Upper limits of parameters that are counts, whose lower limit is 1; None for no upper limit."""
    recipe: ClassVar[int] = 1
    """Version of the numbers: raise it when a change to the code alters them, so that stored rows are decoded again."""

    def __post_init__(self) -> None:
        """Raises ValueError for a parameter outside its limits."""
        for name, most in self.limits.items():
            value = getattr(self, name)
            if value < 1 or (most is not None and value > most):
                allowed = "1 or more" if most is None else f"between 1 and {most}"
                raise ValueError(f"{name} is {value}, not {allowed}")

    @property
    def identity(self) -> dict[str, Any]:
        """Class, recipe and parameters, including those of inner parts."""
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values[field.name] = value.identity if isinstance(value, Part) else value
        return {"name": type(self).__name__, "recipe": self.recipe, **values}


class Selector(Part, ABC):
    """Chooses the mid-region tokens that are read exactly. A selector that keeps a summary of the keys overrides both
    `prepare` and `update`.
    """

    reads_keys: ClassVar[bool] = False
    """Whether it reads every key, so that the keys of chosen tokens are not read again."""
    cuts: ClassVar[bool] = False
    """Whether no unread token scores above the threshold, by the scores that the selector saw."""
    scans: ClassVar[bool] = False
    """Whether it sees a score of every token."""
    replaces_cache: ClassVar[bool] = False
    """Whether its summary replaces keys and values, so that of the mid-region only the last `tail` tokens are read
    exactly, at every budget.
    """
    tail: ClassVar[int] = 0
    """Tokens of the mid-region that are kept exactly; for selectors with `replaces_cache = True`."""

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        """Summarises a prompt's keys [..., L, D] once per layer; mid [..., L] bool is the mid-region."""
        return ()

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        """Updates the summary for the keys and the mid-region of a prompt that has grown. Before column `start` neither
        has changed.
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
        """Returns the bytes that a step reads to select, with keys of 2 bytes a number."""

    def kept_bytes(self, step: Step) -> float:
        """Returns the bytes that are kept of a prompt to select, in addition to keys and values."""
        return 0 if self.reads_keys else self.scan_bytes(step)


class Residual(Part, ABC):
    """Estimates the terms of the unread tokens. A residual that keeps a summary of the prompt overrides both `prepare`
    and `update`.
    """

    uses_cut: ClassVar[bool] = False
    """Whether it assumes that no unread token scores above the threshold: it needs a selector with `cuts = True`."""
    uses_scan: ClassVar[bool] = False
    """Whether it uses the scores that the selector saw: it needs a selector with `scans = True`."""
    holds_values: ClassVar[bool] = False
    """Whether its summary has a value for every token, so that the cache's values are not read."""
    oracle: ClassVar[bool] = False
    """Whether it uses scores of tokens that it does not read: it does not compete with other methods."""

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        """Summarises keys and values [..., L, D] of a prompt with mid-region [..., L] bool, once per layer. Returns
        tensors with the leading dimensions of the keys.
        """
        return ()

    def update(self, state: Any, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> tuple[Tensor, ...]:
        """Adds tokens that have joined the mid-region.

        Args:
            keys, values: [..., N, D], of the columns from `start` on, none of which was in the mid-region before.
            joined: [..., N] bool, columns that are in it now.
        """
        return ()

    @abstractmethod
    def terms(self, seen: Seen, state: Any) -> Terms:
        """Returns numerator [..., R, D], denominator [..., R] and finite shift [..., R], as in `accounting.Terms`. A
        row with denominator 0 adds nothing; terms of a row without unread tokens are ignored.
        """

    def values_read(self, seen: Seen) -> Tensor | None:
        """Returns the unread tokens [..., R, L] bool whose stored values a step reads, if that depends on their scores;
        None if it does not.
        """
        return None

    @abstractmethod
    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes that a step reads of the summary, and of tokens that were not selected."""

    def kept_bytes(self, step: Step) -> float:
        """Returns the bytes that are kept of a prompt for the estimate."""
        return self.summary_bytes(step)

    def fitted(self, selector: Selector) -> Residual:
        """Returns the residual with the parameters that it takes from its selector; raises ValueError if it does not
        work with the selector.
        """
        return self


@dataclass(frozen=True)
class TopK(Selector):
    """Chooses the K mid-region tokens with the highest scores (the paper's eq. 2). An oracle: it scores every key."""

    title = "Top-$K$ by exact scores"
    reads_keys = cuts = scans = True

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        return best_of(scores, mid, k)

    def scan_bytes(self, step: Step) -> float:
        return BFLOAT16 * step.tokens * step.width


def best_of(scanned: Tensor, mid: Tensor, k: Tensor) -> Choice:
    """Chooses the K mid-region tokens with the highest of the scores [..., R, L]; `k` as in `Selector.select`."""
    return Choice(*selection.unordered_topk(scanned, mid, k), scanned)


@dataclass(frozen=True)
class Phi(Part):
    """Summaries of learned features, Z = <phi_q, u> and nu = S phi_q.

    It computes no terms of its own: the decode paths compute them together with the exact ones (`core.accounting`).
    """

    title: ClassVar[str] = r"$\phi$"
    subtracts: bool = True
    """Whether the retrieved tokens are subtracted from S and u first (TopK+phi) or not (NoSub)."""


@dataclass(frozen=True)
class Method:
    """A selector of the tokens that are read exactly, and a residual that estimates the others.

    Attributes:
        name: name in configuration and result files.
        title: name in tables and figures, with mathematics in dollars; `name` if empty.
        selector: None reads every prefix token (the unmodified backbone).
        residual: None adds nothing.

    Raises:
        ValueError: a selector or residual is not an instance of a frozen dataclass that inherits from `Selector` or
            `Residual`, or has only one of `prepare` and `update`; the residual does not fit the selector.
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
                    residual = type(self.own).__name__
                    selector = type(self.selector).__name__
                    raise ValueError(f"{residual} needs a selector with {name} = True, which {selector} lacks")
        object.__setattr__(self, "title", self.title or self.name)

    @property
    def whole_prefix(self) -> bool:
        return self.selector is None

    @property
    def chooses(self) -> bool:
        """Whether queries choose tokens, so that a budget means something; full attention and caches read all."""
        return self.selector is not None and not self.selector.replaces_cache

    @property
    def needs_maps(self) -> bool:
        return self.phi is not None

    @property
    def phi(self) -> Phi | None:
        """The paper's residual (`Phi`), or None."""
        return self.residual if isinstance(self.residual, Phi) else None

    @property
    def subtracts(self) -> bool:
        """Whether the retrieved tokens are subtracted from the summaries of feature maps."""
        return self.phi is not None and self.phi.subtracts

    @property
    def own(self) -> Residual | None:
        """The residual, if it computes its own terms; otherwise None."""
        return None if isinstance(self.residual, Phi) else self.residual

    @property
    def of_the_paper(self) -> bool:
        return self.selector in (None, TopK()) and self.own is None

    @property
    def oracle(self) -> bool:
        return self.own is not None and self.own.oracle

    @property
    def identity(self) -> dict[str, Any]:
        """Name and parts of the method, for the keys of stored rows."""
        selector = None if self.selector is None else self.selector.identity
        residual = None if self.residual is None else self.residual.identity
        return {"method": self.name, "selector": selector, "residual": residual}


def state_bytes(state: tuple[Tensor, ...]) -> int:
    """Returns the bytes of a prepared state."""
    return sum(part.numel() * part.element_size() for part in state)
