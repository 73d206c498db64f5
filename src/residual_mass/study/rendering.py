"""What the jobs that make tables, figures and pages read and are told: one function for each stage."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from snakemake.io import expand

from residual_mass.core.settings import maps_label, tokens_of
from residual_mass.paper import published as of_the_paper
from residual_mass.paper.comparison import COMPARED, settings_of
from residual_mass.paper.tables import RUNTIME, Table, find
from residual_mass.paper.titles import benchmark_title
from residual_mass.study import paths, specs
from residual_mass.study.config import Study, file_of, tables_for
from residual_mass.study.figures import Figure, kind_of
from residual_mass.study.figures import find as kind_named
from residual_mass.study.labels import KERNEL_FIDELITY
from residual_mass.study.stages import (
    Wildcards,
    Work,
    benchmark_results,
    compared_maps,
    forced_maps,
    known,
    own_methods,
    residual_maps,
)

if TYPE_CHECKING:
    from residual_mass.study.plan import Plan

# ---- tables ----------------------------------------------------------------------------------------------------------


def table(plan: Plan, w: Wildcards) -> Work:
    """Any registered table may be asked for, listed in the study or not."""
    study, names = plan.study_named(w), plan.backbones_of(w.study)
    shown = find(known("table", w.label, tables_for(names), file_of(w.study)))
    results, what = _shown_by(plan, study, names, shown, w.label)
    what = {"backbones": names, "budgets": study.budgets, "lengths": (), "benchmarks": ()} | what
    spec = specs.TableSpec(study=w.study, label=w.label, backbone_titles=plan.titles(what["backbones"]), **what)
    name = "runtime" if w.label.startswith(RUNTIME) else w.label  # latencies of all backbones share one template
    return {"results": results, "template": plan.here(paths.TEMPLATE.format(name=name))}, spec


def _shown_by(plan: Plan, study: Study, names: list[str], table: Table, label: str) -> tuple[list[str], dict[str, Any]]:
    """The files that a table shows, by what of a study it is of, and where that differs from the study what of them."""
    forced, mismatch, ablations, captured = study.fidelity, study.mismatch, study.ablations, study.diagnostics
    match table.of:
        case "scores":
            of = {name: study.lengths_of(name) for name in table.benchmarks if name in study.benchmarks}
            lengths = sorted({length for each in of.values() for length in each}, key=tokens_of)
            what = {"lengths": lengths, "lengths_of": of, "benchmarks": sorted(study.benchmarks)}
            files = [path for name in of for path in benchmark_results(study, names, name)]
            return files, what | {"own_methods": own_methods(study)}
        case "fidelity":
            files = expand(paths.FIDELITY, backbone=names, length=forced.lengths)
            return files, {"lengths": forced.lengths, "maps": forced_maps(study, names)}
        case "answers":
            of = {name: study.answered_lengths(name) for name in forced.benchmarks}
            lengths = [length for length in forced.lengths if any(length in each for each in of.values())]
            what = {"lengths": lengths, "lengths_of": of, "benchmarks": forced.benchmarks, "maps": [study.maps.main]}
            return expand(paths.FIDELITY, backbone=names, length=lengths), what
        case "residuals":
            return _residual_results(study), {
                "backbones": study.residuals.backbones,
                "lengths": study.residuals.lengths,
            }
        case "mismatch":
            what = {"backbones": mismatch.backbones, "lengths": mismatch.lengths, "maps": mismatch.maps}
            what |= {"budgets": [mismatch.budget], "benchmarks": ["ruler"]}
            what |= {"own_methods": own_methods(study, mismatch.budget)}
            return expand(paths.MISMATCH, backbone=mismatch.backbones), what
        case "diagnostics":
            what = {"backbones": captured.backbones, "lengths": captured.lengths, "budgets": [captured.budget]}
            return expand(paths.ACCOUNTING, backbone=captured.backbones), what
        case "maps":
            return [path for name in names for path in _sized_phi(plan, study, name)], {"budgets": ()}
        case "training":
            return expand(paths.TRAINING_LOG, backbone=names, maps=study.maps.main), {"budgets": ()}
        case "runtime":
            backbone = label.removeprefix(RUNTIME)
            what = {"backbones": [backbone], "lengths": study.runtime.contexts, "budgets": ()}
            return [paths.RUNTIME.format(backbone=backbone)], what
    what = {"backbones": ablations.backbones, "benchmarks": ablations.benchmarks, "lengths": [ablations.length]}
    what |= {"budgets": [ablations.budget], "maps": compared_maps(plan, study, table.of)}
    what |= {"own_methods": own_methods(study, ablations.budget)}
    return expand(paths.ABLATION, ablation=table.of, backbone=ablations.backbones), what


def _residual_results(study: Study) -> list[str]:
    """Errors of methods, with the fidelity of the same methods and the logs of their maps."""
    compared = study.residuals
    forced = [length for length in compared.lengths if length in study.fidelity.lengths]
    return [
        *expand(paths.RESIDUAL_ERRORS, backbone=compared.backbones, length=compared.lengths),
        *expand(paths.FIDELITY, backbone=compared.backbones, length=forced),
        *expand(paths.TRAINING_LOG, backbone=compared.backbones, maps=residual_maps(study)),
    ]


def _sized_phi(plan: Plan, study: Study, backbone: str) -> list[str]:
    """The main maps of a backbone, and where the ablations are made those of other widths."""
    labels = [study.maps.main]
    if backbone in study.ablations.backbones:
        labels += [maps for maps in compared_maps(plan, study, "dphi") if maps != study.ablations.length]
    return expand(paths.PHI, backbone=backbone, maps=labels)


def published_table(plan: Plan, w: Wildcards) -> Work:
    """A table with the paper's own values."""
    known("table", w.label, of_the_paper.labels(), "the paper")
    name = "runtime" if w.label.startswith(RUNTIME) else w.label
    return {"template": plan.here(paths.TEMPLATE.format(name=name))}, None


