"""Figures of accounting for every head: errors and gains against entropy, at one K and over several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator

from residual_mass.files import read_parquet
from residual_mass.paper.figures.captured import HEAD, TEXT, rows_at_budget
from residual_mass.paper.figures.registry import figure
from residual_mass.paper.figures.style import BLUE, GREY, TEXT_WIDTH, VERMILLION, finish, panel_axes, plain
from residual_mass.paper.figures.summaries import binned_medians, equal_parts, head_means
from residual_mass.study.specs import FigureSpec

BUDGET = ["k", "budget_percent"]
ERRORS = ["e_topk", "e_sub"]
BIN = 0.1
"""Width in entropy of the bins for medians over heads."""
QUARTILES = 4
LINEAR = 0.1
"""Axes of errors and gains are linear up to here and logarithmic beyond."""

H_MID, E_TOPK, E_SUB = r"$H_{\mathrm{mid}}$", r"$e_{\mathrm{TopK}}$", r"$e_{\mathrm{TopK}{+}\phi}$"
GAIN = r"$e_{\mathrm{TopK}} - e_{\mathrm{TopK}{+}\phi}$"
SHARE = r"$\rho_{\mathrm{res}} = \hat Z_{\mathcal{R}}\,/\,(Z_{\mathcal{E}} + \hat Z_{\mathcal{R}})$"

HEADS = {"s": 9, "alpha": 0.6}
HELPED, HURT = {"c": BLUE, "marker": "o", "linewidths": 0}, {"c": VERMILLION, "marker": "x", "linewidths": 0.7}
"""Crosses and circles distinguish heads in print without colour."""
MEDIAN = {"color": "black", "marker": "D", "markersize": 2.5, "linewidth": 1}
METHODS = {
    "e_topk": {"color": VERMILLION, "marker": "s", "linestyle": "--"},
    "e_sub": {"color": BLUE, "marker": "o", "linestyle": "-"},
}
MEAN = {"markersize": 3, "linewidth": 1.2}


def entropy_gain_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (backbone, K, layer, query head), in the order of the files: means over packs and queries of
    `h_mid` and of `gain`, e_topk - e_sub.
    """
    columns = [*TEXT, *BUDGET, *HEAD, *ERRORS, "h_mid"]
    frames = [read_parquet(path, columns, "capture") for path in data]
    heads = [_head_errors(frame, ["backbone", *BUDGET, *HEAD]) for frame in frames]
    return pd.concat(heads, ignore_index=True).drop(columns=ERRORS)


def entropy_heatmap_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (layer, query head) at the spec's budget: means over packs and queries of `h_mid` and
    `residual_share_hat`, and their medians over the heads in the same bin of entropy, `bin_*`.
    """
    columns = [*BUDGET, *HEAD, "h_mid", "residual_share_hat"]
    heads = head_means(rows_at_budget(data[0], columns, spec.budget_percent), [*BUDGET, *HEAD])
    return heads.join(binned_medians(heads, "h_mid", ["residual_share_hat"], BIN))


def fixedk_breakdown_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (layer, query head) at the spec's budget: means over packs and queries of `h_mid`, `e_topk`,
    `e_sub` and `gain`, and their medians over the heads in the same bin of entropy, `bin_*`.
    """
    columns = [*BUDGET, *HEAD, *ERRORS, "h_mid"]
    rows = rows_at_budget(data[0], columns, spec.budget_percent)
    heads = _head_errors(rows, [*BUDGET, *HEAD])
    return heads.join(binned_medians(heads, "h_mid", [*ERRORS, "gain"], BIN))


