"""Values of the configuration and of specs: their types, and YAML and JSON parsed as frozen dataclasses by pydantic."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.texts.names import MEASURED, TRAINED

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

try:
    from pydantic import AfterValidator, Field
except ModuleNotFoundError:  # the GPU check makes specs without it; there these marks mean nothing

    def AfterValidator(check: object) -> object:  # type: ignore[no-redef]  # noqa: N802
        return check

    def Field(**bounds: object) -> object:  # type: ignore[no-redef]  # noqa: N802
        return bounds


def _unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if repeated := next((value for value in values if values.count(value) > 1), None):
        raise ValueError(f"has {repeated} twice; remove one")
    return values


def _one_of(names: Sequence[str]) -> Any:
    """The type of a text that is one of these names."""

    def known(name: str) -> str:
        if name not in names:
            raise ValueError(f"{name} is not one of {', '.join(names)}")
        return name

    return Annotated[str, AfterValidator(known), Field(json_schema_extra={"enum": list(names)})]


Item = TypeVar("Item")
Count = Annotated[int, Field(ge=1, title="count")]
Natural = Annotated[int, Field(ge=0, title="integer")]
Positive = Annotated[float, Field(gt=0, title="number")]
NotNegative = Annotated[float, Field(ge=0, title="number")]
Share = Annotated[float, Field(gt=0, le=1, title="share")]
Percent = Annotated[float, Field(gt=0, le=100, title="percent")]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", title="text")]
Length = Annotated[str, Field(pattern=r"^[1-9][0-9]*k?$", title="length")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", title="name")]
ShortName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", title="short name")]
TrainedText = _one_of(TRAINED)
HeldOutText = _one_of(MEASURED)
MeasuredText = _one_of((*MEASURED, *PROMPT_PACKS))
Label = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", title="label")]
Distinct = Annotated[tuple[Item, ...], AfterValidator(_unique), Field(json_schema_extra={"uniqueItems": True})]
OneOrMore = Annotated[
    tuple[Item, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True}), AfterValidator(_unique)
]


# ---- parsing ---------------------------------------------------------------------------------------------------------

Parsed = TypeVar("Parsed")
UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
"""Types of pydantic's errors."""


class ConfigError(ValueError):
    """What is wrong with the value of a key, as seen from the section that found it."""

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
        ConfigError: a key is unknown, missing or wrong; names it.
    """
    from pydantic import ValidationError

    try:
        return adapter(settings).validate_json(json.dumps(data))
    except ValidationError as error:
        raise _first_of(error) from None
    except (TypeError, ValueError) as error:  # a date in YAML, for one
        raise ConfigError("", f"not a value of JSON ({error})") from None


def _first_of(error: ValidationError) -> ConfigError:
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] in UNKNOWN), errors[0])  # a typo leaves its key missing, too
    path = [" ".join(str(part).split()) for part in first["loc"] if part != "[key]"]
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, ConfigError):
        return ConfigError(".".join([*path, *filter(None, [reason.key])]), reason.problem)
    known = dict.fromkeys(UNKNOWN, "unknown key") | {"missing": "missing key"}
    problem = str(reason) if reason else known.get(first["type"])
    problem = problem or f"{first['msg']}, not {reprlib.repr(first['input'])}"
    return ConfigError(".".join(path), f"{problem}; `python -m residual_mass.study.reference` explains the keys")
