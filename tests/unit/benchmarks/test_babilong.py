from __future__ import annotations

import re
import types
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from residual_mass.benchmarks import babilong
from residual_mass.benchmarks.babilong import Story, tell
from residual_mass.benchmarks.catalogue import DoesNotFitError, harness_requests
from residual_mass.spec.tasks import tasks_of

TASKS = tasks_of("babilong", 1024)
ANSWER = 16


def built(task: str, tokenizer: Any, assets: Path, length: int = 1024, count: int = 4, seed: int = 5) -> list[Any]:
    return babilong.build_examples(task, tokenizer, length, count, seed, assets)


def positions(doc: Any) -> list[int]:
    """Where each fact begins in the input, each sought after the one before."""
    found, at = [], 0
    for fact in doc["facts"]:
        at = doc["input"].index(fact, at)
        found.append(at)
        at += len(fact)
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1024, 2048])
def test_prompt_and_answer_have_exactly_the_length(
    task: str, length: int, tokenizer: Any, benchmark_assets: Path
) -> None:
    requests = harness_requests("babilong", task, built(task, tokenizer, benchmark_assets, length))
    assert {settings["max_gen_toks"] for _, settings in requests} == {ANSWER}
    assert [len(tokenizer(prompt).input_ids) + ANSWER for prompt, _ in requests] == [length] * 4


def test_a_tokenizer_that_cannot_hit_the_length_stays_just_below_it(benchmark_assets: Path) -> None:
    def in_threes(text: str) -> Any:
        return types.SimpleNamespace(input_ids=[0] * (3 * len(text.split())))

    requests = harness_requests("babilong", TASKS[0], built(TASKS[0], in_threes, benchmark_assets))
    assert {len(in_threes(prompt).input_ids) + ANSWER for prompt, _ in requests} == {1024 - (1024 - ANSWER) % 3}

    def in_tens(text: str) -> Any:
        return types.SimpleNamespace(input_ids=[0] * (10 * len(text.split())))

    with pytest.raises(DoesNotFitError, match="no words of the books fill 4087 tokens with this tokenizer, only 4080"):
        built(TASKS[0], in_tens, benchmark_assets, 4087 + ANSWER)


@pytest.mark.parametrize("task", TASKS)
def test_facts_lie_in_order_between_whole_sentences(task: str, tokenizer: Any, benchmark_assets: Path) -> None:
    book = " ".join(babilong.read_paragraphs(benchmark_assets / "corpora" / "books"))
    adjacent = []
    for doc in built(task, tokenizer, benchmark_assets, 2048):
        noise, end = [], 0
        for at, fact in zip(positions(doc), doc["facts"], strict=True):
            noise.append(doc["input"][end:at].strip())
            end = at + len(fact)
        noise.append(doc["input"][end:].strip())
        adjacent += [gap == "" for gap in noise[1:-1]]
        *whole, cut = [gap for gap in noise if gap]
        for gap in whole:
            assert gap in f"{book} {book}"  # read on from the last book into the first
            assert gap[-1] in ".!" and gap[0].isupper()
        assert cut.rstrip(".") in f"{book} {book}" and cut.endswith((".", "!"))
    assert adjacent.count(True) < len(adjacent) / 2


def test_books_lose_what_is_not_prose(benchmark_assets: Path) -> None:
    paragraphs = babilong.read_paragraphs(benchmark_assets / "corpora" / "books")
    split = babilong.sentence_splitter(benchmark_assets / "nltk_data")
    text = " ".join(paragraphs)
    for gone in ("Gutenberg", "belongs to no book", "CHAPTER", "Produced by", "Snow", "THE GATE", "\n"):
        assert gone not in text
    sentences = [sentence for paragraph in paragraphs for sentence in split(paragraph)]
    assert (len(paragraphs), len(sentences), len(set(sentences))) == (100, 600, 300)


@pytest.mark.parametrize("task", TASKS)
def test_what_cannot_fit_is_told(task: str, tokenizer: Any, benchmark_assets: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"facts and template take \d+ of 84 tokens with this tokenizer"):
        built(task, tokenizer, benchmark_assets, 100)


# ---- stories: read back by a machine of the test's own, which knows no more than a reader does -----------------------

KINDS = ("qa1", "qa2", "qa3", "qa4", "qa5")
PLACES = {"bathroom", "bedroom", "garden", "hallway", "kitchen", "office"}
MOVE = re.compile(r"(\w+) (?:moved|went|journeyed|travelled|went back) to the (\w+)\.")
TAKE = re.compile(r"(\w+) (?:grabbed|got|picked up|took) the (\w+)(?: there)?\.")
DROP = re.compile(r"(\w+) (?:dropped|discarded|left|put down) the (\w+)(?: there)?\.")
GIVE = re.compile(r"(\w+) (?:passed|gave|handed) the (\w+) to (\w+)\.")
RELATION = re.compile(r"The (\w+) is (north|south|east|west) of the (\w+)\.")
STEPS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


def stories(kind: str, count: int = 400) -> list[Story]:
    return [tell(kind, Random(f"{kind} {number}")) for number in range(count)]


