"""Tables of methods compared head by head: their errors, distances, costs and what a decode step reads."""

from __future__ import annotations

import re

import pandas as pd

from residual_mass.methods import METHODS
from residual_mass.methods.step_bytes import bytes_per_verified_token
from residual_mass.metrics import FIRST_DIFFERENCES, KL, SAME_TOP, VERIFIED
from residual_mass.paper.cells import ALL_TASKS, best, cross, in_mathematics, looked_up, numbers, part, with_values
from residual_mass.paper.tables.layout import Rows, backbones, backbones_by_text, budgets, lengths, table
from residual_mass.paper.titles import method_title, text_title
from residual_mass.spec.columns import DRAFT, DRAFTED, FOLLOWING, OWN
from residual_mass.spec.labels import TOPK
from residual_mass.spec.specs import TableSpec

ORACLES = [method.name for method in METHODS if method.oracle]
RESIDUAL_KEYS = "backbone corpus length method budget_percent maps quantity"
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
TRAINING, VERIFYING = "Training,\nsteps (time)", "Verified\n(95% interval; n)"
DEPLOYABLE = {
    "": "Budget", "step_share": "Read", VERIFIED.name: VERIFYING, "draft_tokens": VERIFYING, KL.name: "KL,\nnats",
    SAME_TOP.name: "Top\ntoken", "relative_error": "Error", "summary_bytes": "State,\nbytes",
    "training_steps": TRAINING, "training_seconds": TRAINING,
}  # fmt: skip
COUNTED = {
    **dict.fromkeys((KL.name, SAME_TOP.name, VERIFIED.name), "documents"),
    **dict.fromkeys(("relative_error", "log_z_error"), "packs"),
}
"""Units of sample sizes by quantity: columns of `compared`."""


