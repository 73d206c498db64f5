"""The result files that each table shows, and its spec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from snakemake.io import expand

from residual_mass.paper.tables import RUNTIME, find
from residual_mass.spec import paths
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import TableSpec
from residual_mass.study.config import Configuration, Study


def shown_by(configuration: Configuration, study: Study, w: Any) -> tuple[list[str], TableSpec]:
    """The files that the table `w.label` of study `w.study` shows, and its spec."""
    names, forced, table = configuration.backbones_of(w.study), study.fidelity, find(w.label)

    def spec(backbones: Sequence[str] = names, **shown: Any) -> TableSpec:
        shown = {"budgets": study.budgets, "lengths": (), "benchmarks": ()} | shown
        return TableSpec(w.study, w.label, tuple(backbones), backbone_titles=configuration.titles(backbones), **shown)

    def of(section: Any, *budgets: float, **shown: Any) -> TableSpec:
        return spec(section.backbones, lengths=section.lengths, budgets=budgets, **shown)

    match table.of:
        case "scores":
            points = {name: study.lengths_of(name) for name in table.benchmarks if name in study.benchmarks}
            lengths = sorted({length for lengths in points.values() for length in lengths}, key=tokens_of)
            shown = {"benchmarks": sorted(study.benchmarks), "own_methods": study.own_methods()}
            return benchmark_results(study, names, points), spec(lengths=lengths, lengths_of=points, **shown)
        case "fidelity":
            files = expand(paths.FIDELITY, backbone=names, length=forced.lengths)
            return files, spec(lengths=forced.lengths, maps=study.forced_maps(names))
        case "answers":
            points = {name: study.answered_lengths(name) for name in forced.benchmarks}
            lengths = [length for length in forced.lengths if any(length in lengths for lengths in points.values())]
            shown = {"benchmarks": forced.benchmarks, "maps": [study.maps.main]}
            files = expand(paths.FIDELITY, backbone=names, length=lengths)
            return files, spec(lengths=lengths, lengths_of=points, **shown)
        case "mismatch" | "dphi" | "loss":
            section = study.comparison(table.of)
            shown = {
                "maps": configuration.compared_maps(study, table.of),
                "own_methods": study.own_methods(section.budget),
            }
            path = paths.MISMATCH if table.of == "mismatch" else paths.ABLATION
            files = expand(path, ablation=table.of, backbone=section.backbones)
            return files, of(section, section.budget, benchmarks=section.benchmarks, **shown)
        case "diagnostics":
            captured = study.diagnostics
            return expand(paths.ACCOUNTING, backbone=captured.backbones), of(captured, captured.budget)
        case "residuals":  # with the fidelity of the same methods and the logs of their maps
            compared = study.residuals
            both = [length for length in compared.lengths if length in forced.lengths]
            files = [
                *expand(paths.RESIDUAL_ERRORS, backbone=compared.backbones, length=compared.lengths),
                *expand(paths.FIDELITY, backbone=compared.backbones, length=both),
                *expand(paths.TRAINING_LOG, backbone=compared.backbones, maps=study.maps_for(compared.methods)),
            ]
            return files, of(compared, *study.budgets)
        case "maps":  # the main maps, and those of other widths for backbones of the ablations
            widths = [maps for maps in configuration.compared_maps(study, "dphi") if maps != study.ablations.length]
            labels = {name: widths * (name in study.ablations.backbones) for name in names}
            phi = [expand(paths.PHI, backbone=name, maps=[study.maps.main, *labels[name]]) for name in names]
            return sum(phi, []), spec(budgets=())
        case "training":
            return expand(paths.TRAINING_LOG, backbone=names, maps=study.maps.main), spec(budgets=())
    backbone = [w.label.removeprefix(RUNTIME)]
    return expand(paths.RUNTIME, backbone=backbone), spec(backbone, lengths=study.runtime.contexts, budgets=())


def benchmark_results(study: Study, backbones: Iterable[str], benchmarks: Iterable[str]) -> list[str]:
    places = ({"benchmark": name, "length": study.lengths_of(name)} for name in benchmarks)
    return [path for place in places for path in expand(paths.RESULTS, backbone=backbones, **place)]
