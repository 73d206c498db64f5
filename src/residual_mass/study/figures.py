"""Figures: what a study says of each, and which files each is drawn from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from residual_mass.core.settings import Settings
from residual_mass.study import paths
from residual_mass.study.labels import ERROR_BY_K, FIDELITY_BY_BYTES, KERNEL_FIDELITY, SELECTION_RECALL
from residual_mass.study.values import ConfigError, Field, Length, Name, OneOrMore, parsed


@dataclass(frozen=True)
class Figure(Settings):
    """What a figure shows. Its kind says which of these keys it needs; it takes no others."""

    backbone: Name = ""
    """A backbone of the study; one of `ablations` or `residuals` where the figure shows these."""
    backbones: OneOrMore[Name] = ()
    """Backbones of the study, a row of panels for each."""
    corpus: Name = ""
    """One of the diagnostics corpora."""
    corpora: OneOrMore[Name] = ()
    """Diagnostics corpora; there is a panel for every corpus and length."""
    text: Name = ""
    """A corpus of `fidelity`, or a benchmark of it that has the length."""
    texts: Annotated[OneOrMore[Name], Field(max_length=4)] = ()
    """Corpora of `residuals` or of `fidelity`, or benchmarks of `fidelity` that have every one of the lengths; there is
    a panel for every text and length."""
    length: Length = ""
    """One of the lengths of the section that the figure shows."""
    lengths: OneOrMore[Length] = ()
    """Lengths of the section that the figure shows."""
    maps: OneOrMore[Length] = ()
    """Lengths that the maps are trained at, a line for each."""
    variants: Annotated[OneOrMore[Name], Field(max_length=4)] = ()
    """Variants of `config.yaml`, a panel for each."""

    def of(self, *keys: str) -> tuple[str, ...]:
        """The values of these keys; those that the figure does not have add none."""
        found = (getattr(self, key) for key in keys)
        return tuple(value for each in found for value in ((each,) if isinstance(each, str) else each) if value)


@dataclass(frozen=True)
class Kind:
    """What figures of one kind need.

    Attributes:
        section: of a study, which has the texts and lengths that the figure shows.
        keys: those of `Figure`.
        data: patterns of the files that are read.
        meaning: what the figure shows, for the reference of the configuration.
        room: how many panels, one for every text and length, fit, and what they are called.
        main_maps: it tells the study's main maps from others.
        one_budget: it shows the budget of the diagnostics alone.
        several: a study may have any number of them, told apart by what follows the name.
    """

    section: str
    keys: tuple[str, ...]
    data: tuple[str, ...]
    meaning: str
    room: tuple[int, str] | None = None
    main_maps: bool = False
    one_budget: bool = False
    several: bool = False


ONE_TEXT = ("backbone", "text", "length")
TEXTS = ("backbone", "texts", "lengths")
ONE_CAPTURE = ("backbone", "corpus", "length")
CAPTURES = ("backbone", "corpora", "lengths")
SIX = (6, "panels")

FIGURES = {
    "fidelity": Kind(
        "fidelity", TEXTS, (paths.FIDELITY,), main_maps=True,
        meaning="Distance of every arm's next token from that of full attention, against the budget.",
    ),
    "fidelity_tokens": Kind(
        "fidelity", ONE_TEXT, (paths.FORCED,), main_maps=True, one_budget=True, several=True,
        meaning="The same distance token by token at `diagnostics.budget`: its distribution, and the tokens where it "
        "is large; any number of them, told apart by what follows the name.",
    ),
    ERROR_BY_K: Kind(
        "residuals", TEXTS, (paths.RESIDUAL_ERRORS,), "Attention errors of every method against the budget.", SIX
    ),
    SELECTION_RECALL: Kind(
        "residuals", TEXTS, (paths.RESIDUAL_ERRORS,), room=SIX,
        meaning="Attention mass of the true top K that each selector misses, against the budget.",
    ),
    FIDELITY_BY_BYTES: Kind(
        "residuals", TEXTS, (paths.RESIDUAL_ERRORS, paths.FIDELITY), room=(4, "pairs of panels"),
        meaning="Distance of the next token and attention errors of every method, against the bytes that a step reads.",
    ),
    "entropy_gain": Kind(
        "diagnostics", ("backbones", "corpus", "length"), (paths.HEADS,), "Gain of completion per head against entropy."
    ),
    "kernel_sanity": Kind(
        "diagnostics", ONE_CAPTURE, (paths.KERNELS, paths.HEADS), main_maps=True, one_budget=True,
        meaning="Exact kernel of one head against the scores of the maps, and its error with and without the residual.",
    ),
    "logz_calibration": Kind(
        "diagnostics", CAPTURES, (paths.HEADS,), "Histograms of the error of the residual's log mass.", SIX,
        one_budget=True,
    ),
    "fullsub_nosub_delta": Kind(
        "diagnostics", CAPTURES, (paths.HEADS,), "Histograms of what subtraction does to each head's error.", SIX,
        one_budget=True,
    ),
    KERNEL_FIDELITY: Kind(
        "ablations", ("backbone", "corpus", "variants"), (paths.KERNELS,),
        "Kernel of one head under the ablations' maps, at `ablations.length`.",
    ),
    "entropy_heatmap": Kind(
        "diagnostics", ONE_CAPTURE, (paths.HEADS,), one_budget=True,
        meaning="Entropy of every head, and against the share that the residual estimate takes.",
    ),
    "mass_curves": Kind(
        "diagnostics", ONE_CAPTURE, (paths.MASS, paths.HEADS),
        "Mass that the top K recover, for heads of low and of high entropy.",
    ),
    "quartile_error": Kind("diagnostics", ONE_CAPTURE, (paths.HEADS,), "Errors over K by quartile of entropy."),
    "training_curves": Kind(
        "maps", ("backbone", "maps"), (paths.TRAINING_LOG,), "Held-out errors over the steps of training."
    ),
    "fixedk_breakdown": Kind(
        "diagnostics", ONE_CAPTURE, (paths.HEADS,), one_budget=True, several=True,
        meaning="Errors and gain against entropy at one K; any number of them, told apart by what follows the name.",
    ),
}  # fmt: skip
"""Kinds of figures by their names."""


def kind_of(label: str) -> str:
    """The name of a figure's kind. Raises ValueError for a label of none."""
    several = (name for name, kind in FIGURES.items() if kind.several)
    found = next((name for name in several if re.fullmatch(rf"{name}(_[a-z0-9]+)*", label)), label)
    if found not in FIGURES:
        raise ValueError(f"{label} is not one of {', '.join(FIGURES)}")
    return found


def find(label: str) -> Kind:
    """The kind of a figure. Raises ValueError for a label of none."""
    return FIGURES[kind_of(label)]


def figures_of(shown: dict[str, Any]) -> dict[str, Figure]:
    """Each figure with the keys of its kind."""
    figures = {}
    for label, content in shown.items():
        kind = find(label)
        try:
            figures[label] = parsed(Figure, content)
            _check_keys(kind, content)
        except ConfigError as slip:
            raise ConfigError(f"{label}.{slip.key}" if slip.key else label, slip.problem) from None
    return figures


def _check_keys(kind: Kind, content: dict[str, Any]) -> None:
    for problem, keys in (("unknown", [key for key in content if key not in kind.keys]),
                          ("missing", [key for key in kind.keys if key not in content])):  # fmt: skip
        if keys:
            raise ConfigError(keys[0], f"{problem} key")
    if kind.room:
        texts, most, what = kind.keys[1], *kind.room
        if (count := len(content[texts]) * len(content["lengths"])) > most:
            problem = f"{texts} and lengths make {count} {what}, but the figure has room for {most}; show fewer"
            raise ConfigError("", problem)
