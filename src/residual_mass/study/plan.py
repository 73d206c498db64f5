"""The results of a study, and the inputs and the spec of each of its jobs: one method of `Plan` for each stage.

The rules of the workflow take inputs and specs from it. The DAG itself is Snakemake's.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snakemake.io import expand

from residual_mass.methods import method_named
from residual_mass.methods.served import backends_of
from residual_mass.paper import published as of_the_paper
from residual_mass.paper.comparison import COMPARED, settings_of
from residual_mass.paper.tables import RUNTIME, TABLES
from residual_mass.paper.titles import text_title
from residual_mass.recipes import RECIPES
from residual_mass.spec import paths, specs
from residual_mass.spec.arms import ArmSpec, own_identities
from residual_mass.spec.columns import decoding_words
from residual_mass.spec.figures import FIGURES, kind_of
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.sections import Figure, parsed
from residual_mass.spec.settings import MapsSpec, length_and_variant, maps_label, to_json, tokens_of
from residual_mass.spec.tasks import tasks_of
from residual_mass.spec.texts import PROMPT_PACKS
from residual_mass.study.config import Configuration, Study, file_of
from residual_mass.study.config import load as read_configuration
from residual_mass.study.tables import benchmark_results, shown_by

Wildcards = Any
"""The wildcards of a Snakemake job as attributes."""
Work = tuple[Mapping[str, str | list[str]], Any]
"""Input files of a job, by flag of its stage, and its spec, which is None for a stage without a spec."""


@dataclasses.dataclass(frozen=True)
class Plan(Configuration):
    """The studies of a checkout. A method with the name of a stage gives inputs and spec of the stage's jobs."""

    root: Path

    # ---- for the rules -----------------------------------------------------------------------------------------------

    def inputs(self, stage: str) -> Callable[[Wildcards], Mapping[str, str | list[str]]]:
        """Returns a function that maps the wildcards of a stage's job to its input files by name."""
        return lambda wildcards: self.work(stage, wildcards)[0]

    def spec(self, stage: str) -> Callable[[Wildcards], str]:
        """Returns a function that maps the wildcards of a stage's job to its spec as JSON."""
        return lambda wildcards: to_json(self.work(stage, wildcards)[1])

    def params(self, stage: str) -> dict[str, Any]:
        """Returns the params of a stage's rule: the stage's name and the spec."""
        return {"stage": stage.replace("_", "-"), "spec": self.spec(stage)}

    def work(self, stage: str, wildcards: Wildcards) -> Work:
        """Returns the inputs and the spec of a job; an unknown wildcard ends the run in one line."""
        try:
            work: Work = getattr(self, stage)(wildcards)
        except ValueError as error:
            sys.exit(str(error))
        return work

    def results(self, study: str) -> list[str]:
        """Every result CSV that `all` makes."""
        protocol, names = self.studies[study], self.backbones_of(study)
        compared, captured = protocol.residuals, protocol.diagnostics.backbones
        return [
            *expand(paths.FIDELITY, backbone=names, length=protocol.fidelity.lengths),
            *benchmark_results(protocol, names, protocol.benchmarks),
            *expand(paths.MISMATCH, backbone=protocol.mismatch.backbones),
            *expand(paths.ABLATION, ablation=self.ablations, backbone=protocol.ablations.backbones),
            *expand(paths.RESIDUAL_ERRORS, backbone=compared.backbones, length=compared.lengths),
            *expand(paths.RUNTIME, backbone=names if protocol.runtime.contexts else []),
            *expand([paths.ACCOUNTING, paths.CLAIMS], backbone=captured),
        ]

    def rendered(self, study: str) -> list[str]:
        """Every table, figure and document that `all` makes."""
        tables, figures = self.studies[study].tables, self.studies[study].figures
        documents = [paths.COMPARISON] if compared_tables(self.studies[study]) else []
        documents += [paths.NUMBERS] * bool(tables) + [paths.DOCUMENT] * bool(tables or figures)
        return [
            *expand(paths.TABLE, study=study, label=tables),
            *expand(documents, study=study),
            *expand([paths.FIGURE_PDF, paths.FIGURE_PNG], study=study, label=figures),
        ]

    def targets(self, study: str) -> list[str]:
        """Everything that `all` makes."""
        rendered = self.rendered(study)
        return [*self.results(study), *rendered, *([paths.REPORT] if rendered else [])]

    # ---- studies and backbones ---------------------------------------------------------------------------------------

    @property
    def assets_folder(self) -> Path:
        return Path(self.main.assets)

    @property
    def assets_manifest(self) -> str:
        return str(self.assets_folder / MANIFEST)

    @property
    def variants_phi(self) -> list[str]:
        """Files of all variants, which one rule makes."""
        return [paths.VARIANT_PHI.replace("{variant}", variant) for variant in self.variants]

    @property
    def variants(self) -> list[str]:
        """Labels of the further feature maps that the ablations train."""
        return sorted(self.main.variants)

    @property
    def ablations(self) -> list[str]:
        """Names of the ablation tables."""
        return list(vars(self.main.ablations))

    def backbone_spec(self, name: str) -> specs.BackboneSpec:
        backbones = self.main.backbones
        return specs.filled(specs.BackboneSpec, backbones[known("backbone", name, backbones)], name=name)

    def backbone_specs(self, study: str) -> tuple[specs.BackboneSpec, ...]:
        return tuple(map(self.backbone_spec, self.backbones_of(study)))

    def template(self, label: str) -> str:
        """Returns the template of a table or of the document; all tables of latencies share one."""
        return self.here(paths.TEMPLATE.format(name="runtime" if label.startswith(RUNTIME) else label))

    def here(self, path: str) -> str:
        """Returns a file of the repository relative to the working directory: moving both together reruns nothing."""
        return os.path.relpath(self.root / path)

    def study_named(self, wildcards: Wildcards) -> Study:
        return self.studies[known("study", wildcards.study, self.studies, "config/studies")]

    def study_of(self, wildcards: Wildcards, section: str = "", backbone: str = "") -> Study:
        """Returns the study of the wildcards' backbone, and checks the other wildcards against it.

        Args:
            section: the section of the study that lists the lengths of these jobs; empty for those of a benchmark.
            backbone: backbone in place of the wildcards'.

        Raises:
            ValueError: a wildcard is not in the configuration; lists the known values.
        """
        name = self.backbone_spec(backbone or wildcards.backbone).study
        study, where, given = self.studies[name], file_of(name), dict(wildcards.items())
        benchmark = known("benchmark", given.get("benchmark", ""), ["", *study.benchmarks], where)
        lengths = getattr(study, section).lengths if section else study.lengths_of(benchmark)
        options: dict[str, tuple[Iterable[str], str]] = {
            "length": (lengths, f"{section}.lengths of {where}" if section else where),
            "maps": (study.maps.trained, where),
            "corpus": (study.diagnostics.corpora, where),
            "comparison": (["mismatch", *self.ablations], "config/config.yaml"),
            "ablation": (self.ablations, "config/config.yaml"),
            "tasks": (study.task_files(benchmark, given["length"]) if "tasks" in given else (), where),
        }
        for kind in filter(given.__contains__, options):
            known(kind, given[kind], *options[kind])
        return study

    def examples_of(self, study: Study, benchmark: str) -> int:
        """Returns the number of examples per task that are decoded."""
        return self.main.examples or study.benchmarks[benchmark].examples

    def spec_of(self, spec: type[specs.Spec], stage: str, w: Wildcards, *sources: Any, **given: Any) -> specs.Spec:
        """Returns a spec, filled from the wildcards, their backbone, its study, the recipe, `sources` and `given`."""
        backbone = self.backbone_spec(w.backbone)
        about = {"study": backbone.study, "backbone": backbone, "recipe": RECIPES[stage]}
        return specs.filled(spec, SimpleNamespace(**dict(w.items()) | about), *sources, **given)

    # ---- prompts and maps --------------------------------------------------------------------------------------------

    def prompts(self, w: Wildcards) -> Work:
        """The examples of a benchmark, frozen once for all backbones with a tokenizer."""
        backbones = self.main.backbones.values()
        known("tokenizer", w.tokenizer, sorted({backbone.tokenizer for backbone in backbones}))
        owner = self.backbone_spec(self.tokenizer_owner(w.tokenizer))
        study = self.study_of(w, backbone=owner.name)
        forced = study.fidelity
        spec = specs.filled(
            specs.PromptsSpec, w, study.benchmarks[w.benchmark],
            model_id=owner.model_id, revision=owner.revision,
            tokenizer_source="hub" if owner.source == "hub" else "assets",
            examples=max(
                self.examples_of(study, w.benchmark),
                forced.examples if forced.lengths and w.benchmark in forced.benchmarks else 0,
            ),
            recipe=RECIPES["prompts"],
        )  # fmt: skip
        return {"assets": self.assets_manifest}, spec

    def train(self, w: Wildcards) -> Work:
        """The study's own recipe."""
        return self._training(w, {"ours": {}})

    def train_variants(self, w: Wildcards) -> Work:
        return self._training(w, self.main.variants)

    def _training(self, w: Wildcards, variants: Mapping[str, Mapping[str, Any]]) -> Work:
        """One training job; its GPUs are a resource of the job and no part of the spec."""
        study, trained = self.study_of(w), []
        for label, changes in sorted(variants.items()):
            parts: dict[str, Any] = {"map": study.phi.map, "objective": study.phi.objective}
            for name, change in changes.items():
                where = f"config/config.yaml: variants.{label}.{name}."
                parts[name] = parsed(type(parts[name]), dataclasses.asdict(parts[name]) | change, where)
            trained.append(specs.VariantSpec(label, **parts))
        given = {"name": "study", "length": w.maps, "variants": tuple(trained)}
        return {"assets": self.assets_manifest}, self.spec_of(specs.TrainSpec, "train", w, study.phi, study, **given)

    # ---- given continuations -----------------------------------------------------------------------------------------

    def force(self, w: Wildcards) -> Work:
        """Given continuations under the arms of the main group, and documents under further arms as well."""
        study = self.study_of(w, "fidelity")
        forced, maps = study.fidelity, study.forced_maps([w.backbone])
        asked = {name: study.benchmarks[name] for name in forced.benchmarks if w.length in study.answered_lengths(name)}
        others = [("topk_phi", label) for label in maps[1:]]
        others += [(name, study.maps.main if method_named(name).needs_maps else None) for name in forced.methods]
        further = tuple(ArmSpec(name, budget, label) for name, label in others for budget in study.budgets)
        prompts = [
            specs.filled(specs.AskedSpec, benchmark, benchmark=name, examples=forced.examples)
            for name, benchmark in asked.items()
        ]
        spec = self.spec_of(
            specs.ForceSpec, "force", w, forced, study,
            asked=tuple(prompts), arms=study.arms, arms_of_documents=further, maps=maps_specs(maps),
            residuals=own_identities((*study.arms, *further)),
        )  # fmt: skip
        files = {"prompts": [self._prompts_of(w, name) for name in asked], "phi": self._phi(w, maps)}
        return {"assets": self.assets_manifest, **files}, spec

    def fidelity(self, w: Wildcards) -> Work:
        study = self.study_of(w, "fidelity")
        spec = self.spec_of(specs.FidelitySpec, "fidelity", w, study.score)
        return {"forced": paths.FORCED.format(backbone=w.backbone, length=w.length)}, spec

    # ---- generated answers -------------------------------------------------------------------------------------------

    def generate(self, w: Wildcards) -> Work:
        """Answers of a group of arms to some tasks of a benchmark."""
        study = self.study_of(w)
        maps, arms = self._group_maps(study, w.group), study.arms
        if w.group != "main":  # one method at one budget under different maps
            arms = tuple(ArmSpec("topk_phi", study.comparison(w.group).budget, label) for label in maps)
        spec = self.spec_of(
            specs.GenerateSpec, "generate", w, study.benchmarks[w.benchmark], study,
            tasks=tasks_of(w.benchmark, tokens_of(w.length)) if w.tasks == "all" else (w.tasks,),
            examples=self.examples_of(study, w.benchmark), arms=arms, maps=maps_specs(maps),
            allow_extrapolation=w.group == "mismatch",  # `mismatch` measures it; other groups refuse it
            residuals=own_identities(arms),
        )  # fmt: skip
        files = {"prompts": self._prompts_of(w, w.benchmark), "phi": self._phi(w, maps)}
        return {"assets": self.assets_manifest, **files}, spec

    def score(self, w: Wildcards) -> Work:
        """Scores of the main arms, or of those that a comparison of maps shows."""
        study, groups, arms = self.study_of(w), ["main"], None
        benchmark, examples = study.benchmarks[w.benchmark], self.examples_of(study, w.benchmark)
        if "comparison" in w.keys():
            arms = self._compared_arms(study, w.comparison)
            group = "mismatch" if w.comparison == "mismatch" else "ablation"
            groups += [group] * bool(self._group_maps(study, group))
        spec = self.spec_of(
            specs.ScoreSpec, "score", w, benchmark, bootstrap_resamples=study.score.bootstrap_resamples,
            seed=study.score.seed, examples=examples, arms=arms, decoding=decoding_words(benchmark, study.truncate_to),
        )  # fmt: skip
        place = {"benchmark": w.benchmark, "backbone": w.backbone, "length": w.length}
        files = expand(paths.GENERATIONS, **place, group=groups, tasks=study.task_files(w.benchmark, w.length))
        return {"prompts": self._prompts_of(w, w.benchmark), "generations": files}, spec

    def _compared_arms(self, study: Study, comparison: str) -> tuple[ArmSpec, ...]:
        """Returns full attention, and at the comparison's budget topk, each of its maps and the study's own methods."""
        budget = study.comparison(comparison).budget
        under_maps = [("topk_phi", maps) for maps in self.compared_maps(study, comparison)]
        shown = [("topk", None), *under_maps, *((name, None) for name in study.own_methods(budget))]
        return (ArmSpec("full"), *(ArmSpec(name, budget, maps) for name, maps in shown))

    def join(self, w: Wildcards) -> Work:
        """The scores of one comparison of maps."""
        name = w.get("ablation", "mismatch")
        section = self.study_of(w).comparison(name)
        place = {"comparison": name, "benchmark": section.benchmarks, "length": section.lengths}
        return {"results": expand(paths.COMPARED, backbone=w.backbone, **place)}, None

    def _group_maps(self, study: Study, group: str) -> list[str]:
        """Returns the labels of a group's maps; only the main group has the main maps, so none is decoded twice."""
        if group == "main":
            return study.maps_for(study.methods)
        of_ablations = [maps_label(study.ablations.length, variant) for variant in ("", *self.variants)]
        labels = study.mismatch.maps if group == "mismatch" else of_ablations
        return [label for label in labels if label != study.maps.main]

    # ---- measurements ------------------------------------------------------------------------------------------------

    def capture(self, w: Wildcards) -> Work:
        study = self.study_of(w, "diagnostics")
        maps = maps_specs([study.maps.main])[0]
        spec = self.spec_of(specs.CaptureSpec, "capture", w, study.diagnostics, study, maps=maps)
        phi = self._phi(w, [study.maps.main])
        return {"assets": self.assets_manifest, "phi": phi, "prompts": self._prompts_of_packs(w)}, spec

    def kernels(self, w: Wildcards) -> Work:
        """Kernels of the main maps, and of the ablations' maps at their backbones and length."""
        study = self.study_of(w, "diagnostics")
        captured = study.diagnostics
        ablated = w.backbone in study.ablations.backbones and w.length == study.ablations.length
        maps = [study.maps.main, *(self._group_maps(study, "ablation") if ablated else [])]
        spec = self.spec_of(
            specs.KernelsSpec, "kernels", w, captured, study,
            layer=captured.head.layer, head=captured.head.head, budget_percent=captured.budget, maps=maps_specs(maps),
        )  # fmt: skip
        return {"assets": self.assets_manifest, "phi": self._phi(w, maps), "prompts": self._prompts_of_packs(w)}, spec

    def findings(self, w: Wildcards) -> Work:
        """Means and claims from the captures of all texts and lengths."""
        study = self.study_of(w)
        captured = study.diagnostics
        known("backbone", w.backbone, captured.backbones, "diagnostics.backbones of its study")
        spec = self.spec_of(
            specs.FindingsSpec, "findings", w, study.score,
            budget_percent=captured.budget, corpus=captured.corpora[0], length=max(captured.lengths, key=tokens_of),
        )  # fmt: skip
        place = {"backbone": w.backbone, "corpus": captured.corpora, "length": captured.lengths}
        return {"heads": expand(paths.HEADS, **place), "mass": expand(paths.MASS, **place)}, spec

    def residual_errors(self, w: Wildcards) -> Work:
        study = self.study_of(w, "residuals")
        compared, maps = study.residuals, study.maps_for(study.residuals.methods)
        identities = own_identities(ArmSpec(name, compared.budgets[0]) for name in compared.methods)
        spec = self.spec_of(
            specs.ResidualErrorsSpec, "residual_errors", w, compared,
            anchors=study.anchors, bootstrap_resamples=study.score.bootstrap_resamples,
            maps=next(iter(maps_specs(maps)), None), residuals=identities,
        )  # fmt: skip
        return {"assets": self.assets_manifest, "phi": self._phi(w, maps)}, spec

    def runtime(self, w: Wildcards) -> Work:
        study = self.study_of(w)
        methods = map(method_named, study.own_methods())
        own = tuple(method.name for method in methods if backends_of(method) != ("torch",))
        spec = self.spec_of(specs.RuntimeSpec, "runtime", w, study.runtime, study, map=study.phi.map, own_methods=own)
        return {"assets": self.assets_manifest}, spec

    def _phi(self, w: Wildcards, maps: Iterable[str]) -> list[str]:
        return expand(paths.PHI, backbone=w.backbone, maps=maps)

    def _prompts_of(self, w: Wildcards, benchmark: str) -> str:
        tokenizer = self.backbone_spec(w.backbone).tokenizer
        return paths.PROMPTS.format(benchmark=benchmark, tokenizer=tokenizer, length=w.length)

    def _prompts_of_packs(self, w: Wildcards) -> list[str]:
        """Returns RULER's frozen prompts if the packs are made of them."""
        return [self._prompts_of(w, "ruler")] if w.corpus in PROMPT_PACKS else []

    # ---- tables ------------------------------------------------------------------------------------------------------

    def table(self, w: Wildcards) -> Work:
        """Any registered table; the study need not list it."""
        study, names = self.study_named(w), self.backbones_of(w.study)
        labels = [*(entry.label for entry in TABLES if entry.label != RUNTIME), *(f"{RUNTIME}{name}" for name in names)]
        known("table", w.label, labels, file_of(w.study))
        results, spec = shown_by(self, study, w)
        if not results:
            raise ValueError(f"{file_of(w.study)}: tables: {w.label} has nothing to show; take it out")
        return {"results": results, "template": self.template(w.label)}, spec

    def published_table(self, w: Wildcards) -> Work:
        """A table with the paper's own values."""
        known("table", w.label, of_the_paper.labels(), "the paper")
        return {"template": self.template(w.label)}, None

    def comparison(self, w: Wildcards) -> Work:
        """The tables of a study that the paper has as well, and the settings that decide what can be compared."""
        labels = compared_tables(self.study_named(w))
        spec = specs.ComparisonSpec(
            study=w.study,
            settings=self._settings(w.study),
            paper=self._settings("paper") if "paper" in self.studies else {},
            variants={label: settings_of({"phi": changes}) for label, changes in self.main.variants.items()},
        )
        return {"tables": expand(paths.CELLS, study=w.study, label=labels)}, spec

    def _settings(self, study: str) -> dict[str, str]:
        """Returns the settings that values of a study depend on; the study `paper` has the paper's protocol."""
        backbones = {backbone.name: dataclasses.asdict(backbone) for backbone in self.backbone_specs(study)}
        return settings_of(dataclasses.asdict(self.studies[study]) | {"backbones": backbones})

    def numbers(self, w: Wildcards) -> Work:
        cells = expand(paths.CELLS, study=w.study, label=self.study_named(w).tables)
        return {"tables": cells, "template": self.template("numbers")}, specs.NumbersSpec(w.study)

    # ---- figures, document and page ----------------------------------------------------------------------------------

    def figure(self, w: Wildcards) -> Work:
        """A figure of a study; its files are in the order of its lines or panels."""
        study = self.study_named(w)
        shown = study.figures[known("figure", w.label, study.figures, file_of(w.study))]
        kind, names, maps = FIGURES[kind_of(w.label)], shown.of("backbone", "backbones"), shown.maps
        lengths: Any = shown.of("length", "lengths") or study.ablations.length
        if kind.main_maps:
            maps = (study.maps.main,)
        if shown.variants:
            maps = (lengths, *(maps_label(lengths, variant) for variant in shown.variants))
        spec = specs.FigureSpec(
            w.label,
            self._figure_title(shown),
            budget_percent=study.diagnostics.budget if kind.one_budget else None,
            maps=maps,
            backbone_titles=self.titles(names) if len(names) > 1 else {},
            texts=shown.of("text", "texts"),
            score=study.score if kind_of(w.label) == "fidelity_tokens" else None,
        )
        place = {"backbone": names, "corpus": shown.of("corpus", "corpora"), "length": lengths, "maps": maps}
        return {"data": expand(kind.data, **place)}, spec

    def _figure_title(self, shown: Figure) -> str:
        """Returns the backbone, unless there are several, and the text and length that a figure shows."""
        names = shown.of("backbone", "backbones")
        text = map(text_title, shown.of("corpus", "text", "length"))
        return ", ".join([*self.titles(names).values(), *text] if len(names) == 1 else text)

    def _document_spec(self, study: str) -> specs.DocumentSpec:
        titles = {label: self._figure_title(shown) for label, shown in self.studies[study].figures.items()}
        return specs.DocumentSpec(study, self.backbone_specs(study), titles)

    def document(self, w: Wildcards) -> Work:
        """All tables and figures of a study, in the order of its configuration."""
        study = self.study_named(w)
        return {
            "tables": expand(paths.TABLE, study=w.study, label=study.tables),
            "figures": expand(paths.FIGURE_PDF, study=w.study, label=study.figures),
            "numbers": expand(paths.NUMBERS, study=w.study) if study.tables else [],
            "template": self.template("main"),
        }, self._document_spec(w.study)

    def report(self, _: Wildcards) -> Work:
        """The page of the study that config.yaml names."""
        name = self.main.study
        study = self.studies[name]
        about = vars(self._document_spec(name))
        spec = specs.ReportSpec(**about, budgets=study.budgets, recommended=study.recommended)
        return {
            "tables": expand(paths.CELLS, study=name, label=study.tables),
            "figures": expand(paths.FIGURE_PNG, study=name, label=study.figures),
            "comparison": expand(paths.COMPARISON, study=name) if compared_tables(study) else [],
            "template": self.here(paths.PAGE_TEMPLATE),
        }, spec


def load(root: Path, config: dict[str, Any]) -> Plan:
    """Returns the plan of a checkout; a mistake in its configuration ends the run in one line.

    Args:
        config: Snakemake's `config`: config/config.yaml with the changes of the command line.
    """
    try:
        return Plan(**vars(read_configuration(root, config)), root=root)
    except ValueError as error:
        sys.exit(str(error))


# ---- what several stages share ---------------------------------------------------------------------------------------


def known(kind: str, value: str, options: Iterable[str], where: str = "config/config.yaml") -> str:
    """Returns `value`. Raises ValueError if it is not among the options."""
    if value not in (options := list(dict.fromkeys(options))):
        raise ValueError(f"{kind} {value!r} is not in {where}, which has {', '.join(filter(None, options))}")
    return value


def maps_specs(labels: Iterable[str]) -> tuple[MapsSpec, ...]:
    """Returns the labels, each with the length in tokens that its maps were trained at."""
    return tuple(MapsSpec(label, tokens_of(length_and_variant(label)[0])) for label in labels)


def compared_tables(study: Study) -> list[str]:
    """Returns the tables of a study that the paper has as well."""
    return [label for label in study.tables if label in COMPARED]
