"""Given continuations under every arm."""

from __future__ import annotations

from collections.abc import Iterable

from snakemake.io import expand

from residual_mass.core.settings import to_json
from residual_mass.methods import method_named
from residual_mass.methods.arms import ArmSpec, own_identities
from residual_mass.recipes import RECIPES
from residual_mass.study import paths
from residual_mass.study.computed.evaluation import EvaluationJobs
from residual_mass.study.computed.registry import Wildcards, known, maps_specs, shared
from residual_mass.study.config import file_of
from residual_mass.study.protocol import Study
from residual_mass.study.sections.evaluation import Continuations, Decoding, Resampling
from residual_mass.study.specs import AskedSpec, FidelitySpec, ForceSpec


class FidelityJobs(EvaluationJobs):
    """Jobs that decode what is given and measure its distance from full attention."""

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
        """The main maps, and where one of these backbones has them those that were trained on shorter texts; none where
        no method needs maps.
        """
        if not any(method_named(name).needs_maps for name in (*study.methods, *study.fidelity.methods)):
            return []
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
        others = [("topk_phi", label) for label in maps[1:]] + [
            (name, study.maps.main if method_named(name).needs_maps else None) for name in study.fidelity.methods
        ]
        arms = self.group_arms(study, "main")
        further = tuple(ArmSpec(name, budget, label) for name, label in others for budget in study.budgets)
        spec = ForceSpec(
            **self.identity(wildcards),
            length=wildcards.length,
            asked=tuple(asked),
            arms=arms,
            arms_of_documents=further,
            anchors=study.anchors,
            truncate_to=study.truncate_to,
            maps=maps_specs(maps),
            residuals=own_identities((*arms, *further)),
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
