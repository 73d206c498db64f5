"""Writes records for files that tests make by hand, as stages do for their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from residual_mass.files import sha256_of, write_json
from residual_mass.provenance import relative_name, sidecar_of
from residual_mass.spec.paths import MANIFEST


def record(*files: Path) -> None:
    """Writes the record of each file, so that stages take it for an output of another one."""
    for file in files:
        recorded(file)


def recorded(file: Path, **facts: Any) -> Path:
    """The file, with the record that its stage would leave beside it."""
    write_json(sidecar_of(file), {"outputs": {relative_name(file): sha256_of(file)}, **facts})
    return file


def give_manifest(assets: Path) -> None:
    """Makes a folder of assets complete: its manifest lists no file, so all of them are the user's own."""
    write_json(assets / MANIFEST, {"pins": {}, "files": []})
