"""Types of the configuration's values; a `title` is what config/README.md calls the type."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field


def _unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if repeated := next((value for value in values if values.count(value) > 1), None):
        raise ValueError(f"has {repeated} twice; remove one")
    return values


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
CorpusName = Annotated[str, Field(pattern=r"^[a-z0-9]+$", title="corpus")]
Label = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", title="label")]
Distinct = Annotated[tuple[Item, ...], AfterValidator(_unique), Field(json_schema_extra={"uniqueItems": True})]
OneOrMore = Annotated[
    tuple[Item, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True}), AfterValidator(_unique)
]
