"""Loads frozen language models from a folder of the assets or the hub, or with random weights of a given shape."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoHfQuantizer

from residual_mass.files import sha256_of, sha256_text
from residual_mass.kernels.cpu import has_bfloat16
from residual_mass.model.identity import listed_digest
from residual_mass.model.layers import device_of, text_config
from residual_mass.model.packed_weights import pack_weights
from residual_mass.model.phi_maps import HeadShape, open_safetensors
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.specs import BackboneSpec
from residual_mass.texts.assets import MAKE, listed_in, model_folder, require_whole
from residual_mass.texts.corpora import special_prefix
from residual_mass.texts.hub import GGUF_ON_HUB, gguf_file, require_hash

if TYPE_CHECKING:
    from gguf import GGUFReader

TEMPLATE_DATE = "26 Jul 2024"
"""Date for chat templates that contain one (Llama 3's do), so that prompts do not change from day to day."""
SMALL_FILES = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "vocab.json merges.txt tokenizer.model chat_template.jinja"
).split()
"""Files that transformers reads from a model's folder in addition to the weights."""
UNKNOWN_TYPE = f"transformers {transformers.__version__} does not know its model_type"
CAUSES = {
    "trust_remote_code": (
        "it has code of its own, which is never run",
        "take a model whose classes are part of transformers",
    ),
    "does not recognize this architecture": (
        UNKNOWN_TYPE,
        "update transformers, or correct model_type in config.json",
    ),
    "instantiate the backend tokenizer": (
        "no tokenizer that transformers can read: neither tokenizer.json, nor tokenizer.model and the package that "
        "reads it (sentencepiece or tiktoken)",
        "save it there with tokenizer.save_pretrained, or install the package",
    ),
    "rope_freqs.weight": (
        "its rope_freqs.weight does not fit the model's rotary frequencies",
        "take the model's safetensors in place of a GGUF file",
    ),
    "no file named": (
        "no model.safetensors, nor an index of its parts",
        "save the whole model with save_pretrained: an adapter, a pickle or a GGUF file alone is not read",
    ),
}
"""What transformers' messages contain, each with the reason in our words and the remedy."""
MOST_CHARACTERS = 300
"""Characters of a reason in transformers' own words: it can list all of its classes."""
MESSAGE_PLACEHOLDER = "\ue000"
"""Placeholder for the message when a chat template is split around it."""


@dataclass
class Backbone:
    """A frozen model with its tokenizer.

    Attributes:
        identity: hash of everything about the model that can change its outputs (id, revision, dtype, files).
    """

    spec: BackboneSpec
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: str

    @property
    def shape(self) -> HeadShape:
        return HeadShape.of(text_config(self.model))

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def encode(self, text: str) -> list[int]:
        """Returns token ids with the tokenizer's own special tokens.

        Raises:
            ValueError: not exactly one BOS at the front (or any BOS, if the tokenizer adds none).
        """
        return encode(self.tokenizer, text)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """See `Backbone.encode`; checks BOS because a repeated one can make a sparse arm beat the full model."""
    ids = tokenizer(text).input_ids
    _check_bos(tokenizer, ids, text)
    return ids


def _check_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str) -> None:
    bos = tokenizer.bos_token_id
    front = special_prefix(tokenizer)
    wanted = front.count(bos)
    found = ids.count(bos)
    if found != wanted or ids[: len(front)].count(bos) != wanted:
        raise ValueError(
            f"prompt has {found} BOS tokens, expected {wanted} at its front: {text[:60]!r}; "
            "take them out of its text, or out of the chat template"
        )


def encode_chat(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """Returns token ids of `text` as the only user message in the model's chat template, and those before the message.

    Raises:
        ValueError: the tokenizer has no chat template, or the BOS tokens are not as in `encode`.
    """
    if tokenizer.chat_template is None:
        raise ValueError(f"{tokenizer.name_or_path}: the tokenizer has no chat template; set chat_template to false")

    def rendered(content: str) -> str:
        message = [{"role": "user", "content": content}]
        return tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True, date_string=TEMPLATE_DATE
        )

    def ids_of(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False).input_ids

    ids = ids_of(rendered(text))
    before_message, _, _ = rendered(MESSAGE_PLACEHOLDER).partition(MESSAGE_PLACEHOLDER)
    front = ids_of(before_message)
    # A template may use a BOS token that the tokenizer does not add for something else.
    if tokenizer.bos_token_id in special_prefix(tokenizer):
        _check_bos(tokenizer, ids, text)
    return ids, front


