"""The numbers that a study is summed up by: at the top of its page, and in the last lines of a run."""

from __future__ import annotations

from typing import Any

import pandas as pd

from residual_mass.spec.settings import tokens_of


def headline(cells: pd.DataFrame, quantity: str, budget: float) -> dict[str, dict[str, Any]]:
    """Returns the cells of a quantity at a budget by method: those of the first backbone and text at the greatest
    length. Of a method with several feature maps it is the first cell, that of the study's own.
    """
    at_budget = cells[(cells["quantity"] == quantity) & (cells["budget_percent"] == budget)]
    if at_budget.empty:
        return {}
    first = at_budget.iloc[0]
    of_text = at_budget[(at_budget["backbone"] == first["backbone"]) & (at_budget["corpus"] == first["corpus"])]
    length = max(of_text["length"], key=tokens_of)
    shown = of_text[of_text["length"] == length].drop_duplicates("method")
    return {cell["method"]: cell for cell in shown.to_dict("records")}
