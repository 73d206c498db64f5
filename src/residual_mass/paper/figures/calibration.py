"""Figures of the residual's calibration: histograms with one panel per captured file (a corpus at a length)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AsinhLocator, MaxNLocator, NullLocator

from residual_mass.paper.figures.points import HEAD, bulk, head_means, rows_at_budget
from residual_mass.paper.figures.style import BLUE, GREY, PERCENT, VERMILLION, figure, finish, panels, plain, signed
from residual_mass.study.specs import FigureSpec

BINS = 40
"""Lower bound for the bins of a histogram, which has not many more."""
PANEL = ["corpus", "length", "k"]


# ---- points ----------------------------------------------------------------------------------------------------------


def logz_calibration_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Computes histograms of log Z_R hat - log Z_R over attention rows: one row per (file, bin), with common bins.

    `share` is the share of the counted rows in [low, high), and `beyond`, in the outermost bins, that of rows outside
    of all bins. Constant in a file: `mean`, `median`, the shares `below` and `above` 0, and how many of the `rows` are
    `left_out` because one of the two logarithms is not finite.
    """
    frames = [rows_at_budget(path, [*PANEL, "log_z_hat", "log_z_true"], spec.budget_percent) for path in data]
    errors = [(frame["log_z_hat"].astype(float) - frame["log_z_true"].astype(float)).to_numpy() for frame in frames]
    errors = [values[np.isfinite(values)] for values in errors]
    edges = _even_edges(errors)
    parts = [
        _histogram(frame, values, edges).assign(rows=len(frame), left_out=len(frame) - len(values))
        for frame, values in zip(frames, errors, strict=True)
    ]
    return pd.concat(parts, ignore_index=True)


def fullsub_nosub_delta_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Computes histograms of delta = e_sub - e_nosub over heads, averaged over packs and queries: one row per (file,
    bin).

    Bins are even on the scale asinh(delta / linear_width), so that they reach the largest values. `share` is the share
    of heads in [low, high). Constant in a file: `mean`, `median`, the shares `below` and `above` 0, and `heads`.

    Raises:
        ValueError: K is 0, where nothing is subtracted.
    """
    frames = [rows_at_budget(path, [*PANEL, *HEAD, "e_sub", "e_nosub"], spec.budget_percent) for path in data]
    for path, frame in zip(data, frames, strict=True):
        if frame["k"].iloc[0] == 0:
            problem = (
                f"K is 0 at {spec.budget_percent:g}%, where nothing is subtracted; set a larger diagnostics.budget"
            )
            raise ValueError(f"{path}: {problem}")
    means = [head_means(frame[[*HEAD, "e_sub", "e_nosub"]], HEAD) for frame in frames]
    deltas = [(mean["e_sub"] - mean["e_nosub"]).to_numpy() for mean in means]
    linear_width, edges = _asinh_edges(np.concatenate(deltas))
    parts = [
        _histogram(frame, values, edges).assign(heads=len(values), linear_width=linear_width)
        for frame, values in zip(frames, deltas, strict=True)
    ]
    return pd.concat(parts, ignore_index=True)


def _histogram(frame: pd.DataFrame, values: np.ndarray, edges: np.ndarray) -> pd.DataFrame:
    """The `share` of a file's values in every bin and, in the outermost bins, `beyond`, that outside of all bins."""
    inside, _ = np.histogram(values, edges)  # the last bin includes its upper edge
    beyond = np.zeros(len(inside))
    beyond[0], beyond[-1] = (values < edges[0]).sum(), (values > edges[-1]).sum()
    count = max(len(values), 1)
    bins = pd.DataFrame({"low": edges[:-1], "high": edges[1:], "share": inside / count, "beyond": beyond / count})
    facts = {name: frame[name].iloc[0] for name in PANEL} | dict.fromkeys(
        ("mean", "median", "below", "above"), math.nan
    )
    if len(values):
        facts |= {"mean": values.mean(), "median": float(np.median(values))}
        facts |= {"below": (values < 0).mean(), "above": (values > 0).mean()}
    return bins.assign(**facts)


