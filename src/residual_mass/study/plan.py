"""What a study makes, and the inputs and the spec of each job.

The rules of the workflow take inputs and specs from it. The DAG itself is Snakemake's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake.io import expand

from residual_mass.spec import paths
from residual_mass.spec.settings import to_json
from residual_mass.study import evaluation, measurements, rendering
from residual_mass.study.checkout import Checkout, Wildcards, Work
from residual_mass.study.config import load_configuration, read_yaml
from residual_mass.study.tables import benchmark_results

JOBS_OF_STAGES: dict[str, Callable[[Checkout, Wildcards], Work]] = {
    "prompts": evaluation.prompts,
    "train": evaluation.train,
    "train_variants": evaluation.train_variants,
    "force": evaluation.force,
    "fidelity": evaluation.fidelity,
    "generate": evaluation.generate,
    "score": evaluation.score,
    "join": evaluation.join,
    "capture": measurements.capture,
    "kernels": measurements.kernels,
    "findings": measurements.findings,
    "residual_errors": measurements.residual_errors,
    "runtime": measurements.runtime,
    "table": rendering.table,
    "published_table": rendering.published_table,
    "comparison": rendering.comparison,
    "numbers": rendering.numbers,
    "figure": rendering.figure,
    "document": rendering.document,
    "report": rendering.report,
}
"""The function that gives the inputs and the spec of a stage's jobs."""


@dataclass(frozen=True)
class Plan(Checkout):
    """The results of the studies of a checkout, and their jobs."""

    def inputs(self, stage: str) -> Callable[[Wildcards], Mapping[str, str | list[str]]]:
        """Returns a function that maps the wildcards of a stage's job to its input files by name."""
        return lambda wildcards: self.work(stage, wildcards)[0]

    def spec(self, stage: str) -> Callable[[Wildcards], str]:
        """Returns a function that maps the wildcards of a stage's job to its spec as JSON."""
        return lambda wildcards: to_json(self.work(stage, wildcards)[1])

    def work(self, stage: str, wildcards: Wildcards) -> Work:
        """Returns the inputs and the spec of a job; an unknown wildcard ends the run in one line."""
        try:
            return JOBS_OF_STAGES[stage](self, wildcards)
        except ValueError as error:
            sys.exit(str(error))

    @property
    def variants_phi(self) -> list[str]:
        """Files of all variants, which one rule makes."""
        return [paths.VARIANT_PHI.replace("{variant}", variant) for variant in self.variants]

    def results(self, study: str) -> list[str]:
        """Every result CSV that `all` makes."""
        protocol = self.studies[study]
        names = self.backbones_of(study)
        compared = protocol.residuals
        found = expand(paths.FIDELITY, backbone=names, length=protocol.fidelity.lengths)
        found += benchmark_results(protocol, names, protocol.benchmarks)
        found += expand(paths.MISMATCH, backbone=protocol.mismatch.backbones)
        found += expand(paths.ABLATION, ablation=self.ablations, backbone=protocol.ablations.backbones)
        found += expand(paths.RESIDUAL_ERRORS, backbone=compared.backbones, length=compared.lengths)
        if protocol.runtime.contexts:
            found += expand(paths.RUNTIME, backbone=names)
        found += expand([paths.ACCOUNTING, paths.CLAIMS], backbone=protocol.diagnostics.backbones)
        return found

    def rendered(self, study: str) -> list[str]:
        """Every table, figure and document that `all` makes."""
        tables = self.studies[study].tables
        figures = self.studies[study].figures
        found = expand(paths.TABLE, study=study, label=tables)
        if rendering.compared_tables(self.studies[study]):
            found += expand(paths.COMPARISON, study=study)
        if tables:
            found += expand(paths.NUMBERS, study=study)
        if tables or figures:
            found += expand(paths.DOCUMENT, study=study)
        found += expand([paths.FIGURE_PDF, paths.FIGURE_PNG], study=study, label=figures)
        return found

    def targets(self, study: str) -> list[str]:
        """Everything that `all` makes."""
        found = self.results(study)
        rendered = self.rendered(study)
        if rendered:
            found += [*rendered, paths.REPORT]
        return found


def check_files(root: Path, further: Iterable[Path] = ()) -> None:
    """Ends the run in one line if a file of settings is not YAML or has a key twice, of which Snakemake takes the last.

    Args:
        root: folder with config/config.yaml; Snakemake says so if the file is missing.
        further: files of `--configfile`, which Snakemake has read; those of JSON are left to it.
    """
    main = root / "config/config.yaml"
    try:
        if main.is_file() and not isinstance(read_yaml(main, "config/config.yaml"), dict):
            raise ValueError("config/config.yaml: has no keys; restore the file")
        for path in further:
            if path.suffix != ".json":
                read_yaml(path, str(path))
    except ValueError as error:
        sys.exit(str(error))


def load_plan(root: Path, config: dict[str, Any]) -> Plan:
    """Returns the plan of a checkout; a mistake in its configuration ends the run in one line.

    Args:
        config: Snakemake's `config`: config/config.yaml with the changes of the command line.
    """
    try:
        configuration = load_configuration(root, config)
    except ValueError as error:
        sys.exit(str(error))
    return Plan(configuration.main, configuration.studies, root)
