"""Runs programs as forks of a process that has done their imports, which take most of their start time. A kill then
interrupts their work and not their imports.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
IMPORTED = {
    "residual_mass.cli": [
        "residual_mass.cli", "transformers.models.llama.modeling_llama", "residual_mass.training.trainer",
        "residual_mass.benchmarks.generate", "residual_mass.benchmarks.force", "residual_mass.diagnostics.capture",
    ],
    "snakemake.cli": ["tests.workflow.warm"],
}  # fmt: skip
"""By the module of a program, whose function `main` it is."""


@cache
def _server(program: str) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(IMPORTED[program])
    return server


def start(
    program: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], forget: Sequence[str] = ()
) -> BaseProcess:
    """A program whose stdout and stderr go to `log`; signals reach it as they reach an interpreter.

    Args:
        forget: packages that it imports anew.
    """
    begun = FORKS.Event()
    process = FORKS.Process(target=_be, args=(program, [*arguments], str(log), {**environment}, [*forget], begun))
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _server(program).connect_to_new_process
    try:
        process.start()
    finally:
        forkserver.connect_to_new_process = usual
    begun.wait()
    return process


def run(
    program: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], forget: Sequence[str] = ()
) -> int:
    """Its exit status, negative for a signal."""
    process = start(program, arguments, log, environment, forget)
    process.join()
    return process.exitcode


def _be(
    program: str, arguments: list[str], log: str, environment: dict[str, str], forget: list[str], begun: Event
) -> None:
    code: object = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        sys.argv = [program, *arguments]
        for name in [name for name in sys.modules if name.partition(".")[0] in forget]:
            del sys.modules[name]
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(written, 1)
        os.dup2(written, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        begun.set()
        importlib.import_module(program).main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:  # before or behind what main guards, as in an interpreter that starts or ends
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        if not isinstance(code, int):  # a message
            print(code, file=sys.stderr)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
