"""Figures: what each kind is given, and what it shows."""

from __future__ import annotations

import re
from collections.abc import Sized
from dataclasses import dataclass
from typing import Annotated, Any

from residual_mass.core.settings import Settings
from residual_mass.study.labels import ERROR_BY_K, FIDELITY_BY_BYTES, KERNEL_FIDELITY, SELECTION_RECALL
from residual_mass.study.parsing import Slip, parsed
from residual_mass.study.sections.fields import Field
from residual_mass.study.sections.values import Length, Name, OneOrMore

MOST_PANELS = 6
"""Panels that fit into a figure with one for every corpus and length."""


MOST_PAIRS = 4
"""Rows of two panels that fit, one for every corpus and length."""


def check_panels(key: str, texts: Sized, lengths: Sized) -> None:
    """Raises ValueError where a panel for every text and length is too many."""
    _check_room(key, texts, lengths, MOST_PANELS, "panels")


def _check_room(key: str, texts: Sized, lengths: Sized, most: int, what: str) -> None:
    if (count := len(texts) * len(lengths)) > most:
        raise ValueError(f"{key} and lengths make {count} {what}, but the figure has room for {most}; show fewer")


@dataclass(frozen=True)
class OfBackbones(Settings):
    """A row of panels for each backbone."""

    backbones: OneOrMore[Name]
    """Backbones of the study."""
    corpus: Name
    """One of the diagnostics corpora."""
    length: Length
    """One of the diagnostics lengths."""


@dataclass(frozen=True)
class OfOneCapture(Settings):
    """One backbone on one text at one length."""

    backbone: Name
    """A backbone of the study."""
    corpus: Name
    """One of the diagnostics corpora."""
    length: Length
    """One of the diagnostics lengths."""


@dataclass(frozen=True)
class OfCaptures(Settings):
    """A panel for every corpus and length."""

    backbone: Name
    """A backbone of the study."""
    corpora: OneOrMore[Name]
    """Diagnostics corpora."""
    lengths: OneOrMore[Length]
    """Diagnostics lengths."""

    def __post_init__(self) -> None:
        check_panels("corpora", self.corpora, self.lengths)


@dataclass(frozen=True)
class OfVariants(Settings):
    """A panel for every variant."""

    backbone: Name
    """One of the backbones of `ablations`."""
    corpus: Name
    """One of the diagnostics corpora."""
    variants: Annotated[OneOrMore[Name], Field(max_length=4)]
    """Variants of `config.yaml`."""


@dataclass(frozen=True)
class OfTrainings(Settings):
    """A line for every training length."""

    backbone: Name
    """A backbone of the study."""
    maps: OneOrMore[Length]
    """Lengths that the maps are trained at."""


@dataclass(frozen=True)
class OfTexts(Settings):
    """A column of panels for every text, a row for every length."""

    backbone: Name
    """A backbone of the study."""
    texts: Annotated[OneOrMore[Name], Field(max_length=4)]
    """Corpora and benchmarks of `fidelity`; benchmarks that have every one of the lengths."""
    lengths: OneOrMore[Length]
    """Lengths of `fidelity`."""


@dataclass(frozen=True)
class OfOneText(Settings):
    """One backbone on one text at one length."""

    backbone: Name
    """A backbone of the study."""
    text: Name
    """A corpus of `fidelity`, or a benchmark of it that has the length."""
    length: Length
    """One of the lengths of `fidelity`."""


@dataclass(frozen=True)
class OfResiduals(Settings):
    """A panel for every length and text."""

    backbone: Name
    """One of the backbones of `residuals`."""
    texts: OneOrMore[Name]
    """Corpora of `residuals`."""
    lengths: OneOrMore[Length]
    """Lengths of `residuals`."""

    def __post_init__(self) -> None:
        check_panels("texts", self.texts, self.lengths)


@dataclass(frozen=True)
class OfResidualPairs(Settings):
    """Two panels for every length and text."""

    backbone: Name
    """One of the backbones of `residuals`."""
    texts: OneOrMore[Name]
    """Corpora of `residuals` and of `fidelity`."""
    lengths: OneOrMore[Length]
    """Lengths of both."""

    def __post_init__(self) -> None:
        _check_room("texts", self.texts, self.lengths, MOST_PAIRS, "pairs of panels")


Figure = (
    OfBackbones
    | OfOneCapture
    | OfCaptures
    | OfVariants
    | OfTrainings
    | OfTexts
    | OfOneText
    | OfResiduals
    | OfResidualPairs
)
FIGURES: dict[str, tuple[type[Any], str]] = {
    "fidelity": (OfTexts, "Distance of every arm's next token from that of full attention, against the budget."),
    "fidelity_tokens": (
        OfOneText,
        "The same distance token by token at `diagnostics.budget`: its distribution, and the tokens where it is large; "
        "any number of them, told apart by what follows the name.",
    ),
    ERROR_BY_K: (OfResiduals, "Attention errors of every method against the budget."),
    SELECTION_RECALL: (
        OfResiduals,
        "Attention mass of the true top K that each selector misses, against the budget.",
    ),
    FIDELITY_BY_BYTES: (
        OfResidualPairs,
        "Distance of the next token and attention errors of every method, against the bytes that a step reads.",
    ),
    "entropy_gain": (OfBackbones, "Gain of completion per head against entropy."),
    "kernel_sanity": (
        OfOneCapture,
        "Exact kernel of one head against the scores of the maps, and its error with and without the residual.",
    ),
    "logz_calibration": (OfCaptures, "Histograms of the error of the residual's log mass."),
    "fullsub_nosub_delta": (OfCaptures, "Histograms of what subtraction does to each head's error."),
    KERNEL_FIDELITY: (OfVariants, "Kernel of one head under the ablations' maps, at `ablations.length`."),
    "entropy_heatmap": (OfOneCapture, "Entropy of every head, and against the share that the residual estimate takes."),
    "mass_curves": (OfOneCapture, "Mass that the top K recover, for heads of low and of high entropy."),
    "quartile_error": (OfOneCapture, "Errors over K by quartile of entropy."),
    "training_curves": (OfTrainings, "Held-out errors over the steps of training."),
    "fixedk_breakdown": (
        OfOneCapture,
        "Errors and gain against entropy at one K; any number of them, told apart by what follows the name.",
    ),
}
"""What each kind of figure is given, and what it shows."""
SEVERAL = ("fidelity_tokens", "fixedk_breakdown")
"""Kinds of which a study may have several: `<kind>_<anything>`."""


def kind_of(label: str) -> str:
    """The kind of a figure. Raises ValueError for a label of none."""
    found = next((kind for kind in SEVERAL if re.fullmatch(rf"{kind}(_[a-z0-9]+)*", label)), label)
    if found not in FIGURES:
        raise ValueError(f"{label} is not one of {', '.join(FIGURES)}")
    return found


def figures_of(shown: dict[str, Any]) -> dict[str, Figure]:
    """Each figure parsed as the class of its kind."""
    figures = {}
    for label, content in shown.items():
        try:
            figures[label] = parsed(FIGURES[kind_of(label)][0], content)
        except Slip as slip:
            raise Slip(f"{label}.{slip.key}" if slip.key else label, slip.problem) from None
    return figures
