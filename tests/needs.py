"""Requirements of tests that not every machine meets, and the line at the end of a run that lists skipped tests.

Tests are skipped only for these requirements.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest


@dataclass(frozen=True)
class Need:
    """What tests may need of a machine.

    Attributes:
        lack: what is told where it is not met, after the number of tests.
        remedy: what makes them run.
        met: whether it is met on this machine; None where only a try shows it.
    """

    lack: str
    remedy: str
    met: Callable[[], bool] | None = None

    @property
    def reason(self) -> str:
        return f"{self.lack} ({self.remedy})"

    def skip(self) -> NoReturn:
        pytest.skip(self.reason)


def needs(need: Need) -> pytest.MarkDecorator:
    assert need.met is not None
    return pytest.mark.skipif(not need.met(), reason=need.reason)


@cache
def _has_latex() -> bool:
    return shutil.which("pdflatex") is not None and all(
        subprocess.run(["kpsewhich", package], capture_output=True).returncode == 0
        for package in ("booktabs.sty", "multirow.sty")
    )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@cache
def unshare() -> list[str] | None:
    """What runs a command in a network namespace of its own, where this user may."""
    for words in (["unshare", "-n"], ["unshare", "-r", "-n"]):
        if shutil.which("unshare") and subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    return None


def _has_kernels() -> bool:
    import residual_mass

    return (Path(residual_mass.__file__).parent / "kernels" / "_portable.so").exists()


def _has_bfloat16_attention() -> bool:
    """Whether torch's own attention in bfloat16 runs: with AMX it fails if torch is held to older instructions."""
    import torch

    query = torch.zeros(1, 1, 64, 16, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    except RuntimeError:
        return False
    return True


def _compiles_steps() -> bool:
    from residual_mass.kernels.cpu import compiler_refusal

    return compiler_refusal() is None


def _major(package: str) -> int:
    return int(version(package).partition(".")[0])


LATEX = Need("without LaTeX", "apt-get install texlive-latex-extra", _has_latex)
TRITON = Need("without Triton", "make test-all")
GPU = Need("without an NVIDIA GPU", "make gpu-check where there is one", _has_gpu)
COMPILER = Need("without g++", "apt-get install g++", lambda: shutil.which("g++") is not None)
CLANG = Need("without clang++", "apt-get install clang", lambda: shutil.which("clang++") is not None)
ARM = Need(
    "without an emulated ARM processor",
    "apt-get install g++-aarch64-linux-gnu qemu-user",
    lambda: bool(shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
)
COMPILED = Need("where steps are not compiled", "apt-get install g++; unset RESIDUAL_MASS_CPU", _compiles_steps)
KERNELS = Need("without compiled kernels", "make install where a C++ compiler is", _has_kernels)
KVPRESS = Need("without kvpress", "pip install kvpress==0.5.5", lambda: find_spec("kvpress") is not None)
LANGCHAIN = Need("without LangChain", "pip install langchain-openai", lambda: find_spec("langchain_openai") is not None)
LM_EVAL = Need("without lm-eval", "pip install '.[lm-eval]'", lambda: find_spec("lm_eval") is not None)
BFLOAT16 = Need("where torch's own attention fails in bfloat16", "unset ATEN_CPU_CAPABILITY", _has_bfloat16_attention)
NO_GPU = Need("for machines without a GPU", "CUDA_VISIBLE_DEVICES= make test-all", lambda: not _has_gpu())
TRANSFORMERS_5 = Need("without transformers 5", "pip install -r requirements.lock", lambda: _major("transformers") >= 5)
GLIBC = Need("without glibc", "run on a Linux that has it", lambda: platform.libc_ver()[0] == "glibc")
CURL = Need("without curl", "apt-get install curl", lambda: shutil.which("curl") is not None)
GIT = Need("without git", "apt-get install git", lambda: shutil.which("git") is not None)
NAMESPACES = Need("without network namespaces", "run as root", lambda: unshare() is not None)
HUGE_PAGES = Need(
    "without huge pages",
    "run on a Linux that has them",
    lambda: Path("/proc/self/smaps").exists() and Path("/sys/kernel/mm/transparent_hugepage").exists(),
)
MOUNTS = Need("without the right to mount", "run as root, in a container with CAP_SYS_ADMIN")
SLURM = Need("without a SLURM of their own", "RESIDUAL_MASS_SLURM=1 make test-all, as root where that may be installed")
OLDEST_PYTHON = Need(
    "for the oldest Python alone", "make PYTHON=python3.11 test-all", lambda: sys.version_info < (3, 12)
)
INDEX = Need("without a package index", "connect to one, or set PIP_INDEX_URL")
LOCKED = Need("without the locked packages", "pip install -r requirements.lock")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line of all that was skipped."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        parts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {parts}")
