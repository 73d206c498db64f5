"""How long a run still takes, by the clock of the test."""

from __future__ import annotations

import csv
import logging
import math
import re
from pathlib import Path

import pytest

from residual_mass.study import progress
from residual_mass.study.progress import Progress, Task

ROOT = Path(__file__).parents[3]


def task(rule: str, expected: float, *needs: int, cores: float = 0.5) -> Task:
    return Task(rule, f"{rule}/x", expected, {"_cores": cores}, frozenset(needs))


def minutes(run: Progress, now: float) -> float:
    seconds, unknown = run.seconds_left(now)
    assert unknown == 0
    return seconds / 60


def test_the_busiest_resource_or_the_longest_chain_decides() -> None:
    of_cores = Progress({number: task("a", 120) for number in range(4)})
    assert minutes(of_cores, 0) == 4  # two at a time
    of_a_chain = Progress({0: task("a", 120), 1: task("b", 120, 0), 2: task("c", 120, 1)})
    assert minutes(of_a_chain, 0) == 6
    of_everything = Progress({number: task("a", 120, cores=1) for number in range(4)})
    assert minutes(of_everything, 0) == 8


def test_what_has_run_corrects_what_is_expected() -> None:
    """Of its own rule more than of others; and the first minutes count little."""
    run = Progress({number: task(rule, 600, cores=1) for number, rule in enumerate("aab")})
    run.start(0, 0)
    run.finish(0, 1200)
    ratio = (60 + 1200) / (60 + 600)
    own = (60 * ratio + 1200) / (60 + 600)
    assert minutes(run, 1200) == pytest.approx((600 * own + 600 * ratio) / 60)
    short = Progress({0: task("a", 1), 1: task("b", 600, cores=1)})
    short.start(0, 0)
    short.finish(0, 20)
    assert minutes(short, 20) == pytest.approx(10 * (60 + 20) / (60 + 1))


def test_a_download_corrects_nothing() -> None:
    run = Progress({0: task("assets", 20), 1: task("a", 600, cores=1)})
    run.start(0, 0)
    run.finish(0, 900)
    assert minutes(run, 900) == 10


def test_a_task_that_is_late_is_never_done_before_it_ends_and_delays_others() -> None:
    run = Progress({0: task("a", 60), 1: task("a", 60, 0)})
    run.start(0, 0)
    assert minutes(run, 30) == 1.5
    assert minutes(run, 600) > 5  # of which 1 was expected for the second
    run.finish(0, 600)
    run.start(1, 600)
    assert 1 < minutes(run, 610) < 10


def test_unknown_tasks_are_told_until_one_of_their_rule_has_run() -> None:
    run = Progress({0: task("a", 60), 1: task("b", math.nan), 2: task("b", math.nan, cores=1)})
    run.start(1, 0)
    said = "0 of 3 jobs done, at least 1 minute left (2 of a kind that has not run here yet); running: b/x"
    assert run.line(0) == said
    run.finish(1, 300)
    assert run.line(300) == "1 of 3 jobs done, about 6 minutes left; running: "


def test_a_failed_task_is_to_do_again() -> None:
    run = Progress({0: task("a", 60, cores=1)})
    run.start(0, 0)
    run.stop(0)
    assert minutes(run, 30) == 1 and run.line(30).endswith("running: ")


def test_a_fault_is_told_and_ends_no_run(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    logger = logging.getLogger("snakemake.logging")
    before = list(logger.handlers)
    with caplog.at_level(logging.WARNING, logger.name):
        progress.follow(object(), tmp_path)
    assert logger.handlers == before
    assert [record.message[:31] for record in caplog.records] == ["The minutes left are not known "]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "1 minute"), (61, "2 minutes"), (7080, "118 minutes"), (7200, "2.0 hours"), (36000, "10.0 hours")],
)
def test_times_in_words(seconds: float, text: str) -> None:
    assert progress.time_text(seconds) == text


def test_the_seconds_of_the_mini_study_are_those_of_its_page() -> None:
    page = (ROOT / "docs/measured/mini_cpu.md").read_text()
    with progress.MINI.open() as lines:
        known = {line["job"]: line["seconds"] for line in csv.DictReader(lines)}
    assert known == dict(re.findall(r"^\| `(\S+)` \| (\d+) \|$", page, re.MULTILINE)) and len(known) > 20
