"""Shared fixtures: a tiny random Llama with a byte-level tokenizer, created by the tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.needs import pytest_terminal_summary  # noqa: F401  # a hook
from tests.records import give_manifest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.spec.specs import BackboneSpec

if find_spec("hypothesis") is not None:  # the tests of the GPU check do without
    from hypothesis import HealthCheck, settings

    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test
    settings.register_profile("quick", untimed, max_examples=50)
    settings.register_profile("thorough", untimed, max_examples=300)
    settings.load_profile("quick")
torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it brings, much more on a busy machine

TINY = BackboneSpec(
    name="tiny", study="test", model_id="test/Tiny-Llama", revision="r0", source="assets", dtype="float32",
    tokenizer="bytes", context=2048, requires_gpu=False,
)  # fmt: skip


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, with <s> and </s> known but not added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def tiny_llama(seed: int = 0, layers: int = 3, heads: int = 4, kv_heads: int = 2, width: int = 16) -> LlamaForCausalLM:
    """Random weights, large enough for attention to be uneven; query heads on KV heads, all of one width."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=258, hidden_size=width * heads, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width, max_position_embeddings=2048,
        initializer_range=0.25, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def save_tiny(model: LlamaForCausalLM, assets: Path) -> None:
    """Makes it the tiny backbone of an assets folder."""
    folder = assets / "models" / "tiny-llama"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An assets folder that holds the tiny backbone alone."""
    assets = tmp_path_factory.mktemp("assets")
    save_tiny(tiny_llama(), assets)
    give_manifest(assets)
    return assets


@pytest.fixture(scope="session")
def tiny_backbone(tiny_assets: Path) -> Backbone:
    return load_backbone(TINY, tiny_assets, torch.device("cpu"))
