"""Captured attention rows measured again in float64, as a check of `capture`.

Nothing here is shared with `core`: features follow the equations of their maps, unfolded, and a residual is a sum over
its tokens, where capture subtracts one float32 sum from another.

Shape letters: L = prefix tokens, D = head dimension, M = features.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from residual_mass.backbones.phi_maps import PhiMaps, read_safetensors
from residual_mass.core.settings import AnchorSpec
from residual_mass.diagnostics.capture import ROWS_HEADER, RowIndex
from residual_mass.files import csv_text, write_text
from residual_mass.provenance import Record
from residual_mass.study.specs import AuditSpec

log = logging.getLogger(__name__)

PLACE = ("backbone", "corpus", "length")
LOG_MASSES = ("log_z_hat", "log_z_true")
ESTIMATED = ("e_sub", "log_z_hat", "residual_share_hat")
"""What rests on the difference of two sums of features."""
JUDGED = (
    "e_topk", "e_sub", "e_nosub", "e_exact_sub", "e_exact_nosub", *LOG_MASSES, "residual_share_hat", "residual_share",
    "h_mid", "c_mid",
)  # fmt: skip
ROUNDED = ("e_sub_bf16", "e_nosub_bf16", "log_z_hat_bf16")
"""With bfloat16 summaries. Reported but not judged: float32 and float64 sums that differ in their last digit may round
to neighbours 2^-8 apart, which a subtraction amplifies."""
QUANTITIES = (*JUDGED, *ROUNDED)
COLUMNS = (
    *PLACE, *RowIndex._fields, "k", "quantity", "captured", "reference", "difference", "tolerance", "near_tie"
)  # fmt: skip
NEAR_TIE = 1e-5
"""Scores this close, relative to 1 + |score|, may swap their order in float32."""
DROPPED = 1e-6
"""The method drops a residual of at most this share of the mid-region's estimated mass."""
UNSURE = (DROPPED / 3, DROPPED * 3)
"""Shares at which rounding decides whether the residual is dropped."""
HELD = 1e-2
"""Below this share tolerances grow in proportion, as the rounding of the two sums counts for more."""
EPSILON = 1e-12
"""Added to the norm that errors are relative to."""


@dataclass(frozen=True)
class StoredRow:
    """One captured attention row in float64: query [D], keys [L, D] and values [L, D]."""

    index: RowIndex
    kv_head: int
    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray


def run(spec: AuditSpec, rows: Path, heads: Path, phi: Path, out: Path) -> None:
    """The `audit` stage: measures every stored row again at every captured K, and writes one CSV line per (row, k,
    quantity): captured and recomputed value, their difference, and the tolerance where it is judged.

    Not judged are rows with a near tie at the K-th score, estimates of a residual that rounding may drop, and
    quantities from bfloat16 summaries.

    Raises:
        ValueError: a judged difference exceeds its tolerance, or the rows were captured with other feature maps;
            nothing is written.
    """
    record = Record("audit", spec, [rows, heads, phi])
    frame = pd.read_parquet(heads, columns=[*PLACE, "phi_sha", *RowIndex._fields, "k", *QUANTITIES])
    maps = PhiMaps.load(phi)
    if frame["phi_sha"].iloc[0] != maps.sha256:
        raise ValueError(f"{heads}: was captured with other feature maps than {phi}; run the capture stage again")
    header, tensors = read_safetensors(rows)
    facts = json.loads(header[ROWS_HEADER])
    stored = [_stored_row(number, row, tensors) for number, row in enumerate(facts["rows"])]
    captured = _captured(frame, stored)
    audited = pd.DataFrame(
        [value for row in stored for value in _audited(row, captured[row.index], maps, facts["scale"], spec)]
    )
    audited["difference"] = _differences(audited["captured"], audited["reference"])
    _log_largest(audited)
    _judge(audited, heads)
    place = {name: frame[name].iloc[0] for name in PLACE}
    write_text(out, csv_text(COLUMNS, (place | _printed(value) for value in audited.to_dict("records"))))
    record.write(out)


