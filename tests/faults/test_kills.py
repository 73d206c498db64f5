"""Stages that are killed at random moments and restarted give the bytes of an undisturbed run, and so do two runs of
one stage at the same time on the same files.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.faults import stages
from tests.faults.conftest import Undisturbed
from tests.faults.stages import ENVIRONMENT, NAMES

from residual_mass import cli
from residual_mass.benchmarks.store import GENERATED_FIELDS, RowStore
from residual_mass.files import locked

KILLS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
"""Signals, and how a stage that they end must end."""
STOPS = (signal.SIGTERM, signal.SIGINT)
REFUSED = "another job is writing to it; wait for that one or stop it"


def strike(expected: Undisturbed, out: Path, log: Path, rng: random.Random, seconds: float) -> str | None:
    """Starts the stage and ends it by a signal within so many seconds; None where it was faster."""
    number = rng.choice(list(KILLS))
    process = stages.start(expected.stage, out, log)
    process.join(rng.uniform(0, seconds))
    with suppress(ProcessLookupError):  # it has just come to its end
        if process.is_alive():
            os.kill(process.pid, number)
    process.join()
    if process.exitcode == 0:
        assert expected.is_made_in(out)
        return None
    assert process.exitcode in (KILLS[number], -number), log.read_text()  # -number: before it could listen
    for name, content in expected.stage.made(
        out
    ).items():  # outputs are whole, or not there; but for a log, which grows
        whole = expected.made[name]
        assert whole.startswith(content) if name.endswith(".csv") else content == whole, name
    if rng.random() < 0.5:  # as Snakemake does
        for name in expected.stage.outputs:
            (out / name).unlink(missing_ok=True)
    return number.name


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("train", 1), ("force", 1), *(pytest.param(name, 20, marks=pytest.mark.slow) for name in NAMES)],
)
def test_stages_struck_at_random_moments_lose_nothing(
    name: str, rounds: int, undisturbed: Callable[[str], Undisturbed], tmp_path: Path
) -> None:
    expected, log, struck = undisturbed(name), tmp_path / "log", Counter()
    for number in range(rounds):
        rng, out, seconds = random.Random(f"{name}/{number}"), tmp_path / str(number), expected.seconds
        for _ in range(rng.randint(1, 3) if rounds > 1 else 1):
            while (how := strike(expected, out, log, rng, seconds)) is None:  # once more from nothing, and sooner
                shutil.rmtree(out)
                seconds *= 0.8
            struck[how] += 1
        assert stages.run(expected.stage, out, log) == 0, log.read_text()
        assert expected.is_made_in(out)
    print(f"{name}: {rounds} rounds, {dict(struck)}")


LONG = replace(stages.TRAIN, steps=100_000, checkpoint_every=100_000, eval_every=100_000)
"""Ends by a signal alone, and before its first checkpoint."""


@pytest.mark.parametrize("number", STOPS)
def test_a_training_asked_to_stop_leaves_a_checkpoint_and_one_line(
    number: signal.Signals, assets: Path, tmp_path: Path
) -> None:
    out, log, stage = tmp_path / "out", tmp_path / "log", stages.train(assets, LONG)
    for said, how in (("train phi", number), ("resumed from", signal.SIGKILL)):
        process = stages.start(stage, out, log)
        while said not in log.read_text():
            process.join(0.01)
            assert process.is_alive(), log.read_text()
        process.join(0.1)
        os.kill(process.pid, how)
        process.join()
        assert process.exitcode == KILLS[how]
        last = f"residual_mass train: stopped by {number.name}; run it again to resume"
        assert how == signal.SIGKILL or log.read_text().splitlines()[-1] == last
    assert (out / "_checkpoints/maps.safetensors").exists() and "stopped after step" in log.read_text()
    assert not list(out.rglob(".*.????????.*"))


@pytest.mark.slow
def test_several_processes_asked_to_stop_leave_a_checkpoint_that_one_goes_on_from(assets: Path, tmp_path: Path) -> None:
    """As on a cluster: everything that torchrun started gets SIGTERM at once, torchrun itself included."""
    stage = stages.train(assets, replace(LONG, sequences_per_step=2))
    out, log = tmp_path / "out", tmp_path / "log"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "residual_mass", *stage.arguments(out)]
    with open(log, "wb") as stream, subprocess.Popen(command, env=ENVIRONMENT, stderr=stream) as process:
        while "train phi" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        for job in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            job.terminate()
    assert process.returncode != 0
    assert log.read_text().count("stopped after step") == 2 and (out / "_checkpoints/maps.safetensors").exists()


# ---- the command line ------------------------------------------------------------------------------------------------

TURNED_INTO_AN_ERROR = """
def read_text(path, **_):
    try:
        os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        raise ValueError("could not determine the shape")
