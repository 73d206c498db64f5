"""The configuration's classes as documentation: `python -m residual_mass.study.reference` writes the tables of
config/README.md and the JSON schemas in config/schemas, which editors read.
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
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter

from residual_mass.core import settings
from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.files import write_text
from residual_mass.inputs.hub_data import HUB
from residual_mass.inputs.texts import ASSETS, MEASURED, TRAINED
from residual_mass.study import config, protocol
from residual_mass.study.config import Configuration, Main, load
from residual_mass.study.parsing import adapter
from residual_mass.study.protocol import Study
from residual_mass.study.sections import backbones, diagnostics, evaluation, training
from residual_mass.study.sections.figures import FIGURES, SEVERAL

DECLARED_IN = (backbones, training, evaluation, diagnostics, protocol, config, settings)
"""The modules whose classes the two files are made of."""
SCHEMAS = {"config": Main, "study": Study}
COLUMNS = "| key | type | mini | paper | meaning |\n|---|---|---|---|---|\n"
START, END = "<!-- {name}: written by `python -m residual_mass.study.reference` -->\n", "<!-- end -->\n"


def main(root: Path = Path()) -> None:
    """Writes the schemas and the tables of a checkout."""
    for name, cls in SCHEMAS.items():
        write_text(root / f"config/schemas/{name}.schema.json", schema_text(cls))
    readme = root / "config/README.md"
    write_text(readme, with_tables(readme.read_text(encoding="utf-8"), root))


# ---- schemas ---------------------------------------------------------------------------------------------------------


def schema_text(cls: type[Any]) -> str:
    return json.dumps(schema_of(cls), indent=1, sort_keys=True) + "\n"


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
    schemas = {}
    for kind, (shown, meaning) in FIGURES.items():
        schemas[kind] = TypeAdapter(shown).json_schema() | {"description": meaning}
    several = {f"^{kind}(_[a-z0-9]+)*$": schemas.pop(kind) for kind in SEVERAL}
    return {"properties": schemas, "patternProperties": several, "additionalProperties": False}


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


# ---- tables ----------------------------------------------------------------------------------------------------------


def with_tables(readme: str, root: Path) -> str:
    """The text with its tables as the classes and the two studies have them."""
    whole = load(root, yaml.safe_load((root / "config/config.yaml").read_text(encoding="utf-8")))
    tables = {
        "config.yaml": COLUMNS + "".join(_rows(Main, *_mains(whole))),
        "studies": COLUMNS + "".join(_rows(Study, *(dataclasses.asdict(whole.studies[n]) for n in ("mini", "paper")))),
        "texts": "| text | is | used for |\n|---|---|---|\n" + "".join(_text_rows()),
        "figures": "| figure | shows | keys |\n|---|---|---|\n" + "".join(_figure_rows()),
    }
    for name, table in tables.items():
        before, _, rest = readme.partition(START.format(name=name))
        readme = before + START.format(name=name) + table + END + rest.partition(END)[2]
    return readme


def _mains(whole: Configuration) -> Iterator[dict[str, Any]]:
    """`config.yaml` as each study sees it: with its own backbones alone."""
    values = {field.name: getattr(whole.main, field.name) for field in dataclasses.fields(Main)}
    for study in ("mini", "paper"):
        backbones = {name: dataclasses.asdict(whole.main.backbones[name]) for name in whole.backbones_of(study)}
        yield values | {"study": study, "backbones": backbones, "ablations": dataclasses.asdict(whole.main.ablations)}


def _rows(cls: type[Any], mini: Any, paper: Any, prefix: str = "") -> Iterator[str]:
    """A row for every key, sections spread out; `<name>` stands for the keys of a mapping."""
    properties, described = adapter(cls).json_schema(), meanings(cls)
    hints = get_type_hints(cls)
    for name, value in properties["properties"].items():
        key, inner = f"{prefix}{name}", hints[name]
        of_each = next((each for each in get_args(inner) if dataclasses.is_dataclass(each)), None)
        if dataclasses.is_dataclass(inner):
            yield from _rows(inner, _within(mini, name), _within(paper, name), f"{key}.")
        elif get_origin(inner) is dict and of_each:
            yield _row(f"{key}.<name>", "section", _names(mini[name]), _names(paper[name]), described.get(name, ""))
            both = ({each: _each(values[name], each) for each in _fields(of_each)} for values in (mini, paper))
            yield from _rows(of_each, *both, f"{key}.<name>.")
        elif name != "figures":
            yield _row(key, _type_of(value), _shown(_within(mini, name)), _shown(_within(paper, name)), described[name])


def _row(key: str, kind: str, mini: str, paper: str, meaning: str) -> str:
    return f"| `{key}` | {kind} | {mini} | {'the same' if paper == mini and len(mini) > 20 else paper} | {meaning} |\n"


def _fields(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _within(values: Any, name: str) -> Any:
    return values[name] if isinstance(values, dict) else None


def _each(entries: dict[str, Any], name: str) -> Any:
    """A key's one value in all entries, or what each has."""
    values = {entry: content[name] for entry, content in entries.items()}
    distinct = {json.dumps(value) for value in values.values()}
    return next(iter(values.values())) if len(distinct) == 1 else values


def _names(entries: dict[str, Any]) -> str:
    return ", ".join(entries)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "; ".join(f"{name}: {_shown(each)}" for name, each in value.items()) if _is_flat(value) else _names(value)
        )
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "none"
    if value is None or isinstance(value, bool):
        return f"`{json.dumps(value)}`"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_flat(value: dict[str, Any]) -> bool:
    return not any(isinstance(each, dict) for each in value.values())


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


def _text_rows() -> Iterator[str]:
    what = ASSETS | {name: f"`{text.path}` on the hub" for name, text in HUB.items()}
    for name, meaning in what.items():
        uses = [use for use, names in (("training", TRAINED), ("measurements", MEASURED)) if name in names]
        yield f"| `{name}` | {meaning} | {', '.join(uses)} |\n"
    for name, task in PROMPT_PACKS.items():
        yield f"| `{name}` | prompts and answers of RULER's `{task}` | captures |\n"


def _figure_rows() -> Iterator[str]:
    for kind, (shown, meaning) in FIGURES.items():
        keys = "; ".join(f"`{name}`: {text}" for name, text in meanings(shown).items())
        yield f"| `{kind}{'_<anything>' if kind in SEVERAL else ''}` | {meaning} | {keys} |\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
