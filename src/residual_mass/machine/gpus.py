"""Assigns free GPUs to jobs on a machine without a scheduler.

A scheduler assigns GPUs with CUDA_VISIBLE_DEVICES. Without one, parallel jobs would all use the first GPU, so each job
locks one file per GPU and sees only those GPUs. The lock ends with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
"""Seconds between two checks for a free GPU."""


def take(count: int) -> None:
    """Waits for `count` free GPUs and hides all others from this process and its children.

    Call it before CUDA is initialised. Does nothing without GPUs, if CUDA_VISIBLE_DEVICES leaves no choice, or in
    processes of torchrun, whose parent has chosen.

    Raises:
        ValueError: the machine has fewer than `count` GPUs.
    """
    visible = visible_gpus()
    if not visible or "LOCAL_RANK" in os.environ:
        return
    if len(visible) < count:
        raise ValueError(f"{count} GPUs asked for, but {len(visible)} here; lower phi.gpus of the study")
    if "CUDA_VISIBLE_DEVICES" in os.environ and len(visible) == count:
        return
    folder = Path(tempfile.gettempdir(), f"residual_mass_gpus_{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    names = ",".join(visible)
    held = _free(visible, count, folder)
    if not held:
        log.info("waiting for %d of the GPUs %s; others hold the locks in %s", count, names, folder)
    while not held:
        time.sleep(POLL_SECONDS)
        held = _free(visible, count, folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(held)
    log.info("GPU %s of %s", ",".join(held), names)


def visible_gpus() -> list[str]:
    """Returns the names of the usable GPUs: those in CUDA_VISIBLE_DEVICES if set, else their numbers."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        return [name for name in names if name not in ("", "-1")]
    return [str(number) for number in range(len(device_files()))]


def device_files() -> list[Path]:
    """Returns one device file per NVIDIA GPU of this machine."""
    return list(Path("/dev").glob("nvidia[0-9]*"))


def _free(visible: Sequence[str], count: int, folder: Path) -> list[str]:
    """Locks the first `count` free GPUs for the lifetime of this process; returns [] if too few are free."""
    held: dict[str, int] = {}
    # One process chooses at a time: two that want two of two GPUs could each hold one and wait for the other.
    with open(folder / "choosing", "w") as choosing:
        fcntl.flock(choosing, fcntl.LOCK_EX)
        for name in visible:
            lock = folder / f"{name.replace('/', '-')}.lock"
            file = os.open(lock, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            os.set_inheritable(file, True)  # keeps the lock after exec
            held[name] = file
            if len(held) == count:
                return list(held)
        for file in held.values():
            os.close(file)
    return []


def main() -> None:
    """`python -m residual_mass.machine.gpus COUNT COMMAND ...`: runs the command with its own GPUs."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        take(int(sys.argv[1]))
        os.execvp(sys.argv[2], sys.argv[2:])
    except (ValueError, OSError) as error:
        sys.exit(f"residual_mass.machine.gpus: error: {error}")


if __name__ == "__main__":
    main()
