"""Measurements on the attention itself: what is captured of it, and its latency."""

from __future__ import annotations

from dataclasses import dataclass

from residual_mass.core.settings import Settings
from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.study.labels import TOPK
from residual_mass.study.parsing import Slip
from residual_mass.study.sections.values import (
    Count,
    Distinct,
    HeldOutText,
    Length,
    MeasuredText,
    Name,
    Natural,
    OneOrMore,
    Percent,
)


@dataclass(frozen=True)
class Head(Settings):
    """The head whose kernels are shown, counted from 0."""

    layer: Natural
    """Its layer."""
    head: Natural
    """The query head in the layer."""


@dataclass(frozen=True, kw_only=True)
class Sampling(Settings):
    """How many decode queries are measured."""

    packs: Count
    """Sequences; for texts made of prompts as many as there are prompts, if those are fewer."""
    queries: Count
    """Teacher-forced decode queries per sequence, right after the prefill."""
    seed: Natural
    """Seed of the sequences."""


@dataclass(frozen=True, kw_only=True)
class Diagnostics(Sampling):
    """Per-head quantities on packed held-out text."""

    backbones: Distinct[Name]
    """Backbones that are captured on every text at every length, for the table and the claims."""
    corpora: OneOrMore[MeasuredText]
    """Texts that can be captured on; all maps are compared on the first, which is not made of prompts."""
    lengths: OneOrMore[Length]
    """Lengths that can be captured at."""
    budget: Percent
    """One of the budgets: what the table, the claims and the figures of a single K show."""
    head: Head

    def __post_init__(self) -> None:
        if (first := self.corpora[0]) in PROMPT_PACKS:
            raise Slip("corpora", f"{first} comes first, where the text belongs that all maps are compared on")


@dataclass(frozen=True, kw_only=True)
class Residuals(Sampling):
    """What methods make of the same tokens: errors of every head on packed held-out text."""

    backbones: Distinct[Name]
    """Backbones for which `all` makes them; none leaves them out."""
    corpora: OneOrMore[HeldOutText]
    """Held-out texts."""
    lengths: OneOrMore[Length]
    """Prefixes."""
    budgets: OneOrMore[Percent]
    """Exact-support budgets, which need not be those of the study."""
    methods: OneOrMore[Name]
    """Methods, of which `topk` is one, for the others are compared with it."""

    def __post_init__(self) -> None:
        if TOPK not in self.methods:
            raise Slip("methods", f"{TOPK} is missing, with which the others are compared; add it")


@dataclass(frozen=True)
class Latencies(Settings):
    """Where `results/runtime_<backbone>.csv` measures latency."""

    contexts: Distinct[Length]
    """Lengths of the prompts; what does not fit into memory is left out, and the table says so. None leaves latencies
    out."""
    batches: OneOrMore[Count]
    """Prompts that are decoded at once (the paper: 1)."""
    budget: Percent
    """Exact-support budget that K comes from."""
    repeats: Count
    """Measured runs, after one that is not."""
    seed: Natural
    """Seed of the prompts and of the feature maps' random weights."""
