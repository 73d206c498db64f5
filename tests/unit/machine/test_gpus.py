"""Which GPU a process takes: real processes on a machine with simulated GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from residual_mass import cli
from residual_mass.machine import gpus
from residual_mass.spec.settings import AnchorSpec, MapSpec, to_json
from residual_mass.spec.specs import BackboneSpec, RuntimeSpec

HOLD = "import os, sys; print(os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True); sys.stdin.read()"
SOURCE = str(Path(gpus.__file__).parents[2])


class Holder:
    """A command on GPUs of its own, which runs until it is let go."""

    def __init__(self, folder: Path, count: int, visible: str | None, **environment: str):
        inherited = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        named = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "residual_mass.machine.gpus", str(count), sys.executable, "-c", HOLD],
            env={**inherited, **named, "TMPDIR": str(folder), "PYTHONPATH": SOURCE, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def says(self) -> str:
        """The next line of the log."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().strip()

    def has(self) -> str:
        """Its GPUs, as soon as it has them."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def let_go(self) -> None:
        self.process.communicate()


def test_side_by_side_each_has_its_own_and_the_next_waits(tmp_path: Path) -> None:
    first, second = Holder(tmp_path, 1, "0,1"), Holder(tmp_path, 1, "0,1")
    taken = [first.has(), second.has()]
    assert sorted(taken) == ["0", "1"]
    third = Holder(tmp_path, 1, "0,1")
    assert third.says().startswith("waiting for 1 of the GPUs 0,1; others hold the locks in ")
    second.process.kill()
    assert third.has() == taken[1]  # which no one had to give back
    second.let_go(), first.let_go(), third.let_go()


def test_while_it_waits_for_two_it_holds_none(tmp_path: Path) -> None:
    singles = [Holder(tmp_path, 1, "4,7,9"), Holder(tmp_path, 1, "4,7,9")]
    taken = {holder.has() for holder in singles}
    double = Holder(tmp_path, 2, "4,7,9")
    assert double.says().startswith("waiting for 2 of the GPUs 4,7,9;")
    third = Holder(tmp_path, 1, "4,7,9")
    assert {third.has()} == {"4", "7", "9"} - taken
    for holder in singles:
        holder.let_go()
    assert set(double.has().split(",")) == taken
    third.let_go(), double.let_go()


@pytest.mark.parametrize(("visible", "count", "rank"), [("3", 1, {}), ("-1", 1, {}), ("0,1", 1, {"LOCAL_RANK": "1"})])
def test_what_a_scheduler_or_torchrun_gave_is_left_as_it_is(
    visible: str, count: int, rank: dict[str, str], tmp_path: Path
) -> None:
    both = [Holder(tmp_path, count, visible, **rank) for _ in range(2)]
    assert [holder.has() for holder in both] == [visible] * 2
    assert list(tmp_path.iterdir()) == []
    for holder in both:
        holder.let_go()


@pytest.mark.parametrize(
    ("count", "visible", "command", "status", "said"),
    [
        ("3", "0,1", "true", 1, "residual_mass.machine.gpus: error: 3 GPUs asked for, but 2 here; lower phi.gpus of"),
        ("1", "0", "/no/such/program", 1, "residual_mass.machine.gpus: error: [Errno 2]"),
        ("1", "0,1", "in the way", 1, "residual_mass.machine.gpus: error: [Errno 17]"),
        ("1", "", "exit 7", 7, "two words"),
    ],
)  # fmt: skip
def test_a_command_is_run_as_given_or_refused_in_one_line(
    count: str, visible: str, command: str, status: int, said: str, tmp_path: Path
) -> None:
    if command == "in the way":
        (tmp_path / f"residual_mass_gpus_{os.getuid()}").write_text("where the locks would be")
    words = ["sh", "-c", 'echo "$0" >&2; exit 7', "two words"] if command == "exit 7" else [command]
    run = subprocess.run(
        [sys.executable, "-m", "residual_mass.machine.gpus", count, *words],
        env={**os.environ, "PYTHONPATH": SOURCE, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": visible},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == status and run.stderr.startswith(said) and run.stderr.count("\n") == 1, run.stderr


@pytest.mark.parametrize(("requires_gpu", "writable"), [(True, False), (True, True), (False, True)])
def test_a_stage_takes_one_if_its_backbone_needs_it_and_it_can_write(
    requires_gpu: bool, writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    backbone = BackboneSpec("paper", "org/Big-LM", "r1", "assets", "bfloat16", "t", 4096, requires_gpu, name="big")
    spec = RuntimeSpec(
        study="paper", backbone=backbone, contexts=("1k",), batches=(1,), budget=1.0, anchors=AnchorSpec(),
        map=MapSpec(), repeats=1, seed=0, recipe=1,
    )  # fmt: skip
    (tmp_path / "file").write_text("")
    out = tmp_path / ("out.csv" if writable else "file/out.csv")
    with pytest.raises(SystemExit) as end:
        cli.main(["runtime", "--spec", to_json(spec), "--assets", str(tmp_path), "--out", str(out)])
    taken = requires_gpu and writable
    assert end.value.code == 2 and os.environ["CUDA_VISIBLE_DEVICES"] == ("0" if taken else "0,1")
    assert taken == bool(list(tmp_path.glob("residual_mass_gpus*")))
