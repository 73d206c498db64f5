"""Kinds of figures: the keys by which a study describes each, and the files that it is drawn from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from residual_mass.spec import paths


@dataclass(frozen=True)
class Kind:
    """What figures of one kind need.

    Attributes:
        section: section of a study with the texts, lengths and backbones that the figure shows.
        keys: keys of `sections.Figure` that it has.
        data: patterns of the files that it reads.
        main_maps: whether it distinguishes the study's main maps from others.
        one_budget: whether it shows only the budget of the diagnostics.
        several: whether a study may have several of them, whose labels add a suffix to the kind.
    """

    section: str
    keys: tuple[str, ...]
    data: tuple[str, ...]
    main_maps: bool = False
    one_budget: bool = False
    several: bool = False


TEXTS = ("backbone", "texts", "lengths")
ONE_TEXT = ("backbone", "text", "length")
CAPTURES = ("backbone", "corpora", "lengths")
ONE_CAPTURE = ("backbone", "corpus", "length")
ERRORS = (paths.RESIDUAL_ERRORS,)
CAPTURED = (paths.HEADS,)
FIGURES = {
    "fidelity": Kind("fidelity", TEXTS, (paths.FIDELITY,), main_maps=True),
    "fidelity_tokens": Kind("fidelity", ONE_TEXT, (paths.FORCED,), main_maps=True, one_budget=True, several=True),
    "error_by_k": Kind("residuals", TEXTS, ERRORS),
    "selection_recall": Kind("residuals", TEXTS, ERRORS),
    "fidelity_by_bytes": Kind("residuals", TEXTS, (*ERRORS, paths.FIDELITY)),
    "entropy_gain": Kind("diagnostics", ("backbones", "corpus", "length"), CAPTURED),
    "kernel_sanity": Kind("diagnostics", ONE_CAPTURE, (paths.KERNELS, *CAPTURED), main_maps=True, one_budget=True),
    "logz_calibration": Kind("diagnostics", CAPTURES, CAPTURED, one_budget=True),
    "fullsub_nosub_delta": Kind("diagnostics", CAPTURES, CAPTURED, one_budget=True),
    "ablation_kernel_fidelity": Kind("ablations", ("backbone", "corpus", "variants"), (paths.KERNELS,)),
    "entropy_heatmap": Kind("diagnostics", ONE_CAPTURE, CAPTURED, one_budget=True),
    "mass_curves": Kind("diagnostics", ONE_CAPTURE, (paths.MASS, *CAPTURED)),
    "quartile_error": Kind("diagnostics", ONE_CAPTURE, CAPTURED),
    "training_curves": Kind("maps", ("backbone", "maps"), (paths.TRAINING_LOG,)),
    "fixedk_breakdown": Kind("diagnostics", ONE_CAPTURE, CAPTURED, one_budget=True, several=True),
}
"""Kinds of figures by their names; the docstring of the function that draws one says what it shows."""


def kind_of(label: str) -> str:
    """Returns the name of a figure's kind. Raises ValueError if the label has none."""
    for name, kind in FIGURES.items():
        if kind.several and re.fullmatch(rf"{name}(_[a-z0-9]+)*", label):
            return name
    if label not in FIGURES:
        raise ValueError(f"{label} is not one of {', '.join(FIGURES)}")
    return label
