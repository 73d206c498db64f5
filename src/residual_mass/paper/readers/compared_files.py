"""What files say of the same methods: errors of attention outputs, distances of the next token, and trainings."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from residual_mass.benchmarks.columns import FOLLOWING, OWN
from residual_mass.files import read_json
from residual_mass.paper.readers.fidelity_file import FidelityRow, load_fidelity
from residual_mass.paper.readers.residuals_file import ResidualRow, load_residuals
from residual_mass.paper.readers.training_log import read_log
from residual_mass.paper.table import ALL_TASKS, Place
from residual_mass.provenance import beside


@dataclass(frozen=True)
class Training:
    """The log of a finished training."""

    path: Path
    seconds: float


@dataclass(frozen=True)
class Compared:
    """Methods on held-out texts.

    Attributes:
        rows: by backbone, corpus, length, method and budget.
        forced: of the text that follows, by the same places with the maps, and with the metric as their quantity.
        trainings: by backbone and label of the maps.
    """

    rows: dict[Place, ResidualRow]
    forced: dict[Place, FidelityRow]
    trainings: dict[tuple[str, str], Training]

    @cached_property
    def distances(self) -> dict[Place, FidelityRow]:
        """Those of `forced` with the maps of the errors, by the places of the errors with the metric as quantity."""
        found = {}
        for place, row in self.forced.items():
            plain = replace(place, maps=None)
            errors = self.rows.get(place_of_errors(plain))
            if errors is not None and errors.maps == place.maps:
                found[plain] = row
        return found

    def training(self, row: ResidualRow) -> Training | None:
        """Of the maps behind a row."""
        return self.trainings.get((row.row["backbone"], row.maps)) if row.maps else None


def place_of_errors(place: Place) -> Place:
    """Where `Compared.rows` has the errors of a method whose distance is at `place`."""
    return Place(place.backbone, place.length, corpus=place.corpus, method=place.method,
                 budget_percent=place.budget_percent)  # fmt: skip


def read_compared(paths: Iterable[Path], metrics: Collection[str]) -> Compared:
    """Reads residual-errors and fidelity CSVs and training logs, told apart by their records.

    Args:
        metrics: those of the next token to keep.
    """
    rows: dict[Place, ResidualRow] = {}
    forced: dict[Place, FidelityRow] = {}
    trainings: dict[tuple[str, str], Training] = {}
    for path in paths:
        made = read_json(beside(path))
        if made["stage"] == "train":
            trainings[made["spec"]["backbone"]["name"], made["spec"]["length"]] = _training(path)
        elif made["stage"] == "fidelity":
            shown = (row for row in load_fidelity(path) if _is_shown(row, metrics))
            forced |= {_place_of_distance(row): row for row in shown}
        else:
            rows |= {_place(row): row for row in load_residuals(path)}
    return Compared(rows, forced, trainings)


def _training(path: Path) -> Training:
    clock = {int(row["step"]): float(row["seconds"]) for row in read_log(path)}
    return Training(path, clock[max(clock)])


def _place(row: ResidualRow) -> Place:
    names = ("backbone", "corpus", "length", "method")
    return Place(**{name: row.row[name] for name in names}, budget_percent=row.budget)


def _is_shown(row: FidelityRow, metrics: Collection[str]) -> bool:
    facts = row.row
    of_text = (facts["continuation"], facts["state"], facts["task"]) == (FOLLOWING, OWN, ALL_TASKS)
    return of_text and facts["metric"] in metrics


def _place_of_distance(row: FidelityRow) -> Place:
    facts = row.row
    return Place(facts["backbone"], facts["length"], corpus=facts["text"], method=facts["method"],
                 budget_percent=row.budget, maps=row.maps, quantity=facts["metric"])  # fmt: skip