def _even_edges(values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns multiples of a round width, including 0, over the values of all panels without those far out."""
    ends = [0.0, *(end for each in values if len(each) for end in bulk(each))]
    low, high = min(ends), max(ends)
    width = 1.0
    if high > low:
        power = 10.0 ** math.floor(math.log10((high - low) / BINS))
        width = max(digit * power for digit in (1, 2, 5) if digit * power <= (high - low) / BINS)
    # At least one bin on either side of 0, for both colours.
    return np.arange(min(math.floor(low / width), -1), max(math.ceil(high / width), 1) + 1) * width


def _asinh_edges(values: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the width of the scale's linear part, which holds half the values, and the edges, including 0."""
    sizes = np.abs(values)
    width = float(np.median(sizes)) or float(sizes.max()) or 1.0
    low, high = (float(np.arcsinh(value / width)) for value in (min(values.min(), 0), max(values.max(), 0)))
    step = (high - low) / BINS or 1.0
    first, last = min(math.floor(low / step), -1), max(math.ceil(high / step), 1)
    edges = width * np.sinh(np.arange(first, last + 1) * step)
    # Rounding must not push the extreme values out of their bins.
    edges[0], edges[-1] = min(edges[0], values.min()), max(edges[-1], values.max())
    return width, edges


# ---- drawings --------------------------------------------------------------------------------------------------------


@figure("logz_calibration", logz_calibration_points)
def logz_calibration(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Estimated against true residual mass of attention rows, $\log\hat Z_{\mathcal{R}}-\log Z_{\mathcal{R}}$, for
    every text and length. Below zero the mass of the tokens that are not read is underestimated.
    """
    figure, axes = _panels(points, r"$\log \hat Z_{\mathcal{R}} - \log Z_{\mathcal{R}}$ (nats)", "share of rows")
    for axis, (_, panel) in zip(axes, points.groupby(PANEL, sort=False), strict=True):
        _draw_bins(axis, panel, ("underestimated", "overestimated"), ("mean",))
        facts, lost = panel.iloc[0], f"{panel['left_out'].iloc[0]:,} of {panel['rows'].iloc[0]:,} rows left out"
        found = f"mean {signed(facts['mean'], '+z.2f')}, {facts['below']:.1%} underestimated"
        if facts["left_out"] == facts["rows"]:
            found = "no row is left"
            axis.text(0.5, 0.5, "no residual\nin any row", transform=axis.transAxes, ha="center", va="center")
        axis.set_title(f"{_name(facts)}\n{found}\n{lost}", fontsize=7)
    axes[0].xaxis.set_major_locator(MaxNLocator(9, integer=True, steps=[1, 2, 5, 10]))
    return finish(figure, plain(spec.title))


@figure("fullsub_nosub_delta", fullsub_nosub_delta_points)
def fullsub_nosub_delta(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Effect of subtraction per query head: $\Delta$ is the error of Top-$K{+}\phi$ less that of the same without
    subtracting the retrieved tokens' share. Below zero subtraction helps.
    """
    delta = r"$\Delta = e_{\mathrm{TopK}{+}\phi} - e_{\mathrm{NoSub}}$ (asinh scale)"
    figure, axes = _panels(points, delta, "share of heads")
    for axis, (_, panel) in zip(axes, points.groupby(PANEL, sort=False), strict=True):
        axis.set_xscale("asinh", linear_width=points["linear_width"].iloc[0])
        _draw_bins(axis, panel, ("subtraction better", "NoSub better"), ("mean", "median"))
        facts = panel.iloc[0]
        means = f"mean {signed(facts['mean'], '+z.4f')}, median {signed(facts['median'], '+z.4f')}"
        shares = f"{facts['below']:.1%} favour subtraction, {facts['above']:.1%} NoSub"
        axis.set_title(f"{_name(facts)}, {facts['heads']:,} heads\n{means}\n{shares}", fontsize=7)
    axes[0].xaxis.set_major_locator(AsinhLocator(points["linear_width"].iloc[0], numticks=6))
    axes[0].xaxis.set_minor_locator(NullLocator())
    axes[0].xaxis.set_major_formatter("{x:g}")
    return finish(figure, plain(spec.title))


def _panels(points: pd.DataFrame, x: str, y: str) -> tuple[Figure, list[Axes]]:
    """A row of panels per corpus and a column per length, or two columns where lengths are many."""
    count, lengths = len(points.groupby(PANEL)), points["length"].nunique()
    figure, axes = panels(1.55, count, lengths if lengths <= 3 else 2, x, y)
    axes[0].set_ylim(0, 1.05 * (points["share"] + points["beyond"]).max() or 1)
    axes[0].yaxis.set_major_formatter(PERCENT)
    return figure, axes


def _draw_bins(axis: Axes, panel: pd.DataFrame, names: tuple[str, str], marks: Sequence[str]) -> None:
    """Draws bars by their side of 0, hatched where they count what lies beyond the bins, and lines at the marks."""
    bars = {"align": "edge", "linewidth": 0}
    for side, colour, name in zip((panel["high"] <= 0, panel["low"] >= 0), (BLUE, VERMILLION), names, strict=True):
        bins = panel[side]
        axis.bar(bins["low"], bins["share"], bins["high"] - bins["low"], color=colour, label=name, **bars)
    far = panel[panel["beyond"] > 0]
    if len(far):
        outlined = {"align": "edge", "facecolor": "none", "edgecolor": GREY, "linewidth": 0.6, "hatch": "//////"}
        label = "beyond the range, in the outermost bin"
        axis.bar(far["low"], far["beyond"], far["high"] - far["low"], far["share"], label=label, **outlined)
    axis.axvline(0, color=GREY, linewidth=0.7)
    low, high = panel["low"].min(), panel["high"].max()
    for name, line in (("mean", "--"), ("median", ":")):
        if name in marks and low <= panel[name].iloc[0] <= high:
            axis.axvline(panel[name].iloc[0], color="black", linestyle=line, linewidth=1, label=name)
    axis.set_xlim(low, high)


def _name(facts: pd.Series) -> str:
    return f"{plain(facts['corpus'])}, {plain(facts['length'])}, $K = {facts['k']:g}$"
