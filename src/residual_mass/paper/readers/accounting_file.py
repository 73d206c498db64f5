"""Accounting CSVs of the findings stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from residual_mass.diagnostics.columns import ACCOUNTING
from residual_mass.files import read_csv
from residual_mass.paper.readers import optional
from residual_mass.paper.table import Interval

METHODS = {"e_topk": "topk", "e_nosub": "topk_phi_nosub", "e_sub": "topk_phi"}
"""Errors that compete for bold type, by their column, and the methods that make them."""
LOG_Z = "log_z_error"
INTERVALS = (*METHODS, LOG_Z)
"""Quantities with a 95 % bootstrap interval, over heads and packs."""


@dataclass(frozen=True)
class AccountingRow:
    """Mean errors on a corpus at a length and budget; `row` is the row as it stands in the file."""

    path: Path
    row: dict[str, str]

    @property
    def place(self) -> tuple[str, str, float]:
        """Corpus, length and budget in percent."""
        return self.row["corpus"], self.row["length"], self.budget

    @property
    def budget(self) -> float:
        return float(self.row["budget_percent"])

    @property
    def dropped(self) -> int:
        """Attention rows whose residual estimate was dropped."""
        return round(float(self.row["clamped_share"]) * int(self.row["rows"]))

    def value(self, quantity: str) -> float | None:
        """None for the log-Z error where no attention row has a residual."""
        return optional(self.row[quantity])

    def interval(self, quantity: str) -> Interval | None:
        if quantity not in INTERVALS or not self.row[quantity]:
            return None
        return Interval(*(float(self.row[f"{quantity}_ci_{side}"]) for side in ("low", "high")))


def load_accounting(path: Path) -> list[AccountingRow]:
    """The rows of one file, which are all of one backbone."""
    return [AccountingRow(path, row) for row in read_csv(path, ACCOUNTING, "findings")]
