"""Two-way bootstrap: heads and packs drawn with replacement, independently of each other.

Of P packs P - 1 are drawn, because the mean of P draws has a variance too small by a factor of (P - 1) / P.

Shape letters: B = resamples, H = heads, that is (layer, query head), P = packs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

LEVEL = 0.95


@dataclass(frozen=True)
class CapturedSetting:
    """What was captured on one corpus at one length.

    Attributes:
        facts: study, backbone, maps and their provenance, corpus and length.
        ks: K of every budget, in ascending order of budgets.
        cells: by budget, then by name, [H, P]: means over queries of the captured columns, of gain = e_topk - e_sub
            and delta = e_sub - e_nosub, and sum and count of the defined log-Z errors (log_z_sum, log_z_count). Heads
            are ordered by layer, then head.
        mass: by K of the grid, [H, P]: the mean share of the mid-region's mass that K tokens hold.
        rows: captured rows at each budget.
        quartiles: heads in four groups of ascending mean h_mid, whose sizes differ by one at most; ties keep the order
            of heads.
    """

    facts: dict[str, str]
    heads: tuple[tuple[int, int], ...]
    packs: tuple[int, ...]
    ks: dict[float, int]
    cells: dict[float, dict[str, np.ndarray]]
    mass: dict[int, np.ndarray]
    rows: int
    quartiles: tuple[np.ndarray, ...]

    @property
    def name(self) -> str:
        return f"{self.facts['corpus']} {self.facts['length']}"

    @property
    def quartile_sizes(self) -> np.ndarray:
        return np.array([len(group) for group in self.quartiles])


class BootstrapEstimate(NamedTuple):
    """A number of the full data and its percentile interval; NaN where it is not defined."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Sample:
    """B draws from one setting, or the setting as it is (B = 1).

    Numbers per entropy quartile use a stratified draw, within the quartiles of the full data, so that no quartile is
    empty; all others use a draw among all heads.

    Attributes:
        budget: default budget of the cells.
        heads: [B, H], indices into `setting.heads`, drawn among all.
        stratified: [B, H], the same drawn within quartiles.
        packs: [B, any], indices into `setting.packs`.
    """

    setting: CapturedSetting
    budget: float
    heads: np.ndarray
    stratified: np.ndarray
    packs: np.ndarray

    def by_head(self, name: str, budget: float | None = None) -> np.ndarray:
        """[B, H]: the mean of these cells over the drawn packs."""
        return self.over_packs(self.setting.cells[self.budget if budget is None else budget][name])

    def over_packs(self, cells: np.ndarray) -> np.ndarray:
        """[H, P] -> [B, H]."""
        return over_packs(self.packs, cells)

    def over_heads(self, values: np.ndarray) -> np.ndarray:
        """The mean over the heads drawn among all: [B, H] -> [B]."""
        count = values.shape[1]
        return (_times(self.heads, count) * values).sum(axis=1) / count

    def over_quartiles(self, values: np.ndarray) -> np.ndarray:
        """The means over the heads drawn within each quartile: [B, H] -> [B, 4]."""
        drawn = _times(self.stratified, values.shape[1]) * values
        return np.stack([drawn[:, group].sum(axis=1) / len(group) for group in self.setting.quartiles], axis=1)

    def mean(self, name: str, budget: float | None = None) -> np.ndarray:
        """[B]."""
        return self.over_heads(self.by_head(name, budget))

    def log_z_error(self, budget: float | None = None) -> np.ndarray:
        """[B]: the mean log-Z error over the rows where it is defined, else NaN."""
        return ratio(self.mean("log_z_sum", budget), self.mean("log_z_count", budget))

    def mean_where(self, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """The mean of [B, H] over the drawn heads that are chosen: [B], NaN without any."""
        return ratio(self.over_heads(values * chosen), self.over_heads(chosen))

    def spearman(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """[B, H] twice -> [B]: rank correlation over the heads drawn among all; 0 where either is constant."""
        drawn = (np.take_along_axis(values, self.heads, axis=1) for values in (first, second))
        ranks = (pd.DataFrame(values).rank(axis=1).to_numpy() for values in drawn)
        x, y = (each - each.mean(axis=1, keepdims=True) for each in ranks)
        spread = np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
        return np.divide((x * y).sum(axis=1), spread, where=spread > 0, out=np.zeros_like(spread))


def whole(settings: Sequence[CapturedSetting], budget: float) -> list[Sample]:
    """The full data as samples (B = 1)."""
    return [
        Sample(setting, budget, heads, heads, np.arange(len(setting.packs))[None])
        for setting in settings
        for heads in [np.arange(len(setting.heads))[None]]
    ]


def resampled(settings: Sequence[CapturedSetting], budget: float, resamples: int, seed: int) -> list[Sample]:
    """Draws for all settings: each resample has the same heads in all of them, and packs of each.

    A setting of a single pack has that pack in every draw, so its intervals hold for that text alone. Draws depend on
    the seed and the numbers of heads and packs, those of packs also on the setting's name, never on other settings.
    """
    count = len(settings[0].heads)
    heads = _generator(seed, "heads").integers(count, size=(resamples, count))
    ends = np.cumsum([len(group) for group in settings[0].quartiles])
    starts = np.concatenate([[0], ends[:-1]])
    sizes = ends - starts
    places = _generator(seed, "quartiles").integers(
        np.repeat(starts, sizes), np.repeat(ends, sizes), size=(resamples, count)
    )
    samples = []
    for setting in settings:
        drawn = drawn_packs(setting.name, len(setting.packs), resamples, seed)
        samples.append(Sample(setting, budget, heads, np.concatenate(setting.quartiles)[places], drawn))
    return samples


def drawn_packs(name: str, packs: int, resamples: int, seed: int) -> np.ndarray:
    """Draws of a setting of that name: [B, P - 1] indices of its packs, or [B, 1] where it has only one."""
    return _generator(seed, f"packs of {name}").integers(packs, size=(resamples, max(1, packs - 1)))


def over_packs(packs: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """The mean over the drawn packs: draws [B, any], cells [H, P] -> [B, H]."""
    times = _times(packs, cells.shape[1])
    # Not a matrix product: its rounding sets equal heads apart, which changes ranks.
    return sum(times[:, [pack]] * cells[:, pack] for pack in range(cells.shape[1])) / packs.shape[1]


def estimate(number: Callable[..., np.ndarray], as_is: Any, drawn: Any, *arguments: object) -> BootstrapEstimate:
    """`number(as_is, *arguments)` with its interval over the draws in which it is defined; `as_is` and `drawn` are a
    `Sample` each, or the samples of all settings.
    """
    value, values = float(number(as_is, *arguments)[0]), number(drawn, *arguments)
    values = values[~np.isnan(values)]
    if not len(values):
        return BootstrapEstimate(value, np.nan, np.nan)
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return BootstrapEstimate(value, float(low), float(high))


def estimate_extreme(
    number: Callable[[Any], np.ndarray], as_is: Any, drawn: Any, extreme: Literal["least", "largest"]
) -> BootstrapEstimate:
    """The least or the largest of several numbers, [B, any], with an interval for that.

    The least of resampled numbers is biased downwards, so its quantiles give no interval. Instead the lower end is the
    lowest lower end of the numbers' intervals, and the upper end is the lowest of their Bonferroni-corrected upper
    ends. The largest is treated symmetrically. Numbers that are never defined are left out.
    """
    sign = 1 if extreme == "least" else -1
    value, values = sign * number(as_is)[0], sign * number(drawn)
    defined = ~np.isnan(value) & ~np.isnan(values).all(axis=0)
    if not defined.any():
        return BootstrapEstimate(np.nan, np.nan, np.nan)
    tail = (1 - LEVEL) / 2
    low = np.nanquantile(values[:, defined], tail, axis=0).min()
    high = np.nanquantile(values[:, defined], 1 - tail / defined.sum(), axis=0).min()
    ends = (float(low), float(high)) if extreme == "least" else (-float(high), -float(low))
    return BootstrapEstimate(sign * float(value[defined].min()), *ends)


def ratio(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """NaN where there is nothing to divide by."""
    return np.divide(total, count, where=count > 0, out=np.full(np.shape(total), np.nan))


def _times(drawn: np.ndarray, n: int) -> np.ndarray:
    """How often each of n was drawn: [B, any] indices -> [B, n] counts."""
    cells = drawn + n * np.arange(len(drawn))[:, None]
    return np.bincount(cells.ravel(), minlength=n * len(drawn)).reshape(-1, n).astype(np.float64)


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng(list(f"{seed} {name}".encode()))
