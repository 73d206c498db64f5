"""What the jobs of several stages share: checked wildcards, and the files and fields that come from them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake.io import expand

from residual_mass.recipes import RECIPES
from residual_mass.spec import paths, specs
from residual_mass.spec.sections import BackboneSettings, fields_of
from residual_mass.spec.settings import MapsSpec, length_and_variant, maps_label, tokens_of
from residual_mass.spec.texts import PROMPT_PACKS
from residual_mass.study.config import Configuration, Study, file_of

Wildcards = Any
"""The wildcards of a Snakemake job as attributes."""
Work = tuple[Mapping[str, str | list[str]], Any]
"""Input files of a job, by flag of its stage, and its spec, which is None for a stage without a spec."""


def require_known(kind: str, value: str, options: Iterable[str], where: str = "config/config.yaml") -> str:
    """Returns `value`. Raises ValueError if it is not among the options."""
    options = list(dict.fromkeys(options))
    if value not in options:
        raise ValueError(f"{kind} {value!r} is not in {where}, which has {', '.join(options)}")
    return value


def maps_specs(labels: Iterable[str]) -> tuple[MapsSpec, ...]:
    """Returns the labels, each with the length in tokens that its maps were trained at."""
    found = []
    for label in labels:
        length, _ = length_and_variant(label)
        found.append(MapsSpec(label, tokens_of(length)))
    return tuple(found)


@dataclass(frozen=True)
class Checkout(Configuration):
    """The studies of a checkout."""

    root: Path

    @property
    def assets_folder(self) -> Path:
        return Path(self.main.assets).expanduser()

    @property
    def assets_manifest(self) -> str:
        return str(self.assets_folder / paths.MANIFEST)

    @property
    def variants(self) -> list[str]:
        """Labels of the further feature maps that the ablations train."""
        return sorted(self.main.variants)

    @property
    def ablations(self) -> list[str]:
        """Names of the ablation tables."""
        return list(vars(self.main.ablations))

    def here(self, path: str) -> str:
        """Returns a file of the repository relative to the working directory: moving both together reruns nothing."""
        return os.path.relpath(self.root / path)

    # ---- wildcards ---------------------------------------------------------------------------------------------------

    def study_named(self, wildcards: Wildcards) -> Study:
        name = require_known("study", wildcards.study, self.studies, "config/studies")
        return self.studies[name]

    def study_of(self, wildcards: Wildcards, section: str = "", backbone: str = "") -> Study:
        """Returns the study of the wildcards' backbone, and checks the other wildcards against it.

        Args:
            section: the section of the study that lists the lengths of these jobs; empty for those of a benchmark.
            backbone: backbone in place of the wildcards'.

        Raises:
            ValueError: a wildcard is not in the configuration; lists the known values.
        """
        name = self.backbone_spec(backbone or wildcards.backbone).study
        study = self.studies[name]
        where = file_of(name)
        given = dict(wildcards.items())

        def require(kind: str, options: Iterable[str], where: str) -> None:
            if kind in given:
                require_known(kind, given[kind], options, where)

        require("benchmark", study.benchmarks, where)
        if section:
            require("length", getattr(study, section).lengths, f"{section}.lengths of {where}")
        else:
            require("length", study.lengths_of(given.get("benchmark", "")), where)
        require("maps", study.maps.trained, where)
        require("corpus", study.diagnostics.corpora, where)
        require("comparison", ["mismatch", *self.ablations], "config/config.yaml")
        require("ablation", self.ablations, "config/config.yaml")
        if "tasks" in given:
            require("tasks", study.task_files(given["benchmark"], given["length"]), where)
        return study

    # ---- fields of specs ---------------------------------------------------------------------------------------------

    def backbone_spec(self, name: str) -> specs.BackboneSpec:
        require_known("backbone", name, self.main.backbones)
        return specs.BackboneSpec(name=name, **fields_of(BackboneSettings, self.main.backbones[name]))

    def backbone_specs(self, study: str) -> tuple[specs.BackboneSpec, ...]:
        return tuple(map(self.backbone_spec, self.backbones_of(study)))

    def job_fields(self, stage: str, wildcards: Wildcards) -> dict[str, Any]:
        """Returns the fields of `JobSpec` for a job of a backbone."""
        backbone = self.backbone_spec(wildcards.backbone)
        return {"study": backbone.study, "backbone": backbone, "recipe": RECIPES[stage]}

    def examples_of(self, study: Study, benchmark: str) -> int:
        """Returns the number of examples per task that are decoded."""
        return self.main.examples or study.benchmarks[benchmark].examples

    def group_maps(self, study: Study, group: str) -> list[str]:
        """Returns the labels of a group's maps; only the main group has the main maps, so none is decoded twice."""
        if group == "main":
            return study.maps_for(study.methods)
        if group == "mismatch":
            labels = list(study.mismatch.maps)
        else:
            labels = [maps_label(study.ablations.length, variant) for variant in ("", *self.variants)]
        return [label for label in labels if label != study.maps.main]

    # ---- files -------------------------------------------------------------------------------------------------------

    def phi_files(self, wildcards: Wildcards, maps: Iterable[str]) -> list[str]:
        return expand(paths.PHI, backbone=wildcards.backbone, maps=maps)

    def prompts_file(self, wildcards: Wildcards, benchmark: str) -> str:
        tokenizer = self.backbone_spec(wildcards.backbone).tokenizer
        return paths.PROMPTS.format(benchmark=benchmark, tokenizer=tokenizer, length=wildcards.length)

    def prompts_of_packs(self, wildcards: Wildcards) -> list[str]:
        """Returns RULER's frozen prompts if the packs are made of them."""
        return [self.prompts_file(wildcards, "ruler")] if wildcards.corpus in PROMPT_PACKS else []
