"""Figures of accounting for every head: errors and gains against entropy, at one K and over several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AsinhLocator, MaxNLocator, NullLocator

from residual_mass.files import read_parquet
from residual_mass.paper.figures.points import BUDGET, HEAD, equal_parts, head_means, rows_at_budget
from residual_mass.paper.figures.style import BLUE, GREY, TEXT_WIDTH, VERMILLION, figure, finish, panels, plain
from residual_mass.study.specs import FigureSpec

ERRORS = ["e_topk", "e_sub"]
BIN = 0.1
"""Width in entropy of the bins for medians over heads."""
QUARTILES = 4
LINEAR = 0.1
"""Axes of errors and gains are linear up to about here and logarithmic beyond."""

H_MID, E_TOPK, E_SUB = r"$H_{\mathrm{mid}}$", r"$e_{\mathrm{TopK}}$", r"$e_{\mathrm{TopK}{+}\phi}$"
GAIN = r"$e_{\mathrm{TopK}} - e_{\mathrm{TopK}{+}\phi}$"
SHARE = r"$\rho_{\mathrm{res}} = \hat Z_{\mathcal{R}}\,/\,(Z_{\mathcal{E}} + \hat Z_{\mathcal{R}})$"


def _head_errors(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Averages errors, entropy and gain over packs and queries, for each combination of `by`."""
    heads = head_means(rows[[*by, *ERRORS, "h_mid"]], by)
    return heads.assign(gain=heads["e_topk"] - heads["e_sub"])


def _with_medians(heads: pd.DataFrame, values: Sequence[str]) -> pd.DataFrame:
    """Adds `bin_*`: medians over the heads in the same bin of entropy."""
    medians = heads[["h_mid", *values]].groupby(heads["h_mid"] // BIN).transform("median")
    return heads.join(medians.add_prefix("bin_"))


def _scatter(axis: Axes, heads: pd.DataFrame, y: str) -> None:
    """Draws one mark per head; crosses and circles distinguish heads in print without colour."""
    helps = heads["gain"] > 0
    for chosen, colour, marker, label in (
        (helps, BLUE, "o", "completion helps the head"), (~helps, VERMILLION, "x", "it does not")
    ):  # fmt: skip
        width = 0 if marker == "o" else 0.7
        axis.scatter(
            "h_mid", y, s=9, c=colour, alpha=0.6, marker=marker, linewidths=width, data=heads[chosen], label=label
        )
    axis.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))


def _draw_medians(axis: Axes, heads: pd.DataFrame, y: str) -> None:
    medians = heads[["bin_h_mid", f"bin_{y}"]].drop_duplicates().sort_values("bin_h_mid")
    label = f"median per {BIN} of {H_MID}"
    axis.plot(
        "bin_h_mid", f"bin_{y}", data=medians, color="black", marker="D", markersize=2.5, linewidth=1, label=label
    )


def _stretch(axis: Axes) -> None:
    """A linear axis would press most heads onto 0, because a few have ten times larger values."""
    axis.set_yscale("asinh", linear_width=LINEAR)
    axis.yaxis.set_major_locator(AsinhLocator(LINEAR, numticks=7, base=0))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")


def _at(points: pd.DataFrame) -> str:
    return f"$K = {points['k'].iloc[0]:g}$ ({points['budget_percent'].iloc[0]:g}%)"


def entropy_gain_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (backbone, K, layer, query head), in the order of the files: means over packs and queries of
    `h_mid` and of `gain`, e_topk - e_sub.
    """
    frames = [read_parquet(path, ["backbone", *BUDGET, *HEAD, *ERRORS, "h_mid"], "capture") for path in data]
    heads = [_head_errors(frame, ["backbone", *BUDGET, *HEAD]) for frame in frames]
    return pd.concat(heads, ignore_index=True).drop(columns=ERRORS)


@figure("entropy_gain", entropy_gain_points)
def entropy_gain(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Gain of completion per query head, the error of Top-$K$ less that of Top-$K{+}\phi$, against the mid-normalised
    entropy $H_{\mathrm{mid}}$ of the head's attention, for every budget. Above zero, adding the residual estimate helps
    the head.
    """
    backbones, columns = points["backbone"].drop_duplicates(), len(points.groupby(BUDGET))
    figure, axes = panels(1.8, len(backbones) * columns, columns, H_MID, "")
    ordered = points.sort_values("backbone", key=lambda names: names.map(list(backbones).index), kind="stable")
    for axis, ((backbone, *_), heads) in zip(axes, ordered.groupby(["backbone", *BUDGET], sort=False), strict=True):
        _scatter(axis, heads, "gain")
        axis.axhline(0, color=GREY, linewidth=0.7, zorder=0)
        space = " " if columns < 5 else "\n"
        share = f"{(heads['gain'] > 0).mean():.1%} of {len(heads)}{space}heads gain"
        axis.set_title(f"{_at(heads)}\n{share}", fontsize=8 if columns < 4 else 7)
        if axis.get_subplotspec().is_first_col() and len(backbones) > 1:
            axis.set_ylabel(plain(spec.backbone_titles.get(backbone, backbone)))
    _stretch(axes[0])
    figure.supylabel(f"gain {GAIN} (asinh scale)", fontsize=9)
    return finish(figure, plain(spec.title))


