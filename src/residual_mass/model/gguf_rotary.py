"""The rotary embedding that a GGUF file states in its header and tensors; transformers reads its base alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from gguf.gguf_reader import GGUFReader
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of what rotary frequencies are divided by, in files of Llama 3; transformers does not read it."""
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
"""The same, in files of Phi-3: for texts beyond the context of its training, and for others."""
UNSCALED = {
    "attn_factor": (1,), "yarn_attn_factor": (1,), "yarn_ext_factor": (1, -1), "yarn_log_multiplier": (0,),
    "alpha": (0, 1),
}  # fmt: skip
"""Keys of ARCHITECTURE.rope.scaling that need not be applied if they have one of these values."""
UNUSED = ("original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")
"""Keys of ARCHITECTURE.rope.scaling that change nothing by themselves."""


def divide_frequencies(model: PreTrainedModel, reader: GGUFReader) -> None:
    """Divides rotary frequencies by the factors that the file has for them."""
    factors = tensor_named(reader, ROPE_FACTORS)
    if factors is None:
        return
    divided = False
    for name, frequencies in model.named_buffers():
        if name.endswith("inv_freq") and frequencies.shape == factors.shape:
            frequencies.div_(factors)
            divided = True
    if not divided:
        raise ValueError(f"{ROPE_FACTORS} has {len(factors)} numbers")


def tensor_named(reader: GGUFReader, name: str) -> Tensor | None:
    """Returns a tensor of a file that is not in blocks; None if the file has none of this name."""
    for tensor in reader.tensors:
        if tensor.name == name:
            return torch.from_numpy(np.array(tensor.data))
    return None


def set_rotary(config: PretrainedConfig, reader: GGUFReader) -> None:
    """Gives a configuration the rotary embedding of a file: base, share of a head's columns, and scaling. Transformers
    reads the base alone, and not in all architectures.

    Where kinds of layers have frequencies of their own, those with full attention are scaled.

    Raises:
        ValueError: the file has a scaling that cannot be applied; names its key.
    """
    scaling = scaling_of(reader)
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        if scaling:
            raise ValueError(f"{key_of(reader, 'scaling.type')} is {scaling['rope_type']}, of a model without RoPE")
        return
    changed = copy.deepcopy(parameters)
    nested = config.nested_rope_parameter_keys(changed)
    full = changed.get("full_attention") or {} if nested else changed
    if full:
        set_base(full, value_of(reader, "freq_base"))
    if not nested:
        set_share(config, full, value_of(reader, "dimension_count"))
    local = changed.get("sliding_attention") or {} if nested else {}
    local_base = value_of(reader, "freq_base_swa")
    if local:
        set_base(local, local_base)
    elif local_base not in (None, full.get("rope_theta")):
        raise ValueError(f"{key_of(reader, 'freq_base_swa')} is {local_base}, which is not applied")
    if scaling and not full:
        raise ValueError(f"{key_of(reader, 'scaling.type')} is for layers with full attention, and there are none")
    if scaling:
        scale(config, full, scaling)
    if changed != parameters:
        config.rope_parameters = changed
        config.standardize_rope_params()
        require_valid(config, reader)


def require_valid(config: PretrainedConfig, reader: GGUFReader) -> None:
    """Raises ValueError, with the key, if the rotary embedding of a file is none of its architecture."""
    try:
        config.validate_rope()
    except (KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{key_of(reader, 'scaling')} does not fit the architecture ({reason})") from None


def set_base(parameters: dict[str, Any], base: float | None) -> None:
    """Changes the base of rotary frequencies, if there is one; a header has it in float32."""
    if base is not None and np.float32(parameters.get("rope_theta") or 0) != np.float32(base):
        parameters["rope_theta"] = float(base)


def set_share(config: PretrainedConfig, parameters: dict[str, Any], columns: int | None) -> None:
    """Changes the share of a head's columns that are turned, in models that turn a part of them."""
    if columns is not None and "partial_rotary_factor" in parameters:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        parameters["partial_rotary_factor"] = columns / head


def scale(config: PretrainedConfig, parameters: dict[str, Any], scaling: dict[str, Any]) -> None:
    """Puts a scaling in the place of the one that parameters have."""
    own = {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
    whole = own | scaling
    if scaling["rope_type"] != "linear":
        original = whole.setdefault("original_max_position_embeddings", config.max_position_embeddings)
        whole.setdefault("factor", config.max_position_embeddings / original)
        if hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = original
    parameters.clear()
    parameters.update(whole)


def scaling_of(reader: GGUFReader) -> dict[str, Any]:
    """Returns the scaling of rotary frequencies that a file states, in the words of transformers; empty if it has none.

    Raises:
        ValueError: it is of a kind that is not applied here.
    """
    prefix = key_of(reader, "scaling.")
    stated = {
        key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if key.startswith(prefix)
    }
    factors = {name: tensor_named(reader, name) for name in (LONG_FACTORS, SHORT_FACTORS)}
    factors = {name: tensor.tolist() for name, tensor in factors.items() if tensor is not None}
    kind = stated.pop("type", "longrope" if factors else "linear")
    # 0 stands for no factor; files of 2023 have another key for it.
    factor = float(stated.pop("factor", 0) or value_of(reader, "scale_linear") or 1)
    if kind == "longrope":
        if len(factors) < 2 or "original_context_length" not in stated or factor != 1:
            needed = f"{LONG_FACTORS}, {SHORT_FACTORS}, {prefix}original_context_length and no {prefix}factor"
            raise ValueError(f"{prefix}type is longrope, which needs {needed}")
        taken = {"rope_type": kind, "long_factor": factors[LONG_FACTORS], "short_factor": factors[SHORT_FACTORS]}
        taken |= taken_from(stated, attn_factor="attention_factor", yarn_attn_factor="attention_factor")
    elif factors:
        raise ValueError(f"{next(iter(factors))} is not applied beside {prefix}type {kind}")
    elif kind == "yarn":
        taken = {"rope_type": kind, "factor": factor}
        taken |= taken_from(stated, yarn_attn_factor="attention_factor")
        taken |= taken_from(stated, yarn_beta_fast="beta_fast", yarn_beta_slow="beta_slow")
    elif kind in ("linear", "none"):
        taken = {"rope_type": kind, "factor": factor} if kind == "linear" and factor != 1 else {}
    else:
        raise ValueError(f"{prefix}type is {kind}, which is not applied")
    if kind in ("yarn", "longrope") and "original_context_length" in stated:
        taken["original_max_position_embeddings"] = int(stated["original_context_length"])
    for name, value in stated.items():
        if name not in UNUSED and value not in UNSCALED.get(name, ()):
            raise ValueError(f"{prefix}{name} is {value}, which is not applied")
    return taken


def taken_from(stated: dict[str, Any], **names: str) -> dict[str, float]:
    """Takes values out of what a header states, by their keys there; returns them by their names in transformers."""
    return {name: float(stated.pop(key)) for key, name in names.items() if key in stated}


def key_of(reader: GGUFReader, name: str) -> str:
    """Returns the whole name of a key of the rotary embedding."""
    return f"{reader.fields['general.architecture'].contents()}.rope.{name}"


def value_of(reader: GGUFReader, name: str) -> Any:
    """Returns the value of a key of the rotary embedding; None if a file lacks it."""
    field = reader.fields.get(key_of(reader, name))
    return None if field is None else field.contents()
