"""Result CSVs of the score stage, read with suspicion: a file that is cut, mixed or of another study is refused."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from residual_mass.paper.cells import Point
from residual_mass.specs import METHODS

COLUMNS = (
    "benchmark backbone length task method budget_percent value ci_low ci_high n "
    "study model_id revision phi_sha weights"
).split()
CONSTANT = ("benchmark", "backbone", "length", "study", "model_id", "revision", "weights")
REMEDY = "delete it and rerun the score stage"

Row = dict[str, str]
Arm = tuple[str, float | None]


@dataclass(frozen=True)
class Score:
    """A mean over tasks with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """What one result CSV says over all tasks."""

    path: Path
    benchmark: str
    backbone: str
    length: str
    study: str
    model_id: str
    revision: str
    weights: str
    phi_shas: tuple[str, ...]
    tasks: int
    examples: int
    scores: dict[Arm, Score]

    def score(self, point: Point) -> Score:
        """Raises ValueError naming cell and file when the file lacks the point."""
        arm = (point.method, point.budget_percent)
        if arm not in self.scores:
            raise ValueError(f"{self.path}: no cell for {point}; rerun the generate and score stages with that budget")
        return self.scores[arm]


def load_result(path: Path) -> Result:
    """Reads one result CSV.

    Raises:
        ValueError: the file is missing, cut, inconsistent or holds a value that is not a number; names file and line.
    """
    rows = _read_rows(path)
    facts = {name: _constant(rows, name, path) for name in CONSTANT}
    arms_of: dict[str, dict[Arm, Row]] = {}
    for number, row in enumerate(rows, start=2):
        arm = _arm(row, f"{path}:{number}")
        if arm in (arms := arms_of.setdefault(row["task"], {})):
            raise ValueError(
                f"{path}:{number}: a second row for {row['task']} {arm[0]} {row['budget_percent']}; {REMEDY}"
            )
        arms[arm] = row
    _check_complete(arms_of, path)
    overall = arms_of.pop("all")
    return Result(
        path=path,
        **facts,
        phi_shas=tuple(dict.fromkeys(row["phi_sha"] for row in rows if row["phi_sha"])),
        tasks=len(arms_of),
        examples=_count(overall.values(), path),
        scores={arm: _score(row, path) for arm, row in overall.items()},
    )


def _read_rows(path: Path) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; run the score stage") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); {REMEDY}") from None
    if not text.endswith("\n"):
        raise ValueError(f"{path}: empty or cut short, its last line does not end; {REMEDY}")
    header, *lines = csv.reader(io.StringIO(text))
    if missing := [name for name in COLUMNS if name not in header]:
        raise ValueError(f"{path}: column {missing[0]} is missing; {REMEDY}")
    for number, line in enumerate(lines, start=2):
        if len(line) != len(header):
            raise ValueError(f"{path}:{number}: {len(line)} fields where the header has {len(header)}; {REMEDY}")
    return [dict(zip(header, line, strict=True)) for line in lines]


def _constant(rows: list[Row], name: str, path: Path) -> str:
    values = dict.fromkeys(row[name] for row in rows)
    if len(values) != 1:
        found = " and ".join(map(repr, values)) or "no row"
        raise ValueError(f"{path}: {name} should have one value, found {found}; {REMEDY}")
    return next(iter(values))


def _arm(row: Row, where: str) -> Arm:
    method, budget = row["method"], row["budget_percent"]
    if method not in METHODS:
        raise ValueError(f"{where}: unknown method {method!r}; known are {', '.join(METHODS)}")
    if (method == "full") != (budget == ""):
        raise ValueError(f"{where}: budget_percent is {budget!r} for method {method}; {REMEDY}")
    return method, None if budget == "" else _number(row, "budget_percent", where)


def _check_complete(arms_of: dict[str, dict[Arm, Row]], path: Path) -> None:
    """Every task and the summary over tasks must have every arm; the summary comes last, so a cut file fails here."""
    arms = {arm: None for of_task in arms_of.values() for arm in of_task}
    for task in [*arms_of, "all"]:
        for method, budget in arms:
            if (method, budget) not in arms_of.get(task, {}):
                at = "" if budget is None else f" at {budget:g}%"
                raise ValueError(f"{path}: cut short, no row for {task} {method}{at}; {REMEDY}")
    if len(arms_of) == 1:
        raise ValueError(f"{path}: no row of a single task; {REMEDY}")


def _count(rows: Iterable[Row], path: Path) -> int:
    counts = {_number(row, "n", str(path)) for row in rows}
    if len(counts) != 1 or (count := counts.pop()) != int(count) or count < 1:
        raise ValueError(f"{path}: the methods were not scored on one and the same number of examples; {REMEDY}")
    return int(count)


def _score(row: Row, path: Path) -> Score:
    where = f"{path}: {row['task']} {row['method']} {row['budget_percent']}".rstrip()
    return Score(*(_number(row, name, where) for name in ("value", "ci_low", "ci_high")))


def _number(row: Row, name: str, where: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{where}: {name} is {row[name]!r}, not a finite number; {REMEDY}")
    return value
