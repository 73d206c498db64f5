"""Specs as one JSON object, parsed strictly.

Snakemake hands every stage its hyper-parameters as `--spec` (sorted JSON, so that a changed value, and only that,
reruns a job). An unknown, missing or ill-typed key is refused in one line that names it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections import Counter
from typing import Any, Literal, TypeVar

LONGEST = 80
"""Characters of a value that a message repeats."""

Spec = TypeVar("Spec")


def parse_spec(cls: type[Spec], text: str) -> Spec:
    """Parses the JSON object `text` into the dataclass `cls`.

    Raises:
        ValueError: not JSON, or a key is unknown, twice there, missing or of the wrong type, or a number is not finite;
            one line that names it.
    """
    try:
        data = json.loads(text, parse_constant=_no_number, object_pairs_hook=_without_repeats)
    except ValueError as error:  # also of a number with thousands of digits, which is none of JSON's own errors
        raise ValueError(f"--spec is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("--spec is nested too deeply") from None
    return _build(cls, data, "spec")


def parsed(cls: type[Spec], data: Any) -> Spec:
    """The dataclass `cls` of JSON data that is read already; raises ValueError as `parse_spec` does."""
    return _build(cls, data, cls.__name__)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of it")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a key stand twice and Python takes the last; here it is a slip."""
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise ValueError(f"the key {_shown(key)} stands {times} times in one object; leave one")
    return dict(pairs)


def _build(cls: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {_shown(data)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(set(data) - set(fields)):
        raise ValueError(f"{where}.{_name(unknown[0])}: unknown key; known keys are {', '.join(sorted(fields))}")
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
            raise ValueError(f"{where}: {_shown(value)} is not one of {', '.join(map(str, args))}")
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (inner,) = (a for a in args if a is not type(None))
        return _coerce(inner, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_coerce(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {_coerce(args[0], k, where): _coerce(args[1], v, f"{where}.{_name(k)}") for k, v in value.items()}
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _finite(value, where)
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        if hint is str and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{where}: {_shown(value)} holds half of a surrogate pair, which no file can")
        return value
    raise ValueError(f"{where}: {_shown(value)} is not of type {getattr(hint, '__name__', hint)}")


def _finite(value: int | float, where: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{where}: {_shown(value)} is not a finite number")
    return number


def _shown(value: Any) -> str:
    """As Python writes it, on one line, and not all of it where it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _name(key: str) -> str:
    """A key within a path of keys: as it is where that is plain."""
    return key if re.fullmatch(r"[\w.-]{1,80}", key) else _shown(key)


def to_json(spec: Any) -> str:
    """Sorted JSON of a spec dataclass; `parse_spec` of it gives the spec back."""
    return json.dumps(dataclasses.asdict(spec), sort_keys=True)
