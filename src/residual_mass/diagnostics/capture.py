"""Per-head, per-query accounting quantities on packs of held-out text.

Each pack is an L-token prefill followed by teacher-forced decode queries. The measured prefix is the prefill, so all of
the mid-region is visible. The keys and values of one layer are in memory at a time.

Shape letters: Hq / Hkv = query / KV heads, G = Hq / Hkv, Q = queries per pack, L = prefill tokens, D = head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from residual_mass.core.accounting import attention_scores
from residual_mass.core.measures import mass_curve
from residual_mass.core.selection import full_prefix, partition, retrieved_count
from residual_mass.core.settings import tokens_of
from residual_mass.diagnostics.packs import Pack, make_packs, visit_layers, with_place
from residual_mass.files import write_parquet
from residual_mass.model.errors import grouped, layer_measures
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.provenance import MANIFEST, Record
from residual_mass.study.specs import CaptureSpec

log = logging.getLogger(__name__)

ROUND_DIGITS = (1, 1.5, 2, 3, 5, 7)
"""Leading digits of the K at which mass curves are sampled."""


def run(spec: CaptureSpec, assets: Path, phi: Path, prompts: Path | None, heads: Path, mass: Path) -> None:
    """The `capture` stage.

    Writes:
        heads: Parquet, `core.row_measures`, one row per (pack, layer, head, query, k).
        mass: Parquet, one row per (pack, layer, head, k): C_mid(K), mean over the pack's queries.
    """
    record = Record("capture", spec, [assets / MANIFEST, phi, prompts])
    length = tokens_of(spec.length)
    if length > spec.maps.length and not spec.allow_extrapolation:
        raise ValueError(
            f"length {spec.length} is beyond the {spec.maps.length} tokens the maps were trained on; "
            "use longer-trained maps, or set allow_extrapolation to measure the collapse"
        )
    maps = PhiMaps.load(phi)
    backbone = load_backbone(spec.backbone, assets)
    maps.require(backbone.shape, spec.backbone.model_id, spec.backbone.revision)
    maps = maps.to(backbone.device)
    packs = make_packs(spec.corpus, backbone, spec.length, spec.queries, spec.packs, spec.seed, assets, prompts)
    log.info("%d packs of %s, %d + %d tokens, on %s", len(packs), spec.corpus, length, spec.queries, backbone.device)
    captured = Captured(spec, backbone, maps)
    for number, pack in enumerate(tqdm(packs, desc="capture", unit="pack")):
        captured.add(number, pack)
    captured.write(heads, mass)
    for output in (heads, mass):
        record.write(output, device=backbone.device, identity=backbone.identity)


class Captured:
    """What has been measured so far."""

    def __init__(self, spec: CaptureSpec, backbone: Backbone, maps: PhiMaps) -> None:
        self.spec, self.backbone, self.maps = spec, backbone, maps
        self.length = tokens_of(spec.length)
        anchors = spec.anchors.sink + spec.anchors.tail
        self.ks = [retrieved_count(budget, self.length, anchors) for budget in spec.budgets]
        if self.length <= anchors + 1:  # the entropy of a single token is not defined
            raise ValueError(
                f"length {spec.length}: {anchors} anchors leave fewer than two mid-region tokens; take a longer one"
            )
        self.mass_ks = round_ks(self.length - anchors)
        self.heads: list[pd.DataFrame] = []
        self.mass: list[pd.DataFrame] = []

    def add(self, number: int, pack: Pack) -> None:
        """Measures one pack."""

        def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
            queries, keys, values = queries.float(), keys.float(), values.float()
            measures = layer_measures(self.maps, layer, queries, keys, values, scale, self.ks, self.spec.anchors)
            budgets = {"k": self.ks, "budget_percent": self.spec.budgets}
            self.heads.append(_frame(measures, {"pack": number, "layer": layer}, ("head", "query"), budgets))
            curve = {"c_mid": self._mass(queries, keys, scale)}
            self.mass.append(_frame(curve, {"pack": number, "layer": layer}, ("head",), {"k": self.mass_ks}))

        visit_layers(self.backbone, pack, self.length, visit)

    def _mass(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """C_mid [Hq, len(mass_ks)], mean over queries."""
        anchors = self.spec.anchors
        mid = partition(full_prefix(self.length, keys.device), anchors.sink, anchors.tail).mid
        curve = mass_curve(attention_scores(grouped(queries, keys.shape[0]), keys, scale), mid, self.mass_ks)
        return curve.reshape(*queries.shape[:2], -1).mean(1)

    def write(self, heads: Path, mass: Path) -> None:
        spec = self.spec
        place = {"backbone": spec.backbone, "corpus": spec.corpus, "length": spec.length}
        origin = {
            "maps": spec.maps.label,
            "study": spec.study,
            "model_id": spec.backbone.model_id,
            "revision": spec.backbone.revision,
            "weights": spec.backbone.weights,
            "phi_sha": self.maps.sha256,
        }
        write_parquet(mass, with_place(pd.concat(self.mass), **place))
        write_parquet(heads, with_place(pd.concat(self.heads), **place, **origin))


def round_ks(most: int) -> list[int]:
    """Round numbers from 1 on, then `most`."""
    powers = range(len(str(most)))
    grid = {int(digit * 10**power) for power in powers for digit in ROUND_DIGITS if digit * 10**power < most}
    return sorted(grid | {most})


def _frame(
    measured: dict[str, Tensor], constant: dict[str, int], names: Sequence[str], last: dict[str, Sequence[float]]
) -> pd.DataFrame:
    """One row per entry of [*names, len(last)], with an index column per dimension; the last has the values given."""
    shape = next(iter(measured.values())).shape
    index = [torch.arange(size) for size in shape]
    grid = dict(zip((*names, "slot"), torch.meshgrid(*index, indexing="ij"), strict=True))
    columns = constant | {name: grid[name].flatten().numpy() for name in names}
    slot = grid["slot"].flatten()
    columns |= {name: np.asarray(values)[slot] for name, values in last.items()}
    return pd.DataFrame(columns | {name: value.cpu().flatten().numpy() for name, value in measured.items()})