@table(
    "residual_estimators",
    of="residuals",
    heads=("Length", "Method"),
    keys=RESIDUAL_KEYS,
    extra="k over_topk heads_below_topk",
)
def residual_estimators(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Errors of attention outputs and of the residual's mass, KL of the next token, and costs: a grid each."""
    errors = compared(rows)
    methods = list(dict.fromkeys(errors["method"]))
    lines = part("row", map(method_title, methods), method=methods)
    grids = part("grid", ERROR_GRIDS.values(), quantity=ERROR_GRIDS)
    if errors[KL.name].eq("").all():
        grids = grids[grids["quantity"] != KL.name]
    places = cross(grids, lengths(show, "block"), lines, backbones_by_text(show, errors["corpus"]), budgets(show))
    cells = _printed(looked_up(places, errors))
    competing = ~cells["method"].isin(ORACLES) & (cells["quantity"] != "log_z_error")
    cells["bold"] = best(cells, competing, ["quantity", "backbone", "corpus", "length", "budget_percent"], False)
    cells["printed"] = in_mathematics(cells)
    columns = part("column", COSTS.values(), quantity=COSTS)
    places = cross(lengths(show, "block"), lines, backbones(show), columns)
    places["grid"] = "State per KV head and layer, and training"
    once = errors.drop_duplicates(["backbone", "length", "method"]).drop(columns=["corpus", "budget_percent"])
    return pd.concat([cells, _printed(looked_up(places, once))], ignore_index=True)


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
    errors = compared(rows)
    places = cross(backbones(show), lengths(show, "block"), part("corpus", dict.fromkeys(errors["corpus"])))
    measured = errors[errors[KL.name] != ""].groupby(["backbone", "length", "corpus"], sort=False)
    shown = places[["backbone", "length", "corpus"]].itertuples(index=False, name=None)
    lines = [_front(measured.get_group(place)) for place in shown if place in measured.groups]
    if not lines:
        raise ValueError(
            "table deployable: no method has both errors and distances of the next token; run the fidelity stage with "
            "its texts and lengths"
        )
    lines = pd.concat(lines, ignore_index=True)
    lines["row"] = lines["method"].map(method_title) + lines["front"].map({"1": "", "0": r"$^{\circ}$"})
    lines["block"] = lines["corpus"].map(text_title)
    lines["grid"] = lines["group"] = lines["backbone"].map(show.backbone_titles) + ", " + lines["length"]
    cells = _printed(cross(lines, part("column", DEPLOYABLE.values(), quantity=DEPLOYABLE)))
    cells.loc[cells["quantity"] == "", "text"] = cells["budget_percent"] + "%"
    # Two quantities of a method share a field: the second in brackets, the number of drafts after the interval.
    low, high = (numbers(cells[end]).map("{:.0%}".format) for end in ("ci_low", "ci_high"))
    interval = (low + " to " + high + "; ").where(cells["ci_low"] != "", "").shift(fill_value="")
    second = cells["column"] == cells["column"].shift()
    brackets = (" (" + interval + cells["text"] + ")").where(cells["value"] != "", "")
    cells["printed"] = cells["text"].mask(second, brackets).groupby((~second).cumsum()).transform("".join)
    return cells.assign(own=cells["front"] == "0")


def compared(rows: Rows) -> pd.DataFrame:
    """Returns errors of methods on texts. Adds, where measured, the KL divergence and the share of equal top tokens of
    the same methods and maps (else `documents` is empty), the bytes per verified token, and the seconds that their maps
    were trained for.
    """
    errors = rows["residual_errors"].rename(columns=lambda name: re.sub("^error", "relative_error", name))
    keys = ["backbone", "corpus", "length", "method", "budget_percent", "maps"]
    forced = rows.get("fidelity", pd.DataFrame(columns=["text", "metric", "task", "state", "continuation"]))
    forced = forced[(forced["task"] == ALL_TASKS) & (forced["state"] == OWN)]
    continuations = {KL.name: FOLLOWING, SAME_TOP.name: FOLLOWING, FIRST_DIFFERENCES.name: DRAFT}
    for metric, continuation in continuations.items():
        about = {"text": "corpus", "value": metric, "ci_low": f"{metric}_ci_low", "ci_high": f"{metric}_ci_high"}
        about |= {"source": "kl_source", "documents": "documents"} if metric == KL.name else {}
        found = forced[(forced["metric"] == metric) & (forced["continuation"] == continuation)].rename(columns=about)
        errors = errors.merge(found.reindex(columns=list(dict.fromkeys([*keys, *about.values()]))), how="left", on=keys)
    last = rows.get("train", pd.DataFrame(columns=["backbone", "length", "seconds", "source"]))
    last = last.drop_duplicates(["backbone", "length"], keep="last")
    last = last[["backbone", "length", "seconds", "source"]]
    last = last.set_axis(["backbone", "maps", "training_seconds", "seconds_source"], axis=1)
    errors = errors.merge(last, how="left", on=["backbone", "maps"]).fillna("")
    for end in ("", "_ci_low", "_ci_high"):
        pairs = zip(errors["step_share"], errors[FIRST_DIFFERENCES.name + end], strict=True)
        drafts = [bytes_per_verified_token(float(b), float(h), DRAFTED) if h else ("", "") for b, h in pairs]
        errors[VERIFIED.name + end] = [str(cost) for cost, _ in drafts]
        if not end:
            errors["draft_tokens"] = [str(tokens) for _, tokens in drafts]
    return errors


def _printed(cells: pd.DataFrame) -> pd.DataFrame:
    """Adds values and texts, and the file and sample size of each value."""
    cells = with_values(cells)
    counted = cells["quantity"].map(COUNTED).fillna("")
    seconds = (cells["quantity"] == "training_seconds") & (cells["value"] != "")
    source = cells["source"].mask(counted == "documents", cells["kl_source"]).mask(seconds, cells["seconds_source"])
    n = cells["packs"].where(counted == "packs", cells["documents"].where(counted == "documents", ""))
    untrained = cells["quantity"].isin(COSTS) & (cells["value"] == "") & (cells["maps"] == "")
    return cells.assign(text=cells["text"].mask(untrained, "none"), counted=counted, n=n, source=source)


def _front(lines: pd.DataFrame) -> pd.DataFrame:
    """Returns the Pareto front of bytes and KL, sorted by bytes, then exact top-K at the same budgets if it is not on
    the front.
    """
    competing = lines[~lines["method"].isin(ORACLES)]
    points = list(zip(numbers(competing["step_share"]), numbers(competing[KL.name]), strict=True))
    front = competing[on_front(points)].sort_values("step_share", key=numbers, kind="stable")
    exact = lines[(lines["method"] == TOPK) & lines["budget_percent"].isin(front["budget_percent"])]
    return pd.concat([front.assign(front="1"), exact.drop(front.index, errors="ignore").assign(front="0")])


def on_front(points: list[tuple[float, float]]) -> list[bool]:
    """Whether no other point is at most as large in both coordinates and smaller in one of them."""
    return [not any(p != point and p[0] <= point[0] and p[1] <= point[1] for p in points) for point in points]
