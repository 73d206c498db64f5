"""Figure of attention errors of every method, against the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from residual_mass.files import read_csv
from residual_mass.methods import TopK, method_named
from residual_mass.metrics import RELATIVE_ERROR
from residual_mass.paper.figures.registry import figure
from residual_mass.paper.figures.style import (
    GREY,
    TEXT_WIDTH,
    Look,
    label_outer,
    looks_of,
    make_x_logarithmic,
    panel_axes,
    plain,
    tick_logarithmic,
)
from residual_mass.paper.titles import METHOD_TITLES, TOPK, corpus_title
from residual_mass.study.specs import FigureSpec

NEEDED = ("method", "corpus", "length", "budget_percent", "error", "packs")
COLUMNS = 2
"""Panels side by side, each with the names of its lines."""
GAP = 0.068
"""Least distance of two names, where the height of a panel is 1."""
NAMES_AT = 1.12
"""Where names begin, where the width of a panel is 1."""


def error_by_k_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (length, corpus, method, budget) in the order of the files and of `spec.texts`: `error`. Only
    methods that read what exact top-K reads are shown.

    Raises:
        ValueError: a file has no row of a corpus.
    """
    parts = []
    for path in data:
        frame = pd.DataFrame(read_csv(path, NEEDED, "residual-errors"))
        frame = frame[[method_named(name).selector == TopK() for name in frame["method"]]]
        for corpus in spec.texts:
            parts.append(rows := frame[frame["corpus"] == corpus])
            if rows.empty:
                raise ValueError(f"{path}: has no rows of {corpus}; run the residual-errors stage with it")
    points = pd.concat(parts, ignore_index=True)
    for name in ("budget_percent", "error", "packs"):
        points[name] = pd.to_numeric(points[name])
    return points


@figure(
    "error_by_k",
    error_by_k_points,
    caption=(
        r"Relative $\ell_1$ error of the attention output against full attention, averaged over heads and queries, by "
        r"method and budget; a panel for each length and text. All methods read the same tokens, the samples 32 more."
    ),
)
def draw_error_by_k(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws a panel per length and corpus with a line per method, which its name ends."""
    panels = [panel for _, panel in points.groupby(["length", "corpus"], sort=False)]
    looks = looks_of(points["method"])
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(TEXT_WIDTH, 0.5 + 2.15 * rows), layout="constrained")
    axes = panel_axes(figure, rows, COLUMNS, len(panels))
    axes[0].set_yscale("log")
    for axis, panel in zip(axes, panels, strict=True):
        _draw_lines(axis, panel, looks)
    tick_logarithmic(axes[0].yaxis, *axes[0].get_ylim())
    budgets = sorted(set(points["budget_percent"]))
    make_x_logarithmic(axes[0], budgets[0], budgets[-1])
    for axis, panel in zip(axes, panels, strict=True):
        axis.set_xticks(budgets)
        axis.tick_params(labelsize=7)
        _name_lines(axis, panel[panel["budget_percent"] == budgets[-1]], looks)
    label_outer(axes, "budget, % of the prefix", f"{RELATIVE_ERROR.title} of attention", size=8)
    figure.suptitle(f"{plain(spec.title)}: errors of all heads, with what is added to {TOPK}", fontsize=9)
    return figure


def _draw_lines(axis: Axes, panel: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    for method, line in panel.groupby("method", sort=False):
        look, line = looks[method], line.sort_values("budget_percent")
        style = {"color": look.colour, "marker": look.marker, "linestyle": look.line}
        axis.plot(line["budget_percent"], line["error"], **style, markersize=2.5, linewidth=1)
    first = panel.iloc[0]
    axis.set_title(f"{plain(corpus_title(first['corpus']))}, {first['length']}: {first['packs']} texts", fontsize=8)
    axis.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.5)


def _name_lines(axis: Axes, ends: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    """Writes the name of each line to the right of its end."""
    ends = ends.sort_values("error")
    to_share = axis.transScale + axis.transLimits
    heights = [to_share.transform((x, y))[1] for x, y in zip(ends["budget_percent"], ends["error"], strict=True)]
    for row, height in zip(ends.itertuples(), spread(heights, GAP, 0, 1), strict=True):
        colour = looks[row.method].colour
        axis.annotate(
            METHOD_TITLES.get(row.method, row.method).removeprefix(TOPK) or TOPK,
            (row.budget_percent, row.error),
            (NAMES_AT, height),
            textcoords="axes fraction",
            va="center",
            fontsize=6,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.4, "relpos": (0, 0.5)},
        )


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves ascending places apart to at least `gap`, within `low` to `high` where there is room."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + gap if places else low))
    for number in reversed(range(len(places))):
        bound = high if number == len(places) - 1 else places[number + 1] - gap
        places[number] = min(places[number], bound)
    return places
