"""Tiny random models of many families, made from their configurations. docs/models.md has the same list."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import transformers
from tests.needs import TRANSFORMERS_5, needs
from transformers import PreTrainedModel

COMMON = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.25,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
WINDOW = 7
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "head_dim": 4, "num_key_value_heads": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 2, "topk_group": 1,
}  # fmt: skip
CHUNKS = {
    "attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
    "num_local_experts": 2, "intermediate_size_mlp": 48,
}  # fmt: skip
SHARED = {
    "num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "laurel_rank": 8, "altup_num_inputs": 2, "vocab_size_per_layer_input": 99,
    "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
ALL, FULL, CHUNKED, BESIDE = "all layers", "full layers; sliding ones exact", "full layers; chunked ones exact", (
    "attention layers; others as they are"
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        model: its class in transformers.
        settings: of its configuration, beside the common ones.
        works: what a method is used on, as in docs/models.md.
        layers: these layers.
        refusal: the start of the line that `partial_kv` refuses it with, after the class.
        arms: the same of the engine that decodes under several arms; None if it supports the family.
        newer: whether all this is so from transformers 5 on only.
    """

    name: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    works: str = ALL
    layers: tuple[int, ...] = (0, 1)
    refusal: str | None = None
    arms: str | None = None
    newer: bool = False

    def build(self, **changes: Any) -> PreTrainedModel:
        """Makes the model with random weights, in float32."""
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        config = kind.config_class(**COMMON | self.settings | changes)
        model = kind(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.data.normal_()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 1
        return model


def hybrid(name: str, model: str, **settings: Any) -> Family:
    """A family whose first layer has a window, and whose second reads the whole text."""
    return Family(name, model, HYBRID | settings, FULL, (1,))


def stateful(name: str, model: str, layers: tuple[int, ...] = (1,), **settings: Any) -> Family:
    """A family with recurrent or convolutional layers."""
    return Family(name, model, settings, BESIDE, layers, arms="has layers with states other than keys and values")


def refused(name: str, model: str, line: str, **settings: Any) -> Family:
    return Family(name, model, settings, f"refused: {line}", (), line, line)


def newer(family: Family) -> Family:
    return replace(family, newer=True)


def cases(families: Iterable[Family], slow: Container[str] = ()) -> pytest.MarkDecorator:
    """Parametrises a test by families that the installed transformers has; some make a slow test, by their names."""

    def marks(family: Family) -> list[pytest.MarkDecorator]:
        return [needs(TRANSFORMERS_5)] * family.newer + [pytest.mark.slow] * (family.name in slow)

    return pytest.mark.parametrize("family", [pytest.param(each, id=each.name, marks=marks(each)) for each in families])


SLIDING = "has sliding-window attention in every layer"
OWN = "has no attention layers that go through transformers' attention interface"
FAMILIES = [
    Family("Llama", "LlamaForCausalLM"),
    Family("Mistral, newer", "MistralForCausalLM", {"sliding_window": None}),
    Family("Mixtral", "MixtralForCausalLM", EXPERTS | {"sliding_window": None}),
    hybrid("Ministral", "MinistralForCausalLM"),
    Family("Qwen 2", "Qwen2ForCausalLM"),
    hybrid("Qwen 2 with windows", "Qwen2ForCausalLM", use_sliding_window=True),
    Family("Qwen 3", "Qwen3ForCausalLM"),
    hybrid("Qwen 3 with windows", "Qwen3ForCausalLM", use_sliding_window=True),
    Family("Qwen 3 MoE", "Qwen3MoeForCausalLM", EXPERTS),
    stateful("Qwen 3 Next", "Qwen3NextForCausalLM", **EXPERTS | LINEAR),
    Family("Phi", "PhiForCausalLM"),
    Family("Phi-3 without a window", "Phi3ForCausalLM", {"sliding_window": None}),
    Family("Gemma", "GemmaForCausalLM"),
    hybrid("Gemma 2 without caps", "Gemma2ForCausalLM", attn_logit_softcapping=None),
    hybrid("Gemma 3", "Gemma3ForCausalLM"),
    Family("Gemma 3n", "Gemma3nForCausalLM", SHARED, FULL, (1, 3), newer=True),
    hybrid("gpt-oss", "GptOssForCausalLM", **EXPERTS),
    Family("OLMo 2", "Olmo2ForCausalLM"),
    hybrid("OLMo 3", "Olmo3ForCausalLM"),
    Family("Cohere", "CohereForCausalLM"),
    hybrid("Cohere 2", "Cohere2ForCausalLM"),
    Family(
        "Llama 4", "Llama4ForCausalLM", CHUNKS, CHUNKED, (1,), arms="scales queries by the length of its cache"
    ),
    Family("SmolLM3", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    Family("Granite", "GraniteForCausalLM", {"attention_multiplier": 0.3}),
    stateful("Granite 4", "GraniteMoeHybridForCausalLM", **EXPERTS | MAMBA | {"layer_types": ["mamba", "attention"]}),
    Family("GLM 4", "Glm4ForCausalLM"),
    Family("StarCoder 2 without a window", "Starcoder2ForCausalLM", {"sliding_window": None}),
    Family("StableLM", "StableLmForCausalLM", newer=True),
    hybrid("EXAONE 4", "Exaone4ForCausalLM"),
    Family("Nemotron", "NemotronForCausalLM", newer=True),
    Family("MiniMax M2", "MiniMaxM2ForCausalLM", EXPERTS, newer=True),
    newer(hybrid("MiMo V2", "MiMoV2FlashForCausalLM", **EXPERTS)),
    Family("DeepSeek V2", "DeepseekV2ForCausalLM", LATENT),
    Family("DeepSeek V3", "DeepseekV3ForCausalLM", LATENT),
    Family("GPT-2", "GPT2LMHeadModel"),
    Family("GPT-NeoX", "GPTNeoXForCausalLM"),
    Family("OPT", "OPTForCausalLM"),
    newer(stateful("Jamba", "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4,
             use_mamba_kernels=False, num_experts=1)),
    stateful("Falcon-H1", "FalconH1ForCausalLM", (0, 1), **MAMBA | {"mamba_d_ssm": 64}),
    newer(stateful("LFM2", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"])),
    refused("Mistral 0.1", "MistralForCausalLM", SLIDING, sliding_window=WINDOW),
    refused("Phi-3 with a window", "Phi3ForCausalLM", SLIDING, sliding_window=WINDOW),
    newer(refused("RecurrentGemma", "RecurrentGemmaForCausalLM", SLIDING, block_types=["recurrent", "attention"],
            attention_window_size=WINDOW, lru_width=32)),
    refused("Gemma 2", "Gemma2ForCausalLM", "caps its attention scores", **HYBRID),
    refused("Zamba 2", "Zamba2ForCausalLM", "shares attention modules between layers", num_hidden_layers=3,
            layers_block_type=["mamba", "hybrid", "hybrid"]),
    refused("BLOOM", "BloomForCausalLM", OWN),
    refused("MPT", "MptForCausalLM", OWN),
    refused("Mamba", "MambaForCausalLM", OWN),
]  # fmt: skip
