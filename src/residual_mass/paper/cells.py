"""Cells of tables: a DataFrame with one row per printed number, with its text, interval, tests and place in the table.

All fields are strings, as in the result files; functions convert the fields that they compute with. The fields before
`text` are the cell's key. LAYOUT places a cell: rows that agree in it share a field of the printed table.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from residual_mass.files import read_json
from residual_mass.metrics import METRICS, Metric
from residual_mass.provenance import sidecar_of
from residual_mass.spec.settings import MAPS_HEADER, maps_label
from residual_mass.statistics import holm

ALL_TASKS = "all"
"""Name in the column `task` of the mean over a benchmark's tasks."""
LEFT_OUT = "--"
"""Printed for what the study does not evaluate or could not measure."""
ALPHA = 0.05
"""Family-wise error rate of the marks, by Holm's correction."""
COMMON = (
    "text bold mark value ci_low ci_high n counted gain gain_ci_low gain_ci_high gain_p gain_p_holm mde flags data "
    "decoding source study model_id revision weights phi_sha"
).split()
"""Columns of every table's CSV after those of its key; extra ones of a table follow."""
LAYOUT = ("grid", "block", "row", "group", "column")
"""Titles of grid, block of rows, row (heads joined by ` | `), group of columns, and column; they end a CSV."""
SHAPE = ("own", "printed", *LAYOUT)
"""LAYOUT after whether the row is an addition to the paper's table, and after what a field prints if not `text`."""


# ---- reading -------------------------------------------------------------------------------------------------------


def load(paths: Iterable[Path]) -> dict[str, pd.DataFrame]:
    """Returns the rows of result files by the stage that wrote them, as their records say, each with its file as
    `source`.
    """
    stages: dict[str, list[pd.DataFrame]] = {}
    for path in paths:
        record = read_json(sidecar_of(path))
        if path.suffix == ".safetensors":
            stage, rows = "maps", maps_row(path)
        else:
            stage, rows = "score" if record["stage"] == "join" else record["stage"], read_frame(path)
        if record["stage"] == "train":
            rows = rows.assign(**_training(record))
        stages.setdefault(stage, []).append(rows.assign(source=path.name))
    return {stage: pd.concat(frames, ignore_index=True).fillna("") for stage, frames in stages.items()}


