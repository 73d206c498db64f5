"""The numbers of a study's tables as LaTeX macros, so that prose quotes them by name and is never out of date."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from residual_mass.files import finite_field, only_value, read_csv, write_text
from residual_mass.paper.cells import LEFT_OUT
from residual_mass.paper.latex import Latex, escape, render
from residual_mass.paper.tables import runtime_table
from residual_mass.paper.tables.table_file import REMEDY, TABLES, load_table
from residual_mass.study.specs import NumbersSpec

COUNTS = ("n", "packs")
"""Columns of cells files that say how many examples or packs are behind a value."""
SMALLEST_P = 0.001
"""P-values below it are printed as such: more digits say nothing about so few resamples."""

Row = Mapping[str, str]


def run(spec: NumbersSpec, cells: Sequence[Path], template: Path, out: Path) -> None:
    """Writes macros that look up what the CSVs of the tables hold, each cell by its key (see `key_of`).

    Raises:
        ValueError: a file is missing, cut, damaged or of another study, or two cells have one key; names file and line.
    """
    by_key: dict[str, dict[str, Latex]] = {}
    for path in cells:
        for key, facts, where in _cells(path, spec.study):
            if key in by_key:
                raise ValueError(f"{where}: a second cell {key}; {REMEDY}")
            by_key[key] = facts
    if not by_key:
        raise ValueError(f"study {spec.study}: no table with a number; give the CSV of one")
    entries = [(kind, key, text) for key, facts in by_key.items() for kind, text in facts.items()]
    example = next((key for key, facts in by_key.items() if "gain" in facts), next(iter(by_key)))
    write_text(out, render(template, study=spec.study, example=Latex(example), entries=entries))


def key_of(row: Row) -> Latex:
    """What says which cell a line is about: its fields before `text`, those that are empty left out.

    Raises:
        ValueError: a field holds what TeX may not read as it stands.
    """
    names = list(row)
    fields = {name: row[name] for name in names[: names.index("text")] if row[name]}
    for name, value in fields.items():
        if not re.fullmatch(r"[A-Za-z0-9._+-]+", value):
            raise ValueError(f"{name} is {value!r}, which no key can hold; letters, digits and . _ + - are safe")
    return Latex("/".join(fields.values()))


def _cells(path: Path, study: str) -> Iterator[tuple[str, dict[str, Latex], str]]:
    """Key, facts and place of every line with a number."""
    rows = read_csv(path, ["table", "text", "value", "study"], "table")
    label = only_value(rows, "table", path, REMEDY)
    if label in TABLES or runtime_table.is_label(label):
        load_table(path, study)  # which looks closer
    printed = [(f"{path}:{number}", row) for number, row in enumerate(rows, 2) if row["text"] != LEFT_OUT.text]
    if (found := only_value((row for _, row in printed), "study", path, REMEDY)) != study:
        raise ValueError(f"{path}: table {label} is of study {found!r}, not of {study!r}; {REMEDY}")
    for where, row in printed:
        try:
            key = key_of(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        yield key, dict(_facts(row, where)), where


def _facts(row: Row, where: str) -> Iterator[tuple[str, Latex]]:
    """What is known of a cell, by the macro that prints it."""
    finite_field(row, "value", where, REMEDY)
    yield "value", _as_printed(row["text"])
    fraction = re.search(r"\.(\d+)", row["text"])
    decimals = len(fraction[1]) if fraction else 0
    if interval := _interval(row, "ci_low", "ci_high", decimals, where):
        yield "interval", interval
    for name in COUNTS:
        if row.get(name):
            yield "count", Latex(f"{finite_field(row, name, where, REMEDY):.0f}")
    if row.get("gain"):
        yield "gain", _signed(finite_field(row, "gain", where, REMEDY), decimals)
    if interval := _interval(row, "gain_ci_low", "gain_ci_high", decimals, where):
        yield "gaininterval", interval
    if row.get("gain_p_holm"):
        yield "gainp", _p_value(finite_field(row, "gain_p_holm", where, REMEDY))


def _as_printed(text: str) -> Latex:
    """In math where it has a sign, as in the tables: a hyphen is no minus."""
    return Latex(f"${text}$") if re.fullmatch(r"[+-][0-9.]+", text) else escape(text)


def _interval(row: Row, low: str, high: str, decimals: int, where: str) -> Latex | None:
    """Both bounds with as many decimals as the value has in print."""
    if not row.get(low) and not row.get(high):
        return None
    bounds = [finite_field(row, name, where, REMEDY) for name in (low, high)]
    return Latex("$[{}, {}]$".format(*(f"{bound:z.{decimals}f}" for bound in bounds)))


def _signed(value: float, decimals: int) -> Latex:
    return Latex(f"${value:+z.{decimals}f}$")


def _p_value(value: float) -> Latex:
    return Latex(rf"$p < {SMALLEST_P}$" if value < SMALLEST_P else f"$p = {value:.3f}$")
