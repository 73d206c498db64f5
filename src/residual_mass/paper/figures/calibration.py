"""Figures of the residual's calibration: histograms with one panel per captured file (a corpus at a length)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from residual_mass.paper.figures.captured import HEAD, rows_at_budget
from residual_mass.paper.figures.registry import figure
from residual_mass.paper.figures.style import (
    BLUE,
    GREY,
    TEXT_WIDTH,
    VERMILLION,
    finish,
    label_outer,
    panel_axes,
    plain,
    with_minus_sign,
)
from residual_mass.paper.figures.summaries import bulk, head_means
from residual_mass.study.specs import FigureSpec

BINS = 40
"""Lower bound for the bins of a histogram, which has not many more."""
COLUMNS = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3}
"""Columns of a grid by its number of panels, unless these are every corpus at every length."""
TICK_ROOM = 0.4
"""Distance between ticks in inches."""
MARKS = {"mean": "--", "median": ":"}
"""Line styles."""
PANEL = ["corpus", "length", "k"]


def logz_calibration_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Computes histograms of log Z_R hat - log Z_R over attention rows: one row per (file, bin), with common bins.

    `share` is the share of the counted rows in [low, high), and `beyond`, in the outermost bins, that of rows outside
    of all bins. Constant in a file: `mean`, the share `below` 0, and how many of the `rows` are `left_out` because one
    of the two logarithms is not finite.

    Raises:
        ValueError: as `rows_at_budget`.
    """
    frames = _frames(spec, data, ["log_z_hat", "log_z_true"])
    errors = []
    for frame in frames:
        hat, true = (frame[name].to_numpy(float) for name in ("log_z_hat", "log_z_true"))
        both = np.isfinite(hat) & np.isfinite(true)
        errors.append(hat[both] - true[both])
    edges = _even_edges(errors)
    parts = []
    for frame, values in zip(frames, errors, strict=True):
        facts = {"rows": len(frame), "left_out": len(frame) - len(values)}
        parts.append(_histogram(values, edges).assign(**_panel(frame), **_summary(values), **facts))
    return pd.concat(parts, ignore_index=True)


def fullsub_nosub_delta_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Computes histograms of delta = e_sub - e_nosub over heads, averaged over packs and queries: one row per (file,
    bin).

    Bins are even on the scale asinh(delta / linear_width), so that they reach the largest values. `share` is the share
    of heads in [low, high). Constant in a file: `mean`, `median`, the shares `below` and `above` 0, and `heads`.

    Raises:
        ValueError: as `logz_calibration_points`; K is 0, where nothing is subtracted.
    """
    frames = _frames(spec, data, [*HEAD, "e_sub", "e_nosub"])
    for path, frame in zip(data, frames, strict=True):
        if frame["k"].iloc[0] == 0:
            budget = f"{spec.budget_percent:g}%"
            raise ValueError(
                f"{path}: K is 0 at {budget}, where nothing is subtracted; set a larger spec.budget_percent"
            )
    means = [head_means(frame[[*HEAD, "e_sub", "e_nosub"]], HEAD) for frame in frames]
    deltas = [(mean["e_sub"] - mean["e_nosub"]).to_numpy() for mean in means]
    linear_width, edges = _asinh_edges(np.concatenate(deltas))
    parts = []
    for frame, values in zip(frames, deltas, strict=True):
        facts = {"heads": len(values), "linear_width": linear_width}
        parts.append(_histogram(values, edges).assign(**_panel(frame), **_summary(values), **facts))
    return pd.concat(parts, ignore_index=True)


@figure(
    "logz_calibration",
    logz_calibration_points,
    caption=(
        r"Estimated against true residual mass of attention rows, $\log\hat Z_{\mathcal{R}}-\log Z_{\mathcal{R}}$, "
        r"for every text and length. Below zero the mass of the tokens that are not read is underestimated."
    ),
)
def draw_logz_calibration(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws one panel per file on common axes, with colours by the sign of the error."""
    figure, panels = _grid(points)
    for axis, panel in panels:
        facts = panel.iloc[0]
        counted = facts["rows"] - facts["left_out"]
        _draw_bins(axis, panel)
        _draw_marks(axis, panel, ["mean"])
        lines = [
            _name(facts),
            f"mean {_signed(facts['mean'], 2)}, {facts['below']:.1%} underestimated" if counted else "no row is left",
            f"{facts['left_out']:,} of {facts['rows']:,} rows left out",
        ]
        _title(axis, lines)
        if not counted:
            axis.text(
                0.5, 0.5, "no residual\nin any row", transform=axis.transAxes, ha="center", va="center", color=GREY
            )
        axis.xaxis.set_major_locator(MaxNLocator(9, integer=True, steps=[1, 2, 5, 10]))
    handles = [Patch(color=BLUE, label="underestimated"), Patch(color=VERMILLION, label="overestimated")]
    if points["beyond"].gt(0).any():
        label = "beyond the range, in the outermost bin"
        handles.append(Patch(facecolor="none", edgecolor=GREY, linewidth=0.6, hatch="//////", label=label))
    label = r"$\log \hat Z_{\mathcal{R}} - \log Z_{\mathcal{R}}$ (nats)"
    _finish(figure, spec, [*handles, _mark("mean")], label, "share of rows")
    return figure


