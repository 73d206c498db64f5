"""Every family of docs/models.md: plain generation against `partial_kv` and decoding under several arms."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.conftest import TINY, byte_tokenizer
from tests.unit.model.families import FAMILIES, Family, cases
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import chunked_overlay, sliding_window_overlay

from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.forced import ForcedDecoder
from residual_mass.decode.generate import partial_decoding, partial_generate, partial_kv
from residual_mass.decode.text import PIECE
from residual_mass.model.hook import visible_columns
from residual_mass.model.layers import AttentionWindow, require_attention_alone
from residual_mass.model.loading import Backbone
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
STEPS = 6
FEW = {"num_sink": 2, "num_tail": 3}
WORKING = [family for family in FAMILIES if family.refusal is None]
ARMED = [family for family in WORKING if family.arms is None]
AS_OTHERS = {
    "Mistral, newer", "Ministral", "Qwen 2", "Qwen 2 with windows", "Qwen 3", "Qwen 3 with windows", "Qwen 3 MoE",
    "Phi-3 without a window", "Gemma", "Gemma 2 without caps", "OLMo 2", "OLMo 3", "Cohere", "Cohere 2", "GLM 4",
    "StarCoder 2 without a window", "StableLM", "EXAONE 4", "Nemotron", "MiniMax M2", "DeepSeek V2", "GPT-NeoX",
}  # fmt: skip
"""Families whose attention is that of another one to what decodes."""
armed = cases(ARMED, slow=AS_OTHERS)


def ids_of(length: int) -> Tensor:
    return torch.randint(2, 99, (1, length), generator=torch.Generator().manual_seed(length))


LONG, SHORT = ids_of(40), ids_of(23)
BOTH = torch.cat((LONG, F.pad(SHORT, (17, 0), value=1)))
MASK = torch.cat((torch.ones_like(LONG), F.pad(torch.ones_like(SHORT), (17, 0))))


def generated(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, steps: int = STEPS) -> tuple:
    """The new tokens [B, T] and their logits [B, T, V]."""
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def assert_same(ours: tuple, theirs: tuple, tolerance: float = 1e-3) -> None:
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].log_softmax(-1), theirs[1].log_softmax(-1), rtol=0, atol=tolerance)


@cases(WORKING, slow=AS_OTHERS)
def test_everything_retrieved_is_plain_generation_and_a_left_padded_batch_is_its_rows(family: Family) -> None:
    model = family.build()
    plain = [generated(model, ids) for ids in (LONG, SHORT)]
    with partial_kv(model, "full") as session:
        assert_same(generated(model, LONG), plain[0], 1e-4)
    assert session.partial_calls == dict.fromkeys(family.layers, STEPS - 1)
    with partial_kv(model, "topk", 1.0):
        everything = generated(model, BOTH, MASK)
    with partial_kv(model, "topk_moments", 0.4, **FEW) as session:
        rows = [generated(model, ids) for ids in (LONG, SHORT)]
        few = generated(model, BOTH, MASK)
    assert session.partial_calls == dict.fromkeys(family.layers, 3 * (STEPS - 1))
    for together, alone in ((everything, plain), (few, rows)):
        for row in range(2):
            assert_same(tuple(x[row : row + 1] for x in together), alone[row])
    away = (rows[0][1] - plain[0][1]).abs().amax(-1)[0]
    assert away[0] < 1e-4, "the prompt is exact"
    assert away[1] > 1e-5, "reading less must show, or equality shows nothing"


def test_keys_that_older_transformers_shares_through_its_cache_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = next(family for family in FAMILIES if family.name == "Gemma 3n").build()
    monkeypatch.setattr(transformers, "__version__", "5.23.0")
    require_attention_alone(model)
    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    with pytest.raises(ValueError, match="^Gemma3nForCausalLM shares keys .* install transformers 5$"):
        require_attention_alone(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_that_add_to_scores_are_read_as_bool(dtype: torch.dtype) -> None:
    """As older models of transformers make them."""
    visible = torch.tensor([[True, False, True]])
    added = torch.zeros(1, 3, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    module = torch.nn.Identity()
    assert torch.equal(visible_columns(module, added), visible) and visible_columns(module, visible) is visible
    with pytest.raises(ValueError, match="^Identity adds a bias to scores by its mask"):
        visible_columns(module, added - 2)


@pytest.mark.parametrize("name", ["Gemma 3", "gpt-oss", "Llama 4", "Cohere 2"])
def test_windows_are_read_in_pieces_of_a_long_prompt(name: str) -> None:
    model = next(family for family in FAMILIES if family.name == name).build()
    model.config.max_position_embeddings = 4096
    ids = torch.randint(3, 90, (2, 2 * PIECE + 100), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, : PIECE + 30] = 0
    for rows, visible in ((ids[1:], mask[1:]), (ids, mask)):
        options = {"attention_mask": visible, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        plain = model.generate(rows, **options)
        ours = model.generate(rows, custom_generate=partial_decoding("full"), **options)
        for own, their in zip(ours.logits, plain.logits, strict=True):
            torch.testing.assert_close(own, their, atol=1e-4, rtol=0)


def test_windows_start_where_transformers_masks_do() -> None:
    keys, queries = torch.arange(20), torch.arange(20)[:, None]
    sliding = sliding_window_overlay(7)(0, 0, queries, keys)
    chunked = chunked_overlay(7, torch.zeros(1, dtype=torch.long))(0, 0, queries, keys)
    causal = keys <= queries
    assert torch.equal(keys >= AttentionWindow(7).first(queries), sliding)
    assert torch.equal((keys >= AttentionWindow(7, chunked=True).first(queries)) & causal, chunked & causal)


def engine_of(model: PreTrainedModel, *arms: ArmSpec) -> SharedPrefillEngine:
    backbone = Backbone(replace(TINY, name="family"), model, byte_tokenizer(), "tiny")
    return SharedPrefillEngine(backbone, arms, AnchorSpec(2, 3), None, None)


ARMS = (ArmSpec("full"), ArmSpec("topk", 100.0), ArmSpec("topk_moments", 100.0), ArmSpec("topk", 40.0))


@armed
def test_arms_decode_together_as_they_do_alone(family: Family) -> None:
    """Prompts of two lengths, one of them below the windows, and enough tokens to leave the windows."""
    model = family.build()
    prompts = [LONG, SHORT, ids_of(5)]
    engine = engine_of(model, *ARMS)
    results = engine.generate([ids[0].tolist() for ids in prompts], 9)
    results += engine.generate([LONG[0].tolist()], 9)  # no window reaches the prompt in the end
    for ids, row in zip([*prompts, LONG], results, strict=True):
        plain = generated(model, ids, steps=9)[0][0].tolist()
        assert [generation.tokens for generation in row[:3]] == [plain] * 3
        with partial_kv(model, "topk", 0.4, **FEW):
            assert row[3].tokens == generated(model, ids, steps=9)[0][0].tolist()


@torch.no_grad()
@armed
def test_forced_tokens_are_read_as_the_plain_model_reads_them(family: Family) -> None:
    model = family.build()
    tokens = ids_of(12)
    plain = model(torch.cat((LONG, tokens), 1)).logits[0, -12:].log_softmax(-1)
    decoder = ForcedDecoder(engine_of(model, *ARMS), LONG[0].tolist())
    full, dense = decoder.full(tokens[0].tolist())
    torch.testing.assert_close(full.log_softmax(-1), plain, rtol=0, atol=1e-4)
    for state in (None, dense):
        topk, moments, few = decoder.logits(ARMS[1:], tokens[0].tolist(), state)
        torch.testing.assert_close(topk.log_softmax(-1), plain, rtol=0, atol=1e-3)
        torch.testing.assert_close(moments.log_softmax(-1), plain, rtol=0, atol=1e-3)
        assert (few.log_softmax(-1) - plain).abs().max() > 1e-5
    continued = decoder.greedy(int(tokens[0, 0]), 12)
    assert continued == generated(model, torch.cat((LONG, tokens[:, :1]), 1), steps=12)[0][0].tolist()


@cases(family for family in FAMILIES if family.arms is not None)
def test_what_is_not_supported_is_refused_in_one_line(family: Family) -> None:
    model = family.build()
    line = f"^{family.model} {family.arms}[^\n]*$"
    with pytest.raises(ValueError, match=line):
        engine_of(model, *ARMS)
    if family.refusal is not None:
        with pytest.raises(ValueError, match=line), partial_kv(model, "topk", 0.2):
            pass
        with pytest.raises(ValueError, match=line):
            partial_generate(model, LONG, max_new_tokens=3, method="topk", budget=0.2)


def test_the_page_lists_these_families() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text("utf-8"), re.M)
    assert rows == [(f.name, f.model, f.works, "yes" if f.arms is None else "no") for f in FAMILIES]
