"""The studies and backbones of a checkout, and what the wildcards of a job name of them."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.core.settings import MapsSpec, length_and_variant, tokens_of
from residual_mass.provenance import MANIFEST
from residual_mass.study.config import Configuration, file_of
from residual_mass.study.protocol import Study
from residual_mass.study.sections.backbones import BackboneSettings
from residual_mass.study.specs import BackboneSpec

Wildcards = Any
"""Of a Snakemake job: its wildcards as attributes."""


def known(kind: str, value: str, options: Iterable[str], where: str) -> str:
    """`value` if it is among the options; otherwise the run ends in one line."""
    if value not in (options := list(options)):
        sys.exit(f"{kind} {value!r} is not in {where}, which has {', '.join(options)}")
    return value


def shared(settings: type[Any], source: Any) -> dict[str, Any]:
    """The fields of `settings` as `source`, which has them too, sets them."""
    return {field.name: getattr(source, field.name) for field in dataclasses.fields(settings)}


def maps_specs(labels: Iterable[str]) -> tuple[MapsSpec, ...]:
    """The labels, each with the length that its maps were trained at, in tokens."""
    return tuple(MapsSpec(label, tokens_of(length_and_variant(label)[0])) for label in labels)


@dataclasses.dataclass(frozen=True)
class Registry:
    """The studies of a checkout.

    Attributes:
        root: the checkout.
        configuration: its configuration, checked.
    """

    root: Path
    configuration: Configuration

    @property
    def studies(self) -> dict[str, Study]:
        return self.configuration.studies

    @property
    def assets_folder(self) -> Path:
        return Path(self.configuration.main.assets)

    @property
    def assets_manifest(self) -> str:
        return str(self.assets_folder / MANIFEST)

    def here(self, path: str) -> str:
        """A file of the repository as seen from the working directory, so that moving both together reruns nothing."""
        return os.path.relpath(self.root / path)

    def backbones_of(self, study: str) -> list[str]:
        return self.configuration.backbones_of(study)

    def backbone_specs(self, study: str) -> tuple[BackboneSpec, ...]:
        return tuple(self.backbone_spec(name) for name in self.backbones_of(study))

    def backbone_spec(self, name: str) -> BackboneSpec:
        return BackboneSpec(name=name, **shared(BackboneSettings, self.configuration.main.backbones[name]))

    def titles(self, names: Iterable[str]) -> dict[str, str]:
        return {name: self.configuration.main.backbones[name].title for name in names}

    def backbone_of(self, wildcards: Wildcards) -> BackboneSpec:
        known("backbone", wildcards.backbone, self.configuration.main.backbones, "config/config.yaml")
        return self.backbone_spec(wildcards.backbone)

    def identity(self, wildcards: Wildcards) -> dict[str, Any]:
        """The study and the backbone of a job, as most specs have them."""
        backbone = self.backbone_of(wildcards)
        return {"study": backbone.study, "backbone": backbone}

    def study_named(self, wildcards: Wildcards) -> Study:
        return self.studies[known("study", wildcards.study, self.studies, "config/studies")]

    def study_of(self, wildcards: Wildcards) -> Study:
        """The study of the wildcards' backbone, after a check of every other wildcard against it."""
        name = self.backbone_of(wildcards).study
        study, where, main = self.studies[name], file_of(name), self.configuration.main
        given = dict(wildcards.items())
        lengths: Sequence[str] = [
            *study.mismatch.lengths, study.ablations.length, *study.lengths, *study.residuals.lengths
        ]  # fmt: skip
        if "benchmark" in given:
            known("benchmark", given["benchmark"], study.benchmarks, where)
            lengths = study.lengths_of(given["benchmark"])
        elif "corpus" in given:
            lengths = study.diagnostics.lengths
        options: dict[str, tuple[Iterable[str], str]] = {
            "length": (dict.fromkeys(lengths), where),
            "maps": (study.maps.trained, where),
            "corpus": (study.diagnostics.corpora, where),
            "comparison": (["mismatch", *dataclasses.asdict(main.ablations)], "config/config.yaml"),
        }
        for kind, (values, place) in options.items():
            if kind in given:
                known(kind, given[kind], values, place)
        if "tasks" in given:
            known("task file", given["tasks"], self.task_files(study, given["benchmark"], given["length"]), where)
        return study

    def assets(self, wildcards: Wildcards) -> str:
        """The manifest of the assets, for a job that runs a backbone."""
        self.study_of(wildcards)
        return self.assets_manifest

    def task_files(self, study: Study, benchmark: str, length: str) -> tuple[str, ...]:
        """How the tasks are dealt out to generate jobs."""
        whole = study.benchmarks[benchmark].tasks_per_job == "all"
        return ("all",) if whole else tasks_of(benchmark, tokens_of(length))
