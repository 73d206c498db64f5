"""Snakemake killed, started twice and asked to stop, on a small training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from tests.faults.stages import without_seconds
from tests.small_study import write_small_study

pytestmark = pytest.mark.slow

PHI, LOG = "results/phi/tiny_1k.safetensors", "results/training_tiny_1k.csv"
CHECKPOINT = "results/phi/_checkpoints/tiny_1k.safetensors"


class Checkout:
    """A small study of which the maps alone are made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_small_study(folder)
        study = folder / "config" / "studies" / "mini.yaml"
        settings = yaml.safe_load(study.read_text())
        settings["phi"] |= {"steps": 400, "eval_every": 100, "checkpoint_every": 10}
        study.write_text(yaml.safe_dump(settings))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """In a process group of its own, as a shell starts it."""
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", "--cores", "2", *arguments], cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background have it ignored
        )  # fmt: skip

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        output, _ = process.communicate()
        return process.returncode, output

    def start_training(self) -> tuple[subprocess.Popen[str], psutil.Process]:
        """Snakemake and its training, which has written a checkpoint and stands still until it is resumed."""
        process = self.start(PHI)
        while not (self.folder / CHECKPOINT).exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        jobs = psutil.Process(process.pid).children(recursive=True)
        (training,) = [job for job in jobs if job.cmdline()[1:4] == ["-m", "residual_mass", "train"]]
        training.suspend()
        return process, training

    def forget(self) -> None:
        for name in (PHI, LOG, CHECKPOINT):
            (self.folder / name).unlink(missing_ok=True)

    def made(self) -> tuple[bytes, bytes]:
        return (self.folder / PHI).read_bytes(), without_seconds((self.folder / LOG).read_bytes())

    def job_log(self) -> str:
        return (self.folder / "logs" / "train" / "tiny_1k.log").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkout, tuple[bytes, bytes]]:
    checkout = Checkout(tmp_path_factory.mktemp("faults") / "checkout")
    code, output = checkout.run(PHI)
    assert code == 0, output
    return checkout, checkout.made()


@pytest.fixture
def checkout(trained: tuple[Checkout, tuple[bytes, bytes]]) -> Iterator[Checkout]:
    """Nothing is made; the test ends with what an undisturbed run makes."""
    checkout, expected = trained
    checkout.forget()
    yield checkout
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(checkout.folder):  # where a test failed half-way
                process.kill()
    checkout.run("--unlock")
    assert checkout.made() == expected
    assert not list((checkout.folder / "results").rglob(".*"))


def test_a_killed_snakemake_leaves_a_lock_and_a_job_that_the_next_one_does_not_double(checkout: Checkout) -> None:
    first, training = checkout.start_training()
    first.kill()
    first.wait()
    assert training.is_running()  # it outlives Snakemake
    code, output = checkout.run(PHI)
    assert code == 1 and "Directory cannot be locked" in output, output
    assert checkout.run("--unlock")[0] == 0
    code, output = checkout.run(PHI)
    assert (
        code == 1 and f"{CHECKPOINT}: another job is writing to it; wait for that one or stop it" in checkout.job_log()
    )
    training.terminate()
    training.resume()
    psutil.wait_procs([training])
    assert (checkout.folder / CHECKPOINT).exists()
    code, output = checkout.run(PHI)
    assert code == 0 and "resumed from" in checkout.job_log(), output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_asked_to_stop_waits_for_a_checkpoint_and_leaves_no_lock(
    number: signal.Signals, checkout: Checkout
) -> None:
    """Ctrl-C, or what a cluster sends to all processes of a job."""
    first, training = checkout.start_training()
    os.killpg(first.pid, number)
    time.sleep(1)  # what does not wait has ended by now
    training.resume()
    output, _ = first.communicate()
    assert first.returncode == 1, output
    last = f"residual_mass train: stopped by {number.name}; run it again to resume"
    assert checkout.job_log().splitlines()[-1] == last
    code, output = checkout.run(PHI)
    assert code == 0 and "resumed from" in checkout.job_log(), output
