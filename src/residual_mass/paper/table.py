"""A table of a study: made once from results, saved as JSON, and written as LaTeX, CSV and, on the page, HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, PlainSerializer, TypeAdapter, ValidationError

from residual_mass.benchmarks.catalogue import metric_of
from residual_mass.files import REMAKE, csv_text, read_text, write_text
from residual_mass.metrics import METRICS, Metric
from residual_mass.paper.latex import Latex, caption_of, escape, render
from residual_mass.paper.marked import Marked, marked

Text = Annotated[str, PlainSerializer(marked, return_type=str), AfterValidator(Marked)]
"""Plain or marked text; saved as marked text."""
Mark = Literal["", "above", "below"]
Key = TypeVar("Key")

ALL_TASKS = "all"
"""Task of the mean over a benchmark's tasks."""
SCORE = "score"
"""Quantity of the cells of score tables."""
LEFT_OUT = "--"
"""Printed for what the study does not evaluate or could not measure."""
MARKS = {"": "", "above": r"\rlap{$^\dagger$}", "below": r"\rlap{$^\ddagger$}"}
"""Without a width of their own, so that digits stay aligned."""


@dataclass(frozen=True)
class Place:
    """What a cell is about. Cells of a study and of the paper with equal places can be compared.

    Attributes:
        task: its name in the harness, or `all` for the mean over tasks.
        budget_percent: None for full attention.
        maps: label of the feature maps; None for methods without, and in layouts for a study's main ones.
        quantity: `score`, the name of a metric, a column of the accounting files, or what a table of costs prints.
        implementation, batch: of a latency.
    """

    backbone: str
    length: str = ""
    benchmark: str = ""
    task: str = ""
    corpus: str = ""
    method: str = ""
    budget_percent: float | None = None
    maps: str | None = None
    quantity: str = SCORE
    implementation: str = ""
    batch: int | None = None

    @property
    def metric(self) -> Metric:
        """Of a score, or of a quantity that is one."""
        if self.quantity in METRICS:
            return METRICS[self.quantity]
        return metric_of(self.benchmark, None if self.task == ALL_TASKS else self.task)

    def __str__(self) -> str:
        latency = f"({self.implementation}, batch {self.batch})" if self.batch else ""
        budget = "" if self.budget_percent is None else f"at {self.budget_percent:g}%"
        maps = "" if self.maps is None else f"with maps {self.maps}"
        task = "" if self.task == ALL_TASKS else self.task
        quantity = "" if self.quantity == SCORE else self.quantity
        where = (self.benchmark, self.corpus, self.backbone, self.length, task)
        return " ".join(filter(None, (*where, self.method, budget, maps, latency, quantity)))


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Gain:
    """Paired difference to top-k at the same budget, with its 95 % interval and its p-value, alone and corrected for
    all gains of the table.
    """

    value: float
    interval: Interval
    p: float
    p_holm: float


@dataclass(frozen=True)
class Cell:
    """One printed value.

    Attributes:
        text: the value as the table prints it.
        interval: 95 % bootstrap interval.
        range: of a step's time, the fastest and the slowest repeat.
        n: how many of `counted` are behind the value: examples, documents, packs, repeats, trainings.
        mark: whether the gain is more than chance.
        flags: `floor`, `ceiling`, `beats_full`.
        data: where the examples come from: `original`, `simulated`, `stand-in`.
        decoding: how the texts behind a score were generated, in words.
        conditions: how a cost was measured.
        source: name of the file that the value comes from.
        notes: what a reader may want to know of the value, in words.
        row: what else its line in the CSV has, by column, as the file of results says it.
    """

    place: Place
    text: str
    value: float | None = None
    interval: Interval | None = None
    range: Interval | None = None
    n: int = 0
    counted: str = ""
    bold: bool = False
    mark: Mark = ""
    gain: Gain | None = None
    flags: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    decoding: str = ""
    conditions: dict[str, str] = field(default_factory=dict)
    model_id: str = ""
    weights: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()
    row: dict[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, str]:
        """The line of the CSV, by column."""
        place = {name: str(value) for name, value in vars(self.place).items() if value is not None}
        if self.place.budget_percent is not None:
            place["budget_percent"] = f"{self.place.budget_percent:g}"
        origin = {"source": self.source, "model_id": self.model_id, "weights": self.weights}
        return self.row | place | origin | {"text": self.text, "bold": str(int(self.bold))}

    @property
    def decimals(self) -> int:
        """How many the text has."""
        return len(self.text.partition(".")[2]) if self.value is not None else 0


@dataclass(frozen=True)
class Entry:
    """What stands in one field of a row: a text and the cells whose values it prints."""

    text: Text
    cells: tuple[Cell, ...] = ()
    span: int = 1
    """Columns that it takes."""


@dataclass(frozen=True)
class Row:
    """A row: its heads, and its entries from left to right."""

    heads: tuple[Text, ...]
    entries: tuple[Entry, ...]
    rule: bool = False
    """Whether a line separates it from the rows above."""


@dataclass(frozen=True)
class Block:
    """Rows under a title; the only block of a grid may have none."""

    rows: tuple[Row, ...]
    title: Text = ""


