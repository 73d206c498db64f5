"""The stages that faults interrupt, their inputs, and their outputs without a fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from tests.faults import stages
from tests.small_assets import freeze_prompts, write_assets


@dataclass(frozen=True)
class Undisturbed:
    """A stage, and a run of it to its end.

    Attributes:
        made: its outputs.
        names: everything in its folder afterwards, as seen from there.
        seconds: it took.
    """

    stage: stages.Stage
    made: dict[str, bytes]
    names: set[str]
    seconds: float

    def is_made_in(self, out: Path) -> bool:
        return self.stage.made(out) == self.made and names_in(out) == self.names


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "assets"
    write_assets(folder)
    return folder


def finished(stage: stages.Stage, out: Path) -> Undisturbed:
    started, log = time.monotonic(), out.with_suffix(".log")
    assert stages.run(stage, out, log) == 0, log.read_text()
    return Undisturbed(stage, stage.made(out), names_in(out), time.monotonic() - started)


@pytest.fixture(scope="session")
def all_stages(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, stages.Stage]:
    """By their names."""
    folder = tmp_path_factory.mktemp("inputs")
    docs = {"ruler_vt": [{"outputs": [str(i)]} for i in range(stages.GENERATE.examples)]}
    manifest = freeze_prompts(folder / "prompts" / "manifest.json", "ruler", stages.GENERATE.length, docs)
    finished(stages.train(assets, replace(stages.TRAIN, length="512", steps=2)), folder / "phi")
    inputs = (assets, manifest, phi := folder / "phi" / "maps.safetensors")
    decodings = [stages.decoding(spec, *inputs) for spec in (stages.GENERATE, stages.FORCE)]
    found = [stages.train(assets), *decodings, stages.capture(assets, phi)]
    assert tuple(stage.name for stage in found) == stages.NAMES
    return {stage.name: stage for stage in found}


@pytest.fixture(scope="session")
def undisturbed(
    all_stages: dict[str, stages.Stage], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Undisturbed]:
    """The stage of a name, run to its end once."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return cache(lambda name: finished(all_stages[name], folder / name))
