"""Metrics of the numbers in result files: one object per metric, with its direction, bounds and unit."""

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
        floor, ceiling: at or beyond these values, results are too bad, or too good, to compare methods; None where no
            such value is known.
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
        """Returns which of `floor` and `ceiling` a value is at or beyond."""
        reached = set()
        if self.floor is not None and not self.better(value, self.floor):
            reached.add("floor")
        if self.ceiling is not None and not self.better(self.ceiling, value):
            reached.add("ceiling")
        return reached

    def is_right(self, scores: Any) -> Any:
        """Whether a score, or each score of an array, is that of a right answer; needs `right`."""
        return scores >= self.right if self.higher_is_better else scores <= self.right


def _score(name: str, title: str, right: float | None = None) -> Metric:
    """Returns a metric of the harness with scores from 0 to 1."""
    return Metric(name, title, low=0, high=1, floor=0.02, ceiling=0.98, right=right)


STRING_MATCH = _score("string_match", "share of references found", right=1)
ACC = _score("acc", "accuracy", right=1)
ROUGE = _score("rouge_score", "ROUGE-L")
QA_F1 = _score("qa_f1_score", "F1 of words")
MEAN = _score("mean", "mean score")
"""Mean over tasks with different metrics."""
RELATIVE_ERROR = Metric("relative_error", "relative error", higher_is_better=False, low=0)
"""Relative l1 error of attention outputs."""


def _fidelity(name: str, title: str, unit: str = "", better: bool = False, **bounds: float) -> Metric:
    """Returns a metric of the distance of an arm from full attention, token by token."""
    return Metric(name, title, unit, better, **bounds)


KL = _fidelity("kl", "KL(Full || method)", "nats", low=0)
SAME_TOP = _fidelity("same_top", "equal top tokens", better=True, low=0, high=1)
LOG_PPL_RATIO = _fidelity("log_ppl_ratio", "log perplexity ratio", "nats")
NLL = _fidelity("nll", "negative log-likelihood", "nats", low=0)
FIRST = _fidelity("first", "tokens that come first", better=True, low=0, high=1)
KEPT = _fidelity("kept", "answer before the first difference", better=True, low=0, high=1)
"""Share of full attention's answer before the first token that an arm would choose otherwise."""
DELTA_P_RMS = _fidelity("delta_p_rms", "RMS of the change of p(token)", low=0, high=1)
QUANTILES = {
    "kl": {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999, "max": 1.0},
    "delta_p": {"p1": 0.01, "p5": 0.05, "median": 0.5, "p95": 0.95, "p99": 0.99},
}
"""Reported quantiles over tokens of each measure, by the ending of the metric's name."""


def _kl_quantile(ending: str) -> Metric:
    return _fidelity(f"kl_{ending}", f"KL, {ending} over tokens", "nats", low=0)


def _delta_p_quantile(ending: str) -> Metric:
    """Higher is better: a positive change means that the arm finds the text's token more likely than full attention."""
    title = f"change of p(token), {ending} over tokens"
    return _fidelity(f"delta_p_{ending}", title, better=True, low=-1, high=1)


_ALL_METRICS = (
    *(STRING_MATCH, ACC, ROUGE, QA_F1, MEAN, RELATIVE_ERROR),
    *(KL, *map(_kl_quantile, QUANTILES["kl"]), SAME_TOP, LOG_PPL_RATIO, NLL, FIRST, KEPT),
    *(DELTA_P_RMS, *map(_delta_p_quantile, QUANTILES["delta_p"])),
)
METRICS = {metric.name: metric for metric in _ALL_METRICS}


def metric_of_mean(metrics: Iterable[Metric]) -> Metric:
    """Returns the metric of an unweighted mean over tasks with these metrics.

    Raises:
        ValueError: the metrics differ, and one is no score from 0 to 1, so that a mean has no meaning.
    """
    distinct = set(metrics)
    if len(distinct) == 1:
        return distinct.pop()
    of_mean = (MEAN.higher_is_better, MEAN.low, MEAN.high)
    for metric in distinct:
        if (metric.higher_is_better, metric.low, metric.high) != of_mean:
            names = " and ".join(sorted(each.name for each in distinct))
            raise ValueError(f"no mean over {names}: {metric.name} is no score from 0 to 1; report them separately")
    return MEAN


def budget_text(percent: float | None) -> str:
    """Returns a budget as results and tables write it, with six significant digits; empty without a budget."""
    return "" if percent is None or percent != percent else f"{percent:g}"


def written_budget(percent: float) -> float:
    """Returns a budget to the digits of `budget_text`, so that it equals the same budget read from a file."""
    return float(budget_text(percent))
