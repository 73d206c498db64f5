"""What a machine is: cores, memory, GPUs, the hub, SLURM; imports torch only to ask it for a GPU that is there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from residual_mass.machine import preflight, slurm

REACH = 5.0
"""Seconds after which the hub counts as out of reach."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class Machine:
    """What was found.

    Attributes:
        memory: bytes of RAM that this process may use.
        gpu_fault: nothing where torch can use the GPUs or there are none, else why it cannot.
        hub: nothing where the Hugging Face hub answers, else why it does not.
        token: whether there is one; what it is, is nobody's business.
        slurm, accounting: whether jobs can be submitted, and whether `sacct` answers.
    """

    cores: int
    memory: int
    gpus: tuple[Gpu, ...]
    gpu_fault: str
    hub: str
    token: bool
    slurm: bool
    accounting: bool


def look() -> Machine:
    from huggingface_hub import get_token

    gpus = tuple(_gpus())
    submits = preflight.has_slurm()
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(),
        gpus=gpus,
        gpu_fault=_gpu_fault() if gpus else "",
        hub=_why_no_hub(),
        token=get_token() is not None,
        slurm=submits,
        accounting=submits and _answers(slurm.ASKS_ACCOUNTS),
    )


def _gpus() -> Iterator[Gpu]:
    """As nvidia-smi lists them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    for line in (_said(query) or "").splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdecimal():
            yield Gpu(name.strip(), int(mebibytes) * 2**20)


def _gpu_fault() -> str:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError where a library of CUDA's does not load
        return f"torch cannot be imported ({' '.join(str(error).split())})"
    return "" if torch.cuda.is_available() else f"torch {version_of('torch')} cannot use the GPU"


def _memory() -> int:
    """Bytes of RAM, or of the container's share of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(allowed)) if allowed.isdecimal() else physical


def _why_no_hub() -> str:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "offline: HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH)
    except Exception as error:  # the clients of the library's versions raise unrelated classes
        return f"cannot be reached ({type(error).__name__})"
    return ""


def _answers(command: Sequence[str]) -> bool:
    return _said(command) is not None


def _said(command: Sequence[str]) -> str | None:
    """Standard output of a program, or None where it is not installed, fails or does not come to an end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
