"""What a stage may be told: frozen dataclasses, one per stage; `spec_json` parses them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from residual_mass.core.estimators import estimator_named
from residual_mass.inputs.hub_data import HubPart

METHODS = ("full", "topk", "topk_phi", "topk_phi_nosub")
"""Those of the paper, in the order of its tables; `core.estimators` knows all."""
MAPS_HEADER = "residual_mass_phi"
"""The one key of the metadata in the header of a file of feature maps."""


def tokens_of(label: str) -> int:
    """`"4k"` is 4096 tokens; `"512"` is itself."""
    match = re.fullmatch(r"([1-9][0-9]{0,11})(k?)", label)
    if match is None:
        raise ValueError(f"length {label!r} is not a length label: write 512, 1k, 64k, ...")
    return int(match[1]) * (1024 if match[2] else 1)


def length_and_variant(maps: str) -> tuple[str, str]:
    """What the label of feature maps says: the length that they were trained at and, after a hyphen, the variant that
    they are, which is empty for those of a study's own recipe.
    """
    length, _, variant = maps.partition("-")
    return length, variant


def maps_label(length: str, variant: str = "") -> str:
    """The inverse of `length_and_variant`."""
    return f"{length}-{variant}" if variant else length


def decoding_words(
    chat_template: bool, answer_margin: int | None, stop_when_saturated: bool, budget_length: str, truncate_to: str
) -> str:
    """What tells one way to generate a benchmark's texts from another, for its result CSV."""
    parts = {
        "chat template": chat_template,
        f"up to {answer_margin} tokens past the references": answer_margin is not None,
        "stops when settled": stop_when_saturated,
        f"budgets of the {budget_length} length": True,
        f"cut to {truncate_to}": True,
    }
    return "; ".join(["greedy", *(text for text, holds in parts.items() if holds)])


def decoding_settings(words: str) -> dict[str, bool | int | str | None]:
    """What `decoding_words` was told of what can change a score; what other words do not say is left out."""
    patterns = {
        "answer_margin": r"up to (\d+) tokens past the references",
        "budget_length": r"budgets of the (\w+) length",
        "truncate_to": r"cut to (\w+)",
    }
    parts = words.split("; ")
    found = {
        name: match[1] for name, pattern in patterns.items() for part in parts if (match := re.fullmatch(pattern, part))
    }
    margin = found.pop("answer_margin", None)
    return {
        "chat_template": "chat template" in parts,
        "answer_margin": None if margin is None else int(margin),
        **found,
    }


@dataclass(frozen=True)
class BackboneSpec:
    """A frozen language model: where it comes from and how it is run."""

    name: str
    study: str
    model_id: str
    revision: str
    source: Literal["assets", "hub", "random"]
    dtype: Literal["float32", "bfloat16"]
    tokenizer: str
    """Label of the tokenizer; backbones that share it share frozen prompts."""
    context: int
    """Longest sequence the backbone was made for, in tokens."""

    @property
    def weights(self) -> str:
        return "random" if self.source == "random" else "pretrained"


@dataclass(frozen=True)
class ArmSpec:
    """One evaluated method at one exact-support budget (percent of the prefix, anchors included)."""

    method: str
    """Name of an estimator."""
    budget_percent: float | None = None
    maps: str | None = None
    """Label of the feature maps, where there are several."""

    def __post_init__(self) -> None:
        estimator_named(self.method)
        if self.maps is not None and not self.uses_phi:
            raise ValueError(f"arm {self.method!r}: uses no feature maps, but names {self.maps!r}")
        if (self.method == "full") != (self.budget_percent is None):
            raise ValueError(f"arm {self.method!r}: full takes no budget_percent, every other method needs one")
        if self.budget_percent is not None and not 0 < self.budget_percent <= 100:
            raise ValueError(f"budget_percent {self.budget_percent:g} is outside (0, 100]")

    @property
    def is_full(self) -> bool:
        return estimator_named(self.method).whole_prefix

    @property
    def uses_phi(self) -> bool:
        return estimator_named(self.method).adds_residual


