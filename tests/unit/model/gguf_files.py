"""Tiny GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

Kinds = Callable[[str], str | None]
"""Returns the format of a weight by its name in transformers; None leaves it in float32."""
RANDOM = {
    "Q2_K": (84, 80, 2), "Q3_K": (110, 108, 1), "Q4_K": (144, 0, 2), "Q5_K": (176, 0, 2), "Q6_K": (210, 208, 1),
    "IQ4_XS": (136, 0, 1), "IQ3_S": (110, 0, 1), "IQ2_XXS": (66, 0, 1),
}  # fmt: skip
"""Formats of 256 columns that gguf does not write: bytes of a block, the first of its halves, and how many."""
ONE_SCALE = {"IQ4_NL": (18, 0, 1)}
"""The same, of 32 columns."""


def blocks(weight: np.ndarray, kind: str) -> np.ndarray:
    """Returns a weight in blocks, or random blocks of its shape where gguf does not write them."""
    made = RANDOM | ONE_SCALE
    if kind not in made:
        return gguf.quantize(weight, GGMLQuantizationType[kind])
    size, first, halves = made[kind]
    rows, columns = weight.shape
    count = columns // gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    draw = np.random.default_rng(len(kind) * rows + columns)
    found = draw.integers(0, 256, (rows, count, size), dtype=np.uint8)
    scales = (draw.random((rows, count, halves)) * 1e-3 + 1e-5).astype(np.float16)
    found[..., first : first + 2 * halves] = scales.view(np.uint8)
    return found.reshape(rows, -1)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kinds: Kinds,
    architecture: str = "llama",
    rope: np.ndarray | None = None,
    more: Callable[[GGUFWriter], None] = lambda writer: None,
    has_tokenizer: bool = True,
) -> None:
    """Writes a model with a tokenizer of bytes, and factors of its rotary frequencies.

    Args:
        rope: the factors.
        more: adds to the header and the tensors.
    """
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(head)
    writer.add_value_length(head)
    if has_tokenizer:
        write_tokenizer(writer, config.vocab_size)
    more(writer)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        base, _, suffix = name.rpartition(".")
        weight = parameter.detach().numpy()
        if architecture == "llama" and base.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in base else config.num_key_value_heads
            paired = weight.reshape(heads, 2, -1, weight.shape[1])  # its rotary embedding turns neighbours
            weight = paired.swapaxes(1, 2).reshape(weight.shape)
        if architecture.startswith("gemma") and weight.ndim == 1:
            weight = weight + 1  # its norms multiply by 1 more than what transformers keeps
        kind = kinds(name) if weight.ndim == 2 else None
        stored = weight if kind is None else blocks(weight, kind)
        own = None if kind is None else GGMLQuantizationType[kind]
        writer.add_tensor(f"{table.get_name(base)}.{suffix}", np.ascontiguousarray(stored), raw_dtype=own)
    if rope is not None:
        writer.add_tensor("rope_freqs.weight", rope)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(writer: GGUFWriter, size: int) -> None:
    """Adds a tokenizer of single bytes and of one pair, with two special tokens behind them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    characters = [chr(byte) for byte in shown] + [chr(256 + place) for place in range(len(hidden))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    characters[-1] = "ab"
    writer.add_token_list([*characters, "<s>", "</s>", *(f"<{place}>" for place in range(258, size))])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)