@dataclass(frozen=True)
class Grid:
    """Rows and columns.

    Attributes:
        heads: titles of the columns before the values. Where rows have one head less, the title of their block stands
            in the first of these columns, and otherwise in a row of its own.
        columns: titles of the columns with values, of each group.
        groups: titles over groups of columns; without any, there is one group.
        title: of the whole, in tables of several grids.
    """

    heads: tuple[Text, ...]
    columns: tuple[Text, ...]
    blocks: tuple[Block, ...]
    groups: tuple[Text, ...] = ()
    title: Text = ""

    @property
    def titled(self) -> bool:
        """Whether titles of blocks have a column of their own."""
        return len(self.blocks[0].rows[0].heads) < len(self.heads)

    @property
    def width(self) -> int:
        return len(self.heads) + len(self.columns) * max(len(self.groups), 1)


@dataclass(frozen=True)
class Table:
    """A table with everything that is known of its values.

    Attributes:
        grids: what is printed, below each other.
        columns: of the CSV.
        header: where the values come from, line by line, for a comment.
        notes: sentences that end the caption.
        facts: what the template fills into its caption.
        caption: without the notes; the template's, which the table has once it is rendered.
    """

    label: str
    study: str
    grids: tuple[Grid, ...]
    columns: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    notes: tuple[Text, ...] = ()
    facts: dict[str, Text] = field(default_factory=dict)
    caption: Text = ""

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell once, those that are left out included; all quantities of a measurement together."""
        rows = (row for grid in self.grids for block in grid.blocks for row in block.rows)
        measurements: dict[Place, dict[Place, Cell]] = {}
        for cell in (cell for row in rows for entry in row.entries for cell in entry.cells):
            measurements.setdefault(replace(cell.place, quantity=""), {})[cell.place] = cell
        return tuple(cell for cells in measurements.values() for cell in cells.values())

    @property
    def evaluated(self) -> tuple[Cell, ...]:
        """The cells with a value."""
        return tuple(cell for cell in self.cells if cell.value is not None)

    def latex(self, template: Path) -> str:
        """The table as `template` sets it. Raises ValueError as `render`."""
        label = Latex(f"tab:{self.label}")  # an escaped underscore would be another label
        return render(template, label=label, printed=_printed, **self._context())

    def caption_by(self, template: Path) -> Marked:
        """The caption that `template` gives the table, without its notes. Raises ValueError as `render`."""
        return caption_of(template, **self._context())

    def csv(self) -> str:
        """One line per cell: what it shows, its uncertainty, and what it comes from."""
        return csv_text(self.columns, map(self._line, self.cells))

    def key(self, cell: Cell) -> tuple[str, ...]:
        """What tells a cell apart: the fields of its line in the CSV before `text`, without the empty ones."""
        line = self._line(cell)
        return tuple(line[name] for name in self.columns[: self.columns.index("text")] if line[name])

    def save(self, path: Path) -> None:
        write_text(path, _ADAPTER.dump_json(self, indent=1, exclude_defaults=True).decode() + "\n")

    def _line(self, cell: Cell) -> dict[str, str]:
        fields = {"table": self.label} | cell.fields
        return {name: fields.get(name, "") for name in self.columns}

    def _context(self) -> dict[str, Any]:
        return {"header": self.header, "notes": self.notes, "grids": self.grids, **self.facts}


def _printed(entry: Entry) -> Latex:
    """An entry as LaTeX, in bold and marked as its one value is."""
    text = escape(entry.text)
    if len(entry.cells) != 1:
        return text
    (cell,) = entry.cells
    return Latex((rf"\textbf{{{text}}}" if cell.bold else text) + MARKS[cell.mark])


_ADAPTER = TypeAdapter(Table)


def load_table(path: Path, study: str) -> Table:
    """A saved table. Raises ValueError naming the file when it is not one, or of another study."""
    try:
        table = _ADAPTER.validate_json(read_text(path, REMAKE))
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ValueError(f"{path}: not a table of this version ({reason}); delete it and {REMAKE}") from None
    if table.study != study:
        raise ValueError(f"{path}: is of study {table.study!r}, not of {study!r}; pass tables of one study")
    return table


def best_printed(texts: Mapping[Key, str], metric: Metric) -> set[Key]:
    """What has the best of these printed values; equal digits tie."""
    values = {key: Decimal(text) for key, text in texts.items()}
    best = metric.best(values.values())
    return {key for key, value in values.items() if value == best}


def format_score(value: float) -> str:
    """The three decimals that the paper prints; what rounds to zero has no minus."""
    return f"{value:z.3f}"


def format_value(value: float, metric: Metric, sign: str = "") -> str:
    """A value of `metric`, or a difference of two, with three decimals. What is positive without an upper bound, as a
    divergence is, may be large or tiny: it has three significant digits within four decimals, or two within six.

    Args:
        sign: `+` also shows the sign of a positive value.
    """
    decimals = 3
    if metric.low == 0 and metric.high is None:
        three, two = (max(-Decimal(f"{value:.{digits}e}").as_tuple().exponent, 0) for digits in (2, 1))
        decimals = max(min(three, 4), min(two, 6))
    return f"{value:{sign}z.{decimals}f}"
