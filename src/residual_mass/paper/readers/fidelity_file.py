"""Fidelity CSVs of the fidelity stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from residual_mass.benchmarks.columns import FIDELITY
from residual_mass.files import read_csv
from residual_mass.paper.readers import optional
from residual_mass.paper.table import Interval


@dataclass(frozen=True)
class FidelityRow:
    """A metric of an arm on a text; `row` is the row as it stands in the file."""

    path: Path
    row: dict[str, str]

    @property
    def value(self) -> float:
        return float(self.row["value"])

    @property
    def budget(self) -> float | None:
        """In percent; None for full attention."""
        return optional(self.row["budget_percent"])

    @property
    def maps(self) -> str | None:
        """Label of the feature maps."""
        return self.row["maps"] or None

    @property
    def interval(self) -> Interval | None:
        """None where there is one document alone."""
        if not self.row["ci_low"]:
            return None
        return Interval(float(self.row["ci_low"]), float(self.row["ci_high"]))


def load_fidelity(path: Path) -> list[FidelityRow]:
    """The rows of one file, which are all of one backbone at one length."""
    return [FidelityRow(path, row) for row in read_csv(path, FIDELITY, "fidelity")]
