"""Specs as one JSON object, parsed strictly.

Snakemake hands every stage its hyper-parameters as `--spec` (sorted JSON, so that a changed value, and only that,
reruns a job). An unknown, missing or ill-typed key is refused in one line that names it.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, Literal, TypeVar

Spec = TypeVar("Spec")


def parse_spec(cls: type[Spec], text: str) -> Spec:
    """Parses the JSON object `text` into the dataclass `cls`.

    Raises:
        ValueError: not JSON, or a key is unknown, missing or of the wrong type; the message names it.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--spec is not JSON: {error}") from None
    return _build(cls, data, "spec")


def _build(cls: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {data!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(set(data) - set(fields)):
        raise ValueError(f"{where}.{unknown[0]}: unknown key; known keys are {', '.join(sorted(fields))}")
    required = {
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - set(data)):
        raise ValueError(f"{where}.{missing[0]}: missing key")
    hints = typing.get_type_hints(cls)
    return cls(**{name: _coerce(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _coerce(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where}: {value!r} is not one of {', '.join(map(str, args))}")
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (inner,) = (a for a in args if a is not type(None))
        return _coerce(inner, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_coerce(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {str(k): _coerce(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{where}: {value!r} is not of type {getattr(hint, '__name__', hint)}")


def to_json(spec: Any) -> str:
    """Sorted JSON of a spec dataclass; `parse_spec` of it gives the spec back."""
    return json.dumps(dataclasses.asdict(spec), sort_keys=True)
