"""Tasks of the benchmarks, their minimal lengths, and what they read from the hub."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from residual_mass.metrics import ACC, QA_F1, ROUGE, STRING_MATCH, Metric
from residual_mass.spec.texts import BABILONG, ESSAYS, LONGBENCH, HubPart

Data = Literal["original", "simulated", "stand-in"]
"""Origin of a task's examples: the benchmark's own data or generator, simulated by the benchmark's definition, or other
real text in the task's format.
"""


@dataclass(frozen=True)
class Task:
    """One task of a benchmark, by its name in lm-eval.

    Attributes:
        shortest: minimal nominal length in tokens for an example, the template and the answer.
        process_results: name of the harness's scoring function.
        metric: what that function's score is; its name is the score's key, except for RULER, whose key is the nominal
            length.
        title: name in tables.
        max_new_tokens: the harness's limit on generated tokens.
        without_hub: origin of the examples that replace the data on the hub (`data_source: assets`).
    """

    name: str
    title: str
    max_new_tokens: int
    shortest: int = 1024
    process_results: str = "process_results"
    metric: Metric = STRING_MATCH
    without_hub: Data = "original"

    def data(self, data_source: str) -> Data:
        """Returns the origin of examples from `data_source` (`assets` or `hub`)."""
        return "original" if data_source == "hub" else self.without_hub


def _ruler(name: str, max_new_tokens: int, shortest: int = 1024) -> Task:
    return Task(name, name.removeprefix("ruler_").replace("_", " "), max_new_tokens, shortest)


def _ruler_questions(name: str, shortest: int) -> Task:
    return replace(_ruler(name, 32, shortest), process_results="process_results_part")


def _babilong(number: int) -> Task:
    return Task(f"babilong_qa{number}", f"QA{number}", 16, metric=ACC, without_hub="simulated")


RULER_TASKS = (
    _ruler("niah_single_1", 128),
    _ruler("niah_single_2", 128),
    _ruler("niah_single_3", 128),
    _ruler("niah_multikey_1", 128),
    _ruler("niah_multikey_2", 128),
    _ruler("niah_multikey_3", 128),
    _ruler("niah_multiquery", 128),
    _ruler("niah_multivalue", 128),
    _ruler("ruler_vt", 30),
    _ruler("ruler_cwe", 120),
    _ruler("ruler_fwe", 50),
    _ruler_questions("ruler_qa_squad", shortest=1024),
    _ruler_questions("ruler_qa_hotpot", shortest=2048),
)
LONGBENCH_TASKS = (
    Task("longbench_gov_report", "GovReport", 512, 1024, "get_rouge_score", ROUGE, "stand-in"),
    Task("longbench_qmsum", "QMSum", 512, 1024, "get_rouge_score", ROUGE, "stand-in"),
    Task("longbench_musique", "MuSiQue", 32, 2048, "get_qa_f1_score", QA_F1, "stand-in"),
    Task("longbench_hotpotqa", "HotpotQA", 32, 2048, "get_qa_f1_score", QA_F1),
)
BENCHMARKS: dict[str, tuple[Task, ...]] = {
    "ruler": RULER_TASKS,
    "babilong": tuple(_babilong(number) for number in (1, 2, 3, 4, 5)),
    "longbench": LONGBENCH_TASKS,
}
"""Tasks of each benchmark, in the order of the harness's group."""


def tasks_of(benchmark: str, length_tokens: int) -> tuple[str, ...]:
    """Returns the names of the tasks that fit `length_tokens`, in the order of the harness's group.

    Raises:
        ValueError: the benchmark is unknown, or the length is too short for all of its tasks.
    """
    names = tuple(task.name for task in _require_tasks(benchmark) if task.shortest <= length_tokens)
    if not names:
        shortest = min(task.shortest for task in _require_tasks(benchmark))
        raise ValueError(f"length {length_tokens}: {benchmark} needs at least {shortest} tokens; choose a longer one")
    return names


def parts_of(benchmark: str, length_tokens: int) -> dict[str, HubPart]:
    """Returns the parts of data sets on the hub that a benchmark reads at a length, by task; RULER's tasks share one.

    Raises:
        ValueError: as `tasks_of`, or the data set has no such length, or the benchmark has no entry here.
    """
    names = {task: task.removeprefix(f"{benchmark}_") for task in tasks_of(benchmark, length_tokens)}
    if benchmark == "ruler":
        return dict.fromkeys(names, ESSAYS)
    if benchmark == "longbench":
        return {task: HubPart(LONGBENCH, name, "test") for task, name in names.items()}
    if benchmark != "babilong":
        raise ValueError(
            f"benchmark {benchmark!r}: its data sets on the hub are unknown; add them to parts_of in spec/tasks.py"
        )
    if length_tokens % 1024:
        raise ValueError(f"length {length_tokens}: BABILong's data set has whole k only; choose 1k, 2k, 4k, ...")
    configuration = f"{length_tokens // 1024}k"
    return {task: HubPart(BABILONG, configuration, name) for task, name in names.items()}


def too_long(benchmark: str, length_tokens: int) -> dict[str, str]:
    """Returns the tasks that do not fit `length_tokens`, each with the reason."""
    reasons = {}
    for task in _require_tasks(benchmark):
        if task.shortest > length_tokens:
            reasons[task.name] = f"needs at least {task.shortest} tokens, the length is {length_tokens}"
    return reasons


def task_named(benchmark: str, name: str) -> Task:
    """Returns the task `name` of a benchmark."""
    return next(task for task in _require_tasks(benchmark) if task.name == name)


def _require_tasks(benchmark: str) -> tuple[Task, ...]:
    if benchmark not in BENCHMARKS:
        raise ValueError(f"benchmark {benchmark!r} is unknown; known are {', '.join(sorted(BENCHMARKS))}")
    names = [task.name for task in BENCHMARKS[benchmark]]
    if len(set(names)) < len(names):
        raise ValueError(f"BENCHMARKS[{benchmark!r}] has two tasks of one name among {', '.join(names)}; rename one")
    return BENCHMARKS[benchmark]
