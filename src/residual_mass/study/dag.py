"""The jobs behind a study's files, as Snakemake's own rules make them, whether or not they have been run.

What only looks at a study (`estimate`, `doctor`, `prefetch`, `verify`) asks here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from snakemake.iocontainers import Wildcards

from residual_mass.study.jobs import Job


def jobs_behind(rules: Iterable[Any], targets: Iterable[str]) -> Iterator[Job]:
    """Every job that the targets need, each once and after the jobs that need it.

    Args:
        rules: `workflow.rules` of Snakemake.
    """
    rules = list(rules)
    left, seen = list(targets), set()
    while left:
        path = left.pop(0)
        if path in seen or (job := job_of(rules, path)) is None:
            continue
        seen.update((path, *job.outputs))
        left += job.inputs
        yield job


def job_of(rules: Iterable[Any], path: str) -> Job | None:
    """The job that makes a file; None where no rule does."""
    rule = next((rule for rule in rules if rule.is_producer(path)), None)
    if rule is None:
        return None
    wildcards = Wildcards(fromdict=rule.get_wildcards(path))
    try:
        inputs = rule.expand_input(wildcards)[0]
        told = rule.params.spec(wildcards) if "spec" in rule.params.keys() else "{}"
    except SystemExit as refusal:
        return Job(rule.name, outputs=(path,), refused=str(refusal.code))
    return Job(
        rule.name,
        inputs=tuple(map(str, inputs)),
        outputs=tuple(map(str, rule.expand_output(wildcards)[0])),
        spec=json.loads(told),
    )
