"""Figures of captured rows: errors and gains of every head against its entropy, and the residual's calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from residual_mass.files import read_parquet
from residual_mass.paper.figures.style import (
    BLUE,
    GREY,
    PERCENT,
    VERMILLION,
    escape_dollars,
    figure,
    finish,
    make_asinh,
    panels,
)
from residual_mass.paper.titles import text_title
from residual_mass.spec.specs import FigureSpec
from residual_mass.statistics import equal_parts

HEAD = ["layer", "head"]
BUDGET = ["k", "budget_percent"]
FAR_OUT = 3
"""Values this many interquartile ranges outside of the quartiles do not widen an axis (Tukey's outer fences)."""
ERROR_COLUMNS = ["e_topk", "e_sub"]
BIN = 0.1
"""Width in entropy of the bins for medians over heads."""
ENTROPY_GROUPS = 4
LINEAR = 0.1
"""Axes of errors and gains are linear up to about here: a few heads have ten times larger values than most."""

H_MID = r"$H_{\mathrm{mid}}$"
E_TOPK = r"$e_{\mathrm{TopK}}$"
E_SUB = r"$e_{\mathrm{TopK}{+}\phi}$"
GAIN = r"$e_{\mathrm{TopK}} - e_{\mathrm{TopK}{+}\phi}$"
SHARE = r"$\rho_{\mathrm{res}} = \hat Z_{\mathcal{R}}\,/\,(Z_{\mathcal{E}} + \hat Z_{\mathcal{R}})$"

PANEL = ["corpus", "length", "k"]
PANEL_TITLE = "{}, {}, $K = {}$"
EVEN_BINS = 100
ASINH_BINS = 40
"""Maximum number of bins on the even scale, and approximate number on the asinh scale."""


# ---- reading -------------------------------------------------------------------------------------------------------


def captured_rows(path: Path, columns: list[str], budget_percent: float | None = None) -> pd.DataFrame:
    """Returns columns of the captured rows of one budget, or of all. Raises ValueError as `read_parquet` does."""
    if budget_percent is None:
        return read_parquet(path, columns, "capture")
    rows = read_parquet(path, dict.fromkeys([*columns, "budget_percent"]), "capture")
    return rows.loc[rows["budget_percent"] == budget_percent, columns]


def head_means(path: Path, by: list[str], values: list[str], budget_percent: float | None = None) -> pd.DataFrame:
    """Averages captured values in float64 for each combination of `by`, in ascending order."""
    rows = captured_rows(path, [*by, *values], budget_percent)
    doubles = rows.astype(dict.fromkeys(values, float))
    return doubles.groupby(by, as_index=False, observed=True).mean()


def bulk(values: pd.Series) -> tuple[float, float]:
    """Returns the range of the values that are not `FAR_OUT`."""
    lower, upper = np.quantile(values, (0.25, 0.75))
    reach = FAR_OUT * (upper - lower)
    low = max(values.min(), lower - reach)
    high = min(values.max(), upper + reach)
    return float(low), float(high)


# ---- entropy -------------------------------------------------------------------------------------------------------


def _scatter(axis: Axes, heads: pd.DataFrame, y: str) -> None:
    """Draws one mark per head; crosses and circles distinguish heads in print without colour."""
    helps = heads["gain"] > 0
    for chosen, colour, marker, width, label in (
        (helps, BLUE, "o", 0, "the estimate helps the head"), (~helps, VERMILLION, "x", 0.7, "it does not")
    ):  # fmt: skip
        look = {"c": colour, "marker": marker, "linewidths": width}
        axis.scatter("h_mid", y, data=heads[chosen], s=9, alpha=0.6, **look, label=label)
    axis.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))