class Reader:
    """Unknown beginnings are symbols; that two were in one place makes their symbols one.

    Fails on a story that cannot have happened.
    """

    def __init__(self) -> None:
        self.same: dict[str, str] = {}
        self.trail: dict[str, list[str]] = {}
        self.holder: dict[str, str] = {}
        self.gifts: list[tuple[str, str, str]] = []

    def resolved(self, place: str) -> str:
        while place in self.same:
            place = self.same[place]
        return place

    def at(self, who: str) -> str:
        return self.resolved(self.trail.setdefault(who, [f"?{who}"])[-1])

    def meet(self, one: str, other: str) -> None:
        first, second = sorted((self.at(one), self.at(other)), key=lambda place: place in PLACES)
        if first != second:
            assert first not in PLACES, f"{one} is in the {first}, {other} in the {second}"
            self.same[first] = second

    def read(self, fact: str) -> None:
        if match := MOVE.fullmatch(fact):
            who, place = match.groups()
            assert self.at(who) != place
            for each in (who, *(thing for thing, holder in self.holder.items() if holder == who)):
                self.at(each)
                self.trail[each].append(place)
        elif match := TAKE.fullmatch(fact):
            who, thing = match.groups()
            assert thing not in self.holder
            self.meet(who, thing)
            self.holder[thing] = who
        elif match := DROP.fullmatch(fact):
            who, thing = match.groups()
            assert self.holder.pop(thing) == who
        else:
            match = GIVE.fullmatch(fact)
            assert match, fact
            giver, thing, taker = match.groups()
            assert self.holder[thing] == giver != taker
            self.meet(giver, taker)
            self.holder[thing] = taker
            self.gifts.append((giver, thing, taker))

    def visits(self, thing: str) -> list[str]:
        places = [self.resolved(place) for place in self.trail[thing]]
        return [place for i, place in enumerate(places) if i == 0 or place != places[i - 1]]

    def answers(self, question: str) -> set[str]:
        """Every answer that what was read supports."""
        if match := re.fullmatch(r"Where is (?:the )?(\w+)\?", question):
            return {self.at(match[1])}
        if match := re.fullmatch(r"Where was the (\w+) before the (\w+)\?", question):
            visits = self.visits(match[1])
            return {before for before, place in zip(visits, visits[1:], strict=False) if place == match[2]}
        if match := re.fullmatch(r"Who gave the (\w+)(?: to (\w+))?\?", question):
            return {g for g, thing, to in self.gifts if thing == match[1] and match[2] in (None, to)}
        if match := re.fullmatch(r"Who received the (\w+)\?", question):
            return {to for _, thing, to in self.gifts if thing == match[1]}
        if match := re.fullmatch(r"Who did (\w+) give the (\w+) to\?", question):
            return {to for g, thing, to in self.gifts if (g, thing) == match.groups()}
        match = re.fullmatch(r"What did (\w+) give to (\w+)\?", question)
        assert match, question
        return {thing for g, thing, to in self.gifts if (g, to) == match.groups()}


def read(story: Story) -> Reader:
    reader = Reader()
    for fact in story.facts:
        reader.read(fact)
    return reader


def answers_on_a_map(story: Story) -> set[str]:
    """The places next to the one asked about, on the asked side; laid out on a grid from any of them."""
    relations = [match.groups() for fact in story.facts if (match := RELATION.fullmatch(fact))]
    assert len(relations) == len(story.facts) == 2
    grid = {relations[0][2]: (0, 0)}
    for _ in relations:
        for place, side, anchor in relations:
            (x, y), step = grid.get(anchor, (9, 9)), STEPS[side]
            if anchor in grid:
                grid.setdefault(place, (x + step[0], y + step[1]))
            elif place in grid:
                grid[anchor] = (grid[place][0] - step[0], grid[place][1] - step[1])
    if match := re.fullmatch(r"What is (\w+) of the (\w+)\?", story.question):
        (asked, place), sign = match.groups(), 1
    else:
        match = re.fullmatch(r"What is the (\w+) (\w+) of\?", story.question)
        assert match, story.question
        (place, asked), sign = match.groups(), -1
    (x, y), (dx, dy) = grid[place], STEPS[asked]
    assert len(set(grid.values())) == 3
    return {name for name, at in grid.items() if at == (x + sign * dx, y + sign * dy)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_finds_one_answer_and_it_is_the_given_one(kind: str) -> None:
    assert stories(kind, 3) == stories(kind, 3)  # of their seeds alone
    for story in stories(kind):
        found = answers_on_a_map(story) if kind == "qa4" else read(story).answers(story.question)
        assert found == {story.answer}, story


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_spread_over_their_labels(kind: str) -> None:
    counts = Counter(story.answer for story in stories(kind, 600))
    labels = PLACES if kind != "qa5" else {"Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"}
    assert set(counts) == labels
    groups = [labels] if kind != "qa5" else [{"Bill", "Fred", "Jeff", "Mary"}, {"apple", "football", "milk"}]
    for group in groups:
        even = sum(counts[label] for label in group) / len(group)
        assert all(0.6 * even < counts[label] < 1.4 * even for label in group), counts


def test_of_three_places_the_middle_and_the_ends_are_asked_about_as_often_as_in_babi() -> None:
    """In bAbI's 10,000 training stories the middle is asked about in 66 % and comes second in 66 % of the sentences."""
    told = stories("qa4", 3000)
    asked: Counter[tuple[bool, bool]] = Counter()
    second = 0
    for story in told:
        relations = [re.findall(r"[Tt]he (\w+)", fact) for fact in story.facts]
        (middle,) = set(relations[0]) & set(relations[1])
        (place,) = PLACES & set(re.findall(r"\w+", story.question))
        assert place in [last for _, last in relations]
        second += sum(last == middle for _, last in relations)
        asked[place == middle, story.question.startswith("What is the ")] += 1
    assert abs(second / (2 * len(told)) - 2 / 3) < 0.03
    for (is_middle, _), count in asked.items():
        assert abs(count / len(told) - (1 / 3 if is_middle else 1 / 6)) < 0.03, asked
    assert len(asked) == 4
