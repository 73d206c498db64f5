"""The manifest of an assets folder: the wheels that the folder is made of, and its files with their sha256."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residual_mass.files import read_json, write_json


@dataclass(frozen=True)
class AssetsManifest:
    """What a manifest says.

    Attributes:
        pins: version of each wheel.
        files: sha256 of each file by its path in the folder.
    """

    pins: dict[str, str]
    files: dict[str, str]


def read_assets_manifest(path: Path) -> AssetsManifest | None:
    """The manifest at `path`; None where the file is missing, damaged or something else, as the manifest of prompts."""
    try:
        content = read_json(path)
        files = {str(entry["path"]): str(entry["sha256"]) for entry in content["files"]}
        return AssetsManifest(content["pins"], files)
    except (ValueError, KeyError, TypeError):
        return None


def write_assets_manifest(path: Path, pins: dict[str, str], files: list[dict[str, Any]]) -> None:
    """Writes the manifest.

    Args:
        files: `path` and `sha256` of each file, and what else is known of it.
    """
    write_json(path, {"pins": pins, "files": sorted(files, key=lambda entry: entry["path"])})
