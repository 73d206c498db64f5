"""Checks that several classes of the configuration make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from residual_mass.core.settings import tokens_of
from residual_mass.study.parsing import Slip


def unknown(key: str, values: Iterable[Any], options: Iterable[Any]) -> Iterator[Slip]:
    """A slip for every value that is not among the options."""
    options = list(options)
    known = ", ".join(f"{option:g}" if isinstance(option, float) else option for option in options) or "none"
    for value in (value for value in values if value not in options):
        yield Slip(key, f"{f'{value:g}' if isinstance(value, float) else value} is not one of {known}")


def beyond(key: str, length: str, trained: Iterable[str]) -> Iterator[Slip]:
    """A slip for a length beyond the shortest that is trained."""
    shortest = min(trained, key=tokens_of, default=length)
    if tokens_of(length) > tokens_of(shortest):
        yield Slip(key, f"{length} is beyond the trained length {shortest}")
