"""The right answer to a frozen prompt, as a model would have to write it after the prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

SENTENCES = {
    "babilong_qa1": (r"Where is (.+)\?", r"The most recent location of \1 is {}."),
    "babilong_qa2": (r"Where is the (.+)\?", r"The \1 is in the {}."),
    "babilong_qa3": (r"Where was the (.+) before the (.+)\?", r"Before the \2 the \1 was in the {}."),
}
"""Sentences that BABILong asks to be answered with, by task: the question, and the answer made of it."""


def gold_answer(task: str, doc: dict[str, Any]) -> str:
    """The first right answer, in the form that the prompt's examples or its wording ask for, without the blanks that
    part it from the prompt.
    """
    if "target" in doc:
        pattern, sentence = SENTENCES.get(task, (".*", "{}"))
        form = re.sub(pattern, sentence, doc["question"].strip(), count=1) if task in SENTENCES else sentence
        return form.format(doc["target"])
    if "answers" in doc:
        return doc["answers"][0].strip()
    return LISTS.get(task, ", ".join)(doc["outputs"])


def gold_continuation(task: str, doc: dict[str, Any]) -> str:
    """The first right answer with the blanks that part it from the prompt."""
    return BLANKS.get(task, " ") + gold_answer(task, doc)


def numbered(words: Sequence[str]) -> str:
    """As the harness numbers RULER's most common words: `1. one 2. two`."""
    return " ".join(f"{n}. {word}" for n, word in enumerate(words, start=1))


def _first(references: Sequence[str]) -> str:
    return references[0]


LISTS: dict[str, Callable[[Sequence[str]], str]] = {
    "ruler_cwe": numbered, "ruler_vt": " ".join, "ruler_qa_squad": _first, "ruler_qa_hotpot": _first,
}  # fmt: skip
"""How RULER's tasks join their outputs, where not with commas; those of question answering are alternatives."""
BLANKS = {"ruler_vt": "  "}
"""Between prompt and answer, where not one: the answer in the prompt's own example of variable tracking follows two."""
