"""Files of the hub that the jobs of a study read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from residual_mass.benchmarks.catalogue import parts_of
from residual_mass.core.settings import tokens_of
from residual_mass.inputs.hub_data import HUB, STREAMED, HubPart
from residual_mass.study.jobs import StudyJobs, read_studies
from residual_mass.study.specs import ModelNeed, PrefetchSpec, StreamNeed


def run(jobs: Path, assets: Path) -> None:
    """The `prefetch` stage, for all studies in `jobs`, which `study.start` writes."""
    from residual_mass.prefetch import fetch

    for study in read_studies(jobs):
        fetch.run(needs_of(study), assets)


def needs_of(study: StudyJobs) -> PrefetchSpec:
    """Collects what a study reads from the hub."""
    models = [{"backbone": asdict(backbone)} for backbone in study.backbones]
    return hub_needs(study.name, [*models, *(job.spec for job in study.jobs)])


def hub_needs(study: str, specs: Iterable[dict[str, Any]]) -> PrefetchSpec:
    """Collects what jobs read from the hub.

    Args:
        specs: specs of the jobs as parsed JSON; specs of other stages add nothing.
    """
    models: dict[ModelNeed, None] = {}
    parts: dict[HubPart, None] = {}
    streams: dict[tuple[Any, ...], StreamNeed] = {}
    for spec in specs:
        backbone = spec.get("backbone")
        if isinstance(backbone, dict) and backbone["source"] == "hub":
            models[ModelNeed(backbone["model_id"], backbone["revision"])] = None
        if spec.get("tokenizer_source") == "hub":
            models[ModelNeed(spec["model_id"], spec["revision"])] = None
        if "tokenizer_source" in spec and spec["data_source"] == "hub":
            parts |= dict.fromkeys(parts_of(spec["benchmark"], tokens_of(spec["length"])))
        held_out = spec.get("held_out", spec.get("corpora", []))  # without a training, all corpora are held out
        texts = [*held_out, *([spec["corpus"]] if backbone and "corpus" in spec else [])]
        parts |= dict.fromkeys(HUB[name].part for name in texts if name in HUB)
        for need in stream_needs(spec) if "steps" in spec else ():
            known = streams.setdefault(same_order(asdict(need)), need)
            streams[same_order(asdict(need))] = max(known, need, key=lambda one: one.tokens)
    return PrefetchSpec(study, tuple(models), tuple(parts), tuple(streams.values()))


def stream_needs(train: dict[str, Any]) -> Iterator[StreamNeed]:
    """Yields how far a training (spec as parsed JSON) reads into each of its streamed corpora."""
    steps, replay, corpora = train["steps"], train["replay"], train["corpora"]
    passes = steps if replay == {"pool": 1, "reuse": 1} else (steps - 1) // replay["reuse"] + 1
    owner = {key: train["backbone"][key] for key in ("tokenizer", "model_id", "revision", "source")}
    for place, name in enumerate(corpora):
        sequences = math.ceil((passes - place) / len(corpora))
        if name in STREAMED and sequences > 0:
            tokens = sequences * tokens_of(train["length"])
            yield StreamNeed(name, **owner, seed=train["seed"], slots=train["sequences_per_step"], tokens=tokens)


def same_order(stream: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a key that is equal for trainings that read the same documents and tokens of a corpus in one order."""
    return tuple(stream[key] for key in ("corpus", "tokenizer", "seed", "slots"))
