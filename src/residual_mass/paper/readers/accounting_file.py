"""Accounting CSVs of the findings stage, read with suspicion: a file that is cut, mixed or damaged is refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from residual_mass.files import finite_field, is_count, only_value, read_csv
from residual_mass.paper.readers.results import phi_shas

METHODS = {"e_topk": "topk", "e_nosub": "topk_phi_nosub", "e_sub": "topk_phi"}
"""Errors that compete for bold type, by their column, and the methods that make them."""
LOG_Z = "log_z_error"
INTERVALS = (*METHODS, LOG_Z)
"""Quantities with a 95 % bootstrap interval, over heads and packs."""
CONSTANT = ("study", "backbone", "model_id", "revision", "weights")
"""What a file has one value of."""
COUNTS = ("k", "packs", "heads", "rows")
ERRORS = (*METHODS, "e_exact_sub", "e_exact_nosub")
BOUNDS = [f"{name}_ci_{side}" for name in INTERVALS for side in ("low", "high")]
COLUMNS = [
    *CONSTANT, "corpus", "length", "maps", "budget_percent", *COUNTS, *ERRORS, LOG_Z, *BOUNDS, "clamped_share",
    "phi_sha",
]  # fmt: skip
REMEDY = "delete it and run the findings stage again"

Row = dict[str, str]
Place = tuple[str, str, float]
"""Corpus, length and budget in percent."""


@dataclass(frozen=True)
class Accounting:
    """One file of the findings stage: what all of it is of (CONSTANT), and its rows as they stand."""

    path: Path
    facts: dict[str, str]
    rows: dict[Place, Row]


def load_accounting(path: Path) -> Accounting:
    """Reads one accounting file.

    Raises:
        ValueError: the file is missing, cut, inconsistent or holds a value that is not a number; names file and line.
    """
    rows = read_csv(path, COLUMNS, "findings")
    by_place: dict[Place, Row] = {}
    for number, row in enumerate(rows, start=2):
        where = f"{path}:{number}"
        _check_numbers(row, where)
        place = row["corpus"], row["length"], float(row["budget_percent"])
        if place in by_place:
            raise ValueError(f"{where}: a second row for {name_of(place)}; {REMEDY}")
        by_place[place] = row
    facts = {name: only_value(rows, name, path, REMEDY) for name in CONSTANT}
    phi_shas(rows, path, REMEDY)
    _check_complete(by_place, path)
    return Accounting(path, facts, by_place)


def _check_numbers(row: Row, where: str) -> None:
    for name in ("budget_percent", *COUNTS, *ERRORS, "clamped_share"):
        if finite_field(row, name, where, REMEDY) < 0:
            raise ValueError(f"{where}: {name} is {row[name]}, below 0; {REMEDY}")
    for name in COUNTS:
        if not is_count(row[name]) or (name != "k" and int(row[name]) == 0):
            raise ValueError(f"{where}: {name} is {row[name]!r}, not a count; {REMEDY}")
    if float(row["clamped_share"]) > 1:
        raise ValueError(f"{where}: clamped_share is {row['clamped_share']}, above 1; {REMEDY}")
    for name in INTERVALS:
        low, high = f"{name}_ci_low", f"{name}_ci_high"
        if name == LOG_Z and row[name] == row[low] == row[high] == "":
            continue  # no residual is left in any row: every log is -inf
        finite_field(row, name, where, REMEDY)
        if finite_field(row, low, where, REMEDY) > finite_field(row, high, where, REMEDY):
            raise ValueError(f"{where}: {low} is {row[low]}, above {high}, {row[high]}; {REMEDY}")


def _check_complete(places: Iterable[Place], path: Path) -> None:
    """Every corpus and length must have every budget; a file that was cut between rows fails here."""
    places = list(places)
    for corpus, length in dict.fromkeys((corpus, length) for corpus, length, _ in places):
        for budget in dict.fromkeys(budget for _, _, budget in places):
            if (place := (corpus, length, budget)) not in places:
                raise ValueError(f"{path}: cut short, no row for {name_of(place)}; {REMEDY}")


def name_of(place: Place) -> str:
    corpus, length, budget = place
    return f"{corpus} {length} at {budget:g}%"
