"""The configuration, one class per section of its files.

A key's type, bounds and meaning are declared here and nowhere else: the editor's schemas and the tables of
config/README.md are written from these classes (`study.reference`), and the specs of the stages inherit from them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import yaml
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError, create_model

from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.core import estimators
from residual_mass.core.settings import AnchorSpec, MapSpec, Settings, tokens_of
from residual_mass.diagnostics import CWE

METHODS = ("full", "topk", "topk_phi", "topk_phi_nosub")
"""Those of the paper, in the order of its tables; `core.estimators` knows all."""
ABLATION_TABLES = {"dphi_ablation": "dphi", "loss_ablation": "loss"}
"""The ablation that each of these tables shows."""
ACCOUNTING_TABLE = "exact_accounting"
LATENCIES = "runtime_"
"""What the tables of latencies begin with; the backbone follows."""
COSTS = "recipe_costs"
"""The figure that the target `recipes` makes, and `all` does not."""
FIDELITY = "ablation_kernel_fidelity"
"""The figure that shows the maps of the ablations, at their length."""
PUBLISHED = "published"
"""The folder of the tables with the paper's own values, in place of a study's name."""
MOST_PANELS = 6
"""Panels that fit into a figure with one for every corpus and length."""


class Slip(ValueError):
    """What is wrong with the value of a key, seen from the section that found it."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.key, self.problem = key, problem


# ---- types of values -------------------------------------------------------------------------------------------------


def _unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if repeated := next((value for value in values if values.count(value) > 1), None):
        raise ValueError(f"has {repeated} twice; remove one")
    return values


Item = TypeVar("Item")
Count = Annotated[int, Field(ge=1, title="count")]
Natural = Annotated[int, Field(ge=0, title="integer")]
Positive = Annotated[float, Field(gt=0, title="number")]
NotNegative = Annotated[float, Field(ge=0, title="number")]
Share = Annotated[float, Field(gt=0, le=1, title="share")]
Percent = Annotated[float, Field(gt=0, le=100, title="percent")]
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", title="text")]
Length = Annotated[str, Field(pattern=r"^[1-9][0-9]*k?$", title="length")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", title="name")]
ShortName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", title="short name")]
CorpusName = Annotated[str, Field(pattern=r"^[a-z0-9]+$", title="corpus")]
Label = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", title="label")]
Distinct = Annotated[tuple[Item, ...], AfterValidator(_unique), Field(json_schema_extra={"uniqueItems": True})]
OneOrMore = Annotated[
    tuple[Item, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True}), AfterValidator(_unique)
]


# ---- backbones -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backbone(Settings):
    """A frozen language model: where it comes from and how it is run."""

    study: Text
    """The one study whose protocol applies to this backbone."""
    model_id: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?$", title="hub repository")
    ]
    """Repository on the Hugging Face hub; with `source: assets` its last part, in lower case, names the folder under
    `models/`."""
    revision: Name
    """Commit on the hub, 40 digits and letters a to f, or a label for the weights of the assets."""
    source: Literal["assets", "hub", "random"]
    """Where the weights come from; `random` takes the shape from the assets and draws the weights."""
    dtype: Literal["float32", "bfloat16"]
    """Precision of weights and activations."""
    tokenizer: ShortName
    """Label of the tokenizer; backbones of a study that share it share the frozen prompts."""
    context: Count
    """Longest sequence that the backbone was made for, in tokens."""
    requires_gpu: bool
    """Whether jobs of this backbone ask for a GPU."""


