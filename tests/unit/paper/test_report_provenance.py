"""What a page says of the code that made its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from residual_mass.paper.report.origins import provenance


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ({"commit": "f00", "changed": True}, ("f00 with changes",)),
        ({"commit": "f00", "changed": False}, ("f00",)),
        ({"commit": "f00", "changed": None}, ("f00",)),
        ({"commit": "f00"}, ("f00",)),
        ({"commit": None, "changed": None}, None),
    ],
)
def test_the_commit_is_told_with_what_is_known_of_changes(
    code: dict[str, Any], said: tuple[str, ...] | None, tmp_path: Path
) -> None:
    (file := tmp_path / "a.csv").write_text("a\n")
    (tmp_path / "a.csv.meta.json").write_text(json.dumps({"code": code}))
    assert provenance([file]).facts.get("commit") == said
