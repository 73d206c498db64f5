"""Tables of methods compared head by head: their errors, distances, costs and what a decode step reads."""

from __future__ import annotations

import re

import pandas as pd

from residual_mass.methods import METHODS
from residual_mass.metrics import KL, SAME_TOP
from residual_mass.paper.cells import (
    ALL_TASKS,
    best,
    cross_join,
    join_results,
    layout_part,
    with_empty_texts,
    with_values,
)
from residual_mass.paper.digits import in_mathematics
from residual_mass.paper.tables.layout import (
    Rows,
    backbones,
    backbones_by_text,
    budget_title,
    budgets,
    lengths,
    table,
)
from residual_mass.paper.titles import method_title, text_title
from residual_mass.spec.columns import FOLLOWING, OWN
from residual_mass.spec.labels import TOPK
from residual_mass.spec.specs import TableSpec

ORACLES = [method.name for method in METHODS if method.oracle]
RESIDUAL_KEYS = "backbone corpus length method budget_percent maps quantity"
ARM_ON_TEXT = ["backbone", "corpus", "length", "method", "budget_percent", "maps"]
"""Columns by which errors and distances of a method are joined."""
ERROR_GRIDS = {
    "relative_error": "Relative error of attention outputs",
    "log_z_error": "Error of the residual's log mass, nats",
    KL.name: "KL(Full || method) of the next token, nats",
}
COSTS = {
    "state_bytes": "State, bytes",
    "state_share": "of cache",
    "training_steps": "Steps",
    "training_seconds": "Training",
}
TRAINING = "Training,\nsteps (time)"
"""Title of a field with two quantities."""
DEPLOYABLE = {
    "": "Budget", "step_share": "Read", KL.name: "KL,\nnats", SAME_TOP.name: "Top\ntoken", "relative_error": "Error",
    "summary_bytes": "State,\nbytes", "training_steps": TRAINING, "training_seconds": TRAINING,
}  # fmt: skip
UNITS = {
    KL.name: "documents",
    SAME_TOP.name: "documents",
    "relative_error": "packs",
    "log_z_error": "packs",
}
"""Units of sample sizes by quantity: columns of `method_comparison`."""


