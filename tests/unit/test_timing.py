"""Turns and the clocks that time them, under a clock that only the sides move."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from residual_mass.model.loading import Backbone
from residual_mass.timing import StepClock, Turn, fastest, scatter_of, take_turns, time_in_turns, timed


class FakeClock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_sides_take_turns_until_their_times_scatter_little() -> None:
    taken = []

    def side(name: str, seconds: Iterable[float]) -> Callable[[], Turn]:
        left = iter(seconds)

        def take_turn() -> Turn:
            taken.append(name)
            return [9.0, next(left)]

        return take_turn

    sides = {"a": side("a", [0.3, 0.2, 0.21, 1.0]), "b": side("b", [1.0, 1.3, 1.0, 1.0])}
    turns = take_turns(sides, 2, most=4, scatter=0.1)
    assert turns == {"a": [[9.0, 0.3], [9.0, 0.2], [9.0, 0.21]], "b": [[9.0, 1.0], [9.0, 1.3], [9.0, 1.0]]}
    assert taken == ["a", "b"] * 3
    assert fastest(turns["a"]) == 0.2
    assert take_turns({"c": side("c", [1.0, 2.0, 3.0, 4.0])}, 2, most=3)["c"] == [[9.0, 1.0], [9.0, 2.0], [9.0, 3.0]]


def test_times_scatter_as_the_best_two_turns_of_a_side_do() -> None:
    sides = [[0.3, 0.2, 0.22], [0.1, 0.2, 0.1], [1.0, 1.3], [9.0]]
    assert scatter_of([[[seconds, 10.0] for seconds in side] for side in sides]) == pytest.approx(0.1)


def test_a_round_to_warm_up_is_not_counted() -> None:
    clock = FakeClock()
    seconds = {"a": [50.0, 1.0, 2.0], "b": [70.0, 3.0, 4.0]}
    worked = []

    def side(name: str) -> Callable[[], None]:
        left = iter(seconds[name])

        def work() -> None:
            worked.append(name)
            clock.now += next(left)

        return work

    assert time_in_turns({name: side(name) for name in seconds}, 2, clock) == {"a": [1.0, 2.0], "b": [3.0, 4.0]}
    assert worked == ["a", "b"] * 3


def test_what_work_returns_comes_with_its_seconds() -> None:
    clock = FakeClock()

    def work() -> str:
        clock.now += 0.25
        return "done"

    assert timed(work, clock) == ("done", 0.25)


def test_steps_of_generate_are_timed_from_the_second_on(tiny_backbone: Backbone) -> None:
    """The first call reads the prompt, and takes 100 s here; each later one takes as many seconds as it is late."""
    model = tiny_backbone.model
    clock = FakeClock()
    calls = []

    def slow(*_: object) -> None:
        calls.append(None)
        clock.now += 100.0 if len(calls) == 1 else len(calls)

    hook = model.register_forward_pre_hook(slow)
    steps = StepClock(clock)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        model.generate(ids, streamer=steps, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    hook.remove()
    assert len(calls) == 6
    assert steps.steps == [3.0, 4.0, 5.0, 6.0]
