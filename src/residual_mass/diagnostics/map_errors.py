"""Errors of several sets of feature maps on the same held-out text.

Packs, queries and measured prefix are those of `capture`, but only means are kept.

Shape letters: Hq = query heads, Q = queries per pack.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from tqdm import tqdm

from residual_mass.backbones.loading import Backbone, load_backbone
from residual_mass.backbones.measured import layer_measures
from residual_mass.backbones.phi_maps import PhiMaps, require_one_file_each
from residual_mass.core.settings import tokens_of
from residual_mass.core.support import retrieved_count
from residual_mass.diagnostics.packs import Pack, make_packs, visit_layers
from residual_mass.files import csv_text, write_text
from residual_mass.provenance import MANIFEST, Record
from residual_mass.study.specs import MapErrorsSpec

log = logging.getLogger(__name__)

MEASURES = ("e_topk", "e_sub", "e_nosub", "log_z_error", "clamped")
COLUMNS = (
    "backbone maps trained_length length corpus budget_percent k e_topk e_sub e_nosub log_z_error "
    "heads_below_topk clamped_share packs rows model_id revision phi_sha"
).split()


def run(spec: MapErrorsSpec, assets: Path, phi: Sequence[Path], out: Path) -> None:
    """The `map-errors` stage: one CSV row per (maps, budget). Maps may have been trained on shorter texts.

    `log_z_error` is the mean of log Z_R hat - log Z_R over the rows where both are defined, `heads_below_topk` the
    share of (layer, query head) whose mean error the residual lowers, `clamped_share` the share of rows whose residual
    was dropped.

    Args:
        phi: files of the maps, in the order of `spec.maps`.
    """
    record = Record("map_errors", spec, [assets / MANIFEST, *phi])
    require_one_file_each(phi, spec.maps)
    backbone = load_backbone(spec.backbone, assets)
    maps = [PhiMaps.load(path, backbone.device) for path in phi]
    for each in maps:
        each.require(backbone.shape, spec.backbone.model_id, spec.backbone.revision)
    length = tokens_of(spec.length)
    log.info("%d sets of maps on %d packs of %s at %d tokens", len(maps), spec.packs, spec.corpus, length)
    packs = [
        _pack_measures(spec, backbone, maps, pack)
        for pack in tqdm(
            make_packs(spec.corpus, backbone, spec.length, spec.queries, spec.packs, spec.seed, assets, None),
            desc="map errors",
            unit="pack",
        )
    ]
    lines = (_line(spec, maps, packs, m, b) for m in range(len(maps)) for b in range(len(spec.budgets)))
    write_text(out, csv_text(COLUMNS, lines))
    record.write(out, device=backbone.device, identity=backbone.identity)


def _pack_measures(spec: MapErrorsSpec, backbone: Backbone, maps: Sequence[PhiMaps], pack: Pack) -> np.ndarray:
    """[maps, layers, measures, Hq, Q, budgets] of one pack."""
    by_layer: list[np.ndarray] = []

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        queries, keys, values = queries.float(), keys.float(), values.float()

        def measured(label: str, each: PhiMaps) -> np.ndarray:
            try:
                rows = layer_measures(each, layer, queries, keys, values, scale, _retrieved(spec), spec.anchors)
            except ValueError as error:
                raise ValueError(f"maps {label}: {error}") from None
            rows["log_z_error"] = rows["log_z_hat"] - rows["log_z_true"]
            return np.stack([rows[name].float().cpu().numpy() for name in MEASURES])

        by_layer.append(np.stack([measured(m.label, each) for m, each in zip(spec.maps, maps, strict=True)]))

    visit_layers(backbone, pack, tokens_of(spec.length), visit)
    return np.stack(by_layer, axis=1)


def _retrieved(spec: MapErrorsSpec) -> list[int]:
    anchors = spec.anchors.sink + spec.anchors.tail
    return [retrieved_count(budget, tokens_of(spec.length), anchors) for budget in spec.budgets]


def _line(
    spec: MapErrorsSpec, maps: Sequence[PhiMaps], packs: Sequence[np.ndarray], m: int, b: int
) -> dict[str, object]:
    measures = np.stack([pack[m, ..., b] for pack in packs])  # [packs, layers, measures, Hq, Q]
    values = {name: measures[:, :, i] for i, name in enumerate(MEASURES)}
    gaps = values["log_z_error"]
    gain = (values["e_topk"] - values["e_sub"]).mean(axis=(0, 3))  # [layers, Hq]
    means = {name: values[name].mean() for name in ("e_topk", "e_sub", "e_nosub")}
    means |= {"log_z_error": gaps[np.isfinite(gaps)].mean(), "heads_below_topk": (gain > 0).mean()}
    means["clamped_share"] = values["clamped"].mean()
    return {
        "backbone": spec.backbone.name,
        "maps": spec.maps[m].label,
        "trained_length": spec.maps[m].length,
        "length": spec.length,
        "corpus": spec.corpus,
        "budget_percent": f"{spec.budgets[b]:g}",
        "k": _retrieved(spec)[b],
        **{name: f"{value:.6f}" for name, value in means.items()},
        "packs": len(packs),
        "rows": values["e_sub"].size,
        "model_id": spec.backbone.model_id,
        "revision": spec.backbone.revision,
        "phi_sha": maps[m].sha256,
    }
