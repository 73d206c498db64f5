"""Which tasks a benchmark has and from which length on; imports nothing heavy, for the workflow lists tasks with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Task:
    """One task of a benchmark, by its name in lm-eval."""

    name: str
    shortest: int = 1024
    """Shortest nominal length in tokens with room for an example, the template and the answer."""
    scorer: Literal["process_results", "process_results_part"] = "process_results"
    """The harness's scoring function for it (in `lm_eval.tasks.ruler.common_utils`)."""


BENCHMARKS: dict[str, tuple[Task, ...]] = {
    "ruler": (
        Task("niah_single_1"),
        Task("niah_single_2"),
        Task("niah_single_3"),
        Task("niah_multikey_1"),
        Task("niah_multikey_2"),
        Task("niah_multikey_3"),
        Task("niah_multiquery"),
        Task("niah_multivalue"),
        Task("ruler_vt"),
        Task("ruler_cwe"),
        Task("ruler_fwe"),
        Task("ruler_qa_squad", scorer="process_results_part"),
        Task("ruler_qa_hotpot", shortest=2048, scorer="process_results_part"),
    )
}


def tasks_of(benchmark: str, length_tokens: int) -> tuple[str, ...]:
    """Names of the tasks that fit `length_tokens`, in the harness's group order.

    Raises:
        ValueError: the benchmark is unknown, or the length is too short for all of its tasks.
    """
    names = tuple(task.name for task in _known(benchmark) if task.shortest <= length_tokens)
    if not names:
        shortest = min(task.shortest for task in _known(benchmark))
        raise ValueError(f"length {length_tokens}: {benchmark} needs at least {shortest} tokens; choose a longer one")
    return names


def too_long(benchmark: str, length_tokens: int) -> dict[str, str]:
    """The tasks that do not fit `length_tokens`, each with the reason."""
    return {
        task.name: f"needs at least {task.shortest} tokens, the length is {length_tokens}"
        for task in _known(benchmark)
        if task.shortest > length_tokens
    }


def scorer_of(benchmark: str, name: str) -> str:
    """Name of the harness's scoring function for a task."""
    return next(task.scorer for task in _known(benchmark) if task.name == name)


def _known(benchmark: str) -> tuple[Task, ...]:
    if benchmark not in BENCHMARKS:
        raise ValueError(f"benchmark {benchmark!r} is unknown; known are {', '.join(sorted(BENCHMARKS))}")
    return BENCHMARKS[benchmark]
