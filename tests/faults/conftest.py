"""The stages that faults strike, their inputs, and what they make when nothing does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.faults import stages
from tests.faults.forks import Forks
from tests.small_assets import freeze_prompts, write_assets


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with Forks() as running:
        yield running


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "assets"
    write_assets(folder)
    return folder


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


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.fixture(scope="session")
def undisturbed(forks: Forks, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    """By the stages' names."""
    folder = tmp_path_factory.mktemp("undisturbed")
    docs = {"ruler_vt": [{"outputs": [str(i)]} for i in range(stages.GENERATE.examples)]}
    manifest = freeze_prompts(folder / "prompts" / "manifest.json", "ruler", stages.GENERATE.length, docs)
    found: dict[str, Undisturbed] = {}

    def run(stage: stages.Stage) -> None:
        out, log = folder / stage.name, folder / f"{stage.name}.log"
        started = time.monotonic()
        assert forks.run(stage.arguments(out), log) == 0, log.read_text()
        seconds = time.monotonic() - started
        found[stage.name] = Undisturbed(stage, stage.made(out), names_in(out), seconds)
        assert set(found[stage.name].made) == set(stage.outputs)

    short = stages.train(assets, replace(stages.TRAIN, length="512", steps=2))
    assert forks.run(short.arguments(folder / "phi"), folder / "phi.log") == 0, (folder / "phi.log").read_text()
    phi = folder / "phi" / "maps.safetensors"
    run(stages.train(assets))
    run(stages.generate(assets, manifest, phi))
    run(stages.force(assets, manifest, phi))
    run(stages.capture(assets, phi))
    return found
