"""The table stage: a table from results as JSON, LaTeX and CSV; and the paper's own tables as LaTeX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from residual_mass.files import write_text
from residual_mass.paper.table import Table
from residual_mass.paper.tables import (
    accounting_table,
    deployable_table,
    fidelity_table,
    parameter_table,
    residual_table,
    runtime_table,
    score_table,
    training_cost_table,
)
from residual_mass.paper.tables.layouts import LAYOUTS
from residual_mass.provenance import Record
from residual_mass.study.specs import TableSpec

FRAME = "frame.tex.j2"
"""The template that all templates of tables extend."""


@dataclass(frozen=True)
class Kind:
    """What makes a table from the results of a study, and the one with the paper's values from its label; None where
    the paper has none.
    """

    make: Callable[[TableSpec, list[Path]], Table]
    make_published: Callable[[str], Table] | None


SCORES = Kind(score_table.make, score_table.make_published)
LATENCIES = Kind(runtime_table.make, runtime_table.make_published)
KINDS = {
    **dict.fromkeys(LAYOUTS, SCORES),
    accounting_table.LABEL: Kind(accounting_table.make, accounting_table.make_published),
    parameter_table.LABEL: Kind(parameter_table.make, parameter_table.make_published),
    training_cost_table.LABEL: Kind(training_cost_table.make, training_cost_table.make_published),
    residual_table.LABEL: Kind(residual_table.make, None),
    deployable_table.LABEL: Kind(deployable_table.make, None),
    **dict.fromkeys(fidelity_table.KINDS, Kind(fidelity_table.make, None)),
}


def run(spec: TableSpec, results: list[Path], template: Path, out: Path, cells: Path, data: Path) -> None:
    """Makes table `spec.label` from the results of its study, and writes it as LaTeX to `out`, as a CSV with one line
    per cell to `cells`, and as JSON, which other stages read, to `data`.

    Raises:
        ValueError: the label is unknown, a cell of the study is missing, or a file is not what was recorded or of
            another study; names cell and file.
    """
    record = Record("table", spec, results, sources=[template, template.with_name(FRAME)])
    table = _kind(spec.label).make(spec, results)
    table = replace(table, caption=table.caption_by(template))
    write_text(out, table.latex(template))
    write_text(cells, table.csv())
    table.save(data)
    for path in (out, cells, data):
        record.write(path)


def run_published(label: str, template: Path, out: Path) -> None:
    """Writes table `label` with the paper's values. Raises ValueError when the paper has no such table."""
    write_text(out, make_published(label).latex(template))


def make_published(label: str) -> Table:
    """Table `label` with the paper's values. Raises ValueError when the paper has no such table."""
    make = _kind(label).make_published
    if make is None:
        raise ValueError(f"the paper has no table {label!r}")
    return make(label)


def _kind(label: str) -> Kind:
    if runtime_table.is_label(label):
        return LATENCIES
    if label not in KINDS:
        known = ", ".join([*KINDS, f"{runtime_table.PREFIX}<backbone>"])
        raise ValueError(f"table {label!r} is unknown; known are {known}")
    return KINDS[label]