pathlib.Path.read_text = read_text
"""
"""As torch does where it asks a storage for its length."""
WHILE_IT_IMPORTS = """
def import_module(name):
    os.kill(os.getpid(), number)
    module = importlib.import_module(name)
    print("imported", file=sys.stderr)
    return module
cli.import_module = import_module
"""
"""An exception in the midst of torch's import may end the interpreter, so the signal waits."""


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize(("when", "said"), [(TURNED_INTO_AN_ERROR, ""), (WHILE_IT_IMPORTS, "imported\n")])
def test_a_signal_stops_a_stage_in_one_line(when: str, said: str, number: signal.Signals) -> None:
    start = f"import importlib, os, pathlib, sys\nfrom residual_mass import cli\nnumber = {int(number)}\n"
    code = f'{start}{when}\ncli.main(["estimate", "--jobs", "jobs.json", "--results", "results"])'
    run = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert run.returncode == 128 + number, run.stderr
    assert run.stderr == f"{said}residual_mass estimate: stopped by {number.name}; run it again to resume\n"


@pytest.mark.parametrize("number", STOPS)
def test_the_command_line_leaves_signals_as_it_found_them(number: signal.Signals, tmp_path: Path) -> None:
    """Called within another program, it must not answer for that one's signals afterwards."""
    before = signal.getsignal(number)
    default = signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler
    try:
        for own in (default, lambda *_: None):
            signal.signal(number, own)
            with pytest.raises(SystemExit):
                cli.main(["join", "--results", str(tmp_path / "none.csv"), "--out", str(tmp_path / "out.csv")])
            assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)


# ---- two at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES[:3])
def test_one_that_starts_while_another_is_at_work_is_refused(
    name: str, all_stages: dict[str, stages.Stage], tmp_path: Path
) -> None:
    """This process is the other one."""
    stage, out, log = all_stages[name], tmp_path / "out", tmp_path / "log"
    file = out / next(iter(stage.files.values()))
    with locked(file) if name == "train" else RowStore(file, GENERATED_FIELDS):
        assert stages.run(stage, out, log) == 2
    assert log.read_text().splitlines()[-1] == f"residual_mass {name}: error: {file}: {REFUSED}"
    assert stage.made(out) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_at_once_make_what_one_makes(name: str, undisturbed: Callable[[str], Undisturbed], tmp_path: Path) -> None:
    """Where they share a working file, the later one is refused in one line; no row is torn or doubled."""
    expected, rng, refused = undisturbed(name), random.Random(name), 0
    for number in range(10):
        out, logs = tmp_path / str(number), [tmp_path / f"{number}{letter}" for letter in "ab"]
        first = stages.start(expected.stage, out, logs[0])
        time.sleep(rng.uniform(0, expected.seconds))
        second = stages.start(expected.stage, out, logs[1])
        first.join(), second.join()
        codes = [first.exitcode, second.exitcode]
        assert codes in ([0, 0], [0, 2], [2, 0])
        if 2 in codes:
            refused += 1
            assert logs[codes.index(2)].read_text().splitlines()[-1].endswith(REFUSED)
        assert expected.is_made_in(out)
        rows = (out / "_store/rows.jsonl").read_bytes().splitlines() if "_store" in expected.names else []
        assert len(rows) == len(set(rows))
        if name == "generate":
            assert sorted(rows) == sorted(expected.made["all.jsonl"].splitlines())
    assert name != "capture" or refused == 0
    print(f"{name}: 10 pairs, {refused} refused")
