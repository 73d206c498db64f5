"""How pydantic reads sections and specs from YAML and JSON, and the one line that refuses a wrong key."""

from __future__ import annotations

import json
import reprlib
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

Parsed = TypeVar("Parsed")
UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")
"""Types of pydantic's errors for an unknown key."""


@cache
def adapter(settings: type[Parsed]) -> TypeAdapter[Parsed]:
    from pydantic import TypeAdapter  # only here: the GPU check makes its specs without it

    return TypeAdapter(settings)


def parsed(settings: type[Parsed], data: Any, where: str = "") -> Parsed:
    """Returns `data`, which is JSON text or the values of YAML or JSON, as an instance of `settings`.

    Args:
        where: prefix of the keys in messages.

    Raises:
        ValueError: a key is unknown, missing or wrong; one line that names it.
    """
    from pydantic import ValidationError

    try:
        instance = adapter(settings).validate_json(data if isinstance(data, str) else json.dumps(data))
        if isinstance(data, str):
            json.loads(data, object_pairs_hook=_without_doubles)
    except ValidationError as error:
        raise ValueError(_message(settings, error, where)) from None
    except (TypeError, ValueError) as error:  # for example a date in YAML
        raise ValueError(f"{where}not a value of JSON ({error})") from None
    return instance


def _without_doubles(pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key} comes twice")


def _message(settings: type[Any], error: ValidationError, where: str) -> str:
    errors = error.errors(include_url=False)
    unknown = [each for each in errors if each["type"] in UNKNOWN_KEY]
    first = unknown[0] if unknown else errors[0]  # the key that a typo replaces is missing, too
    path = [" ".join(str(part).split()) for part in first["loc"] if part != "[key]"]
    place = f"{where}{'.'.join(path)}".rstrip(".: ")
    words = {"missing": "missing key", "value_error": str(first.get("ctx", {}).get("error"))}
    if first["type"] in UNKNOWN_KEY:
        section = schema = adapter(settings).json_schema()
        for name in path[:-1]:
            if name in section.get("properties", {}):
                section = section_of(section["properties"][name], schema["$defs"])
        similar = get_close_matches(path[-1], section.get("properties", {}), n=1)
        words[first["type"]] = f"unknown key (did you mean {similar[0]}?)" if similar else "unknown key"
    other = f"{first['msg']}, not {reprlib.repr(first['input'])}"
    problem = words.get(first["type"]) or other
    if place:
        problem = f"{place}: {problem}"
    return f"{problem}; `python -m residual_mass.study.reference` explains the keys"


def section_of(key: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of the section that a key or each value of its mapping holds; empty if there is none."""
    of_mapping = [*key.get("patternProperties", {}).values(), key.get("additionalProperties")]
    inner = of_mapping[0] or key
    for option in inner.get("anyOf", [inner]):
        if "$ref" in option:
            return sections.get(option["$ref"].rpartition("/")[2], {})
    return {}
