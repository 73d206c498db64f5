"""What the jobs that train, decode, score and measure read and are told: one function for each stage.

Each takes the plan and a job's wildcards and returns the job's input files, by the flag of its stage, and its spec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from snakemake.io import expand

from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.benchmarks.columns import decoding_words
from residual_mass.core.settings import MapsSpec, length_and_variant, maps_label, tokens_of
from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.methods import method_named
from residual_mass.methods.arms import ArmSpec, own_identities
from residual_mass.recipes import RECIPES
from residual_mass.study import paths, specs
from residual_mass.study.config import Study, file_of
from residual_mass.study.labels import METHODS
from residual_mass.study.sections import (
    Continuations,
    Decoding,
    Head,
    Latencies,
    Resampling,
    Sampling,
    TrainingSettings,
)

if TYPE_CHECKING:
    from residual_mass.study.plan import Plan

Wildcards = Any
"""Of a Snakemake job: its wildcards as attributes."""
Work = tuple[Mapping[str, str | list[str]], Any]
"""What a job reads, by the flag of its stage, and its spec; None for a stage without."""

# ---- prompts and maps ------------------------------------------------------------------------------------------------


def prompts(plan: Plan, w: Wildcards) -> Work:
    """The examples of a benchmark, frozen once for all backbones with a tokenizer."""
    backbones = plan.configuration.main.backbones
    known("tokenizer", w.tokenizer, sorted({backbone.tokenizer for backbone in backbones.values()}))
    owner = plan.backbone_spec(plan.configuration.tokenizer_owner(w.tokenizer))
    study, where = plan.studies[owner.study], file_of(owner.study)
    known("benchmark", w.benchmark, study.benchmarks, where)
    known("length", w.length, study.lengths_of(w.benchmark), where)
    forced = study.fidelity.examples if study.fidelity.lengths and w.benchmark in study.fidelity.benchmarks else 0
    spec = specs.PromptsSpec(
        benchmark=w.benchmark,
        length=w.length,
        tokenizer=w.tokenizer,
        model_id=owner.model_id,
        revision=owner.revision,
        tokenizer_source="hub" if owner.source == "hub" else "assets",
        data_source=study.benchmarks[w.benchmark].data_source,
        examples=max(plan.examples_of(study, w.benchmark), forced),
        seed=study.benchmarks[w.benchmark].seed,
        recipe=RECIPES["prompts"],
    )
    return {"assets": plan.assets_manifest}, spec


def train(plan: Plan, w: Wildcards) -> Work:
    """The study's own recipe."""
    return _training(plan, w, {"ours": {}})


def train_variants(plan: Plan, w: Wildcards) -> Work:
    return _training(plan, w, plan.configuration.main.variants)


def _training(plan: Plan, w: Wildcards, variants: Mapping[str, Mapping[str, Any]]) -> Work:
    """One training job; its GPUs are a resource of the job and no part of the spec."""
    study = plan.study_of(w)
    changed = {label: study.phi.changed(changes) for label, changes in sorted(variants.items())}
    spec = specs.TrainSpec(
        name="study",
        backbone=plan.backbone_spec(w.backbone),
        length=w.maps,
        variants=tuple(specs.VariantSpec(label, each.map, each.objective) for label, each in changed.items()),
        anchors=study.anchors,
        recipe=RECIPES["train"],
        **shared(TrainingSettings, study.phi),
    )
    return {"assets": plan.assets_manifest}, spec


# ---- given continuations ---------------------------------------------------------------------------------------------


def force(plan: Plan, w: Wildcards) -> Work:
    """Given continuations under every arm: those of the main group, and on documents further ones."""
    study = plan.study_of(w, "fidelity")
    forced, maps = study.fidelity, forced_maps(study, [w.backbone])
    asked = [name for name in forced.benchmarks if w.length in study.answered_lengths(name)]
    others = [("topk_phi", label) for label in maps[1:]]
    others += [(name, study.maps.main if method_named(name).needs_maps else None) for name in forced.methods]
    arms = _main_arms(study)
    further = tuple(ArmSpec(name, budget, label) for name, label in others for budget in study.budgets)
    spec = specs.ForceSpec(
        **_identity(plan, w),
        length=w.length,
        asked=tuple(
            specs.AskedSpec(benchmark=name, examples=forced.examples, **shared(Decoding, study.benchmarks[name]))
            for name in asked
        ),
        arms=arms,
        arms_of_documents=further,
        anchors=study.anchors,
        truncate_to=study.truncate_to,
        maps=_maps_specs(maps),
        residuals=own_identities((*arms, *further)),
        recipe=RECIPES["force"],
        **shared(Continuations, forced),
    )
    files = {"prompts": [_prompts_of(plan, w, name) for name in asked], "phi": _phi(w, maps)}
    return {"assets": plan.assets_manifest, **files}, spec


