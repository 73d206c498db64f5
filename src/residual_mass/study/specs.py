"""The spec of a stage: frozen dataclasses, one per stage, handed over as one JSON object with sorted keys, so that a
changed value, and only that, reruns a job.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from residual_mass.benchmarks.columns import DENSE, OWN
from residual_mass.core.settings import AnchorSpec, MapSpec, MapsSpec, Settings, later
from residual_mass.files import read_json
from residual_mass.methods.arms import ArmSpec
from residual_mass.study.sections import (
    BackboneSettings,
    Continuations,
    Decoding,
    Head,
    Latencies,
    ObjectiveSpec,
    Resampling,
    Sampling,
    TrainingSettings,
    parsed,
)

Spec = TypeVar("Spec")


def parse_spec(spec: type[Spec], text: str) -> Spec:
    """The JSON object `text` as a spec; the inverse of `core.settings.to_json`.

    Raises:
        ValueError: not JSON, or a key is unknown, missing or wrong; one line that names it.
    """
    return parsed(spec, text, "spec.")


def filled(spec: type[Spec], *sources: Any, **given: Any) -> Spec:
    """A spec whose fields are as given, or else those of the one source that has them, in whatever order they come."""
    for name in (each.name for each in fields(spec) if each.name not in given):  # type: ignore[arg-type]
        match [source for source in sources if hasattr(source, name)]:
            case [source]:
                given[name] = getattr(source, name)
            case [_, *_]:
                raise TypeError(f"{spec.__name__}.{name} is in several sources; give it")
    return spec(**given)


@dataclass(frozen=True)
class Job(Settings):
    """A job of the workflow, as stages that look at a study read it: its rule, its outputs, and its spec as JSON."""

    rule: str
    outputs: tuple[str, ...] = ()
    spec: dict[str, Any] = field(default_factory=dict)


def read_jobs(path: Path) -> tuple[Job, ...]:
    """Reads what `study.start` wrote for a target that looks at a study."""
    return parsed(tuple[Job, ...], read_json(path))


@dataclass(frozen=True)
class BackboneSpec(BackboneSettings):
    """A backbone, as specs have it."""

    name: str = field(kw_only=True)

    @property
    def weights(self) -> str:
        return "random" if self.source == "random" else "pretrained"


@dataclass(frozen=True, kw_only=True)
class JobSpec(Settings):
    """What the specs of most stages have."""

    study: str
    backbone: BackboneSpec
    recipe: int
    """Of `recipes.py`: another one makes results again."""


@dataclass(frozen=True)
class PromptsSpec(Settings):
    """The examples of a benchmark, frozen to disk."""

    benchmark: str
    length: str
    tokenizer: str
    model_id: str
    revision: str
    tokenizer_source: Literal["assets", "hub"]
    data_source: Literal["assets", "hub"]
    examples: int
    seed: int
    recipe: int


@dataclass(frozen=True, kw_only=True)
class ArmsSpec(JobSpec):
    """Some arms, and what they decode with."""

    length: str
    arms: tuple[ArmSpec, ...]
    anchors: AnchorSpec
    truncate_to: str
    maps: tuple[MapsSpec, ...]
    residuals: tuple[dict[str, Any], ...] = later(())
    """Identities of the methods that are not the paper's: a changed one runs the job again."""


@dataclass(frozen=True, kw_only=True)
class GenerateSpec(ArmsSpec, Decoding):
    """Answers of every arm to some tasks of a benchmark."""

    benchmark: str
    tasks: tuple[str, ...]
    examples: int
    allow_extrapolation: bool
    """Permit prompts longer than the maps were trained on (the paper's collapse)."""


@dataclass(frozen=True, kw_only=True)
class AskedSpec(Decoding):
    """Prompts of a benchmark, to be continued as they are given."""

    benchmark: str
    examples: int
    """Per task."""


@dataclass(frozen=True, kw_only=True)
class ForceSpec(ArmsSpec, Continuations):
    """Given continuations under every arm, beyond the length of its maps, too."""

    asked: tuple[AskedSpec, ...]
    """One for each file of prompts."""
    arms_of_documents: tuple[ArmSpec, ...]
    """Further arms, on documents and in their own state alone."""

    @property
    def rows_of_document(self) -> tuple[tuple[str, ArmSpec], ...]:
        """State and arm of each row of a held-out document."""
        dense = ((DENSE, arm) for arm in self.arms if not arm.is_full)
        return (*self.rows_of_answer, *((OWN, arm) for arm in self.arms_of_documents), *dense)

    @property
    def rows_of_draft(self) -> tuple[tuple[str, ArmSpec], ...]:
        """State and arm of each row of a draft."""
        return tuple((OWN, arm) for arm in (*self.arms, *self.arms_of_documents) if not arm.is_full)

    @property
    def rows_of_answer(self) -> tuple[tuple[str, ArmSpec], ...]:
        """State and arm of each row of an answer to a prompt."""
        return tuple((OWN, arm) for arm in self.arms)


