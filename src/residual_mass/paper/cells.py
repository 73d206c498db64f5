"""Cells of tables: one row of a DataFrame per printed number, with its text, interval, tests and place in the table.

All fields are text, as in the result files; what computes converts what it needs. The fields before `text` are the
cell's key. LAYOUT says where a cell stands: rows that agree in it share a field of the printed table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from pathlib import Path

import pandas as pd

from residual_mass.benchmarks.statistics import holm
from residual_mass.files import REMAKE, csv_text, read_csv, read_json
from residual_mass.metrics import METRICS, Metric
from residual_mass.provenance import sidecar_of

ALL_TASKS = "all"
"""Task of the mean over a benchmark's tasks."""
LEFT_OUT = "--"
"""Printed for what the study does not evaluate or could not measure."""
ALPHA = 0.05
"""Chance of any false mark among comparisons that are corrected together."""
COMMON = (
    "text bold mark value ci_low ci_high n counted gain gain_ci_low gain_ci_high gain_p gain_p_holm mde flags data "
    "decoding source study model_id revision weights phi_sha"
).split()
"""Columns of every table's CSV after those of its key; extra ones of a table follow."""
LAYOUT = ("grid", "block", "row", "group", "column")
"""Grid, block of rows, heads of the row (with ` | ` between), group of columns, column; titles, the last of a CSV."""
SHAPE = ("own", "printed", *LAYOUT)
"""With whether the row is an addition to the paper's table, and what the field prints where it is not `text` alone."""
READ_AS = {"join": "score", "residual_errors": "errors", "findings": "accounting"}
"""What tables call the rows of a stage, where not by its name."""


# ---- reading -------------------------------------------------------------------------------------------------------


def load(paths: Iterable[Path]) -> dict[str, pd.DataFrame]:
    """The rows of result files by the stage that wrote them, as their records say, each with its file as `source`."""
    found: dict[str, list[pd.DataFrame]] = {}
    for path in paths:
        record = read_json(sidecar_of(path))
        rows = maps_row(path) if path.suffix == ".safetensors" else read_frame(path)
        if record["stage"] == "train":
            rows = rows.assign(**_training(record))
        stage = "maps" if path.suffix == ".safetensors" else READ_AS.get(record["stage"], record["stage"])
        found.setdefault(stage, []).append(rows.assign(source=path.name))
    return {stage: pd.concat(frames, ignore_index=True).fillna("") for stage, frames in found.items()}


def read_frame(path: Path) -> pd.DataFrame:
    """A CSV as text. Raises ValueError naming the file when it is missing, cut short or malformed."""
    return pd.DataFrame(read_csv(path, (), "stage that writes it"))


