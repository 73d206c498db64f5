"""Runs `python -m residual_mass` as forks of one process that has imported everything: stages are many and short.

A folder on PYTHONPATH holds a `sitecustomize` that passes such commands, with their environment and open files, to that
process; other commands run as usual.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IMPORTED = ("transformers.models.llama.modeling_llama", "matplotlib.backends.backend_agg", "pyarrow.parquet", "lm_eval")
CLIENT = """\
import sys
if sys.orig_argv[1:3] == ["-m", "residual_mass"]:
    import json, os, socket
    server = socket.socket(socket.AF_UNIX)
    server.connect({address!r})
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(json.dumps([sys.orig_argv[3:], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    os._exit((server.recv(1) or b"\\1")[0])
"""


@contextlib.contextmanager
def forks(folder: Path, source: Path) -> Iterator[dict[str, str]]:
    """Yields an environment in which `python -m residual_mass` is a fork that imports the package from `source`.

    Args:
        folder: an empty folder for the socket and the `sitecustomize`.
    """
    address = str(folder / "socket")
    (folder / "client").mkdir()
    (folder / "client" / "sitecustomize.py").write_text(CLIENT.format(address=address))
    # One thread, because jobs run in parallel and sums need a fixed order. `runtime` uses more, which must not spin.
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment |= {"HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen([sys.executable, __file__, address], env=environment, stdout=subprocess.PIPE)
    try:
        if not server.stdout.readline():
            raise RuntimeError("the process that imports torch for the stages has ended")
        yield environment | {"PYTHONPATH": str(folder / "client")}
    finally:
        server.terminate()
        server.wait()


def serve(address: str) -> None:
    import residual_mass

    own = pkgutil.walk_packages(residual_mass.__path__, "residual_mass.", onerror=lambda _: None)
    for name in (*IMPORTED, *(module.name for module in own if module.name != "residual_mass.__main__")):
        with contextlib.suppress(ImportError):  # modules that need a GPU
            importlib.import_module(name)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for a fork: its status goes through the socket
    print("ready", flush=True)
    while True:
        client, _ = listening.accept()
        if os.fork() == 0:
            run_stage(client)
        client.close()


def run_stage(client: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    for number, file in enumerate(files):
        os.dup2(file, number)
    arguments, folder, environment = json.loads(b"".join(iter(lambda: client.recv(1 << 16), b"")))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["residual_mass", *arguments]
    code: Any = 1
    try:
        runpy.run_module("residual_mass", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    client.sendall(bytes([code]))
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
