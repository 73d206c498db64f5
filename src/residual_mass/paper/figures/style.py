"""Look of all figures: NeurIPS text width, Times-like type, colour-blind safe colours, reproducible bytes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from residual_mass.files import replacing

TEXT_WIDTH = 5.5
"""Of a NeurIPS page, in inches."""
DPI = 200
BLUE, VERMILLION, GREY = "#0072B2", "#D55E00", "#555555"
"""From the palette of Okabe and Ito."""
ROUND = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))
"""Leading digits of the ticks of a logarithmic axis, from wide ranges to narrow ones."""

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


@contextmanager
def paper_style() -> Iterator[None]:
    """Our settings on matplotlib's defaults, so that a user's own matplotlibrc changes nothing."""
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
    """`text` as a label that matplotlib prints as it stands."""
    return str(text).replace("$", r"\$")


def with_minus_sign(number: str) -> str:
    """A number with a minus sign in place of the hyphen."""
    return number.replace("-", "\N{MINUS SIGN}")


def finish(figure: Figure, handles: Sequence[Artist], title: str, size: float = 8) -> None:
    """One legend for all panels, in two rows where one is too long, and the title."""
    columns = len(handles) if len(handles) <= 6 else math.ceil(len(handles) / 2)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=size, frameon=False)
    figure.suptitle(title, fontsize=9)


def make_x_logarithmic(axes: Axes, low: float, high: float) -> None:
    """From `low` to `high`, with a little room on either side."""
    axes.set_xscale("log")
    axes.set_xlim(low / 1.1, high * 1.1)
    tick_logarithmic(axes.xaxis, low, high)


def tick_logarithmic(axis: Axis, low: float, high: float) -> None:
    """Plain round numbers on a logarithmic axis, also within a single decade."""
    axis.set_major_locator(FixedLocator(round_ticks(low, high)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def round_ticks(low: float, high: float) -> list[float]:
    """Round numbers within the range, as few as show its scale: three or more where there are that many."""
    for digits in ROUND:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [digit * 10**power for power in powers for digit in digits if low <= digit * 10**power <= high]
        if len(ticks) >= 3:
            return ticks
    # So short a range is nearly linear.
    return [float(tick) for tick in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= tick <= high]
