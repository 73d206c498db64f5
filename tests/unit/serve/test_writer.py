"""Text of tokens as they come: whole characters, and stop strings wherever they begin and end."""

from __future__ import annotations

import random

import pytest
from tests.conftest import byte_tokenizer
from tests.needs import KERNELS, needs
from tests.unit.serve.conftest import Asking, events

from residual_mass.serve.answers import Writer, overlap

TEXTS = ["plain words", "naïve café", "日本語の文章", "👩‍👩‍👧 and 🇪🇺", "a\u0301 b\u0308", "", " ", "\n\n", "tab\tend"]


def written(text: str, stops: list[str]) -> tuple[list[str], bool]:
    tokenizer = byte_tokenizer()
    writer = Writer(tokenizer, stops)
    pieces = []
    for token in tokenizer(text, add_special_tokens=False).input_ids:
        pieces.append(writer.add(token))
        if writer.stopped:
            break
    return [*pieces, writer.rest()], writer.stopped


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(text: str) -> None:
    pieces, stopped = written(text, [])
    assert "".join(pieces) == text and not stopped and "\ufffd" not in text
    assert not any("\ufffd" in piece for piece in pieces)


def test_stop_strings_wherever_they_are() -> None:
    """Random texts of few characters, so that stops overlap each other and themselves; also of several bytes."""
    chance = random.Random(0)
    for _ in range(400):
        text = "".join(chance.choice("ab日é") for _ in range(chance.randint(0, 20)))
        stops = ["".join(chance.choice("ab日é") for _ in range(chance.randint(1, 4))) for _ in range(3)]
        pieces, stopped = written(text, stops)
        ends = {text.find(stop) + len(stop): text.find(stop) for stop in stops if stop in text}
        expected = text
        if ends:  # the one that is complete first ends the answer; of several at once the longest
            first = min(ends)
            expected = text[: min(text.find(stop) for stop in stops if stop in text[:first])]
        assert "".join(pieces) == expected and stopped == bool(ends), (text, stops)


def test_what_may_begin_a_stop_is_held() -> None:
    pieces, _ = written("one two", ["two three"])
    assert "".join(pieces[:-1]) == "one " and pieces[-1] == "two"
    assert [overlap("xab", "abc"), overlap("xabc", "abc"), overlap("", "a"), overlap("aa", "aaa")] == [2, 0, 0, 2]


def test_an_incomplete_character_at_the_end_is_told() -> None:
    tokenizer = byte_tokenizer()
    writer = Writer(tokenizer, [])
    assert [writer.add(token) for token in tokenizer("日").input_ids[:2]] == ["", ""]
    assert writer.rest() == "\ufffd"


@needs(KERNELS)
def test_stops_of_requests(asking: Asking) -> None:
    """Of a whole answer, of a stream, and of both endpoints; the stop is no part of the text."""
    whole = asking.text(max_tokens=40)
    for stop in (whole[10:13], [whole[20:24], "no such text"], whole[:2]):
        first = stop if isinstance(stop, str) else stop[0]
        answer = asking.complete(max_tokens=40, stop=stop)
        choice = answer["choices"][0]
        assert choice["text"] == whole[: whole.index(first)] and choice["finish_reason"] == "stop"
        _, stream = asking.post("completions", {"prompt": "Once upon a time", "max_tokens": 40, "stop": stop,
                                                "stream": True})  # fmt: skip
        assert "".join(event["choices"][0]["text"] for event in events(stream)) == choice["text"]
        assert answer["usage"]["completion_tokens"] == whole.index(first) + len(first)
    talk = asking.chat(max_tokens=40)["choices"][0]["message"]["content"]
    assert (
        asking.chat(max_tokens=40, stop=talk[5:8])["choices"][0]["message"]["content"] == talk[: talk.index(talk[5:8])]
    )


@needs(KERNELS)
def test_random_bytes_are_the_same_in_a_stream() -> None:
    """Answers of a model that writes any bytes: what a stream shows is what the whole answer is."""
    from tests.conftest import tiny_llama
    from tests.unit.serve.conftest import served

    asking = Asking(served(tiny_llama(width=64)))
    for seed in range(5):
        body = {"prompt": "日本", "max_tokens": 60, "temperature": 1.5, "seed": seed}
        _, stream = asking.post("completions", {**body, "stream": True})
        text = "".join(event["choices"][0]["text"] for event in events(stream))
        assert text == asking.post("completions", body)[1]["choices"][0]["text"]


def test_special_tokens_are_text_where_parts_are_found_by_them() -> None:
    for special, text in ((False, ""), (True, "<s>")):
        writer = Writer(byte_tokenizer(), [], special)
        assert writer.add(0) + writer.rest() == text
