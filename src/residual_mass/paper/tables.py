"""The tables: one decorated function each, from result rows and what the study shows to cells."""

from __future__ import annotations

import functools
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from residual_mass.benchmarks.catalogue import BENCHMARKS, Data, too_long
from residual_mass.benchmarks.columns import FOLLOWING, GOLD, GREEDY, OWN
from residual_mass.core.settings import length_and_variant, tokens_of
from residual_mass.metrics import FIRST, KEPT, KL, LOG_PPL_RATIO, METRICS, NLL, SAME_TOP, Metric
from residual_mass.paper import published
from residual_mass.paper.cells import (
    ALL_TASKS,
    LEFT_OUT,
    best,
    cross,
    finished,
    format_score,
    in_mathematics,
    looked_up,
    numbers,
    part,
    texts,
    with_gains,
    without_budget,
)
from residual_mass.paper.titles import (
    METHOD_TITLES,
    OURS,
    OWN_ROW,
    benchmark_title,
    corpus_title,
    method_title,
    trained_at_title,
    variant_title,
    width_title,
)
from residual_mass.study.labels import METHODS, ORACLES, PUBLISHED
from residual_mass.study.specs import TableSpec

Rows = Mapping[str, pd.DataFrame]
"""Result rows by stage, as `cells.load` reads them."""
KINDS: tuple[str, ...] = typing.get_args(Data)
"""Where examples come from, in the order in which titles name it."""


@dataclass(frozen=True)
class Table:
    """A registered table.

    Attributes:
        of: what of a study it shows, which gives its files, backbones, lengths and budgets (`study.plan`).
        heads: titles of the columns before the values, that of the blocks first where they have a column.
        keys: columns that tell cells apart, which begin the CSV.
        extra: further columns of the CSV.
        benchmarks: whose scores it shows.
    """

    label: str
    make: Callable[[Rows, TableSpec], pd.DataFrame]
    of: str
    heads: tuple[str, ...]
    keys: str
    extra: str = ""
    benchmarks: tuple[str, ...] = ()

    def cells(self, rows: Rows, show: TableSpec) -> pd.DataFrame:
        """The table of a study. Raises ValueError when a cell that the study evaluates has no result."""
        return finished(show.label, self.make(rows, show), self.keys, self.extra)


TABLES: dict[str, Table] = {}
RUNTIME = "runtime_"
"""What labels of the tables of latencies begin with; the backbone follows."""
SCORE_KEYS = "backbone benchmark task length method budget_percent maps"
FIDELITY_KEYS = "backbone benchmark task corpus length method budget_percent maps quantity"


def table(label: str, **facts: typing.Any) -> Callable[[Callable[..., pd.DataFrame]], Callable[..., pd.DataFrame]]:
    """Registers a table under a label; the facts are those of `Table`."""

    def register(make: Callable[..., pd.DataFrame]) -> Callable[..., pd.DataFrame]:
        TABLES[label] = Table(label, make, **facts)
        return make

    return register


def find(label: str) -> Table:
    """The table of a label. Raises ValueError when there is none."""
    name = RUNTIME if re.fullmatch(rf"{RUNTIME}[a-z0-9][a-z0-9._-]*", label) else label
    if name not in TABLES:
        raise ValueError(f"table {label!r} is unknown; known are {', '.join(TABLES)}<backbone>")
    return TABLES[name]


# ---- scores ----------------------------------------------------------------------------------------------------------

scores_of = functools.partial(table, of="scores", keys=SCORE_KEYS)


