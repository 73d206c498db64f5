"""BABILong examples built anew from simulated stories and books.

An example is a story whose facts are placed, in order, between the sentences of a book, and a question about the story.
Its length is that of the harness's whole prompt, including few-shot examples, with the longest answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from residual_mass.benchmarks.catalogue import (
    Doc,
    DoesNotFitError,
    harness_config,
    harness_requests,
    seeded,
    sentence_tables,
)
from residual_mass.benchmarks.stories import tell
from residual_mass.texts.corpora import books_of

SLACK = 2
"""Tokens by which a prompt may miss its length where no run of words fills it exactly."""
RUNS = 32
"""Runs of book sentences that are tried to fill the prompt exactly."""
GAP = "\ue000"
"""Placeholder of the input in a prompt; occurs in no book."""
SENTENCES = re.compile(r"(?!CHAPTER )[\"“'‘(_]*[A-Z].*[.!?][\"”'’)_]*")
"""A paragraph that begins and ends like a sentence, unlike headings."""


def build_examples(task: str, tokenizer: Any, length: int, count: int, seed: int, assets: Path) -> list[Doc]:
    """Returns the first `count` examples of a task, `{"input", "question", "target"}` and the story's `"facts"`.

    Raises:
        DoesNotFitError: the facts and the harness's template take more than `length` tokens.
    """
    base = seeded(seed, task, length)
    paragraphs, split = read_paragraphs(assets / "corpora" / "books"), sentence_splitter(assets / "nltk_data")
    # A generator each, so that examples do not depend on their number.
    rngs = [Random(f"{base} {index}") for index in range(count)]
    stories = [tell(task.removeprefix("babilong_"), rng) for rng in rngs]
    room = length - harness_config("babilong", task)["generation_kwargs"]["max_gen_toks"]
    blank = [{"input": GAP, "question": story.question, "target": story.answer} for story in stories]
    docs = []
    for rng, story, (prompt, _) in zip(rngs, stories, harness_requests("babilong", task, blank), strict=True):
        before, after = prompt.split(GAP)

        def size(text: str, before: str = before, after: str = after) -> int:
            return len(tokenizer(before + text + after).input_ids)

        hidden = hide(story.facts, read_on(paragraphs, split, rng, room), rng, size, room)
        docs.append({"input": hidden, "question": story.question, "target": story.answer, "facts": list(story.facts)})
    return docs


def hide(facts: Sequence[str], sentences: Sequence[str], rng: Random, size: Callable[[str], int], room: int) -> str:
    """Returns the facts at random places between as many sentences as fill `room` tokens.

    Only the last sentence may be cut. Where its words do not fill the room exactly, the run of sentences begins one
    later.

    Args:
        size: length in tokens of the whole prompt with a text as its input.

    Raises:
        DoesNotFitError: the facts take more than `room`, or no run comes within SLACK of it.
    """
    places = sorted(rng.random() for _ in facts)
    if (needed := size(_between(facts, [], places))) > room:
        raise DoesNotFitError(f"its facts and template take {needed} of {room} tokens with this tokenizer")
    best, text = -1, ""
    for start in range(RUNS):
        candidate = _filled(facts, places, sentences[start:], size, room)
        if (found := size(candidate)) > best:
            best, text = found, candidate
        if best == room:
            break
    if best < room - SLACK:
        raise DoesNotFitError(f"no words of the books fill {room} tokens with this tokenizer, only {best}")
    return text


def _filled(
    facts: Sequence[str], places: Sequence[float], sentences: Sequence[str], size: Callable[[str], int], room: int
) -> str:
    """Returns the facts between as many words of the sentences as fit `room` tokens."""
    words = [sentence.split(" ") for sentence in sentences]

    def text(count: int) -> str:
        return _between(facts, _first_words(words, count), places)

    return text(_most(lambda count: size(text(count)), room, sum(map(len, words))))


def _between(facts: Sequence[str], sentences: Sequence[str], places: Sequence[float]) -> str:
    """Returns facts and sentences, each fact at its share (from 0 to 1) of the way through the sentences."""
    parts: list[str] = []
    passed = 0
    for fact, place in zip(facts, places, strict=True):
        gap = int(place * (len(sentences) + 1))
        parts += [*sentences[passed:gap], fact]
        passed = gap
    return " ".join([*parts, *sentences[passed:]])


def _first_words(sentences: Sequence[Sequence[str]], count: int) -> list[str]:
    """Returns the sentences up to the `count`-th word; a sentence cut there ends in a full stop."""
    found = []
    for words in sentences:
        if count <= 0:
            break
        cut = " ".join(words[:count])
        found.append(cut if count >= len(words) else cut.rstrip(",;:-—. ") + ".")
        count -= len(words)
    return found


def _most(size: Callable[[int], int], room: int, high: int) -> int:
    """Returns the largest count whose size is at most `room`, among 0 to `high`.

    Each step tokenises a whole prompt, so it interpolates, as sizes grow almost evenly with the count.
    """
    low, smallest, largest = 0, size(0), size(high)
    assert smallest <= room < largest
    while high - low > 1 and smallest < room:
        guess = low + round((room - smallest) * (high - low) / (largest - smallest))
        middle = min(max(guess, low + 1), high - 1)
        if (found := size(middle)) <= room:
            low, smallest = middle, found
        else:
            high, largest = middle, found
    return low


@cache
def read_paragraphs(folder: Path) -> tuple[str, ...]:
    """Returns paragraphs of prose of all books in a folder, each on one line, without Project Gutenberg's own text.

    Raises:
        ValueError: there are none.
    """
    found = tuple(
        " ".join(block.split())
        for file in sorted(folder.glob("*.txt"))
        for book in books_of(file.read_text(encoding="utf-8"))
        for block in book
        if _is_prose(block)
    )
    if not found:
        raise ValueError(f"{folder}: no books in it; run the assets stage")
    return found


def _is_prose(block: str) -> bool:
    """Whether lines are running text. The entries of contents and of an index may end like sentences, but these books
    indent every line of them, as of tables and verse.
    """
    text = " ".join(block.split())
    set_apart = all(line[0].isspace() for line in block.splitlines() if line)
    return SENTENCES.fullmatch(text) is not None and text != text.upper() and not set_apart


@cache
def sentence_splitter(tables: Path) -> Callable[[str], list[str]]:
    """Returns NLTK's sentence splitter for English with the tables of the assets.

    Raises:
        ValueError: the tables are missing.
    """
    folder = sentence_tables(tables) / "tokenizers" / "punkt_tab" / "english"
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    def table(name: str) -> list[list[str]]:
        return [line.split("\t") for line in (folder / name).read_text(encoding="utf-8").splitlines() if line]

    known = PunktParameters()  # filled here, as NLTK reads only from process-wide folders
    known.abbrev_types = {word for (word,) in table("abbrev_types.txt")}
    known.sent_starters = {word for (word,) in table("sent_starters.txt")}
    known.collocations = {(first, second) for first, second in table("collocations.tab")}
    known.ortho_context.update({word: int(flags) for word, flags in table("ortho_context.tab")})
    return PunktSentenceTokenizer(known).tokenize


def read_on(paragraphs: Sequence[str], split: Callable[[str], list[str]], rng: Random, words: int) -> list[str]:
    """Returns sentences from a random paragraph on, with more than `words` words after the first RUNS. After the last
    book, the first one follows.
    """
    at, found, read = rng.randrange(len(paragraphs)), [], 0
    while read <= words:
        sentences = split(paragraphs[at])
        read += sum(len(sentence.split(" ")) for sentence in sentences) if len(found) >= RUNS else 0
        found += sentences
        at = (at + 1) % len(paragraphs)
    return found