@dataclass(frozen=True, kw_only=True)
class RegisteredBackbone(Backbone):
    """A backbone as `config.yaml` registers it."""

    title: Text
    """Name in tables and figures."""


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectiveSpec(Settings):
    """Training objective and its weights (the paper's equations in its appendix on training; `residual` is ours)."""

    name: Literal["ours", "kl", "aux", "lolcats", "residual"] = "ours"
    """Which objective: the paper's, its two halves alone, that of its ablation, and one of our own: the output error of
    subtractive completion itself, at the budgets of `budgets`."""
    tau: Positive = 10.0
    """Temperature of the divergence term."""
    lambda_kl: Annotated[float, Field(ge=0, le=1, title="share")] = 0.99
    """Weight of the divergence term; the auxiliary terms get the rest."""
    lambda_top: NotNegative = 1.0
    """Weight of the top-band term."""
    lambda_fp: NotNegative = 2.0
    """Weight of the far-region term."""
    lambda_z: NotNegative = 4.0
    """Weight of the normaliser term."""
    band: Positive = 12.0
    """Keys within this many nats of the row maximum form the top band."""
    huber_delta: Positive = 1.0
    """Where the Huber losses turn linear."""
    weight_z: NotNegative = 0.05
    """In the objective `residual`, the weight of the log-mass error beside the output error."""
    relative: bool = True
    """Whether the objective `residual` divides the errors of a support by the mean error of TopK with it."""
    budgets: OneOrMore[Percent] | None = None
    """Budgets whose supports the objective `residual` trains on; `null` takes `eval_budgets`."""


@dataclass(frozen=True)
class ReplaySpec(Settings):
    """How often one teacher pass is used; the paper uses each once."""

    pool: Count = 1
    """Teacher passes that are kept."""
    reuse: Count = 1
    """Steps until a new teacher pass is made."""


@dataclass(frozen=True)
class CurriculumSpec(Settings):
    """Shorter sequences at the start of training."""

    length: Length
    """First tokens of each sequence that are used."""
    share: Share
    """Share of the steps, from the first on, that are cut so."""


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """How feature maps are trained."""

    corpora: Annotated[tuple[CorpusName, ...], Field(min_length=1)]
    """Training texts, taken in turn: `sotu`, `wiki`, `pydoc` (assets), `fineweb`, `arxiv`, `bigpatent` (hub)."""
    steps: Count
    """Optimisation steps."""
    learning_rate: Positive
    """Peak learning rate of AdamW."""
    weight_decay: NotNegative
    """Decoupled weight decay of AdamW."""
    schedule: Literal["constant", "cosine"]
    """Course of the learning rate after the warm-up."""
    warmup_steps: Natural
    """Steps over which the learning rate rises linearly."""
    sequences_per_step: Count
    """Sequences that the gradients of a step are averaged over; a multiple of `gpus`."""
    queries_per_step: Count
    """Query positions sampled from a sequence per step."""
    query_window: Share
    """Final share of the sequence that query positions are drawn from (the paper: 33,000 of 65,536)."""
    replay: ReplaySpec
    curriculum: CurriculumSpec | None
    """Shorter sequences at the start; `null` trains on whole ones throughout."""
    held_out: OneOrMore[CorpusName]
    """Texts that progress is measured on: `sotu`, `wiki`, `pydoc`, `books` (assets), `wikitext` (hub); figures show the
    first."""
    eval_budgets: OneOrMore[Percent]
    """Budgets at which progress is measured."""
    eval_every: Count
    """Steps between two measurements."""
    checkpoint_every: Count
    """Steps between two checkpoints."""
    seed: Natural
    """Seed of weights, sequences and positions."""


@dataclass(frozen=True, kw_only=True)
class Phi(Training):
    """How feature maps are trained, their shape and their objective."""

    map: MapSpec
    objective: ObjectiveSpec
    gpus: Count
    """GPUs of one training job, a process on each, where the backbone requires one. A change trains nothing again."""

    def __post_init__(self) -> None:
        if self.sequences_per_step % self.gpus:
            raise Slip(
                "sequences_per_step",
                f"{self.sequences_per_step} is not a multiple of gpus ({self.gpus}), which share them; change one",
            )

    def changed(self, changes: Mapping[str, Any]) -> Phi:
        """These settings with the changes of a variant or a recipe, key by key, also within sections.

        Raises:
            Slip: the result is contradictory.
        """
        own = dataclasses.asdict(self)
        return parsed(Phi, own | changes | {key: own[key] | changes.get(key, {}) for key in SECTIONS_OF_PHI})


