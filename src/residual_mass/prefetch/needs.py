"""What the jobs of a study read of the hub."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from residual_mass.benchmarks.catalogue import parts_of
from residual_mass.core.settings import tokens_of
from residual_mass.inputs.hub_data import HUB, STREAMED, HubPart
from residual_mass.study.specs import ModelNeed, PrefetchSpec, StreamNeed


def hub_needs(study: str, specs: Iterable[dict[str, Any]]) -> PrefetchSpec:
    """What jobs read of the hub.

    Args:
        specs: what the jobs are told, as parsed JSON; those of other stages need nothing.
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
        texts = [*spec.get("held_out", []), *([spec["corpus"]] if backbone and "corpus" in spec else [])]
        parts |= dict.fromkeys(HUB[name].part for name in texts if name in HUB)
        for need in stream_needs(spec) if "corpora" in spec else ():
            known = streams.setdefault(same_order(asdict(need)), need)
            streams[same_order(asdict(need))] = max(known, need, key=lambda one: one.tokens)
    return PrefetchSpec(study, tuple(models), tuple(parts), tuple(streams.values()))


def stream_needs(train: dict[str, Any]) -> Iterator[StreamNeed]:
    """How far one training reads into each of its streamed corpora, as its spec (parsed JSON) says."""
    steps, replay, corpora = train["steps"], train["replay"], train["corpora"]
    passes = steps if replay == {"pool": 1, "reuse": 1} else (steps - 1) // replay["reuse"] + 1
    owner = {key: train["backbone"][key] for key in ("tokenizer", "model_id", "revision", "source")}
    for place, name in enumerate(corpora):
        sequences = math.ceil((passes - place) / len(corpora))
        if name in STREAMED and sequences > 0:
            tokens = sequences * tokens_of(train["length"])
            yield StreamNeed(name, **owner, seed=train["seed"], slots=train["sequences_per_step"], tokens=tokens)


def same_order(stream: dict[str, Any]) -> tuple[Any, ...]:
    """What tells trainings apart that read different documents of a corpus, or other tokens of them."""
    return tuple(stream[key] for key in ("corpus", "tokenizer", "seed", "slots"))
