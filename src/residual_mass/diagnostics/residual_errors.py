"""Errors of every method on the same held-out texts, head by head.

Packs and queries are those of `capture`. All methods read the same tokens, by the path that decodes; means over a
pack's queries are kept.

Shape letters: P = packs, N = layers, M = methods, Hq = query heads, B = budgets.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from residual_mass.backbones.loading import Backbone, load_backbone
from residual_mass.backbones.method_errors import TOPK, ReadLayer
from residual_mass.backbones.phi_maps import MAPS_AT_FAULT, PhiMaps
from residual_mass.backbones.prefix import Map
from residual_mass.core.settings import tokens_of
from residual_mass.core.support import retrieved_count
from residual_mass.diagnostics.columns import RESIDUAL_ERRORS, RESIDUAL_HEADS
from residual_mass.diagnostics.packs import Pack, make_packs, visit_layers, with_place
from residual_mass.diagnostics.resampling import BootstrapEstimate, drawn_packs, estimate, over_packs, ratio
from residual_mass.files import csv_text, write_parquet, write_text
from residual_mass.methods import Step, method_named
from residual_mass.methods.step_bytes import feature_bytes, full_bytes, kept_bytes, step_bytes
from residual_mass.provenance import MANIFEST, Record
from residual_mass.study.specs import ResidualErrorsSpec

log = logging.getLogger(__name__)

PHI = "topk_phi"
"""What heads are compared with besides TopK."""
BFLOAT16 = 2


def run(spec: ResidualErrorsSpec, assets: Path, phi: Path | None, heads: Path, out: Path) -> None:
    """The `residual-errors` stage.

    Args:
        phi: maps of `spec.maps`; None where no method needs them.

    Writes:
        heads: Parquet, one row per (corpus, pack, layer, query head, method, budget): means over the pack's queries.
            `log_z_error` is the mean of log Z_R hat - log Z_R over the `log_z_rows` queries where both are defined;
            `recall` and `tokens_read` are as in `ReadLayer.errors`.
        out: CSV, one row per (corpus, method, budget), intervals by pack. `over_topk` is the ratio of mean errors,
            `heads_below_topk` and `heads_below_phi` are shares of (layer, query head). `scan_bytes`, `row_bytes` and
            `summary_bytes` are what a step reads per KV head and layer (`methods.step_bytes`), `step_share` their sum
            over what full attention reads; `state_bytes` is what a method keeps of a prompt besides keys and values,
            `state_share` that in units of a bfloat16 cache. `kept_share` is all that is kept, packed
            (`methods.step_bytes.kept_bytes`), and `held_share` all that is held here, with keys and values in
            bfloat16 and states as they are (codes in a byte each), both in the same units.
    """
    record = Record("residual_errors", spec, [assets / MANIFEST, phi])
    _check(spec, phi)
    backbone = load_backbone(spec.backbone, assets)
    maps = None if phi is None else _maps(phi, backbone)
    measured = [
        _measured(spec, backbone, maps, corpus, assets)
        for corpus in tqdm(spec.corpora, desc="residual errors", unit="corpus")
    ]
    write_parquet(heads, pd.concat([_frame(spec, each) for each in measured], ignore_index=True)[RESIDUAL_HEADS])
    lines = (line for each in measured for line in _lines(spec, backbone, maps, each))
    write_text(out, csv_text(RESIDUAL_ERRORS, lines))
    for output in (heads, out):
        record.write(output, device=backbone.device, identity=backbone.identity)


def _check(spec: ResidualErrorsSpec, phi: Path | None) -> None:
    rules = [method_named(method) for method in spec.methods]
    if whole := [rule.name for rule in rules if rule.whole_prefix]:
        raise ValueError(f"methods: {whole[0]} is what errors are measured against; leave it out")
    if TOPK not in spec.methods:
        raise ValueError(f"methods: {TOPK} is missing, with which the others are compared; add it")
    if phi is None and (needing := [rule.name for rule in rules if rule.needs_maps]):
        raise ValueError(f"methods: {needing[0]} needs feature maps; pass their file to --phi, or leave it out")
    if (phi is None) != (spec.maps is None):
        raise ValueError("--phi and spec.maps belong together; give both or neither")
    if tokens_of(spec.length) > spec.backbone.context:
        context = f"the context of {spec.backbone.name} ({spec.backbone.context} tokens)"
        raise ValueError(f"length {spec.length}: longer than {context}; choose a shorter one")
    if tokens_of(spec.length) <= (anchors := _anchors(spec)) + 1:
        raise ValueError(
            f"length {spec.length}: {anchors} anchors leave fewer than two mid-region tokens; take a longer one"
        )


def _maps(phi: Path, backbone: Backbone) -> PhiMaps:
    maps = PhiMaps.load(phi, backbone.device)
    maps.require(backbone.shape, backbone.spec.model_id, backbone.spec.revision)
    return maps


def _anchors(spec: ResidualErrorsSpec) -> int:
    return spec.anchors.sink + spec.anchors.tail


@dataclass(frozen=True)
class Measured:
    """What was measured on a corpus.

    Attributes:
        cells: by column, [P, N, M, Hq, B].
        facts: by column, [P, N, Hq].
        state_bytes: [M].
    """

    corpus: str
    cells: dict[str, np.ndarray]
    facts: dict[str, np.ndarray]
    state_bytes: tuple[int, ...]


def _measured(
    spec: ResidualErrorsSpec, backbone: Backbone, maps: PhiMaps | None, corpus: str, assets: Path
) -> Measured:
    packs = make_packs(corpus, backbone, spec.length, spec.queries, spec.packs, spec.seed, assets, None)
    log.info("%d methods on %d packs of %s at %s", len(spec.methods), len(packs), corpus, spec.length)
    folded = None if maps is None else maps.folded()
    progress = tqdm(packs, desc=corpus, unit="pack")
    layers = [layer for pack in progress for layer in _layers(spec, backbone, folded, pack)]

    cells, facts = (_stacked([layer[part] for layer in layers], len(packs)) for part in (0, 1))
    return Measured(corpus, cells, facts, layers[0].state_bytes)


def _stacked(layers: Sequence[Mapping[str, np.ndarray]], packs: int) -> dict[str, np.ndarray]:
    """[...] of each layer of each pack -> [P, N, ...]."""
    return {
        name: np.stack([layer[name] for layer in layers]).reshape(packs, -1, *first.shape)
        for name, first in layers[0].items()
    }


class Layer(NamedTuple):
    """What was measured in a layer of a pack."""

    cells: dict[str, np.ndarray]
    """[M, Hq, B]."""
    facts: dict[str, np.ndarray]
    """[Hq]."""
    state_bytes: tuple[int, ...]
    """[M]."""


def _layers(
    spec: ResidualErrorsSpec, backbone: Backbone, maps: Sequence[tuple[Map, Map]] | None, pack: Pack
) -> list[Layer]:
    found: list[Layer] = []

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        of_layer = None if maps is None else maps[layer]
        read = ReadLayer(queries.float(), keys.float(), values.float(), scale, spec.budgets, spec.anchors, of_layer)
        cells = [_cells(read.errors(method), method, layer) for method in spec.methods]
        found.append(
            Layer(
                {name: np.stack([each[name] for each in cells]) for name in cells[0]},
                {name: value.double().mean(1).cpu().numpy() for name, value in read.facts().items()},
                tuple(read.state_bytes(method) for method in spec.methods),
            )
        )

    visit_layers(backbone, pack, tokens_of(spec.length), visit)
    return found


def _cells(rows: Mapping[str, Tensor], method: str, layer: int) -> dict[str, np.ndarray]:
    """Means over the queries of [Hq, Q, B], and how many had a log-Z error."""
    if not rows["error"].isfinite().all():
        at_fault = f"; {MAPS_AT_FAULT}" if method_named(method).needs_maps else ""
        raise ValueError(f"layer {layer}: errors of {method} are not finite{at_fault}")
    defined = rows["log_z_error"].isfinite()
    count = defined.sum(1)
    means = {name: rows[name].double().mean(1) for name in ("error", "residual_share_hat", "recall", "tokens_read")}
    means["log_z_error"] = torch.where(defined, rows["log_z_error"], 0).double().sum(1) / count
    return {name: value.cpu().numpy() for name, value in (means | {"log_z_rows": count}).items()}


def _frame(spec: ResidualErrorsSpec, measured: Measured) -> pd.DataFrame:
    shape = measured.cells["error"].shape
    pack, layer, method, head, slot = (index.ravel() for index in np.indices(shape, dtype=np.int16))
    columns = {
        "pack": pack, "layer": layer, "head": head,
        "method": pd.Categorical.from_codes(method, list(spec.methods)),
        "budget_percent": np.asarray(spec.budgets)[slot], "k": np.asarray(_retrieved(spec))[slot],
    }  # fmt: skip
    columns |= {name: _single(value).ravel() for name, value in measured.cells.items()}
    columns |= {
        name: np.broadcast_to(_single(value)[:, :, None, :, None], shape).ravel()
        for name, value in measured.facts.items()
    }
    return with_place(pd.DataFrame(columns), spec.backbone, measured.corpus, spec.length)


def _single(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32) if values.dtype == np.float64 else values


def _retrieved(spec: ResidualErrorsSpec) -> list[int]:
    return [retrieved_count(budget, tokens_of(spec.length), _anchors(spec)) for budget in spec.budgets]


def _lines(
    spec: ResidualErrorsSpec, backbone: Backbone, maps: PhiMaps | None, measured: Measured
) -> Iterator[dict[str, object]]:
    packs, layers, _, query_heads, _ = measured.cells["error"].shape
    if packs == 1:
        log.warning("%s: one pack only, so no interval", measured.corpus)
    drawn = drawn_packs(f"{measured.corpus} {spec.length}", packs, spec.bootstrap_resamples, spec.seed)
    cache = 2 * tokens_of(spec.length) * backbone.shape.head_dim * BFLOAT16
    about = {
        "study": spec.study,
        "backbone": spec.backbone.name,
        "corpus": measured.corpus,
        "length": spec.length,
        "packs": packs,
        "heads": layers * query_heads,
        "rows": packs * layers * query_heads * spec.queries,
        "model_id": spec.backbone.model_id,
        "revision": spec.backbone.revision,
        "weights": spec.backbone.weights,
    }
    for m, method in enumerate(spec.methods):
        size = measured.state_bytes[m]
        of_method = {"method": method, "state_bytes": size, "state_share": _text(size / cache)}
        if method_named(method).needs_maps:
            of_method |= _of_maps(spec, maps)
        for b, budget in enumerate(spec.budgets):
            of_budget = {"budget_percent": f"{budget:g}", "k": _retrieved(spec)[b]}
            cells = {name: value[..., b] for name, value in measured.cells.items()}
            read = _bytes(spec, backbone, maps, method, float(cells["tokens_read"][:, :, m].mean()), size)
            yield about | of_method | of_budget | read | _numbers(spec.methods, cells, m, drawn)


def _bytes(
    spec: ResidualErrorsSpec, backbone: Backbone, maps: PhiMaps | None, method: str, tokens_read: float, state: int
) -> dict[str, str]:
    """What a step reads, given the mean of the tokens that are read exactly, and what is kept."""
    shape, anchors = backbone.shape, _anchors(spec)
    step = Step(
        tokens_of(spec.length), shape.head_dim, shape.query_heads // shape.kv_heads, anchors, tokens_read - anchors
    )
    step = step if maps is None else step._replace(features=maps.map.d_phi)
    rule, cache = method_named(method), full_bytes(step)
    read, kept = step_bytes(rule, step), kept_bytes(rule, step)
    held = kept.cache + state + feature_bytes(rule, step, step.tokens)
    sizes = {"scan_bytes": read.scan, "row_bytes": read.rows, "summary_bytes": read.summary}
    shares = {"step_share": read.total / cache, "kept_share": kept.total / cache, "held_share": held / cache}
    return {name: _text(value) for name, value in {"tokens_read": tokens_read, **sizes, **shares}.items()}


def _of_maps(spec: ResidualErrorsSpec, maps: PhiMaps | None) -> dict[str, object]:
    assert spec.maps is not None and maps is not None, "checked before the work"
    steps = maps.training_facts.get("recipe", {}).get("steps", "")
    return {"maps": spec.maps.label, "training_steps": steps, "phi_sha": maps.sha256}


def _numbers(methods: Sequence[str], cells: Mapping[str, np.ndarray], m: int, drawn: np.ndarray) -> dict[str, object]:
    """The numbers of a method at a budget, given [P, N, M, Hq]."""
    by_pack, by_head = cells["error"].mean(axis=(1, 3)), cells["error"].mean(axis=0)  # [P, M], [N, M, Hq]
    as_is = np.arange(len(by_pack))[None]
    topk = methods.index(TOPK)

    def error(packs: np.ndarray, method: int) -> np.ndarray:
        return over_packs(packs, by_pack[None, :, method])[:, 0]

    def over_topk(packs: np.ndarray) -> np.ndarray:
        return ratio(error(packs, m), error(packs, topk))

    def heads_below(other: str) -> str:
        compared = other in methods and other != methods[m]
        return _text((by_head[:, m] < by_head[:, methods.index(other)]).mean()) if compared else ""

    sums = np.nansum((cells["log_z_error"] * cells["log_z_rows"])[:, :, m])
    return {
        **_with_interval("error", estimate(error, as_is, drawn, m)),
        **_with_interval("over_topk", estimate(over_topk, as_is, drawn)),
        "heads_below_topk": heads_below(TOPK),
        "heads_below_phi": heads_below(PHI),
        "log_z_error": _text(float(ratio(sums, cells["log_z_rows"][:, :, m].sum()))),
        "recall": _text(float(cells["recall"][:, :, m].mean())),
    }


def _with_interval(name: str, found: BootstrapEstimate) -> dict[str, str]:
    """Without an interval where it has no width, as of a single pack."""
    low, high = (found.low, found.high) if found.low < found.high else (math.nan, math.nan)
    return {name: _text(found.value), f"{name}_ci_low": _text(low), f"{name}_ci_high": _text(high)}


def _text(value: float) -> str:
    """Six significant digits; empty where the value is not defined."""
    return "" if math.isnan(value) else f"{value + 0.0:.6g}"  # adding zero removes the sign of -0.0