@figure(
    "fullsub_nosub_delta",
    fullsub_nosub_delta_points,
    caption=(
        r"Effect of subtraction per query head: $\Delta$ is the error of Top-$K{+}\phi$ less that of the same without "
        r"subtracting the retrieved tokens' share. Below zero subtraction helps."
    ),
)
def draw_fullsub_nosub_delta(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws one panel per file on common axes, with colours by the sign of delta."""
    figure, panels = _grid(points)
    width = points["linear_width"].iloc[0]
    room = TICK_ROOM * panels[0][0].get_gridspec().ncols / TEXT_WIDTH
    ticks = _asinh_ticks(points["low"].min(), points["high"].max(), width, room)
    for axis, panel in panels:
        facts = panel.iloc[0]
        axis.set_xscale("function", functions=(lambda x: np.arcsinh(x / width), lambda t: width * np.sinh(t)))
        _draw_bins(axis, panel)
        _draw_marks(axis, panel, ["mean", "median"])
        lines = [
            f"{_name(facts)}, {facts['heads']:,} heads",
            f"mean {_signed(facts['mean'], 4)}, median {_signed(facts['median'], 4)}",
            f"{facts['below']:.1%} favour subtraction, {facts['above']:.1%} NoSub",
        ]
        _title(axis, lines)
        axis.xaxis.set_major_locator(FixedLocator(ticks))
        axis.xaxis.set_major_formatter("{x:g}")
    handles = [Patch(color=BLUE, label="subtraction better"), Patch(color=VERMILLION, label="NoSub better")]
    delta = r"$\Delta = e_{\mathrm{TopK}{+}\phi} - e_{\mathrm{NoSub}}$"
    _finish(figure, spec, [*handles, *map(_mark, MARKS)], f"{delta} (asinh scale)", "share of heads")
    return figure


def _frames(spec: FigureSpec, data: Sequence[Path], columns: Sequence[str]) -> list[pd.DataFrame]:
    """Reads the rows of one budget of every file. Raises ValueError as `rows_at_budget`."""
    return [rows_at_budget(path, [*PANEL, *columns], spec.budget_percent) for path in data]


def _panel(frame: pd.DataFrame) -> dict[str, object]:
    return {name: frame[name].iloc[0] for name in PANEL}


def _summary(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys(("mean", "median", "below", "above"), math.nan)
    below, above = (values < 0).mean(), (values > 0).mean()
    return {"mean": values.mean(), "median": float(np.median(values)), "below": below, "above": above}


def _histogram(values: np.ndarray, edges: np.ndarray) -> pd.DataFrame:
    """Computes the `share` in [low, high) and, in the outermost bins, `beyond`, the share outside of all bins."""
    inside, _ = np.histogram(values, edges)  # the last bin includes its upper edge
    beyond = np.zeros(len(inside))
    beyond[0], beyond[-1] = (values < edges[0]).sum(), (values > edges[-1]).sum()
    count = max(len(values), 1)
    return pd.DataFrame({"low": edges[:-1], "high": edges[1:], "share": inside / count, "beyond": beyond / count})


def _even_edges(values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns multiples of a round width, including 0, over the values of all panels without those far out."""
    low, high = 0.0, 0.0
    for each in values:
        if len(each):
            lowest, highest = bulk(each)
            low, high = min(low, lowest), max(high, highest)
    width = _round_down((high - low) / BINS) if high > low else 1.0
    # At least one bin on either side of 0, for both colours.
    return np.arange(min(math.floor(low / width), -1), max(math.ceil(high / width), 1) + 1) * width


def _round_down(width: float) -> float:
    """Rounds down to a power of ten times 1, 2 or 5."""
    power = 10.0 ** math.floor(math.log10(width))
    return max(digit * power for digit in (1, 2, 5) if digit * power <= width)


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


def _asinh_ticks(low: float, high: float, width: float, room: float) -> list[float]:
    """Returns 0 and round numbers of either sign at least `room` apart, as a share of the scale asinh(x / width)."""
    room *= math.asinh(high / width) - math.asinh(low / width)
    largest = max(high, -low)
    powers = range(math.floor(math.log10(largest)), math.floor(math.log10(width)) - 1, -1)
    places = [0.0]
    ticks = [0.0]
    for tick in (digit * 10.0**power for digit in (1, 3) for power in powers):
        place = math.asinh(tick / width)
        if tick <= largest and all(abs(place - taken) >= room for taken in places):
            places.append(place)
            ticks += [signed for signed in (-tick, tick) if low <= signed <= high]
    return sorted(ticks)


def _grid(points: pd.DataFrame) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """Creates one row of panels per corpus and one column per length, or fills a grid if a combination is missing."""
    panels = {name: panel for name, panel in points.groupby(["corpus", "length"], sort=False, observed=True)}
    corpora, lengths = (list(dict.fromkeys(points[name])) for name in ("corpus", "length"))
    names = list(panels)
    if set(product(corpora, lengths)) == set(names) and len(lengths) <= 3:
        rows, columns, names = len(corpora), len(lengths), list(product(corpora, lengths))
    else:
        columns = COLUMNS[len(names)]
        rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(TEXT_WIDTH, 0.9 + 1.55 * rows), layout="constrained")
    axes = panel_axes(figure, rows, columns, len(names))
    axes[0].set_ylim(0, 1.05 * (points["share"] + points["beyond"]).max() or 1)
    for axis in axes:
        axis.tick_params(labelsize=7)
    return figure, [(axis, panels[name]) for axis, name in zip(axes, names, strict=True)]