SECTIONS_OF_PHI = ("map", "objective", "replay")


# ---- parts of a study ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Maps(Settings):
    """Feature maps, named by the length that they are trained at."""

    main: Length
    """The maps that results use."""
    trained: OneOrMore[Length]
    """Lengths at which maps can be trained (`results/phi/1b_4k.safetensors`)."""

    def __post_init__(self) -> None:
        if self.main not in self.trained:
            raise Slip("main", f"{self.main} is not among maps.trained")


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
class RecipeRuns(Settings):
    """What the target `recipes` trains."""

    backbones: Distinct[Name]
    """Backbones; none leaves the target empty."""
    lengths: OneOrMore[Length]
    """Training lengths."""
    names: OneOrMore[Name]
    """Recipes of `config.yaml`, a line of the figure each."""
    seeds: OneOrMore[Natural]
    """Seeds under which each recipe is trained."""


@dataclass(frozen=True)
class Head(Settings):
    """The head whose kernels are shown, counted from 0."""

    layer: Natural
    """Its layer."""
    head: Natural
    """The query head in the layer."""


@dataclass(frozen=True)
class Diagnostics(Settings):
    """Per-head quantities on packed held-out text."""

    backbones: Distinct[Name]
    """Backbones that are captured on every text at every length, for the table and the claims."""
    corpora: OneOrMore[CorpusName]
    """Texts that can be captured on; the first is a text, on which all maps are compared, and `cwe` is made of RULER's
    common-words prompts."""
    lengths: OneOrMore[Length]
    """Lengths that can be captured at."""
    budget: Percent
    """One of the budgets: what the table, the claims and the figures of a single K show."""
    head: Head
    packs: Count
    """Sequences; for `cwe` as many as there are prompts, if those are fewer."""
    queries: Count
    """Teacher-forced decode queries per sequence."""
    audited: Count
    """Attention rows of each text and length that are measured a second time, in float64, spread over the layers."""
    seed: Natural
    """Seed of the sequences."""

    def __post_init__(self) -> None:
        if self.corpora[0] == CWE:
            raise Slip("corpora", f"{CWE} comes first, where the text belongs that all maps are compared on")


@dataclass(frozen=True)
class Latencies(Settings):
    """Where `results/runtime_<backbone>.csv` measures latency."""

    contexts: OneOrMore[Length]
    """Lengths of the prompts; what does not fit into memory is left out, and the table says so."""
    batches: OneOrMore[Count]
    """Prompts that are decoded at once (the paper: 1)."""
    budget: Percent
    """Exact-support budget that K comes from."""
    repeats: Count
    """Measured runs, after one that is not."""
    seed: Natural
    """Seed of the prompts and of the feature maps' random weights."""


@dataclass(frozen=True)
class Resampling(Settings):
    """Statistics of the result tables and of the diagnostics."""

    bootstrap_resamples: Count
    """Resamples behind the confidence intervals."""
    seed: Natural
    """Seed of the resampling."""


# ---- figures ---------------------------------------------------------------------------------------------------------


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
        if (panels := len(self.corpora) * len(self.lengths)) > MOST_PANELS:
            problem = f"corpora and lengths make {panels} panels, but the figure has room for {MOST_PANELS}; show fewer"
            raise ValueError(problem)


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
class OfRecipes(Settings):
    """A line for every recipe."""

    backbone: Name
    """One of the backbones of `recipes`."""


