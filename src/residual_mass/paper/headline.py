"""The numbers that a study is summed up by: at the top of its page, and in the last lines of a run."""

from __future__ import annotations

from typing import Any

import pandas as pd

from residual_mass.spec.settings import tokens_of


def headline(cells: pd.DataFrame, quantity: str, budget: float) -> dict[str, dict[str, Any]]:
    """Returns the cells of a quantity at a budget by method: those of the first backbone and text at the greatest
    length. Of a method with several feature maps it is the first cell, that of the study's own.
    """
    cells = cells[cells["quantity"] == quantity]
    cells = cells[cells["budget_percent"] == budget]
    if cells.empty:
        return {}
    first = cells.iloc[0]
    same_backbone = cells["backbone"] == first["backbone"]
    of_text = cells[same_backbone & (cells["corpus"] == first["corpus"])]
    length = max(of_text["length"], key=tokens_of)
    shown = of_text[of_text["length"] == length].drop_duplicates("method")
    return {cell["method"]: cell for cell in shown.to_dict("records")}
