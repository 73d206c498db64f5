"""How long a run still takes: the seconds that its jobs are expected to take, corrected by those that have run.

A job's seconds are, in this order: those of its last run in this folder; its units of work times measured rates
(`estimate`); those of the same job in a `make mini` on two idle cores (`mini_seconds.csv`); the mean of its rule there
or, for a rule that trains or decodes, of its rule in this run, unknown until one of them has finished.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

from snakemake.logging import LogEvent, logger
from snakemake.settings.enums import Quietness

from residual_mass.estimate import STAGE_OF_RULE, rates_of, seconds_of
from residual_mass.study.jobs import job_of

MINI = Path(__file__).with_name("mini_seconds.csv")
LITTLE = 2.0
"""Seconds of a job whose rule is not in `mini_seconds.csv`: tables, figures, scores."""
TRUST = 60.0
"""Seconds of finished work that count as much as the expectation, when it is corrected."""
AS_FAST_AS_THE_NETWORK = "assets"
"""The rule whose seconds say nothing about the machine."""
PAUSE = 5.0
"""Least seconds between two lines."""


@dataclass
class Task:
    """A job of a run.

    Attributes:
        name: its benchmark file without folder and suffix, such as `train/smol_1k`.
        expected: seconds; NaN if they are not known.
        uses: share of each limited resource that it takes.
        needs: numbers of the jobs that it waits for.
    """

    rule: str
    name: str
    expected: float
    uses: Mapping[str, float]
    needs: frozenset[int]
    started: float | None = None
    seconds: float | None = None
    """Of a finished one."""


@dataclass
class Progress:
    """The tasks of a run by number, and what is known of them at a time of `time.monotonic`."""

    tasks: dict[int, Task]
    _means: dict[str, float] = field(default_factory=dict)

    def start(self, number: int, now: float) -> None:
        self.tasks[number].started = now

    def stop(self, number: int) -> None:
        """Notes that a job failed: it is run again, or not at all."""
        self.tasks[number].started = None

    def finish(self, number: int, now: float) -> None:
        task = self.tasks[number]
        task.seconds = now - (now if task.started is None else task.started)

    def line(self, now: float) -> str:
        """Returns what runs, how many jobs of how many are done, and how long the others take."""
        done = 0
        running = []
        for task in self.tasks.values():
            done += task.seconds is not None
            if task.seconds is None and task.started is not None:
                running.append(task.name)
        seconds, unknown = self.seconds_left(now)
        left = f"about {time_text(seconds)} left"
        if unknown:
            left = f"at least {time_text(seconds)} left ({unknown} of a kind that has not run here yet)"
        names = ", ".join(running[:3])
        if len(running) > 3:
            names += f" and {len(running) - 3} others"
        return f"{done} of {len(self.tasks)} jobs done, {left}; running: {names}"

    def seconds_left(self, now: float) -> tuple[float, int]:
        """Returns the seconds until all known tasks are done, and the number of unknown ones.

        No schedule ends before the busiest resource has done its work, nor before the longest chain of tasks that wait
        for each other; with two jobs at a time, one that puts long jobs first ends little later.
        """
        ratios = self._ratios(now)
        left: dict[int, float] = {}
        work: dict[str, float] = defaultdict(float)
        unknown = 0
        for number, task in self.tasks.items():
            seconds = self._left(task, ratios[task.rule], now)
            unknown += math.isnan(seconds)
            left[number] = 0.0 if math.isnan(seconds) else seconds
            for resource, share in task.uses.items():
                work[resource] += share * left[number]
        chains: dict[int, float] = {}
        for number in left:
            self._chain(number, left, chains)
        return max([*work.values(), *chains.values()], default=0.0), unknown

    def _chain(self, number: int, left: Mapping[int, float], known: dict[int, float]) -> float:
        """Returns the seconds until a task is done if it waits only for those that it needs."""
        if number not in known:
            before = [self._chain(each, left, known) for each in self.tasks[number].needs]
            known[number] = left[number] + max(before, default=0.0)
        return known[number]

    def _left(self, task: Task, ratio: float, now: float) -> float:
        """Returns the seconds that a task still takes; NaN if they are not known."""
        if task.seconds is not None:
            return 0.0
        expected = task.expected * ratio
        if math.isnan(expected):
            expected = self._means.get(task.rule, math.nan)
        if task.started is None:
            return expected
        elapsed = now - task.started
        return max(expected - elapsed, elapsed / 10)  # one that is late is at nine tenths, as far as is known

    def _ratios(self, now: float) -> Mapping[str, float]:
        """Returns what the seconds of tasks are of the expected ones, by rule; sets the means of rules in this run.

        A running task that is late counts with what it has taken.
        """
        taken: dict[str, list[tuple[float, float]]] = defaultdict(list)
        measured: dict[str, list[float]] = defaultdict(list)
        for task in self.tasks.values():
            seconds = task.seconds
            if seconds is not None:
                measured[task.rule].append(seconds)
            elif task.started is not None and now - task.started > task.expected:
                seconds = now - task.started
            tells = task.rule != AS_FAST_AS_THE_NETWORK and not math.isnan(task.expected)
            if seconds is not None and tells:
                taken[task.rule].append((seconds, task.expected))
        self._means = {rule: mean(seconds) for rule, seconds in measured.items()}
        of_all = _ratio(chain.from_iterable(taken.values()), 1.0)
        ratios: dict[str, float] = defaultdict(lambda: of_all)
        for rule, pairs in taken.items():
            ratios[rule] = _ratio(pairs, of_all)
        return ratios


def _ratio(pairs: Iterable[tuple[float, float]], before: float) -> float:
    """Returns the sum of seconds over that of expected seconds, drawn towards a ratio that was believed before."""
    seconds, expected = before * TRUST, TRUST
    for one, other in pairs:
        seconds += one
        expected += other
    return seconds / expected


def time_text(seconds: float) -> str:
    """Returns a time in words: minutes, rounded up, below two hours."""
    minutes = max(1, math.ceil(seconds / 60))
    if minutes >= 120:
        return f"{minutes / 60:.1f} hours"
    return f"{minutes} minute{'s' * (minutes > 1)}"


# ---- of Snakemake's jobs ---------------------------------------------------------------------------------------------


def tasks_of(workflow: Any, results: Path) -> dict[int, Task]:
    """Returns the tasks of a run by Snakemake's number of the job."""
    rates = []
    with contextlib.suppress(KeyError, TypeError, ValueError, OSError):  # of a damaged record, which `verify` names
        rates = rates_of(results)
    of_mini = _seconds_of_mini()
    limits = _limits(workflow)
    dag = workflow.dag
    jobs = {dag.jobid(job): job for job in dag.needrun_jobs(exclude_finished=False)}
    tasks = {}
    for number, job in jobs.items():
        rule = job.rule.name
        name = rule
        if job.benchmark:
            name = str(Path(job.benchmark).relative_to("logs").with_suffix(""))
        guesses = [_last_seconds(job), seconds_of(job_of(job), rates), of_mini.get(name, math.nan)]
        if rule not in STAGE_OF_RULE:
            guesses.append(of_mini.get(rule, LITTLE))
        known = [seconds for seconds in guesses if not math.isnan(seconds)]
        expected = known[0] if known else math.nan
        needs = frozenset(map(dag.jobid, dag.dependencies[job])) & jobs.keys()
        tasks[number] = Task(rule, name, expected, _shares(job, limits), needs)
    return tasks


