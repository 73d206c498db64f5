"""Whatever a configuration says, reading it ends well or in one line."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from tests.workflow.runs import ROOT, configuration_error

QUICK, THOROUGH = 6, 200
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 10**12, 0.5, -0.5, float("nan"), float("inf"), "", "x", "1k", "0k", "64k", "999999999k",
    "512", "smol", "1b", "paper", "mini", "ours", "full", "wiki", "cwe", "ruler", [], [[]], {}, {"x": 1}, ["1k", "1k"],
    "$(id)", "a'b\"c", "\n", "../x", "é", "all", "published",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("configured") / "checkout"
    for name in ("config", "workflow"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def changed(value: Any, rng: Random) -> Any:
    """The configuration with one thing in it replaced, taken out, doubled or renamed."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.08:
        return copy.deepcopy(rng.choice(VALUES))
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    other = copy.copy(value)
    match rng.randrange(10):
        case 0:
            del other[key]
        case 1 if isinstance(value, dict):
            other[rng.choice(("x", "", "1k", "smol", 3))] = other.pop(key)
        case 1:
            other.append(copy.deepcopy(rng.choice((*VALUES, value[key]))))
        case _:
            other[key] = changed(value[key], rng)
    return other


def check(checkout: Path, rounds: range) -> None:
    files = [checkout / "config" / name for name in ("config.yaml", "studies/mini.yaml", "studies/paper.yaml")]
    for seed in rounds:
        rng = Random(f"configuration/{seed}")
        file = rng.choice(files)
        whole = file.read_text()
        try:
            content = yaml.safe_load(whole)
            for _ in range(rng.choice((1, 1, 2, 5))):
                content = changed(content, rng)
            if file.name == "config.yaml" and not isinstance(content, dict):
                continue  # which Snakemake itself refuses
            file.write_text(yaml.safe_dump(content))
            try:
                said = configuration_error(checkout)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {file.name}: {error!r}") from error
            assert len(said.splitlines()) <= 1 and said != "None", f"seed {seed}, {file.name}: {said[:500]!r}"
        finally:
            file.write_text(whole)


def test_a_changed_configuration_is_read_or_refused_in_one_line(checkout: Path) -> None:
    check(checkout, range(QUICK))


@pytest.mark.slow
def test_hundreds_of_changed_configurations(checkout: Path) -> None:
    check(checkout, range(QUICK, QUICK + THOROUGH))
