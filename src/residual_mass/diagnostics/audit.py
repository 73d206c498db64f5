"""A second opinion on captured rows: stored queries, keys and values measured again in float64, the obvious way.

Nothing here is shared with `core`: features follow the equations of their maps, unfolded, and a residual is a sum over
its tokens, where capture subtracts one sum from another in float32.

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
from residual_mass.core.settings import AnchorSpec, tokens_of
from residual_mass.diagnostics.capture import ROWS_HEADER
from residual_mass.files import csv_text, read_parquet, write_text
from residual_mass.provenance import Record
from residual_mass.study.specs import AuditSpec

log = logging.getLogger(__name__)

ROW = ("pack", "layer", "head", "query")
PLACE = ("backbone", "corpus", "length")
LOG_MASSES = ("log_z_hat", "log_z_true")
ESTIMATED = ("e_sub", "log_z_hat", "residual_share_hat")
"""What rests on the difference of two sums of features."""
JUDGED = (
    "e_topk", "e_sub", "e_nosub", "e_exact_sub", "e_exact_nosub", *LOG_MASSES, "residual_share_hat", "residual_share",
    "h_mid", "c_mid",
)  # fmt: skip
ROUNDED = ("e_sub_bf16", "e_nosub_bf16", "log_z_hat_bf16")
"""With summaries in bfloat16. Reported and not judged: sums in float32 and in float64 that differ in their last digit
may round to neighbours, which lie 2^-8 apart, and a subtraction makes more of that."""
QUANTITIES = (*JUDGED, *ROUNDED)
COLUMNS = (*PLACE, *ROW, "k", "quantity", "captured", "reference", "difference", "tolerance", "near_tie")
NEAR_TIE = 1e-5
"""Scores this close, relative to 1 + |score|, may stand in either order in float32."""
DROPPED = 1e-6
"""A residual of no more than this share of the mid-region's estimated mass is left out, as the method has it."""
UNSURE = (DROPPED / 3, DROPPED * 3)
"""Shares for which rounding decides whether the residual is left out."""
HELD = 1e-2
"""Where the share is lower, the rounding of the two sums counts for more, and tolerances grow in proportion."""
EPSILON = 1e-12
"""Added to the norm that errors are relative to."""
REMEDY = "delete it and run the capture stage again"

Vector = np.ndarray
Matrix = np.ndarray


@dataclass(frozen=True)
class StoredRow:
    """One attention row: what it is, and its float64 query [D], keys [L, D] and values [L, D]."""

    place: tuple[int, int, int, int]
    """Pack, layer, query head and query."""
    kv_head: int
    query: Vector
    keys: Matrix
    values: Matrix

    def __str__(self) -> str:
        return ", ".join(f"{name} {number}" for name, number in zip(ROW, self.place, strict=True))


@dataclass(frozen=True)
class Line:
    """One quantity of one row at one K, as captured and as measured again."""

    row: StoredRow
    k: int
    quantity: str
    captured: float
    reference: float
    tolerance: float | None
    """None where the quantity is not judged."""
    near_tie: bool

    @property
    def difference(self) -> float:
        """Infinite where only one of the two is finite; two infinities or two NaN are equal."""
        if self.captured == self.reference or (math.isnan(self.captured) and math.isnan(self.reference)):
            return 0.0
        difference = abs(self.captured - self.reference)
        return math.inf if math.isnan(difference) else difference

    @property
    def excess(self) -> float:
        """The difference in units of the tolerance; 0 where it is not judged."""
        return 0.0 if self.tolerance is None else self.difference / self.tolerance


def run(spec: AuditSpec, rows: Path, heads: Path, phi: Path, out: Path) -> None:
    """The `audit` stage: measures every stored row again, at every K of the captured rows, and writes one CSV line per
    (row, k, quantity): captured and recomputed value, their difference, and the tolerance where it is judged.

    Not judged are rows with a near tie at the K-th score, estimates of a residual on the verge of being left out, and
    quantities from bfloat16 summaries.

    Raises:
        ValueError: a judged difference exceeds its tolerance, or a file is missing, damaged or of another capture;
            nothing is written then.
    """
    record = Record("audit", spec, [rows, heads, phi])
    captured = _read_heads(heads)
    maps = PhiMaps.load(phi)
    if captured["phi_sha"].iloc[0] != maps.sha256:
        raise ValueError(f"{heads}: was captured with other feature maps than {phi}; {REMEDY}")
    scale, stored = _read_rows(rows, maps, tokens_of(captured["length"].iloc[0]))
    lines: list[Line] = []
    for row, values in _captured_values(captured, stored, heads, rows):
        lines += _audited(row, values, maps, scale, spec)
    _log_largest(lines)
    _judge(lines, heads)
    place = {name: captured[name].iloc[0] for name in PLACE}
    write_text(out, csv_text(COLUMNS, (place | _fields(line) for line in lines)))
    record.write(out)


