"""Result CSVs of the score stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from residual_mass.benchmarks.columns import RESULTS
from residual_mass.files import read_csv
from residual_mass.paper.readers import optional
from residual_mass.paper.table import ALL_TASKS, Interval, Place

Arm = tuple[str, float | None, str | None]
"""Method, budget in percent, label of the feature maps."""


@dataclass(frozen=True)
class Score:
    """One row of a result file.

    Attributes:
        interval: 95 % bootstrap interval of `value`.
        gain: mean paired difference to top-k at the same budget; None, like its p-value, where there is none.
        mde: minimal gain that this many examples could show.
        cut_share: share of prompts that were truncated to the context.
        data: where the examples come from: `original`, `simulated`, `stand-in`.
        row: the row as it stands in the file.
    """

    value: float
    interval: Interval
    examples: int
    gain: float | None
    gain_p: float | None
    mde: float | None
    cut_share: float
    flags: tuple[str, ...]
    data: tuple[str, ...]
    row: dict[str, str]
    source: Path

    @property
    def maps(self) -> str | None:
        """Label of the feature maps."""
        return self.row["maps"] or None


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

    def score(self, place: Place) -> Score:
        """Raises ValueError naming cell and file when the file lacks the cell, or has it with several maps."""
        found = {arm: score for arm, score in self.scores.get(place.task, {}).items() if _shows(place, arm)}
        if not found:
            raise ValueError(f"{self.path}: no cell for {place}; rerun the generate and score stages with that arm")
        if len(found) > 1:
            labels = " and ".join(str(maps) for _, _, maps in found)
            raise ValueError(f"{self.path}: has {place} with maps {labels}; score one set of maps into this file")
        return next(iter(found.values()))

    def examples(self, task: str) -> int:
        """Examples behind each value of a task."""
        return next(iter(self.scores[task].values())).examples


def _shows(place: Place, arm: Arm) -> bool:
    method, budget, maps = arm
    return (method, budget) == (place.method, place.budget_percent) and place.maps in (None, maps)


def load_results(path: Path) -> list[Result]:
    """One result per benchmark and length in a result CSV, in its order."""
    places: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in read_csv(path, RESULTS, "score"):
        places.setdefault((row["benchmark"], row["length"]), []).append(row)
    return [_result(path, rows) for rows in places.values()]


def _result(path: Path, rows: list[dict[str, str]]) -> Result:
    scores: dict[str, dict[Arm, Score]] = {}
    for row in rows:
        arm = row["method"], optional(row["budget_percent"]), row["maps"] or None
        scores.setdefault(row["task"], {})[arm] = _score(row, path)
    names = ("benchmark", "length", "backbone", "study", "model_id", "revision", "weights", "prompts_sha")
    return Result(
        path=path,
        **{name: rows[0][name] for name in names},
        phi_shas={row["maps"]: row["phi_sha"] for row in rows if row["maps"]},
        tasks=tuple(task for task in scores if task != ALL_TASKS),
        scores=scores,
    )


def _score(row: dict[str, str], path: Path) -> Score:
    return Score(
        value=float(row["value"]),
        interval=Interval(float(row["ci_low"]), float(row["ci_high"])),
        examples=int(row["n"]),
        gain=optional(row["gain"]),
        gain_p=optional(row["gain_p"]),
        mde=optional(row["mde"]),
        cut_share=float(row["cut_share"]),
        flags=tuple(row["flags"].split()),
        data=tuple(row["data"].split("+")),
        row=row,
        source=path,
    )
