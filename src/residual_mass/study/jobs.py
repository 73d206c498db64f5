"""Snakemake's jobs as other parts of the package know them."""

from __future__ import annotations

import json
from typing import Any

from residual_mass.spec.specs import Job


def job_of(job: Any) -> Job:
    """Returns a job with its spec, which is empty if its rule has none."""
    spec = {}
    if "spec" in job.params.keys():
        spec = json.loads(job.params.spec)
    return Job(job.rule.name, tuple(job.output), spec)