@dataclass(frozen=True, kw_only=True)
class FidelitySpec(JobSpec, Resampling):
    """Distances from full attention, read out of given continuations."""

    length: str


@dataclass(frozen=True, kw_only=True)
class ScoreSpec(JobSpec, Resampling):
    """Scores of generated answers."""

    benchmark: str
    length: str
    data_source: Literal["assets", "hub"]
    examples: int
    """Per task, of the frozen ones."""
    arms: tuple[ArmSpec, ...] | None
    """Arms to score; null scores every arm that the generations hold."""
    decoding: str
    """How the texts were generated: `benchmarks.columns.decoding_words`, which the result CSV repeats."""


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
    """Of the recipe, as the log repeats it."""
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
    """What is read out of captured rows: means, the summaries' precision, and the paper's statements as checks."""

    study: str
    budget_percent: float
    """The budget at which the statements are checked."""
    corpus: str
    length: str
    """With `corpus`, where the paper's figures make their statements."""
    recipe: int


@dataclass(frozen=True, kw_only=True)
class ResidualErrorsSpec(JobSpec, Sampling):
    """Attention-output errors of every method, head by head, on one and the same held-out texts."""

    corpora: tuple[str, ...]
    length: str
    methods: tuple[str, ...]
    """All but full attention; topk is among them, since the others are compared with it."""
    budgets: tuple[float, ...]
    anchors: AnchorSpec
    maps: MapsSpec | None
    """Of the methods that need feature maps; may have been trained on shorter texts."""
    bootstrap_resamples: int
    residuals: tuple[dict[str, Any], ...] = later(())
    """As in `ArmsSpec`."""


@dataclass(frozen=True, kw_only=True)
class RuntimeSpec(JobSpec, Latencies):
    """Latencies of every method, in the paper's kind of implementation and in ours."""

    anchors: AnchorSpec
    map: MapSpec
    """Shape of the feature maps, whose weights are random: latency hardly depends on them."""
    own_methods: tuple[str, ...] = later(())
    """Methods that the paper lacks, which are measured in our implementation alone."""


@dataclass(frozen=True)
class FigureSpec(Settings):
    label: str
    """Name of the figure; where there are several of a kind, the kind's name, an underscore and what tells them
    apart."""
    title: str
    budget_percent: float | None = None
    """What a figure of one K shows."""
    maps: tuple[str, ...] = ()
    """Labels of the feature maps that a figure compares, the study's own first; where it shows logs of trainings, that
    of each."""
    backbone_titles: dict[str, str] = field(default_factory=dict)
    """What a figure of several backbones calls them."""
    texts: tuple[str, ...] = ()
    """Texts whose continuations a figure is about."""
    score: Resampling | None = None
    """Behind the intervals that a figure computes itself."""


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
    """Lengths at which a benchmark is evaluated, where not at all of the table's; other cells print `--`."""
    maps: tuple[str, ...] = ()
    """Rows of the mismatch and ablation tables: labels of the feature maps, in order."""
    own_methods: tuple[str, ...] = later(())
    """Methods that the paper lacks: the last rows of a table of scores."""
    backbone_titles: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparisonSpec(Settings):
    """A study's tables beside the paper's values, and the settings that decide whether the two can be compared.

    Keys and values are as `paper.comparison.settings_of` gives them.
    """

    study: str
    settings: dict[str, str]
    """Those of the study."""
    paper: dict[str, str] = field(default_factory=dict)
    """The paper's protocol: those of config/studies/paper.yaml."""
    variants: dict[str, dict[str, str]] = field(default_factory=dict)
    """What variants of the feature maps change of them, by label."""


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
    """What a figure is of, by its label; ends its caption."""


@dataclass(frozen=True, kw_only=True)
class ReportSpec(DocumentSpec):
    """The page of a study."""

    budgets: tuple[float, ...]
    recommended: str
    """The method that the page opens with, beside top-k."""
