"""Loads frozen language models from a folder of the assets or the hub, or with random weights of a given shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from residual_mass.files import sha256_of, sha256_text
from residual_mass.model.hook import text_config
from residual_mass.model.phi_maps import HeadShape, open_safetensors
from residual_mass.provenance import MANIFEST
from residual_mass.study.specs import BackboneSpec
from residual_mass.texts.assets import MAKE, listed_in, model_folder, require_whole
from residual_mass.texts.corpora import special_prefix

TEMPLATE_DATE = "26 Jul 2024"
"""Date for chat templates that contain one (Llama 3's do), so that prompts do not change from day to day."""
SMALL_FILES = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "vocab.json merges.txt tokenizer.model chat_template.jinja"
).split()
"""Files that transformers reads from a model's folder in addition to the weights."""
GAP = "\ue000"
"""Placeholder for the message when a chat template is split around it."""


@dataclass
class Backbone:
    """A frozen model with its tokenizer.

    Attributes:
        identity: hash of everything about the model that can change its outputs (id, revision, dtype, weights).
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
        return next(self.model.parameters()).device

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
    wanted = len(special_prefix(tokenizer))
    if ids.count(bos) != wanted or (wanted and ids[0] != bos):
        raise ValueError(
            f"prompt has {ids.count(bos)} BOS tokens, expected {wanted} at its front: {text[:60]!r}; "
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

    ids, front = ids_of(rendered(text)), ids_of(rendered(GAP).partition(GAP)[0])
    if special_prefix(tokenizer):  # otherwise the template may use the BOS token for something else
        _check_bos(tokenizer, ids, text)
    return ids, front


def load_tokenizer(model_id: str, revision: str, source: str, assets: Path) -> PreTrainedTokenizerBase:
    """Loads the backbone's tokenizer; `source` as in BackboneSpec."""
    where, options = _location(model_id, revision, source, assets)
    with one_line_errors(where):
        return AutoTokenizer.from_pretrained(where, **options)


def load_backbone(spec: BackboneSpec, assets: Path, device: torch.device | None = None) -> Backbone:
    """Loads the model in evaluation mode, without gradients, on the GPU if there is one.

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
    where, options = _location(spec.model_id, spec.revision, spec.source, assets)
    tokenizer = load_tokenizer(spec.model_id, spec.revision, spec.source, assets)
    identity = backbone_identity(spec, assets)
    dtype = getattr(torch, spec.dtype)
    with one_line_errors(where):
        if spec.source == "random":
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(where, **options), dtype=dtype)
        else:
            options |= {"dtype": dtype, "use_safetensors": True}  # never a pickle
            model = AutoModelForCausalLM.from_pretrained(where, **options)
    model = model.to(device).eval().requires_grad_(False)
    return Backbone(spec, model, tokenizer, identity)


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
    spec = BackboneSpec(
        name=model_id, study="own", model_id=model_id, revision=revision, source="hub", dtype=dtype, tokenizer=model_id,
        context=getattr(model.config.get_text_config(), "max_position_embeddings", 0),
        requires_gpu=model.device.type == "cuda",
    )  # fmt: skip
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
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: cannot be loaded ({type(error).__name__}: {reason}); fetch it again") from error


def backbone_identity(spec: BackboneSpec, assets: Path) -> str:
    """Computes `Backbone.identity` without loading the model; raises ValueError if weights are missing or damaged."""
    weights = {"random": "random seed 0", "hub": spec.revision}.get(spec.source)
    if weights is None:
        file = Path(_location(spec.model_id, spec.revision, spec.source, assets)[0]) / "model.safetensors"
        with open_safetensors(file):  # reports a damaged file in one line; transformers' own error fills a page
            weights = sha256_of(file)
        if listed_in(assets / MANIFEST).get(file.relative_to(assets).as_posix(), weights) != weights:
            raise ValueError(f"{file}: not the file that {assets / MANIFEST} lists (sha256); {MAKE} again")
    return sha256_text("\n".join((spec.model_id, spec.revision, spec.dtype, weights)))


def _location(model_id: str, revision: str, source: str, assets: Path) -> tuple[str, dict[str, Any]]:
    if source == "hub":
        return model_id, {"revision": revision}
    folder = assets / model_folder(model_id)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder}: no model here; run `snakemake --cores 1 {assets / MANIFEST}` or set the key assets"
        )
    require_whole(assets, *(f"{model_folder(model_id)}/{name}" for name in SMALL_FILES))
    return str(folder), {"local_files_only": True}
