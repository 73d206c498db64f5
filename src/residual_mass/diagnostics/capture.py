"""Per-head, per-query accounting quantities on packs of held-out text.

Each pack is an L-token prefill followed by teacher-forced decode queries. The measured prefix is the prefill, so all of
the mid-region is visible. Only the keys and values of one layer are in memory.

Shape letters: Hq / Hkv = query / KV heads, Q = queries per pack, L = prefill tokens, D = head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from torch import Tensor
from tqdm import tqdm

from residual_mass.core.accounting import attention_scores
from residual_mass.core.measures import mass_curve
from residual_mass.core.selection import full_prefix, partition
from residual_mass.decode.terms import grouped
from residual_mass.diagnostics.errors import ReadLayer
from residual_mass.diagnostics.packs import Pack, ks_of, make_packs, tidy, visit_layers, with_place
from residual_mass.files import write_parquet
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import MAPS_AT_FAULT, PhiMaps
from residual_mass.provenance import Record
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import CaptureSpec

log = logging.getLogger(__name__)

ROUND_DIGITS = (1, 1.5, 2, 3, 5, 7)
"""Leading digits of the K at which mass curves are sampled."""


def run(spec: CaptureSpec, assets: Path, phi: Path, prompts: Path | None, heads: Path, mass: Path) -> None:
    """The `capture` stage.

    Writes:
        heads: Parquet, `ReadLayer.accounting`, one row per (pack, layer, head, query, k).
        mass: Parquet, one row per (pack, layer, head, k): C_mid(K), mean over the pack's queries.
    """
    record = Record("capture", spec, [assets / MANIFEST, phi, prompts])
    if tokens_of(spec.length) > spec.maps.length and not spec.allow_extrapolation:
        raise ValueError(
            f"length {spec.length} is beyond the {spec.maps.length} tokens the maps were trained on; "
            "use longer-trained maps, or set allow_extrapolation to measure the collapse"
        )
    maps = PhiMaps.load(phi)
    backbone = load_backbone(spec.backbone, assets)
    maps.require(backbone.shape, spec.backbone.model_id, spec.backbone.revision)
    packs = make_packs(spec.corpus, backbone, spec.length, spec.queries, spec.packs, spec.seed, assets, prompts)
    log.info("%d packs of %s at %s on %s", len(packs), spec.corpus, spec.length, backbone.device)
    of_heads, curves = captured(spec, backbone, maps.to(backbone.device), packs)
    place = {"backbone": spec.backbone, "corpus": spec.corpus, "length": spec.length}
    origin = {
        "maps": spec.maps.label,
        "study": spec.study,
        "model_id": spec.backbone.model_id,
        "revision": spec.backbone.revision,
        "weights": spec.backbone.weights,
        "phi_sha": maps.sha256,
    }
    write_parquet(mass, with_place(curves, **place))
    write_parquet(heads, with_place(of_heads, **place, **origin))
    for output in (heads, mass):
        record.write(output, device=backbone.device, identity=backbone.identity)


def captured(
    spec: CaptureSpec, backbone: Backbone, maps: PhiMaps, packs: Sequence[Pack]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns rows of the heads and mass curves of all packs.

    Raises:
        ValueError: the anchors leave too few tokens, or errors with the maps are not finite; names the layer.
    """
    length = tokens_of(spec.length)
    anchors = spec.anchors
    folded = maps.folded()
    budgets = {"k": ks_of(spec.budgets, spec.length, anchors), "budget_percent": spec.budgets}
    prefix = full_prefix(length, backbone.device)
    mid = partition(prefix, anchors.sink, anchors.tail).mid
    mass_ks = round_ks(length - anchors.sink - anchors.tail)
    heads: list[pd.DataFrame] = []
    curves: list[pd.DataFrame] = []

    def visit(pack: int, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        read = ReadLayer(queries, keys, values, scale, spec.budgets, anchors, folded[layer])
        measures = read.accounting()
        errors = measures["e_sub"] + measures["e_nosub"]
        if not errors.isfinite().all():
            raise ValueError(f"layer {layer}: errors with the feature maps are not finite; {MAPS_AT_FAULT}")
        heads.append(tidy(measures, ("head", "query"), budgets, pack=pack, layer=layer))
        scores = attention_scores(grouped(queries, len(keys)), keys, scale)
        recovered = mass_curve(scores, mid, mass_ks)
        c_mid = recovered.reshape(*queries.shape[:2], -1).mean(1)  # [Hq, len(mass_ks)]
        curves.append(tidy({"c_mid": c_mid}, ("head",), {"k": mass_ks}, pack=pack, layer=layer))

    for number, pack in enumerate(tqdm(packs, unit="pack")):
        visit_layers(backbone, pack, length, partial(visit, number))
    return pd.concat(heads), pd.concat(curves)


def round_ks(largest: int) -> list[int]:
    """Returns round numbers in ascending order from 1, then `largest`."""
    ks = {largest}
    for power in range(len(str(largest))):
        of_decade = [digit * 10**power for digit in ROUND_DIGITS]
        ks |= {int(k) for k in of_decade if k < largest}  # 1.5 becomes 1, which the set holds already
    return sorted(ks)
