"""What of an answer is text, reasoning, and calls of tools, where the tokenizer declares how its model writes them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

FIELDS = {"content": "content"} | dict.fromkeys(("reasoning_content", "thinking", "reasoning"), "reasoning_content")
"""Parts that are texts, and where a message has them."""


def declares_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether a tokenizer has a `response_template`, by which transformers finds the parts of an answer."""
    declared = getattr(tokenizer, "response_template", None) is not None
    return declared and hasattr(tokenizer, "get_response_parser")  # earlier versions of transformers do not read it


class Parts:
    """Finds the parts of one answer as it is written.

    What cannot be read, such as a call that breaks off at the limit or is no JSON, is text as the model wrote it, and
    so is all that follows.

    Args:
        prompt: its ids, since chat templates begin answers, such as with reasoning.
        tools: of the request, by whose schemas arguments get their types.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int], tools: list[dict[str, Any]]) -> None:
        self.parser: Any = tokenizer.get_response_parser(prefix=tokenizer.decode(prompt), tools=tools)
        self.calls = 0
        self._end_of_call = end_of_call(tokenizer.response_template)
        self._unsaid = ""
        """Text whose part is not known or not complete."""
        self._broken = False
        """Whether a call that is told now would be one that breaks off."""

    def add(self, text: str) -> Iterator[dict[str, Any]]:
        """Takes more text, with special tokens; yields deltas of a message."""
        for character in text:  # an error takes no more with it than what is unsaid
            self._unsaid += character
            yield from self._said(lambda given=character: self.parser.feed(given))
        if self.parser is None:
            yield from self._as_text()

    def rest(self) -> Iterator[dict[str, Any]]:
        """Yields the deltas that are left at the end of the answer."""
        # Transformers closes what is open, and its parsers of arguments take a part of them for all.
        self._broken = self._end_of_call is not None and self._end_of_call.search(self._unsaid) is None
        yield from self._said(lambda: self.parser.finalize()[1])
        yield from self._as_text()

    def _said(self, parse: Callable[[], list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        if self.parser is None:
            return
        try:
            yield from [delta for event in parse() for delta in self._deltas(event)]
        except Exception:  # a template can do anything with what a model writes
            self.parser = None

    def _deltas(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        kind, field = event["type"], event.get("field")
        if kind == "region_chunk" and field in FIELDS and not event["dirty"]:
            self._unsaid = self._unsaid.partition(event["text"])[2]
            yield {FIELDS[field]: event["text"]}
        elif kind == "region_close" and field == "tool_calls":
            if self._broken:
                raise ValueError("the call breaks off")
            value = event["value"]
            for call in value if isinstance(value, list) else [value]:
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                function = {"name": str(name), "arguments": written}
                own = {"index": self.calls, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
                self.calls += 1
                yield {"tool_calls": [own]}
        if kind == "region_close" and field != "content":
            self._unsaid = ""

    def _as_text(self) -> Iterator[dict[str, Any]]:
        if self._unsaid and self.parser is None:
            yield {"content": self._unsaid}
            self._unsaid = ""


def end_of_call(template: dict[str, Any]) -> re.Pattern[str] | None:
    """Returns what a template declares to end a call; None if the end of the answer does."""
    declared = template["fields"].get("tool_calls", {})
    if "close_pattern" in declared:
        return re.compile(declared["close_pattern"], re.DOTALL)
    literals = declared.get("close", [])
    literals = [literals] if isinstance(literals, str) else literals
    return re.compile("|".join(map(re.escape, literals))) if literals else None
