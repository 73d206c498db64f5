"""Libraries of kernels, one for each kind of CPU that this CPU can run or emulate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.needs import ARM, KERNELS, needs
from tests.unit.kernels import emulated

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


@pytest.fixture(scope="session")
def aarch64(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    program = emulated.build("aarch64-linux-gnu-g++", tmp_path_factory.mktemp("aarch64"))
    library = emulated.EmulatedLibrary(["qemu-aarch64", str(program)])
    yield library
    library.close()


@pytest.fixture(params=[*targets(), pytest.param("aarch64", marks=[pytest.mark.slow, needs(ARM)])])
def library(request: pytest.FixtureRequest) -> Library:
    """Also the portable kernels on an emulated ARM processor."""
    return request.getfixturevalue("aarch64") if request.param == "aarch64" else Library(request.param)
