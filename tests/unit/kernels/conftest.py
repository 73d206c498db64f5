"""Libraries of kernels, one for each kind of CPU that this CPU can run."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tests.needs import KERNELS

from residual_mass.kernels.library import SWITCH, TARGETS, Library


def targets() -> list[Any]:
    """The instructions that the library would choose here, or those that RESIDUAL_MASS_KERNELS names; with slow tests
    all that this CPU has.
    """
    if not KERNELS.met():
        return []
    best = TARGETS.index(Library("portable").best_target())
    named = os.environ.get(SWITCH)
    chosen = named if named in TARGETS else TARGETS[best]
    others = [target for target in TARGETS[: best + 1] if target != chosen]
    return [chosen, *(pytest.param(target, marks=pytest.mark.slow) for target in others)]


@pytest.fixture(params=targets())
def library(request: pytest.FixtureRequest) -> Library:
    return Library(request.param)
