"""Look of all figures: NeurIPS text width, Times-like type, colour-blind safe colours, reproducible bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure

from residual_mass.files import replacing

TEXT_WIDTH = 5.5
"""Of a NeurIPS page, in inches."""
DPI = 200
BLUE, VERMILLION, GREY = "#0072B2", "#D55E00", "#555555"
"""From the palette of Okabe and Ito."""

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
