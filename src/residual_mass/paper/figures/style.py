"""Style of all figures: NeurIPS text width, Times-like type, colour-blind safe colours, reproducible bytes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from residual_mass.files import replacing

TEXT_WIDTH = 5.5
"""Width of a NeurIPS page in inches."""
DPI = 200
BLUE, VERMILLION, GREY = "#0072B2", "#D55E00", "#555555"
"""Blue and vermillion of Okabe and Ito's palette, and a grey."""
ROUND = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))
"""Leading digits of ticks on a logarithmic axis, from wide ranges to narrow ones."""

SETTINGS = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "pdf.fonttype": 42,
    "savefig.dpi": DPI,
}


class Look(NamedTuple):
    """Colour, marker and line style of a series."""

    colour: str
    marker: str = ""
    line: str = "-"


LOOKS = (
    Look(BLUE, "o"),
    Look(VERMILLION, "s"),
    Look("#009E73", "^"),
    Look("#CC79A7", "D"),
    Look("#E69F00", "v"),
    Look("#56B4E9", "P"),
    Look("#000000", "X"),
)
"""Series of a figure in Okabe and Ito's palette; markers distinguish them in print without colour."""

FIRST_METHODS = ("topk_phi", "topk", "topk_phi_nosub")
"""Methods in the order of LOOKS: all figures give them the same colours."""


def looks_of(methods: Iterable[str], first: Iterable[str] = FIRST_METHODS) -> dict[str, Look]:
    """A look for each method; beyond the palette, the same colours with dashed, dotted and mixed lines.

    Args:
        first: methods that have the first looks, whether they are drawn or not.
    """
    series = [look._replace(line=line) for line in ("-", "--", ":", "-.") for look in LOOKS]
    return dict(zip(dict.fromkeys([*first, *methods]), cycle(series), strict=False))


@contextmanager
def paper_style() -> Iterator[None]:
    """Applies SETTINGS to matplotlib's defaults, ignoring a user's own matplotlibrc."""
    with matplotlib.style.context(["default", SETTINGS]):
        yield


def save(figure: Figure, pdf: Path, png: Path) -> None:
    """Writes both files without times or versions in their metadata."""
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every glyph of the PDF's fonts
    with replacing(pdf) as temporary:
        figure.savefig(temporary, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})
    with replacing(png) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def plain(text: object) -> str:
    """Escapes `text` for matplotlib, which would read $ as mathematics."""
    return str(text).replace("$", r"\$")


def with_minus_sign(number: str) -> str:
    """Replaces the hyphen of a number by a minus sign."""
    return number.replace("-", "\N{MINUS SIGN}")


def panel_axes(figure: Figure, rows: int, columns: int, count: int, sharey: bool = True) -> list[Axes]:
    """Creates the axes of `count` panels with a common x axis, row by row; the last row may be incomplete. Panels with
    none below have tick labels.
    """
    axes = figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False).ravel()
    for axis in axes[count:]:
        axis.remove()
    for axis in axes[max(count - columns, 0) : count]:
        axis.tick_params(labelbottom=True)
    return list(axes[:count])


def label_outer(axes: Sequence[Axes], x: str, y: str, size: float | None = None) -> None:
    """Labels the x axis of panels with tick labels below, and the y axis of those in the first column."""
    for axis in axes:
        if axis.xaxis.get_tick_params()["labelbottom"]:
            axis.set_xlabel(x, fontsize=size)
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(y, fontsize=size)


def finish(figure: Figure, handles: Sequence[Artist], title: str, size: float = 8, columns: int | None = None) -> None:
    """Adds the title, and a legend for all panels with so many columns, else in one row, or two if it is long."""
    columns = columns or (len(handles) if len(handles) <= 6 else math.ceil(len(handles) / 2))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=size, frameon=False)
    figure.suptitle(title, fontsize=9)


def make_x_logarithmic(axes: Axes, low: float, high: float) -> None:
    """Makes the x axis logarithmic from `low` to `high`, with a small margin."""
    axes.set_xscale("log")
    axes.set_xlim(low / 1.1, high * 1.1)
    tick_logarithmic(axes.xaxis, low, high)


def tick_logarithmic(axis: Axis, low: float, high: float) -> None:
    """Labels a logarithmic axis with plain round numbers, also within a single decade."""
    axis.set_major_locator(FixedLocator(round_ticks(low, high)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def round_ticks(low: float, high: float) -> list[float]:
    """Returns as few round numbers within the range as show its scale, at least three if possible."""
    for digits in ROUND:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [digit * 10**power for power in powers for digit in digits if low <= digit * 10**power <= high]
        if len(ticks) >= 3:
            return ticks
    # Such a short range is nearly linear.
    return [float(tick) for tick in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= tick <= high]
