"""What a reader may want to know of a single value, in words: the page shows it with the value."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from residual_mass.metrics import Metric
from residual_mass.paper.readers import optional
from residual_mass.paper.readers.results import Score
from residual_mass.paper.table import Gain, Interval, format_score

FLAGS = {
    "floor": "at the floor, where methods cannot be told apart",
    "ceiling": "at the ceiling, where methods cannot be told apart",
    "beats_full": "{better_side} Full by more than chance, which is suspicious",
}


def on_score(score: Score, metric: Metric, gain: Gain | None) -> Iterator[str]:
    row = score.row
    yield within(score.interval)
    if row["stderr"]:
        yield f"standard error {format_score(float(row['stderr']))}"
    original = optional(row["original_value"])
    if original is not None and format_score(original) != format_score(score.value):
        yield f"by the authors' scorer {format_score(original)}"
    yield f"{score.examples} examples"
    yield from _tests(score, gain)
    yield from (FLAGS[flag].format(better_side=metric.better_side) for flag in score.flags)
    if score.data != ("original",):
        yield f"{' and '.join(score.data)} examples"
    if score.maps:
        yield feature_maps(score.maps, row["phi_sha"])
    yield from exactly(row["value"], score.source.name)


def within(interval: Interval, printed: Callable[[float], str] = format_score) -> str:
    return f"95% interval {printed(interval.low)} to {printed(interval.high)}"


def feature_maps(label: str, phi_sha: str = "") -> str:
    return f"feature maps {label} {phi_sha[:12]}".rstrip()


def exactly(value: str, source: str) -> Iterator[str]:
    """The value as its file has it."""
    if value:
        yield f"unrounded {value}"
    yield f"from {source}"


def difference(gain: Gain, signed: Callable[[float], str]) -> str:
    """To top-k, with its p-values."""
    low, high = signed(gain.interval.low), signed(gain.interval.high)
    p = f"p {gain.p:.3g}, {round(gain.p_holm, 6):.3g} after Holm's correction"
    return f"difference to Top-K at the same budget {signed(gain.value)} ({low} to {high}), {p}"


def _tests(score: Score, gain: Gain | None) -> Iterator[str]:
    """Paired differences with their p-values."""
    row = score.row
    if gain is not None:
        yield difference(gain, _signed)
    if score.mde is not None:
        yield f"smallest gain that so many examples would show {format_score(score.mde)}"
    if row["full_gap"]:
        yield f"difference to Full {_signed(float(row['full_gap']))}, p {float(row['full_gap_p']):.3g}"
    if row["right_to_wrong"]:
        flips = f"{row['right_to_wrong']} from right to wrong, {row['wrong_to_right']} from wrong to right"
        yield f"answers turned relative to Full: {flips}"


def _signed(number: float) -> str:
    return f"{number:+z.3f}"
