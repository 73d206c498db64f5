"""Computes errors of methods and the quantities of the paper's diagnostics for one layer's queries over one unpadded
prefix, by the code that decodes.

Shape letters: Hq / Hkv = query / KV heads, G = Hq / Hkv, Q = queries per head, L = prefix tokens, D = head dimension,
B = budgets, R = B * G * Q rows of a KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from residual_mass.core.accounting import Terms, added, exact_terms, merge
from residual_mass.core.measures import mass_recovery, mid_entropy, rel_l1, residual_share, score_shape
from residual_mass.core.selection import full_prefix
from residual_mass.decode.prefix import Map, build_prefix, map_heads, summarise_prefix
from residual_mass.decode.terms import (
    ArmRows,
    Reading,
    arm_rows,
    grouped,
    own_residuals,
    phi_log_mass,
    read_prefix,
    seen_by_residuals,
    terms_of,
)
from residual_mass.methods import Selector, method_named, state_bytes
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.labels import TOPK, TOPK_PHI, TOPK_PHI_NOSUB
from residual_mass.spec.settings import AnchorSpec

MID_FACTS = ("h_mid", "skewness", "kurtosis")
"""Normalised entropy of attention within the mid-region, skewness and excess kurtosis of its scores."""


class Read(NamedTuple):
    """Tokens that a selector reads, with the exact terms [1, Hkv, R, ...] of all read tokens and of the unread ones."""

    reading: Reading
    exact: Terms
    rest: Terms
    mid: Tensor
    """[1, Hkv, R, L] bool, the tokens of the mid-region that were read."""


class ReadLayer:
    """Queries of a layer with the tokens that they read at every budget, computed once for every selector.

    Args:
        queries: [Hq, Q, D], of tokens after the prefix; keys, values: [Hkv, L, D]; all finite float32.
        maps: the layer's (phi_q, phi_k), for methods that need them.
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        budgets: Sequence[float],
        anchors: AnchorSpec,
        maps: tuple[Map, Map] | None,
    ) -> None:
        self.shape = queries.shape[:2]
        self.budgets = budgets
        self.anchors = anchors
        self.scale = scale
        self.values = values[None]
        prefix = full_prefix(keys.shape[1], keys.device)[None]
        self.layer = build_prefix(keys[None], self.values, prefix, anchors)
        self.rows = self._rows(queries)
        self.log_query = None
        self.summary = None
        if maps is not None:
            map_query, map_key = maps
            self.log_query = self._rows(map_heads(map_query, queries[None])[0])
            self.summary = summarise_prefix(self.layer, map_key)
        self._read: dict[Selector | None, Read] = {}

    def read(self, method: str) -> Read:
        """Returns the tokens that the method's selector reads."""
        selector = method_named(method).selector
        if selector not in self._read:
            reading = read_prefix(self.rows, self.layer, self._arms(method), self.scale)
            read = reading.retrieved.mask(self.values.shape[2])
            # TopK adds no residual: its terms are nu_E and Z_E of whatever was read.
            exact = terms_of(reading, None, self.layer, None, self._arms(TOPK))
            rest = exact_terms(reading.scores, self.values, self.layer.partition.mid & ~read)
            self._read[selector] = Read(reading, exact, rest, read)
        return self._read[selector]

    def errors(self, method: str) -> dict[str, Tensor]:
        """Measures a method; entries [Hq, Q, B].

        error is relative l1 against full prefix attention, log_z_error log Z_R hat - log Z_R (not finite where either
        is zero), residual_share_hat the estimated share of the total, recall the share of the true top K's mass that
        was read (NaN where K is 0), tokens_read the number of distinct tokens that the query heads of a KV head read
        exactly or whose stored values they read by choice, anchors included.
        """
        read = self.read(method)
        terms, log_mass = self._terms(method, read)
        # Read and unread tokens together are the whole prefix.
        full = merge(read.exact, read.rest)
        measures = {
            "error": rel_l1(merge(terms), full),
            "log_z_error": log_mass - read.rest.log_mass(),
            # The share Z_R / (Z_E + Z_R) is the sigmoid of log Z_R - log Z_E.
            "residual_share_hat": torch.sigmoid(log_mass - read.exact.log_mass()),
            "recall": self._recall(read),
            "tokens_read": self._tokens_read(method, read),
        }
        return {name: self._by_head(value) for name, value in measures.items()}

    def _recall(self, read: Read) -> Tensor:
        """Computes the share of the true top K's mass that was read: [1, Hkv, R]."""
        best = self.read(TOPK)
        scores = best.reading.scores
        found = exact_terms(scores, self.values, best.mid & read.mid).log_mass()
        wanted = exact_terms(scores, self.values, best.mid).log_mass()
        return (found - wanted).exp()  # NaN from -inf - -inf where K is 0

    def _tokens_read(self, method: str, read: Read) -> Tensor:
        """Counts the tokens that at least one query head of a KV head reads for a query: [1, Hkv, R]."""
        num_queries = self.shape[1]
        by_head = self._chosen(method, read).unflatten(2, (len(self.budgets), -1, num_queries))  # B, G, Q
        # A token that several query heads read counts once.
        of_group = by_head.any(3, keepdim=True).sum(-1)
        tokens = of_group + int(self.layer.partition.anchors.sum())
        return tokens.expand(by_head.shape[:-1]).flatten(2).to(self.values.dtype)

    def accounting(self) -> dict[str, Tensor]:
        """Measures TopK and the feature maps as the paper's diagnostics do; entries [Hq, Q, B].

        e_* are relative l1 errors against full prefix attention: of TopK, of the estimate with (sub) and without
        (nosub) subtraction, and of the two oracles that use the true residual and the true mid-region. log_z_hat and
        log_z_true are the estimated and the true log Z_R (-inf without unread tokens), residual_share* their shares of
        the total, h_mid and c_mid the entropy and the mass recovery of full attention; clamped is True where the
        subtraction left only rounding errors.
        """
        read = self.read(TOPK)
        anchors, mid = self.layer.partition
        scores = read.reading.scores
        num_rows = scores.shape[2] // len(self.budgets)
        once = scores[:, :, :num_rows]  # the same for every budget

        def repeated(x: Tensor) -> Tensor:
            return torch.cat([x] * len(self.budgets), dim=2)

        full = repeated(merge(exact_terms(once, self.values, anchors | mid)))
        whole_mid = Terms(*map(repeated, exact_terms(once, self.values, mid)))
        sub, log_z_hat = self._terms(TOPK_PHI, read)
        nosub, _ = self._terms(TOPK_PHI_NOSUB, read)
        log_z_true = read.rest.log_mass()
        outputs = {
            "e_topk": merge(read.exact),
            "e_sub": merge(sub),
            "e_nosub": merge(nosub),
            "e_exact_sub": merge(read.exact, read.rest),
            "e_exact_nosub": merge(read.exact, whole_mid),
        }
        measures = {name: rel_l1(output, full) for name, output in outputs.items()}
        measures |= {"log_z_hat": log_z_hat, "log_z_true": log_z_true}
        measures["residual_share_hat"] = torch.sigmoid(log_z_hat - read.exact.log_mass())
        measures["residual_share"] = residual_share(read.exact, read.rest)
        measures["h_mid"] = repeated(mid_entropy(once, mid))
        measures["c_mid"] = mass_recovery(scores, mid, read.mid)
        measures["clamped"] = (log_z_hat == -torch.inf) & (log_z_true > -torch.inf)
        return {name: self._by_head(value) for name, value in measures.items()}

    def _terms(self, method: str, read: Read) -> tuple[Terms, Tensor]:
        """Computes the terms of `prefix_terms`, and log Z_R hat, which they include: [1, Hkv, R, ...]."""
        rule = method_named(method)
        arms = self._arms(method)
        if rule.own is not None:
            ((_, own),) = own_residuals(read.reading, self.layer, arms)  # a single residual: all arms have this method
            return added(read.exact, own), own.log_mass()
        if rule.phi is None:
            return read.exact, torch.full_like(read.exact.denominator, -torch.inf)
        terms = terms_of(read.reading, self.log_query, self.layer, self.summary, arms)
        return terms, phi_log_mass(read.reading, self.log_query, self.summary, arms)

    def _chosen(self, method: str, read: Read) -> Tensor:
        """Returns the tokens [1, Hkv, R, L] bool that are read exactly or whose stored values are read by choice."""
        chosen = read.mid
        for residual, _, seen in seen_by_residuals(read.reading, self.layer, self._arms(method)):
            values = residual.values_read(seen)
            chosen = chosen if values is None else chosen | values
        return chosen

    def facts(self) -> dict[str, Tensor]:
        """Computes `MID_FACTS` of the mid-region: [Hq, Q] each."""
        scores = self.read(TOPK).reading.scores
        mid = self.layer.partition.mid
        values = (mid_entropy(scores, mid), *score_shape(scores, mid))
        facts = {}
        for name, value in zip(MID_FACTS, values, strict=True):
            facts[name] = self._by_head(value)[..., 0]  # the same at every budget
        return facts

    def state_bytes(self, method: str) -> int:
        """Returns the bytes that a method keeps of the prefix per KV head: S and u, or states of its own."""
        rule = method_named(method)
        size = 0
        if rule.needs_maps and self.summary is not None:
            size += state_bytes((self.summary.state.numerator, self.summary.state.mass))
        if rule.own is not None:
            size += state_bytes(self.layer.state(rule.own))
        if rule.selector is not None:
            size += state_bytes(self.layer.scan(rule.selector))
        return size // self.layer.keys.shape[1]

    def _rows(self, x: Tensor) -> Tensor:
        """Repeats rows for every budget: [Hq, Q, C] -> [1, Hkv, R, C]."""
        num_kv_heads = self.layer.keys.shape[1]
        rows = grouped(x, num_kv_heads)
        return rows.repeat(1, len(self.budgets), 1)[None]

    def _by_head(self, x: Tensor) -> Tensor:
        """[1, Hkv, R] -> [Hq, Q, B]."""
        by_budget = x[0].unflatten(-1, (len(self.budgets), -1))  # [Hkv, B, G * Q]
        return by_budget.transpose(-1, -2).reshape(*self.shape, -1)

    def _arms(self, method: str) -> ArmRows:
        _, num_kv_heads, length, _ = self.layer.keys.shape
        device = self.layer.keys.device
        arms = [ArmSpec(method, budget) for budget in self.budgets]
        rows = self.shape.numel() // num_kv_heads
        # A budget is an arm, whose rows are the G * Q queries of a KV head.
        return arm_rows(arms, rows, [length], self.anchors, length, device, tokens=self.shape[1])
