"""Tables as the table stage makes them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from sample_results import TEMPLATES

from residual_mass.paper.tables.render import run
from residual_mass.study.specs import TableSpec

TEX, CELLS, DATA = "out.tex", "cells.csv", "data.json"


def table(folder: Path, wanted: TableSpec, *results: Path) -> str:
    """The LaTeX of a table, written to `folder` with its cells and its data."""
    name = "runtime" if wanted.label.startswith("runtime_") else wanted.label
    run(wanted, list(results), TEMPLATES / f"{name}.tex.j2", folder / TEX, folder / CELLS, folder / DATA)
    return (folder / TEX).read_text(encoding="utf-8")


def written_cells(folder: Path) -> list[dict[str, str]]:
    """The cells that `table` wrote beside the LaTeX."""
    with open(folder / CELLS, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def refusal(folder: Path, wanted: TableSpec, *results: Path) -> str:
    """What the stage says of a table that it does not make."""
    with pytest.raises(ValueError) as caught:
        table(folder, wanted, *results)
    assert not (folder / TEX).exists() and not (folder / CELLS).exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)