def read_frame(path: Path) -> pd.DataFrame:
    """Returns a CSV as strings; callers have checked its record."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def maps_row(path: Path) -> pd.DataFrame:
    """Returns the label, size, numbers of heads and settings of feature maps from the header of their file; no weights
    are loaded.
    """
    import safetensors

    with safetensors.safe_open(path, framework="numpy") as stream:
        facts = json.loads(stream.metadata()[MAPS_HEADER])
        size = sum(math.prod(stream.get_slice(name).get_shape()) for name in stream.keys())
    shape, recipe = facts["shape"], facts["training"]["recipe"]
    (variant,) = recipe["variants"]
    heads = {f"{kind}_heads": shape["layers"] * shape[f"{kind}_heads"] for kind in ("query", "kv")}
    label = maps_label(recipe["length"], "" if variant["label"] == "ours" else variant["label"])
    row = {"maps": label, "params_per_head": size // sum(heads.values()), **heads, **facts["map"]}
    return pd.DataFrame([{name: str(value) for name, value in row.items()}])


def _training(record: dict[str, Any]) -> dict[str, str]:
    """Returns the facts in the record of a training as columns."""
    spec = record["spec"]
    backbone, replay = spec["backbone"], spec["replay"]
    return {
        "backbone": backbone["name"], "study": backbone["study"], "model_id": backbone["model_id"],
        "revision": backbone["revision"], "length": spec["length"],
        "weights": "random" if backbone["source"] == "random" else "pretrained",
        "steps": str(spec["steps"]), "sequences_per_step": str(spec["sequences_per_step"]),
        "reuse": str(replay["reuse"]), "hardware": str(record.get("hardware", "")),
        "processes": str(record.get("processes", 1)) if record.get("hardware") else "",
    }  # fmt: skip


def numbers(texts: pd.Series) -> pd.Series:
    """Returns texts as floats; NaN where a text is empty."""
    return pd.to_numeric(texts.replace("", None), errors="raise")


# ---- places ----------------------------------------------------------------------------------------------------------


def cross(*parts: pd.DataFrame) -> pd.DataFrame:
    """Returns every combination of the rows of all parts; the last part varies fastest."""
    return functools.reduce(lambda left, right: left.merge(right, how="cross"), parts)


def part(layout: str, titles: Iterable[str], **fixed: Iterable[str]) -> pd.DataFrame:
    """Returns one part of a table, such as its blocks: titles, and the fields that they fix."""
    return pd.DataFrame({layout: list(titles), **{name: list(values) for name, values in fixed.items()}}, dtype=str)


def looked_up(cells: pd.DataFrame, rows: pd.DataFrame, absent: pd.Series | bool = False) -> pd.DataFrame:
    """Joins to each cell the one row of `rows` that agrees with it in every column that both have.

    Args:
        absent: cells that may lack a row; by default none.

    Raises:
        ValueError: a cell has no row, or several.
    """
    keys = [name for name in cells if name in rows]
    found = cells.merge(rows, how="left", on=keys, validate="many_to_one", indicator=True)
    lacking = found[(found["_merge"] == "left_only") & ~pd.Series(absent, found.index)]
    if len(lacking):
        place = " ".join(text for text in lacking.iloc[0][keys] if text and text != ALL_TASKS)
        raise ValueError(f"no result for {place}: run its stage again, so that it has that cell")
    return found.drop(columns="_merge").fillna("")


# ---- what is printed -------------------------------------------------------------------------------------------------


def format_score(value: float) -> str:
    """Formats a score with three decimals, as in the paper; zero has no minus."""
    return f"{value:z.3f}"


def format_value(value: float, metric: Metric) -> str:
    """Formats a value with three decimals. A positive metric without an upper bound, such as a divergence, may be large
    or tiny: it has three significant digits within four decimals, or two within six.
    """
    decimals = 3
    if metric.low == 0 and metric.high is None:
        three, two = (max(-Decimal(f"{value:.{digits}e}").as_tuple().exponent, 0) for digits in (2, 1))
        decimals = max(min(three, 4), min(two, 6))
    return f"{value:z.{decimals}f}"


def format_hours(hours: float) -> str:
    if hours >= 2:
        return f"{hours:.1f} h"
    seconds = round(3600 * hours)
    return f"{seconds} s" if seconds < 120 else f"{seconds / 60:.1f} min"


_FORMS: dict[str, Callable[[float], str]] = {
    "step_share state_share bytes_per_verified_token": "{:.1%}".format,
    "params_per_head q_heads kv_heads summary_bytes state_bytes training_steps draft_tokens": "{:,.0f}".format,
    "phi_q_total phi_k_total total": lambda count: f"{count / 1e6:.1f}M",
    "training_seconds": lambda seconds: f"{seconds:,.0f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h",
    "steps sequences teacher_passes": lambda n: f"{n / 1000:.0f}k" if n and n % 1000 == 0 else f"{n:,.0f}",
    "wall_clock_h": format_hours,
    # Long times have no room for decimals.
    "per_step_ms end_to_end_ms floor_ms over_floor": lambda time: f"{time:.2f}" if time < 1e4 else f"{time:.0f}",
    "step_bytes": lambda count: f"{count / 1e9:.3f}",
}
FORMS = {name: functools.partial(format_value, metric=metric) for name, metric in METRICS.items()}
FORMS |= {name: form for names, form in _FORMS.items() for name in names.split()}
"""Formats of the quantities that are not printed as scores."""


def texts(cells: pd.DataFrame) -> pd.Series:
    """Formats each value by its `quantity`; LEFT_OUT where there is no value."""
    pairs = zip(cells.get("quantity", [""] * len(cells)), cells["value"], strict=True)
    printed = [FORMS.get(quantity, format_score)(float(value)) if value else LEFT_OUT for quantity, value in pairs]
    return pd.Series(printed, cells.index, dtype=str)


def with_values(cells: pd.DataFrame) -> pd.DataFrame:
    """Adds the value, the interval and the text of each cell's quantity, which is a column of its row."""
    endings = {"value": "", "ci_low": "_ci_low", "ci_high": "_ci_high"}
    records = cells.to_dict("records")
    cells[list(endings)] = [[str(row.get(row["quantity"] + end, "")) for end in endings.values()] for row in records]
    return cells.assign(text=texts(cells))


def in_mathematics(cells: pd.DataFrame) -> pd.Series:
    """Returns texts, with negative numbers as mathematics so that their hyphen prints as a minus."""
    return cells["text"].where(~cells["text"].str.fullmatch(r"-[0-9.]+"), "$" + cells["text"] + "$")


def decimals(text: str) -> int:
    return len(text.partition(".")[2])


def interval(cell: Mapping[str, str], low: str = "ci_low", high: str = "ci_high") -> tuple[str, str]:
    """Returns both bounds with as many decimals as the value has in print."""
    lower, upper = (f"{float(cell[name]):z.{decimals(cell['text'])}f}" for name in (low, high))
    return lower, upper


def best(cells: pd.DataFrame, competing: pd.Series, by: Sequence[str], higher: pd.Series | bool) -> pd.Series:
    """Whether each cell prints the best text of the competing cells with the same fields `by`; equal digits tie."""
    competing = competing & (cells["text"] != LEFT_OUT)
    shown = pd.to_numeric(cells["text"].where(competing))
    good = pd.Series(np.where(higher, shown, -shown), cells.index)
    return competing & (good == good.groupby([cells[name] for name in by]).transform("max"))


def with_gains(cells: pd.DataFrame) -> pd.DataFrame:
    """Adds p-values, corrected by Holm over all tests of a grid, and marks those below ALPHA."""
    p_values = numbers(cells["gain_p"]).dropna()
    exact = p_values.groupby(cells["grid"]).transform(lambda of: pd.Series(holm(list(of)), of.index))
    sign = np.sign(numbers(cells["gain"])).where(exact.reindex(cells.index) < ALPHA)
    corrected = exact.map("{:.6f}".format).astype(object).reindex(cells.index, fill_value="")
    return cells.assign(gain_p_holm=corrected, mark=sign.map({1: "above", -1: "below"}).fillna(""))
