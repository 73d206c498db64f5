"""Errors of every method on the same held-out texts, head by head.

Packs and queries are those of `capture`. All methods read the same tokens, on the code path of decoding. Means over a
pack's queries are stored.

Shape letters: Hq = query heads, Q = queries, B = budgets.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from residual_mass.diagnostics.errors import ReadLayer
from residual_mass.diagnostics.packs import ks_of, make_packs, tidy, visit_layers, with_place
from residual_mass.diagnostics.samples import BootstrapEstimate, drawn_packs, estimate, over_packs, ratio, text
from residual_mass.files import csv_text, write_parquet, write_text
from residual_mass.methods import method_named
from residual_mass.methods.step_bytes import feature_bytes, full_bytes, kept_bytes, step_bytes
from residual_mass.metrics import budget_text
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import MAPS_AT_FAULT, PhiMaps
from residual_mass.provenance import Record
from residual_mass.spec.labels import TOPK, TOPK_PHI
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import ResidualErrorsSpec

log = logging.getLogger(__name__)

RESIDUAL_ERROR_COLUMNS = (
    "study backbone corpus length method maps budget_percent k error error_ci_low error_ci_high over_topk "
    "over_topk_ci_low over_topk_ci_high heads_below_topk heads_below_phi log_z_error recall tokens_read "
    "scan_bytes row_bytes summary_bytes step_share state_bytes state_share kept_share held_share "
    "training_steps packs heads rows model_id revision weights phi_sha"
).split()
"""Columns of the CSV; intervals are by pack.

* `over_topk` is the ratio of mean errors; `heads_below_topk` and `heads_below_phi` are shares of (layer, query head).
* `scan_bytes`, `row_bytes` and `summary_bytes` are what a step reads per KV head and layer (`methods.step_bytes`);
  `step_share` is their sum over what full attention reads.
* `state_bytes` is what a method keeps of a prompt in addition to keys and values.
* The other shares are relative to a bfloat16 cache: `state_share` of the state, `kept_share` of all that is kept,
  packed (`methods.step_bytes.kept_bytes`), and `held_share` of all that is held here, with keys and values in bfloat16
  and the state as it is (one byte per code).
"""
RESIDUAL_HEAD_COLUMNS = (
    "backbone corpus length pack layer head method budget_percent k error log_z_error log_z_rows residual_share_hat "
    "recall tokens_read h_mid skewness kurtosis"
).split()
"""Columns of the Parquet file: means over a pack's queries. `log_z_error` is the mean of log Z_R hat - log Z_R over the
`log_z_rows` queries where both are defined; `recall` and `tokens_read` are as in `ReadLayer.errors`.
"""
HEADS_BELOW = {"heads_below_topk": TOPK, "heads_below_phi": TOPK_PHI}
"""The method that a head's error is compared with, by column."""
ERROR_DIGITS = "z.6g"
MEAN_MEASURES = ("error", "residual_share_hat", "recall", "tokens_read")
METHOD_AND_BUDGET = ["method", "budget_percent"]
ErrorRow = dict[str, object]


def run(spec: ResidualErrorsSpec, assets: Path, phi: Path | None, heads: Path, out: Path) -> None:
    """The `residual-errors` stage.

    Args:
        phi: file of the maps `spec.maps`; None if no method needs them.

    Writes:
        heads: Parquet with RESIDUAL_HEAD_COLUMNS, one row per (corpus, pack, layer, query head, method, budget).
        out: CSV with RESIDUAL_ERROR_COLUMNS, one row per (corpus, method, budget).
    """
    record = Record("residual_errors", spec, [assets / MANIFEST, phi])
    backbone = load_backbone(spec.backbone, assets)
    maps = None if phi is None else PhiMaps.load(phi, backbone.device)
    if maps is not None:
        maps.require(backbone.shape, backbone.spec.model_id, backbone.spec.revision)
    frames = []
    lines: list[ErrorRow] = []
    for corpus in spec.corpora:
        frame = _measured(spec, backbone, maps, corpus, assets)
        frames.append(with_place(frame, spec.backbone, corpus, spec.length))
        lines += _lines(spec, backbone, maps, corpus, frame)
    of_heads = pd.concat(frames, ignore_index=True)[RESIDUAL_HEAD_COLUMNS]
    # A budget is a key: 0.1 as float32 would not equal 0.1.
    doubles = of_heads.select_dtypes("float64").columns.drop("budget_percent")
    dtypes: dict[str, object] = dict.fromkeys(doubles, "float32")
    dtypes["method"] = pd.CategoricalDtype(list(spec.methods))
    write_parquet(heads, of_heads.astype(dtypes))
    write_text(out, csv_text(RESIDUAL_ERROR_COLUMNS, lines))
    for output in (heads, out):
        record.write(output, device=backbone.device, identity=backbone.identity)


