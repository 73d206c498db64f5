"""The harness's definitions of the tasks, and the scores of a generation."""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from residual_mass.spec.tasks import task_named

Doc = dict[str, Any]
HarnessRequest = tuple[str, dict[str, Any]]
"""Prompt text and generation settings that the harness sends for an example."""


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


def harness_requests(benchmark: str, task: str, docs: list[Doc]) -> list[HarnessRequest]:
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
    digest = hashlib.sha256(f"{seed} {task} {length}".encode()).digest()
    return int.from_bytes(digest[:4])


# ---- scores of one generation ----------------------------------------------------------------------------------------

SCORING_MODULES = {"ruler": "ruler.common_utils", "babilong": "babilong.common_utils", "longbench": "longbench.metrics"}
"""Modules of the scoring functions, below `lm_eval.tasks`."""
BABILONG_PLACES = frozenset({"bathroom", "bedroom", "garden", "hallway", "kitchen", "office"})
BABILONG_GIVING = frozenset({"bill", "fred", "jeff", "mary", "apple", "football", "milk"})
BABILONG_LABELS = {
    **{f"babilong_qa{number}": BABILONG_PLACES for number in (1, 2, 3, 4)},
    "babilong_qa5": BABILONG_GIVING,
}
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
    key = str(doc["max_length"]) if benchmark == "ruler" else entry.metric.name
    harness = float(metrics[key])
    if benchmark == "babilong":
        return harness, float(_named_labels(task, doc, text) == _targets(doc))
    if entry.process_results == "process_results_part":
        answer = _cleaned(benchmark, text).lower()
        found = any(reference.lower() in answer for reference in doc["outputs"])
        return harness, float(found)
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
    return getattr(importlib.import_module(f"lm_eval.tasks.{SCORING_MODULES[benchmark]}"), name)


def _cleaned(benchmark: str, text: str) -> str:
    """Strips `text` and turns control characters into newlines, as the harness's substring metrics do."""
    return _harness_function(benchmark, "postprocess_pred")([text])[0]


def _stay_in(benchmark: str, text: str, references: Iterable[str]) -> bool:
    """Whether the harness finds all references in `text` and in every continuation of it.

    The cleaned text is a prefix of the cleaned text of any continuation. Lower-casing maps single characters, except
    for the Greek capital sigma, whose lower case depends on whether a letter follows; hence both forms.
    """
    cleaned = _cleaned(benchmark, text)
    at_end = cleaned.lower()
    before_letter = f"{cleaned}a".lower()[:-1]
    words = [reference.lower() for reference in references]
    return all(word in at_end and word in before_letter for word in words)


def _named_labels(task: str, doc: Doc, text: str) -> set[str]:
    """Returns the labels of the task in the answer, without those of the question, which are never the target."""
    answer = text.lower()
    question = doc["question"].lower()
    for end in ANSWER_ENDS:
        answer = answer.partition(end)[0]
    return {label for label in BABILONG_LABELS[task] if label in answer and label not in question}


def _targets(doc: Doc) -> set[str]:
    return {target.strip() for target in doc["target"].lower().split(",")}
