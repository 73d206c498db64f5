"""Scores of one generation, by the harness and by the benchmark's authors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from residual_mass.benchmarks.catalogue import Doc, task_named

MODULES = {"ruler": "ruler.common_utils", "babilong": "babilong.common_utils", "longbench": "longbench.metrics"}
"""Modules of the scoring functions, below `lm_eval.tasks`."""
PLACES = frozenset({"bathroom", "bedroom", "garden", "hallway", "kitchen", "office"})
GIVING = frozenset({"bill", "fred", "jeff", "mary", "apple", "football", "milk"})
LABELS = {**{f"babilong_qa{number}": PLACES for number in (1, 2, 3, 4)}, "babilong_qa5": GIVING}
"""All answers of a BABILong task, in lower case."""
ANSWER_ENDS = (".", "<context>", "<example>")
"""End of an answer for BABILong's authors. Their code looks for `Question`, too, but never finds it in lower case."""


def harness_score(benchmark: str, task: str, doc: Doc, text: str) -> float:
    """One generation by the harness's scorer, in the task's metric."""
    entry = task_named(benchmark, task)
    metrics = _harness_function(benchmark, entry.process_results)(doc, [text])
    return float(metrics[str(doc["max_length"]) if benchmark == "ruler" else entry.metric.name])


def both_scores(benchmark: str, task: str, doc: Doc, text: str) -> tuple[float, float]:
    """One generation by the harness's scorer and by that of the benchmark's authors, which differ in two cases.

    RULER's question answering: one reference suffices, while the harness counts the share of references. BABILong: the
    first sentence must name the target and no other label, while the harness looks for the target anywhere.
    """
    harness = harness_score(benchmark, task, doc, text)
    if benchmark == "babilong":
        return harness, float(_named_labels(task, doc, text) == _targets(doc))
    if task_named(benchmark, task).process_results == "process_results_part":
        said = _cleaned(benchmark, text).lower()
        return harness, float(any(reference.lower() in said for reference in doc["outputs"]))
    return harness, harness


def saturated(benchmark: str, doc: Doc, text: str) -> bool:
    """Whether no text appended to `text` can change either score; False where that is not certain."""
    if benchmark == "ruler":
        return _stay_in(benchmark, text, doc["outputs"])
    if benchmark == "babilong":
        complete = any(end in text.lower() for end in ANSWER_ENDS)
        return complete and _stay_in(benchmark, text, [doc["target"].strip()])
    return False


@cache
def _harness_function(benchmark: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"lm_eval.tasks.{MODULES[benchmark]}"), name)


def _cleaned(benchmark: str, text: str) -> str:
    """`text` as the harness's substring metrics see it but for case: stripped, control characters as newlines."""
    return _harness_function(benchmark, "postprocess_pred")([text])[0]


def _stay_in(benchmark: str, text: str, references: Iterable[str]) -> bool:
    """Whether all references occur in `text` for the harness, whatever follows.

    The cleaned text is a prefix of the cleaned text of any continuation. Lower-casing maps single characters, except
    for the Greek capital sigma, whose lower case depends on whether a letter follows; hence both forms.
    """
    cleaned = _cleaned(benchmark, text)
    at_end, before_letter = cleaned.lower(), f"{cleaned}a".lower()[:-1]
    return all(reference.lower() in form for reference in references for form in (at_end, before_letter))


def _named_labels(task: str, doc: Doc, text: str) -> set[str]:
    """Returns the labels of the task in the answer, without those of the question, which are never the target."""
    answer, question = text.lower(), doc["question"].lower()
    for end in ANSWER_ENDS:
        answer = answer.partition(end)[0]
    return {label for label in LABELS[task] if label in answer and label not in question}


def _targets(doc: Doc) -> set[str]:
    return {target.strip() for target in doc["target"].lower().split(",")}
