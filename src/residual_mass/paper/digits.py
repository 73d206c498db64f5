"""The text of a number in print. Each is formatted once, when its cell is made: bold type and intervals go by its
digits, and LaTeX and the page only mark it up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import pandas as pd

from residual_mass.metrics import METRICS, Metric

DASH = "--"
"""Printed for what the study does not evaluate or could not measure."""


def format_score(value: float) -> str:
    """Formats a score with three decimals, as in the paper; zero has no minus."""
    return f"{value:z.3f}"


def format_value(value: float, metric: Metric) -> str:
    """Formats a value with three decimals. A positive metric without an upper bound, such as a divergence, may be large
    or tiny: it has three significant digits within four decimals, or two within six.
    """
    places = 3
    if metric.low == 0 and metric.high is None:
        for_three = min(_decimals_of(value, significant=3), 4)
        for_two = min(_decimals_of(value, significant=2), 6)
        places = max(for_three, for_two)
    return f"{value:z.{places}f}"


def _decimals_of(value: float, significant: int) -> int:
    """Returns the number of decimals of a value with so many significant digits."""
    rounded = Decimal(f"{value:.{significant - 1}e}")
    return max(-rounded.as_tuple().exponent, 0)


def format_hours(hours: float) -> str:
    if hours >= 2:
        return f"{hours:.1f} h"
    seconds = round(3600 * hours)
    return f"{seconds} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def format_seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_time(milliseconds: float) -> str:
    """Formats milliseconds; long times have no room for decimals."""
    return f"{milliseconds:.2f}" if milliseconds < 1e4 else f"{milliseconds:.0f}"


def format_steps(number: float) -> str:
    thousands, rest = divmod(number, 1000)
    return f"{thousands:.0f}k" if number and rest == 0 else f"{number:,.0f}"


def format_millions(count: float) -> str:
    return f"{count / 1e6:.1f}M"


def format_gigabytes(count: float) -> str:
    return f"{count / 1e9:.3f}"


Form = Callable[[float], str]


def _forms() -> Iterator[tuple[str, Form]]:
    for name, metric in METRICS.items():
        yield name, functools.partial(format_value, metric=metric)
    by_form: dict[Form, str] = {
        "{:.1%}".format: "step_share state_share",
        "{:,.0f}".format: "params_per_head q_heads kv_heads summary_bytes state_bytes training_steps",
        format_millions: "phi_q_total phi_k_total total",
        format_seconds: "training_seconds",
        format_steps: "steps sequences teacher_passes",
        format_hours: "wall_clock_h",
        format_time: "per_step_ms end_to_end_ms floor_ms over_floor",
        format_gigabytes: "step_bytes",
    }
    for form, names in by_form.items():
        for name in names.split():
            yield name, form


FORMS = dict(_forms())
"""Formats of the quantities that are not printed as scores."""


def texts(cells: pd.DataFrame) -> pd.Series:
    """Formats each value by its `quantity`; DASH where there is no value."""
    quantities = cells["quantity"] if "quantity" in cells else [""] * len(cells)
    printed = []
    for quantity, value in zip(quantities, cells["value"], strict=True):
        form = FORMS.get(quantity, format_score)
        printed.append(DASH if pd.isna(value) else form(value))
    return pd.Series(printed, cells.index, dtype=str)


def in_mathematics(cells: pd.DataFrame) -> pd.Series:
    """Returns texts, with negative numbers as mathematics so that their hyphen prints as a minus."""
    negative = cells["text"].str.fullmatch(r"-[0-9.]+")
    return cells["text"].mask(negative, "$" + cells["text"] + "$")


def decimals(text: str) -> int:
    """Returns how many decimals a number has in print."""
    return len(text.partition(".")[2])


def interval(cell: Mapping[str, Any], low: str = "ci_low", high: str = "ci_high") -> tuple[str, str]:
    """Returns both bounds with as many decimals as the value has in print."""
    digits = f"z.{decimals(cell['text'])}f"
    return format(cell[low], digits), format(cell[high], digits)
