"""Feature maps: which are trained, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from residual_mass.core.settings import MapSpec, Settings
from residual_mass.study.parsing import Slip, parsed
from residual_mass.study.sections.fields import Field
from residual_mass.study.sections.values import (
    Count,
    HeldOutText,
    Length,
    Natural,
    NotNegative,
    OneOrMore,
    Percent,
    Positive,
    Share,
    TrainedText,
)


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
    precision: Literal["float32", "bfloat16"] = "float32"
    """What operands of training's products are rounded to, while sums stay in float32; `bfloat16` is for GPUs, whose
    products of it are many times as fast."""
    replay: ReplaySpec
    curriculum: CurriculumSpec | None
    """Shorter sequences at the start; `null` trains on whole ones throughout."""
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
    """GPUs of one training job, a process on each, where the backbone requires one. A change trains nothing again."""

    def __post_init__(self) -> None:
        if self.sequences_per_step % self.gpus:
            raise Slip(
                "sequences_per_step",
                f"{self.sequences_per_step} is not a multiple of gpus ({self.gpus}), which share them; change one",
            )

    def changed(self, changes: Mapping[str, Any]) -> Phi:
        """These settings with the changes of a variant, key by key, also within sections.

        Raises:
            Slip: the result is contradictory.
        """
        own = dataclasses.asdict(self)
        return parsed(Phi, own | changes | {key: own[key] | changes.get(key, {}) for key in SECTIONS_OF_PHI})


SECTIONS_OF_PHI = ("map", "objective", "replay")
