"""The result files that each table shows, and its spec: one function for each part of a study that tables are of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from snakemake.io import expand

from residual_mass.paper.tables import RUNTIME_PREFIX, Table, find
from residual_mass.spec import paths
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import TableSpec
from residual_mass.study.config import Configuration, Study

InputsAndSpec = tuple[list[str], TableSpec]
"""Result files of a table, and its spec."""


def inputs_and_spec(configuration: Configuration, study: str, label: str) -> InputsAndSpec:
    """Returns what a table of a study shows."""
    table = find(label)
    return TABLE_PARTS[table.of](TableRequest(configuration, study, label, table))


def benchmark_results(study: Study, backbones: Iterable[str], benchmarks: Iterable[str]) -> list[str]:
    """Returns the scores of benchmarks at all of their lengths."""
    found = []
    for name in benchmarks:
        found += expand(paths.RESULTS, backbone=backbones, benchmark=name, length=study.lengths_of(name))
    return found


@dataclass(frozen=True)
class TableRequest:
    """A table of a study."""

    configuration: Configuration
    study_name: str
    label: str
    table: Table

    @property
    def study(self) -> Study:
        return self.configuration.studies[self.study_name]

    @property
    def backbones(self) -> list[str]:
        return self.configuration.backbones_of(self.study_name)

    def spec(
        self,
        backbones: Sequence[str],
        lengths: Sequence[str] = (),
        budgets: Sequence[float] = (),
        benchmarks: Sequence[str] = (),
        **further: Any,
    ) -> TableSpec:
        """Returns the spec; `further` are fields that not every table has."""
        return TableSpec(
            study=self.study_name,
            label=self.label,
            backbones=tuple(backbones),
            lengths=tuple(lengths),
            budgets=tuple(budgets),
            benchmarks=tuple(benchmarks),
            backbone_titles=self.configuration.titles(backbones),
            **further,
        )


def _scores(request: TableRequest) -> InputsAndSpec:
    study = request.study
    shown = [name for name in request.table.benchmarks if name in study.benchmarks]
    points = {name: study.lengths_of(name) for name in shown}
    evaluated = set().union(*points.values())
    spec = request.spec(
        request.backbones,
        lengths=sorted(evaluated, key=tokens_of),
        budgets=study.budgets,
        benchmarks=sorted(study.benchmarks),
        lengths_of=points,
        own_methods=study.own_methods(),
    )
    return benchmark_results(study, request.backbones, points), spec


def _fidelity(request: TableRequest) -> InputsAndSpec:
    study = request.study
    lengths = study.fidelity.lengths
    spec = request.spec(
        request.backbones,
        lengths=lengths,
        budgets=study.budgets,
        maps=tuple(study.forced_maps(request.backbones)),
    )
    return expand(paths.FIDELITY, backbone=request.backbones, length=lengths), spec


def _answers(request: TableRequest) -> InputsAndSpec:
    study = request.study
    points = {name: study.answered_lengths(name) for name in study.fidelity.benchmarks}
    answered = set().union(*points.values())
    lengths = [length for length in study.fidelity.lengths if length in answered]
    spec = request.spec(
        request.backbones,
        lengths=lengths,
        budgets=study.budgets,
        benchmarks=study.fidelity.benchmarks,
        lengths_of=points,
        maps=(study.maps.main,),
    )
    return expand(paths.FIDELITY, backbone=request.backbones, length=lengths), spec


def _comparison(request: TableRequest) -> InputsAndSpec:
    """A comparison of maps: `mismatch`, or an ablation by its name."""
    name = request.table.of
    study = request.study
    section = study.comparison(name)
    maps = request.configuration.compared_maps(study, name)
    own_methods = study.own_methods(section.budget)
    spec = request.spec(
        section.backbones,
        lengths=section.lengths,
        budgets=(section.budget,),
        benchmarks=section.benchmarks,
        maps=maps,
        own_methods=own_methods,
    )
    path = paths.MISMATCH if name == "mismatch" else paths.ABLATION
    return expand(path, ablation=name, backbone=section.backbones), spec


def _diagnostics(request: TableRequest) -> InputsAndSpec:
    captured = request.study.diagnostics
    spec = request.spec(captured.backbones, lengths=captured.lengths, budgets=(captured.budget,))
    return expand(paths.ACCOUNTING, backbone=captured.backbones), spec


def _residuals(request: TableRequest) -> InputsAndSpec:
    """Errors, with the fidelity of the same methods and the logs of their maps."""
    study = request.study
    compared = study.residuals
    both = [length for length in compared.lengths if length in study.fidelity.lengths]
    maps = study.maps_for(compared.methods)
    files = expand(paths.RESIDUAL_ERRORS, backbone=compared.backbones, length=compared.lengths)
    files += expand(paths.FIDELITY, backbone=compared.backbones, length=both)
    files += expand(paths.TRAINING_LOG, backbone=compared.backbones, maps=maps)
    return files, request.spec(compared.backbones, lengths=compared.lengths, budgets=study.budgets)


def _maps(request: TableRequest) -> InputsAndSpec:
    """The main maps, and those of other widths for backbones of the ablations."""
    study = request.study
    files = []
    for name in request.backbones:
        labels = [study.maps.main]
        if name in study.ablations.backbones:
            widths = request.configuration.compared_maps(study, "dphi")
            labels += [maps for maps in widths if maps != study.ablations.length]
        files += expand(paths.PHI, backbone=name, maps=labels)
    return files, request.spec(request.backbones)


def _training(request: TableRequest) -> InputsAndSpec:
    logs = expand(paths.TRAINING_LOG, backbone=request.backbones, maps=request.study.maps.main)
    return logs, request.spec(request.backbones)


def _runtime(request: TableRequest) -> InputsAndSpec:
    backbones = [request.label.removeprefix(RUNTIME_PREFIX)]
    spec = request.spec(backbones, lengths=request.study.runtime.contexts)
    return expand(paths.RUNTIME, backbone=backbones), spec


TABLE_PARTS: dict[str, Callable[[TableRequest], InputsAndSpec]] = {
    "scores": _scores,
    "fidelity": _fidelity,
    "answers": _answers,
    "mismatch": _comparison,
    "dphi": _comparison,
    "loss": _comparison,
    "diagnostics": _diagnostics,
    "residuals": _residuals,
    "maps": _maps,
    "training": _training,
    "runtime": _runtime,
}
"""By the part of a study that a table is of (`Table.of`)."""
