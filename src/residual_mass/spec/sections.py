"""Every key of the configuration with its type, bounds and meaning. Specs inherit from sections, so that a key is
declared once.

Without pydantic, as in the GPU check, types and bounds are not checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from residual_mass.spec.settings import MapSpec, Settings
from residual_mass.spec.texts import MEASURED, PROMPT_PACKS, TRAINED

if TYPE_CHECKING:
    TrainedText = HeldOutText = MeasuredText = str
else:
    TrainedText, HeldOutText = Literal[TRAINED], Literal[MEASURED]
    MeasuredText = Literal[(*MEASURED, *PROMPT_PACKS)]

try:
    from pydantic import AfterValidator, Field
except ModuleNotFoundError:  # the GPU check makes specs without it, and then these marks have no effect

    def AfterValidator(*_: object, **marks: object) -> object:  # type: ignore[no-redef]  # noqa: N802
        return marks

    Field = AfterValidator


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if repeated := next((value for value in values if values.count(value) > 1), None):
        raise ValueError(f"has {repeated} twice; remove one")
    return values


Item = TypeVar("Item")
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Percent = Annotated[float, Field(gt=0, le=100)]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
Length = Annotated[str, Field(pattern=r"^[1-9][0-9]*k?$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
ShortName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
Label = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
Distinct = Annotated[tuple[Item, ...], AfterValidator(_distinct)]
OneOrMore = Annotated[tuple[Item, ...], Field(min_length=1), AfterValidator(_distinct)]

# ---- backbones -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackboneSettings(Settings):
    """A frozen language model: where it comes from and how it is run."""

    study: Line
    """The one study whose protocol applies to this backbone."""
    model_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./][A-Za-z0-9_./-]*$")]
    """Repository on the Hugging Face hub, `OWNER/NAME`; with `source: assets` its last part, in lower case, names the
    folder under `models/`; with `source: gguf` a file, by its path or as `OWNER/NAME/FILE.gguf` on the hub."""
    revision: Name
    """Commit on the hub, 40 digits and letters a to f; a label for the weights of the assets; or the SHA-256 of a GGUF
    file, 64 of them."""
    source: Literal["assets", "hub", "gguf", "random"]
    """Where the weights come from; `gguf` keeps them in the codes of the file on a CPU; `random` takes the shape from
    the assets and draws the weights."""
    dtype: Literal["float32", "bfloat16"]
    """Precision of weights and activations."""
    tokenizer: ShortName
    """Label of the tokenizer; backbones of a study that share it share the frozen prompts."""
    context: Count
    """Longest sequence that the backbone supports, in tokens."""
    requires_gpu: bool = False
    """Whether jobs of this backbone ask for a GPU."""


@dataclass(frozen=True, kw_only=True)
class RegisteredBackbone(BackboneSettings):
    """A backbone as `config.yaml` registers it."""

    title: Line
    """Name in tables and figures."""

    def __post_init__(self) -> None:
        if self.dtype == "bfloat16" and not self.requires_gpu:
            raise ValueError("a backbone in bfloat16 is run on a GPU; write `requires_gpu: true`")
        if self.source == "hub" and not re.fullmatch("[0-9a-f]{40}", self.revision):
            raise ValueError(f"revision {self.revision} may move; write the commit, 40 digits and letters a to f")
        if self.source == "gguf":
            if not self.model_id.endswith(".gguf"):
                raise ValueError(f"model_id {self.model_id} is no GGUF file; write its path, or OWNER/NAME/FILE.gguf")
            if not re.fullmatch("[0-9a-f]{64}", self.revision):
                raise ValueError(f"revision {self.revision} is no SHA-256; write that of the file, from `sha256sum`")
        elif not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?", self.model_id):
            raise ValueError(f"model_id {self.model_id} is no name on the hub; write OWNER/NAME")


# ---- feature maps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Maps(Settings):
    """Feature maps, named by the length that they are trained at."""

    main: Length
    """The maps that results use."""
    trained: OneOrMore[Length]
    """Lengths at which maps can be trained (`results/phi/1b_4k.safetensors`)."""


@dataclass(frozen=True)
class ObjectiveSpec(Settings):
    """Training objective and its weights (the paper's equations in its appendix on training; `residual` is ours)."""

    name: Literal["ours", "kl", "aux", "lolcats", "residual"] = "ours"
    """`ours` is the paper's, `kl` and `aux` are its two halves, `lolcats` is that of its ablation, and `residual` is
    our own: the output error of subtractive completion at `budgets`."""
    tau: Positive = 10.0
    """Temperature of the divergence term."""
    lambda_kl: Annotated[float, Field(ge=0, le=1)] = 0.99
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
    """Weight of the log-mass error in the objective `residual`, where the output error has weight 1."""
    relative: bool = True
    """Whether the objective `residual` divides errors by the mean error of TopK on the same support."""
    budgets: OneOrMore[Percent] | None = None
    """Budgets whose supports the objective `residual` trains on; `null` takes `eval_budgets`."""


@dataclass(frozen=True)
class ReplaySpec(Settings):
    """How often one teacher pass is used; the paper uses each once."""

    pool: Count = 1
    """Teacher passes that are kept."""
    reuse: Count = 1
    """Steps until a new teacher pass is made."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Settings):
    """How feature maps are trained."""

    corpora: Annotated[tuple[TrainedText, ...], Field(min_length=1)]
    """Training texts, taken in turn."""
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
    held_out: OneOrMore[HeldOutText]
    """Texts that progress is measured on; figures show the first."""
    eval_budgets: OneOrMore[Percent]
    """Budgets at which progress is measured."""
    eval_every: Count
    """Steps between two measurements."""
    checkpoint_every: Count
    """Steps between two checkpoints."""
    seed: Natural
    """Seed of weights, sequences and positions."""


@dataclass(frozen=True, kw_only=True)
class Phi(TrainingSettings):
    """How feature maps are trained, their shape and their objective."""

    map: MapSpec
    objective: ObjectiveSpec
    gpus: Count
    """GPUs of one training job, a process on each, if the backbone requires a GPU. A change does not train again."""

    def __post_init__(self) -> None:
        if self.sequences_per_step % self.gpus:
            count = self.sequences_per_step
            raise ValueError(f"sequences_per_step ({count}) is not a multiple of gpus ({self.gpus}); change one")


# ---- evaluation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Decoding(Settings):
    """How the answers to a benchmark's prompts are generated."""

    chat_template: bool
    """Whether prompts are wrapped as a user's message in the model's chat template."""
    answer_margin: Natural | None
    """Tokens past the length of the reference answers after which generation stops; `null` keeps the task's own limit
    of 16 to 512 tokens, which holds in any case."""
    stop_when_saturated: bool
    """Whether an arm stops generating as soon as further tokens cannot change its score."""
    budget_length: Literal["nominal", "real"]
    """Whether budgets are shares of the context length (`nominal`) or of the prompt's own length (`real`)."""
    batch_tokens: Count
    """Prompt tokens that are decoded as one batch, under all methods and budgets. A longer prompt is a batch of its
    own. If a GPU's memory runs out, the following batches are half as large."""


@dataclass(frozen=True, kw_only=True)
class Benchmark(Decoding):
    """Examples of a benchmark, and how they are answered."""

    lengths: OneOrMore[Length] | None
    """Context lengths at which this benchmark is evaluated; `null` takes the study's."""
    data_source: Literal["assets", "hub"]
    """Where examples come from: the benchmark's own data on the hub, or else the pinned wheels for RULER and files of
    the package for BABILong at 1k (simulated) and LongBench at 2k (three of its tasks have stand-ins)."""
    examples: Count
    """Examples per task, or all examples if a data set has fewer."""
    tasks_per_job: Literal["all", 1]
    """Whether one job generates for all tasks (`all`), or each task has its own job (`1`)."""
    seed: Natural
    """Seed of RULER's examples; other examples are as their files have them."""


@dataclass(frozen=True, kw_only=True)
class Continuations(Settings):
    """Continuations that every arm is given, token by token (forced decoding)."""

    corpora: Distinct[HeldOutText]
    """Held-out texts; prefixes are continued by the text that follows them."""
    documents: Count
    """Documents of each text; they do not overlap."""
    tokens: Count
    """Longest continuation, in tokens."""
    seed: Natural
    """Seed of the documents."""


@dataclass(frozen=True, kw_only=True)
class Fidelity(Continuations):
    """How far every arm's next token is from that of full attention, on given continuations."""

    lengths: Distinct[Length]
    """Lengths of the prefixes; `[]` leaves fidelity out."""
    methods: Distinct[Name]
    """Methods, not of the paper, that are measured in addition to the study's, only on documents."""
    benchmarks: Distinct[Name]
    """Benchmarks whose prompts are continued by their right answer and by the greedy answer of full attention."""
    prompts_at: Distinct[Length]
    """Those of `lengths` at which prompts are continued, for benchmarks that are evaluated there."""
    examples: Count
    """Prompts of each task of these benchmarks."""


@dataclass(frozen=True)
class Mismatch(Settings):
    """RULER at every length with maps of every training length, including lengths longer than in training."""

    backbones: Distinct[Name]
    """Backbones for which `all` makes the table; `[]` leaves it out."""
    maps: OneOrMore[Length]
    """Lengths that the maps were trained at."""
    lengths: OneOrMore[Length]
    """Evaluated lengths."""
    budget: Percent
    """The only budget."""

    benchmarks: ClassVar = ("ruler",)


@dataclass(frozen=True)
class Ablations(Settings):
    """Where the variants of `config.yaml` are trained and evaluated."""

    backbones: Distinct[Name]
    """Backbones for which `all` makes the tables; `[]` leaves them out."""
    benchmarks: Distinct[Name]
    """Evaluated benchmarks."""
    length: Length
    """Training and evaluation length."""
    budget: Percent
    """The only budget."""

    @property
    def lengths(self) -> tuple[str, ...]:
        return (self.length,)


@dataclass(frozen=True)
class Resampling(Settings):
    """Statistics of the result tables and of the diagnostics."""

    bootstrap_resamples: Count
    """Resamples behind the confidence intervals."""
    seed: Natural
    """Seed of the resampling."""


# ---- measurements ----------------------------------------------------------------------------------------------------


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
    """Sequences of tokens; a text made of prompts has at most one for each prompt."""
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
    """Texts that can be captured on; the claims are about the first."""
    lengths: OneOrMore[Length]
    """Lengths that can be captured at."""
    budget: Percent
    """The study's budget that the table, the claims and the figures of a single K show."""
    head: Head


@dataclass(frozen=True, kw_only=True)
class Residuals(Sampling):
    """Errors of methods in every head, on packed held-out text."""

    backbones: Distinct[Name]
    """Backbones for which `all` measures errors; `[]` leaves them out."""
    corpora: OneOrMore[HeldOutText]
    """Held-out texts."""
    lengths: OneOrMore[Length]
    """Lengths of the prefixes."""
    budgets: OneOrMore[Percent]
    """Exact-support budgets, which need not be those of the study."""
    methods: OneOrMore[Name]
    """Methods; `topk` must be one of them, because the others are compared with it."""


@dataclass(frozen=True)
class Latencies(Settings):
    """What `results/runtime_<backbone>.csv` measures."""

    contexts: Distinct[Length]
    """Lengths of the prompts; those that do not fit into memory are left out, and the table says so. `[]` leaves
    latencies out."""
    batches: OneOrMore[Count]
    """Prompts that are decoded at once (the paper: 1)."""
    budget: Percent
    """Exact-support budget that K comes from."""
    repeats: Count
    """Measured runs, after one warm-up run."""
    seed: Natural
    """Seed of the prompts and of the feature maps' random weights."""


@dataclass(frozen=True)
class Figure(Settings):
    """What a figure shows. Its kind says which of these keys it has."""

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
        """Returns the values of these keys; a key that the figure does not have adds none."""
        found: list[str] = []
        for key in keys:
            value = getattr(self, key)
            found += [value] if isinstance(value, str) else value
        return tuple(value for value in found if value)


def fields_of(section: type[Settings], values: Settings) -> dict[str, Any]:
    """Returns the fields of a section from an instance of it, for a spec that inherits from the section."""
    return {field.name: getattr(values, field.name) for field in fields(section)}  # type: ignore[arg-type]
