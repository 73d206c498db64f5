"""The benchmarks use nothing of the package that is no longer there, also where a run takes minutes to get to it."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


def missing(tree: ast.Module, module: types.ModuleType) -> Iterator[str]:
    """Yields `name.attribute` of the module's imported modules that these do not have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = getattr(module, node.value.id, None)
            if isinstance(owner, types.ModuleType) and not hasattr(owner, node.attr):
                yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_script_uses_exists(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])  # the scripts there find each other like this
    module = importlib.import_module(script)
    assert not list(missing(ast.parse((FOLDER / f"{script}.py").read_text()), module))


def test_a_name_that_is_gone_is_noticed() -> None:
    module = types.ModuleType("script")
    module.ast = ast
    assert list(missing(ast.parse("ast.parse(ast.gone)"), module)) == ["ast.gone"]
