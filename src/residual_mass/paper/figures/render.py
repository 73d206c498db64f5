"""The `figure` stage: draws a figure by its label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from residual_mass.paper.figures import calibration, fidelity, heads, kernels, masses, residuals, selectors, training
from residual_mass.paper.figures.style import paper_style, save
from residual_mass.provenance import Record
from residual_mass.study.sections.figures import kind_of
from residual_mass.study.specs import FigureSpec

Points = Callable[[FigureSpec, Sequence[Path]], pd.DataFrame]
Draw = Callable[[FigureSpec, pd.DataFrame], Figure]

FIGURES: dict[str, tuple[Points, Draw]] = {
    "fidelity": (fidelity.fidelity_points, fidelity.draw_fidelity),
    "fidelity_tokens": (fidelity.fidelity_tokens_points, fidelity.draw_fidelity_tokens),
    "error_by_k": (residuals.error_by_k_points, residuals.draw_error_by_k),
    "selection_recall": (selectors.selection_recall_points, selectors.draw_selection_recall),
    "fidelity_by_bytes": (selectors.fidelity_by_bytes_points, selectors.draw_fidelity_by_bytes),
    "entropy_gain": (heads.entropy_gain_points, heads.draw_entropy_gain),
    "entropy_heatmap": (heads.entropy_heatmap_points, heads.draw_entropy_heatmap),
    "fixedk_breakdown": (heads.fixedk_breakdown_points, heads.draw_fixedk_breakdown),
    "quartile_error": (heads.quartile_error_points, heads.draw_quartile_error),
    "mass_curves": (masses.mass_curves_points, masses.draw_mass_curves),
    "logz_calibration": (calibration.logz_calibration_points, calibration.draw_logz_calibration),
    "fullsub_nosub_delta": (calibration.fullsub_nosub_delta_points, calibration.draw_fullsub_nosub_delta),
    "kernel_sanity": (kernels.kernel_sanity_points, kernels.draw_kernel_sanity),
    "ablation_kernel_fidelity": (kernels.ablation_kernel_fidelity_points, kernels.draw_ablation_kernel_fidelity),
    "training_curves": (training.training_curves_points, training.draw_training_curves),
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
