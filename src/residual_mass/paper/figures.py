"""Figures by their label, and the one from diagnostics (Parquet): what it shows is computed in a function of its own,
apart from the drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pyarrow import ArrowInvalid

from residual_mass.paper.style import BLUE, GREY, TEXT_WIDTH, VERMILLION, paper_style, save
from residual_mass.paper.training_figures import (
    draw_recipe_costs,
    draw_training_curves,
    recipe_costs_points,
    training_curves_points,
)

HEAD = ["layer", "head"]
BUDGET = ["k", "budget_percent"]
ERRORS = ["e_topk", "e_sub", "h_mid"]
LINEAR_GAIN = 0.1
"""The gain axis is linear up to here and logarithmic beyond."""


def run(label: str, title: str, data: list[Path], pdf: Path, png: Path) -> None:
    """Draws figure `label` from its data, as PDF and PNG.

    Raises:
        ValueError: the label is unknown, or the data are missing, incomplete or not numbers; names the file.
    """
    if label not in FIGURES:
        raise ValueError(f"figure {label!r} is unknown; known are {', '.join(FIGURES)}")
    points_of, draw = FIGURES[label]
    points = points_of(data)
    with paper_style():
        save(draw(points, title), pdf, png)


def read_diagnostics(path: Path, columns: list[str]) -> pd.DataFrame:
    """Reads `columns` of a diagnostics file.

    Raises:
        ValueError: the file is missing, damaged or empty, or a column is missing or holds a value that is not finite.
    """
    try:
        frame = pd.read_parquet(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; run the capture stage") from None
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file ({error}); delete it and rerun the capture stage") from None
    for name in columns:
        if name not in frame:
            raise ValueError(f"{path}: column {name} is missing; delete it and rerun the capture stage")
        if not frame[name].abs().lt(float("inf")).all():
            raise ValueError(f"{path}: {name} holds values that are not finite; rerun the capture stage")
    if frame.empty:
        raise ValueError(f"{path}: has no rows; delete it and rerun the capture stage")
    return frame[columns]


def read_entropy_gain(data: Sequence[Path]) -> pd.DataFrame:
    """The points of one diagnostics file."""
    if len(data) != 1:
        raise ValueError(f"figure entropy_gain shows one diagnostics file, {len(data)} were given; pass one to --data")
    return entropy_gain_points(read_diagnostics(data[0], HEAD + BUDGET + ERRORS))


def entropy_gain_points(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per (k, layer, query head): means over packs and queries of `h_mid` and of `gain`, `e_topk - e_sub`."""
    gains = frame.assign(gain=frame["e_topk"] - frame["e_sub"])
    return gains.groupby([*BUDGET, *HEAD], as_index=False)[["h_mid", "gain"]].mean()


def draw_entropy_gain(points: pd.DataFrame, title: str) -> Figure:
    """One panel per K on a common gain axis; heads that completion helps and hurts differ in colour and marker."""
    panels = list(points.groupby(BUDGET))
    figure = Figure(figsize=(TEXT_WIDTH, 2.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    # A few diffuse heads gain ten times what the others do: a linear axis would press those onto the zero line.
    axes[0].set_yscale("symlog", linthresh=LINEAR_GAIN)
    for axis, ((k, budget), of_k) in zip(axes, panels, strict=True):
        _draw_heads(axis, of_k)
        axis.set_title(f"$K = {k:g}$ ({budget:g}%)\n{(of_k['gain'] > 0).mean():.1%} of {len(of_k)} heads gain")
    axes[0].yaxis.set_major_formatter("{x:g}")
    gain = r"gain $e_{\mathrm{TopK}} - e_{\mathrm{TopK}{+}\phi}$"
    axes[0].set_ylabel(f"{gain}\n(logarithmic beyond $\\pm${LINEAR_GAIN})")
    figure.supxlabel(r"mid-normalised entropy $H_{\mathrm{mid}}$", fontsize=9)
    figure.suptitle(title.replace("$", r"\$"), fontsize=9)
    return figure


def _draw_heads(axis: Axes, heads: pd.DataFrame) -> None:
    """Crosses over circles tell hurt from helped in print without colour, too."""
    helped = heads["gain"] > 0
    for chosen, colour, marker in ((helped, BLUE, "o"), (~helped, VERMILLION, "x")):
        line_width = 0.0 if marker == "o" else 0.7
        x, y = heads["h_mid"][chosen], heads["gain"][chosen]
        axis.scatter(x, y, s=9, c=colour, marker=marker, alpha=0.6, linewidths=line_width)
    axis.margins(y=0.06)
    axis.axhline(0, color=GREY, linewidth=0.7, zorder=0)


FIGURES: dict[str, tuple[Callable[[Sequence[Path]], pd.DataFrame], Callable[[pd.DataFrame, str], Figure]]] = {
    "entropy_gain": (read_entropy_gain, draw_entropy_gain),
    "training_curves": (training_curves_points, draw_training_curves),
    "recipe_costs": (recipe_costs_points, draw_recipe_costs),
}
"""What a figure shows of its files, and the drawing of it."""
