"""Which GPU is a job's own on a machine without a scheduler: the first that is free.

A scheduler gives a job its GPUs in CUDA_VISIBLE_DEVICES. Elsewhere jobs side by side would all take the first, so each
locks a file per GPU and sees no other. The lock ends with the process, however that ends.
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
LOOK_AGAIN = 1.0
"""Seconds between two looks for a free GPU."""


def take(count: int) -> None:
    """Makes `count` GPUs the only ones that this process, and what it starts, can see; waits until so many are free.

    Must come before CUDA starts. Nothing is done where there are no GPUs, where CUDA_VISIBLE_DEVICES leaves no choice,
    and in processes of torchrun, for which its parent chose.

    Raises:
        ValueError: there are fewer than `count`.
    """
    visible = visible_gpus()
    if not visible or "LOCAL_RANK" in os.environ:
        return
    if len(visible) < count:
        raise ValueError(f"{count} GPUs asked for, but {len(visible)} here; lower phi.gpus of the study")
    if "CUDA_VISIBLE_DEVICES" not in os.environ or len(visible) > count:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_locked(visible, count))


def visible_gpus() -> list[str]:
    """Names of the GPUs that may be used, as CUDA_VISIBLE_DEVICES writes them: numbers, or what it says itself."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in range(len(device_files()))]


def device_files() -> list[Path]:
    """One per NVIDIA GPU of this machine."""
    return list(Path("/dev").glob("nvidia[0-9]*"))


def _locked(visible: Sequence[str], count: int) -> list[str]:
    """The first `count` that are free, locked for as long as this process lives."""
    folder = Path(tempfile.gettempdir(), f"residual_mass_gpus_{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    waited = False
    while True:
        # One chooses at a time: two that want two of two GPUs would each hold one and wait for the other.
        choosing = os.open(folder / "choosing", os.O_RDWR | os.O_CREAT)
        fcntl.flock(choosing, fcntl.LOCK_EX)
        held = _free(visible, count, folder)
        os.close(choosing)
        if held:
            log.info("GPU %s of %s", ",".join(held), ",".join(visible))
            return list(held)
        if not waited:
            log.info("waiting for %d of the GPUs %s; others hold the locks in %s", count, ",".join(visible), folder)
            waited = True
        time.sleep(LOOK_AGAIN)


def _free(visible: Sequence[str], count: int, folder: Path) -> dict[str, int]:
    """The first `count` free GPUs with the open files that lock them; empty where there are not so many."""
    held: dict[str, int] = {}
    for name in visible:
        file = os.open(folder / f"{name.replace('/', '-')}.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        os.set_inheritable(file, True)  # the lock passes on to the command that this process becomes
        held[name] = file
        if len(held) == count:
            return held
    for file in held.values():
        os.close(file)
    return {}


def main() -> None:
    """`python -m residual_mass.machine.gpus COUNT COMMAND ...`: becomes the command, which sees GPUs of its own."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        take(int(sys.argv[1]))
        os.execvp(sys.argv[2], sys.argv[2:])
    except (ValueError, OSError) as error:
        sys.exit(f"residual_mass.machine.gpus: error: {error}")


if __name__ == "__main__":
    main()