def maps_row(path: Path) -> pd.DataFrame:
    """What the header of a file of feature maps says: their backbone, shape and number; the weights stay on disk.

    Raises:
        ValueError: the file holds no feature maps; names it.
    """
    import json
    import math

    import safetensors

    from residual_mass.core.settings import MAPS_HEADER, maps_label

    try:
        with safetensors.safe_open(path, framework="numpy") as stream:
            facts = json.loads(stream.metadata()[MAPS_HEADER])
            size = sum(math.prod(stream.get_slice(name).get_shape()) for name in stream.keys())
        shape, recipe = facts["shape"], facts["training"]["recipe"]
        (variant,) = recipe["variants"]
        heads = {f"{kind}_heads": shape["layers"] * shape[f"{kind}_heads"] for kind in ("query", "kv")}
        label = maps_label(recipe["length"], "" if variant["label"] == "ours" else variant["label"])
        row = {"maps": label, "params_per_head": size // sum(heads.values()), **heads, **facts["map"]}
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not feature maps of this version ({error!r}); delete it and {REMAKE}") from None
    return pd.DataFrame([{name: str(value) for name, value in row.items()}])


def _training(record: dict) -> dict[str, str]:
    """What the record of a training says of it, as columns."""
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
    """Text as floats; NaN where a field is empty."""
    return pd.to_numeric(texts.replace("", None), errors="raise")


# ---- places ----------------------------------------------------------------------------------------------------------


def cross(*parts: pd.DataFrame) -> pd.DataFrame:
    """Every combination of the rows of all parts, those of the last part fastest."""
    return functools.reduce(lambda one, other: one.merge(other, how="cross"), parts)


def part(layout: str, titles: Iterable[str], **fixed: Iterable[str]) -> pd.DataFrame:
    """One part of a table, such as its blocks: titles, and the fields that each fixes."""
    return pd.DataFrame({layout: list(titles), **{name: list(values) for name, values in fixed.items()}}, dtype=str)


def without_budget(cells: pd.DataFrame, columns: pd.DataFrame) -> pd.DataFrame:
    """Full attention has no budget: where the columns are budgets, it has one field, without a column."""
    full = cells["method"] == "full"
    cells.loc[full, ["budget_percent", "column"] if "budget_percent" in columns else ["budget_percent"]] = ""
    return cells.drop_duplicates(ignore_index=True)


def looked_up(cells: pd.DataFrame, rows: pd.DataFrame, absent: pd.Series | None = None) -> pd.DataFrame:
    """Cells with the columns of the rows that agree with them in every column that both have.

    Args:
        absent: cells that may lack a row; by default none.

    Raises:
        ValueError: a cell has no row, or several; names it.
    """
    keys = [name for name in cells if name in rows]
    found = cells.merge(rows, how="left", on=keys, indicator=True)
    lacking = found["_merge"] == "left_only" if len(found) == len(cells) else found.duplicated(list(cells))
    wrong = found[lacking & ~absent] if absent is not None and len(found) == len(cells) else found[lacking]
    if len(wrong):
        place = " ".join(text for text in wrong.iloc[0][keys] if text and text != ALL_TASKS)
        what = "no result" if len(found) == len(cells) else "several results"
        raise ValueError(f"{what} for {place}: run the stage that makes it again, with that cell once")
    return found.drop(columns="_merge").fillna("")


# ---- what is printed -------------------------------------------------------------------------------------------------


def format_score(value: float) -> str:
    """The three decimals that the paper prints; what rounds to zero has no minus."""
    return f"{value:z.3f}"


def format_value(value: float, metric: Metric) -> str:
    """A value with three decimals. What is positive without an upper bound, as a divergence is, may be large or tiny:
    it has three significant digits within four decimals, or two within six.
    """
    decimals = 3
    if metric.low == 0 and metric.high is None:
        three, two = (max(-Decimal(f"{value:.{digits}e}").as_tuple().exponent, 0) for digits in (2, 1))
        decimals = max(min(three, 4), min(two, 6))
    return f"{value:z.{decimals}f}"


FORMS: dict[str, Callable[[float], str]] = {
    **{name: functools.partial(format_value, metric=metric) for name, metric in METRICS.items()},
    **dict.fromkeys(("step_share", "state_share"), "{:.1%}".format),
    **dict.fromkeys(("summary_bytes", "state_bytes", "training_steps"), "{:,.0f}".format),
    "training_seconds": lambda seconds: f"{seconds:,.0f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h",
}
"""How a quantity is printed, if not as a score."""


def texts(cells: pd.DataFrame) -> pd.Series:
    """The values by the rule of their `quantity`; LEFT_OUT where there is none."""
    forms = [FORMS.get(quantity, format_score) for quantity in cells.get("quantity", pd.Series("", cells.index))]
    found = zip(cells["value"], forms, strict=True)
    return pd.Series([form(float(value)) if value else LEFT_OUT for value, form in found], cells.index, dtype=str)


def of_quantity(cells: pd.DataFrame) -> pd.DataFrame:
    """Each cell with the value and the interval of its quantity, which are columns of its row."""
    records = cells.to_dict("records")
    for field, ending in (("value", ""), ("ci_low", "_ci_low"), ("ci_high", "_ci_high")):
        cells[field] = pd.Series(
            [str(row.get(row["quantity"] + ending, "")) for row in records], cells.index, dtype=str
        )
    return cells


def in_mathematics(cells: pd.DataFrame) -> pd.Series:
    """Text whose hyphen is a minus, which is mathematics."""
    return cells["text"].where(~cells["text"].str.fullmatch(r"-[0-9.]+"), "$" + cells["text"] + "$")


def best(cells: pd.DataFrame, competing: pd.Series, by: Sequence[str], higher: pd.Series | bool) -> pd.Series:
    """Whether a cell prints the best of the competing texts with the same fields `by`; equal digits tie."""
    competing = competing & (cells["text"] != LEFT_OUT)
    shown = pd.to_numeric(cells["text"].where(competing))
    good = shown if higher is True else -shown if higher is False else shown.where(higher, -shown)
    return competing & (good == good.groupby([cells[name] for name in by]).transform("max"))


def with_gains(cells: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Adds p-values corrected by Holm over all tests with the same fields `by`, and marks what remains of them."""
    cells = cells.assign(mark="")
    tested = cells["gain_p"] != ""
    corrected = pd.Series("", cells.index)
    groups = cells[tested].groupby(list(by)) if by else [((), cells[tested])]
    for _, group in groups:
        exact = holm([float(p) for p in group["gain_p"]])
        corrected[group.index] = [f"{p:.6f}" for p in exact]
        passed = [index for index, p in zip(group.index, exact, strict=True) if p < ALPHA]
        signs = numbers(cells.loc[passed, "gain"])
        cells.loc[passed, "mark"] = signs.map(lambda gain: "above" if gain > 0 else "below" if gain < 0 else "")
    return cells.assign(gain_p_holm=corrected)


# ---- files -----------------------------------------------------------------------------------------------------------


def finished(label: str, cells: pd.DataFrame, keys: str, extra: str = "") -> pd.DataFrame:
    """The cells with the columns of the CSV in their order, `keys` first; what is not known is empty."""
    columns = ["table", *keys.split(), *COMMON, *extra.split(), *SHAPE]
    cells = cells.assign(table=label, **{name: "" for name in columns if name not in cells and name != "table"})
    for name in ("bold", "own"):
        cells[name] = cells[name].map({True: "1"}).fillna("")
    return cells[columns].fillna("").astype(str)


def key_columns(cells: pd.DataFrame) -> list[str]:
    """The columns before `text`."""
    return list(cells.columns[: list(cells.columns).index("text")])


def to_csv(cells: pd.DataFrame) -> str:
    return csv_text(list(cells), cells.to_dict("records"))
