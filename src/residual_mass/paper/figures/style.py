"""What all figures share: how they are registered, their style, panels, logarithmic axes and legends."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from residual_mass.files import atomic_write
from residual_mass.study.figures import kind_of
from residual_mass.study.specs import FigureSpec

Points = Callable[[FigureSpec, Sequence[Path]], pd.DataFrame]
Draw = Callable[[FigureSpec, pd.DataFrame], Figure]

TEXT_WIDTH = 5.5
"""Width of a NeurIPS page in inches."""
DPI = 200
BLUE, VERMILLION, GREY = "#0072B2", "#D55E00", "#555555"
"""Blue and vermillion of Okabe and Ito's palette, and a grey."""
PALETTE = (BLUE, VERMILLION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette."""
MARKERS = "os^DvPX"
"""Beside the colours, so that series differ in print without colour, too."""
FIRST_METHODS = ("topk_phi", "topk", "topk_phi_nosub")
"""Methods in the order of PALETTE: all figures give them the same colours."""
TICKS = {3: (1,), 1.5: (1, 3), 1: (1, 2, 5), 0.3: (1, 1.5, 2, 3, 5, 7)}
"""Leading digits of ticks on a logarithmic axis of more than so many decades; a shorter one is nearly linear."""
LINE, MARK = 116, 9
"""Characters that fit the width, and the room of a mark of the legend in such characters."""
LEGEND_ROW = 0.16
"""Height of a row of the legend in inches."""
SETTINGS = {
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


# ---- figures by label ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registered:
    """How a figure is made: its points from files, the drawing from points."""

    points: Points
    draw: Draw


FIGURES: dict[str, Registered] = {}


def figure(label: str, points: Points) -> Callable[[Draw], Draw]:
    """Registers the function that draws a figure from its points. Its docstring is the caption, with mathematics
    between dollars.
    """

    def register(draw: Draw) -> Draw:
        FIGURES[label] = Registered(points, draw)
        return draw

    return register


def caption_of(label: str, titles: Mapping[str, str]) -> str:
    """What a figure shows and, where `titles` says so, what of. Raises ValueError when the figure is unknown."""
    caption = " ".join((FIGURES[kind_of(label)].draw.__doc__ or "").split())
    return f"{caption} {titles[label]}." if titles.get(label) else caption


# ---- style -----------------------------------------------------------------------------------------------------------


@contextmanager
def paper_style() -> Iterator[None]:
    """Applies SETTINGS to matplotlib's defaults, ignoring a user's own matplotlibrc."""
    with matplotlib.style.context(["default", SETTINGS]):
        yield


def save(figure: Figure, pdf: Path, png: Path) -> None:
    """Writes both files without times or versions in their metadata."""
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every glyph of the PDF's fonts
    with atomic_write(pdf) as temporary:
        figure.savefig(temporary, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})
    with atomic_write(png) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def looks_of(names: Iterable[str], first: Iterable[str] = FIRST_METHODS) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of every name; beyond the palette, the same colours with dashed, dotted and mixed lines.

    Args:
        first: names that have the first looks, whether they are drawn or not.
    """
    series = [
        {"color": colour, "marker": marker, "linestyle": line}
        for line in ("-", "--", ":", "-.")
        for colour, marker in zip(PALETTE, MARKERS, strict=True)
    ]
    return dict(zip(dict.fromkeys([*first, *names]), cycle(series), strict=False))


def plain(text: object) -> str:
    """Escapes `text` for matplotlib, which would read $ as mathematics."""
    return str(text).replace("$", r"\$")


def signed(value: float, form: str) -> str:
    """A number by a format, with a proper minus."""
    return f"{value:{form}}".replace("-", "\N{MINUS SIGN}")


PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.3g}%")
"""Of axes whose values are shares."""


# ---- panels ----------------------------------------------------------------------------------------------------------


def panels(height: float, count: int, columns: int, x: str, y: str, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels of this height, row by row, which share both axes unless `shared` says otherwise.
    The first of a row and those with none below are labelled.
    """
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(TEXT_WIDTH, 0.6 + height * rows))
    axes = figure.subplots(rows, columns, squeeze=False, **{"sharex": True, "sharey": True} | shared).ravel()
    for axis in axes[:count:columns]:
        axis.set_ylabel(y)
    for axis in axes[max(count - columns, 0) : count]:
        axis.tick_params(labelbottom=True)
        axis.set_xlabel(x)
    for axis in axes[count:]:
        axis.remove()
    return figure, list(axes[:count])


def make_logarithmic(*axes: Axis) -> None:
    """Makes axes of finished panels logarithmic, with plain round numbers also within a single decade."""
    for axis in axes:
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        decades = abs(float(np.diff(np.log10(axis.get_view_interval()))[0]))
        digits = next((digits for least, digits in TICKS.items() if decades > least), None)
        axis.set_major_locator(LogLocator(subs=digits) if digits else MaxNLocator(5, steps=[1, 2, 5, 10]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:,.10g}")


def finish(figure: Figure, title: str, others: Sequence[Artist] = (), **legend: Any) -> Figure:
    """Adds the title, and below all panels a legend of what is labelled in any of them, then of `others`."""
    drawn = [zip(*axis.get_legend_handles_labels(), strict=True) for axis in figure.axes]
    labelled = {label: handle for of_axis in drawn for handle, label in of_axis}
    labelled |= {str(handle.get_label()): handle for handle in others}
    longest = max(len(re.sub(r"\\[a-z]+|[{}$_^]", "", label)) for label in labelled)
    columns = min(len(labelled), max(1, LINE // (longest + MARK)))
    placed = {"loc": "outside lower center", "ncols": columns} | legend
    for handle in figure.legend(list(labelled.values()), list(labelled), **placed).legend_handles:
        if isinstance(handle, PathCollection):  # of thousands of small and pale points
            handle.set(alpha=1, sizes=[15])
    if "lower" in placed["loc"]:
        figure.set_figheight(figure.get_figheight() + LEGEND_ROW * math.ceil(len(labelled) / placed["ncols"]))
    figure.suptitle(title)
    return figure
