"""Records of files that a test makes in place of a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from residual_mass.files import sha256_of, write_json
from residual_mass.provenance import beside


def recorded(path: Path, **facts: Any) -> Path:
    """The file, with the record that its stage would leave beside it."""
    write_json(beside(path), {"outputs": {path.name: sha256_of(path)}, **facts})
    return path
