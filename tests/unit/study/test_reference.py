"""What editors and readers see of the configuration is what its classes say."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from residual_mass.study.reference import SCHEMAS, schema_of, schema_text, with_tables

ROOT = Path(__file__).parents[3]
REMEDY = "run `python -m residual_mass.study.reference`"


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_up_to_date(name: str) -> None:
    text = (ROOT / f"config/schemas/{name}.schema.json").read_text()
    assert text == schema_text(SCHEMAS[name]), REMEDY


def test_the_tables_of_the_readme_are_up_to_date() -> None:
    readme = (ROOT / "config/README.md").read_text()
    assert readme == with_tables(readme, ROOT), REMEDY


@pytest.mark.parametrize(
    ("name", "file"), [("config", "config"), ("study", "studies/mini"), ("study", "studies/paper")]
)
def test_an_editor_accepts_the_files_and_refuses_a_typo(name: str, file: str) -> None:
    content = yaml.safe_load((ROOT / f"config/{file}.yaml").read_text())
    validator = jsonschema.Draft202012Validator(schema_of(SCHEMAS[name]))
    validator.validate(content)
    assert not validator.is_valid(content | {"lenghts": []})


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_key_has_a_meaning(name: str) -> None:
    schema = schema_of(SCHEMAS[name])
    parts = [schema, *schema["$defs"].values()]
    bare = [
        f"{part['title']}.{key}"
        for part in parts
        for key, value in part["properties"].items()
        if "description" not in value and "$ref" not in value and "items" not in value and "anyOf" not in value
    ]
    assert bare == []