def _seconds_of_mini() -> dict[str, float]:
    """Returns the seconds of the mini study's jobs by name, and their means by rule."""
    of_rules: dict[str, list[float]] = defaultdict(list)
    found = {}
    with MINI.open() as lines:
        for line in csv.DictReader(lines):
            found[line["job"]] = float(line["seconds"])
    for name, seconds in found.items():
        of_rules[name.partition("/")[0]].append(seconds)
    return {rule: mean(seconds) for rule, seconds in of_rules.items()} | found


def _last_seconds(job: Any) -> float:
    """Returns what a job took when it ran last in this folder, as Snakemake has written it; NaN if it has not."""
    try:
        with open(job.benchmark or "") as lines:
            line = next(csv.DictReader(lines, delimiter="\t"))
        return float(line["s"])
    except (OSError, StopIteration, KeyError, ValueError):
        return math.nan


def _limits(workflow: Any) -> dict[str, int]:
    """Returns the limited resources of a run: on a cluster jobs, and not the cores, which are those of this machine."""
    limits = {}
    for name, limit in workflow.global_resources.items():
        most = getattr(limit, "value", limit)
        if isinstance(most, int) and most > 0:
            limits[name] = most
    if "_nodes" in limits:
        limits.pop("_cores", None)
    return limits


def _shares(job: Any, limits: Mapping[str, int]) -> dict[str, float]:
    """Returns the share of each limited resource that a job takes."""
    used = {name: job.resources.get(name) for name in limits}
    return {name: count / limits[name] for name, count in used.items() if isinstance(count, int)}


class ProgressHandler(logging.Handler):
    """Follows Snakemake's messages, and says on the same ways when jobs start what `Progress.line` returns; `--quiet`
    with `progress` or `all` silences it. A fault of it is told, and never ends a run.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self._said = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        now = time.monotonic()
        try:
            if event == LogEvent.JOB_STARTED:
                for number in record.jobs:
                    self.progress.start(number, now)
                if now - self._said >= PAUSE:
                    self._said = now
                    logger.info(self.progress.line(now), extra={"quietness": Quietness.PROGRESS})
            elif event == LogEvent.JOB_FINISHED:
                self.progress.finish(record.job_id, now)
            elif event == LogEvent.JOB_ERROR:
                self.progress.stop(record.jobid)
        except Exception:
            self.handleError(record)


def follow(workflow: Any, results: Path) -> None:
    """Makes the messages of a run say how long it still takes; or says why they cannot, and lets it run."""
    try:
        tasks = tasks_of(workflow, results)
    except Exception as error:
        logger.warning(f"The minutes left are not known ({type(error).__name__}: {error}).")
    else:
        logger.addHandler(ProgressHandler(Progress(tasks)))
