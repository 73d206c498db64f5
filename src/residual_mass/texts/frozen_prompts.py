"""Frozen prompts: one JSONL file per task, a manifest with their sha256, and the right answers to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from residual_mass.files import read_json, read_jsonl, sha256_of, sha256_text

REMEDY = "delete the manifest and run the prompts stage again"


@dataclass(frozen=True)
class Prompt:
    """One frozen example."""

    task: str
    index: int
    prompt: str
    max_generation_tokens: int
    stop: list[str]
    doc: dict[str, Any]
    """What the harness's `process_results` needs."""

    @cached_property
    def sha256(self) -> str:
        return sha256_text(self.prompt)


def table_sha256(tasks: dict[str, Any]) -> str:
    """Returns the sha256 of a manifest's task table."""
    return sha256_text(json.dumps(list(tasks.items()), sort_keys=True))


def load_manifest(path: Path) -> dict[str, Any]:
    """Reads a manifest of frozen prompts; raises ValueError if the file is missing or is not one."""
    manifest = read_json(path)
    if not isinstance(manifest, dict) or "tasks" not in manifest:
        raise ValueError(f"{path}: not a prompts manifest; {REMEDY}")
    return manifest


def require_prompts_of(path: Path, benchmark: str, length: str, tokenizer: str) -> None:
    """Raises ValueError if the manifest has another benchmark, length or tokenizer."""
    manifest = load_manifest(path)
    for key, wanted in (("benchmark", benchmark), ("length", length), ("tokenizer", tokenizer)):
        if manifest[key] != wanted:
            raise ValueError(f"{path}: {key} is {manifest[key]}, not {wanted}; give --prompts those of {wanted}")


def load_prompts(manifest: Path, task: str, count: int) -> list[Prompt]:
    """Reads the first `count` frozen examples of `task`, or all of a smaller data set.

    Raises:
        ValueError: the manifest holds no such task or too few examples, or the task's file is not the one it lists.
    """
    content = load_manifest(manifest)
    entry = content["tasks"].get(task)
    if entry is None:
        reason = content["left_out"].get(task, "no such task")
        names = ", ".join(content["tasks"])
        raise ValueError(f"{manifest}: holds no prompts of {task} ({reason}); name one of {names}")
    if content["examples"] < count:
        raise ValueError(f"{manifest}: has {content['examples']} examples per task, not {count}; {REMEDY}")
    file = manifest.parent / entry["file"]
    if not file.is_file() or sha256_of(file) != entry["sha256"]:
        raise ValueError(f"{file}: missing, or not the file that {manifest} lists (sha256); {REMEDY}")
    return [Prompt(**row) for row in read_jsonl(file)[:count]]


# ---- right answers, as a model would have to write them after the prompt ---------------------------------------------

ANSWER_SENTENCES = {
    "babilong_qa1": (r"Where is (.+)\?", r"The most recent location of \1 is {}."),
    "babilong_qa2": (r"Where is the (.+)\?", r"The \1 is in the {}."),
    "babilong_qa3": (r"Where was the (.+) before the (.+)\?", r"Before the \2 the \1 was in the {}."),
}
"""Answers that BABILong asks for, by task: a pattern of the question, and the sentence made from it."""


def gold_answer(task: str, doc: dict[str, Any]) -> str:
    """Returns the first right answer in the form that the prompt asks for, by its examples or its wording, without the
    blanks that separate it from the prompt.
    """
    if task in ANSWER_SENTENCES:
        pattern, sentence = ANSWER_SENTENCES[task]
        of_question = re.sub(pattern, sentence, doc["question"].strip(), count=1)
        return of_question.format(doc["target"])
    if "target" in doc:
        return doc["target"]
    if "answers" in doc:
        return doc["answers"][0].strip()
    join = JOINING.get(task, ", ".join)
    return join(doc["outputs"])


def gold_continuation(task: str, doc: dict[str, Any]) -> str:
    """Returns the first right answer with the blanks that separate it from the prompt."""
    return BLANKS.get(task, " ") + gold_answer(task, doc)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _first(alternatives: Sequence[str]) -> str:
    return alternatives[0]


JOINING: dict[str, Callable[[Sequence[str]], str]] = {
    "ruler_cwe": _numbered,
    "ruler_vt": " ".join,
    "ruler_qa_squad": _first,
    "ruler_qa_hotpot": _first,
}
"""How RULER's tasks join their outputs, if not with commas. Question answering takes one of several alternatives."""
BLANKS = {"ruler_vt": "  "}
"""Blanks between prompt and answer, if not one: the example in the prompt of variable tracking has two."""