def _stored_row(number: int, facts: dict[str, int], tensors: dict[str, torch.Tensor]) -> StoredRow:
    parts = (tensors[f"{number}.{name}"].double().numpy() for name in ("query", "keys", "values"))
    return StoredRow(RowIndex(*(facts[name] for name in RowIndex._fields)), facts["kv_head"], *parts)


def _captured(frame: pd.DataFrame, stored: Sequence[StoredRow]) -> dict[RowIndex, dict[int, dict[str, float]]]:
    """The captured quantities of the stored rows, by row and K."""
    names = list(RowIndex._fields)
    frame = frame[pd.MultiIndex.from_frame(frame[names]).isin([row.index for row in stored])]
    found: dict[RowIndex, dict[int, dict[str, float]]] = {}
    for (*index, k), values in frame.sort_values("k").set_index([*names, "k"])[list(QUANTITIES)].iterrows():
        found.setdefault(RowIndex(*index), {})[k] = values.astype(float).to_dict()
    return found


def _audited(
    row: StoredRow, captured: dict[int, dict[str, float]], maps: PhiMaps, scale: float, spec: AuditSpec
) -> Iterator[dict[str, Any]]:
    """A dict per quantity and K, whose tolerance is NaN where it is not judged; captured: quantities by K."""
    layer, kind = row.index.layer, maps.map.kind
    log_query = log_features(maps.query[layer], kind, row.index.head, row.query[None])[0]
    log_keys = log_features(maps.key[layer], kind, row.kv_head, row.keys)
    recomputed = RecomputedRow(row, scale, spec.anchors, log_query, log_keys)
    for k in captured:
        references, near_tie, share = recomputed.at(k), recomputed.near_tie(k), recomputed.share_left(k)
        for quantity in QUANTITIES:
            reference = references[quantity]
            yield row.index._asdict() | {
                "k": k,
                "quantity": quantity,
                "captured": captured[k][quantity],
                "reference": reference,
                "tolerance": math.nan if near_tie else _tolerance(quantity, share, reference, spec),
                "near_tie": near_tie,
            }


def _tolerance(quantity: str, share: float, value: float, spec: AuditSpec) -> float:
    """share: of the mid-region's estimated mass, what the subtraction leaves."""
    if quantity not in JUDGED:
        return math.nan
    tolerance = spec.error_tolerance * max(1.0, value)
    if quantity in LOG_MASSES:
        tolerance = spec.log_mass_tolerance
    if quantity not in ESTIMATED or share <= UNSURE[0]:
        return tolerance
    return math.nan if share < UNSURE[1] else tolerance * max(1, HELD / share)


def _differences(captured: pd.Series, reference: pd.Series) -> pd.Series:
    """Infinite where only one of the two is finite, 0 for equal infinities or two NaN."""
    equal = (captured == reference) | (captured.isna() & reference.isna())
    return (captured - reference).abs().fillna(math.inf).mask(equal, 0.0)


def _log_largest(audited: pd.DataFrame) -> None:
    rows = audited.drop_duplicates([*RowIndex._fields, "k"])
    log.info("%d rows at one K, %d of them with a near tie and not judged", len(rows), rows["near_tie"].sum())
    for quantity, values in audited.groupby("quantity", sort=False):
        judged = values[values["tolerance"].notna()]
        shown = values[~values["near_tie"]] if judged.empty else judged
        log.info("%s: largest difference %.2e, %d judged", quantity, shown["difference"].max(), len(judged))


def _judge(audited: pd.DataFrame, heads: Path) -> None:
    excess = (audited["difference"] / audited["tolerance"]).fillna(0.0)
    worst = audited.loc[excess.idxmax()]
    if excess.max() > 1:
        place = ", ".join(f"{name} {worst[name]}" for name in RowIndex._fields)
        raise ValueError(
            f"the capture disagrees with its float64 recomputation in {(excess > 1).sum()} of {len(audited)} values, "
            f"most in {worst['quantity']} of {place} at K = {worst['k']}: {worst['captured']:.9g} in {heads}, "
            f"{worst['reference']:.9g} recomputed, tolerance {worst['tolerance']:g}; delete the captured files and run "
            "the capture stage again; if that changes nothing, use none of its numbers"
        )


