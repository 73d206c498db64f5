"""CSVs beside the tables of a study, read with suspicion: one that is cut, damaged or of another study is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from residual_mass.benchmarks.catalogue import BENCHMARKS
from residual_mass.core.settings import length_and_variant, tokens_of
from residual_mass.files import finite_field, is_count, only_value, read_csv
from residual_mass.paper import published
from residual_mass.paper.cells import ALL_TASKS, LEFT_OUT, Point, format_score
from residual_mass.paper.readers import runtime_file
from residual_mass.paper.tables import accounting_table, runtime_table, training_cost_table
from residual_mass.paper.tables.layouts import LAYOUTS
from residual_mass.study.config import METHODS

TABLES = (*LAYOUTS, accounting_table.LABEL, training_cost_table.LABEL, *runtime_table.PUBLISHED)
"""Labels of the tables whose CSVs can be read here; so can those of other latencies."""
COMPARED = tuple(label for label in TABLES if label in published.labels())
"""Those that the paper has as well."""
SCORE = "score"
"""The quantity of every cell of a score table."""
EVERY = "table backbone length text value study model_id weights source".split()
OF_SCORES = [*EVERY, *"budget_percent maps ci_low ci_high benchmark task method n data decoding".split()]
OF_ACCOUNTING = [*EVERY, *"budget_percent maps ci_low ci_high corpus quantity packs".split()]
LATENCY_CONDITIONS = "implementation dtype device".split()
TRAINING_CONDITIONS = "steps hardware processes".split()
OF_LATENCIES = [*EVERY, *LATENCY_CONDITIONS, *"budget_percent low high method batch quantity repeats".split()]
OF_TRAINING = [*EVERY, *TRAINING_CONDITIONS, *"maps quantity".split()]
REMEDY = "delete it and run the table stage again"

Row = Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """What two cells of a table share when they say the same thing; what a table does not have is empty or None.

    Attributes:
        maps: label of the feature maps; None for methods without.
        quantity: `score`, a column of the accounting files, or what a table of costs prints.
        implementation, batch: of a latency.
    """

    backbone: str
    length: str
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
    def point(self) -> Point:
        """Of a cell with a score."""
        return Point(self.benchmark, self.length, self.backbone, self.method, self.budget_percent, self.task, self.maps)

    def __str__(self) -> str:
        if self.quantity == SCORE:
            return str(self.point)
        latency = f"{self.method} ({self.implementation}, batch {self.batch})" if self.batch else ""
        return " ".join(filter(None, (self.corpus, latency, self.length, self.quantity)))


@dataclass(frozen=True)
class Measured:
    """One printed value of a study.

    Attributes:
        text: as printed; a time that is printed with its unit stands in hours.
        low, high: 95 % interval, printed like the value, or of a step's time the fastest and slowest repeat; None for a
            quantity without.
        n: examples behind a score, packs behind an accounting error, repeats behind a latency.
        data: where the examples of a score come from (`original`, `simulated`, `stand-in`).
        decoding: how the texts behind a score were generated, in words.
        source: name of the file that the table was made from.
    """

    place: Place
    text: str
    low: str | None
    high: str | None
    n: int
    model_id: str
    weights: str
    source: str
    data: tuple[str, ...] = ()
    decoding: str = ""
    conditions: dict[str, str] = field(default_factory=dict)
    """How a cost was measured, by column."""


def load_table(path: Path, study: str) -> tuple[str, list[Measured]]:
    """Label and printed values of a table's CSV; cells that its study does not evaluate are left out.

    Raises:
        ValueError: the file is missing, cut, of another study or table, or holds a value that is no number or not the
            printed one; names file and line.
    """
    rows = read_csv(path, ["table", "study", "text"], "table")
    label = only_value(rows, "table", path, REMEDY)
    expected = _format_of(label, path)
    rows = read_csv(path, expected.columns, "table")
    printed = {number: row for number, row in enumerate(rows, start=2) if row["text"] != LEFT_OUT.text}
    if (found := only_value(printed.values(), "study", path, REMEDY)) != study:
        raise ValueError(f"{path}: is of study {found!r}, not of {study!r}; {REMEDY}")
    by_place: dict[Place, Measured] = {}
    for number, row in printed.items():
        value = expected.read(row, f"{path}:{number}")
        if value.place in by_place:
            raise ValueError(f"{path}:{number}: a second row for {value.place}; {REMEDY}")
        by_place[value.place] = value
    _check_complete(rows, expected.cells, path)
    return label, list(by_place.values())


@dataclass(frozen=True)
class _Format:
    """Columns of a table's CSV, what reads one of its rows, and how many belong together (None: always as many)."""

    columns: Sequence[str]
    read: Callable[[Row, str], Measured]
    cells: int | None = None


def _format_of(label: str, path: Path) -> _Format:
    if runtime_table.is_label(label):
        return _Format(OF_LATENCIES, _latency, len(METHODS) * len(runtime_table.QUANTITIES))
    if label == training_cost_table.LABEL:
        return _Format(OF_TRAINING, _training, len(training_cost_table.QUANTITIES))
    if label == accounting_table.LABEL:
        return _Format(OF_ACCOUNTING, _measured, len(accounting_table.QUANTITIES))
    if label in LAYOUTS:
        return _Format(OF_SCORES, _measured)
    raise ValueError(f"{path}: is of table {label!r}; known are {', '.join(TABLES)}")


