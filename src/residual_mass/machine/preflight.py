"""Checks that this machine can run backbones, before hours of jobs start; imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from residual_mass.machine.gpus import device_files
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.specs import BackboneSpec
from residual_mass.texts.assets import model_folder
from residual_mass.texts.hub import GGUF_ON_HUB, is_cached

CLOCKS_APART = 60
"""Tolerated clock difference in seconds between machines that share files."""


def package_problems(project: Path) -> list[str]:
    """Returns one line if the Python that runs this, and so the jobs, lacks packages that they need.

    Args:
        project: a pyproject.toml, whose extra `pipeline` names them.
    """
    declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    extras = declared["optional-dependencies"]
    lacking = []
    for line in (*declared["dependencies"], *extras["measure"], *extras["pipeline"]):
        name = re.split(r"[^\w.-]", line)[0]
        if name != declared["name"] and not _version(name):
            lacking.append(name)
    if not lacking:
        return []
    names = ", ".join(sorted(set(lacking)))
    other = "run Snakemake by the Python that has them, such as `.venv/bin/python -m snakemake` after `make install`"
    return [f"{sys.executable}, which runs the jobs, lacks {names}: {other}"]


def backbone_problems(
    backbones: Sequence[BackboneSpec],
    assets: Path,
    asks_hub: bool = True,
    submits: bool | None = None,
    own_python: bool = True,
) -> list[str]:
    """Returns one line per problem, with its remedy; empty if jobs of these backbones can start here.

    Args:
        asks_hub: whether to ask the hub about its models; otherwise they are not checked.
        submits: whether jobs run elsewhere; None assumes so if there is SLURM.
        own_python: whether jobs run the Python that runs this, and so its torch.
    """
    lines: list[str] = []
    for backbone in backbones:
        if asks_hub or backbone.source not in ("hub", "gguf"):
            lines += _access_problems(backbone, assets)
    names = ", ".join(backbone.name for backbone in backbones if backbone.requires_gpu)
    version = _version("torch") if own_python else ""
    if submits is None:
        submits = shutil.which("sbatch") is not None
    if names and not (has_gpu() or submits):
        lines.insert(0, f"no NVIDIA GPU here for backbone {names}: run on a machine with one, or through SLURM")
    elif names and version.endswith("+cpu"):
        built = f"torch {version} is built for CPUs, and backbone {names} needs a GPU"
        lines.insert(0, f"{built}: delete .venv, then `make install TORCH_INDEX=`")
    return lines


def with_future_mtimes(inputs: Iterable[Path]) -> list[str]:
    """Returns one line for the newest input if it is dated in the future, as after a clock was set back: Snakemake
    would find results older than their input and delete them.
    """
    dated = [(path.stat().st_mtime, path) for path in inputs if path.exists()]
    date, newest = max(dated, default=(0, None))
    if date <= time.time() + CLOCKS_APART:
        return []
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(date))
    remedy = "set the clock right, or `touch` the file"
    return [f"{newest}: modified in the future ({written}), so that its results would count as out of date: {remedy}"]


def unwritable(outputs: Iterable[Path]) -> list[str]:
    """Returns one line per existing folder in which outputs cannot be written."""
    folders = set()
    for path in outputs:
        existing = [folder for folder in path.parents if folder.is_dir()]
        folders.add(existing[0])
    refused = sorted(str(folder) for folder in folders if not os.access(folder, os.W_OK))
    return [f"{folder}: cannot be written to; make the folder or its disk writable" for folder in refused]


def _version(package: str) -> str:
    """Returns the version of an installed package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or bool(device_files())


def _access_problems(backbone: BackboneSpec, assets: Path) -> list[str]:
    name = f"backbone {backbone.name}"
    if backbone.source == "assets":
        folder = assets / model_folder(backbone.model_id)
        if not (assets / MANIFEST).exists() or (folder / "config.json").is_file():
            return []
        return [f"{name}: no model in {folder}: put its Hugging Face folder there, or set source: hub"]
    repository, revision = backbone.model_id, backbone.revision
    if backbone.source == "gguf":
        repository, revision = repository.rpartition("/")[0], None
        if not GGUF_ON_HUB.fullmatch(backbone.model_id) and not Path(backbone.model_id).is_file():
            return [f"{name}: no file {backbone.model_id}: correct model_id, or put the file there"]
    from huggingface_hub import HfApi, get_token

    if is_cached(backbone.model_id, backbone.revision) or get_token() is not None:
        return []
    # Any problem with network or repository would also stop the jobs.
    with suppress(Exception):
        if not HfApi().model_info(repository, revision=revision, timeout=10, token=False).gated:
            return []
    return [
        f"{name}: {backbone.model_id} is neither public nor in the Hugging Face cache, and there is no token (or no "
        "network): accept the model's licence on its page, then set HF_TOKEN or run `hf auth login`"
    ]