@table(
    "residual_estimators",
    of="residuals",
    heads=("Length", "Method"),
    keys=RESIDUAL_KEYS,
    extra="k over_topk heads_below_topk",
)
def residual_estimators(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Errors of attention outputs and of the residual's mass, KL of the next token, and costs: a grid each."""
    errors = method_comparison(rows)
    methods = list(dict.fromkeys(errors["method"]))
    lines = layout_part("row", map(method_title, methods), method=methods)
    grids = layout_part("grid", ERROR_GRIDS.values(), quantity=ERROR_GRIDS)
    if errors[KL.name].isna().all():
        grids = grids[grids["quantity"] != KL.name]
    groups = backbones_by_text(show, errors["corpus"])
    places = cross_join(grids, lengths(show, "block"), lines, groups, budgets(show))
    cells = _with_sources(join_results(places, errors))
    competing = ~cells["method"].isin(ORACLES) & (cells["quantity"] != "log_z_error")
    bold = best(cells, competing, ["quantity", "backbone", "corpus", "length", "budget_percent"], False)
    cells = cells.assign(bold=bold, printed=in_mathematics(cells))
    columns = layout_part("column", COSTS.values(), quantity=COSTS)
    places = cross_join(lengths(show, "block"), lines, backbones(show), columns)
    places["grid"] = "State per KV head and layer, and training"
    once = errors.drop_duplicates(["backbone", "length", "method"])
    once = once.drop(columns=["corpus", "budget_percent"])
    costs = _with_sources(join_results(places, once))
    return pd.concat([cells, costs], ignore_index=True)


@table(
    "deployable",
    of="residuals",
    heads=("Text", "Method"),
    keys=RESIDUAL_KEYS,
    extra="k recall tokens_read scan_bytes row_bytes summary_bytes step_share front",
)
def deployable(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """The Pareto front of what a decode step reads and of the next token's divergence, with exact top-K at the same
    budgets.
    """
    errors = method_comparison(rows)
    texts = layout_part("corpus", dict.fromkeys(errors["corpus"]))
    places = cross_join(backbones(show), lengths(show, "block"), texts)
    place = ["backbone", "length", "corpus"]
    measured = errors[errors[KL.name].notna()].groupby(place, sort=False)
    shown = places[place].itertuples(index=False, name=None)
    fronts = [_front(measured.get_group(name)) for name in shown if name in measured.groups]
    if not fronts:
        raise ValueError(
            "table deployable: no method has both errors and distances of the next token; run the fidelity stage with "
            "its texts and lengths"
        )
    lines = pd.concat(fronts, ignore_index=True)
    marks = lines["front"].map({1: "", 0: r"$^{\circ}$"})
    lines["row"] = lines["method"].map(method_title) + marks
    lines["block"] = lines["corpus"].map(text_title)
    lines["group"] = lines["backbone"].map(show.backbone_titles) + ", " + lines["length"]
    lines["grid"] = lines["group"]
    columns = layout_part("column", DEPLOYABLE.values(), quantity=DEPLOYABLE)
    cells = _with_sources(cross_join(lines, columns))
    of_budgets = cells["budget_percent"].map(budget_title)
    cells["text"] = cells["text"].mask(cells["quantity"] == "", of_budgets)
    return cells.assign(printed=_with_brackets(cells), own=cells["front"] == 0)


def _with_brackets(cells: pd.DataFrame) -> pd.Series:
    """Returns what fields print. Two quantities of a method share a field: the second in brackets."""
    brackets = (" (" + cells["text"] + ")").where(cells["value"].notna(), "")
    second = cells["column"] == cells["column"].shift()
    fields = (~second).cumsum()
    return cells["text"].mask(second, brackets).groupby(fields).transform("".join)


# ---- joined results --------------------------------------------------------------------------------------------------


def method_comparison(rows: Rows) -> pd.DataFrame:
    """Returns errors of methods on texts. Adds, where measured, the KL divergence and the share of equal top tokens of
    the same methods and maps (else `documents` is unknown), and the seconds that their maps were trained for.
    """
    errors = rows["residual_errors"].rename(columns=lambda name: re.sub("^error", "relative_error", name))
    forced = rows.get("fidelity", pd.DataFrame(columns=["text", "metric", "task", "state", "continuation"]))
    forced = forced[(forced["task"] == ALL_TASKS) & (forced["state"] == OWN) & (forced["continuation"] == FOLLOWING)]
    for metric in (KL.name, SAME_TOP.name):
        measured = forced[forced["metric"] == metric]
        errors = errors.merge(_distances_of(measured, metric), how="left", on=ARM_ON_TEXT)
    errors = errors.merge(_training_times(rows), how="left", on=["backbone", "maps"])
    return with_empty_texts(errors)


def _distances_of(measured: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Returns the columns of one metric, by ARM_ON_TEXT; those of KL with its file and documents."""
    names = {"text": "corpus", "value": metric, "ci_low": f"{metric}_ci_low", "ci_high": f"{metric}_ci_high"}
    if metric == KL.name:
        names |= {"source": "kl_source", "documents": "documents"}
    columns = list(dict.fromkeys([*ARM_ON_TEXT, *names.values()]))
    numbers = ["budget_percent", metric, f"{metric}_ci_low", f"{metric}_ci_high"]
    found = measured.rename(columns=names).reindex(columns=columns)
    return found.astype(dict.fromkeys(numbers, float))


def _training_times(rows: Rows) -> pd.DataFrame:
    """Returns the seconds of every training and its log, by backbone and maps."""
    columns = {"backbone": "backbone", "length": "maps", "seconds": "training_seconds", "source": "seconds_source"}
    logs = rows.get("train", pd.DataFrame(columns=list(columns)))
    last = logs.drop_duplicates(["backbone", "length"], keep="last")
    return last[list(columns)].rename(columns=columns).astype({"training_seconds": float})


def _with_sources(cells: pd.DataFrame) -> pd.DataFrame:
    """Adds values and texts, and the file and sample size of each value."""
    cells = with_values(cells)
    unit = cells["quantity"].map(UNITS).fillna("")
    of_documents = unit == "documents"
    of_times = (cells["quantity"] == "training_seconds") & cells["value"].notna()
    source = cells["source"].mask(of_documents, cells["kl_source"])
    source = source.mask(of_times, cells["seconds_source"])
    documents = cells["documents"].where(of_documents)
    n = cells["packs"].where(unit == "packs", documents)
    is_cost = cells["quantity"].isin(COSTS)
    untrained = is_cost & cells["value"].isna() & (cells["maps"] == "")
    text = cells["text"].mask(untrained, "none")
    return cells.assign(text=text, counted=unit, n=n, source=source)


# ---- the Pareto front ------------------------------------------------------------------------------------------------


def _front(lines: pd.DataFrame) -> pd.DataFrame:
    """Returns the Pareto front of bytes and KL, sorted by bytes, then exact top-K at the same budgets if it is not on
    the front.
    """
    competing = lines[~lines["method"].isin(ORACLES)]
    points = list(zip(competing["step_share"], competing[KL.name], strict=True))
    front = competing[on_front(points)].sort_values("step_share", kind="stable")
    same_budgets = lines["budget_percent"].isin(front["budget_percent"])
    exact = lines[(lines["method"] == TOPK) & same_budgets]
    exact = exact.drop(front.index, errors="ignore")
    return pd.concat([front.assign(front=1), exact.assign(front=0)])


def on_front(points: list[tuple[float, float]]) -> list[bool]:
    """Whether no other point is at most as large in both coordinates and smaller in one of them."""
    front = []
    for point in points:
        x, y = point
        at_most = [other for other in points if other[0] <= x and other[1] <= y]
        better = [other for other in at_most if other != point]
        front.append(not better)
    return front
