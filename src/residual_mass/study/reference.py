"""The configuration's keys, read from its classes.

python -m residual_mass.study.reference           every key with its type and meaning, the figures' too, and the texts
python -m residual_mass.study.reference config    the JSON schema of config/config.yaml, for an editor
python -m residual_mass.study.reference study     that of config/studies/*.yaml
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.study import sections
from residual_mass.study.config import Main, Study
from residual_mass.study.figures import FIGURES, Figure
from residual_mass.study.values import adapter
from residual_mass.texts.names import ASSETS, HUB, MEASURED, TRAINED

CLASSES = {name: value for name, value in vars(sections).items() if is_dataclass(value)}
SCHEMAS = {"config": Main, "study": Study}


def main(name: str = "") -> None:
    """Prints a file's schema, or without a name all keys."""
    if name and name not in SCHEMAS:
        sys.exit(f"{name}: no such schema; there are {' and '.join(SCHEMAS)}")
    print(json.dumps(schema_of(SCHEMAS[name]), indent=1, sort_keys=True) if name else "\n".join(_reference()))


def schema_of(cls: type[Any]) -> dict[str, Any]:
    """The JSON schema of a file, with the meaning of every key."""
    schema = adapter(cls).json_schema()
    for name, part in schema["$defs"].items():
        for base in CLASSES[name].__mro__ if name in CLASSES else ():  # pydantic reads the docstrings of a class alone
            for key, value in adapter(base).json_schema()["properties"].items() if is_dataclass(base) else ():
                part["properties"][key] = value | part["properties"][key]
    if cls is Study:
        every, schemas = adapter(Figure).json_schema(), {False: {}, True: {}}
        for name, kind in FIGURES.items():
            keys = {key: every["properties"][key] for key in kind.keys}
            shown = every | {"properties": keys, "required": list(kind.keys), "description": kind.meaning}
            schemas[kind.several][f"^{name}(_[a-z0-9]+)*$" if kind.several else name] = shown
        of_names = {"properties": schemas[False], "patternProperties": schemas[True], "additionalProperties": False}
        schema["properties"]["figures"] |= of_names
    return schema


def _reference() -> Iterator[str]:
    for file, name in (("config/config.yaml", "config"), ("config/studies/*.yaml", "study")):
        schema = schema_of(SCHEMAS[name])
        yield f"\n{file}"
        yield from _lines(schema, schema.get("$defs", {}), "  ")
    yield "\nTexts"
    for name, meaning in (ASSETS | {name: f"`{text.data_set}` on the hub" for name, text in HUB.items()}).items():
        uses = [use for use, names in (("training", TRAINED), ("measurements", MEASURED)) if name in names]
        yield f"  {name} ({', '.join(uses)}): {meaning}"
    for name, task in PROMPT_PACKS.items():
        yield f"  {name} (captures): prompts and answers of RULER's `{task}`"


def _lines(section: dict[str, Any], parts: dict[str, Any], prefix: str) -> Iterator[str]:
    """A line for every key of a section and of the sections in it; `<name>` stands for the keys of a mapping."""
    for name, value in (section.get("properties", {}) | section.get("patternProperties", {})).items():
        key = prefix + name.replace("(_[a-z0-9]+)*$", "_<anything>").lstrip("^")
        meaning = " ".join(value.get("description", "").split())
        yield f"{key} ({_type_of(value)}): {meaning}".rstrip(": ")
        of_names = value.get("patternProperties", {}) if not value.get("properties") else {}
        inner = next(iter(of_names.values()), value)
        named = next((each["$ref"] for each in inner.get("anyOf", [inner]) if "$ref" in each), None)
        place = f"{key}.<name>." if of_names else f"{key}."
        yield from _lines(parts[named.rpartition("/")[2]] if named else inner, parts, place)


def _type_of(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(map(_type_of, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"{'one or more' if schema.get('minItems') else 'any number'} of: {_type_of(schema['items'])}"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{option}`" for option in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema or schema.get("type") == "object":
        return "section"
    title, plain = schema.get("title", ""), {"string": "text", "null": "`null`"}
    return title if title and title.islower() else plain.get(schema["type"], schema["type"])


if __name__ == "__main__":
    main(*sys.argv[1:2])