Figure = OfBackbones | OfOneCapture | OfCaptures | OfVariants | OfTrainings | OfRecipes
FIGURES: dict[str, tuple[type[Any], str]] = {
    "entropy_gain": (OfBackbones, "Gain of completion per head against entropy."),
    "kernel_sanity": (
        OfOneCapture,
        "Exact kernel of one head against the scores of the maps, and its error with and without the residual.",
    ),
    "logz_calibration": (OfCaptures, "Histograms of the error of the residual's log mass."),
    "fullsub_nosub_delta": (OfCaptures, "Histograms of what subtraction does to each head's error."),
    FIDELITY: (OfVariants, "Kernel of one head under the ablations' maps, at `ablations.length`."),
    "entropy_heatmap": (OfOneCapture, "Entropy of every head, and against the share that the residual estimate takes."),
    "mass_curves": (OfOneCapture, "Mass that the top K recover, for heads of low and of high entropy."),
    "quartile_error": (OfOneCapture, "Errors over K by quartile of entropy."),
    "training_curves": (OfTrainings, "Held-out errors over the steps of training."),
    COSTS: (OfRecipes, "Held-out errors over the seconds of training; made by the target `recipes`, not by `all`."),
    "fixedk_breakdown": (
        OfOneCapture,
        "Errors and gain against entropy at one K; any number of them, told apart by what follows the name.",
    ),
}
"""What each kind of figure is given, and what it shows."""
SEVERAL = ("fixedk_breakdown",)
"""Kinds of which a study may have several: `<kind>_<anything>`."""


def kind_of(label: str) -> str:
    """The kind of a figure. Raises ValueError for a label of none."""
    found = next((kind for kind in SEVERAL if re.fullmatch(rf"{kind}(_[a-z0-9]+)*", label)), label)
    if found not in FIGURES:
        raise ValueError(f"{label} is not one of {', '.join(FIGURES)}")
    return found


def _figures(shown: dict[str, Any]) -> dict[str, Figure]:
    """Each figure parsed as the class of its kind."""
    figures = {}
    for label, content in shown.items():
        try:
            figures[label] = parsed(FIGURES[kind_of(label)][0], content)
        except Slip as slip:
            raise Slip(f"{label}.{slip.key}" if slip.key else label, slip.problem) from None
    return figures