@scores_of("natural_main", heads=("Task", "Method"), benchmarks=("longbench",))
def natural_main(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """LongBench's tasks by budgets."""
    tasks = BENCHMARKS["longbench"]
    blocks = part("block", (task.title for task in tasks), task=(task.name for task in tasks))
    return scores(rows, show, blocks.assign(benchmark="longbench", length=show.lengths[0]), budgets(show))


@scores_of("stress_1pct", heads=("Benchmark", "Method"), benchmarks=("ruler", "babilong"))
def stress_1pct(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Benchmarks by lengths, at the middle one of the budgets: 1 % of the paper's four."""
    names = ("ruler", "babilong")
    blocks = part("block", map(benchmark_title, names), benchmark=names)
    middle = sorted(show.budgets)[(len(show.budgets) - 1) // 2]
    return scores(rows, show, blocks.assign(budget_percent=f"{middle:g}"), lengths(show))


@scores_of("ruler_sweep", heads=("Length", "Method"), benchmarks=("ruler",))
def ruler_sweep(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Lengths by budgets."""
    return scores(rows, show, lengths(show, "block").assign(benchmark="ruler"), budgets(show))


@scores_of("babilong_sweep", heads=("Length", "Method"), benchmarks=("babilong",))
def babilong_sweep(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Lengths by budgets."""
    return scores(rows, show, lengths(show, "block").assign(benchmark="babilong"), budgets(show))


@table("cross_length_mismatch", of="mismatch", heads=("Method",), keys=SCORE_KEYS)
def cross_length_mismatch(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Lengths that maps were trained at by lengths that they are used at. The paper sets nothing in bold here: the rows
    do not compete.
    """
    block = part("block", [""], benchmark=["ruler"]).assign(budget_percent=f"{show.budgets[0]:g}")
    return scores(rows, show, block, lengths(show), of_maps(show, trained_at_title)).assign(bold=False)


@table("dphi_ablation", of="dphi", heads=("Feature maps",), keys=SCORE_KEYS)
def dphi_ablation(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Widths of the maps by benchmarks. The paper names its own maps by their width, too."""
    own = f"{OURS} ({width_title(64)})"
    title = variant_title if show.study != PUBLISHED else lambda maps: variant_title(maps).replace(OURS, own)
    return ablation(rows, show, title)


@table("loss_ablation", of="loss", heads=("Feature maps",), keys=SCORE_KEYS)
def loss_ablation(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Variants of the maps by benchmarks."""
    return ablation(rows, show, variant_title)


def ablation(rows: Rows, show: TableSpec, title: Callable[[str], str]) -> pd.DataFrame:
    names, (length,) = ("ruler", "babilong"), show.lengths
    columns = part("column", (f"{benchmark_title(name)} {length}" for name in names), benchmark=names)
    block = part("block", [""], length=[length]).assign(budget_percent=f"{show.budgets[0]:g}")
    return scores(rows, show, block, columns, of_maps(show, title))


def scores(
    rows: Rows, show: TableSpec, blocks: pd.DataFrame, columns: pd.DataFrame, lines: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Blocks of rows, by default the methods, by a group of columns per backbone."""
    lines = of_methods(show) if lines is None else lines
    cells = cross(blocks, lines, backbones(show), columns)
    cells = without_budget(cells.assign(task=cells.get("task", ALL_TASKS), grid=""), columns)
    absent = ~pd.Series([_evaluated(cell, show) for cell in cells.to_dict("records")], cells.index)
    if absent.all():
        raise ValueError(f"table {show.label}: the study evaluates none of its benchmarks; leave the table out")
    cells = looked_up(cells, rows["score"], absent)
    cells = with_gains(cells.assign(text=texts(cells), counted="examples"))
    floor, task = cells["flags"].str.contains("floor"), ["backbone", "benchmark", "task", "length"]
    decided = ~(floor & (cells["method"] == "full")).groupby([cells[name] for name in task]).transform("any")
    competing = decided & ~floor & (cells["own"] != True) & (cells["method"] != "full")  # noqa: E712
    higher = cells["metric"].map(lambda name: not name or METRICS[name].higher_is_better)
    cells["bold"] = best(cells, competing, [*task, "column"], higher)
    return _with_kinds(cells, "block" if blocks["block"].any() else "column")


def _evaluated(cell: Mapping[str, str], show: TableSpec) -> bool:
    """Whether the study has this cell: its benchmark at the length, and a task that fits into it."""
    return (
        cell["benchmark"] in show.benchmarks
        and cell["length"] in show.lengths_of.get(cell["benchmark"], show.lengths)
        and cell["task"] not in too_long(cell["benchmark"], tokens_of(cell["length"]))
    )


def _with_kinds(cells: pd.DataFrame, titles: str) -> pd.DataFrame:
    """Blocks or columns named with their data, where not the benchmark's own, on a second line to stay narrow."""

    def title(of: pd.Series) -> str:
        kinds = {kind for data in of for kind in data.split("+") if kind}
        return f"\n({' + '.join(kind for kind in KINDS if kind in kinds)})" if kinds - {"original"} else ""

    added = cells["data"].groupby(cells[titles]).agg(title)
    return cells.assign(**{titles: cells[titles] + cells[titles].map(added).where(cells[titles] != "", "")})


def backbones(show: TableSpec) -> pd.DataFrame:
    return part("group", (show.backbone_titles[name] for name in show.backbones), backbone=show.backbones)


def budgets(show: TableSpec) -> pd.DataFrame:
    names = [f"{budget:g}" for budget in show.budgets]
    return part("column", (f"{name}%" for name in names), budget_percent=names)


def lengths(show: TableSpec, layout: str = "column") -> pd.DataFrame:
    return part(layout, show.lengths, length=show.lengths)


def of_methods(show: TableSpec) -> pd.DataFrame:
    """The paper's methods, then the study's own."""
    own = [name in show.own_methods for name in (*METHODS, *show.own_methods)]
    titles = [*map(method_title, METHODS), *(method_title(name) + OWN_ROW for name in show.own_methods)]
    return part("row", titles, method=(*METHODS, *show.own_methods)).assign(own=own)


def of_maps(show: TableSpec, title: Callable[[str], str]) -> pd.DataFrame:
    """The two baselines, a row per feature maps (those of the paper's table first), then our methods."""
    theirs = published.variants_of(show.label) if show.label in published.labels() else None
    own = {maps: theirs is not None and length_and_variant(maps)[1] not in theirs for maps in show.maps}
    maps = sorted(show.maps, key=own.__getitem__)
    titles = [*map(method_title, METHODS[:2]), *(title(each) + OWN_ROW * own[each] for each in maps)]
    lines = part("row", titles, method=[*METHODS[:2], *["topk_phi"] * len(maps)], maps=["", "", *maps])
    lines = lines.assign(own=[False, False, *(own[each] for each in maps)])
    ours = of_methods(show).iloc[len(METHODS) :].assign(maps="")
    return pd.concat([lines, ours], ignore_index=True)


# ---- fidelity --------------------------------------------------------------------------------------------------------


@table("fidelity", of="fidelity", heads=("Length", "Method"), keys=FIDELITY_KEYS, extra="tokens k_mean")
def fidelity(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Distances from full attention on held-out text."""
    forced = _forced(rows, show, (KL, SAME_TOP, LOG_PPL_RATIO), FOLLOWING).rename(columns={"text": "corpus"})
    texts_of = list(dict.fromkeys(forced["corpus"]))
    groups = cross(backbones(show), part("corpus", texts_of))
    groups["group"] += "\n" + groups["corpus"].map(corpus_title)
    blocks = lengths(show, "block").assign(benchmark="", task="")
    return _distances(forced, show, (KL, SAME_TOP, LOG_PPL_RATIO), blocks, groups, "documents")


@table("fidelity_answers", of="answers", heads=("Prompts", "Method"), keys=FIDELITY_KEYS, extra="tokens k_mean")
def fidelity_answers(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Likelihood of right answers, and how much of full attention's own is kept."""
    parts = _forced(rows, show, (NLL, FIRST), GOLD), _forced(rows, show, (KEPT,), GREEDY)
    forced = pd.concat(parts).rename(columns={"text": "benchmark"})
    asked = [(name, length) for name in show.benchmarks for length in show.lengths_of.get(name, show.lengths)]
    titles = (f"{benchmark_title(name)} {length}" for name, length in asked)
    blocks = part("block", titles, benchmark=(name for name, _ in asked), length=(length for _, length in asked))
    blocks = blocks.assign(task=ALL_TASKS, corpus="")
    return _distances(forced, show, (NLL, FIRST, KEPT), blocks, backbones(show), "examples")


def _forced(rows: Rows, show: TableSpec, metrics: Iterable[Metric], continuation: str) -> pd.DataFrame:
    """Rows of these metrics over all tasks, in the arms' own state; `arm_maps` does not name the main maps."""
    found = rows["fidelity"].rename(columns={"metric": "quantity"})
    wanted = found["quantity"].isin([metric.name for metric in metrics])
    wanted &= (found["state"] == OWN) & (found["task"] == ALL_TASKS) & (found["continuation"] == continuation)
    main = show.maps[0] if show.maps else ""
    return found[wanted].assign(arm_maps=found["maps"].where(found["maps"] != main, ""), n=found["documents"])


def _distances(
    forced: pd.DataFrame, show: TableSpec, metrics: Iterable[Metric], blocks: pd.DataFrame, groups: pd.DataFrame,
    counted: str,
) -> pd.DataFrame:  # fmt: skip
    """A grid per metric, methods by budgets; only of values is full attention a row, too."""
    arms = list(
        dict.fromkeys([*((name, "") for name in METHODS), *zip(forced["method"], forced["arm_maps"], strict=True)])
    )
    titles = [trained_at_title(maps) if maps else method_title(name) for name, maps in arms]
    lines = part("row", titles, method=(name for name, _ in arms), arm_maps=(maps for _, maps in arms))
    grids = []
    for metric in metrics:
        shown = lines if metric in (NLL, FIRST) else lines[lines["method"] != "full"]
        title = ", ".join(filter(None, (metric.title[0].upper() + metric.title[1:], metric.unit)))
        grids.append(cross(part("grid", [title], quantity=[metric.name]), blocks, shown, groups, budgets(show)))
    cells = without_budget(pd.concat(grids, ignore_index=True), budgets(show))
    arm = ["backbone", "method", "arm_maps"]
    had = pd.MultiIndex.from_frame(cells[arm]).isin(pd.MultiIndex.from_frame(forced[arm]))
    absent = ~(had | (cells["method"].isin(METHODS) & (cells["arm_maps"] == "")))
    cells = looked_up(
        cells, forced.drop(columns=[name for name in ("task",) if not blocks["task"].any()]), pd.Series(absent)
    )
    cells = with_gains(cells.assign(text=texts(cells), counted=counted), by=["quantity"])
    place = ["quantity", "backbone", "corpus", "benchmark", "length", "budget_percent"]
    higher = cells["quantity"].map(lambda name: METRICS[name].higher_is_better)
    return cells.assign(bold=best(cells, cells["method"] != "full", place, higher), printed=in_mathematics(cells))


# ---- residuals -------------------------------------------------------------------------------------------------------

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


@table(
    "residual_estimators",
    of="residuals",
    heads=("Length", "Method"),
    keys=RESIDUAL_KEYS,
    extra="k over_topk heads_below_topk",
)
def residual_estimators(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Errors of attention outputs and of the residual's mass, the next token's distance, and costs: a grid each."""
    errors = compared(rows)
    methods = list(dict.fromkeys(errors["method"]))
    lines = part("row", map(method_title, methods), method=methods)
    groups = cross(backbones(show), part("corpus", dict.fromkeys(errors["corpus"])))
    groups["group"] += "\n" + groups["corpus"].map(corpus_title)
    grids = part("grid", ERROR_GRIDS.values(), quantity=ERROR_GRIDS)
    if errors[KL.name].eq("").all():
        grids = grids[grids["quantity"] != KL.name]
    cells = looked_up(cross(grids, lengths(show, "block"), lines, groups, budgets(show)), errors)
    cells = of_quantity(cells.assign(n=cells["packs"], counted="packs"), {"relative_error": "error"})
    cells["text"] = texts(cells)
    distance = cells["quantity"] == KL.name
    cells.loc[distance, ["n", "counted", "source"]] = cells.loc[
        distance, ["documents", "counted_kl", "kl_source"]
    ].to_numpy()
    negative = numbers(cells["value"]).fillna(0) < 0
    place = ["quantity", "backbone", "corpus", "length", "budget_percent"]
    competing = ~cells["method"].isin(ORACLES) & (cells["quantity"] != "log_z_error")
    cells = cells.assign(
        bold=best(cells, competing, place, False), printed=("$" + cells["text"] + "$").where(negative, cells["text"])
    )
    columns = part("column", COSTS.values(), quantity=COSTS)
    costs = cross(lengths(show, "block"), lines, backbones(show), columns).assign(
        grid="State per KV head and layer, and training"
    )
    costs = looked_up(
        costs, errors.drop_duplicates(["backbone", "length", "method"]).drop(columns=["corpus", "budget_percent"])
    )
    return pd.concat([cells, with_costs(of_quantity(costs))], ignore_index=True)


def compared(rows: Rows) -> pd.DataFrame:
    """Errors of methods on texts, with the KL divergence and the share of equal top tokens of the same methods and maps
    where they were measured (`documents` is empty otherwise), and the seconds that their maps were trained for.
    """
    errors = rows["errors"]
    keys = ["backbone", "corpus", "length", "method", "budget_percent", "maps"]
    for metric in (KL, SAME_TOP):
        found = rows.get("fidelity", pd.DataFrame(columns=[*keys, "text", "metric", "task", "state", "continuation"]))
        found = found[(found["metric"] == metric.name) & (found["task"] == ALL_TASKS) & (found["state"] == OWN)]
        found = found[found["continuation"] == FOLLOWING].rename(columns={"text": "corpus"})
        bounds = {name: f"{metric.name}_{name}" for name in ("ci_low", "ci_high", "source")}
        found = found.rename(columns={"value": metric.name, **bounds})
        kept = [*keys, metric.name, *bounds.values(), *(["documents"] if metric is KL else [])]
        errors = errors.merge(found.reindex(columns=kept), how="left", on=keys).fillna("")
    logs = rows.get("train", pd.DataFrame(columns=["backbone", "length", "step", "seconds", "source"]))
    last = (
        logs.assign(number=pd.to_numeric(logs["step"]))
        .sort_values("number", kind="stable")
        .drop_duplicates(["backbone", "length"], keep="last")
    )
    last = last[["backbone", "length", "seconds", "source"]].set_axis(
        ["backbone", "maps", "training_seconds", "seconds_source"], axis=1
    )
    return errors.merge(last, how="left", on=["backbone", "maps"]).fillna("").assign(counted_kl="documents")


def of_quantity(cells: pd.DataFrame, names: Mapping[str, str] = {}) -> pd.DataFrame:  # noqa: B006
    """Each cell with the value and the interval of its quantity, which are columns of its row."""
    columns = cells["quantity"].map(lambda name: names.get(name, name))
    for field, ending in (("value", ""), ("ci_low", "_ci_low"), ("ci_high", "_ci_high")):
        rows = zip(cells.to_dict("records"), columns + ending, strict=True)
        cells[field] = pd.Series([row.get(name, "") for row, name in rows], cells.index, dtype=str)
    return cells


def with_costs(cells: pd.DataFrame) -> pd.DataFrame:
    """Texts of COSTS; what a method without maps has none of is said."""

    def text(cell: Mapping[str, str]) -> str:
        if not cell["value"]:
            return LEFT_OUT if cell["maps"] else "none"
        value = float(cell["value"])
        if cell["quantity"] == "state_share":
            return f"{100 * value:.1f}%"
        if cell["quantity"] == "training_seconds":
            return f"{value:,.0f} s" if value < 7200 else f"{value / 3600:.1f} h"
        return f"{value:,.0f}"

    seconds = (cells["quantity"] == "training_seconds") & (cells["value"] != "")
    source = cells["source"].where(~seconds, cells["seconds_source"])
    return cells.assign(text=[text(cell) for cell in cells.to_dict("records")], source=source)


DEPLOYABLE = {
    "": "Budget", "step_share": "Read", KL.name: "KL,\nnats", SAME_TOP.name: "Top\ntoken", "relative_error": "Error",
    "summary_bytes": "State,\nbytes", "training_steps": "Training,\nsteps (time)",
    "training_seconds": "Training,\nsteps (time)",
}  # fmt: skip


@table(
    "deployable",
    of="residuals",
    heads=("Text", "Method"),
    keys=RESIDUAL_KEYS,
    extra="k recall tokens_read scan_bytes row_bytes summary_bytes step_share front",
)
def deployable(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """The Pareto front of what a decode step reads and of the next token's divergence, beside exact top-K at its
    budgets.
    """
    errors = compared(rows)
    errors = errors[errors[KL.name] != ""]
    places = errors.groupby(["backbone", "length", "corpus"], sort=False)
    order = cross(backbones(show), lengths(show, "block"), part("corpus", dict.fromkeys(errors["corpus"])))
    shown = order[["backbone", "length", "corpus"]].itertuples(index=False, name=None)
    lines = [_front(places.get_group(place)) for place in shown if place in places.groups]
    if not lines:
        raise ValueError(
            "table deployable: no method has both errors and distances of the next token; run the fidelity stage with "
            "its texts and lengths"
        )
    lines = pd.concat(lines, ignore_index=True)
    lines["row"] = lines["method"].map(method_title) + lines["front"].map({"1": "", "0": r"$^{\circ}$"})
    lines["block"] = lines["corpus"].map(corpus_title)
    lines["grid"] = lines["group"] = lines["backbone"].map(show.backbone_titles) + ", " + lines["length"]
    cells = cross(lines, part("column", DEPLOYABLE.values(), quantity=DEPLOYABLE))
    cells = of_quantity(cells, {"relative_error": "error"})
    distance = cells["quantity"].isin([KL.name, SAME_TOP.name])
    sizes = cells["documents"].where(distance, cells["packs"].where(cells["quantity"] == "relative_error", ""))
    counted = distance.map({True: "documents", False: ""}).mask(cells["quantity"] == "relative_error", "packs")
    costs = cells["quantity"].str.startswith("training")
    cells = with_costs(cells.assign(n=sizes, counted=counted)).assign(printed=texts(cells))
    cells["text"] = cells["text"].where(costs, cells["printed"])
    for quantity, form in (("step_share", "{:.1%}"), ("summary_bytes", "{:,.0f}")):
        chosen = cells["quantity"] == quantity
        cells.loc[chosen, "text"] = numbers(cells.loc[chosen, "value"]).map(form.format)
    cells.loc[cells["quantity"] == "", "text"] = cells["budget_percent"] + "%"
    cells.loc[distance, "source"] = cells["kl_source"]
    steps = cells.loc[cells["quantity"] == "training_steps", "text"].to_numpy()
    seconds = cells[cells["quantity"] == "training_seconds"]
    trained = [
        text if not value else f"{text} ({time})"
        for text, value, time in zip(steps, seconds["value"], seconds["text"], strict=True)
    ]
    cells["printed"] = cells["text"].mask(
        costs, pd.Series([each for each in trained for _ in range(2)], cells.index[costs])
    )
    return cells.assign(own=cells["front"] == "0")


def _front(lines: pd.DataFrame) -> pd.DataFrame:
    """What no other method beats in both, by its bytes, then exact top-K at the same budgets where it is not on it."""
    competing = lines[~lines["method"].isin(ORACLES)]
    points = list(zip(numbers(competing["step_share"]), numbers(competing[KL.name]), strict=True))
    front = competing[on_front(points)].assign(front="1")
    front = front.iloc[numbers(front["step_share"]).argsort(kind="stable")]
    beside = lines[(lines["method"] == METHODS[1]) & lines["budget_percent"].isin(front["budget_percent"])]
    return pd.concat([front, beside.drop(front.index, errors="ignore").assign(front="0")])


def on_front(points: list[tuple[float, float]]) -> list[bool]:
    """Whether no other point is at most as large in both coordinates and smaller in one of them."""
    return [not any(one != point and one[0] <= point[0] and one[1] <= point[1] for one in points) for point in points]


# ---- diagnostics and costs -------------------------------------------------------------------------------------------

ACCOUNTING = {
    "e_topk": METHOD_TITLES["topk"], "e_nosub": METHOD_TITLES["topk_phi_nosub"], "e_sub": METHOD_TITLES["topk_phi"],
    "e_exact_nosub": "ExactNoSub", "log_z_error": "Log-$Z$ error",
}  # fmt: skip
"""What a row prints, by the column of the file; the first three compete."""


@table(
    "exact_accounting",
    of="diagnostics",
    heads=("Corpus", "Length", "$K$"),
    keys="backbone corpus length k budget_percent maps quantity",
    extra="clamped_share",
)
def exact_accounting(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """What completion and the double counting of retrieved tokens do to attention outputs, corpus by corpus."""
    found = rows["accounting"]
    titles = show.backbone_titles if len(show.backbones) > 1 else dict.fromkeys(show.backbones, "")
    blocks = part("block", (titles[name] for name in show.backbones), backbone=show.backbones)
    lines = cross(part("length", show.lengths), part("corpus", dict.fromkeys(found["corpus"])))
    columns = part("column", ACCOUNTING.values(), quantity=ACCOUNTING)
    cells = cross(blocks, lines, columns).assign(budget_percent=f"{show.budgets[0]:g}", grid="", group="")
    cells = of_quantity(looked_up(cells, found))
    cells["row"] = cells["corpus"].map(corpus_title) + " | " + cells["length"] + " | " + cells["k"]
    cells["text"] = [format_score(float(value)) if value else LEFT_OUT for value in cells["value"]]
    signed = (cells["quantity"] == "log_z_error") & (cells["text"] != LEFT_OUT)
    cells["printed"] = ("$" + cells["text"] + "$").where(signed, cells["text"])
    competing = cells["quantity"].isin(list(ACCOUNTING)[:3])
    cells["clamped_share"] = cells.get("clamped_share", pd.Series("", cells.index)).where(
        cells["quantity"].isin(["e_sub", "log_z_error"]), ""
    )
    bold = best(cells, competing, ["backbone", "corpus", "length"], False)
    return cells.assign(bold=bold, n=cells.get("packs", ""), counted="packs")


PARAMETERS = {
    "params_per_head": "Per head", "q_heads": "Query heads", "kv_heads": "KV heads",
    "phi_q_total": r"$\phi_{\mathrm{q}}$ total", "phi_k_total": r"$\phi_{\mathrm{k}}$ total", "total": "Total",
}  # fmt: skip


@table("phi_param_count", of="maps", heads=(r"Backbone / $d_\phi$",), keys="backbone maps kind d_emb d_phi quantity")
def phi_param_count(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """How large the feature maps of a backbone are, per head and in all."""
    maps = rows["maps"].assign(
        order=rows["maps"]["backbone"].map(show.backbones.index), width=rows["maps"]["d_phi"].astype(int)
    )
    maps = maps.sort_values(["order", "width"], kind="stable")
    counts = maps[["params_per_head", "query_heads", "kv_heads"]].astype(int)
    totals = {
        "phi_q_total": counts["params_per_head"] * counts["query_heads"],
        "phi_k_total": counts["params_per_head"] * counts["kv_heads"],
    }
    maps = maps.assign(
        **totals,
        total=sum(totals.values()),
        q_heads=counts["query_heads"],
        d_emb=maps["d_emb"].where(maps["kind"] == "rezero", ""),
    )
    maps["row"] = maps["backbone"].map(show.backbone_titles) + " / " + maps["d_phi"]
    cells = cross(maps, part("column", PARAMETERS.values(), quantity=PARAMETERS)).assign(grid="", group="", block="")
    cells["value"] = [str(cell[cell["quantity"]]) for cell in cells.to_dict("records")]
    total = cells["quantity"].str.endswith("total")
    cells["text"] = [
        f"{int(value) / 1e6:.1f}M" if whole else f"{int(value):,}"
        for value, whole in zip(cells["value"], total, strict=True)
    ]
    return cells


TRAINING = {
    "steps": "Steps / hardware",
    "sequences": "Sequences",
    "teacher_passes": "Passes",
    "wall_clock_h": "Wall-clock",
}


@table(
    "training_cost_64k",
    of="training",
    heads=("Backbone",),
    keys="backbone length maps quantity",
    extra="steps hardware processes",
)
def training_cost_64k(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """What training takes, a row per backbone, with the paper's below it where it trained maps of that model."""
    logs, theirs = rows["train"], published.rows("training_cost_64k")
    theirs[["processes", "hardware"]] = theirs["hardware"].str.split("x", n=1, expand=True).to_numpy()
    if show.study == PUBLISHED:
        theirs = theirs.assign(length=published.MAIN_MAPS, row=theirs["backbone"].map(show.backbone_titles))
        cells = cross(
            theirs, part("column", [TRAINING["steps"], TRAINING["wall_clock_h"]], quantity=["steps", "wall_clock_h"])
        )
        return _efforts(
            cells.assign(value=cells["wall_clock_h"].where(cells["quantity"] == "wall_clock_h", cells["steps"]))
        )
    logs = logs.iloc[pd.to_numeric(logs["step"]).argsort(kind="stable")].drop_duplicates("backbone", keep="last")
    logs = logs.set_index("backbone").loc[list(show.backbones)].reset_index()
    steps, each = logs["steps"].astype(int), logs["sequences_per_step"].astype(int)
    passes = [math.ceil(count / int(reuse)) for count, reuse in zip(steps, logs["reuse"], strict=True)]
    hours = [f"{float(seconds) / 3600:.6f}" for seconds in logs["seconds"]]
    logs = logs.assign(
        row=logs["backbone"].map(show.backbone_titles),
        sequences=steps * each,
        teacher_passes=passes * each,
        wall_clock_h=hours,
        n="1",
        counted="trainings",
    )
    parts = []
    for backbone, training in logs.groupby("backbone", sort=False):
        paper = theirs[theirs["backbone"].map(published.MODELS) == training["model_id"].iloc[0]].assign(
            row="in the paper", sequences="", teacher_passes=""
        )
        parts += [training, paper.assign(beside="1", backbone=backbone)]
    cells = cross(pd.concat(parts, ignore_index=True).fillna(""), part("column", TRAINING.values(), quantity=TRAINING))
    cells["value"] = [str(cell[cell["quantity"]]) for cell in cells.to_dict("records")]
    cells = _efforts(cells)
    return cells.assign(value=cells["value"].where(cells.get("beside", "") != "1", ""))


def _efforts(cells: pd.DataFrame) -> pd.DataFrame:
    """`200k steps on 8xH200`, with a proper cross. As in the paper, makers are left out; the CSV has a CPU's."""

    def text(cell: Mapping[str, str]) -> str:
        if not cell["value"]:
            return LEFT_OUT
        if cell["quantity"] != "wall_clock_h":
            return _thousands(round(float(cell["value"])))
        hours, seconds = float(cell["value"]), round(3600 * float(cell["value"]))
        if "." not in cell["value"]:
            return f"{cell['value']} h"
        return f"{seconds} s" if seconds < 120 else f"{seconds / 60:.1f} min" if seconds < 7200 else f"{hours:.1f} h"

    def effort(cell: Mapping[str, str]) -> str:
        shown = re.sub(r".*, (?=\d+ threads$)", "CPU, ", cell["hardware"])
        counted = (shown and not shown.startswith("CPU")) or int(cell["processes"] or 1) > 1
        times = rf"{cell['processes'] or 1}$\times$" if counted else ""
        return f"{_thousands(int(cell['steps']))} steps on {times}{shown.removeprefix('NVIDIA ') or 'unknown hardware'}"

    records = cells.to_dict("records")
    cells = cells.assign(text=[text(cell) for cell in records], maps=cells["length"], grid="", group="", block="")
    return cells.assign(printed=[effort(cell) if cell["quantity"] == "steps" else text(cell) for cell in records])


def _thousands(count: int) -> str:
    return f"{count // 1000}k" if count and count % 1000 == 0 else f"{count:,}"


IMPLEMENTATIONS = {"prototype": "Prototype", "fused": "Fused"}
TIMES, TRAFFIC = ("per_step_ms", "end_to_end_ms"), ("step_bytes", "floor_ms", "over_floor")
"""What is printed of a measurement: `step / end to end`, then `traffic / floor / step over floor`."""
RUNTIME_EXTRA = "low high peak_memory_mib not_measured phi_weights dtype device"


@table(
    RUNTIME,
    of="runtime",
    heads=("Context", "$K$"),
    keys="backbone implementation method length batch budget_percent k quantity",
    extra=RUNTIME_EXTRA,
)
def runtime(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Latencies of one backbone by implementation, batch, context and method, then the traffic of a step; with the
    paper's values where it measured that model.
    """
    found = rows["runtime"]
    found = found.assign(length=found["context"])
    found = found[found["length"].isin(show.lengths)].assign(batch_number=pd.to_numeric(found["batch"]))
    order = found["implementation"].map(list(IMPLEMENTATIONS).index)
    found = found.assign(order=order).sort_values(["order", "batch_number"], kind="stable")
    methods = [*METHODS, *dict.fromkeys(found.loc[~found["method"].isin(METHODS), "method"])]
    titles = [method_title(name) + OWN_ROW * (name not in METHODS) for name in methods]
    columns = part("column", titles, method=methods)
    own = show.study != PUBLISHED
    parts = [_latencies(of, columns, show, TIMES, own) for _, of in found.groupby(["order", "batch_number"])]
    theirs = [name for name, model in published.MODELS.items() if own and model == found["model_id"].iloc[0]]
    for name in theirs:
        (paper,), spec = published.results(f"{RUNTIME}{name}")[0].values(), published.results(f"{RUNTIME}{name}")[1]
        block = _latencies(paper, columns, spec, TIMES, False)
        parts.append(block.assign(value="", block="The paper, batch 1", backbone=show.backbones[0]))
    if own:
        parts += [_latencies(of, columns, show, TRAFFIC, own) for _, of in found.groupby(["order", "batch_number"])]
    return pd.concat(parts, ignore_index=True).fillna("")


def _latencies(
    found: pd.DataFrame, columns: pd.DataFrame, show: TableSpec, quantities: Iterable[str], titled: bool
) -> pd.DataFrame:
    """One block: contexts by methods, with the quantities of a measurement in one field."""
    first = found.iloc[0]
    lines = lengths(show, "row").assign(
        implementation=first["implementation"], batch=first["batch"], backbone=first["backbone"]
    )
    cells = cross(lines, columns, part("quantity", quantities))
    found = found.drop(columns=["order", "batch_number"], errors="ignore")
    cells = looked_up(cells, found, pd.Series(True, cells.index))
    shared = ", ".join(f"{float(budget):g}%" for budget in dict.fromkeys(found["budget_percent"]) if budget)
    block = f"{IMPLEMENTATIONS[first['implementation']]}, batch {first['batch']}" if titled else ""
    k = found[found["budget_percent"] != ""].drop_duplicates("length").set_index("length")["k"]
    traffic = tuple(quantities) == TRAFFIC
    cells["row"] += "" if traffic else " | " + cells["row"].map(k)
    measured = cells.get("not_measured", pd.Series("", cells.index)) == ""
    cells = cells.assign(value=[_latency(cell) for cell in cells.to_dict("records")], grid="traffic" if traffic else "")
    cells["value"] = cells["value"].where(measured | cells["quantity"].isin(["step_bytes", "floor_ms"]), "")
    cells["text"] = [_milliseconds(*cell) for cell in zip(cells["quantity"], cells["value"], strict=True)]
    fields = cells.groupby(["row", "column"], sort=False)["text"].transform(" / ".join)
    lacking = cells["source"] == "" if "source" in cells and titled else cells["value"] == ""
    step = cells["quantity"] == "per_step_ms"
    bounds = {
        name: cells.get(f"per_step_{name}_ms", pd.Series("", cells.index)).where(step, "") for name in ("low", "high")
    }
    block += f", budget {shared}" if traffic else ""
    return cells.assign(
        printed=fields.mask(lacking, LEFT_OUT),
        block=block,
        group="",
        n=cells.get("repeats", ""),
        counted="repeats",
        **bounds,
    )


def _latency(cell: Mapping[str, str]) -> str:
    """The step over its floor is not in the file; its floor is not rounded, or a tiny model's would be nothing."""
    if cell["quantity"] != "over_floor" or not cell.get("per_step_ms"):
        return str(cell.get(cell["quantity"], ""))
    floor = int(cell["step_bytes"]) / float(cell["bandwidth_gb_s"]) / 1e6
    return f"{round(float(cell['per_step_ms']) / floor, 6):.6f}"


def _milliseconds(quantity: str, value: str) -> str:
    """Traffic is in gigabytes, and long times have no room for decimals."""
    if not value:
        return LEFT_OUT
    number = float(value)
    if quantity == "step_bytes":
        return f"{number / 1e9:.3f}"
    return f"{number:.2f}" if number < 1e4 else f"{number:.0f}"
