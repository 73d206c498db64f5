"""The `figure` stage: draws a figure by its label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from residual_mass.paper.figures.calibration import (
    draw_fullsub_nosub_delta,
    draw_logz_calibration,
    fullsub_nosub_delta_points,
    logz_calibration_points,
)
from residual_mass.paper.figures.heads import (
    draw_entropy_gain,
    draw_entropy_heatmap,
    draw_fixedk_breakdown,
    draw_quartile_error,
    entropy_gain_points,
    entropy_heatmap_points,
    fixedk_breakdown_points,
    quartile_error_points,
)
from residual_mass.paper.figures.kernels import (
    ablation_kernel_fidelity_points,
    draw_ablation_kernel_fidelity,
    draw_kernel_sanity,
    kernel_sanity_points,
)
from residual_mass.paper.figures.masses import draw_mass_curves, mass_curves_points
from residual_mass.paper.figures.style import paper_style, save
from residual_mass.paper.figures.training import (
    draw_recipe_costs,
    draw_training_curves,
    recipe_costs_points,
    training_curves_points,
)
from residual_mass.provenance import Record
from residual_mass.study.specs import FigureSpec

Points = Callable[[FigureSpec, Sequence[Path]], pd.DataFrame]
Draw = Callable[[FigureSpec, pd.DataFrame], Figure]

FIGURES: dict[str, tuple[Points, Draw]] = {
    "entropy_gain": (entropy_gain_points, draw_entropy_gain),
    "entropy_heatmap": (entropy_heatmap_points, draw_entropy_heatmap),
    "fixedk_breakdown": (fixedk_breakdown_points, draw_fixedk_breakdown),
    "quartile_error": (quartile_error_points, draw_quartile_error),
    "mass_curves": (mass_curves_points, draw_mass_curves),
    "logz_calibration": (logz_calibration_points, draw_logz_calibration),
    "fullsub_nosub_delta": (fullsub_nosub_delta_points, draw_fullsub_nosub_delta),
    "kernel_sanity": (kernel_sanity_points, draw_kernel_sanity),
    "ablation_kernel_fidelity": (ablation_kernel_fidelity_points, draw_ablation_kernel_fidelity),
    "training_curves": (training_curves_points, draw_training_curves),
    "recipe_costs": (recipe_costs_points, draw_recipe_costs),
}


def run(spec: FigureSpec, data: list[Path], pdf: Path, png: Path) -> None:
    """Draws a figure from its data, as PDF and PNG.

    Raises:
        ValueError: the label is unknown, or a file differs from its record or lacks what the figure shows; names it.
    """
    compute, draw = FIGURES[kind_of(spec.label)]
    record = Record("figure", spec, data)
    points = compute(spec, data)
    with paper_style():
        save(draw(spec, points), pdf, png)
    for path in (pdf, png):
        record.write(path)


def kind_of(label: str) -> str:
    """Returns the kind of figure that a label names: `fixedk_breakdown_1b` is a `fixedk_breakdown`.

    Raises:
        ValueError: the label is unknown.
    """
    for kind in FIGURES:
        if label == kind or label.startswith(f"{kind}_"):
            return kind
    raise ValueError(f"figure {label!r} is unknown; known are {', '.join(FIGURES)}")
