"""What is computed: for every job that trains, decodes, scores or measures, its inputs and its spec, from its wildcards
alone. A wildcard that the configuration does not know ends the run in one line.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from snakemake.io import expand

from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.benchmarks.decoding import decoding_words
from residual_mass.core import estimators
from residual_mass.core.settings import ArmSpec, MapsSpec, length_and_variant, maps_label, to_json, tokens_of
from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.recipes import RECIPES
from residual_mass.study import paths
from residual_mass.study.config import Configuration, Study
from residual_mass.study.sections import (
    BackboneSettings,
    Benchmark,
    Continuations,
    Decoding,
    Head,
    Latencies,
    Phi,
    Resampling,
    Sampling,
    TrainingSettings,
)
from residual_mass.study.specs import (
    AskedSpec,
    AuditSpec,
    BackboneSpec,
    CaptureSpec,
    FidelitySpec,
    FindingsSpec,
    ForceSpec,
    GenerateSpec,
    KernelsSpec,
    MapErrorsSpec,
    PromptsSpec,
    RuntimeSpec,
    ScoreClaimsSpec,
    ScoreSpec,
    TrainSpec,
    VariantSpec,
)

Wildcards = Any
"""Of a Snakemake job: its wildcards as attributes."""
ERROR_TOLERANCE, LOG_MASS_TOLERANCE = 1e-5, 1e-4
"""Largest differences that the audit of captured rows lets pass."""


def known(kind: str, value: str, options: Iterable[str], where: str) -> str:
    """`value` if it is among the options; otherwise the run ends in one line."""
    if value not in (options := list(options)):
        sys.exit(f"{kind} {value!r} is not in {where}, which has {', '.join(options)}")
    return value


def shared(settings: type[Any], source: Any) -> dict[str, Any]:
    """The fields of `settings` as `source`, which has them too, sets them."""
    return {field.name: getattr(source, field.name) for field in dataclasses.fields(settings)}


def file_of(study: str) -> str:
    return f"config/studies/{study}.yaml"


@dataclasses.dataclass(frozen=True)
class Computed:
    """The studies of a checkout.

    Attributes:
        root: the checkout.
        configuration: its configuration, checked.
    """

    root: Path
    configuration: Configuration

    # ---- what names stand for ----------------------------------------------------------------------------------------

    @property
    def studies(self) -> dict[str, Study]:
        return self.configuration.studies

    @property
    def assets_folder(self) -> Path:
        return Path(self.configuration.main.assets)

    @property
    def assets_manifest(self) -> str:
        return str(self.assets_folder / "manifest.json")

    def here(self, path: str) -> str:
        """A file of the repository as seen from the working directory, so that moving both together reruns nothing."""
        return os.path.relpath(self.root / path)

    def backbones_of(self, study: str) -> list[str]:
        return self.configuration.backbones_of(study)

    def backbone_specs(self, study: str) -> tuple[BackboneSpec, ...]:
        return tuple(self.backbone_spec(name) for name in self.backbones_of(study))

    def backbone_spec(self, name: str) -> BackboneSpec:
        return BackboneSpec(name=name, **shared(BackboneSettings, self.configuration.main.backbones[name]))

    def titles(self, names: Iterable[str]) -> dict[str, str]:
        return {name: self.configuration.main.backbones[name].title for name in names}

    def backbone_of(self, wildcards: Wildcards) -> BackboneSpec:
        known("backbone", wildcards.backbone, self.configuration.main.backbones, "config/config.yaml")
        return self.backbone_spec(wildcards.backbone)

    def identity(self, wildcards: Wildcards) -> dict[str, Any]:
        """The study and the backbone of a job, as most specs have them."""
        backbone = self.backbone_of(wildcards)
        return {"study": backbone.study, "backbone": backbone}

    def study_named(self, wildcards: Wildcards) -> Study:
        return self.studies[known("study", wildcards.study, self.studies, "config/studies")]

    def study_of(self, wildcards: Wildcards) -> Study:
        """The study of the wildcards' backbone, after a check of every other wildcard against it."""
        name = self.backbone_of(wildcards).study
        study, where, main = self.studies[name], file_of(name), self.configuration.main
        given = dict(wildcards.items())
        lengths: Sequence[str] = [*study.mismatch.lengths, study.ablations.length, *study.lengths]
        if "benchmark" in given:
            known("benchmark", given["benchmark"], study.benchmarks, where)
            lengths = study.lengths_of(given["benchmark"])
        elif "corpus" in given:
            lengths = study.diagnostics.lengths
        options: dict[str, tuple[Iterable[str], str]] = {
            "length": (dict.fromkeys(lengths), where),
            "maps": (study.maps.trained, where),
            "corpus": (study.diagnostics.corpora, where),
            "comparison": (["mismatch", *dataclasses.asdict(main.ablations)], "config/config.yaml"),
            "recipe": (main.recipes, "config/config.yaml"),
        }
        for kind, (values, place) in options.items():
            if kind in given:
                known(kind, given[kind], values, place)
        if "tasks" in given:
            known("task file", given["tasks"], self.task_files(study, given["benchmark"], given["length"]), where)
        return study

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def assets(self, wildcards: Wildcards) -> str:
        """The manifest of the assets, for a job that runs a backbone."""
        self.study_of(wildcards)
        return self.assets_manifest

    def assets_for_prompts(self, wildcards: Wildcards) -> str:
        labels = sorted({backbone.tokenizer for backbone in self.configuration.main.backbones.values()})
        known("tokenizer", wildcards.tokenizer, labels, "config/config.yaml")
        name = self.prompts_owner(wildcards).study
        known("benchmark", wildcards.benchmark, self.studies[name].benchmarks, file_of(name))
        known("length", wildcards.length, self.studies[name].lengths_of(wildcards.benchmark), file_of(name))
        return self.assets_manifest

    def prompts_owner(self, wildcards: Wildcards) -> BackboneSpec:
        return self.backbone_spec(self.configuration.tokenizer_owner(wildcards.tokenizer))

    def prompts_spec(self, wildcards: Wildcards) -> str:
        owner = self.prompts_owner(wildcards)
        study = self.studies[owner.study]
        spec = PromptsSpec(
            benchmark=wildcards.benchmark,
            length=wildcards.length,
            tokenizer=wildcards.tokenizer,
            model_id=owner.model_id,
            revision=owner.revision,
            tokenizer_source="hub" if owner.source == "hub" else "assets",
            data_source=study.benchmarks[wildcards.benchmark].data_source,
            examples=self.frozen_examples(study, wildcards.benchmark),
            seed=study.benchmarks[wildcards.benchmark].seed,
            recipe=RECIPES["prompts"],
        )
        return to_json(spec)

    def examples_of(self, benchmark: Benchmark) -> int:
        """Examples per task that are decoded."""
        return self.configuration.main.examples or benchmark.examples

    def frozen_examples(self, study: Study, name: str) -> int:
        """Examples per task that are frozen: those decoded, and where fidelity is measured on more, these."""
        decoded = self.examples_of(study.benchmarks[name])
        forced = study.fidelity.examples if study.fidelity.lengths and name in study.fidelity.benchmarks else 0
        return max(decoded, forced)

    def prompts_of(self, wildcards: Wildcards) -> str:
        tokenizer = self.backbone_of(wildcards).tokenizer
        return paths.PROMPTS.format(benchmark=wildcards.benchmark, tokenizer=tokenizer, length=wildcards.length)

    # ---- feature maps ------------------------------------------------------------------------------------------------

    @property
    def variants(self) -> list[str]:
        """Labels of the feature maps that the ablations train beside a study's own."""
        return sorted(self.configuration.main.variants)

    @property
    def variants_phi(self) -> list[str]:
        """Files of the variants, as one rule makes them."""
        return [paths.VARIANT_PHI.replace("{variant}", variant) for variant in self.variants]

    def main_phi(self, wildcards: Wildcards) -> str:
        return paths.PHI.format(backbone=wildcards.backbone, maps=self.study_of(wildcards).maps.main)

    def train_spec(self, wildcards: Wildcards) -> str:
        """The study's own recipe."""
        return self._training(wildcards, "study", self.study_of(wildcards).phi, {"ours": {}})

    def train_variants_spec(self, wildcards: Wildcards) -> str:
        return self._training(wildcards, "study", self.study_of(wildcards).phi, self.configuration.main.variants)

    def train_recipe_spec(self, wildcards: Wildcards) -> str:
        """A named recipe under one seed."""
        phi = dataclasses.replace(self.phi_of(wildcards), seed=int(wildcards.seed))
        return self._training(wildcards, wildcards.recipe, phi, {wildcards.recipe: {}})

    def phi_of(self, wildcards: Wildcards) -> Phi:
        """How a job trains: as its study says, with what the recipe changes where it is of one."""
        phi = self.study_of(wildcards).phi
        recipe = wildcards.get("recipe")
        return phi.changed(self.configuration.main.recipes[recipe]) if recipe else phi

    def _training(self, wildcards: Wildcards, name: str, phi: Phi, variants: dict[str, dict[str, Any]]) -> str:
        """The spec of one training job; its GPUs are a resource of the job and no part of the spec."""
        changed = {label: phi.changed(changes) for label, changes in sorted(variants.items())}
        spec = TrainSpec(
            name=name,
            backbone=self.backbone_of(wildcards),
            length=wildcards.maps,
            variants=tuple(VariantSpec(label, each.map, each.objective) for label, each in changed.items()),
            anchors=self.study_of(wildcards).anchors,
            recipe=RECIPES["train"],
            **shared(TrainingSettings, phi),
        )
        return to_json(spec)

    def recipe_logs(self, wildcards: Wildcards) -> list[str]:
        """The logs of every recipe and seed that a study compares."""
        runs = self.study_of(wildcards).recipes
        return expand(paths.RECIPE_LOG, **dict(wildcards.items()), recipe=runs.names, seed=runs.seeds)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def task_files(self, study: Study, benchmark: str, length: str) -> tuple[str, ...]:
        """How the tasks are dealt out to generate jobs."""
        whole = study.benchmarks[benchmark].tasks_per_job == "all"
        return ("all",) if whole else tasks_of(benchmark, tokens_of(length))

    def group_maps(self, study: Study, group: str) -> list[str]:
        """Labels of the maps that a group of arms uses; what the main group decodes is not decoded again."""
        length = study.ablations.length
        labels = {
            "main": (study.maps.main,),
            "mismatch": study.mismatch.maps,
            "ablation": (length, *(maps_label(length, variant) for variant in self.variants)),
        }[group]
        return [label for label in labels if group == "main" or label != study.maps.main]

    def group_arms(self, study: Study, group: str) -> tuple[ArmSpec, ...]:
        """What is decoded together: every method at every budget, or one method at one budget under different maps."""
        if group != "main":
            budget = study.mismatch.budget if group == "mismatch" else study.ablations.budget
            return tuple(ArmSpec("topk_phi", budget, maps) for maps in self.group_maps(study, group))
        phi = {name: estimators.estimator_named(name).adds_residual for name in study.methods}
        return tuple(
            ArmSpec(method, budget, study.maps.main if phi[method] else None)
            for method in study.methods
            for budget in (study.budgets if method != "full" else (None,))
        )

    def compared_maps(self, study: Study, comparison: str) -> tuple[str, ...]:
        """Labels of the maps that a comparison is about, in the order of its table's rows."""
        if comparison == "mismatch":
            return study.mismatch.maps
        rows = getattr(self.configuration.main.ablations, comparison)
        return tuple(maps_label(study.ablations.length, "" if row == "ours" else row) for row in rows)

    def compared_arms(self, study: Study, comparison: str) -> tuple[ArmSpec, ...]:
        budget = study.mismatch.budget if comparison == "mismatch" else study.ablations.budget
        rows = (ArmSpec("topk_phi", budget, maps) for maps in self.compared_maps(study, comparison))
        return (ArmSpec("full"), ArmSpec("topk", budget), *rows)

    def group_phi(self, wildcards: Wildcards) -> list[str]:
        labels = self.group_maps(self.study_of(wildcards), wildcards.group)
        return expand(paths.PHI, backbone=wildcards.backbone, maps=labels)

    def generate_spec(self, wildcards: Wildcards) -> str:
        study = self.study_of(wildcards)
        benchmark = study.benchmarks[wildcards.benchmark]
        every_task = tasks_of(wildcards.benchmark, tokens_of(wildcards.length))
        spec = GenerateSpec(
            **self.identity(wildcards),
            benchmark=wildcards.benchmark,
            length=wildcards.length,
            tasks=every_task if wildcards.tasks == "all" else (wildcards.tasks,),
            examples=self.examples_of(benchmark),
            arms=self.group_arms(study, wildcards.group),
            anchors=study.anchors,
            truncate_to=study.truncate_to,
            maps=maps_specs(self.group_maps(study, wildcards.group)),
            allow_extrapolation=wildcards.group == "mismatch",  # what it shows; refused everywhere else
            recipe=RECIPES["generate"],
            **shared(Decoding, benchmark),
        )
        return to_json(spec)

    def generations_of(self, wildcards: Wildcards) -> list[str]:
        """The main arms, and for a comparison those of its maps as well."""
        study = self.study_of(wildcards)
        tasks = self.task_files(study, wildcards.benchmark, wildcards.length)
        groups = ["main"]
        if compared := wildcards.get("comparison"):
            group = "mismatch" if compared == "mismatch" else "ablation"
            groups += [group] if self.group_maps(study, group) else []
        return expand(paths.GENERATIONS, **dict(wildcards.items()), group=groups, tasks=tasks)

    def score_spec(self, wildcards: Wildcards) -> str:
        study = self.study_of(wildcards)
        benchmark = study.benchmarks[wildcards.benchmark]
        compared = wildcards.get("comparison")
        decoding = shared(Decoding, benchmark)
        del decoding["batch_tokens"]
        spec = ScoreSpec(
            **self.identity(wildcards),
            benchmark=wildcards.benchmark,
            length=wildcards.length,
            data_source=benchmark.data_source,
            examples=self.examples_of(benchmark),
            arms=self.compared_arms(study, compared) if compared else None,
            decoding=decoding_words(**decoding, truncate_to=study.truncate_to),
            recipe=RECIPES["score"],
            **shared(Resampling, study.score),
        )
        return to_json(spec)

    def mismatch_results(self, wildcards: Wildcards) -> list[str]:
        lengths = self.study_of(wildcards).mismatch.lengths
        place = {"comparison": "mismatch", "benchmark": "ruler", "backbone": wildcards.backbone}
        return expand(paths.COMPARED, **place, length=lengths)

    def ablation_results(self, wildcards: Wildcards) -> list[str]:
        names = dataclasses.asdict(self.configuration.main.ablations)
        known("ablation", wildcards.ablation, names, "config/config.yaml")
        ablations = self.study_of(wildcards).ablations
        place = {"comparison": wildcards.ablation, "backbone": wildcards.backbone, "length": ablations.length}
        return expand(paths.COMPARED, **place, benchmark=ablations.benchmarks)

    # ---- fidelity ----------------------------------------------------------------------------------------------------

    def fidelity_of(self, wildcards: Wildcards) -> Study:
        """The study of the wildcards' backbone, which measures fidelity at their length."""
        study, where = self.study_of(wildcards), file_of(self.backbone_of(wildcards).study)
        known("length", wildcards.length, study.fidelity.lengths, f"fidelity.lengths of {where}")
        return study

    def force_maps(self, wildcards: Wildcards) -> list[str]:
        """Labels of the maps that continuations are decoded with."""
        return self.forced_maps(self.fidelity_of(wildcards), [wildcards.backbone])

    @staticmethod
    def forced_maps(study: Study, backbones: Iterable[str]) -> list[str]:
        """The main maps, and where one of these backbones has them those that were trained on shorter texts."""
        others = study.mismatch.maps if set(backbones) & set(study.mismatch.backbones) else ()
        return list(dict.fromkeys([study.maps.main, *others]))

    def force_phi(self, wildcards: Wildcards) -> list[str]:
        return expand(paths.PHI, backbone=wildcards.backbone, maps=self.force_maps(wildcards))

    def force_asked(self, wildcards: Wildcards) -> list[str]:
        """The benchmarks whose prompts are continued."""
        study = self.fidelity_of(wildcards)
        return [name for name in study.fidelity.benchmarks if wildcards.length in study.answered_lengths(name)]

    def force_prompts(self, wildcards: Wildcards) -> list[str]:
        tokenizer = self.backbone_of(wildcards).tokenizer
        names = self.force_asked(wildcards)
        return expand(paths.PROMPTS, benchmark=names, tokenizer=tokenizer, length=wildcards.length) if names else []

    def force_spec(self, wildcards: Wildcards) -> str:
        study = self.fidelity_of(wildcards)
        maps = self.force_maps(wildcards)
        asked = (
            AskedSpec(benchmark=name, examples=study.fidelity.examples, **shared(Decoding, study.benchmarks[name]))
            for name in self.force_asked(wildcards)
        )
        others = [("topk_phi", label) for label in maps[1:]] + [(name, None) for name in study.fidelity.methods]
        spec = ForceSpec(
            **self.identity(wildcards),
            length=wildcards.length,
            asked=tuple(asked),
            arms=self.group_arms(study, "main"),
            arms_of_documents=tuple(ArmSpec(name, budget, label) for name, label in others for budget in study.budgets),
            anchors=study.anchors,
            truncate_to=study.truncate_to,
            maps=maps_specs(maps),
            recipe=RECIPES["force"],
            **shared(Continuations, study.fidelity),
        )
        return to_json(spec)

    def fidelity_spec(self, wildcards: Wildcards) -> str:
        study = self.fidelity_of(wildcards)
        spec = FidelitySpec(
            **self.identity(wildcards),
            length=wildcards.length,
            recipe=RECIPES["fidelity"],
            **shared(Resampling, study.score),
        )
        return to_json(spec)

    def claimed_results(self, wildcards: Wildcards) -> list[str]:
        """The scores of every benchmark at every length."""
        study = self.study_of(wildcards)
        lengths = {name: study.lengths_of(name) for name in study.benchmarks}
        return [
            path
            for name in lengths
            for path in expand(paths.RESULTS, benchmark=name, backbone=wildcards.backbone, length=lengths[name])
        ]

    def claimed_mismatch(self, wildcards: Wildcards) -> list[str]:
        compared = wildcards.backbone in self.study_of(wildcards).mismatch.backbones
        return expand(paths.MISMATCH, backbone=wildcards.backbone) if compared else []

    def claimed_fidelity(self, wildcards: Wildcards) -> list[str]:
        lengths = self.study_of(wildcards).fidelity.lengths
        return expand(paths.FIDELITY, backbone=wildcards.backbone, length=lengths) if lengths else []

    def score_claims_spec(self, wildcards: Wildcards) -> str:
        study = self.study_of(wildcards)
        return to_json(ScoreClaimsSpec(study.mismatch.budget, RECIPES["score_claims"]))

    # ---- diagnostics -------------------------------------------------------------------------------------------------

    def prompts_of_packs(self, wildcards: Wildcards) -> list[str]:
        """RULER's frozen prompts, where the packs are made of them."""
        if wildcards.corpus not in PROMPT_PACKS:
            return []
        tokenizer = self.backbone_of(wildcards).tokenizer
        return [paths.PROMPTS.format(benchmark="ruler", tokenizer=tokenizer, length=wildcards.length)]

    def capture_spec(self, wildcards: Wildcards) -> str:
        study = self.study_of(wildcards)
        captured = study.diagnostics
        (maps,) = maps_specs([study.maps.main])
        spec = CaptureSpec(
            **self.identity(wildcards),
            corpus=wildcards.corpus,
            length=wildcards.length,
            budgets=study.budgets,
            anchors=study.anchors,
            maps=maps,
            audited=captured.audited,
            recipe=RECIPES["capture"],
            **shared(Sampling, captured),
        )
        return to_json(spec)

    def audit_spec(self, wildcards: Wildcards) -> str:
        anchors = self.study_of(wildcards).anchors
        return to_json(AuditSpec(anchors, ERROR_TOLERANCE, LOG_MASS_TOLERANCE, RECIPES["audit"]))

    def kernel_maps(self, wildcards: Wildcards) -> list[str]:
        """Labels of the maps whose kernels are shown: the main ones, and at the ablations' point theirs as well."""
        study = self.study_of(wildcards)
        ablated = wildcards.backbone in study.ablations.backbones and wildcards.length == study.ablations.length
        return [study.maps.main, *(self.group_maps(study, "ablation") if ablated else [])]

    def kernels_phi(self, wildcards: Wildcards) -> list[str]:
        return expand(paths.PHI, backbone=wildcards.backbone, maps=self.kernel_maps(wildcards))

    def kernels_spec(self, wildcards: Wildcards) -> str:
        study = self.study_of(wildcards)
        captured = study.diagnostics
        spec = KernelsSpec(
            **self.identity(wildcards),
            corpus=wildcards.corpus,
            length=wildcards.length,
            budget_percent=captured.budget,
            anchors=study.anchors,
            maps=maps_specs(self.kernel_maps(wildcards)),
            queries=captured.queries,
            seed=captured.seed,
            recipe=RECIPES["kernels"],
            **shared(Head, captured.head),
        )
        return to_json(spec)

    def captured_by(self, pattern: str) -> Callable[[Wildcards], list[str]]:
        """The files of all corpora and lengths that a backbone's findings are read out of."""

        def files(wildcards: Wildcards) -> list[str]:
            captured = self.study_of(wildcards).diagnostics
            known("backbone", wildcards.backbone, captured.backbones, "diagnostics.backbones of its study")
            return expand(pattern, backbone=wildcards.backbone, corpus=captured.corpora, length=captured.lengths)

        return files

    def findings_spec(self, wildcards: Wildcards) -> str:
        study = self.study_of(wildcards)
        captured = study.diagnostics
        spec = FindingsSpec(
            study=self.backbone_of(wildcards).study,
            budget_percent=captured.budget,
            corpus=captured.corpora[0],
            length=max(captured.lengths, key=tokens_of),
            recipe=RECIPES["findings"],
            **shared(Resampling, study.score),
        )
        return to_json(spec)

    def maps_at(self, wildcards: Wildcards) -> list[str]:
        """Labels of all maps that a study evaluates for a backbone at a length."""
        study = self.study_of(wildcards)
        labels = [*(study.mismatch.maps if wildcards.backbone in study.mismatch.backbones else ()), study.maps.main]
        if wildcards.backbone in study.ablations.backbones and wildcards.length == study.ablations.length:
            labels += [wildcards.length, *self.group_maps(study, "ablation")]
        return list(dict.fromkeys(labels))

    def phi_at(self, wildcards: Wildcards) -> list[str]:
        return expand(paths.PHI, backbone=wildcards.backbone, maps=self.maps_at(wildcards))

    def map_errors_spec(self, wildcards: Wildcards) -> str:
        study = self.study_of(wildcards)
        captured = study.diagnostics
        spec = MapErrorsSpec(
            backbone=self.backbone_of(wildcards),
            corpus=captured.corpora[0],
            length=wildcards.length,
            budgets=study.budgets,
            anchors=study.anchors,
            maps=maps_specs(self.maps_at(wildcards)),
            recipe=RECIPES["map_errors"],
            **shared(Sampling, captured),
        )
        return to_json(spec)

    def runtime_spec(self, wildcards: Wildcards) -> str:
        study = self.study_of(wildcards)
        spec = RuntimeSpec(
            **self.identity(wildcards),
            anchors=study.anchors,
            map=study.phi.map,
            recipe=RECIPES["runtime"],
            **shared(Latencies, study.runtime),
        )
        return to_json(spec)


def maps_specs(labels: Iterable[str]) -> tuple[MapsSpec, ...]:
    """The labels, each with the length that its maps were trained at, in tokens."""
    return tuple(MapsSpec(label, tokens_of(length_and_variant(label)[0])) for label in labels)
