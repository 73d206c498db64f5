"""Tasks of the benchmarks, their minimal lengths, the harness's definitions of them, and the scores of a generation.

Imports nothing heavy, as the workflow lists tasks with it.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from residual_mass.metrics import ACC, QA_F1, ROUGE, STRING_MATCH, Metric
from residual_mass.texts.names import BABILONG, ESSAYS, LONGBENCH, HubPart

Doc = dict[str, Any]
Request = tuple[str, dict[str, Any]]
"""Prompt text and generation settings that the harness sends for an example."""

Data = Literal["original", "simulated", "stand-in"]
"""Origin of a task's examples: the benchmark's own data or generator, a simulator that follows the benchmark's
definition, or other real text in the task's format.
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
        without_hub: origin of the examples of the assets, which replace the data on the hub.
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


def _ruler(name: str, max_new_tokens: int, shortest: int = 1024, process_results: str = "process_results") -> Task:
    return Task(name, name.removeprefix("ruler_").replace("_", " "), max_new_tokens, shortest, process_results)


def _babilong(number: int) -> Task:
    return Task(f"babilong_qa{number}", f"QA{number}", 16, metric=ACC, without_hub="simulated")


BENCHMARKS: dict[str, tuple[Task, ...]] = {
    "ruler": (
        *(_ruler(f"niah_single_{number}", 128) for number in (1, 2, 3)),
        *(_ruler(f"niah_multikey_{number}", 128) for number in (1, 2, 3)),
        _ruler("niah_multiquery", 128),
        _ruler("niah_multivalue", 128),
        _ruler("ruler_vt", 30),
        _ruler("ruler_cwe", 120),
        _ruler("ruler_fwe", 50),
        _ruler("ruler_qa_squad", 32, process_results="process_results_part"),
        _ruler("ruler_qa_hotpot", 32, shortest=2048, process_results="process_results_part"),
    ),
    "babilong": tuple(_babilong(number) for number in (1, 2, 3, 4, 5)),
    "longbench": (
        Task("longbench_gov_report", "GovReport", 512, 1024, "get_rouge_score", ROUGE, "stand-in"),
        Task("longbench_qmsum", "QMSum", 512, 1024, "get_rouge_score", ROUGE, "stand-in"),
        Task("longbench_musique", "MuSiQue", 32, 2048, "get_qa_f1_score", QA_F1, "stand-in"),
        Task("longbench_hotpotqa", "HotpotQA", 32, 2048, "get_qa_f1_score", QA_F1),
    ),
}


def tasks_of(benchmark: str, length_tokens: int) -> tuple[str, ...]:
    """Returns the names of the tasks that fit `length_tokens`, in the order of the harness's group.

    Raises:
        ValueError: the benchmark is unknown, or the length is too short for all of its tasks.
    """
    names = tuple(task.name for task in _known(benchmark) if task.shortest <= length_tokens)
    if not names:
        shortest = min(task.shortest for task in _known(benchmark))
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
            f"benchmark {benchmark!r}: its data sets on the hub are unknown; add them to catalogue.parts_of"
        )
    if length_tokens % 1024:
        raise ValueError(f"length {length_tokens}: BABILong's data set has whole k only; choose 1k, 2k, 4k, ...")
    return {task: HubPart(BABILONG, f"{length_tokens // 1024}k", name) for task, name in names.items()}


def too_long(benchmark: str, length_tokens: int) -> dict[str, str]:
    """Returns the tasks that do not fit `length_tokens`, each with the reason."""
    return {
        task.name: f"needs at least {task.shortest} tokens, the length is {length_tokens}"
        for task in _known(benchmark)
        if task.shortest > length_tokens
    }


def task_named(benchmark: str, name: str) -> Task:
    """Returns the task `name` of a benchmark."""
    return next(task for task in _known(benchmark) if task.name == name)


