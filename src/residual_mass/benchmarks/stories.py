"""Stories of the five kinds that BABILong hides in books, generated from a simulated world.

People, places, things and sentences are those of bAbI. A story does not say where everyone starts, so questions are
derived by replaying its events. Unlike in bAbI, a question is asked only if the story allows a single answer: "before
the kitchen" is asked of a thing that came to the kitchen once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

Act = Literal["move", "take", "drop", "give"]
Question = tuple[str, str]
"""The question and its one answer."""

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

    def told(self, rng: Random) -> str:
        return rng.choice(SENTENCES[self.act]).format(who=self.who, what=self.what, whom=self.whom)


@dataclass(frozen=True)
class StoryKind:
    """The events of a kind of story and the questions about it.

    Attributes:
        lengths: minimum and maximum number of facts.
        acts: what people do, with weights.
        together: whether everyone and everything starts in one place, so that things can be given to somebody.
    """

    lengths: tuple[int, int]
    people: tuple[str, ...]
    acts: dict[Act, int]
    questions: Callable[[Sequence[Event]], list[Question]]
    together: bool = False


class World:
    """The places of people and things, and who holds which thing."""

    def __init__(self, kind: StoryKind, rng: Random) -> None:
        start = rng.choice(PLACES)
        self.kind = kind
        self.place = {each: start if kind.together else rng.choice(PLACES) for each in (*kind.people, *THINGS)}
        self.holder: dict[str, str] = {}

    def next_event(self, rng: Random) -> Event:
        """A random possible event, applied to the world."""
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
    """A story of kind `qa1` to `qa5`."""
    if kind == "qa4":
        return _tell_of_places(rng)
    told = KINDS[kind]
    length = rng.randint(*told.lengths)
    while True:  # a short story may allow no question
        world = World(told, rng)
        events = [world.next_event(rng) for _ in range(length)]
        if questions := told.questions(events):
            question, answer = rng.choice(questions)
            return Story(tuple(event.told(rng) for event in events), question, answer)


def _tell_of_places(rng: Random) -> Story:
    """Three places in a row and the relations of neighbours; the question is about the middle one, from either side."""
    before, middle, after = rng.sample(PLACES, 3)
    side = rng.choice(list(OPPOSITE))  # of the middle, where `before` is
    facts = [_relation(before, side, middle, rng), _relation(middle, side, after, rng)]
    rng.shuffle(facts)
    asked = rng.choice((side, OPPOSITE[side]))
    neighbour, other = (before, after) if asked == side else (after, before)
    if rng.random() < 0.5:
        return Story(tuple(facts), f"What is {asked} of the {middle}?", neighbour)
    return Story(tuple(facts), f"What is the {middle} {asked} of?", other)


def _relation(first: str, side: str, second: str, rng: Random) -> str:
    """A sentence that `first` is on one side of `second`, from either point of view."""
    if rng.random() < 0.5:
        return f"The {first} is {side} of the {second}."
    return f"The {second} is {OPPOSITE[side]} of the {first}."


def where_is_somebody(events: Sequence[Event]) -> list[Question]:
    last = {event.who: event.what for event in events}
    return [(f"Where is {who}?", place) for who, place in last.items()]


def where_is_a_thing(events: Sequence[Event]) -> list[Question]:
    """Decided by two facts: who took or dropped the thing, and where that person went."""
    return [(f"Where is the {thing}?", trail[-1]) for thing, trail in trails(events).items()]


def where_was_a_thing(events: Sequence[Event]) -> list[Question]:
    """Decided by three facts: who had the thing, and the two last places; its current place is never the answer."""
    return [
        (f"Where was the {thing} before the {place}?", earlier)
        for thing, trail in trails(events).items()
        for earlier, place in zip(trail, trail[1:], strict=False)
        if trail.count(place) == 1 and earlier != trail[-1]
    ]


def trails(events: Sequence[Event]) -> dict[str, list[str]]:
    """The places of each thing in order, as far as the story tells.

    The place of a person may first become known from a thing that the person takes. Only the beginning of a trail can
    be unknown, as things move from known places to known places.
    """
    place: dict[str, str] = {}
    holder: dict[str, str] = {}
    found: dict[str, list[str]] = {}

    def learn(who: str, where: str) -> None:
        place[who] = where
        for thing in (thing for thing, held_by in holder.items() if held_by == who):
            if found.setdefault(thing, [])[-1:] != [where]:
                found[thing].append(where)

    for event in events:
        if event.act == "move":
            learn(event.who, event.what)
        elif event.act == "take":
            holder[event.what] = event.who
            known = place.get(event.who) or next(reversed(found.get(event.what, [])), None)
            if known is not None:
                learn(event.who, known)
        else:
            assert event.act == "drop", "things change hands only in stories that ask about no place"
            del holder[event.what]
    return found


def who_gave_what(events: Sequence[Event]) -> list[Question]:
    """The questions about gifts that all gifts of the story answer alike."""
    answers: dict[str, set[str]] = {}
    for gift in (event for event in events if event.act == "give"):
        for question, answer in _about_gift(gift):
            answers.setdefault(question, set()).add(answer)
    return [(question, *found) for question, found in answers.items() if len(found) == 1]


def _about_gift(gift: Event) -> Iterator[Question]:
    assert gift.whom is not None
    yield f"Who gave the {gift.what}?", gift.who
    yield f"Who gave the {gift.what} to {gift.whom}?", gift.who
    yield f"Who received the {gift.what}?", gift.whom
    yield f"Who did {gift.who} give the {gift.what} to?", gift.whom
    yield f"What did {gift.who} give to {gift.whom}?", gift.what


CARRIERS = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
KINDS = {
    "qa1": StoryKind((2, 10), CARRIERS, {"move": 1}, where_is_somebody),
    "qa2": StoryKind((6, 24), CARRIERS, {"move": 2, "take": 3, "drop": 1}, where_is_a_thing),
    "qa3": StoryKind((12, 40), CARRIERS, {"move": 3, "take": 5, "drop": 1}, where_was_a_thing),
    "qa5": StoryKind((6, 30), GIVERS, {"move": 1, "take": 4, "drop": 1, "give": 4}, who_gave_what, together=True),
}
"""The kinds with events. Stories are about as long as most of bAbI's, whose longest, of over a hundred facts, would
leave little room at short lengths.
"""
