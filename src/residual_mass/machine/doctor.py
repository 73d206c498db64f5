"""Prints what this machine can run, and what it lacks with a remedy for each; writes no file."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from residual_mass.estimate import aligned
from residual_mass.machine import preflight
from residual_mass.machine.disk import (
    ASSETS_BYTES,
    KIND_BY_RULE,
    KINDS,
    Need,
    estimate_need,
    format_bytes,
    has_assets,
    has_weights,
    hub_cache,
    nearest_existing,
    sum_known,
    total_of,
    weights_bytes,
)
from residual_mass.machine.facts import Machine, inspect_machine, version_of
from residual_mass.paper import typesetting
from residual_mass.prefetch import missing
from residual_mass.prefetch.needs import needs_of
from residual_mass.study.jobs import StudyJobs, read_studies
from residual_mass.study.specs import BackboneSpec


def run(jobs: Path, assets: Path) -> None:
    """Prints the machine, the disk space of every study, and whether each study can run here.

    Args:
        jobs: jobs of all studies, as `study.start` writes them.
    """
    studies = read_studies(jobs)
    machine = inspect_machine()
    print("\n".join(_described(machine)))
    needs = {(s.name, b.name): estimate_need(s, b, assets) for s in studies for b in s.backbones}
    print("\n".join(_disk_table(needs, assets)))
    verdicts = {study.name: list(problems(study, machine, needs, assets)) for study in studies}
    found = list(dict.fromkeys(problem for lacks in verdicts.values() for problem in lacks))
    print("\nProblems")
    print("\n".join(f"  {number}. {problem}" for number, problem in enumerate(found, start=1)) or "  none")
    print("\nStudies")
    for name, lacks in verdicts.items():
        because = ", ".join(str(found.index(problem) + 1) for problem in lacks)
        print(f"  {name}: " + (f"cannot run here, because of {because}" if lacks else "can run here"))


def _described(machine: Machine) -> Iterator[str]:
    gpus = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory)})" for gpu in machine.gpus) or "none"
    slurm = f"yes, {'with' if machine.accounting else 'without'} accounting (sacct)" if machine.slurm else "no"
    facts = {
        "Python": platform.python_version(),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
        "CPU cores": str(machine.cores),
        "RAM": format_bytes(machine.memory),
        "GPU": gpus + ("; " * bool(machine.gpu_fault)) + machine.gpu_fault,
        "Triton": f"{version_of('triton')} (kernels of the fused decode; without it or a GPU torch does the same)",
        "Hugging Face": f"{machine.hub or 'reachable'}; {'a token is set' if machine.token else 'no token'}",
        "SLURM": slurm,
        "LaTeX": "; ".join(typesetting.problems()) or "yes (target pdf)",
    }
    yield "Machine"
    yield from (f"  {name:<14}{text}" for name, text in facts.items())


def _disk_table(needs: dict[tuple[str, str], Need], assets: Path) -> Iterator[str]:
    rows = [("study, backbone", *KINDS, "total", "missing")]
    for (study, backbone), need in needs.items():
        numbers = [*(need.total[kind] for kind in KINDS), total_of(need.total), total_of(need.left)]
        rows.append((f"{study}, {backbone}", *map(format_bytes, numbers)))
    yield "\nDisk (estimates, explained in src/residual_mass/machine/disk.py)"
    yield from (f"  {line}" for line in aligned(rows))
    yield f"  assets, for every study: {format_bytes(ASSETS_BYTES)}, {'present' if has_assets(assets) else 'missing'}"
    for folder in (Path("results"), assets, hub_cache()):
        yield f"  free for {folder}: {format_bytes(shutil.disk_usage(nearest_existing(folder)).free)}"


# ---- what a study lacks ----------------------------------------------------------------------------------------------


def problems(study: StudyJobs, machine: Machine, needs: dict[tuple[str, str], Need], assets: Path) -> Iterator[str]:
    """Yields one line per reason why a study cannot run here, with its remedy."""
    yield from preflight.problems(study.backbones, assets, asks_hub=not machine.hub)
    yield from (problem for backbone in study.backbones for problem in _licence_problems(backbone, machine, assets))
    yield from _memory_problems(study, machine, assets)
    yield from _hub_problems(study, machine, assets)
    yield from _disk_problems(study, needs, assets)


def _licence_problems(backbone: BackboneSpec, machine: Machine, assets: Path) -> Iterator[str]:
    """Asks the hub, because a token is not enough: its owner must also accept a gated model's licence."""
    if backbone.source != "hub" or machine.hub or not machine.token or has_weights(backbone, assets):
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError

    try:
        HfApi().auth_check(backbone.model_id)
    except GatedRepoError:
        yield (
            f"backbone {backbone.name}: the token has no access to {backbone.model_id}: accept the licence on the "
            "model's page under the account of the token"
        )
    except Exception as error:  # error classes differ between versions of the library
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404):
            yield (
                f"backbone {backbone.name}: {backbone.model_id} is not on the hub, or the token is not valid: check "
                "model_id, and make a new token with `hf auth login`"
            )
        else:
            yield (
                f"backbone {backbone.name}: the hub did not answer when asked for {backbone.model_id} "
                f"({status or type(error).__name__}): try again later"
            )


