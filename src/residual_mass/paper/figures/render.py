"""The `figure` stage: draws a figure by its label."""

from __future__ import annotations

from pathlib import Path

from residual_mass.paper.figures import find
from residual_mass.paper.figures.style import paper_style, save
from residual_mass.provenance import Record
from residual_mass.study.specs import FigureSpec


def run(spec: FigureSpec, data: list[Path], pdf: Path, png: Path) -> None:
    """Draws a figure from its data, as PDF and PNG.

    Raises:
        ValueError: the label is unknown, or a file differs from its record or lacks what the figure shows; names it.
    """
    figure = find(spec.label)
    record = Record("figure", spec, data)
    points = figure.points(spec, data)
    with paper_style():
        save(figure.draw(spec, points), pdf, png)
    for path in (pdf, png):
        record.write(path)
