"""Frozen prompts as the tokens that a backbone reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from residual_mass.core.settings import tokens_of
from residual_mass.model.loading import encode, encode_chat
from residual_mass.study.sections import Decoding
from residual_mass.texts.corpora import special_prefix
from residual_mass.texts.frozen_prompts import Prompt


@dataclass(frozen=True)
class Example:
    """A frozen prompt, ready to be decoded.

    Attributes:
        ids: token ids, without the `cut` tokens removed after BOS or after the chat template's opening.
        limit: maximum number of generated tokens.
    """

    prompt: Prompt
    ids: list[int]
    cut: int
    limit: int


def encoded(decoding: Decoding, truncate_to: str, prompt: Prompt, tokenizer: Any) -> Example:
    """Returns the prompt's tokens, cut on the left where they leave no room for the answer within `truncate_to`.

    Raises:
        ValueError: the answer alone is longer than `truncate_to`.
    """
    limit = _limit(decoding, prompt, tokenizer)
    room = tokens_of(truncate_to) - limit
    if room < 1:
        raise ValueError(
            f"truncate_to {truncate_to}: no room for a prompt besides the {limit} answer tokens of {prompt.task}"
        )
    if decoding.chat_template:
        ids, front = encode_chat(tokenizer, prompt.prompt)
    else:
        ids, front = encode(tokenizer, prompt.prompt), special_prefix(tokenizer)
    ids, cut = cut_to(ids, room, front)
    return Example(prompt, ids, cut, limit)


def cut_to(ids: list[int], room: int, front: Sequence[int]) -> tuple[list[int], int]:
    """`ids` cut on the left to `room` tokens, and the number of tokens removed. `front` is kept: without its BOS, a
    prompt loses its strongest attention sink.
    """
    cut = max(0, len(ids) - room)
    return ([*front, *ids[len(front) + cut :]] if cut else ids), cut


def _limit(decoding: Decoding, prompt: Prompt, tokenizer: Any) -> int:
    """Returns the most generated tokens: the harness's limit, or less where references bound the answer."""
    if decoding.answer_margin is None:
        return prompt.max_generation_tokens
    references = [tokenizer(text, add_special_tokens=False).input_ids for text in reference_texts(prompt.doc)]
    return min(prompt.max_generation_tokens, max(map(len, references)) + decoding.answer_margin)


def reference_texts(doc: dict[str, Any]) -> list[str]:
    """Returns the right answers: RULER asks for all of its `outputs` at once, LongBench for one of its `answers`."""
    if "outputs" in doc:
        return [" ".join(doc["outputs"])]
    return list(doc["answers"]) if "answers" in doc else [doc["target"]]
