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

FACTS = ("study", "backbone", "corpus", "length", "maps", "model_id", "revision", "weights", "phi_sha")
MEANS = "e_topk e_sub e_nosub e_exact_sub e_exact_nosub residual_share_hat h_mid clamped".split()
LEVEL = 0.95
QUARTILES = 4


@dataclass(frozen=True)
class Sample:
    """The captured data of one corpus at one length (B = 1), or draws of its heads and packs.

    Numbers per entropy quartile use a stratified draw, within the quartiles of the full data, so that no quartile is
    empty. All others use a draw among all heads.

    Attributes:
        facts: by FACTS.
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
        index = ["budget_percent", "layer", "head", "pack"]
        columns = [*FACTS, "k", *index, *MEANS, "log_z_hat", "log_z_true"]
        frame = pd.read_parquet(heads, columns=columns)
        rows = frame[[*MEANS, "log_z_hat", "log_z_true"]].astype(float)
        errors = rows["log_z_hat"] - rows["log_z_true"]
        defined = np.isfinite(rows["log_z_hat"]) & np.isfinite(rows["log_z_true"])
        rows = rows[MEANS].assign(
            gain=rows["e_topk"] - rows["e_sub"], delta=rows["e_sub"] - rows["e_nosub"],
            log_z_error=errors.where(defined, 0.0), log_z_defined=defined.astype(float),
        )  # fmt: skip
        cells = rows.groupby([frame[name] for name in index]).mean().unstack("pack")
        ks = frame.groupby("budget_percent")["k"].first().to_dict()
        entropies = cells.loc[next(iter(ks))]["h_mid"].mean(axis=1).to_numpy()
        if (count := len(entropies)) < QUARTILES:
            raise ValueError(
                f"{heads}: quartiles need {QUARTILES} heads, the backbone has {count}; leave it out of findings"
            )
        curves = pd.read_parquet(mass, columns=["k", "layer", "head", "pack", "c_mid"])
        packs = frame["pack"].nunique()
        return cls(
            facts={name: str(frame[name].iloc[0]) for name in FACTS},
            ks=ks, cells=cells, mass=curves.set_index(["k", "layer", "head", "pack"])["c_mid"].unstack("pack"),
            budget=budget, rows=len(frame) // len(ks),
            order=np.argsort(entropies.round(12), kind="stable"),  # rounding of sums would separate equal heads
            heads=np.ones((1, count)), stratified=np.ones((1, count)), packs=np.ones((1, packs)),
        )  # fmt: skip

    def resampled(self, resamples: int, seed: int) -> Sample:
        """Returns draws of heads, the same in all settings, and of this setting's packs.

        A setting of a single pack has that pack in every draw, so its intervals hold only for that text.
        """
        count, quartiles = len(self.order), quartiles_of(len(self.order))
        heads = _generator(seed, "heads").integers(count, size=(resamples, count))
        ends = (np.searchsorted(quartiles, quartiles, side) for side in ("left", "right"))
        places = _generator(seed, "quartiles").integers(*ends, size=(resamples, count))
        return replace(
            self, heads=counts(heads, count), stratified=counts(self.order[places], count),
            packs=drawn_packs(self.name, self.packs.shape[1], resamples, seed),
        )  # fmt: skip

    @property
    def name(self) -> str:
        return f"{self.facts['corpus']} {self.facts['length']}"

    @property
    def quartiles(self) -> list[np.ndarray]:
        """The heads in four groups of ascending entropy."""
        return [self.order[quartiles_of(len(self.order)) == quartile] for quartile in range(QUARTILES)]

    def by_head(self, name: str, budget: float | None = None) -> np.ndarray:
        """Returns the mean of a column of cells over the drawn packs: [B, H]."""
        return over_packs(self.packs, self.cells.loc[self.budget if budget is None else budget][name].to_numpy())

    def mass_at(self, k: int) -> np.ndarray:
        """Returns the share of the mid-region's mass in K tokens: [B, H]."""
        return over_packs(self.packs, self.mass.loc[k].to_numpy())

    def over_heads(self, values: np.ndarray) -> np.ndarray:
        """Returns the mean over the heads drawn among all: [B, H] -> [B]."""
        return (self.heads * values).sum(axis=1) / values.shape[1]

    def over_quartiles(self, values: np.ndarray) -> np.ndarray:
        """Returns the means over the heads drawn within each quartile: [B, H] -> [B, 4]."""
        drawn = self.stratified * values
        return np.stack([drawn[:, group].sum(axis=1) / len(group) for group in self.quartiles], axis=1)

    def mean(self, name: str, budget: float | None = None) -> np.ndarray:
        """Returns the mean of a column of cells over the drawn heads and packs: [B]."""
        return self.over_heads(self.by_head(name, budget))

    def log_z_error(self, budget: float | None = None) -> np.ndarray:
        """Returns the mean log-Z error over the rows where it is defined: [B], NaN without any."""
        return ratio(self.mean("log_z_error", budget), self.mean("log_z_defined", budget))

    def mean_where(self, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Returns the mean of `values` [B, H] over the drawn heads that are chosen: [B], NaN without any."""
        return ratio(self.over_heads(values * chosen), self.over_heads(chosen))

    def spearman(self, first: str, second: str) -> np.ndarray:
        """Returns the rank correlation of two columns over the heads drawn among all: [B], 0 if either is constant."""
        repeats = self.heads.astype(int).ravel()
        ranks = []
        for name in (first, second):
            values = np.broadcast_to(self.by_head(name), self.heads.shape)
            drawn = np.repeat(values.ravel(), repeats).reshape(self.heads.shape)
            rank = pd.DataFrame(drawn).rank(axis=1).to_numpy()
            ranks.append(rank - rank.mean(axis=1, keepdims=True))
        x, y = ranks
        spread = np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
        return np.divide((x * y).sum(axis=1), spread, where=spread > 0, out=np.zeros_like(spread))


# ---- draws and intervals ---------------------------------------------------------------------------------------------


class BootstrapEstimate(NamedTuple):
    """A number of the full data and its percentile interval; NaN if not defined."""

    value: float
    low: float
    high: float

    def columns(self, name: str, digits: str = "z.6f") -> dict[str, str]:
        """Returns the columns of files for this number."""
        return {f"{name}{end}": text(x, digits) for end, x in zip(("", "_ci_low", "_ci_high"), self, strict=True)}


def text(value: float, digits: str = "z.6f") -> str:
    """Formats a number; empty if it is NaN."""
    return "" if np.isnan(value) else format(value, digits)


def drawn_packs(name: str, packs: int, resamples: int, seed: int) -> np.ndarray:
    """Draws P - 1 of the packs of a setting, or its only one: [B, P], how often each is drawn."""
    return counts(_generator(seed, f"packs of {name}").integers(packs, size=(resamples, max(1, packs - 1))), packs)


def quartiles_of(count: int) -> np.ndarray:
    """Returns the quartile of each rank: [count]; sizes differ by one at most."""
    return np.arange(count) * QUARTILES // count


def over_packs(drawn: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Returns the mean over the drawn packs: counts [B, P], cells [H, P] -> [B, H]."""
    # Not a matrix product: its rounding separates equal heads, which changes ranks.
    return sum(drawn[:, [pack]] * cells[:, pack] for pack in range(cells.shape[1])) / drawn[0].sum()


def estimate(as_is: np.ndarray, drawn: np.ndarray, extreme: Literal["least", "largest"] = "least") -> BootstrapEstimate:
    """Returns a number, the least or the largest of several, with its interval over the draws in which it is defined.

    The least of resampled numbers is biased downwards, so its quantiles give no interval. Instead the lower end is the
    lowest lower end of the numbers' intervals, and the upper end is the lowest of their Bonferroni-corrected upper
    ends. The largest is treated symmetrically. Numbers that are never defined are left out.

    Args:
        as_is: [1] or [1, any], of the full data.
        drawn: [B] or [B, any].
    """
    sign = 1 if extreme == "least" else -1
    value, values = (sign * x.reshape(len(x), -1) for x in (as_is, drawn))
    values = values[:, ~np.isnan(values).all(axis=0)]
    least = float(np.fmin.reduce(value[0]))
    if not values.size:
        return BootstrapEstimate(sign * least, np.nan, np.nan)
    tail = (1 - LEVEL) / 2
    low = float(np.nanquantile(values, tail, axis=0).min())
    high = float(np.nanquantile(values, 1 - tail / values.shape[1], axis=0).min())
    return BootstrapEstimate(sign * least, *((low, high) if extreme == "least" else (-high, -low)))


def ratio(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Divides; NaN where `count` is 0."""
    return np.divide(total, count, where=count > 0, out=np.full(np.shape(total), np.nan))


def counts(drawn: np.ndarray, n: int) -> np.ndarray:
    """Returns how often each of n was drawn: [B, any] indices -> [B, n]."""
    cells = drawn + n * np.arange(len(drawn))[:, None]
    return np.bincount(cells.ravel(), minlength=n * len(drawn)).reshape(-1, n).astype(np.float64)


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng(list(f"{seed} {name}".encode()))
