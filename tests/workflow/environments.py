"""Environments of other packages than this one's."""

from __future__ import annotations

import re
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path


def linked_environment(folder: Path, takes: Callable[[str], bool], with_pip: bool = False) -> str:
    """Makes an environment with links to packages of this one.

    Args:
        takes: whether it has a package, by the name of a folder or a file in site-packages up to its version.

    Returns:
        The path of its Python.
    """
    venv.create(folder, with_pip=with_pip)
    (own,) = folder.glob("lib/python*/site-packages")
    for scheme in ("purelib", "platlib"):
        for path in Path(sysconfig.get_path(scheme)).iterdir():
            if takes(re.split(r"[-.]", path.name)[0]) and not (own / path.name).exists():
                (own / path.name).symlink_to(path)
    return str(folder / "bin" / "python")
