"""Two of the same stage at once, on the same files: no torn or doubled rows, and the bytes of one alone."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from tests.faults.conftest import Undisturbed, names_in
from tests.faults.forks import Forks

from residual_mass.benchmarks.store import GENERATED, RowStore
from residual_mass.files import locked

REFUSED = "another job is writing to it; wait for that one or stop it"


@pytest.mark.parametrize(
    ("name", "file"),
    [("train", "_checkpoints/maps.safetensors"), ("generate", "_store/all.jsonl"), ("force", "_store/f.jsonl")],
)
def test_one_that_starts_while_the_other_is_at_work_is_refused(
    name: str, file: str, undisturbed: dict[str, Undisturbed], forks: Forks, tmp_path: Path
) -> None:
    """This process is the other one."""
    out, log = tmp_path / "out", tmp_path / "log"
    with locked(out / file) if name == "train" else RowStore(out / file, GENERATED):
        assert forks.run(undisturbed[name].stage.arguments(out), log) == 2
    last = log.read_text().splitlines()[-1]
    assert last == f"residual_mass {name}: error: {out / file}: {REFUSED}"
    assert undisturbed[name].stage.made(out) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "generate", "force", "capture"])
def test_two_at_once_make_what_one_makes(
    name: str, undisturbed: dict[str, Undisturbed], forks: Forks, tmp_path: Path
) -> None:
    """Where they share a working file, the later one is refused in one line."""
    expected, rng, refused = undisturbed[name], random.Random(name), 0
    for number in range(10):
        out, logs = tmp_path / str(number), [tmp_path / f"{number}{letter}" for letter in "ab"]
        first = forks.start(expected.stage.arguments(out), logs[0])
        time.sleep(rng.uniform(0, expected.seconds))
        second = forks.start(expected.stage.arguments(out), logs[1])
        codes = [forks.wait(first), forks.wait(second)]
        assert codes in ([0, 0], [0, 2], [2, 0])
        if 2 in codes:
            refused += 1
            assert logs[codes.index(2)].read_text().splitlines()[-1].endswith(REFUSED)
        assert expected.stage.made(out) == expected.made and names_in(out) == expected.names
        if name == "force":
            rows = (out / "_store" / "f.jsonl").read_bytes().splitlines()
            assert len(rows) == len(set(rows))
        if name == "generate":
            store = (out / "_store" / "all.jsonl").read_bytes()
            assert sorted(store.splitlines()) == sorted(expected.made["all.jsonl"].splitlines())
    assert name != "capture" or refused == 0
    print(f"{name}: 10 pairs, {refused} refused")
