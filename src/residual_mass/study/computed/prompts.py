"""The prompts that a tokenizer's backbones share, frozen once."""

from __future__ import annotations

from residual_mass.core.settings import to_json
from residual_mass.recipes import RECIPES
from residual_mass.study import paths
from residual_mass.study.computed.registry import Registry, Wildcards, known
from residual_mass.study.config import file_of
from residual_mass.study.protocol import Study
from residual_mass.study.sections.evaluation import Benchmark
from residual_mass.study.specs import BackboneSpec, PromptsSpec


class PromptJobs(Registry):
    """Jobs that freeze prompts."""

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
