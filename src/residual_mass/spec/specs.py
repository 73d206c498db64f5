"""Specs of the stages: a frozen dataclass per stage, passed as one JSON object with sorted keys, so that a job is run
again only if a value changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from residual_mass.files import read_json
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.columns import DENSE, OWN
from residual_mass.spec.parsing import parsed
from residual_mass.spec.sections import (
    BackboneSettings,
    Continuations,
    Decoding,
    Head,
    Latencies,
    ObjectiveSpec,
    Resampling,
    Sampling,
    TrainingSettings,
)
from residual_mass.spec.settings import AnchorSpec, MapSpec, MapsSpec, Settings

Spec = TypeVar("Spec")


def parse_spec(spec: type[Spec], text: str) -> Spec:
    """Returns the JSON object `text` as a spec; the inverse of `settings.to_json`.

    Raises:
        ValueError: not JSON, or a key is unknown, missing or wrong; one line that names it.
    """
    return parsed(spec, text, "spec.")


@dataclass(frozen=True)
class Job(Settings):
    """A job of the workflow, as `estimate` and `prefetch` read it: its rule, its outputs, and its spec as JSON."""

    rule: str
    outputs: tuple[str, ...] = ()
    spec: dict[str, Any] = field(default_factory=dict)


def read_jobs(path: Path) -> tuple[Job, ...]:
    """Reads the jobs that `study.start` wrote for `estimate` or `prefetch`."""
    return parsed(tuple[Job, ...], read_json(path))


@dataclass(frozen=True)
class BackboneSpec(BackboneSettings):
    """A backbone in a spec."""

    name: str = field(kw_only=True)

    @property
    def weights(self) -> str:
        return "random" if self.source == "random" else "pretrained"


@dataclass(frozen=True, kw_only=True)
class JobSpec(Settings):
    """Fields that the specs of most stages have."""

    study: str
    backbone: BackboneSpec
    recipe: int
    """Number in `recipes.py`; another one makes results again."""


@dataclass(frozen=True)
class PromptsSpec(Settings):
    """The examples of a benchmark, frozen to disk."""

    benchmark: str
    length: str
    tokenizer: str
    model_id: str
    revision: str
    tokenizer_source: Literal["assets", "hub", "gguf"]
    data_source: Literal["assets", "hub"]
    examples: int
    seed: int
    recipe: int
    tasks: tuple[str, ...]
    """Those that fit the length."""
    examples_sha256: tuple[str, ...] = ()
    """Of the tasks' files of examples, where they come with the package; other examples are made again."""


@dataclass(frozen=True, kw_only=True)
class ArmsSpec(JobSpec):
    """Arms, and the settings that they decode with."""

    length: str
    arms: tuple[ArmSpec, ...]
    anchors: AnchorSpec
    truncate_to: str
    maps: tuple[MapsSpec, ...]
    identities: tuple[dict[str, Any], ...] = ()
    """Of the arms' methods; a changed identity runs the job again."""


@dataclass(frozen=True, kw_only=True)
class GenerateSpec(ArmsSpec, Decoding):
    """Answers of every arm to some tasks of a benchmark."""

    benchmark: str
    tasks: tuple[str, ...]
    examples: int
    allow_extrapolation: bool
    """Whether prompts may be longer than the maps were trained on (the paper's collapse)."""


@dataclass(frozen=True, kw_only=True)
class ForcedPromptsSpec(Decoding):
    """Prompts of a benchmark that are continued by given answers."""

    benchmark: str
    examples: int
    """Prompts per task."""


@dataclass(frozen=True, kw_only=True)
class ForceSpec(ArmsSpec, Continuations):
    """Given continuations under every arm; they may be longer than its maps were trained on."""

    asked: tuple[ForcedPromptsSpec, ...]
    """One for each file of prompts."""
    arms_of_documents: tuple[ArmSpec, ...]
    """Further arms, only on documents and only in their own state."""

    @property
    def rows_of_document(self) -> tuple[tuple[str, ArmSpec], ...]:
        """State and arm of each row of a held-out document."""
        dense = ((DENSE, arm) for arm in self.arms if not arm.is_full)
        return (*self.rows_of_answer, *((OWN, arm) for arm in self.arms_of_documents), *dense)

    @property
    def rows_of_answer(self) -> tuple[tuple[str, ArmSpec], ...]:
        """State and arm of each row of an answer to a prompt."""
        return tuple((OWN, arm) for arm in self.arms)


@dataclass(frozen=True, kw_only=True)
class FidelitySpec(JobSpec, Resampling):
    """Distances from full attention on given continuations."""

    length: str


@dataclass(frozen=True, kw_only=True)
class ScoreSpec(JobSpec, Resampling):
    """Scores of generated answers."""

    benchmark: str
    length: str
    data_source: Literal["assets", "hub"]
    examples: int
    """Examples per task, of the frozen ones."""
    arms: tuple[ArmSpec, ...] | None
    """Arms to score; null scores every arm that the generations hold."""
    decoding: str
    """How the texts were generated: `columns.decoding_words`, which the result CSV repeats."""