# ---- a study ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Study(Settings):
    """Protocol of one study."""

    lengths: OneOrMore[Length]
    """Context lengths that are evaluated."""
    maps: Maps
    budgets: OneOrMore[Percent]
    """Exact-support budgets in percent of the prefix, anchors included."""
    methods: OneOrMore[Name]
    """Evaluated methods: `full`, `topk`, `topk_phi`, `topk_phi_nosub`, and estimators of your own (docs/extending.md);
    every method but `full` is run at every budget."""
    anchors: AnchorSpec
    truncate_to: Length
    """Prompts that leave no room for the answer within this length are cut on the left, after the BOS token; results
    say how many."""
    benchmarks: Annotated[dict[Name, Benchmark], Field(min_length=1)]
    """Benchmarks by name: `ruler`, `babilong`, `longbench`."""
    mismatch: Mismatch
    ablations: Ablations
    phi: Phi
    recipes: RecipeRuns
    diagnostics: Diagnostics
    runtime: Latencies
    score: Resampling
    tables: Distinct[Annotated[str, Field(pattern=r"^(runtime_[a-z0-9.-]+|[a-z0-9_]+)$", title="table")]]
    """Tables that `all` makes; each has a template in `paper_tables/templates`, and the latencies `runtime_<backbone>`
    share one."""
    figures: Annotated[dict[str, Any], AfterValidator(_figures)]
    """Figures that `all` makes, each with what it shows; one that is not named is not made."""

    def __post_init__(self) -> None:
        if (slip := next(self._slips(), None)) is not None:
            raise slip

    def lengths_of(self, benchmark: str) -> tuple[str, ...]:
        """Lengths at which a benchmark is evaluated."""
        if benchmark not in self.benchmarks:
            return ()
        return self.benchmarks[benchmark].lengths or self.lengths

    @property
    def evaluated_lengths(self) -> list[str]:
        """Every length at which something is evaluated."""
        lengths = [length for benchmark in self.benchmarks for length in self.lengths_of(benchmark)]
        return list(dict.fromkeys([*self.lengths, *lengths]))

    @property
    def all_lengths(self) -> list[str]:
        """Every length that a backbone of the study meets."""
        return [
            *self.evaluated_lengths, self.truncate_to, *self.maps.trained, *self.diagnostics.lengths,
            *self.runtime.contexts,
        ]  # fmt: skip

    def _slips(self) -> Iterator[Slip]:
        """What no key says alone."""
        yield from self._benchmark_slips()
        yield from self._comparison_slips()
        yield from self._length_slips()
        yield from _unknown("methods", self.methods, estimators.NAMES)
        if self.tables and not set(self.methods) >= set(METHODS):
            yield Slip("methods", f"tables show every method of the paper; have {', '.join(METHODS)}, or tables empty")
        yield from self._table_slips()
        yield from self._diagnostics_slips()
        if self.phi.curriculum:
            yield from _beyond("phi.curriculum.length", self.phi.curriculum.length, self.maps.trained)

    def _benchmark_slips(self) -> Iterator[Slip]:
        for benchmark in self.benchmarks:
            for length in self.lengths_of(benchmark):
                try:
                    tasks_of(benchmark, tokens_of(length))
                except ValueError as error:
                    yield Slip(f"benchmarks.{benchmark}", str(error))

    def _comparison_slips(self) -> Iterator[Slip]:
        """In what maps are compared on: names and points that the study does not have elsewhere."""
        mismatch, ablations = self.mismatch, self.ablations
        if mismatch.backbones:
            yield from _unknown("mismatch.maps", mismatch.maps, self.maps.trained)
            yield from _unknown("mismatch.lengths", mismatch.lengths, self.lengths_of("ruler"))
            yield from _unknown("mismatch.budget", [mismatch.budget], self.budgets)
        if ablations.backbones:
            yield from _unknown("ablations.benchmarks", ablations.benchmarks, self.benchmarks)
            yield from _unknown("ablations.length", [ablations.length], self.maps.trained)
            yield from _unknown("ablations.budget", [ablations.budget], self.budgets)
            for benchmark in ablations.benchmarks:
                yield from self._ablated_benchmark_slips(benchmark)
        if mismatch.backbones or ablations.backbones:
            needed = ("full", "topk", "topk_phi")
            for method in (method for method in needed if method not in self.methods):
                yield Slip("methods", f"{method} is missing, which mismatch and ablations compare with")

    def _ablated_benchmark_slips(self, benchmark: str) -> Iterator[Slip]:
        length = self.ablations.length
        yield from _unknown("ablations.length", [length], self.lengths_of(benchmark))
        real = self.benchmarks[benchmark].budget_length == "real"
        if real and tokens_of(self.truncate_to) > tokens_of(length):
            yield Slip(
                "ablations.benchmarks",
                f"prompts of {benchmark} are up to truncate_to ({self.truncate_to}) long, beyond ablations.length "
                f"({length}), which the maps are trained on; take {benchmark} out",
            )

    def _length_slips(self) -> Iterator[Slip]:
        """The main maps serve every prompt and every captured text."""
        used = {f"length {length}": length for length in (*self.evaluated_lengths, *self.diagnostics.lengths)}
        for what, length in {**used, f"truncate_to: {self.truncate_to}": self.truncate_to}.items():
            if tokens_of(length) > tokens_of(self.maps.main):
                yield Slip("", f"{what} is beyond maps.main ({self.maps.main}), which the maps were trained on")

    def _table_slips(self) -> Iterator[Slip]:
        if "natural_main" in self.tables and len(self.lengths_of("longbench")) != 1:
            yield Slip("tables", "natural_main shows one length of longbench; give benchmarks.longbench.lengths one")
        needs = {"cross_length_mismatch": "mismatch", ACCOUNTING_TABLE: "diagnostics"}
        for label, section in (needs | dict.fromkeys(ABLATION_TABLES, "ablations")).items():
            if label in self.tables and not getattr(self, section).backbones:
                yield Slip("tables", f"{label} needs a backbone in {section}.backbones")

    def _diagnostics_slips(self) -> Iterator[Slip]:
        """In what is captured, and in what the figures show of it."""
        captured, ablated = self.diagnostics, self.ablations.length
        yield from _unknown("diagnostics.budget", [captured.budget], self.budgets)
        for length in captured.lengths if CWE in captured.corpora else ():
            if length not in self.lengths_of("ruler"):
                yield Slip(
                    "diagnostics.corpora",
                    f"{CWE} is made of RULER's prompts, which the study does not have at {length}; take {CWE} out, or "
                    "evaluate ruler there",
                )
        if FIDELITY in self.figures and ablated not in captured.lengths:
            yield Slip(f"figures.{FIDELITY}", f"needs ablations.length ({ablated}) in diagnostics.lengths")
        options = {"corpus": captured.corpora, "length": captured.lengths, "maps": self.maps.trained}
        options |= {"corpora": captured.corpora, "lengths": captured.lengths}
        for label, figure in self.figures.items():
            for key, values in options.items():
                yield from _unknown(f"figures.{label}.{key}", _listed(getattr(figure, key, ())), values)


