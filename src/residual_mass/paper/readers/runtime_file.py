"""CSVs of the runtime stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from residual_mass.core.settings import tokens_of
from residual_mass.files import read_csv
from residual_mass.methods import names
from residual_mass.paper.readers import optional
from residual_mass.runtime.columns import RUNTIME

if TYPE_CHECKING:
    from residual_mass.paper.table import Interval

PROTOTYPE, FUSED = "prototype", "fused"
IMPLEMENTATIONS = (PROTOTYPE, FUSED)


@dataclass(frozen=True)
class Latency:
    """One method in one setting; `row` is the row as it stands in the file."""

    row: dict[str, str]

    @property
    def method(self) -> str:
        return self.row["method"]

    @property
    def context(self) -> str:
        return self.row["context"]

    @property
    def block(self) -> tuple[str, int]:
        """Implementation and batch size: what is printed together."""
        return self.row["implementation"], int(self.row["batch"])

    @property
    def budget(self) -> float | None:
        """In percent; None for full attention."""
        return optional(self.row["budget_percent"])

    @property
    def measured(self) -> bool:
        """Whether the setting was run; of others `not_measured` says why not."""
        return not self.row["not_measured"]

    @property
    def step(self) -> float:
        """Milliseconds of one decoding step, the median over the repeats."""
        return float(self.row["per_step_ms"])

    @property
    def repeats(self) -> Interval:
        """Steps of the fastest and of the slowest repeat."""
        from residual_mass.paper.table import Interval  # needs pydantic, which the GPU check does without

        return Interval(float(self.row["per_step_low_ms"]), float(self.row["per_step_high_ms"]))

    @property
    def floor(self) -> float:
        """Milliseconds that the bytes of a step take; not rounded, which would leave nothing of a tiny model's."""
        return int(self.row["step_bytes"]) / float(self.row["bandwidth_gb_s"]) / 1e6


def load_latencies(path: Path) -> list[Latency]:
    """The rows of one file: by implementation, rising batch size, rising context and method."""
    latencies = [Latency(row) for row in read_csv(path, RUNTIME, "runtime")]
    return sorted(latencies, key=_order)


def _order(latency: Latency) -> tuple[int, int, int, int]:
    implementation, batch = latency.block
    return (
        IMPLEMENTATIONS.index(implementation),
        batch,
        tokens_of(latency.context),
        names().index(latency.method),
    )
