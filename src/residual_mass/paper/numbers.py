"""The numbers of a study's tables as LaTeX macros, so that prose quotes them by name and is never out of date."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from residual_mass.files import write_text
from residual_mass.paper.latex import Latex, escape, render
from residual_mass.paper.table import Cell, Interval, Table, load_table
from residual_mass.provenance import Record
from residual_mass.study.specs import NumbersSpec

COUNTED = ("examples", "documents", "packs")
"""What is counted behind a value that prose would quote."""
SMALLEST_P = 0.001
"""P-values below it are printed as such: more digits say nothing about so few resamples."""


def run(spec: NumbersSpec, tables: Sequence[Path], template: Path, out: Path) -> None:
    """Writes macros that look up the values of saved tables, each cell by its key (see `keyed_cells`).

    Raises:
        ValueError: a file is not what was recorded or of another study, or two cells have one key; names file and key.
    """
    record = Record("numbers", spec, tables, sources=[template])
    cells: dict[Latex, Cell] = {}
    for path in tables:
        for key, cell in keyed_cells(load_table(path, spec.study)):
            if cells.setdefault(key, cell) is not cell:
                raise ValueError(f"{path}: two cells have the key {key}; give each table once")
    if not cells:
        raise ValueError(f"study {spec.study}: no table with a number; give one")
    entries = [(kind, key, text) for key, cell in cells.items() for kind, text in _facts(cell)]
    example = next((key for key, cell in cells.items() if cell.gain), next(iter(cells)))
    write_text(out, render(template, study=spec.study, example=example, entries=entries))
    record.write(out)


def keyed_cells(table: Table) -> Iterator[tuple[Latex, Cell]]:
    """Every cell with a value, and what names it in prose: `Table.key`, with slashes between.

    Raises:
        ValueError: a part of a key holds what TeX may not read as it stands.
    """
    for cell in table.evaluated:
        for part in table.key(cell):
            if not re.fullmatch(r"[A-Za-z0-9._+-]+", part):
                raise ValueError(f"{part!r}: no key of table {table.label} can hold it; use letters, digits, . _ + -")
        yield Latex("/".join(table.key(cell))), cell


def _facts(cell: Cell) -> Iterator[tuple[str, Latex]]:
    """What is known of a cell, by the macro that prints it."""
    yield "value", _as_printed(cell.text)
    if cell.interval:
        yield "interval", _interval(cell.interval, cell.decimals)
    if cell.counted in COUNTED:
        yield "count", Latex(cell.n)
    if cell.gain:
        yield "gain", Latex(f"${cell.gain.value:+z.{cell.decimals}f}$")
        yield "gaininterval", _interval(cell.gain.interval, cell.decimals)
        yield "gainp", _p_value(cell.gain.p_holm)


def _as_printed(text: str) -> Latex:
    """In mathematics where it has a sign, as in the tables: a hyphen is no minus."""
    return Latex(f"${text}$") if re.fullmatch(r"[+-][0-9.]+", text) else escape(text)


def _interval(interval: Interval, decimals: int) -> Latex:
    """Both bounds with as many decimals as the value has in print."""
    return Latex(f"$[{interval.low:z.{decimals}f}, {interval.high:z.{decimals}f}]$")


def _p_value(value: float) -> Latex:
    return Latex(rf"$p < {SMALLEST_P}$" if value < SMALLEST_P else f"$p = {value:.3f}$")
