"""Two-way bootstrap: heads and packs drawn with replacement, independently of each other.

Of P packs P - 1 are drawn, because the mean of P draws has a variance too small by a factor of (P - 1) / P. A draw is
how often each head or pack is drawn.

Shape letters: B = resamples, H = heads, that is (layer, query head), P = packs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

LEVEL = 0.95
QUARTILES = 4


class BootstrapEstimate(NamedTuple):
    """A number of the full data and its percentile interval; NaN where it is not defined."""

    value: float
    low: float
    high: float


def drawn_packs(name: str, packs: int, resamples: int, seed: int) -> np.ndarray:
    """Draws from the packs of that name: [B, P] counts of P - 1 packs, or of the only one."""
    return counts(_generator(seed, f"packs of {name}").integers(packs, size=(resamples, max(1, packs - 1))), packs)


def drawn_heads(order: np.ndarray, resamples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws from all heads, and within quartiles of them, which are then never empty: [B, H] counts twice.

    They depend on the seed and the number of heads alone, so settings share them.

    Args:
        order: [H], the heads by their quantity.
    """
    count, quartiles = len(order), quartiles_of(len(order))
    heads = _generator(seed, "heads").integers(count, size=(resamples, count))
    ends = (np.searchsorted(quartiles, quartiles, side) for side in ("left", "right"))
    places = _generator(seed, "quartiles").integers(*ends, size=(resamples, count))
    return counts(heads, count), counts(order[places], count)


def quartiles_of(count: int) -> np.ndarray:
    """Returns the quartile of each place in an order; sizes differ by one at most."""
    return np.arange(count) * QUARTILES // count


def over_packs(drawn: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Returns the mean over the drawn packs: counts [B, P], cells [H, P] -> [B, H]."""
    # Not a matrix product: its rounding sets equal heads apart, which changes ranks.
    return sum(drawn[:, [pack]] * cells[:, pack] for pack in range(cells.shape[1])) / drawn[0].sum()


def estimate(as_is: np.ndarray, drawn: np.ndarray, extreme: Literal["least", "largest"] = "least") -> BootstrapEstimate:
    """Returns a number with its interval over the draws in which it is defined; of several numbers the least or the
    largest.

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
    """NaN where there is nothing to divide by."""
    return np.divide(total, count, where=count > 0, out=np.full(np.shape(total), np.nan))


def counts(drawn: np.ndarray, n: int) -> np.ndarray:
    """Returns how often each of n was drawn: [B, any] indices -> [B, n]."""
    cells = drawn + n * np.arange(len(drawn))[:, None]
    return np.bincount(cells.ravel(), minlength=n * len(drawn)).reshape(-1, n).astype(np.float64)


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng(list(f"{seed} {name}".encode()))
