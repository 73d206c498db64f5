"""CSVs beside the tables of a study, read with suspicion: one that is cut, damaged or of another study is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from residual_mass.benchmarks.catalogue import BENCHMARKS
from residual_mass.files import finite_field, only_value, read_csv
from residual_mass.paper import accounting_table
from residual_mass.paper.cells import ALL_TASKS, LEFT_OUT, Point, format_score
from residual_mass.paper.layouts import LAYOUTS
from residual_mass.specs import METHODS, tokens_of

TABLES = (*LAYOUTS, accounting_table.LABEL)
"""Labels of the tables whose CSVs can be read here."""
SCORE = "score"
"""The quantity of every cell of a score table."""
EVERY = "table backbone length budget_percent maps text value ci_low ci_high study model_id weights source".split()
OF_SCORES = [*EVERY, *"benchmark task method n data decoding".split()]
OF_ACCOUNTING = [*EVERY, *"corpus quantity packs".split()]
REMEDY = "delete it and run the table stage again"

Row = Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """What two cells of a table share when they say the same thing; what a table does not have is empty or None.

    Attributes:
        maps: label of the feature maps; None for methods without.
        quantity: `score`, or a column of the accounting files.
    """

    backbone: str
    benchmark: str
    task: str
    corpus: str
    length: str
    method: str
    budget_percent: float | None
    maps: str | None
    quantity: str = SCORE

    @property
    def point(self) -> Point:
        """Of a cell with a score."""
        return Point(self.benchmark, self.length, self.backbone, self.method, self.budget_percent, self.task, self.maps)

    def __str__(self) -> str:
        return str(self.point) if self.quantity == SCORE else f"{self.corpus} {self.length} {self.quantity}"


@dataclass(frozen=True)
class Measured:
    """One printed value of a study.

    Attributes:
        text: as printed.
        low, high: 95 % interval, printed like the value; None for a quantity without.
        n: examples behind a score, packs behind an accounting error.
        data: where the examples of a score come from (`original`, `simulated`, `stand-in`).
        decoding: how the texts behind a score were generated, in words.
        source: name of the file that the table was made from.
    """

    place: Place
    text: str
    low: str | None
    high: str | None
    n: int
    data: tuple[str, ...]
    decoding: str
    model_id: str
    weights: str
    source: str


def load_table(path: Path, study: str) -> tuple[str, list[Measured]]:
    """Label and printed values of a table's CSV; cells that its study does not evaluate are left out.

    Raises:
        ValueError: the file is missing, cut, of another study or table, or holds a value that is no number or not the
            printed one; names file and line.
    """
    rows = read_csv(path, ["table", "study", "text"], "table")
    label = only_value(rows, "table", path, REMEDY)
    if label not in TABLES:
        raise ValueError(f"{path}: is of table {label!r}; known are {', '.join(TABLES)}")
    rows = read_csv(path, OF_ACCOUNTING if label == accounting_table.LABEL else OF_SCORES, "table")
    printed = {number: row for number, row in enumerate(rows, start=2) if row["text"] != LEFT_OUT.text}
    if (found := only_value(printed.values(), "study", path, REMEDY)) != study:
        raise ValueError(f"{path}: is of study {found!r}, not of {study!r}; {REMEDY}")
    by_place: dict[Place, Measured] = {}
    for number, row in printed.items():
        value = _measured(row, f"{path}:{number}")
        if value.place in by_place:
            raise ValueError(f"{path}:{number}: a second row for {value.place}; {REMEDY}")
        by_place[value.place] = value
    _check_complete(rows, path)
    return label, list(by_place.values())


def _measured(row: Row, where: str) -> Measured:
    value = finite_field(row, "value", where, REMEDY)
    if row["text"] != format_score(value):
        raise ValueError(f"{where}: text is {row['text']!r}, but value {row['value']}; {REMEDY}")
    _check_names(row, where)
    low, high = _interval(row, where)
    counted = "n" if "n" in row else "packs"
    if not row[counted].isdecimal() or int(row[counted]) == 0:
        raise ValueError(f"{where}: {counted} is {row[counted]!r}, not a count; {REMEDY}")
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
        n=int(row[counted]),
        data=tuple(row["data"].split("+")) if "data" in row else (),
        decoding=row.get("decoding", ""),
        model_id=row["model_id"],
        weights=row["weights"],
        source=row["source"],
    )


def _check_names(row: Row, where: str) -> None:
    options = {"method": METHODS, "quantity": accounting_table.QUANTITIES}
    if "task" in row:
        options["benchmark"] = tuple(BENCHMARKS)
        options["task"] = (ALL_TASKS, *(task.name for task in BENCHMARKS.get(row["benchmark"], ())))
    for name, known in options.items():
        if row.get(name, known[0]) not in known:
            raise ValueError(f"{where}: unknown {name} {row[name]!r}; {REMEDY}")
    trained, _, _ = row["maps"].partition("-")
    for label in filter(None, (row["length"], trained)):
        try:
            tokens_of(label)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; {REMEDY}") from None


def _interval(row: Row, where: str) -> tuple[str, str] | tuple[None, None]:
    if row["ci_low"] == row["ci_high"] == "":
        return None, None
    low, high = finite_field(row, "ci_low", where, REMEDY), finite_field(row, "ci_high", where, REMEDY)
    if low > high:
        raise ValueError(f"{where}: ci_low is {row['ci_low']}, above ci_high, {row['ci_high']}; {REMEDY}")
    return format_score(low), format_score(high)


def _check_complete(rows: Sequence[Row], path: Path) -> None:
    """Benchmarks, tasks or corpora at a length all have as many cells, those left out included; most files that were
    cut between lines fail here.
    """
    names = ("backbone", "benchmark", "task", "corpus", "length")
    sizes = Counter(tuple(row[name] for name in names if name in row) for row in rows)
    expected = len(accounting_table.QUANTITIES) if "quantity" in rows[0] else max(sizes.values())
    for block, size in sizes.items():
        if size < expected:
            raise ValueError(f"{path}: cut short, {' '.join(block)} has {size} cells, not {expected}; {REMEDY}")
