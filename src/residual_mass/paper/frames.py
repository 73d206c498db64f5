"""Types of the columns of result files and of cells, and the text of their numbers in a CSV.

A frame has numbers where a CSV has their text: floats, counts and flags by the names below; all other columns are text.
What is unknown is NaN in floats, NA in counts, False in flags, and empty as text.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from residual_mass.files import csv_text, read_csv

FLOATS = frozenset(
    (
        "budget_percent value stderr ci_low ci_high gain gain_ci_low gain_ci_high gain_p gain_p_holm mde k_mean tokens "
        "original_value original_stderr original_ci_low original_ci_high full_gap full_gap_p k_zero_share cut_share "
        "error error_ci_low error_ci_high over_topk over_topk_ci_low over_topk_ci_high heads_below_topk "
        "heads_below_phi log_z_error log_z_error_ci_low log_z_error_ci_high recall tokens_read scan_bytes row_bytes "
        "summary_bytes step_share state_share kept_share held_share e_topk e_topk_ci_low e_topk_ci_high e_nosub "
        "e_nosub_ci_low e_nosub_ci_high e_sub e_sub_ci_low e_sub_ci_high e_exact_sub e_exact_nosub clamped_share kl "
        "per_step_ms per_step_low_ms per_step_high_ms prefill_ms end_to_end_ms recording_ms peak_memory_mib floor_ms "
        "bandwidth_gb_s tokens_as_prototype low high seconds wall_clock_h phi_q_total_m phi_k_total_m total_m"
    ).split()
)
COUNTS = frozenset(
    (
        "n k documents packs heads rows right_to_wrong wrong_to_right state_bytes step_bytes training_steps repeats "
        "batch step steps sequences_per_step reuse processes params_per_head query_heads kv_heads d_emb d_phi front"
    ).split()
)
FLAGS = frozenset(("bold", "own"))
COLUMN_DIGITS = {"budget_percent": "g", "gain_p_holm": ".6f", "peak_memory_mib": ".1f"}
"""Formats of columns in the CSV of cells; other floats have the digits of their table, as their stage writes them."""
QUANTITY_DIGITS = {"over_floor": ".6f", "training_seconds": ""} | dict.fromkeys(
    (
        "params_per_head q_heads kv_heads phi_q_total phi_k_total total steps sequences teacher_passes step_bytes "
        "state_bytes training_steps"
    ).split(),
    ".0f",
)
"""Formats of values and their intervals by quantity, where it is not that of the table; the empty one writes all
digits.
"""


def read_frame(path: Path) -> pd.DataFrame:
    """Returns a CSV with typed columns; callers have checked its record."""
    return typed(pd.read_csv(path, dtype=str, keep_default_na=False))


def read_results(path: Path, columns: Iterable[str], stage: str) -> pd.DataFrame:
    """Returns the typed rows of a CSV file that `stage` wrote; raises ValueError as `files.read_csv` does."""
    return typed(read_csv(path, columns, stage))


def typed(rows: pd.DataFrame, columns: Iterable[str] | None = None) -> pd.DataFrame:
    """Returns columns with their types, by default all; those that the rows lack are unknown."""
    names = list(rows) if columns is None else list(columns)
    unknown = pd.Series(None, rows.index, dtype=object)
    series = {name: _typed(rows.get(name, unknown), name) for name in names}
    return pd.DataFrame(series, index=rows.index, columns=names)


def _typed(values: pd.Series, name: str) -> pd.Series:
    if name in FLOATS | COUNTS:
        if not pd.api.types.is_numeric_dtype(values):
            values = values.replace("", None).map(float, na_action="ignore")
        return values.astype("Int64" if name in COUNTS else float)
    if name in FLAGS:
        return values.isin([True, "1"])
    return values.astype(object).fillna("").astype(str)


def number_text(value: float, digits: str) -> str:
    """Formats a number; empty if it is unknown."""
    return "" if pd.isna(value) else format(value, digits)


def value_digits(quantity: str, digits: str) -> str:
    """Returns the format of a value, given that of its table."""
    return QUANTITY_DIGITS.get(quantity, digits)


def field_texts(cells: pd.DataFrame, digits: str) -> pd.DataFrame:
    """Returns the fields of cells as text.

    Args:
        digits: the format of floats whose column and quantity have none of their own.
    """
    fields = cells.copy()
    quantities = cells["quantity"] if "quantity" in cells else [""] * len(cells)
    of_values = [value_digits(quantity, digits) for quantity in quantities]
    for name in FLOATS.intersection(cells):
        formats = [COLUMN_DIGITS.get(name, digits)] * len(cells)
        if name in ("value", "ci_low", "ci_high"):
            formats = of_values
        fields[name] = list(map(number_text, cells[name], formats))
    for name in COUNTS.intersection(cells):
        fields[name] = [number_text(count, "d") for count in cells[name]]
    for name in FLAGS.intersection(cells):
        fields[name] = cells[name].map({True: "1", False: ""})
    return fields.astype(str)


def cells_csv(cells: pd.DataFrame, digits: str) -> str:
    """Returns the CSV of a table's cells."""
    return csv_text(list(cells), field_texts(cells, digits).to_dict("records"))
