"""Jobs that render tables, figures, the document and the page of a study: one function for each stage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from snakemake.io import expand

from residual_mass.paper import published
from residual_mass.paper.comparison import COMPARED_TABLES, settings_of
from residual_mass.paper.tables import RUNTIME_PREFIX, TABLES
from residual_mass.paper.titles import text_title
from residual_mass.spec import paths, specs
from residual_mass.spec.figures import FIGURES, kind_of
from residual_mass.spec.sections import Figure
from residual_mass.spec.settings import maps_label
from residual_mass.study.checkout import Checkout, Wildcards, Work, require_known
from residual_mass.study.config import Study, file_of
from residual_mass.study.tables import inputs_and_spec

# ---- tables ----------------------------------------------------------------------------------------------------------


def table(checkout: Checkout, w: Wildcards) -> Work:
    """Any registered table; the study need not list it."""
    checkout.study_named(w)
    labels = [entry.label for entry in TABLES if entry.label != RUNTIME_PREFIX]
    labels += [f"{RUNTIME_PREFIX}{name}" for name in checkout.backbones_of(w.study)]
    require_known("table", w.label, labels, file_of(w.study))
    results, spec = inputs_and_spec(checkout, w.study, w.label)
    if not results:
        raise ValueError(f"{file_of(w.study)}: tables: {w.label} has nothing to show; take it out")
    return {"results": results, "template": _template(checkout, w.label)}, spec


def _template(checkout: Checkout, label: str) -> str:
    """Returns the template of a table or of the document; all tables of latencies share one."""
    name = "runtime" if label.startswith(RUNTIME_PREFIX) else label
    return checkout.here(paths.TEMPLATE.format(name=name))


def published_table(checkout: Checkout, w: Wildcards) -> Work:
    """A table with the paper's own values."""
    require_known("table", w.label, published.labels(), "the paper")
    return {"template": _template(checkout, w.label)}, None


def compared_tables(study: Study) -> list[str]:
    """Returns the tables of a study that the paper has as well."""
    return [label for label in study.tables if label in COMPARED_TABLES]


def comparison(checkout: Checkout, w: Wildcards) -> Work:
    """The tables of a study that the paper has as well, and the settings that decide what can be compared."""
    labels = compared_tables(checkout.study_named(w))
    of_paper = _settings(checkout, "paper") if "paper" in checkout.studies else {}
    of_variants = {}
    for label, changes in checkout.main.variants.items():
        of_variants[label] = settings_of({"phi": changes})
    settings = _settings(checkout, w.study)
    spec = specs.ComparisonSpec(study=w.study, settings=settings, paper=of_paper, variants=of_variants)
    return {"tables": expand(paths.CELLS, study=w.study, label=labels)}, spec


def _settings(checkout: Checkout, study: str) -> dict[str, str]:
    """Returns the settings that values of a study depend on; the study `paper` has the paper's protocol."""
    settings: dict[str, Any] = asdict(checkout.studies[study])
    settings["backbones"] = {backbone.name: asdict(backbone) for backbone in checkout.backbone_specs(study)}
    return settings_of(settings)


def numbers(checkout: Checkout, w: Wildcards) -> Work:
    cells = expand(paths.CELLS, study=w.study, label=checkout.study_named(w).tables)
    return {"tables": cells, "template": _template(checkout, "numbers")}, specs.NumbersSpec(w.study)


# ---- figures ---------------------------------------------------------------------------------------------------------


def figure(checkout: Checkout, w: Wildcards) -> Work:
    """A figure of a study; its files are in the order of its lines or panels."""
    study = checkout.study_named(w)
    require_known("figure", w.label, study.figures, file_of(w.study))
    shown = study.figures[w.label]
    kind = FIGURES[kind_of(w.label)]
    names = shown.of("backbone", "backbones")
    lengths = shown.of("length", "lengths") or (study.ablations.length,)
    maps = shown.maps
    if kind.main_maps:
        maps = (study.maps.main,)
    if shown.variants:
        (length,) = lengths
        maps = (length, *(maps_label(length, variant) for variant in shown.variants))
    budget = study.diagnostics.budget if kind.one_budget else None
    titles = checkout.titles(names) if len(names) > 1 else {}
    resampling = study.score if kind_of(w.label) == "fidelity_tokens" else None
    spec = specs.FigureSpec(
        label=w.label,
        title=_figure_title(checkout, shown),
        budget_percent=budget,
        maps=maps,
        backbone_titles=titles,
        texts=shown.of("text", "texts"),
        score=resampling,
    )
    corpora = shown.of("corpus", "corpora")
    data = expand(kind.data, backbone=names, corpus=corpora, length=lengths, maps=maps)
    return {"data": data}, spec


def _figure_title(checkout: Checkout, shown: Figure) -> str:
    """Returns the backbone, unless there are several, and the text and length that a figure shows."""
    names = shown.of("backbone", "backbones")
    words = [text_title(name) for name in shown.of("corpus", "text", "length")]
    if len(names) == 1:
        words = [*checkout.titles(names).values(), *words]
    return ", ".join(words)


def _figure_titles(checkout: Checkout, study: Study) -> dict[str, str]:
    return {label: _figure_title(checkout, shown) for label, shown in study.figures.items()}


# ---- document and page -----------------------------------------------------------------------------------------------


def document(checkout: Checkout, w: Wildcards) -> Work:
    """All tables and figures of a study, in the order of its configuration."""
    study = checkout.study_named(w)
    spec = specs.DocumentSpec(
        study=w.study,
        backbones=checkout.backbone_specs(w.study),
        figure_titles=_figure_titles(checkout, study),
    )
    tables = expand(paths.TABLE, study=w.study, label=study.tables)
    figures = expand(paths.FIGURE_PDF, study=w.study, label=study.figures)
    numbers = expand(paths.NUMBERS, study=w.study) if study.tables else []
    template = _template(checkout, "main")
    return {"tables": tables, "figures": figures, "numbers": numbers, "template": template}, spec


def report(checkout: Checkout, _: Wildcards) -> Work:
    """The page of the study that config.yaml names."""
    name = checkout.main.study
    study = checkout.studies[name]
    spec = specs.ReportSpec(
        study=name,
        backbones=checkout.backbone_specs(name),
        figure_titles=_figure_titles(checkout, study),
        budgets=study.budgets,
        recommended=study.recommended,
    )
    tables = expand(paths.CELLS, study=name, label=study.tables)
    figures = expand(paths.FIGURE_PNG, study=name, label=study.figures)
    comparison = expand(paths.COMPARISON, study=name) if compared_tables(study) else []
    template = checkout.here(paths.PAGE_TEMPLATE)
    return {"tables": tables, "figures": figures, "comparison": comparison, "template": template}, spec