def fidelity(plan: Plan, w: Wildcards) -> Work:
    study = plan.study_of(w, "fidelity")
    resampling = shared(Resampling, study.score)
    spec = specs.FidelitySpec(**_identity(plan, w), length=w.length, recipe=RECIPES["fidelity"], **resampling)
    return {"forced": paths.FORCED.format(backbone=w.backbone, length=w.length)}, spec


def forced_maps(study: Study, backbones: Iterable[str]) -> list[str]:
    """The main maps, and where one of these backbones has them those that were trained on shorter texts; none where no
    method needs maps.
    """
    if not any(method_named(name).needs_maps for name in (*study.methods, *study.fidelity.methods)):
        return []
    others = study.mismatch.maps if set(backbones) & set(study.mismatch.backbones) else ()
    return list(dict.fromkeys([study.maps.main, *others]))


# ---- generated answers -----------------------------------------------------------------------------------------------


def generate(plan: Plan, w: Wildcards) -> Work:
    """Answers of a group of arms to some tasks of a benchmark."""
    study = plan.study_of(w)
    maps, arms = _group_maps(plan, study, w.group), _main_arms(study)
    if w.group != "main":  # one method at one budget under different maps
        budget = study.mismatch.budget if w.group == "mismatch" else study.ablations.budget
        arms = tuple(ArmSpec("topk_phi", budget, label) for label in maps)
    spec = specs.GenerateSpec(
        **_identity(plan, w),
        benchmark=w.benchmark,
        length=w.length,
        tasks=tasks_of(w.benchmark, tokens_of(w.length)) if w.tasks == "all" else (w.tasks,),
        examples=plan.examples_of(study, w.benchmark),
        arms=arms,
        anchors=study.anchors,
        truncate_to=study.truncate_to,
        maps=_maps_specs(maps),
        allow_extrapolation=w.group == "mismatch",  # what it shows; refused everywhere else
        residuals=own_identities(arms),
        recipe=RECIPES["generate"],
        **shared(Decoding, study.benchmarks[w.benchmark]),
    )
    return {"assets": plan.assets_manifest, "prompts": _prompts_of(plan, w, w.benchmark), "phi": _phi(w, maps)}, spec


def score(plan: Plan, w: Wildcards) -> Work:
    """Scores of the main arms; for a comparison those of its maps as well."""
    study, compared = plan.study_of(w), w.get("comparison")
    benchmark = study.benchmarks[w.benchmark]
    groups = ["main"]
    if compared:
        group = "mismatch" if compared == "mismatch" else "ablation"
        groups += [group] * bool(_group_maps(plan, study, group))
    tasks = task_files(study, w.benchmark, w.length)
    decoding = shared(Decoding, benchmark)
    del decoding["batch_tokens"]
    spec = specs.ScoreSpec(
        **_identity(plan, w),
        benchmark=w.benchmark,
        length=w.length,
        data_source=benchmark.data_source,
        examples=plan.examples_of(study, w.benchmark),
        arms=_compared_arms(plan, study, compared) if compared else None,
        decoding=decoding_words(**decoding, truncate_to=study.truncate_to),
        recipe=RECIPES["score"],
        **shared(Resampling, study.score),
    )
    place = {"benchmark": w.benchmark, "backbone": w.backbone, "length": w.length}
    generations = expand(paths.GENERATIONS, **place, group=groups, tasks=tasks)
    return {"prompts": _prompts_of(plan, w, w.benchmark), "generations": generations}, spec


def mismatch(plan: Plan, w: Wildcards) -> Work:
    place = {"comparison": "mismatch", "benchmark": "ruler", "length": plan.study_of(w).mismatch.lengths}
    return {"results": expand(paths.COMPARED, backbone=w.backbone, **place)}, None


