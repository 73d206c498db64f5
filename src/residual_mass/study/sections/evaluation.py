"""Evaluation: answers to a benchmark's prompts, given continuations, what they compare, and their statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from residual_mass.core.settings import Settings
from residual_mass.study.sections.values import Count, Distinct, HeldOutText, Length, Name, Natural, OneOrMore, Percent


@dataclass(frozen=True, kw_only=True)
class Decoding(Settings):
    """How the answers to a benchmark's prompts are generated."""

    chat_template: bool
    """Whether prompts are put to the model as a user's message in its chat template, or as they are."""
    answer_margin: Natural | None
    """Tokens past the length of the reference answers after which generation stops; `null` keeps the task's own limit
    of 16 to 512 tokens, which holds in any case."""
    stop_when_saturated: bool
    """Whether an arm stops generating as soon as nothing that follows can change its score."""
    budget_length: Literal["nominal", "real"]
    """Whether budgets are shares of the length's label or of the prompt's own length."""
    batch_tokens: Count
    """Prompt tokens that are decoded together, each example under all methods and budgets; a longer prompt is decoded
    alone, and where a GPU's memory runs out, half as many from there on."""


@dataclass(frozen=True, kw_only=True)
class Benchmark(Decoding):
    """Examples of a benchmark, and how they are answered."""

    lengths: OneOrMore[Length] | None
    """Context lengths at which this benchmark is evaluated; `null` takes the study's."""
    data_source: Literal["assets", "hub"]
    """Where examples come from: the pinned wheels (BABILong then is simulated, and three tasks of LongBench have
    stand-ins), or the benchmark's own data on the hub."""
    examples: Count
    """Examples per task, or all there are where a data set holds fewer."""
    tasks_per_job: Literal["all", 1]
    """Whether one job generates for all tasks or each task is a job of its own."""
    seed: Natural
    """Seed of the examples."""


@dataclass(frozen=True, kw_only=True)
class Continuations(Settings):
    """Texts that every arm is made to continue, token by token as they are given."""

    corpora: Distinct[HeldOutText]
    """Held-out texts; they are continued as they go on."""
    documents: Count
    """Documents of each; no two share text."""
    tokens: Count
    """Longest continuation, in tokens."""
    seed: Natural
    """Seed of the documents."""


@dataclass(frozen=True, kw_only=True)
class Fidelity(Continuations):
    """How far every arm's next token is from that of full attention, on given continuations."""

    lengths: Distinct[Length]
    """Prefixes; none leaves fidelity out."""
    methods: Distinct[Name]
    """Methods other than the paper's that are measured beside the study's own, on documents alone."""
    benchmarks: Distinct[Name]
    """Benchmarks whose prompts are continued by their right answer and by the greedy answer of full attention."""
    prompts_at: Distinct[Length]
    """Those of the lengths at which prompts are continued, where the benchmark is evaluated."""
    examples: Count
    """Prompts of each of their tasks."""


@dataclass(frozen=True)
class Mismatch(Settings):
    """RULER at every length under maps of every training length, longer ones than trained for included."""

    backbones: Distinct[Name]
    """Backbones for which `all` makes the table; none leaves it out."""
    maps: OneOrMore[Length]
    """Lengths that the maps were trained at."""
    lengths: OneOrMore[Length]
    """Evaluated lengths."""
    budget: Percent
    """The one budget."""


@dataclass(frozen=True)
class Ablations(Settings):
    """Where the variants of `config.yaml` are trained and evaluated."""

    backbones: Distinct[Name]
    """Backbones for which `all` makes the tables; none leaves them out."""
    benchmarks: Distinct[Name]
    """Evaluated benchmarks."""
    length: Length
    """Training and evaluation length."""
    budget: Percent
    """The one budget."""


@dataclass(frozen=True)
class Resampling(Settings):
    """Statistics of the result tables and of the diagnostics."""

    bootstrap_resamples: Count
    """Resamples behind the confidence intervals."""
    seed: Natural
    """Seed of the resampling."""