def entropy_heatmap_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (layer, query head) at the spec's budget: means over packs and queries of `h_mid` and
    `residual_share_hat`, and their medians over the heads in the same bin of entropy, `bin_*`.
    """
    rows = rows_at_budget(data[0], [*BUDGET, *HEAD, "h_mid", "residual_share_hat"], spec.budget_percent)
    return _with_medians(head_means(rows, [*BUDGET, *HEAD]), ["residual_share_hat"])


@figure("entropy_heatmap", entropy_heatmap_points)
def entropy_heatmap(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Mid-normalised entropy $H_{\mathrm{mid}}$ of every query head (a), and against it the share of the attention
    mass that the feature maps estimate for the tokens that are not read (b).
    """
    figure = Figure(figsize=(TEXT_WIDTH, 2.5))
    entropies, shares = figure.subplots(1, 2)
    grid = points.pivot(index="layer", columns="head", values="h_mid")
    grid = grid.reindex(index=range(grid.index.max() + 1), columns=range(grid.columns.max() + 1))
    low = math.floor(10 * points["h_mid"].min()) / 10
    high = max(math.ceil(10 * points["h_mid"].max()) / 10, low + 0.1)
    image = entropies.imshow(grid, cmap="cividis", vmin=low, vmax=high, origin="lower", aspect="auto")
    for side in (entropies.xaxis, entropies.yaxis):
        side.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    entropies.set(xlabel="query head", ylabel="layer (0 next to the input)", title=f"(a) {H_MID} of every head")
    figure.colorbar(image, ax=entropies, format="{x:g}")
    shares.scatter("h_mid", "residual_share_hat", data=points, s=9, alpha=0.6, c=BLUE, linewidths=0, label="one head")
    _draw_medians(shares, points, "residual_share_hat")
    shares.set_ylim(bottom=0)
    shares.set(xlabel=f"mid-normalised entropy {H_MID}", ylabel=f"estimated {SHARE}")
    shares.set_title(f"(b) residual share, {_at(points)}")
    return finish(figure, plain(spec.title))


def fixedk_breakdown_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (layer, query head) at the spec's budget: means over packs and queries of `h_mid`, `e_topk`,
    `e_sub` and `gain`, and their medians over the heads in the same bin of entropy, `bin_*`.
    """
    rows = rows_at_budget(data[0], [*BUDGET, *HEAD, *ERRORS, "h_mid"], spec.budget_percent)
    return _with_medians(_head_errors(rows, [*BUDGET, *HEAD]), [*ERRORS, "gain"])


@figure("fixedk_breakdown", fixedk_breakdown_points)
def fixedk_breakdown(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Errors of every query head at one budget against its mid-normalised entropy $H_{\mathrm{mid}}$: of Top-$K$ (a),
    of Top-$K{+}\phi$ (b), and the first less the second (c).
    """
    figure = Figure(figsize=(TEXT_WIDTH, 2.6))
    without, completed, gains = axes = figure.subplots(1, 3, sharex=True)
    completed.sharey(without)
    gains.axhline(0, color=GREY, linewidth=0.7, zorder=0)
    for axis, name, title in zip(
        axes, [*ERRORS, "gain"], (f"(a) {E_TOPK}", f"(b) {E_SUB}", f"(c) {GAIN}"), strict=True
    ):
        _scatter(axis, points, name)
        _draw_medians(axis, points, name)
        axis.set(title=title, xlabel=H_MID)
    without.set_ylim(bottom=0)
    for axis in (without, gains):
        _stretch(axis)
    completed.tick_params(labelleft=False)
    without.set_ylabel("relative error (asinh scale)")
    return finish(figure, f"{plain(spec.title)}, {_at(points)}")


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


@figure("quartile_error", quartile_error_points)
def quartile_error(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Errors of Top-$K$ and Top-$K{+}\phi$ at every budget, with the heads in four groups of equal size by their
    mid-normalised entropy $H_{\mathrm{mid}}$, from the most concentrated (a) to the most diffuse (d).
    """
    quartiles, budgets = points.groupby("quartile"), points.groupby(BUDGET).ngroups
    # Tick labels of more than four budgets do not fit into four columns.
    columns = 4 if budgets < 5 else 2
    figure, axes = panels(2.0, len(quartiles), columns, "$K$ and budget", "relative error (asinh scale)")
    for letter, axis, (_, part) in zip("abcd", axes, quartiles, strict=False):
        places = np.arange(len(part))  # evenly spaced: K = 0 has a place, and two budgets with the same K have two
        for error, title, colour, marker, line in (
            ("e_topk", E_TOPK, VERMILLION, "s", "--"), ("e_sub", E_SUB, BLUE, "o", "-")
        ):  # fmt: skip
            low, high = part[f"{error}_low"], part[f"{error}_high"]
            label = f"{title}, middle half of the heads"
            axis.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0.4, linestyle=line, label=label)
            axis.plot(places, part[error], marker, color=colour, linestyle=line, label=f"{title}, mean over heads")
        axis.set_xticks(
            places, [f"{k:g}\n{budget:g}%" for k, budget in zip(*(part[name] for name in BUDGET), strict=True)]
        )
        axis.set_title(f"({letter}) {H_MID} {part['h_mid_low'].iloc[0]:z.2f} to {part['h_mid_high'].iloc[0]:z.2f}")
        axis.margins(x=0.12)
    axes[0].set_ylim(bottom=0)
    _stretch(axes[0])
    return finish(figure, plain(spec.title))
