"""Checks that results are the files that their records name, made from files that are as they were; imports nothing
heavy. Whether the configuration would still make them is what `snakemake -n` says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from residual_mass.files import read_json, sha256_of
from residual_mass.provenance import MANIFEST, SUFFIX, sidecar_of
from residual_mass.recipes import RECIPES
from residual_mass.texts.assets import listed_in


def run(results: Sequence[Path] = (Path("results"),)) -> bool:
    """Prints one line per result that is not as recorded, expanding folders, and the number of results; returns whether
    all are.

    Raises:
        ValueError: a result is missing; names it.
    """
    hashed = cache(lambda path: sha256_of(path) if path.is_file() else None)  # inputs are shared
    paths = [path for result in results for path in _results(result)]
    wrong = {path: found for path in paths if (found := "; ".join(_problems(path, hashed)))}
    for path, found in wrong.items():
        print(f"{path}: {found}")
    print(f"{len(paths) - len(wrong)} of {len(paths)} results are as recorded")
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


def _problems(path: Path, hashed: Callable[[Path], str | None]) -> Iterator[str]:
    """Yields what is not as the record of a result says: the files made with it, itself among them, the files that it
    was made from, and the recipe of its stage. The manifest of an assets folder is the record of what it lists.
    """
    try:
        if path.name == MANIFEST and "pins" in read_json(path):
            record = {"stage": "assets", "spec": {}, "inputs": {}, "outputs": listed_in(path)}
        else:
            record = read_json(sidecar_of(path))
        outputs, inputs, stage, recipe = (
            record["outputs"], record["inputs"], record["stage"], record["spec"].get("recipe"),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        yield f"has no record ({sidecar_of(path).name})"
        return
    # Names are relative to a folder above the result, also after all were moved together.
    name = Path(next((name for name in outputs if Path(name).name == path.name), path.name))
    place = Path(os.path.abspath(path))
    base = place.parents[len(name.parts) - 1] if place.parts[-len(name.parts) :] == name.parts else Path.cwd()
    for files, what in ((outputs, "differs from the record"), (inputs, "has changed since this was made from it")):
        for file, recorded in files.items():
            found = hashed(Path(os.path.normpath(base / os.path.expanduser(file))))
            if found != recorded:
                yield f"{file} is missing" if found is None else f"{file} {what}"
    if recipe != (now := RECIPES.get(stage)):
        yield f"made by recipe {recipe} of the stage {stage}, which has recipe {now}"