def _draw_medians(axis: Axes, heads: pd.DataFrame, y: str) -> None:
    """Draws medians over the heads in the same bin of entropy."""
    medians = heads.groupby(heads["h_mid"] // BIN)[["h_mid", y]].median()
    label = f"median per {BIN} of {H_MID}"
    axis.plot("h_mid", y, data=medians, color="black", marker="D", markersize=2.5, linewidth=1, label=label)


def _place(heads: pd.DataFrame) -> str:
    """Returns K and the budget of the rows, for titles."""
    first = heads.iloc[0]
    return f"$K = {first['k']:g}$ ({first['budget_percent']:g}%)"


@figure
def entropy_gain(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Gain per query head, the error of Top-$K$ less that of Top-$K{+}\phi$, for every budget. Above zero, adding the
    residual estimate helps. $H_{\mathrm{mid}}$ is the entropy of the head's attention to all tokens but the first and
    the last ones, and 1 where they have equal weights.
    """
    keys = ["backbone", *BUDGET]
    measures = [*ERROR_COLUMNS, "h_mid"]
    frames = [head_means(path, [*keys, *HEAD], measures) for path in data]
    heads = pd.concat(frames, ignore_index=True)
    heads["gain"] = heads["e_topk"] - heads["e_sub"]
    backbones = heads["backbone"].unique()
    columns = heads.groupby(BUDGET).ngroups
    size = 8 if columns < 4 else 7
    figure, axes = panels(1.8, len(backbones) * columns, columns, H_MID, "")
    for axis, ((backbone, *_), panel) in zip(axes, heads.groupby(keys, sort=False), strict=True):
        _scatter(axis, panel, "gain")
        axis.axhline(0, color=GREY, linewidth=0.7, zorder=0)
        share = f"{(panel['gain'] > 0).mean():.1%} of {len(panel)} heads gain"
        axis.set_title(f"{_place(panel)}\n{share}", fontsize=size)
        if axis.get_subplotspec().is_first_col() and len(backbones) > 1:
            title = spec.backbone_titles.get(backbone, backbone)
            axis.set_ylabel(escape_dollars(title))
    make_asinh(axes[0].yaxis, LINEAR)
    figure.supylabel(f"gain {GAIN} (asinh scale)", fontsize=9)
    return finish(figure, spec)


@figure
def entropy_heatmap(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Mid-normalised entropy $H_{\mathrm{mid}}$ of every query head (a), and against it the share of the attention
    mass that the feature maps estimate for the tokens that are not read (b).
    """
    heads = head_means(data[0], [*BUDGET, *HEAD], ["h_mid", "residual_share_hat"], spec.budget_percent)
    figure, (entropies, shares) = panels(1.9, 2, 2, sharex=False, sharey=False)
    grid = heads.pivot(index="layer", columns="head", values="h_mid")
    image = entropies.imshow(grid, cmap="cividis", origin="lower", aspect="auto")
    for side in (entropies.xaxis, entropies.yaxis):
        side.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    entropies.set(xlabel="query head", ylabel="layer (0 next to the input)", title=f"(a) {H_MID} of every head")
    figure.colorbar(image, ax=entropies)
    shares.scatter("h_mid", "residual_share_hat", data=heads, s=9, alpha=0.6, c=BLUE, linewidths=0, label="one head")
    _draw_medians(shares, heads, "residual_share_hat")
    shares.set_ylim(bottom=0)
    shares.set(xlabel=f"mid-normalised entropy {H_MID}", ylabel=f"estimated {SHARE}")
    shares.set_title(f"(b) residual share, {_place(heads)}")
    return finish(figure, spec)


@figure
def fixedk_breakdown(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Errors of every query head at one budget against its mid-normalised entropy $H_{\mathrm{mid}}$: of Top-$K$ (a),
    of Top-$K{+}\phi$ (b), and the first less the second (c).
    """
    heads = head_means(data[0], [*BUDGET, *HEAD], [*ERROR_COLUMNS, "h_mid"], spec.budget_percent)
    heads["gain"] = heads["e_topk"] - heads["e_sub"]
    figure, axes = panels(2.0, 3, 3, H_MID, "relative error (asinh scale)", sharey=False)
    without, completed, gains = axes
    completed.sharey(without)
    gains.axhline(0, color=GREY, linewidth=0.7, zorder=0)
    titles = f"(a) {E_TOPK}", f"(b) {E_SUB}", f"(c) {GAIN}"
    for axis, name, title in zip(axes, [*ERROR_COLUMNS, "gain"], titles, strict=True):
        _scatter(axis, heads, name)
        _draw_medians(axis, heads, name)
        axis.set_title(title)
    without.set_ylim(bottom=0)
    for axis in (without, gains):
        make_asinh(axis.yaxis, LINEAR)
    completed.tick_params(labelleft=False)
    return finish(figure, spec, f", {_place(heads)}")


@figure
def quartile_error(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Errors of Top-$K$ and Top-$K{+}\phi$ at every budget, with the heads in four groups of equal size by their
    mid-normalised entropy $H_{\mathrm{mid}}$, from the most concentrated (a) to the most diffuse (d).
    """
    heads = head_means(data[0], [*BUDGET, *HEAD], [*ERROR_COLUMNS, "h_mid"])
    heads["quartile"] = heads.groupby(BUDGET)["h_mid"].transform(equal_parts, ENTROPY_GROUPS)
    columns = 4 if heads.groupby(BUDGET).ngroups < 5 else 2  # tick labels of more budgets do not fit
    figure, axes = panels(2.0, ENTROPY_GROUPS, columns, "$K$ and budget", "relative error (asinh scale)")
    for letter, axis, (_, part) in zip("abcd", axes, heads.groupby("quartile"), strict=True):
        _draw_errors_by_budget(axis, part)
        least = part["h_mid"].min()
        largest = part["h_mid"].max()
        axis.set_title(f"({letter}) {H_MID} {least:z.2f} to {largest:z.2f}")
        axis.margins(x=0.12)
    axes[0].set_ylim(bottom=0)
    make_asinh(axes[0].yaxis, LINEAR)
    return finish(figure, spec)


def _draw_errors_by_budget(axis: Axes, heads: pd.DataFrame) -> None:
    """Draws means and middle halves of both errors over the heads at every budget."""
    budgets = heads.groupby(BUDGET)
    places = np.arange(len(budgets))  # evenly spaced: K = 0 has a place, and two budgets with the same K have two
    for error, title, marker, look in (
        ("e_topk", E_TOPK, "s", {"color": VERMILLION, "linestyle": "--"}), ("e_sub", E_SUB, "o", {"color": BLUE})
    ):  # fmt: skip
        low = budgets[error].quantile(0.25)
        high = budgets[error].quantile(0.75)
        label = f"{title}, middle half of the heads"
        axis.fill_between(places, low, high, **look, alpha=0.2, linewidth=0.4, label=label)
        axis.plot(places, budgets[error].mean(), **look, marker=marker, label=f"{title}, mean over heads")
    titles = [f"{k:g}\n{budget:g}%" for k, budget in budgets.groups]
    axis.set_xticks(places, titles)


# ---- calibration ---------------------------------------------------------------------------------------------------


@figure
def logz_calibration(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Estimated against true residual mass of attention rows, $\log\hat Z_{\mathcal{R}}-\log Z_{\mathcal{R}}$, for
    every text and length. Below zero the mass of the tokens that are not read is underestimated.
    """
    frames = [captured_rows(path, [*PANEL, "log_z_hat", "log_z_true"], spec.budget_percent) for path in data]
    rows = pd.concat(frames, ignore_index=True)
    rows["corpus"] = rows["corpus"].map(text_title)
    doubles = rows.astype({"log_z_hat": float, "log_z_true": float})
    rows["value"] = doubles["log_z_hat"] - doubles["log_z_true"]
    sizes = rows.groupby(PANEL).size()
    finite = rows[np.isfinite(rows["value"])].groupby(PANEL, sort=False)["value"]
    if not finite.ngroups:
        raise ValueError(f"figure {spec.label}: no row has a finite estimate of the mass; take the figure out")
    spans = [bulk(values) for _, values in finite]
    low = min(0, *(span[0] for span in spans))
    high = max(0, *(span[1] for span in spans))
    edges = MaxNLocator(EVEN_BINS, steps=[1, 2, 5, 10]).tick_values(low, high).round(9)
    label = r"$\log \hat Z_{\mathcal{R}} - \log Z_{\mathcal{R}}$ (nats)"
    figure, axes = panels(1.55, len(finite), 2, label, "share of rows")
    for axis, (name, values) in zip(axes, finite, strict=True):
        _draw_bins(axis, values, edges, ("underestimated", "overestimated"))
        rows_of_panel = sizes[name]
        left_out = rows_of_panel - len(values)
        below = (values < 0).mean()
        mean = f"mean ${values.mean():+z.2f}$, {below:.1%} underestimated"
        without = f"{left_out:,} of {rows_of_panel:,} rows left out"
        axis.set_title(f"{PANEL_TITLE.format(*name)}\n{mean}\n{without}", fontsize=7)
    axes[0].xaxis.set_major_locator(MaxNLocator(9, integer=True, steps=[1, 2, 5, 10]))
    return finish(figure, spec)


@figure
def fullsub_nosub_delta(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Effect of subtraction per query head: $\Delta$ is the error of Top-$K{+}\phi$ less its error
    without subtraction of the retrieved tokens' share. Below zero subtraction helps.
    """
    keys = [*PANEL, *HEAD]
    frames = [head_means(path, keys, ["e_sub", "e_nosub"], spec.budget_percent) for path in data]
    heads = pd.concat(frames, ignore_index=True)
    if (heads["k"] == 0).any():
        problem = f"K is 0 at {spec.budget_percent:g}%, where nothing is subtracted; set a larger diagnostics.budget"
        raise ValueError(f"figure {spec.label}: {problem}")
    heads["corpus"] = heads["corpus"].map(text_title)
    heads["value"] = heads["e_sub"] - heads["e_nosub"]
    width = heads["value"].abs().median()  # half of the heads are where the scale is about linear
    edges = _asinh_edges(heads["value"], width)
    label = r"$\Delta = e_{\mathrm{TopK}{+}\phi} - e_{\mathrm{NoSub}}$ (asinh scale)"
    of_panel = heads.groupby(PANEL, sort=False)["value"]
    figure, axes = panels(1.55, len(of_panel), 2, label, "share of heads")
    for axis, (name, values) in zip(axes, of_panel, strict=True):
        _draw_bins(axis, values, edges, ("subtraction better", "NoSub better"))
        median = values.median()
        axis.axvline(median, color="black", linestyle=":", linewidth=1, label="median")
        below = (values < 0).mean()
        above = (values > 0).mean()
        size = f"{PANEL_TITLE.format(*name)}, {len(values):,} heads"
        averages = f"mean ${values.mean():+z.4f}$, median ${median:+z.4f}$"
        shares = f"{below:.1%} favour subtraction, {above:.1%} NoSub"
        axis.set_title(f"{size}\n{averages}\n{shares}", fontsize=7)
    make_asinh(axes[0].xaxis, width)
    return finish(figure, spec)


def _asinh_edges(values: pd.Series, width: float) -> np.ndarray:
    """Returns edges of bins that hold all values and 0, evenly spaced on an asinh scale linear up to `width`."""
    least = values.min()
    largest = values.max()
    ends = np.array([min(0, least), max(0, largest)])
    low, high = np.arcsinh(ends / width)
    step = (high - low) / ASINH_BINS
    first = math.floor(low / step)
    last = math.ceil(high / step)
    edges = width * np.sinh(step * np.arange(first, last + 1))
    edges[0] = min(edges[0], least)  # despite rounding
    edges[-1] = max(edges[-1], largest)
    return edges


def _draw_bins(axis: Axes, values: pd.Series, edges: np.ndarray, names: tuple[str, str]) -> None:
    """Draws the shares of values by bin, coloured by their side of 0, which is an edge, and the mean. Values beyond all
    bins are hatched in the outermost bins.
    """
    counts, _ = np.histogram(values, edges)
    shares = counts / len(values)
    zero = np.searchsorted(edges, 0)
    axis.stairs(shares[:zero], edges[: zero + 1], fill=True, color=BLUE, label=names[0])
    axis.stairs(shares[zero:], edges[zero:], fill=True, color=VERMILLION, label=names[1])
    look = {"facecolor": "none", "edgecolor": GREY, "linewidth": 0.6, "hatch": "//////"}
    below = (values < edges[0]).mean()
    above = (values > edges[-1]).mean()
    for low, bin, share in ((shares[0], edges[:2], below), (shares[-1], edges[-2:], above)):
        if share:
            label = "beyond the range, in the outermost bin"
            axis.stairs([low + share], bin, baseline=low, fill=True, **look, label=label)
    axis.axvline(0, color=GREY, linewidth=0.7)
    axis.axvline(values.mean(), color="black", linestyle="--", linewidth=1, label="mean")
    axis.set_xlim(edges[0], edges[-1])
    axis.yaxis.set_major_formatter(PERCENT)