def _known(benchmark: str) -> tuple[Task, ...]:
    if benchmark not in BENCHMARKS:
        raise ValueError(f"benchmark {benchmark!r} is unknown; known are {', '.join(sorted(BENCHMARKS))}")
    names = [task.name for task in BENCHMARKS[benchmark]]
    if len(set(names)) < len(names):
        raise ValueError(f"BENCHMARKS[{benchmark!r}] has two tasks of one name among {', '.join(names)}; rename one")
    return BENCHMARKS[benchmark]


class DoesNotFitError(Exception):
    """A task has too few examples that fit the length with this tokenizer."""


def harness_config(benchmark: str, task: str) -> dict[str, Any]:
    """Returns the harness's configuration of a task, with its functions resolved."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    name = f"{task if benchmark == 'babilong' else task.removeprefix(f'{benchmark}_')}.yaml"
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / benchmark / name)
    assert config["task"] == task, f"the harness's {benchmark}/{name} configures {config['task']}"
    return {key: value for key, value in config.items() if key != "tag"}


def harness_task(benchmark: str, task: str, docs: list[Doc]) -> Any:
    """Returns the harness's task object (ConfigurableTask) with the given examples as its data set."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)  # advice about the harness's command line
    config = harness_config(benchmark, task)
    dataset = {config["test_split"]: Dataset.from_list(docs)}
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: dataset})


def harness_requests(benchmark: str, task: str, docs: list[Doc]) -> list[Request]:
    """Returns what the harness would send for each example, few-shot examples included."""
    built = harness_task(benchmark, task, docs)
    built.build_all_requests()
    return [instance.args for instance in built.instances]


def sentence_tables(nltk_data: Path) -> Path:
    """Returns a folder of NLTK's tables; raises ValueError where it lacks those for sentences."""
    if not (nltk_data / "tokenizers" / "punkt_tab" / "english").is_dir():
        raise ValueError(f"{nltk_data}: no tokenizers/punkt_tab/english in it; run the assets stage")
    return nltk_data


def seeded(seed: int, task: str, length: int) -> int:
    """Returns a 32-bit seed for one task at one length."""
    return int.from_bytes(hashlib.sha256(f"{seed} {task} {length}".encode()).digest()[:4])


# ---- scores of one generation ----------------------------------------------------------------------------------------

MODULES = {"ruler": "ruler.common_utils", "babilong": "babilong.common_utils", "longbench": "longbench.metrics"}
"""Modules of the scoring functions, below `lm_eval.tasks`."""
PLACES = frozenset({"bathroom", "bedroom", "garden", "hallway", "kitchen", "office"})
GIVING = frozenset({"bill", "fred", "jeff", "mary", "apple", "football", "milk"})
LABELS = {**{f"babilong_qa{number}": PLACES for number in (1, 2, 3, 4)}, "babilong_qa5": GIVING}
"""All answers of a BABILong task, in lower case."""
ANSWER_ENDS = (".", "<context>", "<example>")
"""End of an answer for BABILong's authors. Their code looks for `Question`, too, but never finds it in lower case."""


def both_scores(benchmark: str, task: str, doc: Doc, text: str) -> tuple[float, float]:
    """Scores one generation as the harness does and as the benchmark's authors do, who differ in two cases.

    RULER's question answering: one reference suffices, while the harness counts the share of references. BABILong: the
    first sentence must name the target and no other label, while the harness looks for the target anywhere.
    """
    entry = task_named(benchmark, task)
    metrics = _harness_function(benchmark, entry.process_results)(doc, [text])
    harness = float(metrics[str(doc["max_length"]) if benchmark == "ruler" else entry.metric.name])
    if benchmark == "babilong":
        return harness, float(_named_labels(task, doc, text) == _targets(doc))
    if entry.process_results == "process_results_part":
        answer = _cleaned(benchmark, text).lower()
        return harness, float(any(reference.lower() in answer for reference in doc["outputs"]))
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
    """Strips `text` and turns control characters into newlines, as the harness's substring metrics do."""
    return _harness_function(benchmark, "postprocess_pred")([text])[0]


def _stay_in(benchmark: str, text: str, references: Iterable[str]) -> bool:
    """Whether the harness finds all references in `text` and in every continuation of it.

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
