"""What the numbers in result files measure: one object per metric, which is asked for its direction, its bounds and its
unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A metric of answers or of attention outputs.

    Attributes:
        name: the value of the column `metric` in result files.
        title: in running text and on axes.
        unit: empty for shares and ratios.
        low, high: the range; None where it has no bound.
        floor, ceiling: values at these bounds or beyond are so bad, or so good, that methods cannot be compared; None
            where no such bound is known.
        right: the worst score of a right answer; None where answers are not right or wrong.
    """

    name: str
    title: str
    unit: str = ""
    higher_is_better: bool = True
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    ceiling: float | None = None
    right: float | None = None

    def better(self, first: float, second: float) -> bool:
        """Whether `first` is better than `second`."""
        return first > second if self.higher_is_better else first < second

    def flags(self, value: float) -> set[str]:
        """The bounds, `floor` or `ceiling`, that a value is at or beyond."""
        at_floor = self.floor is not None and not self.better(value, self.floor)
        at_ceiling = self.ceiling is not None and not self.better(self.ceiling, value)
        return {name for name, reached in (("floor", at_floor), ("ceiling", at_ceiling)) if reached}

    def is_right(self, scores: Any) -> Any:
        """Whether a score, or each of an array, is that of a right answer; of metrics with `right` alone."""
        return scores >= self.right if self.higher_is_better else scores <= self.right


def _score(name: str, title: str, right: float | None = None) -> Metric:
    """A score from 0 to 1 of the harness."""
    return Metric(name, title, low=0, high=1, floor=0.02, ceiling=0.98, right=right)


STRING_MATCH = _score("string_match", "share of references found", right=1)
ACC = _score("acc", "accuracy", right=1)
ROUGE = _score("rouge_score", "ROUGE-L")
QA_F1 = _score("qa_f1_score", "F1 of words")
MEAN = _score("mean", "mean score")
"""Of tasks with different scores."""
RELATIVE_ERROR = Metric("relative_error", "relative error", higher_is_better=False, low=0)
"""Of attention outputs."""


def _fidelity(name: str, title: str, unit: str = "", better: bool = False, **bounds: float) -> Metric:
    """Distance of an arm from full attention, token by token."""
    return Metric(name, title, unit, better, **bounds)


KL = _fidelity("kl", "KL(Full || method)", "nats", low=0)
SAME_TOP = _fidelity("same_top", "equal top tokens", better=True, low=0, high=1)
LOG_PPL_RATIO = _fidelity("log_ppl_ratio", "log perplexity ratio", "nats")
NLL = _fidelity("nll", "negative log-likelihood", "nats", low=0)
FIRST = _fidelity("first", "tokens that come first", better=True, low=0, high=1)
KEPT = _fidelity("kept", "answer before the first difference", better=True, low=0, high=1)
"""Of the answer of full attention, the share that an arm reproduces."""
FIRST_DIFFERENCES = _fidelity("first_differences", "first differences per drafted token", low=0, high=1)
"""From the greedy tokens of full attention, over tokens up to and with the first difference of each draft."""
VERIFIED = _fidelity("bytes_per_verified_token", "bytes per verified token", low=0, high=1)
"""Where the arm drafts and full attention verifies, over full attention's bytes
(`methods.step_bytes.bytes_per_verified_token`).
"""
DELTA_P_RMS = _fidelity("delta_p_rms", "RMS of the change of p(token)", low=0, high=1)
QUANTILES = {
    "kl": {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999, "max": 1.0},
    "delta_p": {"p1": 0.01, "p5": 0.05, "median": 0.5, "p95": 0.95, "p99": 0.99},
}
"""Quantiles over tokens that are reported of a measure, by the ending of the metric's name."""
_KL_QUANTILES = tuple(_fidelity(f"kl_{end}", f"KL, {end} over tokens", "nats", low=0) for end in QUANTILES["kl"])
_DELTA_P_QUANTILES = tuple(
    _fidelity(f"delta_p_{end}", f"change of p(token), {end} over tokens", better=True, low=-1, high=1)
    for end in QUANTILES["delta_p"]
)
"""More is better: a token that full attention did not expect may well gain."""
METRICS = {
    each.name: each
    for each in (
        STRING_MATCH, ACC, ROUGE, QA_F1, MEAN, RELATIVE_ERROR,
        KL, *_KL_QUANTILES, SAME_TOP, LOG_PPL_RATIO, NLL, FIRST, KEPT, FIRST_DIFFERENCES, VERIFIED,
        DELTA_P_RMS, *_DELTA_P_QUANTILES,
    )
}  # fmt: skip


def metric_of_mean(metrics: Iterable[Metric]) -> Metric:
    """The metric of an unweighted mean over tasks with these.

    Raises:
        ValueError: they differ, and not all are scores from 0 to 1, of which a mean has no meaning.
    """
    distinct = set(metrics)
    if len(distinct) == 1:
        return distinct.pop()
    for metric in distinct:
        if (metric.higher_is_better, metric.low, metric.high) != (MEAN.higher_is_better, MEAN.low, MEAN.high):
            names = " and ".join(sorted(each.name for each in distinct))
            raise ValueError(f"no mean over {names}: {metric.name} is no score from 0 to 1; report them apart")
    return MEAN
