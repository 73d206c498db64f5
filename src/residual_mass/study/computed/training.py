"""Feature maps: a study's own, and those of the ablations."""

from __future__ import annotations

from typing import Any

from residual_mass.core.settings import to_json
from residual_mass.recipes import RECIPES
from residual_mass.study import paths
from residual_mass.study.computed.registry import Registry, Wildcards, shared
from residual_mass.study.sections.training import TrainingSettings
from residual_mass.study.specs import TrainSpec, VariantSpec


class TrainingJobs(Registry):
    """Jobs that train feature maps."""

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
        return self._training(wildcards, {"ours": {}})

    def train_variants_spec(self, wildcards: Wildcards) -> str:
        return self._training(wildcards, self.configuration.main.variants)

    def _training(self, wildcards: Wildcards, variants: dict[str, dict[str, Any]]) -> str:
        """The spec of one training job; its GPUs are a resource of the job and no part of the spec."""
        phi = self.study_of(wildcards).phi
        changed = {label: phi.changed(changes) for label, changes in sorted(variants.items())}
        spec = TrainSpec(
            name="study",
            backbone=self.backbone_of(wildcards),
            length=wildcards.maps,
            variants=tuple(VariantSpec(label, each.map, each.objective) for label, each in changed.items()),
            anchors=self.study_of(wildcards).anchors,
            recipe=RECIPES["train"],
            **shared(TrainingSettings, phi),
        )
        return to_json(spec)
