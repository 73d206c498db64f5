"""Stages that are killed at random moments and started again end with the bytes of an undisturbed run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.faults import stages
from tests.faults.conftest import Undisturbed, names_in
from tests.faults.forks import ENVIRONMENT, Forks, ended_within

from residual_mass import cli

KILLS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
"""Signals, and how a stage that they end must end."""


class Stricken:
    """A stage in a folder of its own, struck at moments spread over the time that it takes."""

    def __init__(self, undisturbed: Undisturbed, forks: Forks, folder: Path, seed: int) -> None:
        self.expected, self.stage, self.forks = undisturbed, undisturbed.stage, forks
        self.out, self.log = folder / "out", folder / "log"
        self.rng = random.Random(f"{self.stage.name}/{seed}")
        self.seconds = undisturbed.seconds

    def strike(self) -> signal.Signals:
        """Starts the stage and ends it by a signal before it is done; where it was faster, once more from nothing."""
        number = self.rng.choice(list(KILLS))
        while True:
            started = time.monotonic()
            pid = self.forks.start(self.stage.arguments(self.out), self.log)
            early = ended_within(pid, self.rng.uniform(0, self.seconds))
            if not early:
                os.kill(pid, number)
            code = self.forks.wait(pid)
            if code != 0:
                assert code in (KILLS[number], -number), self.log.read_text()  # -number: before it could listen
                self.check_what_is_there()
                return number
            self.seconds = time.monotonic() - started if early else self.seconds
            self.check_what_is_made()
            shutil.rmtree(self.out)

    def check_what_is_there(self) -> None:
        """Outputs are whole, or not there; but for a log, which grows."""
        for name, content in self.stage.made(self.out).items():
            expected = self.expected.made[name]
            assert expected.startswith(content) if name.endswith(".csv") else content == expected, name
        if self.rng.random() < 0.5:  # as Snakemake does
            for name in self.stage.outputs:
                (self.out / name).unlink(missing_ok=True)

    def finish(self) -> None:
        code = self.forks.run(self.stage.arguments(self.out), self.log)
        assert code == 0, self.log.read_text()
        self.check_what_is_made()

    def check_what_is_made(self) -> None:
        assert self.stage.made(self.out) == self.expected.made
        assert names_in(self.out) == self.expected.names


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["train", "generate", "force", "capture"])
def test_stages_struck_at_random_moments_lose_nothing(
    name: str, rounds: int, undisturbed: dict[str, Undisturbed], forks: Forks, tmp_path: Path
) -> None:
    struck: Counter[str] = Counter()
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        stricken = Stricken(undisturbed[name], forks, folder, number)
        for _ in range(stricken.rng.randint(1, 3) if rounds > 1 else 1):
            struck[stricken.strike().name] += 1
        stricken.finish()
    print(f"{name}: {rounds} rounds, {dict(struck)}")


LONG = replace(stages.TRAIN, steps=100_000, checkpoint_every=100_000, eval_every=100_000)
"""Ends by a signal alone, and before its first checkpoint."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_training_asked_to_stop_leaves_a_checkpoint_and_one_line(
    number: signal.Signals, assets: Path, forks: Forks, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    pid = forks.start(stages.train(assets, LONG).arguments(tmp_path / "out"), log)
    while "train phi" not in (log.read_text() if log.exists() else ""):
        assert not ended_within(pid, 0.01), log.read_text()
    assert not ended_within(pid, 0.1)
    os.kill(pid, number)
    assert forks.wait(pid) == 128 + number
    last = log.read_text().splitlines()[-1]
    assert last == f"residual_mass train: stopped by {number.name}; run it again to resume"
    assert (tmp_path / "out/_checkpoints/maps.safetensors").exists() and "stopped after step" in log.read_text()
    assert not list((tmp_path / "out").rglob(".*"))
    pid = forks.start(stages.train(assets, LONG).arguments(tmp_path / "out"), log)
    while "resumed from" not in log.read_text():
        assert not ended_within(pid, 0.01), log.read_text()
    os.kill(pid, signal.SIGKILL)
    forks.wait(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_a_library_turns_into_an_error_still_stops(number: signal.Signals) -> None:
    """As torch does where it asks a storage for its length."""
    script = f"""if True:
        import os, pathlib, signal
        from residual_mass import cli
        def read_text(path, **_):
            try:
                os.kill(os.getpid(), {int(number)})
            except KeyboardInterrupt:
                raise ValueError("could not determine the shape")
        pathlib.Path.read_text = read_text
        cli.main(["estimate", "--jobs", "jobs.json", "--results", "results"])
    """
    run = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert run.returncode == 128 + number, run.stderr
    assert run.stderr == f"residual_mass estimate: stopped by {number.name}; run it again to resume\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_until_the_stage_is_imported(number: signal.Signals) -> None:
    """An exception in the midst of torch's import may end the interpreter."""
    script = f"""if True:
        import importlib, os, signal, sys
        from residual_mass import cli
        def import_module(name):
            os.kill(os.getpid(), {int(number)})
            module = importlib.import_module(name)
            print("imported", file=sys.stderr)
            return module
        cli.import_module = import_module
        cli.main(["estimate", "--jobs", "jobs.json", "--results", "results"])
    """
    run = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert run.returncode == 128 + number, run.stderr
    assert run.stderr == f"imported\nresidual_mass estimate: stopped by {number.name}; run it again to resume\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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


@pytest.mark.slow
def test_several_processes_asked_to_stop_leave_a_checkpoint_that_one_goes_on_from(assets: Path, tmp_path: Path) -> None:
    """As on a cluster: everything that torchrun started gets SIGTERM at once, torchrun itself included."""
    stage = stages.train(assets, replace(LONG, sequences_per_step=2))
    out, log = tmp_path / "out", tmp_path / "log"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "residual_mass"]
    command = [stage.command(out)[0], *launcher, *stage.arguments(out)]
    with open(log, "wb") as stream, subprocess.Popen(command, env=ENVIRONMENT, stderr=stream) as process:
        while "train phi" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        for job in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            job.terminate()
    assert process.returncode != 0
    assert log.read_text().count("stopped after step") == 2 and (out / "_checkpoints/maps.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "generate", "force", "capture"])
def test_an_interpreter_of_its_own_ends_as_a_fork_does(
    name: str, undisturbed: dict[str, Undisturbed], tmp_path: Path
) -> None:
    """Killed while it imports or works, then run to its end."""
    stage = undisturbed[name].stage
    for number, seconds in ((signal.SIGTERM, 1.5), (signal.SIGKILL, 4), (signal.SIGTERM, 6)):
        process = subprocess.Popen(stage.command(tmp_path), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        try:
            assert process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            assert process.wait() in (KILLS[number], -number)
    assert subprocess.run(stage.command(tmp_path), env=ENVIRONMENT, stderr=subprocess.DEVNULL).returncode == 0
    assert stage.made(tmp_path) == undisturbed[name].made and names_in(tmp_path) == undisturbed[name].names
