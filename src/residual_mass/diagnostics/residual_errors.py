"""Errors of every method on the same held-out texts, head by head.

Packs and queries are those of `capture`. All methods read the same tokens, by the path that decodes; means over a
pack's queries are kept.

Shape letters: P = packs, N = layers, M = methods, Hq = query heads, B = budgets.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from residual_mass.core.selection import retrieved_count
from residual_mass.core.settings import tokens_of
from residual_mass.diagnostics.packs import make_packs, visit_layers, with_place
from residual_mass.diagnostics.resampling import BootstrapEstimate, drawn_packs, estimate, over_packs, ratio
from residual_mass.files import csv_text, write_parquet, write_text
from residual_mass.methods import Step, method_named
from residual_mass.methods.step_bytes import feature_bytes, full_bytes, kept_bytes, step_bytes
from residual_mass.model.errors import TOPK, ReadLayer
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import MAPS_AT_FAULT, PhiMaps
from residual_mass.provenance import MANIFEST, Record
from residual_mass.study.specs import ResidualErrorsSpec

log = logging.getLogger(__name__)

RESIDUAL_ERRORS = (
    "study backbone corpus length method maps budget_percent k error error_ci_low error_ci_high over_topk "
    "over_topk_ci_low over_topk_ci_high heads_below_topk heads_below_phi log_z_error recall tokens_read "
    "scan_bytes row_bytes summary_bytes step_share state_bytes state_share kept_share held_share "
    "training_steps packs heads rows model_id revision weights phi_sha"
).split()
RESIDUAL_HEADS = (
    "backbone corpus length pack layer head method budget_percent k error log_z_error log_z_rows residual_share_hat "
    "recall tokens_read h_mid skewness kurtosis"
).split()
Arrays = dict[str, np.ndarray]
PHI = "topk_phi"
"""What heads are compared with besides TopK."""


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
    _check(spec)
    backbone = load_backbone(spec.backbone, assets)
    maps = None if phi is None else PhiMaps.load(phi, backbone.device)
    if maps is not None:
        maps.require(backbone.shape, backbone.spec.model_id, backbone.spec.revision)
    frames, lines = [], []
    for corpus in tqdm(spec.corpora, desc="residual errors", unit="corpus"):
        cells, facts, state_bytes = _measured(spec, backbone, maps, corpus, assets)
        frames.append(with_place(_frame(spec, cells, facts), spec.backbone, corpus, spec.length))
        lines += _lines(spec, backbone, maps, corpus, cells, state_bytes)
    write_parquet(heads, pd.concat(frames, ignore_index=True)[RESIDUAL_HEADS])
    write_text(out, csv_text(RESIDUAL_ERRORS, lines))
    for output in (heads, out):
        record.write(output, device=backbone.device, identity=backbone.identity)


def _check(spec: ResidualErrorsSpec) -> None:
    if TOPK not in spec.methods:
        raise ValueError(f"methods: {TOPK} is missing, with which the others are compared; add it")
    if tokens_of(spec.length) <= (anchors := spec.anchors.sink + spec.anchors.tail) + 1:
        raise ValueError(
            f"length {spec.length}: {anchors} anchors leave fewer than two mid-region tokens; take a longer one"
        )


def _measured(
    spec: ResidualErrorsSpec, backbone: Backbone, maps: PhiMaps | None, corpus: str, assets: Path
) -> tuple[Arrays, Arrays, list[int]]:
    """Measures all packs of a corpus: cells [P, N, M, Hq, B] and facts [P, N, Hq] by column, and the bytes that each
    method keeps.
    """
    packs = make_packs(corpus, backbone, spec.length, spec.queries, spec.packs, spec.seed, assets, None)
    log.info("%d methods on %d packs of %s at %s", len(spec.methods), len(packs), corpus, spec.length)
    folded = None if maps is None else maps.folded()
    cells: list[Arrays] = []
    facts: list[Arrays] = []
    state_bytes: list[int] = []

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        of_layer = None if folded is None else folded[layer]
        read = ReadLayer(queries.float(), keys.float(), values.float(), scale, spec.budgets, spec.anchors, of_layer)
        means = [_means(read.errors(method), method, layer) for method in spec.methods]
        cells.append({name: np.stack([each[name] for each in means]) for name in means[0]})
        facts.append({name: value.double().mean(1).cpu().numpy() for name, value in read.facts().items()})
        state_bytes[:] = [read.state_bytes(method) for method in spec.methods]

    for pack in tqdm(packs, desc=corpus, unit="pack"):
        visit_layers(backbone, pack, tokens_of(spec.length), visit)

    def by_pack(layers: Sequence[Arrays]) -> Arrays:
        stacked = {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
        return {name: value.reshape(len(packs), -1, *value.shape[1:]) for name, value in stacked.items()}

    return by_pack(cells), by_pack(facts), state_bytes


def _means(rows: Mapping[str, Tensor], method: str, layer: int) -> Arrays:
    """Means over the queries of [Hq, Q, B], and how many had a log-Z error."""
    if not rows["error"].isfinite().all():
        at_fault = f"; {MAPS_AT_FAULT}" if method_named(method).needs_maps else ""
        raise ValueError(f"layer {layer}: errors of {method} are not finite{at_fault}")
    defined = rows["log_z_error"].isfinite()
    count = defined.sum(1)
    means = {name: rows[name].double().mean(1) for name in ("error", "residual_share_hat", "recall", "tokens_read")}
    means["log_z_error"] = torch.where(defined, rows["log_z_error"], 0).double().sum(1) / count
    return {name: value.cpu().numpy() for name, value in (means | {"log_z_rows": count}).items()}


def _frame(spec: ResidualErrorsSpec, cells: Arrays, facts: Arrays) -> pd.DataFrame:
    shape = cells["error"].shape
    pack, layer, method, head, slot = (index.ravel() for index in np.indices(shape, dtype=np.int16))
    columns = {
        "pack": pack, "layer": layer, "head": head,
        "method": pd.Categorical.from_codes(method, list(spec.methods)),
        "budget_percent": np.asarray(spec.budgets)[slot], "k": np.asarray(_retrieved(spec))[slot],
    }  # fmt: skip
    measured = cells | {name: np.broadcast_to(x[:, :, None, :, None], shape) for name, x in facts.items()}
    for name, value in measured.items():
        columns[name] = (value.astype(np.float32) if value.dtype == np.float64 else value).ravel()
    return pd.DataFrame(columns)


def _retrieved(spec: ResidualErrorsSpec) -> list[int]:
    anchors = spec.anchors.sink + spec.anchors.tail
    return [retrieved_count(budget, tokens_of(spec.length), anchors) for budget in spec.budgets]


def _lines(
    spec: ResidualErrorsSpec, backbone: Backbone, maps: PhiMaps | None, corpus: str, cells: Arrays, states: list[int]
) -> Iterator[dict[str, object]]:
    packs, layers, _, query_heads, _ = cells["error"].shape
    if packs == 1:
        log.warning("%s: one pack only, so no interval", corpus)
    drawn = drawn_packs(f"{corpus} {spec.length}", packs, spec.bootstrap_resamples, spec.seed)
    about = {
        "study": spec.study, "backbone": spec.backbone.name, "corpus": corpus, "length": spec.length, "packs": packs,
        "heads": layers * query_heads, "rows": packs * layers * query_heads * spec.queries,
        "model_id": spec.backbone.model_id, "revision": spec.backbone.revision, "weights": spec.backbone.weights,
    }  # fmt: skip
    for m, (method, state) in enumerate(zip(spec.methods, states, strict=True)):
        of_method = {"method": method}
        if method_named(method).needs_maps:
            steps = maps.training_facts.get("recipe", {}).get("steps", "")
            of_method |= {"maps": spec.maps.label, "training_steps": steps, "phi_sha": maps.sha256}
        for b, (budget, k) in enumerate(zip(spec.budgets, _retrieved(spec), strict=True)):
            at_budget = {name: value[..., b] for name, value in cells.items()}
            read = _bytes(spec, backbone, maps, method, float(at_budget["tokens_read"][:, :, m].mean()), state)
            numbers = _numbers(spec.methods, at_budget, m, drawn)
            yield about | of_method | {"budget_percent": f"{budget:g}", "k": k} | read | numbers


def _bytes(
    spec: ResidualErrorsSpec, backbone: Backbone, maps: PhiMaps | None, method: str, tokens_read: float, state: int
) -> dict[str, object]:
    """What a step reads, given the mean of the tokens that are read exactly, and what is kept."""
    shape, anchors = backbone.shape, spec.anchors.sink + spec.anchors.tail
    step = Step(
        tokens_of(spec.length), shape.head_dim, shape.query_heads // shape.kv_heads, anchors, tokens_read - anchors
    )
    step = step if maps is None else step._replace(features=maps.map.d_phi)
    rule, cache = method_named(method), full_bytes(step)
    read, kept = step_bytes(rule, step), kept_bytes(rule, step)
    held = kept.cache + state + feature_bytes(rule, step, step.tokens)
    sizes = {
        "tokens_read": tokens_read, "scan_bytes": read.scan, "row_bytes": read.rows, "summary_bytes": read.summary,
        "step_share": read.total / cache, "state_share": state / cache, "kept_share": kept.total / cache,
        "held_share": held / cache,
    }  # fmt: skip
    return {"state_bytes": state} | {name: _text(value) for name, value in sizes.items()}


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
