"""Tables of scores and of distances from full attention: methods by budgets, lengths or feature maps."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Mapping

import pandas as pd

from residual_mass.metrics import FIRST, KEPT, KL, LOG_PPL_RATIO, METRICS, NLL, SAME_TOP, Metric
from residual_mass.paper.cells import ALL_TASKS, best, cross, in_mathematics, looked_up, part, texts, with_gains
from residual_mass.paper.tables.layout import (
    Rows,
    backbones,
    backbones_by_text,
    budgets,
    lengths,
    map_rows,
    method_rows,
    middle_budget,
    table,
)
from residual_mass.paper.titles import OURS, method_title, text_title, trained_at_title, variant_title
from residual_mass.spec.columns import FOLLOWING, GOLD, GREEDY, OWN
from residual_mass.spec.labels import PUBLISHED
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import TableSpec
from residual_mass.spec.tasks import BENCHMARKS, Data, too_long

KINDS: tuple[str, ...] = typing.get_args(Data)
"""Origins of examples, in the order in which titles name them."""
SCORE_KEYS = "backbone benchmark task length method budget_percent maps"
FIDELITY_KEYS = "backbone benchmark task corpus length method budget_percent maps quantity"

scores_of = functools.partial(table, of="scores", keys=SCORE_KEYS)


@scores_of("natural_main", heads=("Task", "Method"), benchmarks=("longbench",))
def natural_main(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """LongBench's tasks and methods by budgets."""
    tasks = BENCHMARKS["longbench"]
    blocks = part("block", (task.title for task in tasks), task=(task.name for task in tasks))
    return scores(rows, show, blocks.assign(benchmark="longbench", length=show.lengths[0]), budgets(show))