def _head_errors(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Averages errors, entropy and gain over packs and queries, for each combination of `by`."""
    heads = head_means(rows[[*by, *ERRORS, "h_mid"]], by)
    return heads.assign(gain=heads["e_topk"] - heads["e_sub"])


def quartile_error_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (quartile, K): the errors `e_topk` and `e_sub`, averaged over the quartile's heads, the range
    of the middle half of these heads, `*_low` to `*_high`, the number of `heads`, and their range of entropy,
    `h_mid_low` to `h_mid_high`.

    Quartiles split the heads by mean entropy over packs and queries, quartile 0 with the lowest; ties are ordered by
    layer and head. With fewer than four heads, some quartiles are empty and have no row.
    """
    rows = read_parquet(data[0], [*BUDGET, *HEAD, *ERRORS, "h_mid"], "capture")
    entropies = head_means(rows[[*HEAD, "h_mid"]], HEAD)
    entropies["quartile"] = equal_parts(entropies["h_mid"], QUARTILES)
    heads = head_means(rows[[*BUDGET, *HEAD, *ERRORS]], [*BUDGET, *HEAD]).merge(entropies, on=HEAD)
    groups = heads.groupby(["quartile", *BUDGET])
    points = groups.agg(heads=("head", "size"), h_mid_low=("h_mid", "min"), h_mid_high=("h_mid", "max"))
    for name in ERRORS:
        points[name] = groups[name].mean()
        points[f"{name}_low"], points[f"{name}_high"] = groups[name].quantile(0.25), groups[name].quantile(0.75)
    return points.reset_index()


@figure(
    "entropy_gain",
    entropy_gain_points,
    caption=(
        r"Gain of completion per query head, the error of Top-$K$ less that of Top-$K{+}\phi$, against the "
        r"mid-normalised entropy $H_{\mathrm{mid}}$ of the head's attention, for every budget. Above zero, adding the "
        r"residual estimate helps the head."
    ),
)
def draw_entropy_gain(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws one row of panels per backbone and one column per K, on common axes."""
    backbones, panels = list(dict.fromkeys(points["backbone"])), points.groupby(["backbone", *BUDGET])
    budgets = sorted({(k, budget) for _, k, budget in panels.groups})
    figure = Figure(figsize=(TEXT_WIDTH, 1.0 + 1.8 * len(backbones)), layout="constrained")
    grid = figure.subplots(len(backbones), len(budgets), sharex=True, sharey=True, squeeze=False)
    gain = f"gain {GAIN}\n(logarithmic beyond $\\pm${LINEAR})"
    # Narrow panels have smaller titles, and still narrower ones one more line.
    size, space = 8 if len(budgets) < 4 else 7, " " if len(budgets) < 5 else "\n"
    for backbone, axes in zip(backbones, grid, strict=True):
        for budget, axis in zip(budgets, axes, strict=True):
            heads = panels.get_group((backbone, *budget))
            _draw_heads(axis, heads, "gain")
            axis.axhline(0, color=GREY, linewidth=0.7, zorder=0)
            share = f"{(heads['gain'] > 0).mean():.1%} of {len(heads)}{space}heads gain"
            axis.set_title(f"{_at(*budget)}\n{share}", fontsize=size)
        name = plain(spec.backbone_titles.get(backbone, backbone))
        axes[0].set_ylabel(name if len(backbones) > 1 else gain)
    if len(backbones) > 1:
        figure.supylabel(gain, fontsize=9, multialignment="center")
    for axis in grid[-1]:
        axis.set_xlabel(H_MID)
    _make_symlog(grid[0, 0])
    finish(figure, _head_handles(), plain(spec.title))
    return figure


@figure(
    "entropy_heatmap",
    entropy_heatmap_points,
    caption=(
        r"Mid-normalised entropy $H_{\mathrm{mid}}$ of every query head (a), and against it the share of the "
        r"attention mass that the feature maps estimate for the tokens that are not read (b)."
    ),
)
def draw_entropy_heatmap(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws entropy over layers and heads, and the residual's estimated share of the total mass."""
    figure = Figure(figsize=(TEXT_WIDTH, 2.7), layout="constrained")
    entropies, shares = figure.subplots(1, 2)
    grid = points.pivot(index="layer", columns="head", values="h_mid")
    grid = grid.reindex(index=range(grid.index.max() + 1), columns=range(grid.columns.max() + 1))
    low = math.floor(10 * points["h_mid"].min()) / 10
    high = max(math.ceil(10 * points["h_mid"].max()) / 10, low + 0.1)
    image = entropies.imshow(
        grid, cmap="cividis", vmin=low, vmax=high, origin="lower", aspect="auto", interpolation="nearest"
    )
    for side in (entropies.xaxis, entropies.yaxis):
        side.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    entropies.set(xlabel="query head", ylabel="layer (0 next to the input)", title=f"(a) {H_MID} of every head")
    figure.colorbar(image, ax=entropies, format="{x:g}")
    shares.scatter(points["h_mid"], points["residual_share_hat"], **HEADS, **HELPED)
    _draw_medians(shares, points, "residual_share_hat")
    shares.update_datalim([(0, 0)], updatex=False)
    shares.set(xlabel=f"mid-normalised entropy {H_MID}", ylabel=f"estimated {SHARE}")
    shares.yaxis.label.set_size(8)
    shares.set_title(f"(b) residual share, {_at(*_budget(points))}")
    finish(figure, [_head_handle("one head", HELPED), _median_handle()], plain(spec.title))
    return figure


@figure(
    "fixedk_breakdown",
    fixedk_breakdown_points,
    caption=(
        r"Errors of every query head at one budget against its mid-normalised entropy $H_{\mathrm{mid}}$: of Top-$K$ "
        r"(a), of Top-$K{+}\phi$ (b), and the first less the second (c)."
    ),
)
def draw_fixedk_breakdown(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws errors of every head without and with completion on a common axis, and the gain."""
    figure = Figure(figsize=(TEXT_WIDTH, 2.8), layout="constrained")
    without, completed, gains = panels = figure.subplots(1, 3, sharex=True)
    completed.sharey(without)
    gains.axhline(0, color=GREY, linewidth=0.7, zorder=0)
    titles = (f"(a) {E_TOPK}", f"(b) {E_SUB}", f"(c) {GAIN}")
    for axis, name, title in zip(panels, [*ERRORS, "gain"], titles, strict=True):
        _draw_heads(axis, points, name)
        _draw_medians(axis, points, name)
        axis.set(title=title, xlabel=H_MID)
    _make_symlog(without)
    _make_symlog(gains)
    completed.tick_params(labelleft=False)
    without.set_ylabel(f"relative error\n(logarithmic beyond {LINEAR})")
    title = f"{plain(spec.title)}, {_at(*_budget(points))}"
    finish(figure, [*_head_handles(), _median_handle()], title)
    return figure


@figure(
    "quartile_error",
    quartile_error_points,
    caption=(
        r"Errors of Top-$K$ and Top-$K{+}\phi$ at every budget, with the heads in four groups of equal size by their "
        r"mid-normalised entropy $H_{\mathrm{mid}}$, from the most concentrated (a) to the most diffuse (d)."
    ),
)
def draw_quartile_error(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws one panel per quartile of entropy, from low to high: errors over K, and the middle half of the heads."""
    panels = points.groupby("quartile")
    # Tick labels of more than four budgets do not fit into four columns.
    columns = min(len(panels), 4 if points.groupby(BUDGET).ngroups < 5 else 2)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(TEXT_WIDTH, 0.7 + 2.0 * rows), layout="constrained")
    axes = panel_axes(figure, rows, columns, len(panels))
    for letter, axis, (_, quartile) in zip("abcd", axes, panels, strict=False):
        _draw_errors(axis, quartile)
        low, high = quartile["h_mid_low"].iloc[0], quartile["h_mid_high"].iloc[0]
        axis.set_title(f"({letter}) {H_MID} {low:z.2f} to {high:z.2f}", fontsize=8)
        axis.tick_params(labelbottom=True)
    for axis in axes[::columns]:
        axis.set_ylabel(f"relative error\n(logarithmic beyond {LINEAR})")
    _make_symlog(axes[0])
    lines = [
        Line2D([], [], label=f"{name}, mean over heads", **METHODS[error], **MEAN)
        for error, name in zip(ERRORS, (E_TOPK, E_SUB), strict=True)
    ]
    finish(figure, [*lines, Patch(facecolor=GREY, alpha=0.25, label="middle half of the heads")], plain(spec.title))
    return figure


def _draw_errors(axis: Axes, points: pd.DataFrame) -> None:
    # Budgets are evenly spaced: K = 0 has a place, and two budgets with the same K have two.
    places = np.arange(len(points))
    # Bands connect budgets; the band of a single budget needs a width.
    band = places if len(points) > 1 else np.array([-0.3, 0.3])
    for error, look in METHODS.items():
        low, high = (np.resize(points[f"{error}_{side}"], len(band)) for side in ("low", "high"))
        axis.fill_between(band, low, high, color=look["color"], alpha=0.2, linewidth=0)
        for edge in (low, high):
            axis.plot(band, edge, color=look["color"], linestyle=look["linestyle"], linewidth=0.4)
        axis.plot(places, points[error], **look, **MEAN)
    budgets = zip(points["k"], points["budget_percent"], strict=True)
    axis.set_xticks(places, [f"{k:g}\n{budget:g}%" for k, budget in budgets])
    axis.set_xlabel("$K$ and budget")
    axis.margins(x=0.12)


def _draw_heads(axis: Axes, heads: pd.DataFrame, y: str) -> None:
    """Draws one mark per head, with colour and marker by whether completion helps it."""
    helped = heads["gain"] > 0
    for chosen, look in ((helped, HELPED), (~helped, HURT)):
        axis.scatter(heads["h_mid"][chosen], heads[y][chosen], **HEADS, **look)
    axis.margins(y=0.06)
    axis.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))


