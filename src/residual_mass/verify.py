"""Checks results and their inputs against the hashes and recipes in their records; imports nothing heavy.
`snakemake -n` says whether the configuration would still make the same results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from residual_mass.files import read_json, sha256_of
from residual_mass.provenance import SUFFIX, sidecar_of
from residual_mass.recipes import RECIPES
from residual_mass.spec.paths import MANIFEST
from residual_mass.texts.assets import listed_in


def run(results: Sequence[Path] = (Path("results"),)) -> bool:
    """Prints one line for each result that differs from its record, and the number of results. Searches folders.
    Returns whether all results are as recorded.

    Raises:
        ValueError: a result is missing; names it.
    """
    hashed = cache(lambda path: sha256_of(path) if path.is_file() else None)  # results share inputs
    paths = [path for result in results for path in _results(result)]
    wrong = {path: problems for path in paths if (problems := "; ".join(_problems(path, hashed)))}
    for path, problems in wrong.items():
        print(f"{path}: {problems}")
    print(f"{len(paths) - len(wrong)} of {len(paths)} results are as recorded")
    return not wrong


def _results(path: Path) -> Iterator[Path]:
    """Yields a file, or every file below a folder that should have a record of its own. Skips files that the manifest
    of their folder lists, and names that begin with an underscore, which are working files.
    """
    if not path.is_dir():
        if not path.is_file() and not sidecar_of(path).is_file():
            raise ValueError(f"{path}: no such file or folder; name a result or a folder of results")
        yield path
    elif (path / MANIFEST).is_file():
        yield path / MANIFEST
    else:
        names = {file.name.removesuffix(SUFFIX) for file in path.iterdir() if not file.name.startswith(("_", "."))}
        for name in sorted(names):
            yield from _results(path / name)


def _problems(path: Path, hashed: Callable[[Path], str | None]) -> Iterator[str]:
    """Yields the differences between a result and its record: in the output files, in the input files, and in the
    recipe of its stage. The manifest of an assets folder is the record of the files that it lists.
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
    # Names are relative to a folder above the result, even after all files were moved together.
    name = Path(next((name for name in outputs if Path(name).name == path.name), path.name))
    place = Path(os.path.abspath(path))
    base = place.parents[len(name.parts) - 1] if place.parts[-len(name.parts) :] == name.parts else Path.cwd()
    for files, what in ((outputs, "differs from the record"), (inputs, "has changed since this was made from it")):
        for file, recorded in files.items():
            current = hashed(Path(os.path.normpath(base / os.path.expanduser(file))))
            if current != recorded:
                yield f"{file} is missing" if current is None else f"{file} {what}"
    if recipe != (now := RECIPES.get(stage)):
        yield f"made by recipe {recipe} of the stage {stage}, which has recipe {now}"
