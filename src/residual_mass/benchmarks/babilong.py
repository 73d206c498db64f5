"""BABILong examples built anew from simulated stories and books.

An example is a story whose facts are placed, in order, between the sentences of a book, and a question about the story.
Its length is that of the harness's whole prompt, including few-shot examples, with the longest answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

from residual_mass.benchmarks.catalogue import (
    Doc,
    DoesNotFitError,
    harness_config,
    harness_requests,
    seeded,
    sentence_tables,
)
from residual_mass.texts.corpora import books_of

SLACK = 2
"""Tokens that a prompt may lack if no run of words fills it exactly."""
RUNS = 32
"""Maximum number of runs of book sentences that are tried to fill a prompt exactly."""
GAP = "\ue000"
"""Placeholder of the input in a prompt; occurs in no book."""
PROSE = re.compile(r"(?!CHAPTER )[\"“'‘(_]*[A-Z].*[.!?][\"”'’)_]*")
"""A paragraph that begins and ends like a sentence, unlike headings."""


def build_examples(task: str, tokenizer: Any, length: int, count: int, seed: int, assets: Path) -> list[Doc]:
    """Returns the first `count` examples of a task, `{"input", "question", "target"}` and the story's `"facts"`.

    Raises:
        DoesNotFitError: the facts and the harness's template take more than `length` tokens.
    """
    base = seeded(seed, task, length)
    paragraphs, split = read_paragraphs(assets / "corpora" / "books"), sentence_splitter(assets / "nltk_data")
    # One generator per example, so that examples do not depend on `count`.
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

    Only the last sentence may be cut. Where its words do not fill the room exactly, the run that begins one sentence
    later is tried.

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
        if (tokens := size(candidate)) > best:
            best, text = tokens, candidate
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
    """Joins facts and sentences, each fact at its place (a share from 0 to 1) among the sentences."""
    parts: list[str] = []
    passed = 0
    for fact, place in zip(facts, places, strict=True):
        gap = int(place * (len(sentences) + 1))
        parts += [*sentences[passed:gap], fact]
        passed = gap
    return " ".join([*parts, *sentences[passed:]])


def _first_words(sentences: Sequence[Sequence[str]], count: int) -> list[str]:
    """Returns the sentences up to the `count`-th word; a sentence cut there ends in a full stop."""
    kept = []
    for words in sentences:
        if count <= 0:
            break
        cut = " ".join(words[:count])
        kept.append(cut if count >= len(words) else cut.rstrip(",;:-—. ") + ".")
        count -= len(words)
    return kept


def _most(size: Callable[[int], int], room: int, high: int) -> int:
    """Returns the largest count whose size is at most `room`, among 0 to `high`.

    Each step tokenises a whole prompt, so it interpolates, as sizes grow almost evenly with the count.
    """
    low, smallest, largest = 0, size(0), size(high)
    assert smallest <= room < largest
    while high - low > 1 and smallest < room:
        guess = low + round((room - smallest) * (high - low) / (largest - smallest))
        middle = min(max(guess, low + 1), high - 1)
        if (tokens := size(middle)) <= room:
            low, smallest = middle, tokens
        else:
            high, largest = middle, tokens
    return low


@cache
def read_paragraphs(folder: Path) -> tuple[str, ...]:
    """Returns paragraphs of prose of all books in a folder, each on one line, without Project Gutenberg's own text.

    Raises:
        ValueError: the folder has no books.
    """
    paragraphs = tuple(
        " ".join(block.split())
        for file in sorted(folder.glob("*.txt"))
        for book in books_of(file.read_text(encoding="utf-8"))
        for block in book
        if _is_prose(block)
    )
    if not paragraphs:
        raise ValueError(f"{folder}: no books in it; run the assets stage")
    return paragraphs


def _is_prose(block: str) -> bool:
    """Whether a block is running text. Entries of a table of contents or of an index may end like sentences, but these
    books indent every line of them, as they do in tables and verse.
    """
    text = " ".join(block.split())
    set_apart = all(line[0].isspace() for line in block.splitlines() if line)
    return PROSE.fullmatch(text) is not None and text != text.upper() and not set_apart


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
    """Returns the sentences from a random paragraph on: at least RUNS, then more than `words` words. The first book
    follows the last.
    """
    at, run, read = rng.randrange(len(paragraphs)), [], 0
    while read <= words:
        sentences = split(paragraphs[at])
        read += sum(len(sentence.split(" ")) for sentence in sentences) if len(run) >= RUNS else 0
        run += sentences
        at = (at + 1) % len(paragraphs)
    return run


# ---- stories ---------------------------------------------------------------------------------------------------------
#
# People, places, things and sentences are those of bAbI. A story does not say where everyone starts, so questions are
# derived by replaying its events. Unlike in bAbI, a question is asked only if the story allows a single answer: "before
# the kitchen" is asked only about a thing that came to the kitchen once.

Act = Literal["move", "take", "drop", "give"]
Question = tuple[str, str]
"""The question and its only answer."""
Relation = tuple[str, str, str]
"""First place, side, second place: the first is on this side of the second."""

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
SENTENCES: dict[Act, list[str]] = {
    "move": [f"{{who}} {verb} to the {{what}}." for verb in ("moved", "went", "journeyed", "travelled", "went back")],
    "take": [
        f"{{who}} {verb} the {{what}}{there}."
        for verb in ("grabbed", "got", "picked up", "took")
        for there in ("", " there")
    ],
    "drop": [
        f"{{who}} {verb} the {{what}}{there}."
        for verb in ("dropped", "discarded", "left", "put down")
        for there in ("", " there")
    ],
    "give": [f"{{who}} {verb} the {{what}} to {{whom}}." for verb in ("passed", "gave", "handed")],
}


@dataclass(frozen=True)
class Story:
    """Sentences in the order of events, a question about them, and its answer of one word."""

    facts: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Event:
    """`who` goes to the place `what`, or takes, drops or gives (to `whom`) the thing `what`."""

    act: Act
    who: str
    what: str
    whom: str | None = None

    def sentence(self, rng: Random) -> str:
        return rng.choice(SENTENCES[self.act]).format(who=self.who, what=self.what, whom=self.whom)


@dataclass(frozen=True)
class StoryKind:
    """The events of a kind of story and the questions about it.

    Attributes:
        lengths: minimum and maximum number of facts.
        acts: what people do, with weights.
        questions: what is asked, with weights. Each function finds the questions of its kind that a story answers.
        together: whether everyone and everything starts in one place, so that things can be given to somebody.
    """

    lengths: tuple[int, int]
    people: tuple[str, ...]
    acts: dict[Act, int]
    questions: dict[Callable[[Sequence[Event]], list[Question]], int]
    together: bool = False


class World:
    """The places of people and things, and who holds which thing."""

    def __init__(self, kind: StoryKind, rng: Random) -> None:
        start = rng.choice(PLACES)
        self.kind = kind
        self.place = {name: start if kind.together else rng.choice(PLACES) for name in (*kind.people, *THINGS)}
        self.holder: dict[str, str] = {}

    def next_event(self, rng: Random) -> Event:
        """Returns a random possible event, applied to the world."""
        who = rng.choice(self.kind.people)
        possible = {act: events for act in self.kind.acts if (events := self._possible(who, act))}
        (act,) = rng.choices(list(possible), [self.kind.acts[act] for act in possible])
        event = rng.choice(possible[act])
        self._happen(event)
        return event

    def _possible(self, who: str, act: Act) -> list[Event]:
        here = self.place[who]
        if act == "move":
            return [Event(act, who, place) for place in PLACES if place != here]
        if act == "take":
            return [Event(act, who, t) for t in THINGS if t not in self.holder and self.place[t] == here]
        held = [thing for thing, holder in self.holder.items() if holder == who]
        if act == "drop":
            return [Event(act, who, thing) for thing in held]
        others = [whom for whom in self.kind.people if whom != who and self.place[whom] == here]
        return [Event(act, who, thing, whom) for thing in held for whom in others]

    def _happen(self, event: Event) -> None:
        if event.act == "move":
            carried = [thing for thing, holder in self.holder.items() if holder == event.who]
            self.place |= dict.fromkeys((event.who, *carried), event.what)
        elif event.act == "drop":
            del self.holder[event.what]
        else:
            self.holder[event.what] = event.whom or event.who


def tell(kind: str, rng: Random) -> Story:
    """Returns a story of kind `qa1` to `qa5`."""
    if kind == "qa4":
        return _tell_of_places(rng)
    story_kind = KINDS[kind]
    length = rng.randint(*story_kind.lengths)
    (find,) = rng.choices(list(story_kind.questions), list(story_kind.questions.values()))
    while True:  # not every story answers a question of this kind
        world = World(story_kind, rng)
        events = [world.next_event(rng) for _ in range(length)]
        if questions := find(events):
            question, answer = rng.choice(questions)
            return Story(tuple(event.sentence(rng) for event in events), question, answer)


def _tell_of_places(rng: Random) -> Story:
    """Returns a story of three places in a row, as two relations of neighbours. As in bAbI, the question is about the
    second place of either relation, and the answer is its neighbour, though the third place may be on the same side.
    """
    end, middle, other_end = rng.sample(PLACES, 3)
    side = rng.choice(list(OPPOSITE))
    relations = [_to_middle(end, side, middle, rng), _to_middle(other_end, OPPOSITE[side], middle, rng)]
    rng.shuffle(relations)
    answer, side, asked = rng.choice(relations)
    question = rng.choice((f"What is {side} of the {asked}?", f"What is the {asked} {OPPOSITE[side]} of?"))
    facts = tuple(f"The {first} is {where} of the {second}." for first, where, second in relations)
    return Story(facts, question, answer)


def _to_middle(end: str, side: str, middle: str, rng: Random) -> Relation:
    """Returns the relation that `end` is on this side of `middle`, or its inverse. In two thirds of bAbI's sentences,
    the middle comes second.
    """
    return (end, side, middle) if rng.random() < 2 / 3 else (middle, OPPOSITE[side], end)


def where_is_somebody(events: Sequence[Event]) -> list[Question]:
    last = {event.who: event.what for event in events}
    return [(f"Where is {who}?", place) for who, place in last.items()]


def where_is_a_thing(events: Sequence[Event]) -> list[Question]:
    """Finds questions that take two facts: who took or dropped the thing, and where that person went."""
    return [(f"Where is the {thing}?", trail[-1]) for thing, trail in trails(events).items()]


def where_was_a_thing(events: Sequence[Event]) -> list[Question]:
    """Finds questions that take three facts: who had the thing, and its last two places. The last is no answer."""
    return [
        (f"Where was the {thing} before the {place}?", earlier)
        for thing, trail in trails(events).items()
        for earlier, place in zip(trail, trail[1:], strict=False)
        if trail.count(place) == 1 and earlier != trail[-1]
    ]


def trails(events: Sequence[Event]) -> dict[str, list[str]]:
    """Returns the places of each thing in order, as far as the story says.

    The place of a person may first become known from a thing that the person takes. Only the beginning of a trail can
    be unknown, as things move from known places to known places.
    """
    place: dict[str, str] = {}
    holder: dict[str, str] = {}
    places: dict[str, list[str]] = {}

    def learn(who: str, where: str) -> None:
        place[who] = where
        for thing in (thing for thing, held_by in holder.items() if held_by == who):
            if places.setdefault(thing, [])[-1:] != [where]:
                places[thing].append(where)

    for event in events:
        if event.act == "move":
            learn(event.who, event.what)
        elif event.act == "take":
            holder[event.what] = event.who
            known = place.get(event.who) or next(reversed(places.get(event.what, [])), None)
            if known is not None:
                learn(event.who, known)
        else:
            assert event.act == "drop", "things change hands only in stories that ask about no place"
            del holder[event.what]
    return places


def about_gifts(question: str, asked: Literal["who", "what", "whom"]) -> Callable[[Sequence[Event]], list[Question]]:
    """Returns a function that finds the questions of this form to which all gifts in a story give the same answer."""

    def find(events: Sequence[Event]) -> list[Question]:
        answers: dict[str, set[str]] = {}
        for gift in (asdict(event) for event in events if event.act == "give"):
            answers.setdefault(question.format(**gift), set()).add(gift[asked])
        return [(text, *words) for text, words in answers.items() if len(words) == 1]

    return find


CARRIERS = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
KINDS = {
    "qa1": StoryKind((2, 10), CARRIERS, {"move": 1}, {where_is_somebody: 1}),
    "qa2": StoryKind((6, 24), CARRIERS, {"move": 2, "take": 3, "drop": 1}, {where_is_a_thing: 1}),
    "qa3": StoryKind((12, 40), CARRIERS, {"move": 3, "take": 5, "drop": 1}, {where_was_a_thing: 1}),
    "qa5": StoryKind(
        (6, 30),
        GIVERS,
        {"move": 1, "take": 4, "drop": 1, "give": 4},
        {  # bAbI asks equally often for thing, giver and receiver; for a person in two ways
            about_gifts("What did {who} give to {whom}?", "what"): 2,
            about_gifts("Who gave the {what}?", "who"): 1,
            about_gifts("Who gave the {what} to {whom}?", "who"): 1,
            about_gifts("Who received the {what}?", "whom"): 1,
            about_gifts("Who did {who} give the {what} to?", "whom"): 1,
        },
        together=True,
    ),
}
"""Kinds of stories with events. They are about as long as most of bAbI's; the longest of those, with over a hundred
facts, would leave little room at short lengths.
"""