def _measured(
    spec: ResidualErrorsSpec, backbone: Backbone, maps: PhiMaps | None, corpus: str, assets: Path
) -> pd.DataFrame:
    """Returns the rows of all packs of a corpus, with the bytes of each method's state."""
    budgets = {"budget_percent": spec.budgets, "k": ks_of(spec.budgets, spec.length, spec.anchors)}
    packs = make_packs(corpus, backbone, spec.length, spec.queries, spec.packs, spec.seed, assets, None)
    log.info("%d methods on %d packs of %s at %s", len(spec.methods), len(packs), corpus, spec.length)
    folded = None if maps is None else maps.folded()
    frames: list[pd.DataFrame] = []

    def visit(pack: int, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        of_layer = None if folded is None else folded[layer]
        read = ReadLayer(queries, keys, values, scale, spec.budgets, spec.anchors, of_layer)
        facts = {}
        for name, value in read.facts().items():
            facts[name] = value.double().mean(1, keepdim=True)  # [Hq, 1]
        for method in spec.methods:
            measured = _means(read.errors(method), method, layer)
            for name, value in facts.items():
                # Facts of the scores are the same at every budget.
                measured[name] = value.expand_as(measured["error"])
            constant = {"pack": pack, "layer": layer, "method": method, "state_bytes": read.state_bytes(method)}
            frames.append(tidy(measured, ("head",), budgets, **constant))

    for number, pack in enumerate(tqdm(packs, unit="pack")):
        visit_layers(backbone, pack, tokens_of(spec.length), partial(visit, number))
    return pd.concat(frames, ignore_index=True)


def _means(rows: Mapping[str, Tensor], method: str, layer: int) -> dict[str, Tensor]:
    """Returns means over queries, [Hq, Q, B] -> [Hq, B], and the number of queries with a log-Z error."""
    if not rows["error"].isfinite().all():
        at_fault = f"; {MAPS_AT_FAULT}" if method_named(method).needs_maps else ""
        raise ValueError(f"layer {layer}: errors of {method} are not finite{at_fault}")
    defined = rows["log_z_error"].isfinite()
    # `nanmean` would not skip the infinities of empty residuals.
    log_z_error = rows["log_z_error"].double().where(defined, torch.nan)
    means = {name: rows[name].double().mean(1) for name in MEAN_MEASURES}
    return means | {"log_z_error": log_z_error.nanmean(1), "log_z_rows": defined.sum(1)}


def _lines(
    spec: ResidualErrorsSpec, backbone: Backbone, maps: PhiMaps | None, corpus: str, frame: pd.DataFrame
) -> Iterator[ErrorRow]:
    """Yields the rows of the CSV for one corpus."""
    # Packs have equally many rows, so a mean over packs of their means is the mean over rows.
    by_pack = frame.groupby([*METHOD_AND_BUDGET, "pack"])["error"].mean().unstack("pack")
    by_head = frame.groupby([*METHOD_AND_BUDGET, "layer", "head"])["error"].mean().unstack(["layer", "head"])
    packs = by_pack.shape[1]
    heads = by_head.shape[1]
    if packs == 1:
        log.warning("%s: one pack only, so no interval", corpus)
    # All methods share the draws, which pairs their ratios by pack.
    drawn = drawn_packs(f"{corpus} {spec.length}", packs, spec.bootstrap_resamples, spec.seed)
    as_is = {}
    draws = {}
    for arm, row in zip(by_pack.index, by_pack.to_numpy(), strict=True):
        as_is[arm] = row.mean(keepdims=True)
        draws[arm] = over_packs(drawn, row[None])[:, 0]
    common: ErrorRow = {"study": spec.study, "backbone": spec.backbone.name, "corpus": corpus, "length": spec.length}
    common |= {"packs": packs, "heads": heads, "rows": packs * heads * spec.queries}
    common |= {"model_id": spec.backbone.model_id, "revision": spec.backbone.revision}
    common["weights"] = spec.backbone.weights
    for (method, budget), rows in frame.groupby(METHOD_AND_BUDGET, sort=False):
        arm = (method, budget)
        topk = (TOPK, budget)
        line = common | {"method": method, "budget_percent": budget_text(budget), "k": rows["k"].iloc[0]}
        if maps is not None and method_named(method).needs_maps:
            steps = maps.training_facts.get("recipe", {}).get("steps", "")
            line |= {"maps": spec.maps.label, "training_steps": steps, "phi_sha": maps.sha256}
        line |= _bytes(spec, backbone, maps, method, rows["tokens_read"].mean(), rows["state_bytes"].iloc[0])
        line |= _with_interval("error", as_is[arm], draws[arm])
        line |= _with_interval("over_topk", ratio(as_is[arm], as_is[topk]), ratio(draws[arm], draws[topk]))
        for name, other in HEADS_BELOW.items():
            if other in spec.methods and other != method:
                is_below = by_head.loc[arm] < by_head.loc[(other, budget)]
                line[name] = text(is_below.mean(), ERROR_DIGITS)
        # Each defined query weighs the same; pandas' sum skips the NaN of heads without any.
        gaps = (rows["log_z_error"] * rows["log_z_rows"]).sum()
        log_z_error = float(ratio(gaps, rows["log_z_rows"].sum()))
        line["log_z_error"] = text(log_z_error, ERROR_DIGITS)
        line["recall"] = text(rows["recall"].mean(), ERROR_DIGITS)
        yield line


def _bytes(
    spec: ResidualErrorsSpec, backbone: Backbone, maps: PhiMaps | None, method: str, tokens_read: float, state: int
) -> ErrorRow:
    """Returns the columns of bytes, given the mean number of tokens read exactly and the bytes of the state."""
    shape = backbone.shape
    anchors = spec.anchors.sink + spec.anchors.tail
    features = 0 if maps is None else maps.map.d_phi
    length = tokens_of(spec.length)
    step = shape.step(length, anchors=anchors, retrieved=tokens_read - anchors, features=features)
    rule = method_named(method)
    cache = full_bytes(step)
    read = step_bytes(rule, step)
    kept = kept_bytes(rule, step)
    # `state` leaves out the features of all tokens, which a method that subtracts keeps.
    held = kept.cache + state + feature_bytes(rule, step, step.tokens)
    sizes = {"tokens_read": tokens_read, "scan_bytes": read.scan, "row_bytes": read.rows, "summary_bytes": read.summary}
    of_cache = {"step_share": read.total, "state_share": state, "kept_share": kept.total, "held_share": held}
    sizes |= {name: size / cache for name, size in of_cache.items()}
    row: ErrorRow = {name: text(value, ERROR_DIGITS) for name, value in sizes.items()}
    return row | {"state_bytes": state}


def _with_interval(name: str, as_is: np.ndarray, drawn: np.ndarray) -> ErrorRow:
    """Returns the columns of a number, without its interval if that has no width, as for a single pack."""
    found = estimate(as_is, drawn)
    if not found.low < found.high:  # also true for NaN
        found = BootstrapEstimate(found.value, np.nan, np.nan)
    return found.columns(name, ERROR_DIGITS)