def load_tokenizer(model_id: str, revision: str, source: str, assets: Path) -> PreTrainedTokenizerBase:
    """Loads the backbone's tokenizer; `source` as in BackboneSpec."""
    where, options = _location(model_id, revision, source, assets)
    if source == "gguf":
        _require_tokenizer(Path(_named(where, options)))
    with one_line_errors(_named(where, options)), _headers(options):
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)


def _require_tokenizer(file: Path) -> None:
    if "tokenizer.ggml.tokens" not in _whole_header(file).fields:
        raise ValueError(
            f"{file}: the file has no tokenizer; name one: load_gguf(FILE, "
            "tokenizer=AutoTokenizer.from_pretrained(FOLDER)) in Python, tokenizer=FOLDER in lm-eval"
        )


def load_gguf(
    file: str | Path,
    dtype: torch.dtype | None = None,
    packed: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the model and the tokenizer of a GGUF file.

    Args:
        file: its path, or OWNER/NAME/FILE.gguf on the hub.
        dtype: in which the model computes; None takes bfloat16 if the CPU has instructions for it, else float32.
        packed: whether linear layers and embeddings keep the codes that they have in the file, for a CPU
            (`pack_weights`). False dequantises all weights.
        tokenizer: None loads the file's.

    Returns:
        The model, in evaluation mode and without gradients, and the tokenizer.

    Raises:
        ValueError: there is no such file, it is damaged or lacks a tokenizer, it is one of several parts, transformers
            does not know its architecture, or its rotary frequencies are scaled in a way that is not applied.
    """
    if dtype is None:
        dtype = torch.bfloat16 if has_bfloat16() else torch.float32
    file = gguf_file(str(file))
    if tokenizer is None:
        tokenizer = load_tokenizer(str(file), "", "gguf", Path())
    return gguf_model(file, dtype, packed), tokenizer


def gguf_model(file: Path, dtype: torch.dtype, packed: bool) -> PreTrainedModel:
    """See `load_gguf`."""
    from residual_mass.model.gguf_file import ends_of, packed_model, quick_headers
    from residual_mass.model.gguf_rotary import divide_frequencies, set_rotary

    reader = _whole_header(file)
    where, options = _location(str(file), "", "gguf", Path())
    config = load_config(where, **options)
    try:
        set_rotary(config, reader)
    except ValueError as error:
        raise ValueError(f"{file}: {error}; take the model's safetensors in place of a GGUF file") from None
    with one_line_errors(str(file)), quick_headers():
        model = None
        if packed:
            with suppress(NotImplementedError):  # names of tensors that only transformers knows
                model = packed_model(reader, config, dtype)
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(
                where, config=config, dtype=dtype, trust_remote_code=False, **options
            )
            divide_frequencies(model, reader)
            model = pack_weights(model.eval()) if packed else model
        model.generation_config.eos_token_id = ends_of(reader) or model.generation_config.eos_token_id
    return model.eval().requires_grad_(False)


def _whole_header(file: Path) -> GGUFReader:
    """Reads the header of a GGUF file; raises ValueError if it is damaged, or of one of several parts of a model."""
    from residual_mass.model.gguf_file import Reader, parts_of

    with one_line_errors(str(file)):
        reader = Reader(file)
        parts = parts_of(reader)
    if parts > 1:
        raise ValueError(
            f"{file}: one of {parts} parts of a model; join them with "
            "`llama-gguf-split --merge FIRST_PART.gguf WHOLE.gguf` and load the whole file"
        )
    return reader


def load_backbone(
    spec: BackboneSpec, assets: Path, device: torch.device | None = None, packed: bool = True
) -> Backbone:
    """Loads the model in evaluation mode, without gradients, on the GPU if there is one.

    Args:
        packed: whether the weights of a GGUF file keep its codes, on a CPU.

    Raises:
        ValueError: files are missing or damaged, or a bfloat16 backbone finds no GPU.
    """
    if device is None:
        if spec.dtype == "bfloat16" and not torch.cuda.is_available():
            raise ValueError(
                f"backbone {spec.name} (bfloat16) needs a GPU that torch can use, and there is none here; "
                "run on a machine with one, or through SLURM"
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, spec.dtype)
    identity = backbone_identity(spec, assets)
    tokenizer = load_tokenizer(spec.model_id, spec.revision, spec.source, assets)
    if spec.source == "gguf":
        model = gguf_model(gguf_file(spec.model_id), dtype, packed and device.type == "cpu")
        return Backbone(spec, model.to(device), tokenizer, identity)
    where, options = _location(spec.model_id, spec.revision, spec.source, assets)
    config = load_config(where, **options)
    with one_line_errors(where):
        if spec.source == "random":
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        else:
            options |= {"use_safetensors": True}  # never a pickle
            options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # for _require_all_weights
            model, found = AutoModelForCausalLM.from_pretrained(
                where, config=config, dtype=dtype, trust_remote_code=False, **options
            )
    if spec.source != "random":
        _require_all_weights(where, model, found)
    model = model.to(device).eval().requires_grad_(False)
    return Backbone(spec, model, tokenizer, identity)


def load_config(where: str, **options: Any) -> PretrainedConfig:
    """Reads the configuration of a model in a folder or on the hub, without running code that comes with it.

    Raises:
        ValueError: it cannot be read, or it is of no decoder-only language model, or of weights that are quantised in a
            way unknown to transformers, which would read them as plain ones.
    """
    with one_line_errors(_named(where, options)), _headers(options):
        config = AutoConfig.from_pretrained(where, trust_remote_code=False, **options)
        quantised = getattr(config, "quantization_config", None)
        known = quantised is None or AutoHfQuantizer.supports_quant_method(quantised)
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    if config.is_encoder_decoder:
        raise ValueError(f"{where}: {name} has an encoder; take a decoder-only model")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"{where}: {name} is no class that AutoModelForCausalLM can load; take a language model, or load it as "
            f"{name} in Python and use partial_kv"
        )
    if not known:
        raise ValueError(
            f"{where}: transformers {transformers.__version__} does not know how its weights are quantised "
            f"({quantised['quant_method']!r}); take weights that are not quantised, or update transformers"
        )
    return config


def _named(where: str, options: dict[str, Any]) -> str:
    """Returns the name of a model in messages: its folder, its GGUF file, or its name on the hub."""
    return str(Path(where, options["gguf_file"])) if "gguf_file" in options else where


def _headers(options: dict[str, Any]) -> AbstractContextManager[None]:
    """Returns what reads the headers of a GGUF file quickly, where options of transformers name one."""
    if "gguf_file" not in options:
        return nullcontext()
    from residual_mass.model.gguf_file import quick_headers

    return quick_headers()


def _require_all_weights(where: str, model: PreTrainedModel, found: dict[str, Any]) -> None:
    """Raises ValueError if files and configuration do not fit: transformers would draw random weights, or ignore some.

    Args:
        found: names of tensors by problem, as `from_pretrained` returns them.
    """
    remedy = "fetch or save config.json and all weights again, of one whole model"
    if mismatched := sorted(found["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        stored = list(stored)
        wanted = list(wanted)
        raise ValueError(f"{where}: {name} is {stored} in its files, {wanted} by config.json; {remedy}")
    if missing := sorted(found["missing_keys"]):
        number = len(missing)
        raise ValueError(f"{where}: its files lack tensors ({number}, first {missing[0]}); {remedy}")
    # Further tensors are common, such as heads for training. Those of the layers here are scales of quantised weights,
    # biases, or further layers.
    holders = set()
    for name, module in model.named_modules():
        if hasattr(module, "weight"):
            holders.add(_any_layer(name))
    unread = []
    for name in sorted(found["unexpected_keys"]):
        holder, _, _ = name.rpartition(".")
        if _any_layer(holder) in holders:
            unread.append(name)
    if unread:
        number = len(unread)
        raise ValueError(f"{where}: config.json has no place for {unread[0]}, one of {number}; {remedy}")


def _any_layer(name: str) -> str:
    return re.sub(r"\d+", "0", name)


def wrap_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, model_id: str = "", revision: str = ""
) -> Backbone:
    """Wraps a loaded model as a backbone, in evaluation mode and without gradients.

    Args:
        model_id, revision: name of the weights in files and messages; by default what the configuration says.
    """
    model_id = model_id or model.config.name_or_path or type(model).__name__
    revision = revision or getattr(model.config, "_commit_hash", None) or "local"
    dtype = str(model.dtype).removeprefix("torch.")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
    on_gpu = device_of(model).type == "cuda"
    names = {"name": model_id, "study": "own", "tokenizer": model_id}
    source = {"source": "hub", "model_id": model_id, "revision": revision}
    spec = BackboneSpec(**names, **source, dtype=dtype, context=context, requires_gpu=on_gpu)
    identity = sha256_text("\n".join((model_id, revision, dtype)))
    return Backbone(spec, model.eval().requires_grad_(False), tokenizer, identity)


@contextmanager
def one_line_errors(where: str) -> Iterator[None]:
    """Converts errors of transformers about a model's files to one line with the model and the remedy."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason, remedy = _cause(error)
        raise ValueError(f"{where}: cannot be loaded ({reason}); {remedy}") from error


def _cause(error: Exception) -> tuple[str, str]:
    """Returns why a model cannot be loaded, and what to do about it."""
    text = " ".join(str(error).split())
    for part, known in CAUSES.items():
        if part in text:
            return known
    reason = textwrap.shorten(f"{type(error).__name__}: {text}", MOST_CHARACTERS, placeholder=" ...")
    if re.search(r"GPU|XPU|CUDA|\bmps\b", text):
        return reason, "load it on a machine that has one, or take weights that are not quantised"
    if isinstance(error, ImportError) or "pip install" in text:
        return reason, "install that, or take a model that does without"
    if isinstance(error, NotImplementedError) or "not supported" in text:
        return reason, "take weights that are not quantised"
    return reason, "fetch it again"


def backbone_identity(spec: BackboneSpec, assets: Path) -> str:
    """Computes `Backbone.identity` without loading the model; raises ValueError if weights are missing or damaged.

    A revision of the hub stands for all files; in the assets, the user may have written some.
    """
    weights = {"random": "random seed 0", "hub": spec.revision, "gguf": spec.revision}.get(spec.source)
    small = ""
    if spec.source == "gguf":
        require_hash(gguf_file(spec.model_id), spec.revision)
    elif spec.source != "hub":
        where, _ = _location(spec.model_id, spec.revision, spec.source, assets)
        files = [Path(where) / name for name in SMALL_FILES]
        small = listed_digest(file for file in files if file.is_file())
    if weights is None:
        file = Path(where) / "model.safetensors"
        with open_safetensors(file):  # reports a damaged file in one line; transformers' own error fills a page
            weights = sha256_of(file)
        if listed_in(assets / MANIFEST).get(file.relative_to(assets).as_posix(), weights) != weights:
            raise ValueError(f"{file}: not the file that {assets / MANIFEST} lists (sha256); {MAKE} again")
    return sha256_text("\n".join((spec.model_id, spec.revision, spec.dtype, weights, small)))


def is_gguf(name: str) -> bool:
    """Returns whether a model's name is that of a GGUF file here or, as OWNER/NAME/FILE.gguf, on the hub."""
    if not name.endswith(".gguf") or os.path.isdir(name):
        return False
    return os.path.isfile(name) or GGUF_ON_HUB.fullmatch(name) is not None


def _location(model_id: str, revision: str, source: str, assets: Path) -> tuple[str, dict[str, Any]]:
    if source == "gguf":
        file = gguf_file(model_id)
        return str(file.parent), {"gguf_file": file.name, "local_files_only": True}
    if source == "hub":
        return model_id, {"revision": revision}
    folder = assets / model_folder(model_id)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder}: no model here; run `snakemake --cores 1 {assets / MANIFEST}` or set the key assets"
        )
    require_whole(assets, *(f"{model_folder(model_id)}/{name}" for name in SMALL_FILES))
    return str(folder), {"local_files_only": True}
