"""Headers of the files of feature maps: what the maps are and how they were trained; the weights stay on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from residual_mass.core.settings import MAPS_HEADER, MapSpec, maps_label
from residual_mass.files import REMAKE
from residual_mass.study.parsing import parsed
from residual_mass.study.specs import TableSpec, TrainSpec

OWN_RECIPE = "ours"
"""What a file calls maps of the study's own recipe, which have no variant in their label."""


@dataclass(frozen=True)
class MapsFile:
    """A file of feature maps.

    Attributes:
        map: shape of the maps.
        per_head: parameters of one head's map.
        query_heads, kv_heads: of all layers together.
    """

    path: Path
    recipe: TrainSpec
    map: MapSpec
    per_head: int
    query_heads: int
    kv_heads: int

    @property
    def variant(self) -> str:
        (variant,) = self.recipe.variants
        return "" if variant.label == OWN_RECIPE else variant.label

    @property
    def label(self) -> str:
        """Such as 2k or 1k-dphi_32."""
        return maps_label(self.recipe.length, self.variant)


def load_maps_file(path: Path) -> MapsFile:
    """Raises ValueError naming the file when it holds no feature maps, or those of another version."""
    try:
        with safetensors.safe_open(path, framework="numpy") as stream:
            facts = json.loads(stream.metadata()[MAPS_HEADER])
            names = stream.keys()
            sizes = [math.prod(stream.get_slice(name).get_shape()) for name in names]
        return _maps_file(path, facts, sum(sizes))
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not feature maps of this version ({error!r}); delete it and {REMAKE}") from None


def _maps_file(path: Path, facts: dict[str, Any], parameters: int) -> MapsFile:
    """All heads have maps of one shape."""
    shape = facts["shape"]
    query_heads, kv_heads = (shape["layers"] * shape[f"{name}_heads"] for name in ("query", "kv"))
    return MapsFile(
        path=path,
        recipe=parsed(TrainSpec, facts["training"]["recipe"]),
        map=parsed(MapSpec, facts["map"]),
        per_head=parameters // (query_heads + kv_heads),
        query_heads=query_heads,
        kv_heads=kv_heads,
    )


def check_shown(spec: TableSpec, files: Sequence[MapsFile]) -> None:
    """Raises ValueError unless the files are what table `spec` shows: one per label, of each of its backbones."""
    seen: set[tuple[str, str]] = set()
    for file in files:
        backbone = file.recipe.backbone
        if backbone.study != spec.study or backbone.name not in spec.backbones:
            raise ValueError(
                f"{file.path}: is of backbone {backbone.name} of study {backbone.study!r}, table {spec.label} shows "
                f"{', '.join(spec.backbones)} of {spec.study!r}; take it out of --results"
            )
        if (backbone.name, file.label) in seen:
            raise ValueError(f"{file.path}: a second file of {backbone.name} {file.label}; give one")
        seen.add((backbone.name, file.label))
    for name in spec.backbones:
        if name not in {backbone for backbone, _ in seen}:
            raise ValueError(f"table {spec.label}: no file is of backbone {name}; pass its maps to --results")
