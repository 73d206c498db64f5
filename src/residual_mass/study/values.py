"""How pydantic reads the configuration and specs."""

from __future__ import annotations

import json
import reprlib
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

Parsed = TypeVar("Parsed")
UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
"""Types of pydantic's errors."""


@cache
def adapter(settings: type[Parsed]) -> TypeAdapter[Parsed]:
    from pydantic import TypeAdapter  # not before: the GPU check makes its specs without it

    return TypeAdapter(settings)


def parsed(settings: type[Parsed], data: Any, where: str = "") -> Parsed:
    """`data`, JSON text or values as YAML and JSON have them, as an instance of a class of settings.

    Args:
        where: what precedes the keys in messages.

    Raises:
        ValueError: a key is unknown, missing or wrong; one line that names it.
    """
    from pydantic import ValidationError

    try:
        text = data if isinstance(data, str) else json.dumps(data)
        found = adapter(settings).validate_json(text)
        json.loads(text, object_pairs_hook=_without_doubles)
    except ValidationError as error:
        raise ValueError(_message(error, where)) from None
    except (TypeError, ValueError) as error:  # a date in YAML, for one
        raise ValueError(f"{where}not a value of JSON ({error})") from None
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    if doubled := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"key {doubled} comes twice")


def _message(error: ValidationError, where: str) -> str:
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] in UNKNOWN), errors[0])  # a typo leaves its key missing, too
    path = [" ".join(str(part).split()) for part in first["loc"] if part != "[key]"]
    place = f"{where}{'.'.join(path)}".rstrip(".: ")
    words = {"missing": "missing key", "value_error": str(first.get("ctx", {}).get("error"))}
    words |= dict.fromkeys(UNKNOWN, "unknown key")
    problem = words.get(first["type"]) or f"{first['msg']}, not {reprlib.repr(first['input'])}"
    hint = "`python -m residual_mass.study.reference` explains the keys"
    return f"{f'{place}: ' if place else ''}{problem}; {hint}"
