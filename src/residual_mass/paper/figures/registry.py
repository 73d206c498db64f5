"""The figures by their kind: what each is drawn from, how, and what its caption says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from residual_mass.study.sections.figures import kind_of
from residual_mass.study.specs import FigureSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawn

Points = Callable[[FigureSpec, Sequence[Path]], pd.DataFrame]
Draw = Callable[[FigureSpec, pd.DataFrame], "Drawn"]


@dataclass(frozen=True)
class Figure:
    """A registered figure.

    Attributes:
        caption: what it shows; text with mathematics between dollars.
    """

    points: Points
    draw: Draw
    caption: str


FIGURES: dict[str, Figure] = {}


def figure(
    label: str,
    points: Points,
    *,
    caption: str,
) -> Callable[[Draw], Draw]:
    """Registers the function that draws a figure from its points."""

    def register(draw: Draw) -> Draw:
        FIGURES[label] = Figure(points, draw, caption)
        return draw

    return register


def find(label: str) -> Figure:
    """The figure of a label. Raises ValueError when there is none."""
    return FIGURES[kind_of(label)]


def caption_of(label: str, titles: Mapping[str, str]) -> str:
    """What a figure shows and, where `titles` says so, what of. Raises ValueError when the figure is unknown."""
    caption = find(label).caption
    return f"{caption} {titles[label]}." if titles.get(label) else caption
