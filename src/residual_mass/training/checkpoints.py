"""Checkpoints of a training in progress: facts and tensors, with a digest that detects damage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residual_mass.backbones.phi_maps import read_safetensors, write_safetensors

HEADER, DIGEST = "residual_mass_checkpoint", "residual_mass_digest"


def write_checkpoint(path: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes the file atomically; raises OSError naming it on failure."""
    header, on_cpu = json.dumps(facts), {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    write_safetensors(path, on_cpu, {HEADER: header, DIGEST: _digest(header, on_cpu)})


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads facts and tensors.

    Raises:
        ValueError: the file is damaged; names it.
    """
    metadata, tensors = read_safetensors(path)
    header = metadata.get(HEADER, "")
    if metadata.get(DIGEST) != _digest(header, tensors):
        raise ValueError(f"{path}: damaged checkpoint; delete it, training begins anew")
    return json.loads(header), tensors


def _digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
