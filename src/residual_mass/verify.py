"""Checks results and their inputs against the hashes and recipes in their records; imports nothing heavy.
`snakemake -n` says whether the configuration would still make the same results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from residual_mass.files import read_json, sha256_of
from residual_mass.provenance import RECORD_SUFFIX, sidecar_of
from residual_mass.recipes import RECIPES
from residual_mass.spec.paths import MANIFEST
from residual_mass.texts.assets import listed_in


def run(results: Sequence[Path] = (Path("results"),)) -> bool:
    """Prints one line for each result that differs from its record, and the number of results. Searches folders.
    Returns whether all results are as recorded.

    Raises:
        ValueError: a result is missing; names it.
    """
    paths: list[Path] = []
    for result in results:
        paths += results_of(result)
    num_right = 0
    lines = []
    hashed = cache(_hash_of)  # results share inputs
    for path in paths:
        differences = list(_differences(path, hashed))
        if differences:
            lines.append(f"{path}: {'; '.join(differences)}")
        else:
            num_right += 1
    for line in lines:
        print(line)
    print(f"{num_right} of {len(paths)} results are as recorded")
    return num_right == len(paths)


def _hash_of(path: Path) -> str | None:
    return sha256_of(path) if path.is_file() else None


def results_of(path: Path) -> Iterator[Path]:
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
        shown = [file.name for file in path.iterdir() if not file.name.startswith(("_", "."))]
        names = {name.removesuffix(RECORD_SUFFIX) for name in shown}
        for name in sorted(names):
            yield from results_of(path / name)


def _differences(path: Path, hashed: Callable[[Path], str | None]) -> Iterator[str]:
    """Yields the differences between a result and its record: in the output files, in the input files, and in the
    recipe of its stage. The manifest of an assets folder is the record of the files that it lists.
    """
    try:
        if path.name == MANIFEST and "pins" in read_json(path):
            record = {"stage": "assets", "spec": {}, "inputs": {}, "outputs": listed_in(path)}
        else:
            record = read_json(sidecar_of(path))
        outputs = record["outputs"]
        inputs = record["inputs"]
        stage = record["stage"]
        recipe = record["spec"].get("recipe")
    except (ValueError, KeyError, TypeError):
        yield f"has no record ({sidecar_of(path).name})"
        return
    base = _base_of(path, outputs)
    for files, what in ((outputs, "differs from the record"), (inputs, "has changed since this was made from it")):
        for file, recorded in files.items():
            place = os.path.normpath(base / os.path.expanduser(file))
            current = hashed(Path(place))
            if current is None:
                yield f"{file} is missing"
            elif current != recorded:
                yield f"{file} {what}"
    current_recipe = RECIPES.get(stage)
    if recipe != current_recipe:
        yield f"made by recipe {recipe} of the stage {stage}, which has recipe {current_recipe}"


def _base_of(path: Path, outputs: Mapping[str, str]) -> Path:
    """Returns the folder that the names in a result's record are relative to. It is above the result, even after all
    files were moved together.
    """
    names = [Path(name) for name in outputs if Path(name).name == path.name]
    name = names[0] if names else Path(path.name)
    place = Path(os.path.abspath(path))
    depth = len(name.parts)
    if place.parts[-depth:] == name.parts:
        return place.parents[depth - 1]
    return Path.cwd()
