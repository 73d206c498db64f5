"""Which backend serves which method: the table of docs/library.md, and what models and machines refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.needs import KERNELS, NO_GPU, TRANSFORMERS_5, needs
from tests.unit.model.families import FAMILIES
from tests.unit.model.test_packed import model as wide_model  # noqa: F401  # a fixture: heads that the kernels serve
from transformers import LlamaConfig, LlamaForCausalLM

from residual_mass import partial_decoding, partial_generate
from residual_mass.decode.backends import BACKENDS, backend_for, loop_refusal
from residual_mass.methods import METHODS, Method, QuantisedScan, ScanRegression, names
from residual_mass.methods.arms import arm_of
from residual_mass.methods.served import backends_of
from residual_mass.spec.settings import AnchorSpec

PAGE = Path(__file__).parents[3] / "docs" / "library.md"
SERVED = {
    "full": "packed triton",
    "topk": "triton",
    "topk_phi": "triton",
    "topk_phi_nosub": "triton",
    "topk_moments": "triton",
    "topk_moments_8": "triton",
    "topk_moments_shared": "triton",
    "scan4": "packed triton",
    "scan4_moments": "triton",
    "scan4_regression_64": "packed",
    "cache8": "packed",
}
"""Backends beside torch, which serves every method; methods that are not listed have torch alone."""


def test_what_serves_a_method() -> None:
    for method in METHODS:
        assert backends_of(method) == (*SERVED.get(method.name, "").split(), "torch"), method.name
    assert backends_of(Method("few", "few", QuantisedScan(4), ScanRegression(8))) == ("packed", "torch")
    assert SERVED.keys() <= set(names())
    assert [kind.name for kind in BACKENDS] == ["packed", "triton", "torch"]


def test_the_table_of_the_page() -> None:
    """If this fails, the message shows the table that the page should have."""
    rows = [f"| `{name}` | {' | '.join('yes' if kind in SERVED[name] else '' for kind in ('packed', 'triton'))} | yes |"
            for name in SERVED]  # fmt: skip
    table = "\n".join(["| method | packed (CPU) | Triton (GPU) | torch |", "|---|---|---|---|", *rows])
    table += "\n| all others | | | yes |"
    assert table in PAGE.read_text("utf-8"), f"docs/library.md should have\n{table}"


@needs(KERNELS)
def test_the_first_backend_without_a_refusal_serves(wide_model: LlamaForCausalLM) -> None:  # noqa: F811
    for name in names():
        arm = arm_of(name, 0.1)
        if arm.needs_maps:
            continue
        backend = backend_for(wide_model, arm, AnchorSpec())
        assert backend.name == ("packed" if "packed" in backends_of(arm.rule) else "torch"), name


REFUSALS = {
    "Gemma 2 without caps": "the kernels take heads of",
    "DeepSeek V3": "latent attention, whose caches hold no keys",
    "Gemma 3n": "shares keys between layers",
    "Falcon-H1": "states beside the keys in a layer",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_model_refuses(name: str) -> None:
    model = next(family for family in FAMILIES if family.name == name).build()
    packed, triton, torch_backend = BACKENDS
    arm = arm_of("scan4", 0.1)
    assert REFUSALS[name] in packed.refusal(model, arm)
    assert "\n" not in packed.refusal(model, arm)
    assert torch_backend.refusal(model, arm) is None
    if not torch.cuda.is_available():
        assert triton.refusal(model, arm)


def test_kernels_that_are_turned_off_refuse(
    wide_model: LlamaForCausalLM,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from residual_mass.kernels import library

    monkeypatch.setenv(library.SWITCH, "off")
    library.load.cache_clear()
    try:
        assert "not built here, or turned off" in BACKENDS[0].refusal(wide_model, arm_of("scan4", 0.1))
        assert backend_for(wide_model, arm_of("scan4", 0.1), AnchorSpec()).name == "torch"
    finally:
        library.load.cache_clear()


SHOWN = [
    "Llama", "Mistral, newer", "Mixtral", "Qwen 2", "Qwen 3", "Qwen 3 MoE", "Qwen 3 Next", "Phi-3 without a window",
    "Gemma", "Gemma 3", "gpt-oss", "OLMo 3", "Llama 4", "Granite", "DeepSeek V3", "LFM2",
]  # fmt: skip
MODELS = PAGE.with_name("models.md")


def served_family(name: str) -> str:
    """A row of the page: which loop and which backends take the steps of a family with heads of 64 channels."""
    family = next(one for one in FAMILIES if one.name == name)
    heads = {} if name == "DeepSeek V3" else {"head_dim": 64, "hidden_size": 256}
    model = family.build(**heads)
    loop = "ours" if loop_refusal(model) is None else "transformers'"
    ids = torch.arange(2, 42)[None]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(partial_generate(model, ids, max_new_tokens=5, method="topk", budget=1.0), expected)
    backends = []
    for method in ("scan4_regression_64", "topk_moments"):
        arm = arm_of(method, 0.1)
        backends.append(next(kind.name for kind in BACKENDS if kind.refusal(model, arm) is None))
        assert partial_generate(model, ids, max_new_tokens=5, method=method, budget=1.0).shape == expected.shape
    return f"| {name} | {loop} | {' | '.join(backends)} |"


@needs(KERNELS)
@needs(TRANSFORMERS_5)
@needs(NO_GPU)
def test_what_serves_sixteen_families() -> None:
    """If this fails, the message shows the table that the page should have."""
    rows = [served_family(name) for name in SHOWN]
    table = "\n".join(["| family | loop | `scan4_regression_64` | `topk_moments` |", "|---|---|---|---|", *rows])
    assert table in MODELS.read_text("utf-8"), f"docs/models.md should have\n{table}"


def test_what_serves_in_place_of_a_faster_step_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    config = LlamaConfig(
        vocab_size=101, hidden_size=96, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=48, bos_token_id=0, eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(2, 42)[None]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    for method, more, told in (
        ("cache8", {}, "torch serves cache8 on LlamaForCausalLM, no kernels: packed: the kernels take heads of 32"),
        ("cache8", {}, None),
        ("topk_mean", {}, None),
        (
            "cache8",
            {"output_hidden_states": True},
            "transformers' own loop decodes cache8 on LlamaForCausalLM by torch",
        ),
        ("cache8", {"output_hidden_states": True}, None),
    ):
        caplog.clear()
        loop = partial_decoding(method, 0.5)
        output = model.generate(ids, custom_generate=loop, return_dict_in_generate=True, **options, **more)
        assert output.backend == "torch"
        lines = [line for line in caplog.messages if "LlamaForCausalLM" in line]
        assert len(lines) == (told is not None), lines
        assert told is None or lines[0].startswith(told), lines