@dataclass(frozen=True)
class AnchorSpec:
    sink: int = 4
    tail: int = 16


@dataclass(frozen=True)
class MapsSpec:
    """Feature maps that an evaluation uses: their label and the longest context they were trained on (tokens)."""

    label: str
    length: int


@dataclass(frozen=True)
class PromptsSpec:
    benchmark: str
    length: str
    tokenizer: str
    model_id: str
    revision: str
    tokenizer_source: Literal["assets", "hub"]
    data_source: Literal["assets", "hub"]
    """Where haystack and QA sets come from: the pinned assets, or the harness's own downloads."""
    examples: int
    seed: int
    recipe: int


@dataclass(frozen=True)
class GenerateSpec:
    study: str
    backbone: BackboneSpec
    benchmark: str
    length: str
    tasks: tuple[str, ...]
    examples: int
    arms: tuple[ArmSpec, ...]
    anchors: AnchorSpec
    budget_length: Literal["nominal", "real"]
    """Whether L in K = max(0, ceil(rL) - |A|) is the nominal length or the prompt's own."""
    chat_template: bool
    """Whether a prompt is put to the model as a user's message in its chat template, or as it is."""
    truncate_to: str
    """Length label: prompts that leave no room for the answer within it are cut on the left, after the BOS token."""
    maps: tuple[MapsSpec, ...]
    answer_margin: int | None
    """An example stops this many tokens past its references' length; null keeps the harness's limit alone."""
    stop_when_saturated: bool
    """An arm stops as soon as no continuation can change its score."""
    batch_tokens: int
    """Prompt tokens decoded together, padding included; one prompt that is longer makes a batch of its own."""
    allow_extrapolation: bool
    """Permit prompts longer than the maps were trained on (the paper's collapse)."""
    recipe: int


@dataclass(frozen=True)
class ScoreSpec:
    study: str
    backbone: BackboneSpec
    benchmark: str
    length: str
    data_source: Literal["assets", "hub"]
    arms: tuple[ArmSpec, ...] | None
    """Arms to score; null scores every arm that the generations hold."""
    decoding: str
    """How the texts were generated: `decoding_words`, which the result CSV repeats."""
    bootstrap_resamples: int
    seed: int
    recipe: int


@dataclass(frozen=True)
class ObjectiveSpec:
    """Weights of the training objective (the paper's equations in its appendix on training; `residual` is ours)."""

    name: Literal["ours", "kl", "aux", "lolcats", "residual"] = "ours"
    tau: float = 10.0
    lambda_kl: float = 0.99
    lambda_top: float = 1.0
    lambda_fp: float = 2.0
    lambda_z: float = 4.0
    band: float = 12.0
    """Delta: keys within this many nats of the row maximum form the top band."""
    huber_delta: float = 1.0
    weight_z: float = 0.05
    """Of the residual's log-mass error beside its output error, in the objective `residual`."""
    relative: bool = True
    """Whether the objective `residual` counts each support's errors in units of TopK's mean error with it."""
    budgets: tuple[float, ...] | None = None
    """Exact-support budgets (percent) whose supports the objective `residual` trains on; null: those of the study."""


@dataclass(frozen=True)
class MapSpec:
    """Shape of the feature maps."""

    kind: Literal["rezero", "hedgehog"] = "rezero"
    d_emb: int = 512
    d_phi: int = 64
    init: Literal["default", "positive_random_features"] = "default"


@dataclass(frozen=True)
class ReplaySpec:
    """How often one teacher pass is used: `pool` passes are kept, a new one is made every `reuse` steps. 1 and 1 is the
    paper.
    """

    pool: int = 1
    reuse: int = 1


@dataclass(frozen=True)
class CurriculumSpec:
    """The first `share` of the steps run on the first `length` tokens (a label) of each sequence."""

    length: str
    share: float


