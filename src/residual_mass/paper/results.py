"""Reading of result files: typed rows by the stage that wrote them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from residual_mass.files import read_json
from residual_mass.paper.frames import read_frame, typed
from residual_mass.provenance import sidecar_of
from residual_mass.spec.settings import MAPS_HEADER, maps_label


def load_results(paths: Iterable[Path]) -> dict[str, pd.DataFrame]:
    """Returns the rows of result files by the stage that wrote them, as their records say, each with its file as
    `source`.
    """
    stages: dict[str, list[pd.DataFrame]] = {}
    for path in paths:
        record = read_json(sidecar_of(path))
        is_training = record["stage"] == "train"
        if path.suffix == ".safetensors":
            stage = "maps"
            rows = maps_row(path)
        else:
            stage = "score" if record["stage"] == "join" else record["stage"]
            rows = read_frame(path)
        if is_training:
            rows = rows.assign(**_training(record))
        rows = rows.assign(source=path.name)
        stages.setdefault(stage, []).append(rows)
    return {stage: typed(pd.concat(frames, ignore_index=True)) for stage, frames in stages.items()}


def maps_row(path: Path) -> pd.DataFrame:
    """Returns the label, size, numbers of heads and settings of feature maps from the header of their file; no weights
    are loaded.
    """
    import safetensors

    size = 0
    with safetensors.safe_open(path, framework="numpy") as stream:
        facts = json.loads(stream.metadata()[MAPS_HEADER])
        for name in stream.keys():  # noqa: SIM118 - a file of tensors is no mapping
            size += math.prod(stream.get_slice(name).get_shape())
    shape = facts["shape"]
    recipe = facts["training"]["recipe"]
    (variant,) = recipe["variants"]
    label = "" if variant["label"] == "ours" else variant["label"]
    query_heads = shape["layers"] * shape["query_heads"]
    kv_heads = shape["layers"] * shape["kv_heads"]
    row = {
        "maps": maps_label(recipe["length"], label),
        "params_per_head": size // (query_heads + kv_heads),
        "query_heads": query_heads,
        "kv_heads": kv_heads,
        **facts["map"],
    }
    return typed(pd.DataFrame([row]))


def _training(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts in the record of a training as columns."""
    spec = record["spec"]
    backbone = spec["backbone"]
    facts = {name: backbone[name] for name in ("study", "model_id", "revision")}
    facts["backbone"] = backbone["name"]
    facts["weights"] = "random" if backbone["source"] == "random" else "pretrained"
    facts |= {name: spec[name] for name in ("length", "steps", "sequences_per_step")}
    facts["reuse"] = spec["replay"]["reuse"]
    facts["hardware"] = str(record.get("hardware", ""))
    facts["processes"] = record.get("processes", 1) if facts["hardware"] else None
    return facts
