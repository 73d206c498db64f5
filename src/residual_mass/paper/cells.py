"""Cells of tables: a typed DataFrame with one row per printed number: its value, text, interval, tests and place in the
table.

The fields before `text` are the cell's key. CELL_LAYOUT places a cell: rows that agree in it share a field of the
printed table. Cells join results on numbers: a budget is a percentage as `metrics.budget_text` writes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from residual_mass.paper.digits import DASH, texts
from residual_mass.paper.frames import COUNTS, FLAGS, FLOATS, field_texts
from residual_mass.statistics import holm

ALL_TASKS = "all"
"""Name in the column `task` of the mean over a benchmark's tasks."""
ALPHA = 0.05
"""Family-wise error rate of the marks, by Holm's correction."""
COMMON = (
    "text bold mark value ci_low ci_high n counted gain gain_ci_low gain_ci_high gain_p gain_p_holm mde flags data "
    "decoding source study model_id revision weights phi_sha"
).split()
"""Columns of every table's CSV after those of its key; extra ones of a table follow."""
CELL_LAYOUT = ("grid", "block", "row", "group", "column")
"""Titles of grid, block of rows, row (heads joined by ` | `), group of columns, and column; they end a CSV."""
PLACEMENT = ("own", "printed", *CELL_LAYOUT)
"""Before CELL_LAYOUT: whether the row is an addition to the paper's table, and what a field prints if not `text`."""


# ---- places ----------------------------------------------------------------------------------------------------------


def cross_join(*parts: pd.DataFrame) -> pd.DataFrame:
    """Returns every combination of the rows of all parts; the last part varies fastest."""
    return functools.reduce(lambda left, right: left.merge(right, how="cross"), parts)


def layout_part(layout: str, titles: Iterable[str], **fixed: Iterable[Any]) -> pd.DataFrame:
    """Returns one part of a table, such as its blocks: titles, and the fields that they fix."""
    fields = {name: list(values) for name, values in fixed.items()}
    return pd.DataFrame({layout: list(titles), **fields})


def join_results(cells: pd.DataFrame, rows: pd.DataFrame, absent: pd.Series | bool = False) -> pd.DataFrame:
    """Joins to each cell the one row of `rows` that agrees with it in every column that both have.

    Args:
        absent: cells that may lack a row; by default none.

    Raises:
        ValueError: a cell has no row, or several.
    """
    keys = [name for name in cells if name in rows]
    found = cells.merge(rows, how="left", on=keys, validate="many_to_one", indicator=True)
    unmatched = found["_merge"] == "left_only"
    lacking = found[unmatched & ~pd.Series(absent, found.index)]
    if len(lacking):
        fields = field_texts(lacking[:1][keys], "g").iloc[0]
        place = " ".join(text for text in fields if text and text != ALL_TASKS)
        raise ValueError(f"no result for {place}: run its stage again, so that it has that cell")
    return with_empty_texts(found.drop(columns="_merge"))


def with_empty_texts(cells: pd.DataFrame) -> pd.DataFrame:
    """Returns cells whose unknown texts are empty; unknown numbers stay."""
    others = [name for name in cells if name not in FLOATS | COUNTS | FLAGS]
    words = [name for name in others if not pd.api.types.is_numeric_dtype(cells[name])]
    return cells.fillna(dict.fromkeys(words, ""))


# ---- values, bold type and marks -------------------------------------------------------------------------------------


def with_values(cells: pd.DataFrame) -> pd.DataFrame:
    """Adds the value, the interval and the text of each cell's quantity, which is a column of its row."""
    for column, ending in (("value", ""), ("ci_low", "_ci_low"), ("ci_high", "_ci_high")):
        values = pd.Series(np.nan, cells.index)
        for quantity in cells["quantity"].unique():
            if quantity + ending in cells:
                of_quantity = cells["quantity"] == quantity
                values = values.mask(of_quantity, cells[quantity + ending].astype(float))
        cells = cells.assign(**{column: values})
    return cells.assign(text=texts(cells))


def best(cells: pd.DataFrame, competing: pd.Series, by: Sequence[str], higher: pd.Series | bool) -> pd.Series:
    """Whether each cell prints the best text of the competing cells with the same fields `by`; equal digits tie."""
    competing = competing & (cells["text"] != DASH)
    shown = pd.to_numeric(cells["text"].where(competing))
    good = pd.Series(np.where(higher, shown, -shown), cells.index)
    places = [cells[name] for name in by]
    return competing & (good == good.groupby(places).transform("max"))


def with_gains(cells: pd.DataFrame) -> pd.DataFrame:
    """Adds p-values, corrected by Holm over all tests of a grid, and marks those below ALPHA."""
    corrected = cells["gain_p"].dropna()
    by_grid = corrected.groupby(cells["grid"])
    corrected = by_grid.transform(lambda of: pd.Series(holm(list(of)), of.index))
    corrected = corrected.reindex(cells.index)
    significant = corrected < ALPHA
    sign = np.sign(cells["gain"]).where(significant)
    mark = sign.map({1: "above", -1: "below"}).fillna("")
    return cells.assign(gain_p_holm=corrected, mark=mark)
