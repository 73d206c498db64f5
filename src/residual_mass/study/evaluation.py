"""Jobs that make prompts, feature maps, continuations, answers and their scores: one function for each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from snakemake.io import expand

from residual_mass.benchmarks.frozen_examples import checksums_of_examples
from residual_mass.methods import method_named
from residual_mass.recipes import RECIPES
from residual_mass.spec import paths, specs
from residual_mass.spec.arms import ArmSpec, identities_of
from residual_mass.spec.columns import decoding_words
from residual_mass.spec.parsing import parsed
from residual_mass.spec.sections import Continuations, Decoding, Resampling, TrainingSettings, fields_of
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.tasks import tasks_of
from residual_mass.study.checkout import Checkout, Wildcards, Work, maps_specs, require_known
from residual_mass.study.config import Study


def prompts(checkout: Checkout, w: Wildcards) -> Work:
    """The examples of a benchmark, frozen once for all backbones with a tokenizer."""
    backbones = checkout.main.backbones.values()
    require_known("tokenizer", w.tokenizer, sorted({backbone.tokenizer for backbone in backbones}))
    owner = checkout.backbone_spec(checkout.tokenizer_owner(w.tokenizer))
    study = checkout.study_of(w, backbone=owner.name)
    benchmark = study.benchmarks[w.benchmark]
    files = ()
    if benchmark.data_source == "assets" and w.benchmark != "ruler":  # RULER's are generated, at any length
        files = checksums_of_examples(w.benchmark, w.length)
    examples = checkout.examples_of(study, w.benchmark)
    if study.fidelity.lengths and w.benchmark in study.fidelity.benchmarks:
        examples = max(examples, study.fidelity.examples)
    spec = specs.PromptsSpec(
        benchmark=w.benchmark,
        length=w.length,
        tokenizer=w.tokenizer,
        model_id=owner.model_id,
        revision=owner.revision,
        tokenizer_source="assets" if owner.source == "random" else owner.source,
        data_source=benchmark.data_source,
        examples=examples,
        seed=benchmark.seed,
        recipe=RECIPES["prompts"],
        tasks=tasks_of(w.benchmark, tokens_of(w.length)),
        examples_sha256=files,
    )
    return {"assets": checkout.assets_manifest}, spec


# ---- maps ------------------------------------------------------------------------------------------------------------


def train(checkout: Checkout, w: Wildcards) -> Work:
    """The study's own recipe."""
    return _training(checkout, w, {"ours": {}})


def train_variants(checkout: Checkout, w: Wildcards) -> Work:
    return _training(checkout, w, checkout.main.variants)


def _training(checkout: Checkout, w: Wildcards, variants: Mapping[str, Mapping[str, Any]]) -> Work:
    """One training job; its GPUs are a resource of the job and no part of the spec."""
    study = checkout.study_of(w)
    trained = [_variant(study, label, changes) for label, changes in sorted(variants.items())]
    spec = specs.TrainSpec(
        **fields_of(TrainingSettings, study.phi),
        name="study",
        backbone=checkout.backbone_spec(w.backbone),
        length=w.maps,
        variants=tuple(trained),
        anchors=study.anchors,
        recipe=RECIPES["train"],
    )
    return {"assets": checkout.assets_manifest}, spec


def _variant(study: Study, label: str, changes: Mapping[str, Any]) -> specs.VariantSpec:
    """Returns the study's own shape and objective with the changes of a variant."""
    parts: dict[str, Any] = {"map": study.phi.map, "objective": study.phi.objective}
    for name, change in changes.items():
        where = f"config/config.yaml: variants.{label}.{name}."
        changed = asdict(parts[name]) | change
        parts[name] = parsed(type(parts[name]), changed, where)
    return specs.VariantSpec(label, **parts)


# ---- given continuations ---------------------------------------------------------------------------------------------


def force(checkout: Checkout, w: Wildcards) -> Work:
    """Given continuations under the arms of the main group, and documents under further arms as well."""
    study = checkout.study_of(w, "fidelity")
    maps = study.forced_maps([w.backbone])
    benchmarks = [name for name in study.fidelity.benchmarks if w.length in study.answered_lengths(name)]
    prompts = [_forced_prompts(study, name) for name in benchmarks]
    further = _arms_of_documents(study, maps)
    spec = specs.ForceSpec(
        **checkout.job_fields("force", w),
        **fields_of(Continuations, study.fidelity),
        length=w.length,
        arms=study.arms,
        arms_of_documents=further,
        asked=tuple(prompts),
        anchors=study.anchors,
        truncate_to=study.truncate_to,
        maps=maps_specs(maps),
        identities=identities_of((*study.arms, *further)),
    )
    files = {
        "assets": checkout.assets_manifest,
        "prompts": [checkout.prompts_file(w, name) for name in benchmarks],
        "phi": checkout.phi_files(w, maps),
    }
    return files, spec