@dataclass(frozen=True)
class VariantSpec:
    """Feature maps that are trained: the label of their file, their shape and their objective."""

    label: str
    map: MapSpec
    objective: ObjectiveSpec


@dataclass(frozen=True)
class TrainSpec:
    """One training job. Its variants see the same sequences and query positions, from one teacher pass each."""

    name: str
    """Of the recipe, as the log repeats it."""
    backbone: BackboneSpec
    length: str
    variants: tuple[VariantSpec, ...]
    corpora: tuple[str, ...]
    steps: int
    learning_rate: float
    weight_decay: float
    schedule: Literal["constant", "cosine"]
    warmup_steps: int
    sequences_per_step: int
    """Gradients are averaged over these; several processes share them out."""
    queries_per_step: int
    """Query positions, per sequence."""
    query_window: float
    """Query positions are drawn from this final share of the sequence (the paper: 33,000 of 65,536)."""
    replay: ReplaySpec
    curriculum: CurriculumSpec | None
    anchors: AnchorSpec
    held_out: tuple[str, ...]
    """Corpora that progress is measured on."""
    eval_budgets: tuple[float, ...]
    eval_every: int
    checkpoint_every: int
    seed: int
    recipe: int


@dataclass(frozen=True)
class CaptureSpec:
    study: str
    backbone: BackboneSpec
    corpus: str
    length: str
    budgets: tuple[float, ...]
    anchors: AnchorSpec
    maps: MapsSpec
    packs: int
    queries: int
    """Teacher-forced decode queries right after the prefill, per pack."""
    audited: int
    """Attention rows whose query, keys and values are stored, to be measured again in float64."""
    seed: int
    recipe: int
    allow_extrapolation: bool = False


@dataclass(frozen=True)
class AuditSpec:
    """Recomputation of stored attention rows in float64, and the largest differences that it lets pass."""

    anchors: AnchorSpec
    error_tolerance: float
    """Of relative errors, shares and entropies: absolute, and relative to those above 1."""
    log_mass_tolerance: float
    """Of log Z, in nats."""
    recipe: int


@dataclass(frozen=True)
class KernelsSpec:
    """Exact kernels and scores of feature maps, key by key, of one query head."""

    study: str
    backbone: BackboneSpec
    corpus: str
    length: str
    budget_percent: float
    """Which keys count as retrieved."""
    anchors: AnchorSpec
    maps: tuple[MapsSpec, ...]
    layer: int
    head: int
    queries: int
    seed: int
    recipe: int


@dataclass(frozen=True)
class FindingsSpec:
    """What is read out of captured rows: means, the summaries' precision, and the paper's statements as checks."""

    study: str
    budget_percent: float
    """The budget at which the statements are checked."""
    corpus: str
    length: str
    """With `corpus`, where the paper's figures make their statements."""
    bootstrap_resamples: int
    seed: int
    recipe: int


@dataclass(frozen=True)
class FigureSpec:
    label: str
    """Name of the figure; where there are several of a kind, the kind's name, an underscore and what tells them
    apart."""
    title: str
    budget_percent: float | None = None
    """What a figure of one K shows."""
    maps: tuple[str, ...] = ()
    """Labels of the feature maps that a figure compares, the study's own first."""
    backbone_titles: dict[str, str] = field(default_factory=dict)
    """What a figure of several backbones calls them."""


@dataclass(frozen=True)
class MapErrorsSpec:
    """Attention-output errors of several feature maps on one and the same held-out text."""

    backbone: BackboneSpec
    corpus: str
    length: str
    budgets: tuple[float, ...]
    anchors: AnchorSpec
    maps: tuple[MapsSpec, ...]
    packs: int
    queries: int
    seed: int
    recipe: int