# ---- config.yaml -----------------------------------------------------------------------------------------------------


@cache
def changes_of(settings: type[Any], *names: str) -> type[BaseModel]:
    """A model with the keys of `settings`, or with `names` of them; each may be left out, also within sections."""
    hints = get_type_hints(settings, include_extras=True)
    fields: dict[str, Any] = {
        name: (changes_of(hints[name]) if name in SECTIONS_OF_PHI else hints[name], None)
        for name in names or [field.name for field in dataclasses.fields(settings)]
    }
    name = f"Changes of {'Phi in a variant' if names else settings.__name__}"
    return create_model(name, __config__=Settings.__pydantic_config__, **fields)


def _told(changes: BaseModel) -> dict[str, Any]:
    """What the file says, without the keys that it leaves out."""
    return changes.model_dump(mode="json", exclude_unset=True)


VariantChanges = Annotated[changes_of(Phi, "map", "objective"), AfterValidator(_told)]
RecipeChanges = Annotated[changes_of(Phi), AfterValidator(_told)]


@dataclass(frozen=True)
class AblationRows(Settings):
    """Rows of the ablation tables, in order; `ours` is the study's own recipe."""

    dphi: OneOrMore[Name]
    """Rows of `results/ablation_dphi_*.csv`."""
    loss: OneOrMore[Name]
    """Rows of `results/ablation_loss_*.csv`."""


@dataclass(frozen=True, kw_only=True)
class Main(Settings):
    """What `config/config.yaml` says."""

    study: Text
    """Study that `all` makes: a file of `config/studies` without its ending."""
    examples: Count | None
    """Examples per task, in place of every benchmark's own count; `null` keeps the study's. Existing rows are kept."""
    assets: Annotated[str, Field(pattern=r"^[^{}\x00-\x1f\x7f-][^{}\x00-\x1f\x7f]*$", title="folder")]
    """Folder of the downloaded data and models; one that was made elsewhere is used as it is."""
    offline: bool
    """Whether to run without network, from the assets folder alone, which the target `prefetch` fills."""
    backbones: Annotated[dict[ShortName, RegisteredBackbone], Field(min_length=1)]
    """Language models by the short name that file names carry."""
    variants: dict[Label, VariantChanges]
    """Feature maps that the ablations train beside the study's own, by label: what each changes of `phi.map` and
    `phi.objective`."""
    ablations: AblationRows
    recipes: dict[Label, RecipeChanges]
    """Ways to train that the target `recipes` compares, by label: what each changes of the study's `phi`, also within
    `map`, `objective` and `replay`; seeds are those of the study's `recipes.seeds`."""

    def __post_init__(self) -> None:
        if "ours" in self.variants:
            raise Slip("variants.ours", "the name of a study's own recipe; rename the variant")
        for name in ("dphi", "loss"):
            for row in getattr(self.ablations, name):
                if row not in ("ours", *self.variants):
                    raise Slip(f"ablations.{name}", f"{row} is not ours and not one of {', '.join(self.variants)}")
        for label, changes in self.recipes.items():
            if "seed" in changes:
                raise Slip(f"recipes.{label}.seed", "seeds are those of recipes.seeds in config/studies; remove it")


