"""The figure of training: curves over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from residual_mass.paper.figures.registry import figure
from residual_mass.paper.figures.style import (
    GREY,
    LOOKS,
    TEXT_WIDTH,
    Look,
    finish,
    label_outer,
    panel_axes,
    plain,
    tick_logarithmic,
)
from residual_mass.study.specs import FigureSpec
from residual_mass.training.columns import RUN

MARKERS = 12
"""Most markers of a line."""


def training_curves_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (length, K, step), in the order of the files: errors and `kl` of each file."""
    frames = [shown_rows(path, length) for path, length in zip(data, spec.maps, strict=True)]
    points = pd.concat(frames, ignore_index=True)
    return points[["length", "rank", "k", "step", "e_topk", "e_sub", "e_nosub", "kl", "corpus"]]


@figure(
    "training_curves",
    training_curves_points,
    caption=(
        r"Errors on held-out text while the feature maps train, by trained length and budget, beside those of "
        r"Top-$K$; and the divergence of the estimated from the true attention weights."
    ),
)
def draw_training_curves(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws one panel per budget and one for the divergence, with a line per trained length over the steps."""
    looks = _looks(points["length"])
    ranks = sorted(set(points["rank"]), reverse=True)
    columns = math.ceil((len(ranks) + 1) / 2)
    figure = Figure(figsize=(TEXT_WIDTH, 4.0), layout="constrained")
    axes = panel_axes(figure, 2, columns, len(ranks) + 1, sharey=False)
    for axis, rank in zip(axes, ranks, strict=False):
        _draw_errors(axis, points[points["rank"] == rank], looks)
    divergence = axes[-1]
    for length, rows in points.groupby("length", sort=False):
        # The divergence is over the whole prefix and the same at every K.
        _draw_line(divergence, rows[rows["rank"] == 0], "step", "kl", looks[length])
    divergence.set_title("divergence from the teacher, nats")
    for axis in axes:
        _logarithmic(axis.yaxis)
        axis.locator_params(axis="x", nbins=4)
        axis.xaxis.set_major_formatter("{x:,.0f}")
    label_outer(axes, "training steps", "relative error")
    divergence.set_ylabel("")
    styles = {
        r"Top-$K{+}\phi$": {"linestyle": "-", "linewidth": 1.2},
        "without subtraction": {"linestyle": "-", "linewidth": 0.5},
        "Top-$K$": {"linestyle": "--", "linewidth": 0.8},
    }
    handles = [Line2D([], [], color=GREY, label=label, **style) for label, style in styles.items()]
    finish(figure, [*_handles(looks), *handles], f"{plain(spec.title)}, held-out text: {points['corpus'].iloc[0]}")
    return figure


def _draw_errors(axis: Axes, points: pd.DataFrame, looks: dict[str, Look]) -> None:
    """Draws the error of completion and, as a thin line, without subtraction, and the level of top-K."""
    for length, rows in points.groupby("length", sort=False):
        colour = looks[length].colour
        axis.axhline(rows["e_topk"].mean(), color=colour, linestyle="--", linewidth=0.8)
        ordered = rows.sort_values("step")
        axis.plot(ordered["step"], ordered["e_nosub"], color=colour, linewidth=0.5)
        _draw_line(axis, rows, "step", "e_sub", looks[length])
    axis.set_title(f"$K$ = {', '.join(f'{k:g}' for k in dict.fromkeys(points['k']))}")


def _draw_line(axis: Axes, points: pd.DataFrame, x: str, y: str, look: Look) -> None:
    ordered = points.sort_values("step")
    every = math.ceil(len(ordered) / MARKERS)
    axis.plot(
        ordered[x], ordered[y], color=look.colour, marker=look.marker, markevery=every, markersize=3, linewidth=1.2
    )


def _looks(names: Iterable[str]) -> dict[str, Look]:
    """Assigns a look to each name; raises ValueError for more names than looks."""
    names = list(dict.fromkeys(names))
    if len(names) > len(LOOKS):
        raise ValueError(
            f"the figure has colours for {len(LOOKS)} lines, but {len(names)} were given: {', '.join(names)}"
        )
    return dict(zip(names, LOOKS, strict=False))


def _handles(looks: dict[str, Look]) -> list[Line2D]:
    return [
        Line2D([], [], color=look.colour, marker=look.marker, markersize=3, linewidth=1.2, label=name.replace("_", " "))
        for name, look in looks.items()
    ]


def _logarithmic(axis: Axis) -> None:
    """Makes an axis of a finished panel logarithmic, with plain numbers also within a single decade."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    tick_logarithmic(axis, low, high)


def shown_rows(path: Path, length: str) -> pd.DataFrame:
    """What figures show of one log: the means over all layers on the first held-out text.

    Two columns are added: the trained `length`, and `rank`: 0 at the largest K. Budgets of different lengths are
    compared by their rank, counted from the top because short sequences have several budgets in which nothing but the
    anchors fits, and their K is 0 alike.
    """
    frame = pd.read_csv(path, dtype={"recipe": str, "variant": str, "layer": str}, keep_default_na=False, na_values="")
    frame = frame[(frame["layer"] == "all") & (frame["corpus"] == frame["corpus"].iloc[0])]
    ranks = {k: rank for rank, k in enumerate(sorted(set(frame["k"]), reverse=True))}
    # Budgets with the same K say the same twice.
    return frame.assign(length=length, rank=frame["k"].map(ranks)).drop_duplicates([*RUN, "step", "k"])