@dataclass(frozen=True)
class VariantSpec(Settings):
    """Feature maps that are trained: the label of their file, their shape and their objective."""

    label: str
    map: MapSpec
    objective: ObjectiveSpec


@dataclass(frozen=True, kw_only=True)
class TrainSpec(TrainingSettings):
    """One training job. Its variants see the same sequences and query positions, from one teacher pass each."""

    name: str
    """Name of the recipe, which the log repeats."""
    backbone: BackboneSpec
    length: str
    variants: tuple[VariantSpec, ...]
    anchors: AnchorSpec
    recipe: int


@dataclass(frozen=True, kw_only=True)
class CaptureSpec(JobSpec, Sampling):
    """Quantities of every head on packed held-out text."""

    corpus: str
    length: str
    budgets: tuple[float, ...]
    anchors: AnchorSpec
    maps: MapsSpec
    allow_extrapolation: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelsSpec(JobSpec, Head):
    """Exact kernels and scores of feature maps, key by key, of one query head."""

    corpus: str
    length: str
    budget_percent: float
    """Which keys count as retrieved."""
    anchors: AnchorSpec
    maps: tuple[MapsSpec, ...]
    queries: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class FindingsSpec(Resampling):
    """Findings from captured rows: means with intervals, and the paper's statements as checks."""

    study: str
    budget_percent: float
    """The budget at which the statements are checked."""
    corpus: str
    length: str
    """With `corpus`, the setting of the paper's figures."""
    recipe: int


@dataclass(frozen=True, kw_only=True)
class ResidualErrorsSpec(JobSpec, Sampling):
    """Attention-output errors of every method, head by head, on the same held-out texts."""

    corpora: tuple[str, ...]
    length: str
    methods: tuple[str, ...]
    """Methods without full attention; topk must be among them, because the others are compared with it."""
    budgets: tuple[float, ...]
    anchors: AnchorSpec
    maps: MapsSpec | None
    """Maps of the methods that need them; they may have been trained on shorter texts."""
    bootstrap_resamples: int
    identities: tuple[dict[str, Any], ...] = ()
    """As in `ArmsSpec`."""


@dataclass(frozen=True, kw_only=True)
class RuntimeSpec(JobSpec, Latencies):
    """Latencies of every method, in the paper's kind of implementation and in ours."""

    anchors: AnchorSpec
    map: MapSpec
    """Shape of the feature maps, whose weights are random: latency hardly depends on them."""
    own_methods: tuple[str, ...] = ()
    """Methods that the paper lacks, which are measured only in our implementation."""


@dataclass(frozen=True)
class FigureSpec(Settings):
    label: str
    """Name of the figure: that of its kind, with an underscore and a suffix where a study has several of the kind."""
    title: str
    budget_percent: float | None = None
    """Budget of a figure of one K."""
    maps: tuple[str, ...] = ()
    """Labels of the feature maps that a figure compares, the study's own first; one per log in a figure of training
    logs."""
    backbone_titles: dict[str, str] = field(default_factory=dict)
    """Titles of the backbones in a figure of several."""
    texts: tuple[str, ...] = ()
    """Texts that the figure shows the continuations of."""
    score: Resampling | None = None
    """Resampling for the intervals that a figure computes itself."""


@dataclass(frozen=True)
class TableSpec(Settings):
    study: str
    label: str
    backbones: tuple[str, ...]
    lengths: tuple[str, ...]
    budgets: tuple[float, ...]
    benchmarks: tuple[str, ...]
    """Benchmarks whose result files exist in this study; cells of the others print `--`."""
    lengths_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Lengths at which a benchmark is evaluated, if not at all `lengths`; other cells print `--`."""
    maps: tuple[str, ...] = ()
    """Rows of the mismatch and ablation tables: labels of the feature maps, in order."""
    own_methods: tuple[str, ...] = ()
    """Methods that the paper lacks: the last rows of a table of scores."""
    backbone_titles: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparisonSpec(Settings):
    """A study's tables and the paper's values, and the settings that decide whether the two can be compared.

    Keys and values are as `paper.comparison.settings_of` gives them.
    """

    study: str
    settings: dict[str, str]
    """Settings of the study."""
    paper: dict[str, str] = field(default_factory=dict)
    """Settings of the paper's protocol, config/studies/paper.yaml."""
    variants: dict[str, dict[str, str]] = field(default_factory=dict)
    """Settings that variants of the feature maps change, by label."""


@dataclass(frozen=True)
class NumbersSpec(Settings):
    """The numbers of a study's tables, for prose."""

    study: str


@dataclass(frozen=True)
class DocumentSpec(Settings):
    """All tables and figures of a study."""

    study: str
    backbones: tuple[BackboneSpec, ...]
    figure_titles: dict[str, str] = field(default_factory=dict)
    """Backbone and text of each figure, by its label; they end its caption."""


@dataclass(frozen=True, kw_only=True)
class ReportSpec(DocumentSpec):
    """The page of a study."""

    budgets: tuple[float, ...]
    recommended: str
    """The method that the top of the page compares with top-k."""
