"""The configuration's keys, read from its classes.

python -m residual_mass.study.reference           every key with its type and meaning, kinds of figures, texts
python -m residual_mass.study.reference config    the JSON schema of config/config.yaml, for an editor
python -m residual_mass.study.reference study     that of config/studies/*.yaml
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from residual_mass.spec import sections
from residual_mass.spec.figures import FIGURES
from residual_mass.spec.parsing import adapter, section_of
from residual_mass.spec.texts import ASSETS, HUB, MEASURED, PROMPT_PACKS, TRAINED
from residual_mass.study.config import Main, Study

SCHEMAS = {"config": Main, "study": Study}


def main(name: str = "") -> None:
    """Prints the schema of a file, or all keys if no name is given."""
    if name and name not in SCHEMAS:
        sys.exit(f"{name}: no such schema; there are {' and '.join(SCHEMAS)}")
    if name:
        print(json.dumps(schema_of(SCHEMAS[name]), indent=1, sort_keys=True))
    else:
        print("\n".join(_reference()))


def schema_of(cls: type[Any]) -> dict[str, Any]:
    """Returns the JSON schema of a file, with the meaning of every key."""
    schema = adapter(cls).json_schema()
    for name, part in schema["$defs"].items():
        for base in getattr(sections, name, cls).__mro__:  # pydantic does not read the docstrings of base classes
            for key, value in adapter(base).json_schema()["properties"].items() if is_dataclass(base) else ():
                if key in part["properties"]:
                    part["properties"][key] = value | part["properties"][key]
    return schema


def _reference() -> Iterator[str]:
    for file, name in (("config/config.yaml", "config"), ("config/studies/*.yaml", "study")):
        schema = schema_of(SCHEMAS[name])
        yield f"\n{file}"
        yield from _lines(schema, schema["$defs"], "  ")
    yield "\nFigures, by kind, with the keys of each"
    for name, kind in FIGURES.items():
        yield f"  {name}{'_<anything>' * kind.several}: {', '.join(kind.keys)}"
    yield "\nTexts"
    on_the_hub = {name: f"`{text.data_set}` on the hub" for name, text in HUB.items()}
    for name, meaning in (ASSETS | on_the_hub).items():
        uses = []
        if name in TRAINED:
            uses.append("training")
        if name in MEASURED:
            uses.append("measurements")
        yield f"  {name} ({', '.join(uses)}): {meaning}"
    for name, task in PROMPT_PACKS.items():
        yield f"  {name} (captures): prompts and answers of RULER's `{task}`"


def _lines(section: dict[str, Any], parts: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yields a line for every key of a section and of its sections; `<name>` stands for the keys of a mapping."""
    for name, value in section.get("properties", {}).items():
        meaning = " ".join(value.get("description", "").split())
        yield f"{prefix}{name} ({_type_of(value)}): {meaning}".rstrip(": ")
        mapping = {"patternProperties", "additionalProperties"} & value.keys()
        place = f"{prefix}{name}.<name>." if mapping else f"{prefix}{name}."
        yield from _lines(section_of(value, parts), parts, place)


def _type_of(schema: dict[str, Any]) -> str:
    """Returns a JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(map(_type_of, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"{'one or more' if schema.get('minItems') else 'any number'} of: {_type_of(schema['items'])}"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{option}`" for option in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "section")
    words = [{"string": "text", "null": "`null`"}.get(kind, kind)]
    for key, bound in (("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most")):
        if key in schema:
            words.append(f"{bound} {schema[key]:g}")
    return " ".join(words)


if __name__ == "__main__":
    main(*sys.argv[1:2])
