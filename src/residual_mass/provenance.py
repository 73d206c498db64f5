"""Records of how results were made: every stage writes a sidecar `<result>.meta.json` next to its output.

Sidecars may hold times and machines, because no rule has one as input. They name files relative to the working
directory and hold no environment variables, so neither tokens nor home directories.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residual_mass import __version__
from residual_mass.files import REMAKE, read_json, sha256_of, write_json
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.settings import to_json

if TYPE_CHECKING:
    import torch

RECORD_SUFFIX = ".meta.json"
PACKAGES = (
    "residual-mass torch triton transformers tokenizers safetensors huggingface_hub lm_eval datasets nltk numpy pandas "
    "pyarrow matplotlib snakemake"
).split()


class Record:
    """Spec, inputs and machine of one run of a stage. Create it before the work: its clock starts here, and it hashes
    the inputs as the stage finds them.
    """

    def __init__(self, stage: str, spec: Any, inputs: Iterable[Path | None], sources: Iterable[Path] = ()) -> None:
        """
        Args:
            stage: name of the stage, as in `recipes.RECIPES` if it has a recipe.
            spec: a spec dataclass or a mapping; empty for a stage without a spec.
            inputs: outputs of other stages, checked by `recorded`; None for an optional input that is not given.
            sources: files of the repository that the stage reads, such as templates.

        Raises:
            ValueError: an input is missing, has no record or differs from it.
        """
        self._started = time.monotonic()
        checked = {relative_name(path): recorded(path) for path in inputs if path is not None}
        found = [path for path in sources if path.is_file()]
        versions = {name: _version(name) for name in PACKAGES}
        fields = dict(spec) if isinstance(spec, Mapping) else json.loads(to_json(spec))
        self._content = {
            "stage": stage,
            "spec": fields,
            "inputs": checked | _hashes(found),
            "code": code_version(),
            "packages": {name: version for name, version in versions.items() if version},
            "machine": _machine(),
        }

    def write(
        self,
        output: Path,
        *members: Path,
        device: torch.device | None = None,
        processes: int | None = None,
        **facts: Any,
    ) -> None:
        """Writes `<output>.meta.json` with the hashes of `output` and `members`, the files that it represents.

        Args:
            device: device of a stage that uses torch.
            processes: number of processes of a stage that may have several.
            facts: further facts of the stage.
        """
        seconds = time.monotonic() - self._started
        on_a_gpu = device is not None and device.type == "cuda"
        peak = {"host": _peak_memory_mib()}
        content: dict[str, Any] = dict(self._content)
        content |= {"outputs": _hashes([output, *members]), "peak_memory_mib": peak}
        if device is not None:
            content |= {"device": str(device), "hardware": device_name(device)}
        if on_a_gpu:
            import torch  # only here, because most users of records do not need torch

            peak["gpu"] = round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
        if processes is not None:
            content["processes"] = processes
        content["wall_seconds"] = round(seconds, 3)
        content["gpu_seconds"] = round(seconds * (processes or 1), 3) if on_a_gpu else 0.0
        write_json(sidecar_of(output), content | facts)


def recorded(path: Path) -> str:
    """Returns the sha256 of a stage's output after checking it against its record. The assets' manifest is its own
    record.

    Raises:
        ValueError: the file is missing, has no record or differs from it; names file and remedy.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {REMAKE}")
    sha = sha256_of(path)
    sidecar = sidecar_of(path)
    if not sidecar.is_file():
        if path.name == MANIFEST and "pins" in read_json(path):
            return sha
        raise ValueError(f"{path}: has no record ({sidecar.name}) beside it; copy that too, or {REMAKE}")
    outputs = read_json(sidecar).get("outputs", {})
    of_this_name = [output for name, output in outputs.items() if Path(name).name == path.name]
    if sha not in of_this_name:
        raise ValueError(f"{path}: is not what {sidecar.name} recorded: cut, damaged or edited; delete it and {REMAKE}")
    return sha


def sidecar_of(output: Path) -> Path:
    """Returns the path of a file's record."""
    return output.with_name(output.name + RECORD_SUFFIX)


def relative_name(path: Path) -> str:
    """Returns a file's name in records: relative to the working directory, or to `~` if only that contains it."""
    path = Path(os.path.abspath(path))
    here = Path.cwd()
    home = Path(os.path.expanduser("~"))
    if path.is_relative_to(home) and not here.is_relative_to(home):
        return f"~/{path.relative_to(home).as_posix()}"
    return Path(os.path.relpath(path, here)).as_posix()


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU, or of the processor with the number of threads that torch uses."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' * (threads > 1)}"


@functools.cache
def code_version() -> dict[str, Any]:
    """Returns the package's `version`, git `commit` and whether its files have `changed` since; None without git."""
    package = str(Path(__file__).parent)

    def git(*words: str) -> str | None:
        command = ("git", "--no-optional-locks", "-C", package, *words)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
            return done.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    # The package may be installed in an environment within another project's checkout.
    tracked = git("ls-files", "--error-unmatch", "__init__.py") is not None
    status = git("status", "--porcelain", "--", ".") if tracked else None
    commit = git("rev-parse", "HEAD") if tracked else None
    changed = None if status is None else bool(status)
    return {"version": __version__, "commit": commit, "changed": changed}


def _hashes(paths: Iterable[Path]) -> dict[str, str]:
    return {relative_name(path): sha256_of(path) for path in paths}


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
    }


def _peak_memory_mib() -> float:
    """Returns the largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    per_mib = 2**20 if sys.platform == "darwin" else 2**10  # bytes on macOS, KiB on Linux
    return round(peak / per_mib, 1)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
