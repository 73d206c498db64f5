"""Any configuration is either read or refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.test_specs import STABLE, changed
from tests.workflow.runs import ROOT, configuration_error

VALUES = (
    None, True, 0, -1, 3, 10**12, 0.5, -0.5, float("nan"), float("inf"), "", "x", "1k", "0k", "64k", "999999999k",
    "512", "smol", "1b", "paper", "mini", "ours", "full", "wiki", "cwe", "ruler", [], [[]], {}, {"x": 1}, ["1k", "1k"],
    "$(id)", "a'b\"c", "\n", "../x", "é", "all", "published",
)  # fmt: skip
FILES = ("config.yaml", "studies/mini.yaml", "studies/paper.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(ROOT / "config", tmp_path_factory.mktemp("checkout") / "config")


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_a_changed_configuration_is_read_or_refused_in_one_line(examples: int, folder: Path) -> None:
    @settings(STABLE, max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(FILES))
        content = yaml.safe_load((ROOT / "config" / file).read_text())
        for _ in range(data.draw(st.integers(1, 3))):
            content = data.draw(changed(content, st.sampled_from(VALUES)))
        (folder / file).write_text(yaml.safe_dump(content))
        try:
            said = configuration_error(folder.parent)
        finally:
            shutil.copy(ROOT / "config" / file, folder / file)
        assert len(said.splitlines()) <= 1 and said != "None", said[:500]

    check()
