"""Makes a Python with this folder in PYTHONPATH behave as on a bare machine: it finds only torch, triton, transformers,
safetensors, numpy, their dependencies, and the packages named in BARE_MACHINE_HAS.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from packaging.requirements import Requirement

PRESENT = ["torch", "triton", "transformers", "safetensors", "numpy", *os.environ.get("BARE_MACHINE_HAS", "").split()]
LATELY_NEEDED = {"pydantic"}
"""By the newest versions of these alone."""


def needed(names: list[str]) -> set[str]:
    """Distributions with these names, and all that they need."""
    found: set[str] = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found | LATELY_NEEDED:
            continue
        try:
            requirements = [Requirement(line) for line in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        names += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


KEPT = needed(PRESENT)
HIDDEN = {
    module
    for module, owners in metadata.packages_distributions().items()
    if not any(re.sub(r"[-_.]+", "-", owner).lower() in KEPT for owner in owners) and module != "residual_mass"
}
VENDORED = [os.path.join(folder, "setuptools", "_vendor") for folder in sys.path]
find_spec = PathFinder.find_spec


def find_what_is_there(cls: type, name: str, *more: Any) -> ModuleSpec | None:
    if name in HIDDEN:  # but for the copies within setuptools, which torch needs to compile
        return find_spec(name, VENDORED)
    return find_spec(name, *more)


PathFinder.find_spec = classmethod(find_what_is_there)  # type: ignore[assignment]