def _measured(row: Row, where: str) -> Measured:
    value = finite_field(row, "value", where, REMEDY)
    if row["text"] != format_score(value):
        raise ValueError(f"{where}: text is {row['text']!r}, but value {row['value']}; {REMEDY}")
    _check_names(row, where)
    low, high = _interval(row, where)
    n = _count(row, "n" if "n" in row else "packs", where)
    place = Place(
        backbone=row["backbone"],
        benchmark=row.get("benchmark", ""),
        task=row.get("task", ""),
        corpus=row.get("corpus", ""),
        length=row["length"],
        method=row.get("method", ""),
        budget_percent=finite_field(row, "budget_percent", where, REMEDY) if row["budget_percent"] else None,
        maps=row["maps"] or None,
        quantity=row.get("quantity", SCORE),
    )
    return Measured(
        place=place,
        text=row["text"],
        low=low,
        high=high,
        n=n,
        data=tuple(row["data"].split("+")) if "data" in row else (),
        decoding=row.get("decoding", ""),
        model_id=row["model_id"],
        weights=row["weights"],
        source=row["source"],
    )


def _latency(row: Row, where: str) -> Measured:
    quantity = _quantity(row, where, runtime_table.QUANTITIES, runtime_table.printed)
    low, high = _interval(row, where, "low", "high", lambda bound: runtime_table.printed(quantity, bound))
    return Measured(
        place=Place(
            backbone=row["backbone"],
            length=row["length"],
            method=row["method"],
            budget_percent=finite_field(row, "budget_percent", where, REMEDY) if row["budget_percent"] else None,
            quantity=quantity,
            implementation=row["implementation"],
            batch=_count(row, "batch", where),
        ),
        text=row["text"],
        low=low,
        high=high,
        n=_count(row, "repeats", where),
        model_id=row["model_id"],
        weights=row["weights"],
        source=row["source"],
        conditions={name: row[name] for name in LATENCY_CONDITIONS},
    )


def _training(row: Row, where: str) -> Measured:
    quantity = _quantity(row, where, training_cost_table.QUANTITIES, training_cost_table.printed)
    value = float(row["value"])
    return Measured(
        place=Place(backbone=row["backbone"], length=row["length"], maps=row["maps"], quantity=quantity),
        text=format_score(value) if quantity == training_cost_table.WALL_CLOCK else f"{value:.0f}",
        low=None,
        high=None,
        n=1,
        model_id=row["model_id"],
        weights=row["weights"],
        source=row["source"],
        conditions={name: row[name] for name in TRAINING_CONDITIONS},
    )


def _quantity(row: Row, where: str, known: Sequence[str], printed: Callable[[str, float], str]) -> str:
    """What a row of costs is about, after a check that its text is the print of its value."""
    _check_names(row, where, known)
    if row["text"] != printed(row["quantity"], finite_field(row, "value", where, REMEDY)):
        raise ValueError(f"{where}: text is {row['text']!r}, but value {row['value']}; {REMEDY}")
    return row["quantity"]


def _count(row: Row, name: str, where: str) -> int:
    if not is_count(row[name]) or int(row[name]) == 0:
        raise ValueError(f"{where}: {name} is {row[name]!r}, not a count; {REMEDY}")
    return int(row[name])


def _check_names(row: Row, where: str, quantities: Sequence[str] = accounting_table.QUANTITIES) -> None:
    options = {"method": METHODS, "quantity": quantities, "implementation": runtime_file.IMPLEMENTATIONS}
    if "task" in row:
        options["benchmark"] = tuple(BENCHMARKS)
        options["task"] = (ALL_TASKS, *(task.name for task in BENCHMARKS.get(row["benchmark"], ())))
    for name, known in options.items():
        if row.get(name, known[0]) not in known:
            raise ValueError(f"{where}: unknown {name} {row[name]!r}; {REMEDY}")
    trained, _ = length_and_variant(row.get("maps", ""))
    for label in filter(None, (row["length"], trained)):
        try:
            tokens_of(label)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; {REMEDY}") from None


def _interval(
    row: Row,
    where: str,
    low_name: str = "ci_low",
    high_name: str = "ci_high",
    printed: Callable[[float], str] = format_score,
) -> tuple[str, str] | tuple[None, None]:
    if row[low_name] == row[high_name] == "":
        return None, None
    low, high = finite_field(row, low_name, where, REMEDY), finite_field(row, high_name, where, REMEDY)
    if low > high:
        raise ValueError(f"{where}: {low_name} is {row[low_name]}, above {high_name}, {row[high_name]}; {REMEDY}")
    return printed(low), printed(high)


def _check_complete(rows: Sequence[Row], cells: int | None, path: Path) -> None:
    """Benchmarks, tasks, corpora or batch sizes at a length all have as many cells, those left out included; most files
    that were cut between lines fail here.
    """
    names = ("backbone", "benchmark", "task", "corpus", "implementation", "batch", "length")
    sizes = Counter(tuple(row[name] for name in names if name in row) for row in rows)
    expected = cells or max(sizes.values())
    for block, size in sizes.items():
        if size < expected:
            raise ValueError(f"{path}: cut short, {' '.join(block)} has {size} cells, not {expected}; {REMEDY}")
