"""Tables of scores and of distances from full attention: methods by budgets, lengths or feature maps."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from residual_mass.metrics import FIRST, KEPT, KL, LOG_PPL_RATIO, METRICS, NLL, SAME_TOP, Metric
from residual_mass.paper.cells import ALL_TASKS, best, cross_join, join_results, layout_part, with_gains
from residual_mass.paper.digits import in_mathematics, texts
from residual_mass.paper.tables.layout import (
    Rows,
    backbones,
    backbones_by_text,
    budget_title,
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

ORIGINS: tuple[str, ...] = typing.get_args(Data)
"""Origins of examples, in the order in which titles name them."""
SCORE_KEYS = "backbone benchmark task length method budget_percent maps"
FIDELITY_KEYS = "backbone benchmark task corpus length method budget_percent maps quantity"
TEXT_METRICS = (KL, SAME_TOP, LOG_PPL_RATIO)
"""Metrics of continuations of held-out text."""
TASK = ["backbone", "benchmark", "task", "length"]

score_table = functools.partial(table, keys=SCORE_KEYS, digits=".6f")
scores_of = functools.partial(score_table, of="scores")
fidelity_table = functools.partial(table, keys=FIDELITY_KEYS, extra="tokens k_mean")


@scores_of("natural_main", heads=("Task", "Method"), benchmarks=("longbench",))
def natural_main(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """LongBench's tasks and methods by budgets."""
    tasks = BENCHMARKS["longbench"]
    if show.study == PUBLISHED:  # a task may have been added since
        tasks = tuple(task for task in tasks if task.name in set(rows["score"]["task"]))
    blocks = layout_part("block", (task.title for task in tasks), task=(task.name for task in tasks))
    blocks = blocks.assign(benchmark="longbench", length=show.lengths[0])
    return scores(rows, show, blocks, budgets(show))