@dataclass(frozen=True)
class Configuration:
    """`config.yaml` and all studies, checked against each other."""

    main: Main
    studies: dict[str, Study]

    def __post_init__(self) -> None:
        if (problem := next(self._problems(), None)) is not None:
            raise ValueError(problem)

    def backbones_of(self, study: str) -> list[str]:
        return [name for name, backbone in self.main.backbones.items() if backbone.study == study]

    def tokenizer_owner(self, tokenizer: str) -> str:
        """The first backbone with the tokenizer; the prompts that all of them share are built with its settings."""
        return next(name for name, backbone in self.main.backbones.items() if backbone.tokenizer == tokenizer)

    def _problems(self) -> Iterator[str]:
        """What no file says alone, one line each."""
        for name in self.main.backbones:
            yield from (f"config/config.yaml: backbones.{name}.{slip}" for slip in self._backbone_slips(name))
        for name in self.studies:
            if not re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_-]*", name):
                yield f"config/studies: '{name}.yaml': a study's name has letters, digits, _ and - only; rename it"
            if name == PUBLISHED:
                yield f"{_file_of(name)}: that name is for the tables with the paper's own values; rename the study"
        if self.main.study not in self.studies:
            yield f"study {self.main.study!r} is not known; known are {', '.join(self.studies)} (config/studies)"
        elif not self.backbones_of(self.main.study):
            yield (
                f"study {self.main.study} has no backbone; give one `study: {self.main.study}` in config/config.yaml"
            )
        for name in self.studies:
            yield from (f"{_file_of(name)}: {slip}" for slip in self._study_slips(name))

    def _backbone_slips(self, name: str) -> Iterator[Slip]:
        backbone = self.main.backbones[name]
        if backbone.study not in self.studies:
            yield Slip("study", f"{backbone.study!r} is not a study; known are {', '.join(self.studies)}")
            return
        for length in self.studies[backbone.study].all_lengths:
            if tokens_of(length) > backbone.context:
                problem = f"{backbone.context} tokens, but study {backbone.study} has the length {length}"
                yield Slip("context", problem)
        owner = self.main.backbones[self.tokenizer_owner(backbone.tokenizer)]
        if owner.study != backbone.study:
            problem = f"{backbone.tokenizer} is of study {owner.study}; backbones share one within a study"
            yield Slip("tokenizer", problem)
        if backbone.source == "hub" and not re.fullmatch("[0-9a-f]{40}", backbone.revision):
            problem = f"{backbone.revision} may move; write the commit, 40 digits and letters a to f"
            yield Slip("revision", problem)

    def _study_slips(self, name: str) -> Iterator[Slip]:
        """In what a study says of backbones, variants and recipes."""
        study, backbones = self.studies[name], self.backbones_of(name)
        yield from _unknown("mismatch.backbones", study.mismatch.backbones, backbones)
        yield from _unknown("ablations.backbones", study.ablations.backbones, backbones)
        yield from self._recipe_slips(study, backbones)
        yield from _unknown("diagnostics.backbones", study.diagnostics.backbones, backbones)
        yield from _unknown("tables", study.tables, tables_for(backbones))
        whose = {COSTS: study.recipes.backbones, FIDELITY: study.ablations.backbones}
        for label, figure in study.figures.items():
            options = {"variants": list(self.main.variants)}
            options |= dict.fromkeys(("backbone", "backbones"), whose.get(label, backbones))
            for key, values in options.items():
                yield from _unknown(f"figures.{label}.{key}", _listed(getattr(figure, key, ())), values)

    def _recipe_slips(self, study: Study, backbones: list[str]) -> Iterator[Slip]:
        runs = study.recipes
        if runs.backbones:
            yield from _unknown("recipes.names", runs.names, self.main.recipes)
            yield from _unknown("recipes.backbones", runs.backbones, backbones)
            yield from _unknown("recipes.lengths", runs.lengths, study.maps.trained)
        for label, changes in self.main.recipes.items() if backbones else ():
            where = f"phi, as recipe {label} changes it"
            try:
                phi = study.phi.changed(changes)
            except Slip as slip:
                yield Slip(where, str(slip))
                continue
            if phi.curriculum and label in runs.names and runs.backbones:
                slips = _beyond("curriculum.length", phi.curriculum.length, runs.lengths)
                yield from (Slip(where, str(slip)) for slip in slips)


