"""Shared by the builders of all benchmarks: the harness's task definitions, and the requests it makes of examples."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

Doc = dict[str, Any]
Request = tuple[str, dict[str, Any]]
"""Prompt text and generation settings that the harness sends for an example."""

FILES = {"babilong": "babilong_{}"}
"""Names of the harness's YAML files, where these are not the task's name without that of the benchmark."""


class DoesNotFitError(Exception):
    """A task has too few examples that fit the length with this tokenizer."""


def harness_config(benchmark: str, task: str) -> dict[str, Any]:
    """The harness's configuration of a task, with its functions resolved."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    name = FILES.get(benchmark, "{}").format(task.removeprefix(f"{benchmark}_")) + ".yaml"
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / benchmark / name)
    assert config["task"] == task, f"the harness's {benchmark}/{name} configures {config['task']}"
    return {key: value for key, value in config.items() if key != "tag"}


def harness_task(benchmark: str, task: str, docs: list[Doc]) -> Any:
    """The harness's task object (ConfigurableTask) with the given examples as its data set."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)  # advice about the harness's command line
    config = harness_config(benchmark, task)
    dataset = {config["test_split"]: Dataset.from_list(docs)}
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: dataset})


def harness_requests(benchmark: str, task: str, docs: list[Doc]) -> list[Request]:
    """What the harness would send for each example, few-shot examples included."""
    built = harness_task(benchmark, task, docs)
    built.build_all_requests()
    return [instance.args for instance in built.instances]


def seeded(seed: int, task: str, length: int) -> int:
    """A 32-bit seed of one task at one length."""
    return int.from_bytes(hashlib.sha256(f"{seed} {task} {length}".encode()).digest()[:4])
