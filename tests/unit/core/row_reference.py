"""The quantities of one attention row in float64, as sums over its tokens.

Nothing here is shared with `core`: features follow the equations of their maps, unfolded, and a residual is a sum over
its tokens, where the diagnostics subtract one float32 sum from another.

Shape letters: L = prefix tokens, D = head dimension, M = features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from residual_mass.core.settings import AnchorSpec

NEAR_TIE = 1e-5
"""Scores this close, relative to 1 + |score|, may swap their order in float32."""
DROPPED = 1e-6
"""The method drops a residual of at most this share of the mid-region's estimated mass."""
EPSILON = 1e-12
"""Added to the norm that errors are relative to."""


def log_features(module: nn.Module, kind: str, head: int, x: np.ndarray) -> np.ndarray:
    """log phi of vectors [N, D] under one head's map, [N, M], as the equations of the map have it."""
    w = {name: value[head].detach().double().numpy() for name, value in module.named_parameters()}
    if kind == "hedgehog":
        z = x @ w["weight"] + w["bias"]
        return np.concatenate([z, -z], axis=1)
    stem = x @ w["stem"] + w["stem_bias"]
    up = stem @ w["up"] + w["up_bias"]
    down = 0.5 * up * (1 + torch.erf(torch.from_numpy(up / math.sqrt(2))).numpy()) @ w["down"] + w["down_bias"]
    return (stem + w["alpha"] * down) @ w["out"] + w["out_bias"]


class ReferenceRow:
    """The quantities of one attention row.

    Attributes:
        scores: [L] attention scores.
        anchors, mid: tokens of the anchors, and of the mid-region from the highest score down, so that its first K are
            the retrieved ones.
        kernel: [L] log <phi_q, phi_k>.
        full: [D] output of full attention.
    """

    def __init__(
        self,
        query: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        scale: float,
        anchors: AnchorSpec,
        log_query: np.ndarray,
        log_keys: np.ndarray,
    ) -> None:
        """query [D], keys and values [L, D], log phi of the query [M] and of the keys [L, M]."""
        length = len(keys)
        self.values = values
        self.scores = scale * (keys @ query)
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
        """Relative l1 error of the output of these parts."""
        return float(np.abs(self._output(*parts) - self.full).sum() / (np.abs(self.full).sum() + EPSILON))

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


def _log_sum(logs: np.ndarray) -> float:
    """log of the sum of exponentials; -inf for none."""
    return float(np.logaddexp.reduce(logs)) if len(logs) else -math.inf
