"""Answers to prompts under every method, budget and map, and their scores."""

from __future__ import annotations

import dataclasses

from snakemake.io import expand

from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.benchmarks.decoding import decoding_words
from residual_mass.core.settings import maps_label, to_json, tokens_of
from residual_mass.methods import method_named
from residual_mass.methods.arms import ArmSpec, own_identities
from residual_mass.recipes import RECIPES
from residual_mass.study import paths
from residual_mass.study.computed.prompts import PromptJobs
from residual_mass.study.computed.registry import Wildcards, known, maps_specs, shared
from residual_mass.study.computed.training import TrainingJobs
from residual_mass.study.labels import METHODS
from residual_mass.study.protocol import Study
from residual_mass.study.sections.evaluation import Decoding, Resampling
from residual_mass.study.specs import GenerateSpec, ScoreSpec


class EvaluationJobs(PromptJobs, TrainingJobs):
    """Jobs that generate and score."""

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
        return tuple(
            ArmSpec(method, budget, study.maps.main if method_named(method).needs_maps else None)
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
        own = (ArmSpec(name, budget) for name in self.own_methods(study, budget))
        return (ArmSpec("full"), ArmSpec("topk", budget), *rows, *own)

    @staticmethod
    def own_methods(study: Study, budget: float | None = None) -> tuple[str, ...]:
        """The study's methods that the paper lacks; at a budget those that are decoded at it and need no maps."""
        if budget is None:
            return tuple(name for name in study.methods if name not in METHODS)
        return tuple(
            name
            for name in EvaluationJobs.own_methods(study)
            if budget in study.budgets and not method_named(name).needs_maps
        )

    def group_phi(self, wildcards: Wildcards) -> list[str]:
        labels = self.group_maps(self.study_of(wildcards), wildcards.group)
        return expand(paths.PHI, backbone=wildcards.backbone, maps=labels)

    def generate_spec(self, wildcards: Wildcards) -> str:
        study = self.study_of(wildcards)
        benchmark = study.benchmarks[wildcards.benchmark]
        every_task = tasks_of(wildcards.benchmark, tokens_of(wildcards.length))
        arms = self.group_arms(study, wildcards.group)
        spec = GenerateSpec(
            **self.identity(wildcards),
            benchmark=wildcards.benchmark,
            length=wildcards.length,
            tasks=every_task if wildcards.tasks == "all" else (wildcards.tasks,),
            examples=self.examples_of(benchmark),
            arms=arms,
            anchors=study.anchors,
            truncate_to=study.truncate_to,
            maps=maps_specs(self.group_maps(study, wildcards.group)),
            allow_extrapolation=wildcards.group == "mismatch",  # what it shows; refused everywhere else
            residuals=own_identities(arms),
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
