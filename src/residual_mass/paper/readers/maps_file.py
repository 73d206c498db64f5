"""Headers of the files of feature maps: what the maps are and how they were trained; the weights stay on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import safetensors

from residual_mass.core.settings import MAPS_HEADER

OWN_RECIPE = "ours"
"""What a file calls maps of the study's own recipe, which have no variant in their label."""
REMEDY = "delete it and run the train stage again"

Shapes = dict[str, list[int]]
"""Of every tensor, by its name."""
T = TypeVar("T")


def load_maps_file(path: Path, what: str, read: Callable[[Any, Shapes], T]) -> T:
    """What `read` makes of the facts in the header of a file of feature maps and of the shapes of its tensors; `what`
    says in words what that is.

    Raises:
        ValueError: the file is missing or damaged, holds something else, or `read` cannot make sense of it.
    """
    metadata, shapes = _header(path)
    if MAPS_HEADER not in metadata:
        raise ValueError(f"{path}: holds no phi maps (no {MAPS_HEADER} in its header); train them with the train stage")
    try:
        return read(json.loads(metadata[MAPS_HEADER]), shapes)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: its header does not say {what} ({reason}); {REMEDY}") from None


def _header(path: Path) -> tuple[dict[str, str], Shapes]:
    """Metadata, and the shapes of the tensors."""
    try:
        with safetensors.safe_open(path, framework="numpy") as stream:
            names = stream.keys()
            return stream.metadata() or {}, {name: stream.get_slice(name).get_shape() for name in names}
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; run the train stage") from None
    except (safetensors.SafetensorError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: damaged safetensors file ({error}); {REMEDY}") from None