@scores_of("stress_1pct", heads=("Benchmark", "Method"), benchmarks=("ruler", "babilong"))
def stress_1pct(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Benchmarks by lengths, at the middle budget, which is 1 % in the paper."""
    names = ("ruler", "babilong")
    blocks = layout_part("block", map(text_title, names), benchmark=names)
    blocks = blocks.assign(budget_percent=middle_budget(show))
    return scores(rows, show, blocks, lengths(show))


@scores_of("ruler_sweep", heads=("Length", "Method"), benchmarks=("ruler",))
def ruler_sweep(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Lengths by budgets."""
    blocks = lengths(show, "block").assign(benchmark="ruler")
    return scores(rows, show, blocks, budgets(show))


@scores_of("babilong_sweep", heads=("Length", "Method"), benchmarks=("babilong",))
def babilong_sweep(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Lengths by budgets."""
    blocks = lengths(show, "block").assign(benchmark="babilong")
    return scores(rows, show, blocks, budgets(show))


@score_table("cross_length_mismatch", of="mismatch", heads=("Method",))
def cross_length_mismatch(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Training lengths of maps by lengths of evaluation. As in the paper, nothing is bold, because the rows do not
    compete.
    """
    block = layout_part("block", [""], benchmark=["ruler"], budget_percent=[middle_budget(show)])
    lines = map_rows(show, trained_at_title)
    return scores(rows, show, block, lengths(show), lines).assign(bold=False)


@score_table("dphi_ablation", of="dphi", heads=("Feature maps",))
def dphi_ablation(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Widths of the maps by benchmarks. The paper's title of its own maps includes their width."""
    ours = rf"{OURS} ($d_\phi{{=}}64$)" if show.study == PUBLISHED else OURS
    return ablation(rows, show, functools.partial(variant_title, ours=ours))


@score_table("loss_ablation", of="loss", heads=("Feature maps",))
def loss_ablation(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Variants of the maps by benchmarks."""
    return ablation(rows, show, variant_title)


def ablation(rows: Rows, show: TableSpec, title: Callable[[str], str]) -> pd.DataFrame:
    (length,) = show.lengths
    names = [name for name in ("ruler", "babilong") if name in show.benchmarks]
    titles = [f"{text_title(name)} {length}" for name in names]
    columns = layout_part("column", titles, benchmark=names)
    block = layout_part("block", [""], length=[length], budget_percent=[middle_budget(show)])
    return scores(rows, show, block, columns, map_rows(show, title))


def scores(
    rows: Rows, show: TableSpec, blocks: pd.DataFrame, columns: pd.DataFrame, lines: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Returns scores: blocks of `lines`, by default the methods, by a group of columns per backbone."""
    lines = method_rows(show) if lines is None else lines
    cells = cross_join(blocks, lines, backbones(show), columns)
    cells = cells.assign(task=cells.get("task", ALL_TASKS), grid="")
    cells = without_budget(cells)
    absent = pd.Series([not _evaluated(cell, show) for cell in cells.to_dict("records")])
    if absent.all():
        raise ValueError(f"table {show.label}: the study evaluates none of its benchmarks; leave the table out")
    cells = join_results(cells, rows["score"], absent)
    cells = with_gains(cells.assign(text=texts(cells), counted="examples"))
    higher = cells["metric"].map(lambda name: not name or METRICS[name].higher_is_better)
    competing = _competing(cells)
    bold = best(cells, competing, [*TASK, "column"], higher)
    titles = "block" if blocks["block"].any() else "column"
    return _with_origins(cells.assign(bold=bold), titles)


def without_budget(cells: pd.DataFrame) -> pd.DataFrame:
    """Removes the budget of full attention: where columns are budgets, it has one field without a column."""
    full = cells["method"] == "full"
    of_budget = cells["column"] == cells["budget_percent"].map(budget_title)
    column = cells["column"].mask(full & of_budget, "")
    budget = cells["budget_percent"].mask(full)
    return cells.assign(budget_percent=budget, column=column).drop_duplicates(ignore_index=True)


def _evaluated(cell: Mapping[str, Any], show: TableSpec) -> bool:
    """Whether the study has this cell: its benchmark at this length, and a task that fits into the length."""
    benchmark = cell["benchmark"]
    length = cell["length"]
    if benchmark not in show.benchmarks or length not in show.lengths_of.get(benchmark, show.lengths):
        return False
    return cell["task"] not in too_long(benchmark, tokens_of(length))


def _competing(cells: pd.DataFrame) -> pd.Series:
    """Whether a score can be bold: that of a method of the paper on a task on which full attention is above the floor,
    and the method, too.
    """
    full = cells["method"] == "full"
    floor = cells["flags"].str.contains("floor")
    task = [cells[name] for name in TASK]
    undecided = (floor & full).groupby(task).transform("any")
    return ~undecided & ~floor & ~cells["own"] & ~full


def _with_origins(cells: pd.DataFrame, titles: str) -> pd.DataFrame:
    """Adds the origin of examples to titles, on a second line, if they are not the benchmark's own."""
    lines = cells["data"].groupby(cells[titles]).agg(_line_of_origins)
    added = cells[titles].map(lines).where(cells[titles] != "", "")
    return cells.assign(**{titles: cells[titles] + added})


def _line_of_origins(data: pd.Series) -> str:
    origins = {origin for each in data for origin in each.split("+") if origin}
    if origins <= {"original"}:
        return ""
    named = " + ".join(origin for origin in ORIGINS if origin in origins)
    return f"\n({named})"


# ---- fidelity --------------------------------------------------------------------------------------------------------


@fidelity_table("fidelity", of="fidelity", heads=("Length", "Method"))
def fidelity(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Distances from full attention on held-out text."""
    forced = _forced(rows, show, TEXT_METRICS, FOLLOWING)
    forced = forced.rename(columns={"text": "corpus"}).assign(task="")
    blocks = lengths(show, "block").assign(benchmark="")
    groups = backbones_by_text(show, forced["corpus"])
    return _distance_cells(forced, show, TEXT_METRICS, blocks, groups, "documents")


@fidelity_table("fidelity_answers", of="answers", heads=("Prompts", "Method"))
def fidelity_answers(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Likelihood of right answers, and the kept share of full attention's answers."""
    of_right_answers = _forced(rows, show, (NLL, FIRST), GOLD)
    of_full_answers = _forced(rows, show, (KEPT,), GREEDY)
    forced = pd.concat([of_right_answers, of_full_answers]).rename(columns={"text": "benchmark"})
    asked = []
    for name in show.benchmarks:
        asked += [(name, length) for length in show.lengths_of.get(name, show.lengths)]
    titles = [f"{text_title(name)} {length}" for name, length in asked]
    names = [name for name, _ in asked]
    blocks = layout_part("block", titles, benchmark=names, length=[length for _, length in asked])
    blocks = blocks.assign(corpus="")
    return _distance_cells(forced, show, (NLL, FIRST, KEPT), blocks, backbones(show), "examples")


def _forced(rows: Rows, show: TableSpec, metrics: Iterable[Metric], continuation: str) -> pd.DataFrame:
    """Returns rows of these metrics over all tasks, in the arms' own state; `arm_maps` is empty for the main maps."""
    found = rows["fidelity"].rename(columns={"metric": "quantity"})
    wanted = found["quantity"].isin([metric.name for metric in metrics])
    wanted &= found["continuation"] == continuation
    wanted &= found["state"] == OWN
    wanted &= found["task"] == ALL_TASKS
    main = show.maps[0] if show.maps else ""
    others = found["maps"].where(found["maps"] != main, "")
    return found.assign(arm_maps=others, n=found["documents"])[wanted]


def _distance_cells(
    forced: pd.DataFrame, show: TableSpec, metrics: Sequence[Metric], blocks: pd.DataFrame, groups: pd.DataFrame,
    counted: str,
) -> pd.DataFrame:  # fmt: skip
    """Returns a grid per metric, methods by budgets. Full attention has a row only in grids of NLL and FIRST."""
    lines = _arm_rows(forced)
    grids = []
    for metric in metrics:
        shown = lines if metric in (NLL, FIRST) else lines[lines["method"] != "full"]
        title = metric.title[0].upper() + metric.title[1:]
        if metric.unit:
            title = f"{title}, {metric.unit}"
        grid = layout_part("grid", [title], quantity=[metric.name])
        grids.append(cross_join(grid, blocks, shown, groups, budgets(show)))
    cells = pd.concat(grids, ignore_index=True).assign(task=forced["task"].iloc[0])
    cells = without_budget(cells)
    arm = ["backbone", "method", "arm_maps"]
    measured = cells.set_index(arm).index.isin(forced.set_index(arm).index)
    cells = join_results(cells, forced, ~measured)
    cells = with_gains(cells.assign(text=texts(cells), counted=counted))
    place = ["quantity", "backbone", "corpus", "benchmark", "length", "budget_percent"]
    higher = cells["quantity"].map(lambda name: METRICS[name].higher_is_better)
    bold = best(cells, cells["method"] != "full", place, higher)
    return cells.assign(bold=bold, printed=in_mathematics(cells))


def _arm_rows(forced: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each method and other maps."""
    arms = forced[["method", "arm_maps"]].drop_duplicates()
    titles = []
    for name, maps in arms.itertuples(index=False):
        titles.append(trained_at_title(maps) if maps else method_title(name))
    return arms.assign(row=titles)
