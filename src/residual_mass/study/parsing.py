"""YAML and JSON as frozen dataclasses, by pydantic; what is wrong is one line that names the key."""

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


class Slip(ValueError):
    """What is wrong with the value of a key, seen from the section that found it."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.key, self.problem = key, problem


@cache
def adapter(settings: type[Parsed]) -> TypeAdapter[Parsed]:
    from pydantic import TypeAdapter  # not before: the GPU check makes its specs without it

    return TypeAdapter(settings)


def parsed(settings: type[Parsed], data: Any) -> Parsed:
    """`data`, as YAML or JSON has it, as an instance of a class of settings.

    Raises:
        Slip: a key is unknown, missing or wrong; names it.
    """
    from pydantic import ValidationError

    try:
        return adapter(settings).validate_json(json.dumps(data))
    except ValidationError as error:
        raise _slip_of(error) from None
    except (TypeError, ValueError) as error:  # a date in YAML, for one
        raise Slip("", f"not a value of JSON ({error})") from None


def _slip_of(error: ValidationError) -> Slip:
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] in UNKNOWN), errors[0])  # a typo leaves its key missing, too
    path = [" ".join(str(part).split()) for part in first["loc"] if part != "[key]"]
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, Slip):
        return Slip(".".join([*path, *filter(None, [reason.key])]), reason.problem)
    known = dict.fromkeys(UNKNOWN, "unknown key") | {"missing": "missing key"}
    given = reprlib.repr(first["input"])
    problem = str(reason) if reason else known.get(first["type"], f"{first['msg']}, not {given}")
    return Slip(".".join(path), f"{problem}; config/README.md explains the keys")
