"""The sub-command `serve`: loads a model and answers requests of OpenAI's protocol until a signal ends it."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import re
import socket
from pathlib import Path

from residual_mass.measure.request import EMBEDDED, printable, title_of
from residual_mass.methods import method_named
from residual_mass.methods.arms import percent_written
from residual_mass.methods.served import RECOMMENDED, packing_of
from residual_mass.serve.options import ServeOptions

SERVE_HELP = (
    "Serve a model through a method by OpenAI's protocol. Prompts that share a beginning with earlier texts read only "
    "what is new."
)
PRIMITIVE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables that bound torch's caches of code for products of one shape: every length of a prompt has its own, and the
default of 1,024 is hundreds of MiB.
"""
MMAP_THRESHOLD = -3
"""Option of glibc's `mallopt`: blocks from this size on go back to the system when they are freed. glibc raises its
default of 128 KiB by itself unless it is set; then caches that come and go leave gaps that nothing fits in.
"""
API_KEY = "RESIDUAL_MASS_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = SERVE_HELP
    add = parser.add_argument
    add("model", nargs="?", default=EMBEDDED,
        help="folder of a model, GGUF file, or OWNER/NAME on the hub (default: %(default)s, SmolLM2-135M)")  # fmt: skip
    add("--method", default=RECOMMENDED, help="method that decodes, one with CPU kernels (default: %(default)s)")
    add("--budget", metavar="PERCENT",
        help="share of the prompt that is read exactly, in percent, for methods that choose (default: 4)")  # fmt: skip
    add("--weights", type=int, choices=(4, 8), help="pack the weights of linear layers in so many bits")
    add("--compile", action="store_true", help="compile a decode step at the start, which takes up to a minute or two")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is all networks (default: %(default)s)")
    add("--port", type=int, default=8000, help="default: %(default)s")
    add("--allow-host", nargs="+", default=[], metavar="NAME",
        help="further names of this server in the Host header of requests")  # fmt: skip
    add("--cors", nargs="+", default=[], metavar="ORIGIN",
        help="web pages that may ask, such as https://example.org; pages of this machine always may")  # fmt: skip
    add("--api-key", default=os.environ.get(API_KEY), metavar="KEY",
        help=f"what requests have to send as a Bearer token (default: the variable {API_KEY})")  # fmt: skip
    add("--queue", type=int, default=64, metavar="N", help="requests that may wait (default: %(default)s)")
    add("--memory", type=int, default=1024, metavar="MIB",
        help="memory of kept texts; the least recently used leave first (default: %(default)s)")  # fmt: skip
    add("--keep", type=Path, metavar="DIR", help="folder for texts that leave the memory, or are left at the end")
    add("--keep-size", type=int, default=4096, metavar="MIB", help="bound of that folder (default: %(default)s)")
    add("--out", type=Path, help=argparse.SUPPRESS)  # of earlier versions, which wrote a folder


def checked(options: argparse.Namespace) -> ServeOptions:
    """Returns the flags; raises ValueError for one that is wrong."""
    method = method_named(options.method)
    if packing_of(method) is None:
        remedy = f"take one with `packed` in docs/library.md, such as {RECOMMENDED}"
        raise ValueError(f"--method {options.method}: the CPU kernels do not serve it; {remedy}")
    percent = None
    if method.chooses:
        percent = percent_written(options.budget or "4")
    elif options.budget is not None:
        raise ValueError(f"--budget {options.budget}: {options.method} reads all tokens; leave it out")
    for flag, least in (("memory", 0), ("keep_size", 1), ("queue", 1)):
        if getattr(options, flag) < least:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} is {getattr(options, flag)}, not {least} or more")
    if options.keep is not None:
        require_folder(options.keep)
    require_free(options.host, options.port)
    return ServeOptions(
        model=options.model,
        method=options.method,
        percent=percent,
        weights=options.weights,
        compile=options.compile,
        host=options.host,
        port=options.port,
        names=tuple(name.lower() for name in options.allow_host),
        origins=tuple(options.cors),
        api_key=options.api_key or None,
        queue=options.queue,
        memory=options.memory,
        keep=options.keep,
        keep_size=options.keep_size,
    )


def run(options: argparse.Namespace) -> None:
    """Checks the flags, loads the model, and serves it until a signal ends it.

    Raises:
        ValueError: a flag is wrong, there is no such model, it has code of its own, or the kernels do not serve it.
    """
    flags = checked(options)
    for cache in PRIMITIVE_CACHES:
        os.environ.setdefault(cache, "64")
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, 128 * 1024)
    # Before long work: their packages are an extra.
    from residual_mass.serve.app import Access, build
    from residual_mass.serve.model import load, service_of
    from residual_mass.serve.server import serve

    title = title_of(flags.model)
    name = re.sub(r"[^\w.-]", "-", title.removesuffix(".gguf"))
    model, tokenizer = load(flags.model, packed=flags.weights is None)
    service = service_of(model, tokenizer, name, flags)
    if flags.host not in LOOPBACK and flags.api_key is None:
        log.warning("listening at %s without --api-key: whoever reaches this machine can ask", flags.host)

    def closing() -> None:
        service.worker.close()
        service.answers.kept.save()

    app = build(service, Access(flags.host, flags.names, flags.origins, flags.api_key), closing)
    serve(app, flags.host, flags.port, service.worker)


def require_free(host: str, port: int) -> None:
    """Raises ValueError if the port cannot be listened at."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason.partition(" (")[0]
        raise ValueError(f"--host {host} --port {port}: {reason}; choose another port, or end what uses it") from None


def require_folder(folder: Path) -> None:
    """Makes a folder for kept texts; raises ValueError if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ValueError(f"--keep {printable(str(folder))}: {error.strerror}; name another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"--keep {printable(str(folder))}: it cannot be written to; name another folder")
