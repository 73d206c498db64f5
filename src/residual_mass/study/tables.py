"""The files that each table shows, and of which backbones, lengths and budgets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from snakemake.io import expand

from residual_mass.core.settings import tokens_of
from residual_mass.paper.tables import RUNTIME, find
from residual_mass.study import paths
from residual_mass.study.config import Study

if TYPE_CHECKING:
    from residual_mass.study.plan import Plan


def shown_by(plan: Plan, study: Study, names: list[str], label: str) -> tuple[list[str], dict[str, Any]]:
    """The files that a table shows, and keys of its `TableSpec` that are not those of the whole study.

    Args:
        names: the study's backbones.
    """
    table, forced = find(label), study.fidelity
    match table.of:
        case "scores":
            points = {name: study.lengths_of(name) for name in table.benchmarks if name in study.benchmarks}
            lengths = sorted({length for each in points.values() for length in each}, key=tokens_of)
            shown = {"benchmarks": sorted(study.benchmarks), "lengths": lengths, "lengths_of": points}
            return benchmark_results(study, names, points), shown | {"own_methods": study.own_methods()}
        case "fidelity":
            shown = {"lengths": forced.lengths, "maps": study.forced_maps(names)}
            return expand(paths.FIDELITY, backbone=names, length=forced.lengths), shown
        case "answers":
            points = {name: study.answered_lengths(name) for name in forced.benchmarks}
            lengths = [length for length in forced.lengths if any(length in each for each in points.values())]
            shown = {"benchmarks": forced.benchmarks, "lengths": lengths, "lengths_of": points}
            return expand(paths.FIDELITY, backbone=names, length=lengths), shown | {"maps": [study.maps.main]}
        case "mismatch" | "dphi" | "loss":
            section = study.comparison(table.of)
            shown = {"benchmarks": section.benchmarks, "maps": plan.compared_maps(study, table.of)}
            shown |= {"own_methods": study.own_methods(section.budget)}
            path = paths.MISMATCH if table.of == "mismatch" else paths.ABLATION
            return expand(path, ablation=table.of, backbone=section.backbones), shown | _of(section, section.budget)
        case "diagnostics":
            captured = study.diagnostics
            return expand(paths.ACCOUNTING, backbone=captured.backbones), _of(captured, captured.budget)
        case "residuals":  # with the fidelity of the same methods and the logs of their maps
            compared = study.residuals
            both = [length for length in compared.lengths if length in forced.lengths]
            return [
                *expand(paths.RESIDUAL_ERRORS, backbone=compared.backbones, length=compared.lengths),
                *expand(paths.FIDELITY, backbone=compared.backbones, length=both),
                *expand(paths.TRAINING_LOG, backbone=compared.backbones, maps=study.maps_for(compared.methods)),
            ], _of(compared, *study.budgets)
        case "maps":  # the main ones, and where the ablations are made those of other widths
            of_widths = [maps for maps in plan.compared_maps(study, "dphi") if maps != study.ablations.length]
            labels = {name: of_widths * (name in study.ablations.backbones) for name in names}
            phi = [expand(paths.PHI, backbone=name, maps=[study.maps.main, *labels[name]]) for name in names]
            return sum(phi, []), {"budgets": ()}
        case "training":
            return expand(paths.TRAINING_LOG, backbone=names, maps=study.maps.main), {"budgets": ()}
    one = [label.removeprefix(RUNTIME)]
    return expand(paths.RUNTIME, backbone=one), {"backbones": one, "lengths": study.runtime.contexts, "budgets": ()}


def _of(section: Any, *budgets: float) -> dict[str, Any]:
    return {"backbones": section.backbones, "lengths": section.lengths, "budgets": budgets}


def benchmark_results(study: Study, backbones: Iterable[str], benchmarks: Iterable[str]) -> list[str]:
    places = ({"benchmark": name, "length": study.lengths_of(name)} for name in benchmarks)
    return [path for place in places for path in expand(paths.RESULTS, backbone=backbones, **place)]
