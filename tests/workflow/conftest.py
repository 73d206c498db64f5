"""Dry runs that several tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import ROOT, Run, copied, dry_run, made, planned


@pytest.fixture(scope="session")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The dry run of `all` for every study."""
    names = sorted(path.stem for path in (ROOT / "config" / "studies").glob("*.yaml"))
    return {name: dry_run(tmp_path_factory.mktemp(name), "all", "--config", f"study={name}") for name in names}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, studies: dict[str, Run]) -> Path:
    """A copy of the repository in which the mini study is up to date; what a test changes in it, it puts back."""
    folder = copied(tmp_path_factory.mktemp("finished"))
    made(folder, folder / "Snakefile", studies["mini"])
    assert planned(folder) == {}
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the workflow whose configuration a test may change."""
    return copied(tmp_path / "checkout", "docs", "src", "paper_tables/templates")