def _captured_values(
    captured: pd.DataFrame, stored: Sequence[StoredRow], heads: Path, rows: Path
) -> Iterator[tuple[StoredRow, dict[int, dict[str, float]]]]:
    """Every stored row with its captured quantities by K."""
    chosen = captured[pd.MultiIndex.from_frame(captured[list(ROW)]).isin([row.place for row in stored])]
    values = {
        tuple(index): dict(zip(QUANTITIES, map(float, numbers), strict=True))
        for index, numbers in zip(chosen[[*ROW, "k"]].to_numpy(), chosen[list(QUANTITIES)].to_numpy(), strict=True)
    }
    for row in stored:
        of_row: dict[int, dict[str, float]] = {}
        for k in sorted(set(captured["k"])):
            if (*row.place, k) not in values:
                raise ValueError(f"{heads}: no row for {row} at K = {k}, which {rows} holds; {REMEDY}")
            of_row[k] = values[(*row.place, k)]
        yield row, of_row


def _audited(
    row: StoredRow, captured: dict[int, dict[str, float]], maps: PhiMaps, scale: float, spec: AuditSpec
) -> Iterator[Line]:
    """captured: quantities by K."""
    _, layer, head, _ = row.place
    log_query = log_features(maps.query[layer], maps.map.kind, head, row.query[None])[0]
    log_keys = log_features(maps.key[layer], maps.map.kind, row.kv_head, row.keys)
    recomputed = Recomputed(row, scale, spec.anchors, log_query, log_keys)
    for k in captured:
        values, near_tie, share = recomputed.at(k), recomputed.near_tie(k), recomputed.share_left(k)
        for quantity in QUANTITIES:
            tolerance = None if near_tie else _tolerance(quantity, share, values[quantity], spec)
            yield Line(row, k, quantity, captured[k][quantity], values[quantity], tolerance, near_tie)


def _tolerance(quantity: str, share: float, value: float, spec: AuditSpec) -> float | None:
    """share: of the mid-region's estimated mass, what is left after the subtraction. None where nothing is judged."""
    if quantity not in JUDGED:
        return None
    tolerance = spec.error_tolerance * max(1.0, value)
    if quantity in LOG_MASSES:
        tolerance = spec.log_mass_tolerance
    if quantity not in ESTIMATED or share <= UNSURE[0]:
        return tolerance
    return None if share < UNSURE[1] else tolerance * max(1, HELD / share)


# ---- float64 ---------------------------------------------------------------------------------------------------------


def log_features(module: nn.Module, kind: str, head: int, x: Matrix) -> Matrix:
    """log phi of vectors [N, D] under one head's map, [N, M], as the equations of the map have it."""
    w = {name: value[head].double().numpy() for name, value in module.named_parameters()}
    if kind == "hedgehog":
        z = x @ w["weight"] + w["bias"]
        return np.concatenate([z, -z], axis=1)
    stem = x @ w["stem"] + w["stem_bias"]
    up = stem @ w["up"] + w["up_bias"]
    down = _gelu(up) @ w["down"] + w["down_bias"]
    return (stem + w["alpha"] * down) @ w["out"] + w["out_bias"]


def _gelu(x: Matrix) -> Matrix:
    return 0.5 * x * (1 + torch.erf(torch.from_numpy(x / math.sqrt(2))).numpy())


