from __future__ import annotations

import numpy as np
import pytest

from residual_mass.metrics import ACC, METRICS, QA_F1, ROUGE, STRING_MATCH, Metric, metric_of_mean

LOSS = Metric("loss", "loss", unit="nats", higher_is_better=False, floor=5, ceiling=-1)
"""Without bounds, and with values on both sides of 0."""


def test_greater_is_better_only_where_the_metric_says_so() -> None:
    assert ACC.better(0.2, 0.1) and not LOSS.better(0.2, 0.1)
    assert not ACC.better(0.1, 0.1) and not LOSS.better(0.1, 0.1)


@pytest.mark.parametrize(
    ("metric", "value", "flags"),
    [
        (ACC, 0.02, {"floor"}), (ACC, 0.021, set()), (ACC, 0.979, set()), (ACC, 0.98, {"ceiling"}),
        (LOSS, 5.0, {"floor"}), (LOSS, 100.0, {"floor"}), (LOSS, 4.9, set()), (LOSS, 0.0, set()),
        (LOSS, -1.0, {"ceiling"}), (Metric("free", "free"), 0.0, set()),
    ],
)  # fmt: skip
def test_the_floor_is_the_bad_end(metric: Metric, value: float, flags: set[str]) -> None:
    assert metric.flags(value) == flags


def test_an_answer_is_right_from_a_score_on() -> None:
    assert STRING_MATCH.is_right(np.array([1.0, 0.75])).tolist() == [True, False]
    errors = Metric("errors", "errors", higher_is_better=False, right=1)
    assert errors.is_right(0) and errors.is_right(1) and not errors.is_right(2)


def test_a_mean_over_tasks_needs_one_metric_or_scores() -> None:
    assert metric_of_mean([ROUGE, ROUGE]) == ROUGE
    assert metric_of_mean([ROUGE, QA_F1]) == METRICS["mean"]
    with pytest.raises(ValueError, match="no mean over loss and rouge_score: loss is no score from 0 to 1"):
        metric_of_mean([ROUGE, LOSS])


def test_bounds_lie_within_the_range() -> None:
    for metric in METRICS.values():
        bounds = [bound for bound in (metric.floor, metric.ceiling, metric.right) if bound is not None]
        assert all(metric.low <= bound for bound in bounds if metric.low is not None)
        assert all(bound <= metric.high for bound in bounds if metric.high is not None)