def _arms_of_documents(study: Study, maps: list[str]) -> tuple[ArmSpec, ...]:
    """Returns the arms of other maps than the main ones, and those of further methods."""
    further = [("topk_phi", label) for label in maps[1:]]
    for name in study.fidelity.methods:
        further.append((name, study.maps.main if method_named(name).needs_maps else None))
    arms = []
    for name, label in further:
        arms += [ArmSpec(name, budget, label) for budget in study.budgets]
    return tuple(arms)


def _forced_prompts(study: Study, benchmark: str) -> specs.ForcedPromptsSpec:
    decoding = fields_of(Decoding, study.benchmarks[benchmark])
    return specs.ForcedPromptsSpec(**decoding, benchmark=benchmark, examples=study.fidelity.examples)


def fidelity(checkout: Checkout, w: Wildcards) -> Work:
    study = checkout.study_of(w, "fidelity")
    spec = specs.FidelitySpec(
        **checkout.job_fields("fidelity", w),
        **fields_of(Resampling, study.score),
        length=w.length,
    )
    return {"forced": paths.FORCED.format(backbone=w.backbone, length=w.length)}, spec


# ---- generated answers -----------------------------------------------------------------------------------------------


def generate(checkout: Checkout, w: Wildcards) -> Work:
    """Answers of a group of arms to some tasks of a benchmark."""
    study = checkout.study_of(w)
    maps = checkout.group_maps(study, w.group)
    arms = study.arms
    tasks = (w.tasks,)
    if w.tasks == "all":
        tasks = tasks_of(w.benchmark, tokens_of(w.length))
    if w.group != "main":  # one method at one budget under different maps
        budget = study.comparison(w.group).budget
        arms = tuple(ArmSpec("topk_phi", budget, label) for label in maps)
    spec = specs.GenerateSpec(
        **checkout.job_fields("generate", w),
        **fields_of(Decoding, study.benchmarks[w.benchmark]),
        benchmark=w.benchmark,
        tasks=tasks,
        examples=checkout.examples_of(study, w.benchmark),
        length=w.length,
        arms=arms,
        anchors=study.anchors,
        truncate_to=study.truncate_to,
        maps=maps_specs(maps),
        allow_extrapolation=w.group == "mismatch",  # `mismatch` measures it; other groups refuse it
        identities=identities_of(arms),
    )
    files = {
        "assets": checkout.assets_manifest,
        "prompts": checkout.prompts_file(w, w.benchmark),
        "phi": checkout.phi_files(w, maps),
    }
    return files, spec


def score(checkout: Checkout, w: Wildcards) -> Work:
    """Scores of the main arms, or of those that a comparison of maps shows."""
    study = checkout.study_of(w)
    benchmark = study.benchmarks[w.benchmark]
    groups = ["main"]
    arms = None
    if "comparison" in w.keys():
        arms = _compared_arms(checkout, study, w.comparison)
        group = "mismatch" if w.comparison == "mismatch" else "ablation"
        if checkout.group_maps(study, group):
            groups.append(group)
    spec = specs.ScoreSpec(
        **checkout.job_fields("score", w),
        **fields_of(Resampling, study.score),
        benchmark=w.benchmark,
        length=w.length,
        data_source=benchmark.data_source,
        examples=checkout.examples_of(study, w.benchmark),
        arms=arms,
        decoding=decoding_words(benchmark, study.truncate_to),
    )
    generations = expand(
        paths.GENERATIONS,
        benchmark=w.benchmark,
        backbone=w.backbone,
        length=w.length,
        group=groups,
        tasks=study.task_files(w.benchmark, w.length),
    )
    return {"prompts": checkout.prompts_file(w, w.benchmark), "generations": generations}, spec


def _compared_arms(checkout: Checkout, study: Study, comparison: str) -> tuple[ArmSpec, ...]:
    """Returns full attention, and at the comparison's budget topk, each of its maps and the study's own methods."""
    budget = study.comparison(comparison).budget
    under_maps = [ArmSpec("topk_phi", budget, maps) for maps in checkout.compared_maps(study, comparison)]
    own = [ArmSpec(name, budget) for name in study.own_methods(budget)]
    return (ArmSpec("full"), ArmSpec("topk", budget), *under_maps, *own)


def join(checkout: Checkout, w: Wildcards) -> Work:
    """The scores of one comparison of maps."""
    name = w.get("ablation", "mismatch")
    section = checkout.study_of(w).comparison(name)
    results = expand(
        paths.COMPARED,
        backbone=w.backbone,
        comparison=name,
        benchmark=section.benchmarks,
        length=section.lengths,
    )
    return {"results": results}, None
