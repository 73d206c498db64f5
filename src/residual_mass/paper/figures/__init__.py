"""The figures, a module per subject; importing the package registers all of them."""

from residual_mass.paper.figures import (  # noqa: F401
    calibration,
    fidelity,
    heads,
    kernels,
    masses,
    residuals,
    selectors,
    training,
)
from residual_mass.paper.figures.registry import FIGURES, caption_of, find

__all__ = ["FIGURES", "caption_of", "find"]
