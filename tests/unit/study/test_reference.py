"""The schemas and the reference of the configuration agree with its classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from residual_mass.study.reference import main

ROOT = Path(__file__).parents[3]


def keys_of(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of a file as the reference names them."""
    for name, value in content.items():
        if isinstance(value, dict) and name != "variants":
            of_each = (
                f"{prefix}{name}.<name>." if name in ("backbones", "benchmarks", "figures") else f"{prefix}{name}."
            )
            for inner in value.values() if name in ("backbones", "benchmarks", "figures") else [value]:
                yield from keys_of(inner, of_each)
        else:
            yield prefix + name


@pytest.mark.parametrize("file", ["config", "studies/mini", "studies/paper", "studies/methods"])
def test_every_key_of_a_file_is_explained(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    main()
    told = dict(re.findall(r"^  (\S+)(?: \(.*?\))?: (.+)$", capsys.readouterr().out, re.MULTILINE))
    content = yaml.safe_load((ROOT / f"config/{file}.yaml").read_text())
    unexplained = [key for key in keys_of(content) if key not in told]
    assert not unexplained and len(told) > 100, unexplained
    assert "wikitext" in told


@pytest.mark.parametrize(
    ("name", "file"), [("config", "config"), ("study", "studies/mini"), ("study", "studies/paper")]
)
def test_an_editor_accepts_the_files_and_refuses_a_typo(
    name: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load((ROOT / f"config/{file}.yaml").read_text())
    main(name)
    validator = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    validator.validate(content)
    assert not validator.is_valid(content | {"lenghts": []})


@pytest.mark.parametrize("name", ["config", "study"])
def test_the_written_schemas_are_current(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Editors and the catalog of workflows read them: `python -m residual_mass.study.reference config > FILE`."""
    main(name)
    assert (ROOT / f"workflow/schemas/{name}.schema.yaml").read_text() == capsys.readouterr().out


@pytest.mark.parametrize("file", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_file_names_its_schema(file: Path) -> None:
    first = file.read_text().splitlines()[0]
    named = (file.parent / first.removeprefix("# yaml-language-server: $schema=")).resolve()
    assert named == ROOT / f"workflow/schemas/{'study' if file.parent.name == 'studies' else 'config'}.schema.yaml"