def _draw_medians(axis: Axes, heads: pd.DataFrame, y: str) -> None:
    medians = heads[["bin_h_mid", f"bin_{y}"]].drop_duplicates().sort_values("bin_h_mid")
    axis.plot(medians["bin_h_mid"], medians[f"bin_{y}"], **MEDIAN)


def _make_symlog(axis: Axes) -> None:
    """Rescales finished panels, including those that share the axis: a linear axis would press most heads onto 0,
    because a few have ten times larger values.
    """
    axis.set_yscale("symlog", linthresh=LINEAR)
    axis.update_datalim([(0, 0)], updatex=False)
    axis.autoscale_view(scalex=False)
    axis.yaxis.set_major_formatter("{x:g}")
    largest = max(map(abs, axis.get_ylim()))
    if largest < LINEAR:
        axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        return
    powers = [LINEAR * 10.0**power for power in range(math.ceil(math.log10(largest / LINEAR)) + 1)]
    labelled = [power * digit for power in powers for digit in ((0.5, 1) if largest < 10 * LINEAR else (1,))]
    between = [power * digit for power in powers for digit in (0.2, 0.4, 0.6, 0.8)]
    axis.yaxis.set_major_locator(FixedLocator([*(-tick for tick in labelled), 0, *labelled]))
    axis.yaxis.set_minor_locator(FixedLocator([*(-tick for tick in between), *between]))
    for panel in axis.get_shared_y_axes().get_siblings(axis):
        panel.tick_params(axis="y", which="minor", length=1.5, width=0.4)


def _at(k: float, budget: float) -> str:
    return f"$K = {k:g}$ ({budget:g}%)"


def _budget(points: pd.DataFrame) -> tuple[float, float]:
    return points["k"].iloc[0], points["budget_percent"].iloc[0]


def _head_handles() -> list[Line2D]:
    return [_head_handle("completion helps the head", HELPED), _head_handle("it does not", HURT)]


def _head_handle(label: str, look: dict[str, Any]) -> Line2D:
    return Line2D([], [], label=label, color=look["c"], marker=look["marker"], markersize=3, linestyle="")


def _median_handle() -> Line2D:
    return Line2D([], [], label=f"median per {BIN} of {H_MID}", **MEDIAN)
