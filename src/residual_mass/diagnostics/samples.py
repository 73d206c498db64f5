"""Means of captured rows by head, of the full data or of bootstrap draws from it. The two-way bootstrap draws heads and
packs with replacement, independently of each other.

Of P packs P - 1 are drawn, because the mean of P draws has a variance too small by a factor of (P - 1) / P. A draw is
stored as the number of times that each head or pack is drawn.

Shape letters: B = draws, H = heads, that is (layer, query head), P = packs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from residual_mass.statistics import LEVEL, draw_counts, equal_parts

SETTING_COLUMNS = ("study", "backbone", "corpus", "length", "maps", "model_id", "revision", "weights", "phi_sha")
"""Columns of captured rows that are the same in all rows of a setting."""
CAPTURED_MEANS = "e_topk e_sub e_nosub e_exact_sub e_exact_nosub residual_share_hat h_mid clamped".split()
"""Columns of captured rows whose means over queries are used as they are."""
CELL = ["budget_percent", "layer", "head", "pack"]
CURVE = ["k", "layer", "head", "pack"]
QUARTILES = 4


@dataclass(frozen=True)
class Sample:
    """The captured data of one corpus at one length (B = 1), or draws of its heads and packs.

    Numbers per entropy quartile use a stratified draw, within the quartiles of the full data, so that no quartile is
    empty. All others use a draw among all heads.

    Attributes:
        facts: by SETTING_COLUMNS.
        ks: K of every budget, in ascending order of budgets.
        cells: by (budget, layer, head) and (name, pack): means over queries of the captured columns, of gain = e_topk -
            e_sub, of delta = e_sub - e_nosub, of log_z_error (0 if not defined), and of whether it is defined.
        mass: by (k, layer, head) and pack: mean share of the mid-region's mass in the K tokens of largest mass.
        budget: default budget of the cells.
        rows: captured rows at each budget.
        order: [H], heads by ascending mean h_mid; ties keep the order of heads.
        heads, stratified: [B, H], how often each head is drawn among all, and within quartiles.
        packs: [B, P], how often each pack is drawn.
    """

    facts: dict[str, str]
    ks: dict[float, int]
    cells: pd.DataFrame
    mass: pd.DataFrame
    budget: float
    rows: int
    order: np.ndarray
    heads: np.ndarray
    stratified: np.ndarray
    packs: np.ndarray

    @classmethod
    def read(cls, heads: Path, mass: Path, budget: float) -> Sample:
        """Reads captured rows and mass curves.

        Raises:
            ValueError: the backbone has too few heads for quartiles.
        """
        columns = [*SETTING_COLUMNS, "k", *CELL, *CAPTURED_MEANS, "log_z_hat", "log_z_true"]
        frame = pd.read_parquet(heads, columns=columns)
        cells = _cell_means(frame)
        ks = frame.groupby("budget_percent")["k"].first().to_dict()
        at_first_budget = cells.loc[next(iter(ks))]  # entropies are the same at every budget
        entropies = at_first_budget["h_mid"].mean(axis=1).to_numpy()
        count = len(entropies)
        if count < QUARTILES:
            raise ValueError(
                f"{heads}: quartiles need {QUARTILES} heads, the backbone has {count}; leave it out of findings"
            )
        curves = pd.read_parquet(mass, columns=[*CURVE, "c_mid"])
        first = frame[list(SETTING_COLUMNS)].iloc[0]
        each_head_once = np.ones((1, count))
        each_pack_once = np.ones((1, frame["pack"].nunique()))
        return cls(
            facts=first.astype(str).to_dict(),
            ks=ks,
            cells=cells,
            mass=curves.set_index(CURVE)["c_mid"].unstack("pack"),
            budget=budget,
            rows=len(frame) // len(ks),
            order=np.argsort(entropies.round(12), kind="stable"),  # as `equal_parts` orders them
            heads=each_head_once,
            stratified=each_head_once,
            packs=each_pack_once,
        )

    def resampled(self, resamples: int, seed: int) -> Sample:
        """Returns draws of heads, the same in all settings, and of this setting's packs.

        A setting of a single pack has that pack in every draw, so its intervals hold only for that text.
        """
        count = len(self.order)
        size = (resamples, count)
        heads = _generator(seed, "heads").integers(count, size=size)
        # Each rank is replaced by one between the first and the last rank of its own quartile.
        quartiles = self.quartile_of_rank
        first = np.searchsorted(quartiles, quartiles, "left")
        end = np.searchsorted(quartiles, quartiles, "right")
        ranks = _generator(seed, "quartiles").integers(first, end, size=size)
        return replace(
            self,
            heads=draw_counts(heads, count),
            stratified=draw_counts(self.order[ranks], count),
            packs=drawn_packs(self.name, self.packs.shape[1], resamples, seed),
        )

    @property
    def name(self) -> str:
        return f"{self.facts['corpus']} {self.facts['length']}"

    @property
    def quartile_of_rank(self) -> np.ndarray:
        """The quartile of each place in `order`: [H]."""
        ranks = pd.Series(range(len(self.order)))
        return equal_parts(ranks, QUARTILES).to_numpy()

    @property
    def quartiles(self) -> list[np.ndarray]:
        """The heads in four groups of ascending entropy."""
        of_rank = self.quartile_of_rank
        return [self.order[of_rank == quartile] for quartile in range(QUARTILES)]

    def by_head(self, name: str, budget: float | None = None) -> np.ndarray:
        """Returns the mean of a column of cells over the drawn packs: [B, H]."""
        at_budget = self.cells.loc[self.budget if budget is None else budget]
        return over_packs(self.packs, at_budget[name].to_numpy())

    def mass_at(self, k: int) -> np.ndarray:
        """Returns the share of the mid-region's mass in K tokens: [B, H]."""
        return over_packs(self.packs, self.mass.loc[k].to_numpy())

    def over_heads(self, values: np.ndarray) -> np.ndarray:
        """Returns the mean over the heads drawn among all: [B, H] -> [B]."""
        return (self.heads * values).sum(axis=1) / values.shape[1]

    def over_quartiles(self, values: np.ndarray) -> np.ndarray:
        """Returns the means over the heads drawn within each quartile: [B, H] -> [B, 4]."""
        drawn = self.stratified * values
        # A stratified draw has as many heads of a quartile as there are in it.
        means = [drawn[:, group].sum(axis=1) / len(group) for group in self.quartiles]
        return np.stack(means, axis=1)

    def mean(self, name: str, budget: float | None = None) -> np.ndarray:
        """Returns the mean of a column of cells over the drawn heads and packs: [B]."""
        return self.over_heads(self.by_head(name, budget))

    def log_z_error(self, budget: float | None = None) -> np.ndarray:
        """Returns the mean log-Z error over the rows where it is defined: [B], NaN without any."""
        # Undefined errors are 0 in the first mean; the second is the share of defined ones.
        return ratio(self.mean("log_z_error", budget), self.mean("log_z_defined", budget))

    def mean_where(self, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Returns the mean of `values` [B, H] over the drawn heads that are chosen: [B], NaN without any."""
        return ratio(self.over_heads(values * chosen), self.over_heads(chosen))

    def spearman(self, first: str, second: str) -> np.ndarray:
        """Returns the rank correlation of two columns over the heads drawn among all: [B], 0 if either is constant."""
        x = self._centred_ranks(first)
        y = self._centred_ranks(second)
        covariance = (x * y).sum(axis=1)  # Spearman's correlation is Pearson's of the ranks
        variances = (x * x).sum(axis=1) * (y * y).sum(axis=1)
        spread = np.sqrt(variances)
        correlation = np.zeros_like(spread)
        return np.divide(covariance, spread, where=spread > 0, out=correlation)

    def _centred_ranks(self, name: str) -> np.ndarray:
        """Returns the ranks of a column in each draw, less their mean: [B, H], a head as often as it was drawn."""
        values = np.broadcast_to(self.by_head(name), self.heads.shape)
        repeats = self.heads.astype(int).ravel()
        # Every draw has H heads, so the repeated values fill [B, H] row by row.
        drawn = np.repeat(values.ravel(), repeats).reshape(self.heads.shape)
        ranks = pd.DataFrame(drawn).rank(axis=1).to_numpy()
        return ranks - ranks.mean(axis=1, keepdims=True)


def _cell_means(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns `Sample.cells` of captured rows."""
    rows = frame[[*CAPTURED_MEANS, "log_z_hat", "log_z_true"]].astype(float)
    errors = rows["log_z_hat"] - rows["log_z_true"]
    defined = np.isfinite(rows["log_z_hat"]) & np.isfinite(rows["log_z_true"])
    rows = rows[CAPTURED_MEANS].assign(
        gain=rows["e_topk"] - rows["e_sub"],
        delta=rows["e_sub"] - rows["e_nosub"],
        log_z_error=errors.where(defined, 0.0),
        log_z_defined=defined.astype(float),
    )
    places = [frame[name] for name in CELL]
    return rows.groupby(places).mean().unstack("pack")


# ---- draws and intervals ---------------------------------------------------------------------------------------------


class BootstrapEstimate(NamedTuple):
    """A number of the full data and its percentile interval; NaN if not defined."""

    value: float
    low: float
    high: float

    def columns(self, name: str, digits: str = "z.6f") -> dict[str, str]:
        """Returns the columns of files for this number."""
        return {
            name: text(self.value, digits),
            f"{name}_ci_low": text(self.low, digits),
            f"{name}_ci_high": text(self.high, digits),
        }


def text(value: float, digits: str = "z.6f") -> str:
    """Formats a number; empty if it is NaN."""
    return "" if np.isnan(value) else format(value, digits)


def drawn_packs(name: str, packs: int, resamples: int, seed: int) -> np.ndarray:
    """Draws P - 1 of the packs of a setting, or its only one: [B, P], how often each is drawn."""
    rng = _generator(seed, f"packs of {name}")
    drawn = rng.integers(packs, size=(resamples, max(1, packs - 1)))
    return draw_counts(drawn, packs)


def over_packs(drawn: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Returns the mean over the drawn packs: counts [B, P], cells [H, P] -> [B, H]."""
    # Not a matrix product: its rounding separates equal heads, which changes ranks.
    of_packs = (drawn[:, [pack]] * cells[:, pack] for pack in range(cells.shape[1]))
    return sum(of_packs) / drawn[0].sum()  # all draws have the same number of packs


def estimate(as_is: np.ndarray, drawn: np.ndarray, extreme: Literal["least", "largest"] = "least") -> BootstrapEstimate:
    """Returns a number, the least or the largest of several, with its interval over the draws in which it is defined.

    The least of resampled numbers is biased downwards, so its quantiles give no interval. Instead the lower end is the
    lowest lower end of the numbers' intervals, and the upper end is the lowest of their Bonferroni-corrected upper
    ends. The largest is treated symmetrically. Numbers that are never defined are left out.

    Args:
        as_is: [1] or [1, any], of the full data.
        drawn: [B] or [B, any].
    """
    if extreme == "largest":  # the largest of x is minus the least of -x
        value, low, high = estimate(-as_is, -drawn)
        return BootstrapEstimate(-value, -high, -low)
    numbers = as_is.reshape(-1)
    values = drawn.reshape(len(drawn), -1)
    never_defined = np.isnan(values).all(axis=0)
    values = values[:, ~never_defined]
    least = float(np.fmin.reduce(numbers))  # `fmin` skips NaN
    if not values.size:
        return BootstrapEstimate(least, np.nan, np.nan)
    tail = (1 - LEVEL) / 2
    corrected = 1 - tail / values.shape[1]
    lower_ends = np.nanquantile(values, tail, axis=0)
    upper_ends = np.nanquantile(values, corrected, axis=0)
    return BootstrapEstimate(least, float(lower_ends.min()), float(upper_ends.min()))


def ratio(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Divides; NaN where `count` is 0."""
    quotient = np.full(np.shape(total), np.nan)
    return np.divide(total, count, where=count > 0, out=quotient)


def _generator(seed: int, name: str) -> np.random.Generator:
    """Returns the generator of one kind of draws; other seeds and names have independent ones."""
    # Not `hash`, which gives another number in every process.
    return np.random.default_rng(list(f"{seed} {name}".encode()))
