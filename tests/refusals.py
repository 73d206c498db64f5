"""Checks that a refusal is one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """What is done within ends as a ValueError whose message is one line with these words."""
    with pytest.raises(ValueError) as error:
        yield
    said = str(error.value)
    assert "\n" not in said and all(each in said for each in words), said
