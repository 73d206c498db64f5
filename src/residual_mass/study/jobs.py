"""Jobs of a study as data, handed from the workflow to the stages that look at a study."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residual_mass.core.settings import Settings
from residual_mass.files import read_json
from residual_mass.study.specs import BackboneSpec
from residual_mass.study.values import parsed


@dataclass(frozen=True)
class Job(Settings):
    """One job of the workflow: its rule, its outputs, and its spec as parsed JSON."""

    rule: str
    outputs: tuple[str, ...] = ()
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StudyJobs(Settings):
    """A study, its backbones and everything that makes it."""

    name: str
    backbones: tuple[BackboneSpec, ...]
    jobs: tuple[Job, ...]


def read_studies(path: Path) -> tuple[StudyJobs, ...]:
    """Reads what `study.start` wrote for a target that looks at studies."""
    return parsed(tuple[StudyJobs, ...], read_json(path))
