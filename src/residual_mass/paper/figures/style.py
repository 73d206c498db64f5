"""What all figures share: their registry, style, panels, scales and legend."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib import cycler
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import AsinhLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from residual_mass.files import atomic_write
from residual_mass.metrics import KL
from residual_mass.spec.figures import kind_of
from residual_mass.spec.specs import FigureSpec

Draw = Callable[[FigureSpec, Sequence[Path]], Figure]

TEXT_WIDTH = 5.5
"""Width of a NeurIPS page in inches."""
DPI = 200
BLUE = "#0072B2"
VERMILLION = "#D55E00"
GREY = "#555555"
DISTANCE = f"KL(full \N{DOUBLE VERTICAL LINE} method), {KL.unit}"
PALETTE = (BLUE, VERMILLION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette."""
LINES = cycler(linestyle=["-", "--", ":", "-."])
COLOURS_AND_MARKERS = cycler(color=PALETTE) + cycler(marker=list("os^DvPX"))
LOOKS = LINES * COLOURS_AND_MARKERS
"""Looks of series in order. Markers and lines distinguish them in print without colour."""
FIRST_METHODS = ("topk_phi", "topk", "topk_phi_nosub")
"""Methods with the first looks: all figures give them the same colours."""
TICKS = {3: (1,), 1.5: (1, 3), 1: (1, 2, 5), 0.3: (1, 1.5, 2, 3, 5, 7)}
"""Leading digits of ticks on a logarithmic axis of more than this many decades; shorter axes have even ticks."""
STYLE_SETTINGS = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 9,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "figure.titlesize": 9,
    "figure.constrained_layout.use": True,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "pdf.fonttype": 42,
    "savefig.dpi": DPI,
}
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.3g}%")
"""Tick format of axes whose values are shares."""


# ---- registry and style ----------------------------------------------------------------------------------------------

DRAWINGS: dict[str, Draw] = {}


def figure(draw: Draw) -> Draw:
    """Registers a function that draws a figure from its files, under its name. Its docstring is the caption, with
    mathematics between dollars. Raises ValueError if the name is registered already.
    """
    if draw.__name__ in DRAWINGS:
        modules = f"{DRAWINGS[draw.__name__].__module__} and {draw.__module__}"
        raise ValueError(f"figure {draw.__name__} is registered in {modules}; give one of them another name")
    DRAWINGS[draw.__name__] = draw
    return draw


def caption_of(label: str, titles: Mapping[str, str]) -> str:
    """Returns the caption of a figure, ending with its title in `titles`; raises ValueError for an unknown figure."""
    caption = " ".join((DRAWINGS[kind_of(label)].__doc__ or "").split())
    return f"{caption} {titles[label]}." if titles.get(label) else caption


def paper_style() -> AbstractContextManager[None]:
    """Applies STYLE_SETTINGS to matplotlib's defaults, ignoring a user's own matplotlibrc."""
    return matplotlib.style.context(["default", STYLE_SETTINGS])


def save(figure: Figure, pdf: Path, png: Path) -> None:
    """Writes both files without times or versions in their metadata."""
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every glyph of the PDF's fonts
    with atomic_write(pdf) as temporary:
        figure.savefig(temporary, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})
    with atomic_write(png) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def looks_of(names: Iterable[str], first: Iterable[str] = FIRST_METHODS) -> dict[str, dict[str, Any]]:
    """Returns the colour, marker and line of every name.

    Args:
        first: names that have the first looks, whether they are drawn or not.
    """
    distinct = dict.fromkeys([*first, *names])
    return dict(zip(distinct, LOOKS(), strict=False))


# ---- panels ----------------------------------------------------------------------------------------------------------


def panels(height: float, count: int, columns: int, x: str = "", y: str = "", **grid: Any) -> tuple[Figure, list[Axes]]:
    """Returns a figure with `count` panels of this height, row by row. They share both axes unless `grid`, arguments of
    `Figure.subplots`, says otherwise. The first panel of a row and the lowest of a column are labelled.
    """
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(TEXT_WIDTH, 0.6 + height * rows))
    grid = {"sharex": True, "sharey": True} | grid
    axes = figure.subplots(rows, columns, squeeze=False, **grid).ravel()
    for axis in axes[:count:columns]:
        axis.set_ylabel(y)
    for axis in axes[count - columns : count]:
        axis.tick_params(labelbottom=True)
        axis.set_xlabel(x)
    for axis in axes[count:]:
        axis.remove()
    return figure, list(axes[:count])


def against_budget(rows: pd.DataFrame, label: str, looks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draws positive values of `value` against `budget_percent`, with a band from `ci_low` to `ci_high` where rows have
    them: a panel with the title `place` for each `length` and `text`, a line with a look and a `title` for each `arm`.
    """
    rows = rows[rows["value"] > 0]
    of_panel = rows.groupby(["length", "text", "place"], sort=False)
    figure, axes = panels(1.7, len(of_panel), rows["text"].nunique(), "budget, % of the prefix", label)
    for axis, ((*_, place), panel) in zip(axes, of_panel, strict=True):
        for (arm, title), line in panel.groupby(["arm", "title"], sort=False):
            line = line.sort_values("budget_percent")
            look = looks[arm]
            if "ci_low" in line:
                band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
                axis.fill_between("budget_percent", "ci_low", "ci_high", data=line, **band)
            axis.plot("budget_percent", "value", data=line, **look, label=title)
        axis.set_title(place)
        axis.grid(axis="y")
    make_logarithmic(axes[0].xaxis, axes[0].yaxis)
    axes[0].set_xticks(sorted(set(rows["budget_percent"])))
    return figure


def make_logarithmic(*axes: Axis) -> None:
    """Makes axes of finished panels logarithmic, with plain round numbers also within a single decade."""
    for axis in axes:
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        decades = np.ptp(np.log10(axis.get_view_interval()))
        digits = next((digits for least, digits in TICKS.items() if decades > least), None)
        even = MaxNLocator(5, steps=[1, 2, 5, 10])
        axis.set_major_locator(LogLocator(subs=digits) if digits else even)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:,.10g}")


def make_asinh(axis: Axis, linear_width: float) -> None:
    """Makes an axis linear up to about `linear_width` and logarithmic beyond."""
    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    set_scale("asinh", linear_width=linear_width)
    axis.set_major_locator(AsinhLocator(linear_width, numticks=7, base=0))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def escape_dollars(text: str) -> str:
    """Escapes a user's text for matplotlib, which would read $ as mathematics."""
    return text.replace("$", r"\$")


def finish(figure: Figure, spec: FigureSpec, more: str = "", **legend: Any) -> Figure:
    """Adds the spec's title, followed by `more`, and below the panels a legend of all their labels, in as few rows as
    fit.
    """
    figure.suptitle(escape_dollars(spec.title) + more)
    drawn = [zip(*axis.get_legend_handles_labels(), strict=True) for axis in figure.axes]
    handles = {label: handle for of_axis in drawn for handle, label in of_axis}
    for rows in range(1, len(handles) + 1):
        columns = math.ceil(len(handles) / rows)
        shown = figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, **legend)
        size = shown.get_window_extent()
        if size.width <= figure.bbox.width or columns == 1:
            break
        shown.remove()
    figure.set_figheight(figure.get_figheight() + size.height / figure.dpi)
    return figure
