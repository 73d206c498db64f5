"""Types of the configuration's values; a `title` is what `study.reference` calls the type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.study.sections.fields import AfterValidator, Field
from residual_mass.texts.names import MEASURED, TRAINED


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
