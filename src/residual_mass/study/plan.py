"""What a study makes, and what each of its jobs reads and is told.

The rules of the workflow take inputs and specs from a `Plan`; the functions behind them, one for each stage, are in
`study.stages` and `study.rendering`. The DAG itself is Snakemake's.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from snakemake.io import expand

from residual_mass.core.settings import to_json
from residual_mass.paper.comparison import COMPARED
from residual_mass.provenance import MANIFEST
from residual_mass.study import paths, rendering, stages
from residual_mass.study.config import Configuration, Study, file_of
from residual_mass.study.config import load as read_configuration
from residual_mass.study.sections import BackboneSettings
from residual_mass.study.specs import BackboneSpec
from residual_mass.study.stages import Wildcards, Work, benchmark_results, known, shared, task_files


@dataclasses.dataclass(frozen=True)
class Plan:
    """The studies of a checkout.

    Attributes:
        root: the checkout.
        configuration: its configuration, checked.
    """

    root: Path
    configuration: Configuration

    # ---- what rules ask for ------------------------------------------------------------------------------------------

    def inputs(self, stage: str) -> Callable[[Wildcards], Mapping[str, str | list[str]]]:
        """The input files of a stage's jobs by name, as a function of their wildcards."""
        return lambda wildcards: self.work(stage, wildcards)[0]

    def spec(self, stage: str) -> Callable[[Wildcards], str]:
        """The spec of a stage's jobs as JSON, as a function of their wildcards."""
        return lambda wildcards: to_json(self.work(stage, wildcards)[1])

    def work(self, stage: str, wildcards: Wildcards) -> Work:
        """What a job reads and is told; a wildcard that the configuration does not know ends the run in one line."""
        function = getattr(rendering, stage, None) or getattr(stages, stage)
        try:
            return function(self, wildcards)
        except ValueError as error:
            sys.exit(str(error))

    @property
    def assets_folder(self) -> Path:
        return Path(self.configuration.main.assets)

    @property
    def assets_manifest(self) -> str:
        return str(self.assets_folder / MANIFEST)

    @property
    def variants_phi(self) -> list[str]:
        """Files of the variants, as one rule makes them."""
        return [paths.VARIANT_PHI.replace("{variant}", variant) for variant in self.variants]

    def here(self, path: str) -> str:
        """A file of the repository as seen from the working directory, so that moving both together reruns nothing."""
        return os.path.relpath(self.root / path)

    # ---- studies and backbones ---------------------------------------------------------------------------------------

    @property
    def studies(self) -> dict[str, Study]:
        return self.configuration.studies

    @property
    def variants(self) -> list[str]:
        """Labels of the feature maps that the ablations train beside a study's own."""
        return sorted(self.configuration.main.variants)

    def backbones_of(self, study: str) -> list[str]:
        return self.configuration.backbones_of(study)

    def backbone_spec(self, name: str) -> BackboneSpec:
        backbone = self.configuration.main.backbones[known("backbone", name, self.configuration.main.backbones)]
        return BackboneSpec(name=name, **shared(BackboneSettings, backbone))

    def backbone_specs(self, study: str) -> tuple[BackboneSpec, ...]:
        return tuple(map(self.backbone_spec, self.backbones_of(study)))

    def titles(self, names: Iterable[str]) -> dict[str, str]:
        return {name: self.configuration.main.backbones[name].title for name in names}

    def study_named(self, wildcards: Wildcards) -> Study:
        return self.studies[known("study", wildcards.study, self.studies, "config/studies")]

    def study_of(self, wildcards: Wildcards, section: str = "") -> Study:
        """The study of the wildcards' backbone, after a check of the other wildcards against it.

        Args:
            section: the section of the study that lists the lengths of these jobs; empty for those of a benchmark.

        Raises:
            ValueError: a wildcard is not in the configuration; lists what is.
        """
        name = self.backbone_spec(wildcards.backbone).study
        study, where, given = self.studies[name], file_of(name), dict(wildcards.items())
        if benchmark := given.get("benchmark"):
            known("benchmark", benchmark, study.benchmarks, where)
        lengths = getattr(study, section).lengths if section else study.lengths_of(given.get("benchmark", ""))
        options: dict[str, tuple[Iterable[str], str]] = {
            "length": (lengths, f"{section}.lengths of {where}" if section else where),
            "maps": (study.maps.trained, where),
            "corpus": (study.diagnostics.corpora, where),
            "comparison": (["mismatch", *self.ablations], "config/config.yaml"),
            "ablation": (self.ablations, "config/config.yaml"),
        }
        for kind, (values, place) in options.items():
            if kind in given:
                known(kind, given[kind], values, place)
        if "tasks" in given:
            known("task file", given["tasks"], task_files(study, given["benchmark"], given["length"]), where)
        return study

    @property
    def ablations(self) -> list[str]:
        """Names of the ablation tables."""
        return list(dataclasses.asdict(self.configuration.main.ablations))

    def examples_of(self, study: Study, benchmark: str) -> int:
        """Examples per task that are decoded."""
        return self.configuration.main.examples or study.benchmarks[benchmark].examples

    # ---- targets -----------------------------------------------------------------------------------------------------

    def results(self, study: str) -> list[str]:
        """Every result CSV that `all` makes."""
        protocol, names = self.studies[study], self.backbones_of(study)
        place = {"backbone": names, "length": protocol.fidelity.lengths}
        compared, captured = protocol.residuals, protocol.diagnostics.backbones
        return [
            *expand(paths.FIDELITY, **place),
            *(path for benchmark in protocol.benchmarks for path in benchmark_results(protocol, names, benchmark)),
            *expand(paths.MISMATCH, backbone=protocol.mismatch.backbones),
            *expand(paths.ABLATION, ablation=self.ablations, backbone=protocol.ablations.backbones),
            *expand(paths.RESIDUAL_ERRORS, backbone=compared.backbones, length=compared.lengths),
            *expand(paths.RUNTIME, backbone=names if protocol.runtime.contexts else []),
            *expand([paths.ACCOUNTING, paths.CLAIMS], backbone=captured),
        ]

    def rendered(self, study: str) -> list[str]:
        """Every table, figure and document that `all` makes."""
        tables, figures = self.studies[study].tables, self.studies[study].figures
        of_all = [paths.COMPARISON, paths.PICTURE] if set(tables) & set(COMPARED) else []
        of_all += [paths.NUMBERS] * bool(tables) + [paths.DOCUMENT] * bool(tables or figures)
        return [
            *expand(paths.TABLE, study=study, label=tables),
            *expand(of_all, study=study),
            *expand([paths.FIGURE_PDF, paths.FIGURE_PNG], study=study, label=figures),
        ]

    def targets(self, study: str) -> list[str]:
        """Everything that `all` makes."""
        rendered = self.rendered(study)
        return [*self.results(study), *rendered, *([paths.REPORT] if rendered else [])]


def load(root: Path, config: dict[str, Any]) -> Plan:
    """The plan of a checkout; a mistake in its configuration ends the run in one line.

    Args:
        config: Snakemake's, config/config.yaml with what the command line changed.
    """
    words = {"true": True, "false": False}  # on the command line Snakemake takes `offline=true` for a text
    offline = config.get("offline")
    try:
        return Plan(root, read_configuration(root, config | {"offline": words.get(str(offline).lower(), offline)}))
    except ValueError as error:
        sys.exit(str(error))