def ablation(plan: Plan, w: Wildcards) -> Work:
    ablated = plan.study_of(w).ablations
    place = {"comparison": w.ablation, "benchmark": ablated.benchmarks, "length": ablated.length}
    return {"results": expand(paths.COMPARED, backbone=w.backbone, **place)}, None


def compared_maps(plan: Plan, study: Study, comparison: str) -> tuple[str, ...]:
    """Labels of the maps that a comparison is about, in the order of its table's rows."""
    if comparison == "mismatch":
        return study.mismatch.maps
    rows = getattr(plan.configuration.main.ablations, comparison)
    return tuple(maps_label(study.ablations.length, "" if row == "ours" else row) for row in rows)


def _main_arms(study: Study) -> tuple[ArmSpec, ...]:
    """Every method at every budget."""
    return tuple(
        ArmSpec(method, budget, study.maps.main if method_named(method).needs_maps else None)
        for method in study.methods
        for budget in (study.budgets if method != "full" else (None,))
    )


def _group_maps(plan: Plan, study: Study, group: str) -> list[str]:
    """Labels of the maps that a group of arms uses; what the main group decodes is not decoded again."""
    if group == "main":
        return [study.maps.main]
    length = study.ablations.length
    labels = study.mismatch.maps if group == "mismatch" else [maps_label(length, each) for each in ("", *plan.variants)]
    return [label for label in labels if label != study.maps.main]


def _compared_arms(plan: Plan, study: Study, comparison: str) -> tuple[ArmSpec, ...]:
    budget = study.mismatch.budget if comparison == "mismatch" else study.ablations.budget
    rows = (ArmSpec("topk_phi", budget, maps) for maps in compared_maps(plan, study, comparison))
    own = (ArmSpec(name, budget) for name in own_methods(study, budget))
    return (ArmSpec("full"), ArmSpec("topk", budget), *rows, *own)


# ---- measurements ----------------------------------------------------------------------------------------------------


def capture(plan: Plan, w: Wildcards) -> Work:
    study = plan.study_of(w, "diagnostics")
    spec = specs.CaptureSpec(
        **_identity(plan, w),
        corpus=w.corpus,
        length=w.length,
        budgets=study.budgets,
        anchors=study.anchors,
        maps=_maps_specs([study.maps.main])[0],
        recipe=RECIPES["capture"],
        **shared(Sampling, study.diagnostics),
    )
    phi = paths.PHI.format(backbone=w.backbone, maps=study.maps.main)
    return {"assets": plan.assets_manifest, "phi": phi, "prompts": _prompts_of_packs(plan, w)}, spec


def kernels(plan: Plan, w: Wildcards) -> Work:
    """Kernels of the main maps, and at the ablations' point of theirs as well."""
    study = plan.study_of(w, "diagnostics")
    captured = study.diagnostics
    ablated = w.backbone in study.ablations.backbones and w.length == study.ablations.length
    maps = [study.maps.main, *(_group_maps(plan, study, "ablation") if ablated else [])]
    spec = specs.KernelsSpec(
        **_identity(plan, w),
        corpus=w.corpus,
        length=w.length,
        budget_percent=captured.budget,
        anchors=study.anchors,
        maps=_maps_specs(maps),
        queries=captured.queries,
        seed=captured.seed,
        recipe=RECIPES["kernels"],
        **shared(Head, captured.head),
    )
    return {"assets": plan.assets_manifest, "phi": _phi(w, maps), "prompts": _prompts_of_packs(plan, w)}, spec


def findings(plan: Plan, w: Wildcards) -> Work:
    """What is read out of the captures of all texts and lengths."""
    study = plan.study_of(w)
    captured = study.diagnostics
    known("backbone", w.backbone, captured.backbones, "diagnostics.backbones of its study")
    spec = specs.FindingsSpec(
        study=plan.backbone_spec(w.backbone).study,
        budget_percent=captured.budget,
        corpus=captured.corpora[0],
        length=max(captured.lengths, key=tokens_of),
        recipe=RECIPES["findings"],
        **shared(Resampling, study.score),
    )
    place = {"backbone": w.backbone, "corpus": captured.corpora, "length": captured.lengths}
    return {"heads": expand(paths.HEADS, **place), "mass": expand(paths.MASS, **place)}, spec


