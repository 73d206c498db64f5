"""What a study makes: its tables, figures and pages, and everything that they are made of.

The rules of the workflow take their inputs and specs from a `Plan`; the DAG itself is Snakemake's (`study.dag` reads
it).
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from snakemake.io import expand

from residual_mass.core.settings import maps_label, to_json, tokens_of
from residual_mass.paper import published
from residual_mass.paper.comparison import COMPARED as COMPARED_TABLES
from residual_mass.paper.comparison import settings_of
from residual_mass.paper.tables import RUNTIME, Table, find
from residual_mass.paper.titles import benchmark_title
from residual_mass.study import paths
from residual_mass.study.computed.diagnostics import DiagnosticsJobs, residual_maps
from residual_mass.study.computed.fidelity import FidelityJobs
from residual_mass.study.computed.registry import Wildcards, known
from residual_mass.study.config import file_of, tables_for
from residual_mass.study.config import load as read_configuration
from residual_mass.study.labels import KERNEL_FIDELITY
from residual_mass.study.protocol import Study
from residual_mass.study.sections.figures import Figure, kind_of
from residual_mass.study.sections.figures import find as drawn
from residual_mass.study.specs import ComparisonSpec, DocumentSpec, FigureSpec, NumbersSpec, ReportSpec, TableSpec


@dataclasses.dataclass(frozen=True)
class Plan(FidelityJobs, DiagnosticsJobs):
    """The studies of a checkout."""

    # ---- tables ------------------------------------------------------------------------------------------------------

    def template(self, wildcards: Wildcards) -> str:
        """Latencies of all backbones share one."""
        name = "runtime" if wildcards.label.startswith(RUNTIME) else wildcards.label
        return self.here(paths.TEMPLATE.format(name=name))

    def published_values(self, wildcards: Wildcards) -> str:
        label = known("table", wildcards.label, published.labels(), "the paper")
        return self.here(paths.PUBLISHED_VALUES.format(label=label))

    def shown_table(self, wildcards: Wildcards) -> tuple[Study, Table]:
        """The study and the table of a job; any registered table may be asked for, listed in the study or not."""
        study = self.study_named(wildcards)
        options = tables_for(self.backbones_of(wildcards.study))
        return study, find(known("table", wildcards.label, options, file_of(wildcards.study)))

    def table_results(self, wildcards: Wildcards) -> list[str]:
        """The files that a table shows, by what of a study it is of."""
        study, table = self.shown_table(wildcards)
        names = self.backbones_of(wildcards.study)
        match table.of:
            case "scores":
                shown = [name for name in table.benchmarks if name in study.benchmarks]
                return [path for name in shown for path in self._benchmark_results(wildcards.study, name)]
            case "fidelity":
                return expand(paths.FIDELITY, backbone=names, length=study.fidelity.lengths)
            case "answers":
                return expand(paths.FIDELITY, backbone=names, length=self._answered(study))
            case "residuals":
                return self._residual_results(study)
            case "mismatch":
                return expand(paths.MISMATCH, backbone=study.mismatch.backbones)
            case "diagnostics":
                return expand(paths.ACCOUNTING, backbone=study.diagnostics.backbones)
            case "maps":
                return [path for name in names for path in self._sized_phi(study, name)]
            case "training":
                return expand(paths.TRAINING_LOG, backbone=names, maps=study.maps.main)
            case "runtime":
                return [paths.RUNTIME.format(backbone=wildcards.label.removeprefix(RUNTIME))]
        return expand(paths.ABLATION, ablation=table.of, backbone=study.ablations.backbones)

    @staticmethod
    def _residual_results(study: Study) -> list[str]:
        """Errors of methods, with the fidelity of the same methods and the logs of their maps."""
        compared = study.residuals
        forced = [length for length in compared.lengths if length in study.fidelity.lengths]
        return [
            *expand(paths.RESIDUAL_ERRORS, backbone=compared.backbones, length=compared.lengths),
            *(expand(paths.FIDELITY, backbone=compared.backbones, length=forced) if forced else []),
            *expand(paths.TRAINING_LOG, backbone=compared.backbones, maps=residual_maps(study)),
        ]

    def _sized_phi(self, study: Study, backbone: str) -> list[str]:
        """The main maps of a backbone, and where the ablations are made those of other widths."""
        labels = [study.maps.main]
        if backbone in study.ablations.backbones:
            labels += [maps for maps in self.compared_maps(study, "dphi") if maps != study.ablations.length]
        return expand(paths.PHI, backbone=backbone, maps=labels)

    @staticmethod
    def _answered(study: Study) -> list[str]:
        """The lengths at which prompts of some benchmark are continued."""
        asked = {length for name in study.fidelity.benchmarks for length in study.answered_lengths(name)}
        return [length for length in study.fidelity.lengths if length in asked]

    def _benchmark_results(self, study: str, benchmark: str) -> list[str]:
        place = {"benchmark": benchmark, "backbone": self.backbones_of(study)}
        return expand(paths.RESULTS, **place, length=self.studies[study].lengths_of(benchmark))

    def table_spec(self, wildcards: Wildcards) -> str:
        study, table = self.shown_table(wildcards)
        shown: dict[str, Any] = {"backbones": self.backbones_of(wildcards.study), "budgets": study.budgets}
        shown |= {"lengths": (), "benchmarks": ()} | self._shown_by(study, table, wildcards.label)
        titles = self.titles(shown["backbones"])
        return to_json(TableSpec(study=wildcards.study, label=wildcards.label, backbone_titles=titles, **shown))

    def _shown_by(self, study: Study, table: Table, label: str) -> dict[str, Any]:
        """What a table shows of its section of a study."""
        forced, mismatch, ablations, captured = study.fidelity, study.mismatch, study.ablations, study.diagnostics
        names = self.configuration.backbones_of(next(name for name, each in self.studies.items() if each is study))
        match table.of:
            case "scores":
                of = {name: study.lengths_of(name) for name in table.benchmarks if name in study.benchmarks}
                lengths = sorted({length for each in of.values() for length in each}, key=tokens_of)
                found = {"lengths": lengths, "lengths_of": of, "benchmarks": sorted(study.benchmarks)}
                return found | {"own_methods": self.own_methods(study)}
            case "fidelity":
                return {"lengths": forced.lengths, "maps": self.forced_maps(study, names)}
            case "answers":
                of = {name: study.answered_lengths(name) for name in forced.benchmarks}
                found = {"lengths": self._answered(study), "lengths_of": of, "benchmarks": forced.benchmarks}
                return found | {"maps": [study.maps.main]}
            case "residuals":
                return {"backbones": study.residuals.backbones, "lengths": study.residuals.lengths}
            case "mismatch":
                found = {"backbones": mismatch.backbones, "lengths": mismatch.lengths, "maps": mismatch.maps}
                found |= {"budgets": [mismatch.budget], "benchmarks": ["ruler"]}
                return found | {"own_methods": self.own_methods(study, mismatch.budget)}
            case "diagnostics":
                return {"backbones": captured.backbones, "lengths": captured.lengths, "budgets": [captured.budget]}
            case "runtime":
                backbone = label.removeprefix(RUNTIME)
                return {"backbones": [backbone], "lengths": study.runtime.contexts, "budgets": ()}
            case "maps" | "training":
                return {"budgets": ()}
        found = {"backbones": ablations.backbones, "benchmarks": ablations.benchmarks, "lengths": [ablations.length]}
        found |= {"budgets": [ablations.budget], "maps": self.compared_maps(study, table.of)}
        return found | {"own_methods": self.own_methods(study, ablations.budget)}

    def compared_tables(self, wildcards: Wildcards) -> list[str]:
        """The tables of a study that the paper has as well."""
        labels = [label for label in self.study_named(wildcards).tables if label in COMPARED_TABLES]
        if not labels:
            sys.exit(f"{file_of(wildcards.study)}: tables: has none to compare with the paper's; add one")
        return expand(paths.CELLS, study=wildcards.study, label=labels)

    def comparison_spec(self, wildcards: Wildcards) -> str:
        variants = self.configuration.main.variants
        spec = ComparisonSpec(
            study=wildcards.study,
            settings=self._settings(wildcards.study),
            paper=self._settings("paper") if "paper" in self.studies else {},
            variants={label: settings_of({"phi": changes}) for label, changes in variants.items()},
        )
        return to_json(spec)

    def _settings(self, study: str) -> dict[str, str]:
        """What values of a study depend on; the paper's protocol is that of its own study."""
        backbones = {each.name: dataclasses.asdict(each) for each in self.backbone_specs(study)}
        return settings_of(dataclasses.asdict(self.studies[study]) | {"backbones": backbones})

    def all_tables(self, wildcards: Wildcards) -> list[str]:
        """All tables of a study."""
        tables = self.study_named(wildcards).tables
        if not tables:
            sys.exit(f"{file_of(wildcards.study)}: tables: has none whose numbers could be quoted; add one")
        return expand(paths.CELLS, study=wildcards.study, label=tables)

    def numbers_spec(self, wildcards: Wildcards) -> str:
        return to_json(NumbersSpec(wildcards.study))

    # ---- figures -----------------------------------------------------------------------------------------------------

    def figure_of(self, wildcards: Wildcards) -> Figure:
        study = self.study_named(wildcards)
        return study.figures[known("figure", wildcards.label, study.figures, file_of(wildcards.study))]

    def figure_data(self, wildcards: Wildcards) -> list[str]:
        """The files that a figure shows, in the order of its lines or rows."""
        shown = self.figure_of(wildcards)
        place = {
            "backbone": shown.of("backbone", "backbones"),
            "corpus": shown.of("corpus", "corpora"),
            "length": shown.of("length", "lengths") or self.studies[wildcards.study].ablations.length,
            "maps": self.figure_maps(wildcards),
        }
        return [path for pattern in drawn(wildcards.label).data for path in expand(pattern, **place)]

    def figure_spec(self, wildcards: Wildcards) -> str:
        study, label = self.studies[wildcards.study], wildcards.label
        shown = self.figure_of(wildcards)
        names = shown.of("backbone", "backbones")
        spec = FigureSpec(
            label=label,
            title=self.figure_title(shown),
            budget_percent=study.diagnostics.budget if drawn(label).one_budget else None,
            maps=self.figure_maps(wildcards),
            backbone_titles=self.titles(names) if len(names) > 1 else {},
            texts=shown.of("text", "texts"),
            score=study.score if kind_of(label) == "fidelity_tokens" else None,
        )
        return to_json(spec)

    def figure_maps(self, wildcards: Wildcards) -> tuple[str, ...]:
        """Labels of the feature maps that a figure compares, or whose logs it shows."""
        study, shown = self.studies[wildcards.study], self.figure_of(wildcards)
        if drawn(wildcards.label).main_maps:
            return (study.maps.main,)
        if wildcards.label == KERNEL_FIDELITY:
            length = study.ablations.length
            return length, *(maps_label(length, variant) for variant in shown.variants)
        return shown.maps

    def figure_title(self, shown: Figure) -> str:
        """The backbone, unless there are several, and the text that a figure shows."""
        names = shown.of("backbone", "backbones")
        text = map(benchmark_title, shown.of("corpus", "text", "length"))
        return ", ".join([*self.titles(names).values(), *text] if len(names) == 1 else text)

    # ---- document and page -------------------------------------------------------------------------------------------

    def figures_of(self, study: str) -> list[str]:
        """Labels of the figures that `all` makes."""
        return list(self.studies[study].figures)

    def figure_titles(self, study: str) -> dict[str, str]:
        figures = self.studies[study].figures
        return {label: self.figure_title(figures[label]) for label in self.figures_of(study)}

    def document_tables(self, wildcards: Wildcards) -> list[str]:
        """In the order of the study's configuration."""
        tables = self.study_named(wildcards).tables
        if not tables and not self.figures_of(wildcards.study):
            sys.exit(f"{file_of(wildcards.study)}: tables, figures: has neither for a document; add one")
        return expand(paths.TABLE, study=wildcards.study, label=tables)

    def document_figures(self, wildcards: Wildcards) -> list[str]:
        self.study_named(wildcards)
        return expand(paths.FIGURE_PDF, study=wildcards.study, label=self.figures_of(wildcards.study))

    def document_numbers(self, wildcards: Wildcards) -> list[str]:
        """The macros that a document reads, where the study has tables."""
        return expand(paths.NUMBERS, study=wildcards.study) if self.study_named(wildcards).tables else []

    def document_spec(self, wildcards: Wildcards) -> str:
        study = wildcards.study
        return to_json(DocumentSpec(study, self.backbone_specs(study), self.figure_titles(study)))

    def of_page(self, pattern: str, compared: bool = False) -> list[str]:
        """The files of all tables of the study that the page is of; with `compared` only where the paper has some."""
        study = self.configuration.main.study
        tables = self.studies[study].tables
        if compared and not set(tables) & set(COMPARED_TABLES):
            return []
        return list(dict.fromkeys(expand(pattern, study=study, label=tables or [""]))) if tables or compared else []

    def page_figures(self) -> list[str]:
        study = self.configuration.main.study
        return expand(paths.FIGURE_PNG, study=study, label=self.figures_of(study))

    def report_spec(self, _: Wildcards) -> str:
        name = self.configuration.main.study
        study = self.studies[name]
        spec = ReportSpec(
            study=name,
            backbones=self.backbone_specs(name),
            budgets=study.budgets,
            recommended=study.methods[-1],
            figure_titles=self.figure_titles(name),
        )
        return to_json(spec)

    # ---- targets -----------------------------------------------------------------------------------------------------

    def results(self, study: str) -> list[str]:
        """Every result CSV that `all` makes."""
        protocol, names = self.studies[study], self.backbones_of(study)
        mismatch, ablations, captured = protocol.mismatch, protocol.ablations, protocol.diagnostics
        findings = [paths.ACCOUNTING, paths.CLAIMS]
        return [
            *expand(paths.FIDELITY, backbone=names, length=protocol.fidelity.lengths),
            *(path for benchmark in protocol.benchmarks for path in self._benchmark_results(study, benchmark)),
            *expand(paths.MISMATCH, backbone=mismatch.backbones),
            *expand(
                paths.ABLATION,
                ablation=dataclasses.asdict(self.configuration.main.ablations),
                backbone=ablations.backbones,
            ),
            *expand(paths.RESIDUAL_ERRORS, backbone=protocol.residuals.backbones, length=protocol.residuals.lengths),
            *expand(paths.RUNTIME, backbone=names if protocol.runtime.contexts else []),
            *expand(findings, backbone=captured.backbones),
        ]

    def rendered(self, study: str) -> list[str]:
        """Every table, figure and document that `all` makes."""
        tables, figures = self.studies[study].tables, self.figures_of(study)
        compared = [paths.COMPARISON, paths.PICTURE] if set(tables) & set(COMPARED_TABLES) else []
        numbers = [paths.NUMBERS] if tables else []
        document = [paths.DOCUMENT] if tables or figures else []
        return [
            *expand(paths.TABLE, study=study, label=tables),
            *expand([*compared, *numbers, *document], study=study),
            *expand([paths.FIGURE_PDF, paths.FIGURE_PNG], study=study, label=figures),
        ]

    def targets(self, study: str) -> list[str]:
        """Everything that `all` makes."""
        rendered = self.rendered(study)
        return [*self.results(study), *rendered, *([paths.REPORT] if rendered else [])]


def load(root: Path, config: dict[str, Any]) -> Plan:
    """The plan of a checkout; a slip in its configuration ends the run in one line.

    Args:
        config: Snakemake's, config/config.yaml with what the command line changed.
    """
    words = {"true": True, "false": False}  # on the command line Snakemake takes `offline=true` for a text
    offline = config.get("offline")
    try:
        return Plan(root, read_configuration(root, config | {"offline": words.get(str(offline).lower(), offline)}))
    except ValueError as error:
        sys.exit(str(error))