def _draw_bins(axis: Axes, panel: pd.DataFrame) -> None:
    for chosen, colour in ((panel["high"] <= 0, BLUE), (panel["low"] >= 0, VERMILLION)):
        bins = panel[chosen]
        place = {"x": bins["low"], "width": bins["high"] - bins["low"], "align": "edge", "linewidth": 0}
        axis.bar(height=bins["share"], color=colour, **place)
    for _, end in panel[panel["beyond"] > 0].iterrows():
        colour = BLUE if end["high"] <= 0 else VERMILLION
        axis.bar(
            end["low"], end["beyond"], end["high"] - end["low"], bottom=end["share"], align="edge",
            facecolor="none", edgecolor=colour, linewidth=0.6, hatch="//////",
        )  # fmt: skip
    axis.set_xlim(panel["low"].min(), panel["high"].max())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    axis.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axis.axvline(0, color=GREY, linewidth=0.7)


def _draw_marks(axis: Axes, panel: pd.DataFrame, names: Sequence[str]) -> None:
    """Draws vertical lines that lie within the bins."""
    for name in names:
        if panel["low"].min() <= (value := panel[name].iloc[0]) <= panel["high"].max():
            axis.axvline(value, color="black", linestyle=MARKS[name], linewidth=1)


def _mark(name: str) -> Line2D:
    return Line2D([], [], color="black", linestyle=MARKS[name], linewidth=1, label=name)


def _name(facts: pd.Series) -> str:
    return f"{plain(facts['corpus'])}, {plain(facts['length'])}, $K = {facts['k']:g}$"


def _signed(value: float, digits: int) -> str:
    """Formats a number with its sign, + for what rounds to zero."""
    return with_minus_sign(f"{value:+z.{digits}f}" if abs(value) < 1000 else f"{value:+.1e}")


def _title(axis: Axes, lines: Sequence[str]) -> None:
    axis.set_title("\n".join(lines), fontsize=7, linespacing=1.3)


def _finish(figure: Figure, spec: FigureSpec, handles: Sequence[Line2D | Patch], x_label: str, y_label: str) -> None:
    """Adds labels to the outer panels, a legend for all, and the title."""
    label_outer(figure.axes, x_label, y_label, size=7.5)
    finish(figure, handles, plain(spec.title), size=7.5)