def residual_errors(plan: Plan, w: Wildcards) -> Work:
    study = plan.study_of(w, "residuals")
    compared, maps = study.residuals, residual_maps(study)
    spec = specs.ResidualErrorsSpec(
        **_identity(plan, w),
        corpora=compared.corpora,
        length=w.length,
        methods=compared.methods,
        budgets=compared.budgets,
        anchors=study.anchors,
        maps=next(iter(_maps_specs(maps)), None),
        bootstrap_resamples=study.score.bootstrap_resamples,
        residuals=own_identities(ArmSpec(name, compared.budgets[0]) for name in compared.methods),
        recipe=RECIPES["residual_errors"],
        **shared(Sampling, compared),
    )
    return {"assets": plan.assets_manifest, "phi": _phi(w, maps)}, spec


def residual_maps(study: Study) -> list[str]:
    """Labels of the maps that the compared methods need: the main ones, or none."""
    return [study.maps.main] * any(method_named(name).needs_maps for name in study.residuals.methods)


def runtime(plan: Plan, w: Wildcards) -> Work:
    study = plan.study_of(w)
    spec = specs.RuntimeSpec(
        **_identity(plan, w),
        anchors=study.anchors,
        map=study.phi.map,
        recipe=RECIPES["runtime"],
        own_methods=tuple(name for name in own_methods(study) if method_named(name).fused),
        **shared(Latencies, study.runtime),
    )
    return {"assets": plan.assets_manifest}, spec


# ---- what several stages share ---------------------------------------------------------------------------------------


def known(kind: str, value: str, options: Iterable[str], where: str = "config/config.yaml") -> str:
    """Returns `value`. Raises ValueError where it is not among the options."""
    if value not in (options := list(dict.fromkeys(options))):
        raise ValueError(f"{kind} {value!r} is not in {where}, which has {', '.join(options)}")
    return value


def shared(settings: type[Any], source: Any) -> dict[str, Any]:
    """The fields of `settings` as `source`, which has them too, sets them."""
    return {field.name: getattr(source, field.name) for field in dataclasses.fields(settings)}


def task_files(study: Study, benchmark: str, length: str) -> tuple[str, ...]:
    """How the tasks are dealt out to generate jobs."""
    whole = study.benchmarks[benchmark].tasks_per_job == "all"
    return ("all",) if whole else tasks_of(benchmark, tokens_of(length))


def benchmark_results(study: Study, backbones: Iterable[str], benchmark: str) -> list[str]:
    lengths = study.lengths_of(benchmark)
    return expand(paths.RESULTS, benchmark=benchmark, backbone=backbones, length=lengths)


def own_methods(study: Study, budget: float | None = None) -> tuple[str, ...]:
    """The study's methods that the paper lacks; at a budget those that are decoded at it and need no maps."""
    own = (name for name in study.methods if name not in METHODS)
    if budget is None:
        return tuple(own)
    return tuple(name for name in own if budget in study.budgets and not method_named(name).needs_maps)


def _identity(plan: Plan, w: Wildcards) -> dict[str, Any]:
    """The study and the backbone of a job, as most specs have them."""
    backbone = plan.backbone_spec(w.backbone)
    return {"study": backbone.study, "backbone": backbone}


def _maps_specs(labels: Iterable[str]) -> tuple[MapsSpec, ...]:
    """The labels, each with the length that its maps were trained at, in tokens."""
    return tuple(MapsSpec(label, tokens_of(length_and_variant(label)[0])) for label in labels)


def _phi(w: Wildcards, labels: Iterable[str]) -> list[str]:
    return [paths.PHI.format(backbone=w.backbone, maps=label) for label in labels]


def _prompts_of(plan: Plan, w: Wildcards, benchmark: str) -> str:
    tokenizer = plan.backbone_spec(w.backbone).tokenizer
    return paths.PROMPTS.format(benchmark=benchmark, tokenizer=tokenizer, length=w.length)


def _prompts_of_packs(plan: Plan, w: Wildcards) -> list[str]:
    """RULER's frozen prompts, where the packs are made of them."""
    return [_prompts_of(plan, w, "ruler")] if w.corpus in PROMPT_PACKS else []
