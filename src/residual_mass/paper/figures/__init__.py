"""The figures, a module per subject; importing the package registers all of them. `run` is the `figure` stage."""

from __future__ import annotations

from pathlib import Path

from residual_mass.paper.figures import fidelity, heads, kernels, residuals  # noqa: F401
from residual_mass.paper.figures.style import DRAWINGS, caption_of, paper_style, save
from residual_mass.provenance import Record
from residual_mass.spec.figures import kind_of
from residual_mass.spec.specs import FigureSpec

__all__ = ["DRAWINGS", "caption_of", "run"]


def run(spec: FigureSpec, data: list[Path], pdf: Path, png: Path) -> None:
    """Draws a figure from its data, as PDF and PNG.

    Raises:
        ValueError: the label is unknown, or a file differs from its record or lacks what the figure shows; names it.
    """
    draw = DRAWINGS[kind_of(spec.label)]
    record = Record("figure", spec, data)
    with paper_style():
        save(draw(spec, data), pdf, png)
    for path in (pdf, png):
        record.write(path)
