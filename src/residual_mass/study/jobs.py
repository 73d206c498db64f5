"""Jobs of a study as data, handed from the workflow to the stages that look at a study."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residual_mass.core.settings import Settings
from residual_mass.files import read_json
from residual_mass.study.specs import BackboneSpec
from residual_mass.study.values import parsed

TRAIN = ("train", "train_variants")
"""Rules that train feature maps."""


@dataclass(frozen=True)
class Job(Settings):
    """One job of the workflow.

    Attributes:
        rule: the rule's name.
        inputs: files that the job reads.
        spec: what the job is told, as parsed JSON.
        refused: why the configuration no longer has such a job; empty where it has.
    """

    rule: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    spec: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True)
class StudyJobs(Settings):
    """A study, its backbones and everything that makes it."""

    name: str
    backbones: tuple[BackboneSpec, ...]
    jobs: tuple[Job, ...]


def read_studies(path: Path) -> tuple[StudyJobs, ...]:
    """What `study.start` wrote for a target that looks at studies."""
    return parsed(tuple[StudyJobs, ...], read_json(path))
