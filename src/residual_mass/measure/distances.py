"""Measures methods on a user's texts with the stages of the studies: given continuations, then distances."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from residual_mass.backbones.loading import backbone_identity, load_tokenizer
from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.benchmarks import fidelity
from residual_mass.benchmarks.columns import FIDELITY
from residual_mass.benchmarks.force import following, write_forced
from residual_mass.core.settings import AnchorSpec, MapsSpec
from residual_mass.files import read_csv, read_parquet, require_writable
from residual_mass.measure import models, steps, texts
from residual_mass.measure.command import Asked
from residual_mass.measure.steps import Reading
from residual_mass.measure.texts import Text
from residual_mass.methods import method_named
from residual_mass.methods.arms import ArmSpec
from residual_mass.metrics import KL, SAME_TOP
from residual_mass.provenance import Record
from residual_mass.recipes import RECIPES
from residual_mass.study.specs import BackboneSpec, FidelitySpec, ForceSpec

RESAMPLES = 1000
"""Behind the intervals, as in the studies."""
DATA = "data"
"""Folder of what the answer is read out of, and what a further run goes on from."""


@dataclass(frozen=True)
class Line:
    """A method at a budget on a text: its distance from full attention, and what a step reads."""

    text: str
    method: str
    budget_percent: float
    kl: float
    low: float | None
    """Ends of the interval; None for a single document."""
    high: float | None
    same_top: float
    reading: Reading


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        copied: by text, the share of the tokens after the prompts that end a pair of tokens which their prompt has.
        new: by text, the share of those that their prompt does not have at all.
    """

    asked: Asked
    backbone: BackboneSpec
    texts: list[Text]
    lines: list[Line]
    copied: dict[str, float]
    new: dict[str, float]


def measure(asked: Asked) -> Measured:
    """Measures all methods on all texts; rows of an earlier run in the same folder are not decoded again.

    Raises:
        ValueError: the model, a text, a method or a number is at fault; names it.
        NotFiniteError: the model returns a NaN or an infinity.
    """
    data = asked.out / DATA
    forced, distances, pairs = (data / name for name in ("forced.parquet", "fidelity.csv", "pairs.csv"))
    require_writable(forced)
    arms, maps = _arms(asked), {} if asked.phi is None else {asked.phi.stem: asked.phi}
    phi = None if asked.phi is None else PhiMaps.load(asked.phi)
    backbone = models.named(asked)
    spec = _spec(asked, backbone, arms, maps)
    tokenizer = load_tokenizer(backbone.model_id, backbone.revision, backbone.source, asked.assets_folder)
    found = texts.read(asked, tokenizer, asked.length_in_tokens + 1 + asked.tokens)
    load = functools.cache(lambda: models.load(backbone, asked))

    record = Record("force", spec, [])
    documents = [
        document for text in found for document in following(spec, text.name, text.sequences, spec.rows_of_answer)
    ]
    identity = backbone_identity(backbone, asked.assets_folder)
    facts = write_forced(spec, documents, identity, load, maps, data / "store.jsonl", forced)
    record.write(forced, identity=identity, **facts)
    resampling = {"bootstrap_resamples": RESAMPLES, "seed": asked.seed}
    about = FidelitySpec(
        study=models.STUDY, backbone=backbone, length=asked.length, recipe=RECIPES["fidelity"], **resampling
    )
    fidelity.run(about, forced, distances, pairs)
    lines = [line for text in found for line in _lines(asked, text, distances, load(), spec.anchors, phi)]
    seen = read_parquet(forced, ["text", "seen"], "measure").groupby("text")["seen"]
    return Measured(
        asked, backbone, found, lines, _shares(seen.apply(lambda x: (x == 2).mean())),
        _shares(seen.apply(lambda x: (x == 0).mean())),
    )  # fmt: skip


def _shares(by_text: pd.Series) -> dict[str, float]:
    return {str(name): float(share) for name, share in by_text.items()}


def _arms(asked: Asked) -> tuple[ArmSpec, ...]:
    """Full attention, and every method at every budget.

    Raises:
        ValueError: a method is unknown or `full`, lacks its maps, or a budget is out of range.
    """
    label = None if asked.phi is None else asked.phi.stem
    rules = [method_named(name) for name in asked.methods]
    for rule in rules:
        if rule.whole_prefix:
            raise ValueError(f"--methods: {rule.name} is what the others are compared with; leave it out")
        if rule.needs_maps and label is None:
            raise ValueError(f"--methods: {rule.name} needs feature maps of this model; pass their file to --phi")
    partial = (
        ArmSpec(rule.name, budget, label if rule.needs_maps else None) for rule in rules for budget in asked.budgets
    )
    return ArmSpec("full"), *partial


def _spec(asked: Asked, backbone: BackboneSpec, arms: tuple[ArmSpec, ...], maps: dict[str, Path]) -> ForceSpec:
    wanted = asked.length_in_tokens + 1 + asked.tokens
    if 0 < backbone.context < wanted:
        raise ValueError(
            f"--length {asked.length}: with what follows, {wanted:,} tokens, and {backbone.model_id} was made for "
            f"{backbone.context:,}; choose a shorter one"
        )
    return ForceSpec(
        study=models.STUDY, backbone=backbone, length=asked.length, corpora=(), documents=asked.documents,
        tokens=asked.tokens, seed=asked.seed, asked=(), arms=arms, arms_of_documents=(), anchors=AnchorSpec(),
        truncate_to=asked.length, maps=tuple(MapsSpec(label, asked.length_in_tokens) for label in maps),
        recipe=RECIPES["force"],
    )  # fmt: skip


def _lines(
    asked: Asked, text: Text, distances: Path, backbone: models.Backbone, anchors: AnchorSpec, phi: PhiMaps | None
) -> Iterator[Line]:
    """The lines of a text, from the fewest bytes to the most."""
    rows = {
        (row["metric"], row["method"], float(row["budget_percent"] or 100)): row
        for row in read_csv(distances, FIDELITY, "measure")
        if row["text"] == text.name
    }
    length = asked.length_in_tokens
    read = steps.readings(backbone, text.sequences, length, asked.methods, asked.budgets, anchors, phi)
    for (method, budget), reading in sorted(read.items(), key=lambda item: item[1].share):
        kl, top = rows[KL.name, method, budget], rows[SAME_TOP.name, method, budget]
        ends = (float(kl[end]) if kl[end] else None for end in ("ci_low", "ci_high"))
        yield Line(text.name, method, budget, float(kl["value"]), *ends, float(top["value"]), reading)