class Recomputed:
    """The quantities of one attention row, from sums over tokens."""

    def __init__(self, row: StoredRow, scale: float, anchors: AnchorSpec, log_query: Vector, log_keys: Matrix) -> None:
        """log_query: [M], log_keys: [L, M], of phi."""
        length = len(row.keys)
        self.values, self.log_query, self.log_keys = row.values, log_query, log_keys
        self.scores = scale * (row.keys @ row.query)
        self.anchors = [i for i in range(length) if i < anchors.sink or i >= length - anchors.tail]
        mid = sorted(set(range(length)) - set(self.anchors))
        self.mid = sorted(mid, key=lambda i: -self.scores[i])
        """The mid-region, the highest score first: its first K tokens are the retrieved ones."""
        self.kernel = np.array([_log_sum(log_query + log_key) for log_key in log_keys])
        """log <phi_q, phi_k> of every token."""
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
        """Of the mid-region's estimated mass, what its tokens beyond the first K have."""
        if k >= len(self.mid):
            return 0.0
        return math.exp(self._log_mass(self.kernel, self.mid[k:]) - self._log_mass(self.kernel, self.mid))

    def _log_mass(self, log_weights: Vector, tokens: Sequence[int]) -> float:
        return _log_sum(log_weights[list(tokens)])

    def _error(self, *parts: tuple[Vector, Sequence[int]]) -> float:
        return _relative(self._output(*parts), self.full)

    def _output(self, *parts: tuple[Vector, Sequence[int]]) -> Vector:
        """The weighted mean [D] of the tokens' values, NaN for none; a token that is in two parts counts twice."""
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

    def _with_bfloat16(self, exact: tuple[Vector, Sequence[int]], retrieved: Sequence[int]) -> dict[str, float]:
        """ROUNDED: S and u, in units of each feature's largest value in the mid-region, are rounded before anything is
        subtracted.
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
            "e_sub_bf16": self._error_with(exact, weights @ left_numerator, left, shift)
            if kept
            else self._error(exact),
            "e_nosub_bf16": self._error_with(exact, weights @ numerator, whole, shift),
            "log_z_hat_bf16": float(np.log(left) + shift) if kept else -math.inf,
        }

    def _error_with(
        self, exact: tuple[Vector, Sequence[int]], numerator: Vector, denominator: float, shift: float
    ) -> float:
        """Of the exact terms together with a numerator [D] and a denominator in units of e^shift."""
        log_exact = self._log_mass(*exact)
        share = math.exp(log_exact - np.logaddexp(log_exact, np.log(denominator) + shift))
        inside = share * self._output(exact) if exact[1] else 0
        return _relative(inside + (1 - share) * numerator / denominator, self.full)


def _relative(output: Vector, full: Vector) -> float:
    return float(np.abs(output - full).sum() / (np.abs(full).sum() + EPSILON))


def _log_sum(logs: Vector) -> float:
    """log of the sum of exponentials; -inf for none."""
    return float(np.logaddexp.reduce(logs)) if len(logs) else -math.inf


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().double().numpy()


# ---- files -----------------------------------------------------------------------------------------------------------


def _read_heads(path: Path) -> pd.DataFrame:
    frame = read_parquet(path, (*PLACE, "phi_sha", *ROW, "k", *QUANTITIES), "capture")
    for name in (*PLACE, "phi_sha"):
        if frame[name].nunique(dropna=False) != 1:
            raise ValueError(f"{path}: {name} should have one value, found {frame[name].nunique()}; {REMEDY}")
    return frame


def _read_rows(path: Path, maps: PhiMaps, length: int) -> tuple[float, list[StoredRow]]:
    """The scale and the stored rows."""
    header, tensors = read_safetensors(path)
    try:
        facts = json.loads(header[ROWS_HEADER])
        scale = float(facts["scale"])
        rows = [_stored_row(number, row, tensors) for number, row in enumerate(facts["rows"])]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: holds no rows of a capture ({error!r}); {REMEDY}") from None
    if not rows:
        raise ValueError(f"{path}: holds no row; set audited to more than 0 and run the capture stage again")
    for row in rows:
        _check(row, maps, length, path)
    return scale, rows


def _stored_row(number: int, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> StoredRow:
    query, keys, values = (tensors[f"{number}.{name}"].double().numpy() for name in ("query", "keys", "values"))
    pack, layer, head, position = (int(facts[name]) for name in ROW)
    return StoredRow((pack, layer, head, position), int(facts["kv_head"]), query, keys, values)


def _check(row: StoredRow, maps: PhiMaps, length: int, path: Path) -> None:
    shape = maps.shape
    width = shape.head_dim
    found = row.query.shape, row.keys.shape, row.values.shape
    if found != ((width,), (length, width), (length, width)):
        raise ValueError(f"{path}: {row}: shapes are {found}, not those of {length} tokens of width {width}; {REMEDY}")
    _, layer, head, _ = row.place
    if not all(np.isfinite(x).all() for x in (row.query, row.keys, row.values)):
        raise ValueError(f"{path}: {row}: holds values that are not finite; {REMEDY}")
    group = shape.query_heads // shape.kv_heads
    if not (0 <= layer < shape.layers and 0 <= head < shape.query_heads and row.kv_head == head // group):
        raise ValueError(f"{path}: {row} with KV head {row.kv_head}: the feature maps have no such heads; {REMEDY}")


# ---- the verdict -----------------------------------------------------------------------------------------------------


def _log_largest(lines: Sequence[Line]) -> None:
    rows = {(line.row.place, line.k): line.near_tie for line in lines}
    log.info("%d rows at one K, %d of them with a near tie and not judged", len(rows), sum(rows.values()))
    for quantity in QUANTITIES:
        judged = [line for line in lines if line.quantity == quantity and line.tolerance is not None]
        of = judged or [line for line in lines if line.quantity == quantity and not line.near_tie]
        largest = f"{max(line.difference for line in of):.2e}" if of else "unknown"
        log.info("%s: largest difference %s, %d judged", quantity, largest, len(judged))


def _judge(lines: Sequence[Line], heads: Path) -> None:
    worst = max(lines, key=lambda line: line.excess)
    if worst.excess > 1:
        beyond = sum(line.excess > 1 for line in lines)
        raise ValueError(
            f"the capture disagrees with its float64 recomputation in {beyond} of {len(lines)} values, most in "
            f"{worst.quantity} of {worst.row} at K = {worst.k}: {worst.captured:.9g} in {heads}, {worst.reference:.9g} "
            f"recomputed, tolerance {worst.tolerance:g}; delete the captured files and run the capture stage again; if "
            "that changes nothing, use none of its numbers"
        )


def _fields(line: Line) -> dict[str, Any]:
    return dict(zip(ROW, line.row.place, strict=True)) | {
        "k": line.k,
        "quantity": line.quantity,
        "captured": f"{line.captured:.9g}",
        "reference": f"{line.reference:.9g}",
        "difference": f"{line.difference:.3e}",
        "tolerance": "" if line.tolerance is None else f"{line.tolerance:g}",
        "near_tie": int(line.near_tie),
    }
