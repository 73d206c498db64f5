"""What this machine can run and what it lacks, each lack with its remedy; prints, makes no file."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from residual_mass.estimate import aligned
from residual_mass.machine import preflight
from residual_mass.machine.disk import (
    ASSETS_BYTES,
    KINDS,
    Need,
    bytes_or_unknown,
    existing,
    has_assets,
    has_weights,
    hub_cache,
    in_words,
    need_of,
    sum_known,
    total_of,
    weights_bytes,
)
from residual_mass.machine.facts import Machine, look, version_of
from residual_mass.paper import typesetting
from residual_mass.prefetch import missing
from residual_mass.study.specs import BackboneSpec, DoctorSpec, StudyNeeds


def run(spec: DoctorSpec, assets: Path) -> None:
    """Prints what this machine is, the room that every study takes, and a line per study: can run here, or why not."""
    machine = look()
    print("\n".join(_described(machine)))
    needs = {(s.name, b.name): need_of(s, b, assets) for s in spec.studies for b in s.backbones}
    print("\n".join(_disk_table(needs, assets)))
    verdicts = {study.name: list(problems(study, machine, needs, assets)) for study in spec.studies}
    found = list(dict.fromkeys(problem for lacks in verdicts.values() for problem in lacks))
    print("\nProblems")
    print("\n".join(f"  {number}. {problem}" for number, problem in enumerate(found, start=1)) or "  none")
    print("\nStudies")
    for name, lacks in verdicts.items():
        because = ", ".join(str(found.index(problem) + 1) for problem in lacks)
        print(f"  {name}: " + (f"cannot run here, because of {because}" if lacks else "can run here"))


def _described(machine: Machine) -> Iterator[str]:
    gpus = ", ".join(f"{gpu.name} ({in_words(gpu.memory)})" for gpu in machine.gpus) or "none"
    slurm = f"yes, {'with' if machine.accounting else 'without'} accounting (sacct)" if machine.slurm else "no"
    facts = {
        "Python": platform.python_version(),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
        "CPU cores": str(machine.cores),
        "RAM": in_words(machine.memory),
        "GPU": gpus + ("; " * bool(machine.gpu_fault)) + machine.gpu_fault,
        "Triton": f"{version_of('triton')} (kernels of the fused decode; without it or a GPU torch does the same)",
        "Hugging Face": f"{machine.hub or 'reachable'}; {'a token is set' if machine.token else 'no token'}",
        "SLURM": slurm,
        "LaTeX": "; ".join(typesetting.problems()) or "yes (target pdf)",
    }
    yield "Machine"
    yield from (f"  {name:<14}{text}" for name, text in facts.items())


def _disk_table(needs: dict[tuple[str, str], Need], assets: Path) -> Iterator[str]:
    rows = [("study, backbone", *KINDS, "in all", "to come")]
    for (study, backbone), need in needs.items():
        numbers = [*(need.total[kind] for kind in KINDS), total_of(need.total), total_of(need.left)]
        rows.append((f"{study}, {backbone}", *map(bytes_or_unknown, numbers)))
    yield "\nDisk (estimates; src/residual_mass/machine/disk.py says how)"
    yield from (f"  {line}" for line in aligned(rows))
    yield f"  assets, for every study: {in_words(ASSETS_BYTES)}, {'there' if has_assets(assets) else 'to come'}"
    for folder in (Path("results"), assets, hub_cache()):
        yield f"  free for {folder}: {in_words(shutil.disk_usage(existing(folder)).free)}"


# ---- what a study lacks ----------------------------------------------------------------------------------------------


def problems(study: StudyNeeds, machine: Machine, needs: dict[tuple[str, str], Need], assets: Path) -> Iterator[str]:
    """One line for everything that keeps a study from running here, with its remedy."""
    yield from preflight.problems(study.backbones, assets, asks_hub=not machine.hub)
    yield from (problem for backbone in study.backbones for problem in _licence_problems(backbone, machine, assets))
    yield from _memory_problems(study, machine, assets)
    yield from _hub_problems(study, machine, assets)
    yield from _disk_problems(study, needs, assets)


def _licence_problems(backbone: BackboneSpec, machine: Machine, assets: Path) -> Iterator[str]:
    """A token alone opens nothing: the licence of a gated model is accepted by its holder."""
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
    except Exception as error:  # the clients of the library's versions raise unrelated classes
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


def _memory_problems(study: StudyNeeds, machine: Machine, assets: Path) -> Iterator[str]:
    """Lower bounds: the weights have to fit."""
    for backbone in study.backbones:
        weights = weights_bytes(backbone, assets) or 0
        what = f"backbone {backbone.name}: its weights ({in_words(weights)}) do not fit"
        on_gpu = preflight.needs_gpu(backbone) and machine.gpus
        if on_gpu and weights > max(gpu.memory for gpu in machine.gpus):
            yield f"{what} into a GPU here: use a machine with a larger one"
        if not preflight.has_slurm() and weights > machine.memory:
            yield f"{what} into the memory here: use a machine with more"
        if on_gpu and machine.gpu_fault and not preflight.has_slurm():
            yield (
                f"backbone {backbone.name}: {machine.gpu_fault}: install a torch for CUDA "
                "(`pip install torch` from its own index) that the driver supports"
            )


def _hub_problems(study: StudyNeeds, machine: Machine, assets: Path) -> Iterator[str]:
    """What is read of the hub has been prefetched where the hub is out of reach."""
    reads = study.hub.models or study.hub.parts or study.hub.streams
    if not machine.hub or not reads or all(Path(file.path).exists() for file in study.files):
        return
    if missing.problems(study.hub, assets):
        yield (
            f"Hugging Face hub: {machine.hub}, and {assets} lacks some of what study {study.name} reads of it: connect "
            "this machine, or run the target `prefetch` on another and bring the folder here; a start with "
            f"`--config study={study.name} offline=true` lists what is missing"
        )


def _disk_problems(study: StudyNeeds, needs: dict[tuple[str, str], Need], assets: Path) -> Iterator[str]:
    """For each file system, what is yet to come against what is free."""
    of_study = [needs[study.name, backbone.name].left for backbone in study.backbones]
    wanted = [
        (Path("results"), sum_known(left[kind] for left in of_study for kind in KINDS if kind != "model")),
        (hub_cache(), sum_known(left["model"] for left in of_study)),
        (assets, 0 if has_assets(assets) else ASSETS_BYTES),
    ]
    systems: dict[int, list[tuple[Path, int]]] = {}
    for folder, number in wanted:
        systems.setdefault(existing(folder).stat().st_dev, []).append((folder, number))
    for parts in systems.values():
        needed, free = sum(number for _, number in parts), shutil.disk_usage(existing(parts[0][0])).free
        if needed > free:
            folders = ", ".join(str(folder) for folder, number in parts if number)
            yield (
                f"disk: {folders} will take {in_words(needed)}, but {in_words(free)} are free: make room, or use "
                "another disk"
            )