@dataclass(frozen=True)
class RuntimeSpec:
    """Latencies of every method, in the paper's kind of implementation and in ours."""

    study: str
    backbone: BackboneSpec
    contexts: tuple[str, ...]
    """Length labels."""
    batches: tuple[int, ...]
    budget: float
    """Exact-support budget, in percent of the context."""
    anchors: AnchorSpec
    map: MapSpec
    """Shape of the feature maps, whose weights are random: latency hardly depends on them."""
    repeats: int
    seed: int
    recipe: int


@dataclass(frozen=True)
class PlannedJob:
    """One training or generation job, as an estimate of its cost sees it."""

    target: str
    stage: Literal["train", "generate"]
    backbone: str
    length: str
    examples: int = 0
    """Prompts, over all tasks of the job."""
    generated: int = 0
    """Generated tokens at most, over all prompts and arms."""
    sequences: int = 0
    """Of a training, over all its steps; each counts as if its variant were trained alone."""
    variants: int = 0


@dataclass(frozen=True)
class EstimateSpec:
    study: str
    jobs: tuple[PlannedJob, ...]


@dataclass(frozen=True)
class ModelNeed:
    """A model on the hub."""

    model_id: str
    revision: str


@dataclass(frozen=True)
class StreamNeed:
    """How far trainings read into a corpus on the hub."""

    corpus: str
    tokenizer: str
    """Label of what counts the tokens: the tokenizer of the model below; its fields are those of BackboneSpec."""
    model_id: str
    revision: str
    source: Literal["assets", "hub", "random"]
    seed: int
    slots: int
    """Parallel streams; `tokens` are those of each."""
    tokens: int


@dataclass(frozen=True)
class PrefetchSpec:
    """What the jobs of a study read of the hub."""

    study: str
    models: tuple[ModelNeed, ...]
    parts: tuple[HubPart, ...]
    """Parts of data sets that are read whole."""
    streams: tuple[StreamNeed, ...]


@dataclass(frozen=True)
class PlannedFile:
    """A file that a study makes of a backbone, as a look at the room on the disk sees it."""

    path: str
    kind: Literal["prompts", "maps", "generations", "rows"]
    backbone: str
    tokens: int = 0
    """Of prompts all, of generations at most, of captured rows the keys."""
    rows: int = 0
    """Of generations."""
    from_hub: bool = False
    """Whether prompts are examples of the hub's."""
    maps: tuple[MapSpec, ...] = ()
    """Shapes of the feature maps that one job trains; the file is the first of theirs."""


@dataclass(frozen=True)
class StudyNeeds:
    name: str
    backbones: tuple[BackboneSpec, ...]
    hub: PrefetchSpec
    files: tuple[PlannedFile, ...]
    """The large ones."""


@dataclass(frozen=True)
class DoctorSpec:
    studies: tuple[StudyNeeds, ...]


@dataclass(frozen=True)
class TableSpec:
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
    backbone_titles: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparisonSpec:
    """A study's tables beside the paper's values, and the settings that decide whether the two can be compared.

    Keys and values are as `paper.published.protocol.settings_of` gives them.
    """

    study: str
    settings: dict[str, str]
    """Those of the study."""
    variants: dict[str, dict[str, str]] = field(default_factory=dict)
    """What variants of the feature maps change of them, by label."""


@dataclass(frozen=True)
class NumbersSpec:
    """The numbers of a study's tables, for prose."""

    study: str


@dataclass(frozen=True)
class DocumentSpec:
    """All tables and figures of a study."""

    study: str
    backbones: tuple[BackboneSpec, ...]
    figure_titles: dict[str, str] = field(default_factory=dict)
    """What a figure is of, by its label; ends its caption."""


@dataclass(frozen=True)
class ReportSpec:
    """The page of a study: what it was run on, and what its figures are of."""

    study: str
    backbones: tuple[BackboneSpec, ...]
    lengths: tuple[str, ...]
    budgets: tuple[float, ...]
    figure_titles: dict[str, str] = field(default_factory=dict)
    """What a figure is of, by its label; ends its caption."""