def _memory_problems(study: StudyJobs, machine: Machine, assets: Path) -> Iterator[str]:
    """Checks a lower bound: the weights must fit."""
    for backbone in study.backbones:
        weights = weights_bytes(backbone, assets) or 0
        what = f"backbone {backbone.name}: its weights ({format_bytes(weights)}) do not fit"
        on_gpu = backbone.requires_gpu and machine.gpus
        if on_gpu and weights > max(gpu.memory for gpu in machine.gpus):
            yield f"{what} into a GPU here: use a machine with a larger one"
        if not preflight.has_slurm() and weights > machine.memory:
            yield f"{what} into the memory here: use a machine with more"
        if on_gpu and machine.gpu_fault and not preflight.has_slurm():
            yield (
                f"backbone {backbone.name}: {machine.gpu_fault}: install a torch for CUDA "
                "(`pip install torch` from its own index) that the driver supports"
            )


def _hub_problems(study: StudyJobs, machine: Machine, assets: Path) -> Iterator[str]:
    """Checks that files of the hub have been prefetched if the hub cannot be reached."""
    hub = needs_of(study)
    outputs = [path for job in study.jobs if job.rule in KIND_BY_RULE for path in job.outputs]
    if not machine.hub or not (hub.models or hub.parts or hub.streams) or all(Path(path).exists() for path in outputs):
        return
    if missing.problems(hub, assets):
        yield (
            f"Hugging Face hub: {machine.hub}, and {assets} lacks some of what study {study.name} reads of it: connect "
            "this machine, or run the target `prefetch` on another and bring the folder here; a start with "
            f"`--config study={study.name} offline=true` lists what is missing"
        )


def _disk_problems(study: StudyJobs, needs: dict[tuple[str, str], Need], assets: Path) -> Iterator[str]:
    """Compares missing files with the free space of each file system."""
    lefts = [needs[study.name, backbone.name].left for backbone in study.backbones]
    wanted = [
        (Path("results"), sum_known(left[kind] for left in lefts for kind in KINDS if kind != "model")),
        (hub_cache(), sum_known(left["model"] for left in lefts)),
        (assets, 0 if has_assets(assets) else ASSETS_BYTES),
    ]
    systems: dict[int, list[tuple[Path, int]]] = {}
    for folder, number in wanted:
        systems.setdefault(nearest_existing(folder).stat().st_dev, []).append((folder, number))
    for parts in systems.values():
        needed, free = sum(number for _, number in parts), shutil.disk_usage(nearest_existing(parts[0][0])).free
        if needed > free:
            folders = ", ".join(str(folder) for folder, number in parts if number)
            yield (
                f"disk: {folders} will take {format_bytes(needed)}, but {format_bytes(free)} are free: make room, or "
                "use another disk"
            )
