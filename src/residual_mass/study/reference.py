"""The configuration's keys, read from its classes.

python -m residual_mass.study.reference           every key with its type and meaning, the figures' too, and the texts
python -m residual_mass.study.reference config    the JSON schema of config/config.yaml, for an editor
python -m residual_mass.study.reference study     that of config/studies/*.yaml
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pydantic import TypeAdapter

from residual_mass.core import settings
from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.study import config, protocol
from residual_mass.study.config import Main
from residual_mass.study.parsing import adapter
from residual_mass.study.protocol import Study
from residual_mass.study.sections import backbones, diagnostics, evaluation, training
from residual_mass.study.sections.figures import FIGURES, Figure
from residual_mass.texts.names import ASSETS, HUB, MEASURED, TRAINED

DECLARED_IN = (backbones, training, evaluation, diagnostics, protocol, config, settings)
"""The modules of the classes that describe the two files."""
SCHEMAS = {"config": Main, "study": Study}


def main(name: str = "") -> None:
    """Prints a file's schema, or without a name all keys."""
    if name and name not in SCHEMAS:
        sys.exit(f"{name}: no such schema; there are {' and '.join(SCHEMAS)}")
    print(json.dumps(schema_of(SCHEMAS[name]), indent=1, sort_keys=True) if name else "\n".join(_reference()))


def schema_of(cls: type[Any]) -> dict[str, Any]:
    """The JSON schema of a file, with the meaning of every key."""
    schema = adapter(cls).json_schema()
    for name, part in [(cls.__name__, schema), *schema.get("$defs", {}).items()]:
        described = meanings(_class_named(name.removeprefix("Changes_of_")))
        for key, value in part["properties"].items():
            value |= {"description": described[key]} if key in described else {}
    if cls is Study:
        schema["properties"]["figures"] |= _figures_schema()
    return schema


def _class_named(name: str) -> type[Any]:
    """A class of settings by its name in a schema; that of maps and recipes is a part of Phi."""
    return next((vars(module)[name] for module in DECLARED_IN if name in vars(module)), training.Phi)


def _figures_schema() -> dict[str, Any]:
    every, described = TypeAdapter(Figure).json_schema(), meanings(Figure)
    schemas: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for name, kind in FIGURES.items():
        keys = {key: every["properties"][key] | {"description": described[key]} for key in kind.keys}
        schema = every | {"properties": keys, "required": list(kind.keys), "description": kind.meaning}
        schemas[kind.several][f"^{name}(_[a-z0-9]+)*$" if kind.several else name] = schema
    return {"properties": schemas[False], "patternProperties": schemas[True], "additionalProperties": False}


def meanings(cls: type[Any]) -> dict[str, str]:
    """The text below each field of a dataclass; of a section, what its own class says."""
    found: dict[str, str] = {}
    for base in (base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, below in pairwise(body):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
                found[field.target.id] = " ".join(text.split())
    return found


# ---- keys ------------------------------------------------------------------------------------------------------------


def _reference() -> Iterator[str]:
    for file, name in (("config/config.yaml", "config"), ("config/studies/*.yaml", "study")):
        schema = schema_of(SCHEMAS[name])
        yield f"\n{file}"
        yield from _lines(schema, schema.get("$defs", {}), "  ")
    yield "\nTexts"
    what = ASSETS | {name: f"`{text.data_set}` on the hub" for name, text in HUB.items()}
    for name, meaning in what.items():
        uses = [use for use, names in (("training", TRAINED), ("measurements", MEASURED)) if name in names]
        yield f"  {name} ({', '.join(uses)}): {meaning}"
    for name, task in PROMPT_PACKS.items():
        yield f"  {name} (captures): prompts and answers of RULER's `{task}`"


def _lines(schema: dict[str, Any], parts: dict[str, Any], prefix: str) -> Iterator[str]:
    """A line for every key of a section and of the sections in it; `<name>` stands for the keys of a mapping."""
    entries = schema.get("properties", {}) | schema.get("patternProperties", {})
    for name, value in entries.items():
        key = prefix + name.replace("(_[a-z0-9]+)*$", "_<anything>").lstrip("^")
        section, place = _section(value, parts), f"{key}."
        if len(named := [*section.get("patternProperties", {}).values()]) == 1:
            section, place = _section(named[0], parts), f"{key}.<name>."
        if "properties" not in section or "anyOf" in value:
            yield f"{key} ({_type_of(value)}): {value.get('description', '')}"
        elif "description" in value:
            yield f"{key}: {value['description']}"
        yield from _lines(section, parts, place)


def _section(value: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """What a value refers to, also where it may be null; else the value itself."""
    named = next((each for each in value.get("anyOf", [value]) if "$ref" in each), None)
    return parts[named["$ref"].rpartition("/")[2]] if named else value


def _type_of(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(map(_type_of, schema["anyOf"]))
    if "$ref" in schema or schema.get("type") == "object":
        return "section"
    if schema.get("type") == "array":
        inner = _type_of(schema["items"])
        return f"{'one or more' if schema.get('minItems') else 'any number'} of: {inner}"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{option}`" for option in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "null":
        return "`null`"
    title, plain = schema.get("title", ""), {"string": "text", "integer": "integer", "number": "number"}
    return title if title and title.islower() else plain.get(schema.get("type", ""), schema.get("type", "value"))


if __name__ == "__main__":
    main(*sys.argv[1:2])
