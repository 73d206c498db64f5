"""Checks that results are the files that their records name, made from files that are as they were; imports nothing
heavy. Whether the configuration would still make them is what `snakemake -n` says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from residual_mass.files import read_json, sha256_of
from residual_mass.provenance import MANIFEST, SUFFIX, sidecar_of
from residual_mass.recipes import RECIPES
from residual_mass.texts.assets import listed_in

Hashed = Callable[[Path], str | None]
"""Returns the sha256 of a file; None where there is none."""


def run(results: Sequence[Path] = (Path("results"),), /) -> bool:
    """Prints one line per result that is not as recorded, expanding folders, and the number of results; returns whether
    all are.

    Raises:
        ValueError: a result is missing; names it.
    """
    hashed: Hashed = cache(lambda path: sha256_of(path) if path.is_file() else None)  # inputs are shared
    paths = [path for result in results for path in _results(result)]
    wrong = 0
    for path in paths:
        if found := [*_problems(path, hashed)]:
            wrong += 1
            print(f"{path}: {'; '.join(found)}")
    print(f"{len(paths) - wrong} of {len(paths)} results are as recorded")
    return not wrong


def _results(path: Path) -> Iterator[Path]:
    """Yields a file, or every file below a folder that has or should have a record of its own: not those that the
    manifest of their folder lists, nor working files, whose folders begin with an underscore.
    """
    if not path.is_dir():
        if not path.is_file() and not sidecar_of(path).is_file():
            raise ValueError(f"{path}: no such file or folder; name a result or a folder of results")
        yield path
    elif (path / MANIFEST).is_file():
        yield path / MANIFEST
    else:
        names = {each.name.removesuffix(SUFFIX) for each in path.iterdir() if not each.name.startswith(("_", "."))}
        for name in sorted(names):
            yield from _results(path / name)


def _problems(path: Path, hashed: Hashed) -> Iterator[str]:
    """Yields what is not as the record of a result says: the files made with it, itself among them, the files that it
    was made from, and the recipe of its stage.
    """
    try:
        record = _assets_record(path) or read_json(sidecar_of(path))
        outputs, inputs, recipe = record["outputs"], record["inputs"], record["spec"].get("recipe")
    except (ValueError, KeyError, TypeError):
        yield f"has no record ({sidecar_of(path).name})"
        return
    base = _base(path, next((name for name in outputs if Path(name).name == path.name), path.name))
    for files, what in ((outputs, "differs from the record"), (inputs, "has changed since this was made from it")):
        for name, recorded in files.items():
            found = hashed(Path(os.path.normpath(base / os.path.expanduser(name))))
            if found != recorded:
                yield f"{name} is missing" if found is None else f"{name} {what}"
    if recipe != (now := RECIPES.get(record["stage"])):
        yield f"made by recipe {recipe} of the stage {record['stage']}, which has recipe {now}"


def _assets_record(path: Path) -> dict[str, Any] | None:
    """The manifest of an assets folder is the record of the files that it lists."""
    if path.name != MANIFEST or "pins" not in read_json(path):
        return None
    return {"stage": "assets", "spec": {}, "inputs": {}, "outputs": listed_in(path)}


def _base(path: Path, name: str) -> Path:
    """Returns the folder to which the names of a record are relative, even after all were moved together."""
    parts, place = Path(name).parts, Path(os.path.abspath(path))
    return place.parents[len(parts) - 1] if place.parts[-len(parts) :] == parts else Path.cwd()
