"""Rows of attention, what is read out of them, and the latency of decoding."""

from __future__ import annotations

from collections.abc import Callable

from snakemake.io import expand

from residual_mass.core.settings import to_json, tokens_of
from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.methods import method_named
from residual_mass.methods.arms import ArmSpec, own_identities
from residual_mass.recipes import RECIPES
from residual_mass.study import paths
from residual_mass.study.computed.evaluation import EvaluationJobs
from residual_mass.study.computed.registry import Wildcards, known, maps_specs, shared
from residual_mass.study.config import file_of
from residual_mass.study.protocol import Study
from residual_mass.study.sections.diagnostics import Head, Latencies, Sampling
from residual_mass.study.sections.evaluation import Resampling
from residual_mass.study.specs import (
    CaptureSpec,
    FindingsSpec,
    KernelsSpec,
    ResidualErrorsSpec,
    RuntimeSpec,
)


def residual_maps(study: Study) -> list[str]:
    """Labels of the maps that the compared methods need: the main ones, or none."""
    return [study.maps.main] if any(method_named(name).needs_maps for name in study.residuals.methods) else []


class DiagnosticsJobs(EvaluationJobs):
    """Jobs that measure attention, feature maps and latency."""

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
            recipe=RECIPES["capture"],
            **shared(Sampling, captured),
        )
        return to_json(spec)

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

    def residuals_of(self, wildcards: Wildcards) -> Study:
        """The study of the wildcards' backbone, which compares methods at their length."""
        study, where = self.study_of(wildcards), file_of(self.backbone_of(wildcards).study)
        known("length", wildcards.length, study.residuals.lengths, f"residuals.lengths of {where}")
        return study

    def residuals_phi(self, wildcards: Wildcards) -> list[str]:
        """The main maps, where a method needs maps."""
        study = self.residuals_of(wildcards)
        return expand(paths.PHI, backbone=wildcards.backbone, maps=residual_maps(study))

    def residual_errors_spec(self, wildcards: Wildcards) -> str:
        study = self.residuals_of(wildcards)
        compared = study.residuals
        maps = maps_specs(residual_maps(study))
        arms = [ArmSpec(name, compared.budgets[0]) for name in compared.methods]
        spec = ResidualErrorsSpec(
            **self.identity(wildcards),
            corpora=compared.corpora,
            length=wildcards.length,
            methods=compared.methods,
            budgets=compared.budgets,
            anchors=study.anchors,
            maps=maps[0] if maps else None,
            bootstrap_resamples=study.score.bootstrap_resamples,
            residuals=own_identities(arms),
            recipe=RECIPES["residual_errors"],
            **shared(Sampling, compared),
        )
        return to_json(spec)

    def runtime_spec(self, wildcards: Wildcards) -> str:
        study = self.study_of(wildcards)
        spec = RuntimeSpec(
            **self.identity(wildcards),
            anchors=study.anchors,
            map=study.phi.map,
            recipe=RECIPES["runtime"],
            own_methods=tuple(name for name in self.own_methods(study) if method_named(name).fused),
            **shared(Latencies, study.runtime),
        )
        return to_json(spec)
