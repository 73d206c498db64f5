"""Summaries of the residual-errors stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from residual_mass.diagnostics.columns import RESIDUAL_ERRORS
from residual_mass.files import read_csv
from residual_mass.paper.readers import optional
from residual_mass.paper.table import Interval


@dataclass(frozen=True)
class ResidualRow:
    """A method at a budget on a corpus; `row` is the row as it stands in the file."""

    path: Path
    row: dict[str, str]

    @property
    def budget(self) -> float:
        """In percent."""
        return float(self.row["budget_percent"])

    @property
    def maps(self) -> str | None:
        """Label of the feature maps."""
        return self.row["maps"] or None

    def value(self, name: str) -> float | None:
        """None where it is not defined."""
        return optional(self.row[name])

    def interval(self, name: str) -> Interval | None:
        """None where there is a single pack, or the number has none."""
        if not self.row.get(f"{name}_ci_low"):
            return None
        return Interval(*(float(self.row[f"{name}_ci_{side}"]) for side in ("low", "high")))


def load_residuals(path: Path) -> list[ResidualRow]:
    """The rows of one file, which are all of one backbone at one length."""
    return [ResidualRow(path, row) for row in read_csv(path, RESIDUAL_ERRORS, "residual-errors")]