def _printed(value: dict[str, Any]) -> dict[str, Any]:
    """A row of `audited` as it is written."""
    return value | {
        "captured": f"{value['captured']:.9g}",
        "reference": f"{value['reference']:.9g}",
        "difference": f"{value['difference']:.3e}",
        "tolerance": "" if math.isnan(value["tolerance"]) else f"{value['tolerance']:g}",
        "near_tie": int(value["near_tie"]),
    }


# ---- float64 ---------------------------------------------------------------------------------------------------------


def log_features(module: nn.Module, kind: str, head: int, x: np.ndarray) -> np.ndarray:
    """log phi of vectors [N, D] under one head's map, [N, M], as the equations of the map have it."""
    w = {name: value[head].double().numpy() for name, value in module.named_parameters()}
    if kind == "hedgehog":
        z = x @ w["weight"] + w["bias"]
        return np.concatenate([z, -z], axis=1)
    stem = x @ w["stem"] + w["stem_bias"]
    up = stem @ w["up"] + w["up_bias"]
    down = _gelu(up) @ w["down"] + w["down_bias"]
    return (stem + w["alpha"] * down) @ w["out"] + w["out_bias"]


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + torch.erf(torch.from_numpy(x / math.sqrt(2))).numpy())


class RecomputedRow:
    """The quantities of one attention row, from sums over tokens.

    Attributes:
        scores: [L] attention scores.
        anchors, mid: tokens of the anchors, and of the mid-region from the highest score down, so that its first K are
            the retrieved ones.
        kernel: [L] log <phi_q, phi_k>.
        full: [D] output of full attention.
    """

    def __init__(
        self, row: StoredRow, scale: float, anchors: AnchorSpec, log_query: np.ndarray, log_keys: np.ndarray
    ) -> None:
        """log_query [M] and log_keys [L, M]: log phi."""
        length = len(row.keys)
        self.values, self.log_query, self.log_keys = row.values, log_query, log_keys
        self.scores = scale * (row.keys @ row.query)
        self.anchors = [i for i in range(length) if i < anchors.sink or i >= length - anchors.tail]
        mid = sorted(set(range(length)) - set(self.anchors))
        self.mid = sorted(mid, key=lambda i: -self.scores[i])
        self.kernel = np.array([_log_sum(log_query + log_key) for log_key in log_keys])
        self.full = self._output((self.scores, [*self.anchors, *self.mid]))

    def at(self, k: int) -> dict[str, float]:
        """Every quantity at one K."""
        retrieved, rest = self.mid[:k], self.mid[k:]
        exact = (self.scores, [*self.anchors, *retrieved])
        estimated = rest if self.share_left(k) > DROPPED else []
        log_exact = self._log_mass(*exact)
        log_hat, log_true = self._log_mass(self.kernel, estimated), self._log_mass(self.scores, rest)
        log_mid = self._log_mass(self.scores, self.mid)
        return {
            "e_topk": self._error(exact),
            "e_sub": self._error(exact, (self.kernel, estimated)),
            "e_nosub": self._error(exact, (self.kernel, self.mid)),
            "e_exact_sub": self._error(exact, (self.scores, rest)),
            "e_exact_nosub": self._error(exact, (self.scores, self.mid)),
            "log_z_hat": log_hat,
            "log_z_true": log_true,
            "residual_share_hat": math.exp(log_hat - np.logaddexp(log_exact, log_hat)),
            "residual_share": math.exp(log_true - np.logaddexp(log_exact, log_true)),
            "h_mid": self._entropy(),
            "c_mid": math.exp(self._log_mass(self.scores, retrieved) - log_mid) if retrieved else 0.0,
            **self._with_bfloat16(exact, retrieved),
        }

    def near_tie(self, k: int) -> bool:
        """Whether rounding decides which token is the K-th."""
        if not 0 < k < len(self.mid):
            return False
        last, first = self.scores[self.mid[k - 1]], self.scores[self.mid[k]]
        return bool(last - first <= NEAR_TIE * (1 + abs(last)))

    def share_left(self, k: int) -> float:
        """The share of the mid-region's estimated mass beyond its first K tokens."""
        if k >= len(self.mid):
            return 0.0
        return math.exp(self._log_mass(self.kernel, self.mid[k:]) - self._log_mass(self.kernel, self.mid))

    def _log_mass(self, log_weights: np.ndarray, tokens: Sequence[int]) -> float:
        return _log_sum(log_weights[list(tokens)])

    def _error(self, *parts: tuple[np.ndarray, Sequence[int]]) -> float:
        return _relative(self._output(*parts), self.full)

    def _output(self, *parts: tuple[np.ndarray, Sequence[int]]) -> np.ndarray:
        """The weighted mean [D] of the tokens' values, NaN for none; a token in two parts counts twice."""
        if not any(len(tokens) for _, tokens in parts):
            return np.full(self.values.shape[1], np.nan)
        log_weights = np.concatenate([log_weight[list(tokens)] for log_weight, tokens in parts])
        weights = np.exp(log_weights - log_weights.max())
        return weights @ self.values[[i for _, tokens in parts for i in tokens]] / weights.sum()

    def _entropy(self) -> float:
        if len(self.mid) < 2:
            return math.nan
        log_p = self.scores[self.mid] - self._log_mass(self.scores, self.mid)
        return float(-(np.exp(log_p) * log_p).sum() / math.log(len(self.mid)))

    def _with_bfloat16(self, exact: tuple[np.ndarray, Sequence[int]], retrieved: Sequence[int]) -> dict[str, float]:
        """ROUNDED: S and u, in units of each feature's largest value in the mid-region, are rounded before the
        subtraction.
        """
        if not self.mid:
            error = self._error(exact)
            return {"e_sub_bf16": error, "e_nosub_bf16": error, "log_z_hat_bf16": -math.inf}
        unit = self.log_keys[self.mid].max(axis=0)
        features = np.exp(self.log_keys - unit)
        numerator = _to_bfloat16(features[self.mid].T @ self.values[self.mid])
        mass = _to_bfloat16(features[self.mid].sum(axis=0))
        left_numerator = numerator - features[list(retrieved)].T @ self.values[list(retrieved)]
        left_mass = mass - features[list(retrieved)].sum(axis=0)
        log_weights = self.log_query + unit
        shift = log_weights.max()
        weights = np.exp(log_weights - shift)
        left, whole = weights @ left_mass, weights @ mass
        kept = left > DROPPED * whole
        return {
            "e_sub_bf16": (
                self._error_with(exact, weights @ left_numerator, left, shift) if kept else self._error(exact)
            ),
            "e_nosub_bf16": self._error_with(exact, weights @ numerator, whole, shift),
            "log_z_hat_bf16": float(np.log(left) + shift) if kept else -math.inf,
        }

    def _error_with(
        self, exact: tuple[np.ndarray, Sequence[int]], numerator: np.ndarray, denominator: float, shift: float
    ) -> float:
        """The error of the exact terms plus a numerator [D] and a denominator, both in units of e^shift."""
        log_exact = self._log_mass(*exact)
        share = math.exp(log_exact - np.logaddexp(log_exact, np.log(denominator) + shift))
        inside = share * self._output(exact) if exact[1] else 0
        return _relative(inside + (1 - share) * numerator / denominator, self.full)


def _relative(output: np.ndarray, full: np.ndarray) -> float:
    return float(np.abs(output - full).sum() / (np.abs(full).sum() + EPSILON))


def _log_sum(logs: np.ndarray) -> float:
    """log of the sum of exponentials; -inf for none."""
    return float(np.logaddexp.reduce(logs)) if len(logs) else -math.inf


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().double().numpy()
