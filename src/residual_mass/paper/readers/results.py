"""Result CSVs of the score stage, read with suspicion: a file that is cut, mixed or of another study is refused."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from residual_mass.benchmarks.catalogue import Data
from residual_mass.core.estimators import NAMES, estimator_named
from residual_mass.files import finite_field, only_value, read_csv
from residual_mass.paper.cells import ALL_TASKS, Point

COLUMNS = (
    "benchmark backbone length task method budget_percent maps value stderr ci_low ci_high original_value n "
    "gain gain_ci_low gain_ci_high gain_p mde full_gap full_gap_p flags data cut_share "
    "study model_id revision phi_sha prompts_sha weights"
).split()
CONSTANT = ("backbone", "study", "model_id", "revision", "weights")
"""What one file has one value of, whatever else it mixes."""
PLACE = ("benchmark", "length")
OPTIONAL = "stderr original_value gain gain_ci_low gain_ci_high gain_p mde full_gap full_gap_p".split()
"""Numbers that are empty where they are not defined."""
SHARES = ("gain_p", "full_gap_p", "cut_share")
FLAGS = ("beats_full", "ceiling", "floor")
KINDS: tuple[str, ...] = typing.get_args(Data)
REMEDY = "delete it and run the score stage again"

Row = dict[str, str]
Arm = tuple[str, float | None, str | None]
"""Method, budget in percent, label of the feature maps."""


@dataclass(frozen=True)
class Score:
    """One row of a result file: its numbers, and the row as it stands for whoever traces a cell back.

    Attributes:
        low, high: 95 % bootstrap interval of `value`.
        gain: mean paired difference to top-k at the same budget; None, like its p-value, where there is none.
        mde: minimal gain that this many examples could show.
        cut_share: share of prompts that were truncated to the context.
        data: where the examples come from, one or more of KINDS.
    """

    value: float
    low: float
    high: float
    gain: float | None
    gain_p: float | None
    mde: float | None
    cut_share: float
    flags: tuple[str, ...]
    data: tuple[str, ...]
    row: Row
    source: Path

    @property
    def examples(self) -> int:
        return int(float(self.row["n"]))


@dataclass(frozen=True)
class Result:
    """What a result CSV says of one benchmark at one length.

    Attributes:
        phi_shas: hash of the feature maps by their label.
        tasks: single tasks, without their mean.
        scores: by task (`all` for the mean) and arm.
    """

    path: Path
    benchmark: str
    length: str
    backbone: str
    study: str
    model_id: str
    revision: str
    weights: str
    prompts_sha: str
    phi_shas: dict[str, str]
    tasks: tuple[str, ...]
    scores: dict[str, dict[Arm, Score]]

    def score(self, point: Point) -> Score:
        """Raises ValueError naming cell and file when the file lacks the point, or has it with several maps."""
        found = {arm: score for arm, score in self.scores.get(point.task, {}).items() if _shows(point, arm)}
        if not found:
            raise ValueError(f"{self.path}: no cell for {point}; rerun the generate and score stages with that arm")
        if len(found) > 1:
            labels = " and ".join(str(maps) for _, _, maps in found)
            raise ValueError(f"{self.path}: {point} is there with maps {labels}; score one set of maps into this file")
        return next(iter(found.values()))

    def examples(self, task: str) -> int:
        """Examples behind each value of a task."""
        return next(iter(self.scores[task].values())).examples


def _shows(point: Point, arm: Arm) -> bool:
    method, budget, maps = arm
    return (method, budget) == (point.method, point.budget_percent) and point.maps in (None, maps)


def load_results(path: Path) -> list[Result]:
    """Reads one result CSV: one result per benchmark and length in it, in its order.

    Raises:
        ValueError: the file is missing, cut, inconsistent or holds a value that is not a number; names file and line.
    """
    rows = read_csv(path, COLUMNS, "score")
    facts = {name: only_value(rows, name, path, REMEDY) for name in CONSTANT}
    shas = phi_shas((row for row in rows if row["maps"]), path, REMEDY)
    places: dict[tuple[str, ...], dict[str, dict[Arm, Score]]] = {}
    for number, row in enumerate(rows, start=2):
        where = f"{path}:{number}"
        arm = _arm(row, where)
        arms = places.setdefault(tuple(row[name] for name in PLACE), {}).setdefault(row["task"], {})
        if arm in arms:
            raise ValueError(f"{where}: a second row for {row['task']} {_name(arm)}; {REMEDY}")
        arms[arm] = _score(row, path, where)
    results = []
    for (benchmark, length), scores in places.items():
        _check_complete(scores, f"{path}: {benchmark} {length}")
        of_place = [score.row for arms in scores.values() for score in arms.values()]
        used = {row["maps"] for row in of_place}
        results.append(
            Result(
                path=path,
                benchmark=benchmark,
                length=length,
                **facts,
                prompts_sha=only_value(of_place, "prompts_sha", path, REMEDY),
                phi_shas={maps: sha for maps, sha in shas.items() if maps in used},
                tasks=tuple(task for task in scores if task != ALL_TASKS),
                scores=scores,
            )
        )
    return results


def phi_shas(rows: Iterable[Row], path: Path, remedy: str) -> dict[str, str]:
    """Hash of the feature maps by label: two under one label would mean that some were trained anew in between."""
    shas: dict[str, str] = {}
    for row in rows:
        if shas.setdefault(row["maps"], row["phi_sha"]) != row["phi_sha"]:
            raise ValueError(f"{path}: maps {row['maps']} have two values of phi_sha; {remedy}")
    return shas


def _arm(row: Row, where: str) -> Arm:
    method, budget, maps = row["method"], row["budget_percent"], row["maps"]
    if method not in NAMES:
        raise ValueError(f"{where}: unknown method {method!r}; known are {', '.join(NAMES)}")
    if (method == "full") != (budget == ""):
        raise ValueError(f"{where}: budget_percent is {budget!r} for method {method}; {REMEDY}")
    for name in ("maps", "phi_sha"):
        if estimator_named(method).adds_residual != (row[name] != ""):
            raise ValueError(f"{where}: {name} is {row[name]!r} for method {method}; {REMEDY}")
    return method, None if budget == "" else finite_field(row, "budget_percent", where, REMEDY), maps or None


def _name(arm: Arm) -> str:
    method, budget, maps = arm
    return method + ("" if budget is None else f" at {budget:g}%") + ("" if maps is None else f" with maps {maps}")


def _score(row: Row, path: Path, where: str) -> Score:
    where = f"{where}: {row['task']} {row['method']} {row['budget_percent']}".rstrip()
    for name in ("n", "value", "ci_low", "ci_high", "cut_share"):
        finite_field(row, name, where, REMEDY)
    optional = {name: None if row[name] == "" else finite_field(row, name, where, REMEDY) for name in OPTIONAL}
    if (row["gain"] == "") != (row["gain_p"] == ""):
        raise ValueError(f"{where}: gain is {row['gain']!r}, but gain_p is {row['gain_p']!r}; {REMEDY}")
    for name in SHARES:
        if row[name] and not 0 <= float(row[name]) <= 1:
            raise ValueError(f"{where}: {name} is {row[name]}, outside 0 to 1; {REMEDY}")
    return Score(
        value=float(row["value"]),
        low=float(row["ci_low"]),
        high=float(row["ci_high"]),
        gain=optional["gain"],
        gain_p=optional["gain_p"],
        mde=optional["mde"],
        cut_share=float(row["cut_share"]),
        flags=_words(row, "flags", " ", FLAGS, where),
        data=_words(row, "data", "+", KINDS, where),
        row=row,
        source=path,
    )


def _words(row: Row, name: str, between: str, known: tuple[str, ...], where: str) -> tuple[str, ...]:
    words = tuple(row[name].split(between)) if row[name] else ()
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"{where}: {name} holds {unknown[0]!r}; known are {', '.join(known)}; {REMEDY}")
    return words


def _check_complete(scores: dict[str, dict[Arm, Score]], where: str) -> None:
    """Every task and the summary over tasks must have every arm, on the same examples; the summary comes last, so a cut
    file fails here.
    """
    arms = dict.fromkeys(arm for of_task in scores.values() for arm in of_task)
    for task in dict.fromkeys([*scores, ALL_TASKS]):
        for arm in arms:
            if arm not in scores.get(task, {}):
                raise ValueError(f"{where}: cut short, no row for {task} {_name(arm)}; {REMEDY}")
        counts = {score.row["n"] for score in scores[task].values()}
        if len(counts) != 1 or (count := float(counts.pop())) != int(count) or count < 1:
            raise ValueError(f"{where}: {task} was not scored on one and the same number of examples; {REMEDY}")
    if len(scores) == 1:
        raise ValueError(f"{where}: no row of a single task; {REMEDY}")
