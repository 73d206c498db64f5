"""What the prompt has of a token that continues it."""

from __future__ import annotations

import pytest

from residual_mass.benchmarks.force import GOLD, Continuation


@pytest.mark.parametrize(
    ("prompt", "answer", "seen"),
    [
        ((7, 8, 9, 7), (8, 9, 5, 9, 8), [2, 2, 0, 1, 1]),
        ((7, 8), (8, 8, 7), [1, 1, 1]),  # what the answer itself repeats does not count
        ((7,), (8,), [0]),
    ],
)
def test_tokens_and_bigrams_of_the_prompt_are_told_apart(
    prompt: tuple[int, ...], answer: tuple[int, ...], seen: list[int]
) -> None:
    continuation = Continuation("ruler", "niah", 0, GOLD, prompt, answer, len(answer), None, ())
    assert list(continuation.seen(answer)) == seen
