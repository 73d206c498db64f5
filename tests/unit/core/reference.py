"""Float64 references, written in the slow, obvious way: one query at a time, token by token.

They share no code with `core`: features follow the equations of their maps, unfolded, and a residual is a sum over
its tokens, where the fast paths subtract one sum from another.

Shape letters: L = prefix tokens, D = head dimension, M = features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from residual_mass.spec.settings import AnchorSpec

NEAR_TIE = 1e-5
"""Scores this close, relative to 1 + |score|, may swap their order in float32."""
DROPPED = 1e-6
"""The method drops a residual of at most this share of the mid-region's estimated mass."""
EPSILON = 1e-12
"""Added to the norm that errors are relative to."""
Part = tuple[Sequence[float], Sequence[int]]
"""Log weights of all tokens, and the tokens that count."""


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def split(length, sink, tail):
    anchors = [i for i in range(length) if i < sink or i >= length - tail]
    return anchors, [i for i in range(length) if i not in anchors]


def top(scores, mid, k):
    return sorted(mid, key=lambda i: -scores[i])[:k]


def log_mass(log_weights: Sequence[float], tokens: Sequence[int]) -> float:
    """log of the sum of the tokens' weights; -inf for none."""
    return float(np.logaddexp.reduce([log_weights[i] for i in tokens])) if len(tokens) else -math.inf


def mean(values: Sequence[Sequence[float]], *parts: Part) -> np.ndarray:
    """The weighted mean [D] of the tokens' values, NaN for none; a token in two parts counts twice."""
    logs = np.array([log_weights[i] for log_weights, tokens in parts for i in tokens])
    if not len(logs):
        return np.full(len(values[0]), np.nan)
    weights = np.exp(logs - logs.max())
    return weights @ np.array([values[i] for _, tokens in parts for i in tokens]) / weights.sum()


def attention(query, keys, values, scale, tokens):
    return mean(values, ([scale * dot(query, key) for key in keys], tokens)).tolist()


def topk_phi(query, keys, values, scale, sink, tail, k, phi_q, phi_k, subtract=True, generated=((), ())):
    """The paper's rule; phi_q: list, phi_k: list of lists, all positive floats."""
    scores = [scale * dot(query, key) for key in [*keys, *generated[0]]]
    anchors, mid = split(len(keys), sink, tail)
    retrieved = top(scores, mid, k)
    read = [*anchors, *retrieved, *range(len(keys), len(scores))]
    estimated = [i for i in mid if not (subtract and i in retrieved)]
    log_z = [math.log(dot(phi_q, one)) for one in phi_k]
    return mean([*values, *generated[1]], (scores, read), (log_z, estimated)).tolist()


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
        kernel: [L] log <phi_q, phi_k>.
        anchors, mid: tokens of the anchors, and of the mid-region from the highest score down, so that its first K are
            the retrieved ones.
        full: [D] output of full attention.
    """

    def __init__(self, scores: np.ndarray, kernel: np.ndarray, values: np.ndarray, anchors: AnchorSpec) -> None:
        self.scores, self.kernel, self.values = scores, kernel, values
        self.anchors, mid = split(len(scores), anchors.sink, anchors.tail)
        self.mid = top(scores, mid, len(mid))
        self.full = mean(values, (scores, [*self.anchors, *self.mid]))

    @classmethod
    def of(
        cls,
        query: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        scale: float,
        anchors: AnchorSpec,
        log_query: np.ndarray,
        log_keys: np.ndarray,
    ) -> ReferenceRow:
        """Of query [D], keys and values [L, D], log phi of the query [M] and of the keys [L, M]."""
        kernel = np.array([np.logaddexp.reduce(log_query + log_key) for log_key in log_keys])
        return cls(scale * (keys @ query), kernel, values, anchors)

    def at(self, k: int) -> dict[str, float]:
        """Every quantity at one K."""
        retrieved, rest = self.mid[:k], self.mid[k:]
        exact = (self.scores, [*self.anchors, *retrieved])
        estimated = rest if self.share_left(k) > DROPPED else []
        log_exact, log_mid = log_mass(*exact), log_mass(self.scores, self.mid)
        log_hat, log_true = log_mass(self.kernel, estimated), log_mass(self.scores, rest)
        return {
            "e_topk": self.error(exact),
            "e_sub": self.error(exact, (self.kernel, estimated)),
            "e_nosub": self.error(exact, (self.kernel, self.mid)),
            "e_exact_sub": self.error(exact, (self.scores, rest)),
            "e_exact_nosub": self.error(exact, (self.scores, self.mid)),
            "log_z_hat": log_hat,
            "log_z_true": log_true,
            "residual_share_hat": math.exp(log_hat - np.logaddexp(log_exact, log_hat)),
            "residual_share": math.exp(log_true - np.logaddexp(log_exact, log_true)),
            "h_mid": self._entropy(),
            "c_mid": math.exp(log_mass(self.scores, retrieved) - log_mid) if retrieved else 0.0,
        }

    def error(self, *parts: Part) -> float:
        """Relative l1 error of the output of these parts."""
        return float(np.abs(mean(self.values, *parts) - self.full).sum() / (np.abs(self.full).sum() + EPSILON))

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
        return math.exp(log_mass(self.kernel, self.mid[k:]) - log_mass(self.kernel, self.mid))

    def _entropy(self) -> float:
        if len(self.mid) < 2:
            return math.nan
        log_p = self.scores[self.mid] - log_mass(self.scores, self.mid)
        return float(-(np.exp(log_p) * log_p).sum() / math.log(len(self.mid)))
