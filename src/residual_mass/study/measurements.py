"""Jobs that measure heads and the costs of decoding: one function for each stage."""

from __future__ import annotations

from snakemake.io import expand

from residual_mass.methods import method_named
from residual_mass.methods.served import backends_of
from residual_mass.recipes import RECIPES
from residual_mass.spec import paths, specs
from residual_mass.spec.arms import ArmSpec, identities_of
from residual_mass.spec.sections import Head, Latencies, Resampling, Sampling, fields_of
from residual_mass.spec.settings import tokens_of
from residual_mass.study.checkout import Checkout, Wildcards, Work, maps_specs, require_known


def capture(checkout: Checkout, w: Wildcards) -> Work:
    study = checkout.study_of(w, "diagnostics")
    main_maps = study.maps.main
    spec = specs.CaptureSpec(
        **checkout.job_fields("capture", w),
        **fields_of(Sampling, study.diagnostics),
        corpus=w.corpus,
        length=w.length,
        budgets=study.budgets,
        anchors=study.anchors,
        maps=maps_specs([main_maps])[0],
    )
    files = {
        "assets": checkout.assets_manifest,
        "phi": checkout.phi_files(w, [main_maps]),
        "prompts": checkout.prompts_of_packs(w),
    }
    return files, spec


def kernels(checkout: Checkout, w: Wildcards) -> Work:
    """Kernels of the main maps, and of the ablations' maps at their backbones and length."""
    study = checkout.study_of(w, "diagnostics")
    captured = study.diagnostics
    maps = [study.maps.main]
    if w.backbone in study.ablations.backbones and w.length == study.ablations.length:
        maps += checkout.group_maps(study, "ablation")
    spec = specs.KernelsSpec(
        **checkout.job_fields("kernels", w),
        **fields_of(Head, captured.head),
        corpus=w.corpus,
        length=w.length,
        budget_percent=captured.budget,
        anchors=study.anchors,
        maps=maps_specs(maps),
        queries=captured.queries,
        seed=captured.seed,
    )
    files = {
        "assets": checkout.assets_manifest,
        "phi": checkout.phi_files(w, maps),
        "prompts": checkout.prompts_of_packs(w),
    }
    return files, spec


def findings(checkout: Checkout, w: Wildcards) -> Work:
    """Means and claims from the captures of all texts and lengths."""
    study = checkout.study_of(w)
    captured = study.diagnostics
    require_known("backbone", w.backbone, captured.backbones, "diagnostics.backbones of its study")
    spec = specs.FindingsSpec(
        **fields_of(Resampling, study.score),
        study=checkout.backbone_spec(w.backbone).study,
        budget_percent=captured.budget,
        corpus=captured.corpora[0],
        length=max(captured.lengths, key=tokens_of),
        recipe=RECIPES["findings"],
    )
    place = {"backbone": w.backbone, "corpus": captured.corpora, "length": captured.lengths}
    heads = expand(paths.HEADS, **place)
    mass = expand(paths.MASS, **place)
    return {"heads": heads, "mass": mass}, spec


def residual_errors(checkout: Checkout, w: Wildcards) -> Work:
    study = checkout.study_of(w, "residuals")
    compared = study.residuals
    maps = study.maps_for(compared.methods)
    arms = [ArmSpec(name, compared.budgets[0]) for name in compared.methods]
    spec = specs.ResidualErrorsSpec(
        **checkout.job_fields("residual_errors", w),
        **fields_of(Sampling, compared),
        corpora=compared.corpora,
        length=w.length,
        methods=compared.methods,
        budgets=compared.budgets,
        anchors=study.anchors,
        maps=maps_specs(maps)[0] if maps else None,
        bootstrap_resamples=study.score.bootstrap_resamples,
        identities=identities_of(arms),
    )
    return {"assets": checkout.assets_manifest, "phi": checkout.phi_files(w, maps)}, spec


def runtime(checkout: Checkout, w: Wildcards) -> Work:
    study = checkout.study_of(w)
    with_fast_step = []
    for name in study.own_methods():
        if backends_of(method_named(name)) != ("torch",):
            with_fast_step.append(name)
    spec = specs.RuntimeSpec(
        **checkout.job_fields("runtime", w),
        **fields_of(Latencies, study.runtime),
        anchors=study.anchors,
        map=study.phi.map,
        own_methods=tuple(with_fast_step),
    )
    return {"assets": checkout.assets_manifest}, spec