@scores_of("stress_1pct", heads=("Benchmark", "Method"), benchmarks=("ruler", "babilong"))
def stress_1pct(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Benchmarks by lengths, at the middle budget, which is 1 % in the paper."""
    names = ("ruler", "babilong")
    blocks = part("block", map(text_title, names), benchmark=names)
    return scores(rows, show, blocks.assign(budget_percent=middle_budget(show)), lengths(show))


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
    """Training lengths of maps by lengths of evaluation. As in the paper, nothing is bold, because the rows do not
    compete.
    """
    block = part("block", [""], benchmark=["ruler"]).assign(budget_percent=middle_budget(show))
    return scores(rows, show, block, lengths(show), map_rows(show, trained_at_title)).assign(bold=False)


@table("dphi_ablation", of="dphi", heads=("Feature maps",), keys=SCORE_KEYS)
def dphi_ablation(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Widths of the maps by benchmarks. The paper's title of its own maps includes their width."""
    ours = rf"{OURS} ($d_\phi{{=}}64$)" if show.study == PUBLISHED else OURS
    return ablation(rows, show, functools.partial(variant_title, ours=ours))


@table("loss_ablation", of="loss", heads=("Feature maps",), keys=SCORE_KEYS)
def loss_ablation(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Variants of the maps by benchmarks."""
    return ablation(rows, show, variant_title)


def ablation(rows: Rows, show: TableSpec, title: Callable[[str], str]) -> pd.DataFrame:
    names, (length,) = [name for name in ("ruler", "babilong") if name in show.benchmarks], show.lengths
    columns = part("column", (f"{text_title(name)} {length}" for name in names), benchmark=names)
    block = part("block", [""], length=[length]).assign(budget_percent=middle_budget(show))
    return scores(rows, show, block, columns, map_rows(show, title))


def scores(
    rows: Rows, show: TableSpec, blocks: pd.DataFrame, columns: pd.DataFrame, lines: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Returns scores: blocks of `lines`, by default the methods, by a group of columns per backbone."""
    cells = cross(blocks, method_rows(show) if lines is None else lines, backbones(show), columns)
    cells = without_budget(cells.assign(task=cells.get("task", ALL_TASKS), grid=""))
    absent = pd.Series([not _evaluated(cell, show) for cell in cells.to_dict("records")])
    if absent.all():
        raise ValueError(f"table {show.label}: the study evaluates none of its benchmarks; leave the table out")
    cells = looked_up(cells, rows["score"], absent)
    cells = with_gains(cells.assign(text=texts(cells), counted="examples"))
    floor, task = cells["flags"].str.contains("floor"), ["backbone", "benchmark", "task", "length"]
    decided = ~(floor & (cells["method"] == "full")).groupby([cells[name] for name in task]).transform("any")
    competing = decided & ~floor & ~cells["own"] & (cells["method"] != "full")
    higher = cells["metric"].map(lambda name: not name or METRICS[name].higher_is_better)
    cells["bold"] = best(cells, competing, [*task, "column"], higher)
    return _with_kinds(cells, "block" if blocks["block"].any() else "column")


def without_budget(cells: pd.DataFrame) -> pd.DataFrame:
    """Removes the budget of full attention: where columns are budgets, it has one field without a column."""
    full, budget = cells["method"] == "full", cells["budget_percent"]
    column = cells["column"].mask(full & (cells["column"] == budget + "%"), "")
    return cells.assign(budget_percent=budget.mask(full, ""), column=column).drop_duplicates(ignore_index=True)


def _evaluated(cell: Mapping[str, str], show: TableSpec) -> bool:
    """Whether the study has this cell: its benchmark at this length, and a task that fits into the length."""
    return (
        cell["benchmark"] in show.benchmarks
        and cell["length"] in show.lengths_of.get(cell["benchmark"], show.lengths)
        and cell["task"] not in too_long(cell["benchmark"], tokens_of(cell["length"]))
    )


def _with_kinds(cells: pd.DataFrame, titles: str) -> pd.DataFrame:
    """Adds the origin of examples to titles, on a second line, if they are not the benchmark's own."""

    def title(of: pd.Series) -> str:
        kinds = {kind for data in of for kind in data.split("+") if kind}
        return f"\n({' + '.join(kind for kind in KINDS if kind in kinds)})" if kinds - {"original"} else ""

    added = cells["data"].groupby(cells[titles]).agg(title)
    return cells.assign(**{titles: cells[titles] + cells[titles].map(added).where(cells[titles] != "", "")})


# ---- fidelity --------------------------------------------------------------------------------------------------------


@table("fidelity", of="fidelity", heads=("Length", "Method"), keys=FIDELITY_KEYS, extra="tokens k_mean")
def fidelity(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Distances from full attention on held-out text."""
    forced = _forced(rows, show, (KL, SAME_TOP, LOG_PPL_RATIO), FOLLOWING).rename(columns={"text": "corpus"})
    blocks, groups = lengths(show, "block").assign(benchmark=""), backbones_by_text(show, forced["corpus"])
    return _distances(forced.assign(task=""), show, (KL, SAME_TOP, LOG_PPL_RATIO), blocks, groups, "documents")


@table("fidelity_answers", of="answers", heads=("Prompts", "Method"), keys=FIDELITY_KEYS, extra="tokens k_mean")
def fidelity_answers(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Likelihood of right answers, and the kept share of full attention's answers."""
    forced = pd.concat([_forced(rows, show, (NLL, FIRST), GOLD), _forced(rows, show, (KEPT,), GREEDY)])
    asked = [(name, length) for name in show.benchmarks for length in show.lengths_of.get(name, show.lengths)]
    names, at = zip(*asked, strict=True)
    blocks = part("block", (f"{text_title(name)} {length}" for name, length in asked), benchmark=names, length=at)
    forced = forced.rename(columns={"text": "benchmark"})
    return _distances(forced, show, (NLL, FIRST, KEPT), blocks.assign(corpus=""), backbones(show), "examples")


def _forced(rows: Rows, show: TableSpec, metrics: Iterable[Metric], continuation: str) -> pd.DataFrame:
    """Returns rows of these metrics over all tasks, in the arms' own state; `arm_maps` is empty for the main maps."""
    found = rows["fidelity"].rename(columns={"metric": "quantity"})
    wanted = found["quantity"].isin([metric.name for metric in metrics])
    wanted &= (found["state"] == OWN) & (found["task"] == ALL_TASKS) & (found["continuation"] == continuation)
    main = show.maps[0] if show.maps else ""
    return found[wanted].assign(arm_maps=found["maps"].where(found["maps"] != main, ""), n=found["documents"])


def _distances(
    forced: pd.DataFrame, show: TableSpec, metrics: Iterable[Metric], blocks: pd.DataFrame, groups: pd.DataFrame,
    counted: str,
) -> pd.DataFrame:  # fmt: skip
    """Returns a grid per metric, methods by budgets. Full attention has a row only in grids of NLL and FIRST."""
    arms = forced[["method", "arm_maps"]].drop_duplicates()
    titles = [trained_at_title(maps) if maps else method_title(name) for name, maps in arms.itertuples(index=False)]
    lines = arms.assign(row=titles)
    grids = []
    for metric in metrics:
        shown = lines if metric in (NLL, FIRST) else lines[lines["method"] != "full"]
        title = ", ".join(filter(None, (metric.title[0].upper() + metric.title[1:], metric.unit)))
        grids.append(cross(part("grid", [title], quantity=[metric.name]), blocks, shown, groups, budgets(show)))
    cells = without_budget(pd.concat(grids, ignore_index=True).assign(task=forced["task"].iloc[0]))
    arm = ["backbone", "method", "arm_maps"]
    absent = ~cells.set_index(arm).index.isin(forced.set_index(arm).index)
    cells = looked_up(cells, forced, absent)
    cells = with_gains(cells.assign(text=texts(cells), counted=counted))
    place = ["quantity", "backbone", "corpus", "benchmark", "length", "budget_percent"]
    higher = cells["quantity"].map(lambda name: METRICS[name].higher_is_better)
    return cells.assign(bold=best(cells, cells["method"] != "full", place, higher), printed=in_mathematics(cells))