def tables_for(backbones: Iterable[str]) -> list[str]:
    """Labels of the tables that a study of these backbones may show."""
    from residual_mass.paper import published  # only here, for tables are told what they show by specs
    from residual_mass.paper.tables.layouts import LAYOUTS

    of_paper = [label for label in published.labels() if not label.startswith(LATENCIES)]
    return list(dict.fromkeys([*of_paper, *LAYOUTS, *(f"{LATENCIES}{backbone}" for backbone in backbones)]))


def _listed(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _unknown(key: str, values: Iterable[Any], options: Iterable[Any]) -> Iterator[Slip]:
    options = list(options)
    known = ", ".join(f"{option:g}" if isinstance(option, float) else option for option in options) or "none"
    for value in (value for value in values if value not in options):
        yield Slip(key, f"{f'{value:g}' if isinstance(value, float) else value} is not one of {known}")


def _beyond(key: str, length: str, trained: Iterable[str]) -> Iterator[Slip]:
    shortest = min(trained, key=tokens_of, default=length)
    if tokens_of(length) > tokens_of(shortest):
        yield Slip(key, f"{length} is beyond the trained length {shortest}")


def _file_of(study: str) -> str:
    return f"config/studies/{study}.yaml"


# ---- reading ---------------------------------------------------------------------------------------------------------

Parsed = TypeVar("Parsed")


UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
"""Types of pydantic's errors."""


@cache
def adapter(settings: type[Parsed]) -> TypeAdapter[Parsed]:
    return TypeAdapter(settings)


def parsed(settings: type[Parsed], data: Any) -> Parsed:
    """`data`, as YAML or JSON has it, as an instance of a class of settings.

    Raises:
        Slip: a key is unknown, missing or wrong; names it.
    """
    try:
        return adapter(settings).validate_json(json.dumps(data))
    except ValidationError as error:
        raise _slip_of(error) from None
    except (TypeError, ValueError) as error:  # a date in YAML, for one
        raise Slip("", f"not a value of JSON ({error})") from None


def _slip_of(error: ValidationError) -> Slip:
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] in UNKNOWN), errors[0])  # a typo leaves its key missing, too
    path = [" ".join(str(part).split()) for part in first["loc"] if part != "[key]"]
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, Slip):
        return Slip(".".join([*path, *filter(None, [reason.key])]), reason.problem)
    known = dict.fromkeys(UNKNOWN, "unknown key") | {"missing": "missing key"}
    given = reprlib.repr(first["input"])
    problem = str(reason) if reason else known.get(first["type"], f"{first['msg']}, not {given}")
    return Slip(".".join(path), f"{problem}; config/README.md explains the keys")


def load(root: Path, main: Mapping[str, Any]) -> Configuration:
    """The configuration of a checkout.

    Args:
        main: config/config.yaml with what the command line changed.

    Raises:
        ValueError: a file is not YAML, or a key is unknown, missing or wrong, or contradicts another; one line that
            names file, key and remedy.
    """
    files = sorted((root / "config/studies").glob("*.yaml"))
    checked = _from_file("configuration", Main, dict(main))
    return Configuration(checked, {path.stem: _from_file(_file_of(path.stem), Study, _yaml(path)) for path in files})


def _from_file(where: str, settings: type[Parsed], data: Any) -> Parsed:
    try:
        return parsed(settings, data)
    except Slip as slip:
        raise ValueError(f"{where}: {slip}") from None


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{_file_of(path.stem)}: not valid YAML: {' '.join(str(error).split())}") from None
