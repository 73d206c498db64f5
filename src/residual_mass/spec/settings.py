"""Settings of the method: anchors, and the shape and labels of the feature maps; and how specs become JSON.

Plain frozen dataclasses, so that the library needs no parser; the pipeline reads them with pydantic.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

MAPS_HEADER = "residual_mass_phi"
"""The only metadata key in the header of a file of feature maps: the library writes several in random order, and files
must be reproducible.
"""


class Settings:
    """Base of all settings parsed from YAML or JSON: refuses unknown keys and other types."""

    __pydantic_config__: ClassVar = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }


def to_json(settings: Any) -> str:
    """Serialises settings as one JSON object with sorted keys."""
    return json.dumps(settings, default=asdict, sort_keys=True)


def tokens_of(label: str) -> int:
    """Parses a length label: `"4k"` is 4096 tokens, `"512"` is 512."""
    match = re.fullmatch(r"([1-9][0-9]{0,11})(k?)", label)
    if match is None:
        raise ValueError(f"length {label!r} is not a length label: write 512, 1k, 64k, ...")
    return int(match[1]) * (1024 if match[2] else 1)


def length_and_variant(maps: str) -> tuple[str, str]:
    """Splits a maps label `<length>[-<variant>]` into training length and variant, empty for the study's own recipe."""
    length, _, variant = maps.partition("-")
    return length, variant


def maps_label(length: str, variant: str = "") -> str:
    """Inverse of `length_and_variant`."""
    return f"{length}-{variant}" if variant else length


@dataclass(frozen=True)
class AnchorSpec(Settings):
    """Positions that are always read exactly."""

    sink: int = 4
    """First positions of the prefix."""
    tail: int = 16
    """Last positions of the prefix."""

    def __post_init__(self) -> None:
        if min(self.sink, self.tail) < 0:
            raise ValueError(f"sink and tail are counts of tokens, not {self.sink} and {self.tail}")


@dataclass(frozen=True)
class MapSpec(Settings):
    """Shape of the feature maps."""

    kind: Literal["rezero", "hedgehog"] = "rezero"
    """Architecture."""
    d_emb: int = 512
    """Width of the hidden layer."""
    d_phi: int = 64
    """Number of features."""
    init: Literal["default", "positive_random_features"] = "default"
    """Initial weights."""

    def __post_init__(self) -> None:
        if min(self.d_emb, self.d_phi) < 1:
            raise ValueError(f"d_emb and d_phi are 1 or more, not {self.d_emb} and {self.d_phi}")


@dataclass(frozen=True)
class MapsSpec(Settings):
    """Feature maps that an evaluation uses."""

    label: str
    length: int
    """Longest context that they were trained on, in tokens."""
