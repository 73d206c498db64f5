"""Which of the measured arms is recommended: the fastest step here that stays below the target."""

from __future__ import annotations

import math

import pandas as pd

ARM_COLUMNS = ["method", "budget_percent"]
TORCH = "torch"
"""Name of the backend that only simulates what a fast step would leave unread."""
FASTER = 0.97
"""A step counts as faster if it takes at most this share of the other's time, or less where times scatter more."""


def arm_means(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each method and budget over all texts, in ascending order of bytes read.

    Args:
        table: as `Measured.table`.

    Returns:
        The columns of an arm, its `kl` and `read` as means over texts, `seconds`, `cache_mib` and `backend`; `high`,
        the largest upper end of an interval, infinite for a single document; and `over_topk`, the largest ratio.
    """
    high = table["ci_high"].fillna(math.inf)
    rows = table.assign(high=high).groupby(ARM_COLUMNS, sort=False)
    arms = rows.agg(
        kl=("kl", "mean"),
        read=("read", "mean"),
        high=("high", "max"),
        over_topk=("kl_over_topk", "max"),
        seconds=("seconds", "first"),
        cache_mib=("cache_mib", "first"),
        backend=("backend", "first"),
    )
    return arms.reset_index().sort_values("read", kind="stable")


def below_target(table: pd.DataFrame, target: float) -> pd.DataFrame:
    """Returns the arms whose intervals end at or below the target on every text and that read fewer bytes than full
    attention, in ascending order of bytes.
    """
    arms = arm_means(table)
    return arms[(arms["high"] <= target) & (arms["read"] < 1)]


def recommended(table: pd.DataFrame, target: float, faster: float = FASTER) -> pd.Series | None:
    """Returns the arm with the fastest step among those below the target that a fast step serves here; of steps that
    take equally long within the scatter of times, the one with the smallest KL. None if there is none.

    Args:
        faster: share of another's time from which on a step counts as faster.
    """
    served = below_target(table, target)
    served = served[served["backend"] != TORCH]
    if served.empty:
        return None
    longest = served["seconds"].min() / faster
    equal = served[served["seconds"] <= longest]
    return equal.sort_values("kl", kind="stable").iloc[0]


def fewest_bytes(table: pd.DataFrame, target: float) -> pd.Series | None:
    """Returns the arm below the target that reads the fewest bytes, whatever serves it; None if there is none."""
    arms = below_target(table, target)
    return None if arms.empty else arms.iloc[0]


def fastest_of(arms: pd.DataFrame) -> pd.Series | None:
    """Returns the arm with the fastest step, None if there is none."""
    return None if arms.empty else arms.sort_values("seconds", kind="stable").iloc[0]


def is_same(arm: pd.Series | None, row: object) -> bool:
    """Returns whether an arm is that of a row of `Measured.table`."""
    if arm is None:
        return False
    return arm.method == row.method and arm.budget_percent == row.budget_percent


def faster_from(fastest: pd.DataFrame, side: str, other: str, faster: float = FASTER) -> int | None:
    """Returns the number of tokens from which on a side is faster than another at every length; None if at none.

    Args:
        fastest: seconds by side, with a column for each number of tokens, in ascending order.
        faster: share of the other's time from which on a side counts as faster.
    """
    first = None
    for tokens in reversed(fastest.columns):
        if fastest.loc[side, tokens] > faster * fastest.loc[other, tokens]:
            break
        first = int(tokens)
    return first
