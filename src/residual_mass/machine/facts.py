"""Facts about this machine: cores, memory, GPUs, the hub, SLURM; imports torch only if there is a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from residual_mass.machine import preflight, slurm
from residual_mass.provenance import output_of

REACH = 5.0
"""Timeout in seconds for reaching the hub."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class Machine:
    """Facts about a machine.

    Attributes:
        memory: bytes of RAM that this process may use.
        gpu_fault: why torch cannot use the GPUs; empty if it can, or without GPUs.
        hub: why the Hugging Face hub does not answer; empty if it does.
        token: whether a token is set; its value is never stored.
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


def inspect_machine() -> Machine:
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
        accounting=submits and output_of(*slurm.ASKS_ACCOUNTS) is not None,
    )


def _gpus() -> Iterator[Gpu]:
    """Lists GPUs with nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    for line in (output_of(*query) or "").splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdecimal():
            yield Gpu(name.strip(), int(mebibytes) * 2**20)


def _gpu_fault() -> str:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError if a CUDA library does not load
        return f"torch cannot be imported ({' '.join(str(error).split())})"
    return "" if torch.cuda.is_available() else f"torch {version_of('torch')} cannot use the GPU"


def _memory() -> int:
    """Returns bytes of RAM, or of the container's limit."""
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
    except Exception as error:  # error classes differ between versions of the library
        return f"cannot be reached ({type(error).__name__})"
    return ""


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
