"""Every input of every stage comes to harm: one line that names it and the remedy, and nothing half-written.

The stages run through their command line, in this process, on the files of a finished small study.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pandas as pd
import pytest
from damage import CERTAIN, CUT, FLIPPED, Damage, damaged
from finished import Job, finished_study, job_of
from samples import made, study_rows, written

from residual_mass import cli
from residual_mass.benchmarks import babilong
from residual_mass.provenance import sidecar_of

KINDS = (
    "train", "prompts ruler", "prompts babilong", "prompts longbench", "generate", "force", "fidelity",
    "score", "join", "capture wiki", "kernels", "findings",
    "residual-errors", "runtime",
    "comparison", "numbers", "document", "report",
    "table ruler_sweep", "table exact_accounting", "table phi_param_count", "table training_cost_64k",
    "table runtime_tiny", "table fidelity", "table residual_estimators", "table deployable",
    "figure fidelity", "figure fidelity_tokens", "figure error_by_k", "figure selection_recall",
    "figure fidelity_by_bytes", "figure entropy_gain", "figure mass_curves", "figure kernel_sanity",
    "figure logz_calibration", "figure training_curves",
)  # fmt: skip
"""Of tables and figures one for each reader."""
DAMAGES = [Damage(kind) for kind in CERTAIN] + [Damage(CUT, 0), Damage(CUT, 1), *(Damage(FLIPPED, n) for n in range(3))]
MOST_FILES = 8
"""Of one job; of more, a sample."""
OF_THE_REPOSITORY = (".j2", ".md")
"""Endings of files that people write: what they mean to say, no reader can know."""


class Study:
    def __init__(self, folder: Path, jobs: Sequence[Job]) -> None:
        self.folder, self.jobs = folder, jobs

    def job(self, kind: str) -> Job:
        return [job for job in self.jobs if kind in (job.kind, job.stage)][-1]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    folder = tmp_path_factory.mktemp("study") / "checkout"
    jobs = finished_study(folder)
    with contextlib.chdir(folder):
        yield Study(folder, jobs)


def outcome(job: Job) -> tuple[int, list[str], list[Path]]:
    """Exit status, error lines, and the files that were made."""
    shutil.rmtree("made", ignore_errors=True)
    for cached in (babilong.read_paragraphs, babilong.sentence_splitter):
        cached.cache_clear()
    status, said = 0, io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            cli.main(job.writing_to("made"))
        except SystemExit as end:
            status = int(end.code or 0)
    lines = [line for line in said.getvalue().splitlines() if ": error: " in line]
    return status, lines, [path for path in Path("made").rglob("*") if path.is_file() and not is_working_file(path)]


def is_hashed(path: Path) -> bool:
    """Whether its sha256 is recorded, so that not even one changed bit goes unnoticed."""
    return sidecar_of(path).is_file() or "prompts" in path.parts or "assets" in path.parts


def holds_the_same(path: Path, whole: bytes) -> bool:
    """Whether a Parquet file still reads as it did: statistics that nobody reads have no checksum."""
    return pd.read_parquet(path).equals(pd.read_parquet(io.BytesIO(whole)))


def is_working_file(path: Path) -> bool:
    """A store, which outlives a job that fails, or a checkpoint, which no job leaves that succeeds."""
    return any(part.startswith("_") for part in path.parts)


def complaint(job: Job, path: Path, damage: Damage) -> str:
    """What is wrong with how a job takes the damage of an input; nothing if it is right."""
    whole = path.read_bytes()
    with damaged(path, damage):
        try:
            status, lines, made = outcome(job)
        except Exception as error:  # a traceback, had it been a process
            return f"{type(error).__name__}: {error}"
        harmless = status == 0 and path.suffix == ".parquet" and holds_the_same(path, whole)
    if status == 0:
        wanted = [Path("made") / output for output in job.outputs if not is_working_file(output)]
        lacking = [str(output) for output in wanted if output not in made]
        noticeable = damage.kind != FLIPPED if path.suffix not in OF_THE_REPOSITORY else damage.kind in CERTAIN[:3]
        if not harmless and (noticeable or is_hashed(path)):
            return "went unnoticed"
        return f"succeeded without {lacking}" if lacking else ""
    if status != 2 or len(lines) != 1:
        return f"status {status}, {len(lines)} lines: {lines}"
    said = lines[0].partition(": error: ")[2]
    if path.name not in said and str(path.parent) not in said:
        return f"does not name the file: {said}"
    if "; " not in said:
        return f"names no remedy: {said}"
    return f"left {made}" if made else ""


def chosen(job: Job) -> list[Path]:
    files = job.files
    kinds = {path.suffix: path for path in files}  # one of each at least
    rest = [path for path in files if path not in kinds.values()]
    room = max(0, MOST_FILES - len(kinds))
    return [*kinds.values(), *Random(0).sample(rest, min(room, len(rest)))]


def test_a_damaged_table_is_refused_in_one_line(tmp_path: Path) -> None:
    """One stage without the study, for the quick suite."""
    table = written(tmp_path, made("ruler_sweep", *study_rows()))
    with contextlib.chdir(tmp_path):
        flags = ["--tables", table.name, "--out", "out/comparison.csv", "--picture", "out/picture.csv"]
        job = job_of(["comparison", "--spec", '{"study": "paper", "settings": {}}', *flags])
        assert outcome(job)[0] == 0
        complaints = {str(damage): said for damage in DAMAGES if (said := complaint(job, Path(table.name), damage))}
    assert not complaints, json.dumps(complaints, indent=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_input_is_refused_in_one_line(study: Study, kind: str) -> None:
    job = study.job(kind)
    assert outcome(job)[0] == 0  # undamaged
    complaints = {
        f"{path} {damage}": said for path in chosen(job) for damage in DAMAGES if (said := complaint(job, path, damage))
    }
    assert not complaints, json.dumps(complaints, indent=1)


@pytest.mark.slow
def test_every_stage_is_among_them(study: Study) -> None:
    assert {job.stage for job in study.jobs} == {kind.partition(" ")[0] for kind in KINDS}