def comparison(plan: Plan, w: Wildcards) -> Work:
    """The tables of a study that the paper has as well, and the settings that decide what can be compared."""
    labels = [label for label in plan.study_named(w).tables if label in COMPARED]
    if not labels:
        raise ValueError(f"{file_of(w.study)}: tables: has none to compare with the paper's; add one")
    spec = specs.ComparisonSpec(
        study=w.study,
        settings=_settings(plan, w.study),
        paper=_settings(plan, "paper") if "paper" in plan.studies else {},
        variants={label: settings_of({"phi": each}) for label, each in plan.configuration.main.variants.items()},
    )
    return {"tables": expand(paths.CELLS, study=w.study, label=labels)}, spec


def _settings(plan: Plan, study: str) -> dict[str, str]:
    """What values of a study depend on; the paper's protocol is that of its own study."""
    backbones = {each.name: dataclasses.asdict(each) for each in plan.backbone_specs(study)}
    return settings_of(dataclasses.asdict(plan.studies[study]) | {"backbones": backbones})


def numbers(plan: Plan, w: Wildcards) -> Work:
    tables = plan.study_named(w).tables
    if not tables:
        raise ValueError(f"{file_of(w.study)}: tables: has none whose numbers could be quoted; add one")
    cells, template = expand(paths.CELLS, study=w.study, label=tables), paths.TEMPLATE.format(name="numbers")
    return {"tables": cells, "template": plan.here(template)}, specs.NumbersSpec(w.study)


# ---- figures ---------------------------------------------------------------------------------------------------------


def figure(plan: Plan, w: Wildcards) -> Work:
    """A figure of a study; its files are in the order of its lines or rows."""
    study = plan.study_named(w)
    shown = study.figures[known("figure", w.label, study.figures, file_of(w.study))]
    kind, names, maps = kind_named(w.label), shown.of("backbone", "backbones"), _figure_maps(study, w.label, shown)
    spec = specs.FigureSpec(
        label=w.label,
        title=_figure_title(plan, shown),
        budget_percent=study.diagnostics.budget if kind.one_budget else None,
        maps=maps,
        backbone_titles=plan.titles(names) if len(names) > 1 else {},
        texts=shown.of("text", "texts"),
        score=study.score if kind_of(w.label) == "fidelity_tokens" else None,
    )
    place = {
        "backbone": names,
        "corpus": shown.of("corpus", "corpora"),
        "length": shown.of("length", "lengths") or study.ablations.length,
        "maps": maps,
    }
    return {"data": [path for pattern in kind.data for path in expand(pattern, **place)]}, spec


def _figure_maps(study: Study, label: str, shown: Figure) -> tuple[str, ...]:
    """Labels of the feature maps that a figure compares, or whose logs it shows."""
    if kind_named(label).main_maps:
        return (study.maps.main,)
    if label == KERNEL_FIDELITY:
        length = study.ablations.length
        return length, *(maps_label(length, variant) for variant in shown.variants)
    return shown.maps


def _figure_title(plan: Plan, shown: Figure) -> str:
    """The backbone, unless there are several, and the text that a figure shows."""
    names = shown.of("backbone", "backbones")
    text = map(benchmark_title, shown.of("corpus", "text", "length"))
    return ", ".join([*plan.titles(names).values(), *text] if len(names) == 1 else text)


# ---- document and page -----------------------------------------------------------------------------------------------


def document(plan: Plan, w: Wildcards) -> Work:
    """All tables and figures of a study, in the order of its configuration."""
    study = plan.study_named(w)
    if not study.tables and not study.figures:
        raise ValueError(f"{file_of(w.study)}: tables, figures: has neither for a document; add one")
    spec = specs.DocumentSpec(w.study, plan.backbone_specs(w.study), _figure_titles(plan, study))
    return {
        "tables": expand(paths.TABLE, study=w.study, label=study.tables),
        "figures": expand(paths.FIGURE_PDF, study=w.study, label=study.figures),
        "numbers": expand(paths.NUMBERS, study=w.study) if study.tables else [],
        "template": plan.here(paths.TEMPLATE.format(name="main")),
    }, spec


def document_pdf(plan: Plan, w: Wildcards) -> Work:
    """What a document reads by itself."""
    files, _ = document(plan, w)
    return {name: files[name] for name in ("tables", "figures", "numbers")}, None


def report(plan: Plan, _: Wildcards) -> Work:
    """The page of the study that config.yaml names."""
    name = plan.configuration.main.study
    study, compared = plan.studies[name], set(plan.studies[name].tables) & set(COMPARED)
    spec = specs.ReportSpec(
        study=name,
        backbones=plan.backbone_specs(name),
        budgets=study.budgets,
        recommended=study.methods[-1],
        figure_titles=_figure_titles(plan, study),
    )
    return {
        "tables": expand(paths.CELLS, study=name, label=study.tables),
        "figures": expand(paths.FIGURE_PNG, study=name, label=study.figures),
        "comparison": expand(paths.COMPARISON, study=name) if compared else [],
        "template": plan.here(paths.PAGE_TEMPLATE),
    }, spec


def _figure_titles(plan: Plan, study: Study) -> dict[str, str]:
    return {label: _figure_title(plan, shown) for label, shown in study.figures.items()}
