"""Prompts of requests as token ids: messages through the model's chat template, and texts as they are."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from residual_mass.model.rotary import Frequencies
from residual_mass.serve.protocol import Bad, ChatRequest, CompletionRequest, Message

CHARACTERS_OF_A_TOKEN = 64
"""Longer prompts than so many characters for each position of the model are refused before they are tokenised."""


class Prompts:
    """Turns requests into prompts.

    Args:
        positions: tokens that the model was made for, with the answer.
        name: of the model, for messages.
        frequencies: of the model; a text keeps to those of its prompt.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, positions: int, vocabulary: int, name: str, frequencies: Frequencies
    ) -> None:
        self.tokenizer = tokenizer
        self.positions = positions
        self.vocabulary = vocabulary
        self.name = name
        self.frequencies = frequencies

    def of_chat(self, request: ChatRequest) -> list[int]:
        """Returns the ids of a conversation.

        Raises:
            Bad: a message cannot be read, the template refuses the conversation, or it is too long.
        """
        if self.tokenizer.chat_template is None:
            raise Bad(f"{self.name} has no chat template: send a text to /v1/completions", "messages")
        messages = [plain(message, place) for place, message in enumerate(request.messages)]
        self._require_short("messages", sum(len(str(message)) for message in messages))
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools_of(request),
                tokenize=False,
                add_generation_prompt=True,
                **(request.chat_template_kwargs or {}),
            )
        except Exception as error:  # a template can do anything with what a client sends
            raise Bad(f"messages: the model's chat template refuses them: {error}", "messages") from None
        return self._checked(self.tokenizer(text, add_special_tokens=False).input_ids, "messages")

    def tools_of(self, request: ChatRequest) -> list[dict[str, Any]] | None:
        """Returns the tools that a model is told of; None for none."""
        if not request.tools or request.tool_choice == "none":
            return None
        return [tool.model_dump() for tool in request.tools]

    def of_completion(self, request: CompletionRequest) -> list[list[int]]:
        """Returns the ids of each prompt.

        Raises:
            Bad: a prompt is empty, too long, or holds ids that the model does not know.
        """
        given = request.prompt
        prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        return [self._checked(self.of_text(each) if isinstance(each, str) else each, "prompt") for each in prompts]

    def of_text(self, text: str) -> list[int]:
        """Returns the ids of a text, which begins with one BOS even if the text has one itself."""
        self._require_short("prompt", len(text))
        ids = self.tokenizer(text).input_ids
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def room(self, ids: list[int], asked: int | None) -> int:
        """Returns the new tokens that a prompt leaves positions for, at most what was asked for."""
        last = self.positions
        if len(ids) <= self.frequencies.limit < last:
            last = max(int(self.frequencies.limit), len(ids) + 1)  # the last token is not read
        left = last - len(ids)
        return left if asked is None else min(left, asked)

    def _checked(self, ids: list[int], field: str) -> list[int]:
        if not ids:
            raise Bad(f"{field}: it is empty: write at least one token", field)
        if max(ids) >= self.vocabulary:
            raise Bad(f"{field}: token {max(ids)} is none of the model's {self.vocabulary:,}", field)
        if len(ids) >= self.positions:
            raise Bad(
                f"{field}: the prompt has {len(ids):,} tokens, and {self.name} was made for texts of "
                f"{self.positions:,} with the answer: shorten it",
                field,
            )
        try:
            self.frequencies.require([len(ids)])
        except ValueError as error:
            raise Bad(f"{field}: {error}", field) from None
        return list(ids)

    def _require_short(self, field: str, characters: int) -> None:
        most = CHARACTERS_OF_A_TOKEN * self.positions
        if characters > most:
            raise Bad(f"{field}: {characters:,} characters, and {self.name} reads at most {most:,}: shorten it", field)


def plain(message: Message, place: int) -> dict[str, Any]:
    """Returns a message as chat templates take it: texts in one piece, arguments of calls as objects."""
    where = f"messages.{place}"
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and message.role != "assistant":
        raise Bad(f"{where}.content: a message of {message.role} needs a text", "messages")
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    if message.tool_calls:
        found["tool_calls"] = [called(call, f"{where}.tool_calls.{i}") for i, call in enumerate(message.tool_calls)]
    return found


def called(call: Any, where: str) -> dict[str, Any]:
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise Bad(f"{where}.function.arguments: no JSON: {error}", "messages") from None
    function = {"name": call.function.name, "arguments": arguments}
    found = {"type": "function", "function": function}
    return found if call.id is None else found | {"id": call.id}
