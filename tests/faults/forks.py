"""Stages as forks of a process that has imported torch already, so that a kill strikes the work and not the imports.

Each is the command line's own `main` in a process of its own, with its own status, signals and stderr.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import psutil

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Forks:
    """Starts stages; use as a context manager."""

    def __enter__(self) -> Forks:
        self._server = subprocess.Popen(
            [sys.executable, __file__], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stdin.close()
        self._server.wait()

    def start(self, arguments: Sequence[str], log: Path) -> int:
        """The process id of a stage whose stdout and stderr go to `log`."""
        return self._ask({"arguments": list(arguments), "log": str(log)})

    def wait(self, pid: int) -> int:
        """The exit status, negative for a signal."""
        return self._ask({"pid": pid})

    def run(self, arguments: Sequence[str], log: Path) -> int:
        return self.wait(self.start(arguments, log))

    def _ask(self, question: dict[str, object]) -> int:
        self._server.stdin.write(json.dumps(question).encode() + b"\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def ended_within(pid: int, seconds: float) -> bool:
    """Whether a started stage, not waited for yet, ends before so many seconds have passed."""
    process, end = psutil.Process(pid), time.monotonic() + seconds
    while process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() >= end:
            return False
        time.sleep(0.002)
    return True


def _serve() -> None:
    import residual_mass.cli  # noqa: F401
    import residual_mass.model.engine  # noqa: F401  # what stages import once they are at work

    for line in sys.stdin.buffer:
        question = json.loads(line)
        if "pid" in question:
            answer = os.waitstatus_to_exitcode(os.waitpid(question["pid"], 0)[1])
        else:
            answer = _fork(question["arguments"], question["log"])
        print(answer, flush=True)


def _fork(arguments: list[str], log: str) -> int:
    """Forks a stage; returns its process id once its log is open and signals reach it as they reach an interpreter."""
    starts, started = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_a_stage(arguments, log, started)
    os.close(started)
    os.read(starts, 1)
    os.close(starts)
    return pid


def _be_a_stage(arguments: list[str], log: str, started: int) -> None:
    from residual_mass.cli import main

    code = 1
    try:
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(written, 1)
        os.dup2(written, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(started)
        main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:  # before or behind what main guards, as in an interpreter that starts or ends
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
