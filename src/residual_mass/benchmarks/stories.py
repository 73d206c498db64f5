"""Stories of the five kinds that BABILong hides in books, generated from a simulated world.

People, places, things and sentences are those of bAbI. A story does not say where everyone starts, so questions are
derived by replaying its events. Unlike in bAbI, a question is asked only if the story allows a single answer: "before
the kitchen" is asked of a thing that came to the kitchen once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Literal

Act = Literal["move", "take", "drop", "give"]
Question = tuple[str, str]
"""The question and its one answer."""
Relation = tuple[str, str, str]
"""The first place is on this side of the second."""

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
        self.place = {each: start if kind.together else rng.choice(PLACES) for each in (*kind.people, *THINGS)}
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
    told = KINDS[kind]
    length = rng.randint(*told.lengths)
    (find,) = rng.choices(list(told.questions), list(told.questions.values()))
    while True:  # not every story answers a question of this kind
        world = World(told, rng)
        events = [world.next_event(rng) for _ in range(length)]
        if questions := find(events):
            question, answer = rng.choice(questions)
            return Story(tuple(event.told(rng) for event in events), question, answer)


def _tell_of_places(rng: Random) -> Story:
    """Three places in a row, told by two relations of neighbours. As in bAbI, the question is about the second place of
    either relation, and the answer is the neighbour, though the third place may lie on the same side.
    """
    one, middle, other = rng.sample(PLACES, 3)
    side = rng.choice(list(OPPOSITE))
    relations = [_to_middle(one, side, middle, rng), _to_middle(other, OPPOSITE[side], middle, rng)]
    rng.shuffle(relations)
    answer, side, asked = rng.choice(relations)
    question = rng.choice((f"What is {side} of the {asked}?", f"What is the {asked} {OPPOSITE[side]} of?"))
    facts = tuple(f"The {first} is {where} of the {second}." for first, where, second in relations)
    return Story(facts, question, answer)


def _to_middle(end: str, side: str, middle: str, rng: Random) -> Relation:
    """That `end` is on this side of `middle`, from either point of view: in two thirds of bAbI's sentences the middle
    comes second.
    """
    return (end, side, middle) if rng.random() < 2 / 3 else (middle, OPPOSITE[side], end)


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
    """Returns the places of each thing in order, as far as the story tells.

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


def about_gifts(question: str, asked: Literal["who", "what", "whom"]) -> Callable[[Sequence[Event]], list[Question]]:
    """Returns a finder of the questions with these words that all gifts of the story answer alike."""

    def find(events: Sequence[Event]) -> list[Question]:
        answers: dict[str, set[str]] = {}
        for gift in (asdict(event) for event in events if event.act == "give"):
            answers.setdefault(question.format(**gift), set()).add(gift[asked])
        return [(words, *found) for words, found in answers.items() if len(found) == 1]

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
        {  # bAbI asks as often for the thing, the giver and the receiver, for either person in two ways
            about_gifts("What did {who} give to {whom}?", "what"): 2,
            about_gifts("Who gave the {what}?", "who"): 1,
            about_gifts("Who gave the {what} to {whom}?", "who"): 1,
            about_gifts("Who received the {what}?", "whom"): 1,
            about_gifts("Who did {who} give the {what} to?", "whom"): 1,
        },
        together=True,
    ),
}
"""The kinds with events. Stories are about as long as most of bAbI's, whose longest, of over a hundred facts, would
leave little room at short lengths.
"""
