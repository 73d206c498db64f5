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

Shown = tuple[list[str], TableSpec]
"""Result files of a table, and its spec."""


def shown_by(configuration: Configuration, study: str, label: str) -> Shown:
    """Returns what a table of a study shows."""
    table = find(label)
    return PARTS[table.of](Asked(configuration, study, label, table))


def benchmark_results(study: Study, backbones: Iterable[str], benchmarks: Iterable[str]) -> list[str]:
    """Returns the scores of benchmarks at all of their lengths."""
    found = []
    for name in benchmarks:
        found += expand(paths.RESULTS, backbone=backbones, benchmark=name, length=study.lengths_of(name))
    return found


@dataclass(frozen=True)
class Asked:
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


def _scores(asked: Asked) -> Shown:
    study = asked.study
    points = {name: study.lengths_of(name) for name in asked.table.benchmarks if name in study.benchmarks}
    evaluated = {length for lengths in points.values() for length in lengths}
    spec = asked.spec(
        asked.backbones,
        lengths=sorted(evaluated, key=tokens_of),
        budgets=study.budgets,
        benchmarks=sorted(study.benchmarks),
        lengths_of=points,
        own_methods=study.own_methods(),
    )
    return benchmark_results(study, asked.backbones, points), spec


def _fidelity(asked: Asked) -> Shown:
    study = asked.study
    lengths = study.fidelity.lengths
    spec = asked.spec(
        asked.backbones,
        lengths=lengths,
        budgets=study.budgets,
        maps=tuple(study.forced_maps(asked.backbones)),
    )
    return expand(paths.FIDELITY, backbone=asked.backbones, length=lengths), spec


def _answers(asked: Asked) -> Shown:
    study = asked.study
    points = {name: study.answered_lengths(name) for name in study.fidelity.benchmarks}
    answered = {length for lengths in points.values() for length in lengths}
    lengths = [length for length in study.fidelity.lengths if length in answered]
    spec = asked.spec(
        asked.backbones,
        lengths=lengths,
        budgets=study.budgets,
        benchmarks=study.fidelity.benchmarks,
        lengths_of=points,
        maps=(study.maps.main,),
    )
    return expand(paths.FIDELITY, backbone=asked.backbones, length=lengths), spec


def _comparison(asked: Asked) -> Shown:
    """A comparison of maps: `mismatch`, or an ablation by its name."""
    name = asked.table.of
    section = asked.study.comparison(name)
    spec = asked.spec(
        section.backbones,
        lengths=section.lengths,
        budgets=(section.budget,),
        benchmarks=section.benchmarks,
        maps=asked.configuration.compared_maps(asked.study, name),
        own_methods=asked.study.own_methods(section.budget),
    )
    path = paths.MISMATCH if name == "mismatch" else paths.ABLATION
    return expand(path, ablation=name, backbone=section.backbones), spec


def _diagnostics(asked: Asked) -> Shown:
    captured = asked.study.diagnostics
    spec = asked.spec(captured.backbones, lengths=captured.lengths, budgets=(captured.budget,))
    return expand(paths.ACCOUNTING, backbone=captured.backbones), spec


def _residuals(asked: Asked) -> Shown:
    """Errors, with the fidelity of the same methods and the logs of their maps."""
    study = asked.study
    compared = study.residuals
    both = [length for length in compared.lengths if length in study.fidelity.lengths]
    maps = study.maps_for(compared.methods)
    files = [
        *expand(paths.RESIDUAL_ERRORS, backbone=compared.backbones, length=compared.lengths),
        *expand(paths.FIDELITY, backbone=compared.backbones, length=both),
        *expand(paths.TRAINING_LOG, backbone=compared.backbones, maps=maps),
    ]
    return files, asked.spec(compared.backbones, lengths=compared.lengths, budgets=study.budgets)


def _maps(asked: Asked) -> Shown:
    """The main maps, and those of other widths for backbones of the ablations."""
    study = asked.study
    files = []
    for name in asked.backbones:
        labels = [study.maps.main]
        if name in study.ablations.backbones:
            widths = asked.configuration.compared_maps(study, "dphi")
            labels += [maps for maps in widths if maps != study.ablations.length]
        files += expand(paths.PHI, backbone=name, maps=labels)
    return files, asked.spec(asked.backbones)


def _training(asked: Asked) -> Shown:
    logs = expand(paths.TRAINING_LOG, backbone=asked.backbones, maps=asked.study.maps.main)
    return logs, asked.spec(asked.backbones)


def _runtime(asked: Asked) -> Shown:
    backbones = [asked.label.removeprefix(RUNTIME_PREFIX)]
    spec = asked.spec(backbones, lengths=asked.study.runtime.contexts)
    return expand(paths.RUNTIME, backbone=backbones), spec


PARTS: dict[str, Callable[[Asked], Shown]] = {
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
