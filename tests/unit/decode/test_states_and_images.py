"""Models that keep more of a text than keys and values, and models that take images: plain generation, rows of a padded
batch, further turns, copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from tests.needs import TRANSFORMERS_5, needs
from tests.unit.model.families import FAMILIES, Family
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass import partial_kv
from residual_mass.decode.backends import backend_for
from residual_mass.decode.text import Text
from residual_mass.methods.arms import arm_of

FEW = {"num_sink": 2, "num_tail": 3}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}
NAMES = ["Qwen 3 Next", "Granite 4", "Jamba", "Falcon-H1", "LFM2", "Llama 4"]
KEEPING = [next(family for family in FAMILIES if family.name == name) for name in NAMES]
keeping = pytest.mark.parametrize(
    "family",
    [pytest.param(each, id=each.name, marks=[needs(TRANSFORMERS_5)] * each.newer) for each in KEEPING],
)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def ids_of(length: int) -> Tensor:
    return torch.randint(3, 99, (1, length), generator=torch.Generator().manual_seed(length))


def generated(model: PreTrainedModel, ids: Tensor, method: str | None = None, **options: Any) -> Any:
    """Plainly without a method."""
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, **LOGITS}
    if method is None:
        return model.generate(ids, **settings | options)
    with partial_kv(model, method, None if method == "full" else 0.4, **FEW):
        return model.generate(ids, **settings | options)


def assert_same(ours: Any, theirs: Any, row: int = 0) -> None:
    """A row of ours, and a single text."""
    for own, their in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(own[row], their[0], rtol=0, atol=1e-3)


@keeping
@pytest.mark.parametrize("method", ["full", "topk_moments"])
def test_turns_and_padded_rows(family: Family, method: str) -> None:
    """A further turn over the returned cache: of full attention it is plain generation of the whole text."""
    model = family.build()
    rows = [generated(model, ids, method) for ids in (ids_of(30), ids_of(19))]
    ids = torch.cat((ids_of(30), torch.cat((torch.ones(1, 11, dtype=torch.long), ids_of(19)), 1)))
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    both = generated(model, ids, method, attention_mask=mask)
    for row, alone in enumerate(rows):
        assert_same(both, alone, row)
    text = torch.cat((rows[0].sequences, ids_of(7)), 1)
    turn = generated(model, text, method, past_key_values=rows[0].past_key_values)
    assert turn.past_key_values.get_seq_length() == text.shape[1] + 5
    if method == "full":
        assert_same(rows[0], generated(model, ids_of(30)))
        assert_same(turn, generated(model, text))


@keeping
def test_copies_and_several_tokens_at_once(family: Family) -> None:
    model = family.build()
    text = Text(model, backend_for(model, arm_of("topk", 0.4)))
    text.read(ids_of(30))
    first, second = text.copy(), text.copy()
    one_by_one = torch.cat([first.step(token) for token in ids_of(5).split(1, 1)], 1)
    second.step(ids_of(9))
    torch.testing.assert_close(text.step(ids_of(5)), one_by_one, rtol=0, atol=1e-4)
    torch.testing.assert_close(text.step(ids_of(1)), first.step(ids_of(1)), rtol=0, atol=1e-4)


@keeping
def test_padding_behind_a_token_is_refused(family: Family) -> None:
    ids = ids_of(20)
    mask = torch.ones_like(ids)
    mask[0, 9:15] = 0
    with pytest.raises(ValueError, match="has layers with windows or states, which count padding behind a token"):
        generated(family.build(), ids, "full", attention_mask=mask)


# ---- images ----------------------------------------------------------------------------------------------------------

VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
TEXT = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1,
}  # fmt: skip
IMAGE = 119
"""The token that an image's vectors replace."""


def llava() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model, and what goes with one image of 4 tokens."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=32),
        text_config=transformers.LlamaConfig(**TEXT), image_token_index=IMAGE,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config), {"pixel_values": torch.randn(1, 3, 28, 28)}


def gemma3() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Tokens of an image see each other, those behind them, too."""
    text = transformers.Gemma3TextConfig(**TEXT, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=transformers.SiglipVisionConfig(**VISION), mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_()
    return model, {"pixel_values": torch.randn(1, 3, 28, 28)}


def qwen2_vl() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Positions have three dimensions."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope, "use_sliding_window": False},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1,
                       "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=IMAGE, video_token_id=118, vision_start_token_id=117, vision_end_token_id=116,
    )  # fmt: skip
    pixels = {"pixel_values": torch.randn(16, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return transformers.Qwen2VLForConditionalGeneration(config), pixels


MODELS = [llava, gemma3, qwen2_vl]
images = pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)


def built(build: Callable[[], tuple[PreTrainedModel, dict[str, Tensor]]]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, image = build()
    model.eval().generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 1
    return model, image


def with_image(length: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A prompt with an image in it, and the types of its tokens."""
    ids = ids_of(length)
    ids[0, 9:13] = IMAGE
    ids[0, 8], ids[0, 13] = 117, 116
    return ids, {"token_type_ids": (ids == IMAGE).long()}


def inputs_of(build: Callable, length: int, image: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    ids, types = with_image(length)
    name = {"gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids"}.get(build.__name__)
    return ids, image | ({name: types["token_type_ids"]} if name else {})


@images
def test_text_alone(build: Callable) -> None:
    model, _ = built(build)
    plain = generated(model, ids_of(40))
    for method in ("full", "topk_moments"):
        ours = generated(model, ids_of(40), method)
        if method == "full":
            assert_same(ours, plain)
        turn = torch.cat((ours.sequences, ids_of(5)), 1)
        more = generated(model, turn, method, past_key_values=ours.past_key_values)
        if method == "full":
            assert_same(more, generated(model, turn))


@images
def test_an_image(build: Callable) -> None:
    model, image = built(build)
    ids, inputs = inputs_of(build, 40, image)
    plain = generated(model, ids, **inputs)
    ours = generated(model, ids, "full", **inputs)
    assert_same(ours, plain)
    blank = generated(model, ids, "full", **inputs | {"pixel_values": 0 * image["pixel_values"]})
    assert not torch.equal(blank.logits[0], ours.logits[0]), "the image must show"
    few = generated(model, ids, "topk", **inputs)
    torch.testing.assert_close(few.logits[0], plain.logits[0], rtol=0, atol=1e-4)
    assert not torch.allclose(few.logits[1], plain.logits[1], rtol=0, atol=1e-4)


@images
def test_a_further_turn_after_an_image(build: Callable) -> None:
    model, image = built(build)
    ids, inputs = inputs_of(build, 40, image)
    first = generated(model, ids, "full", **inputs)
    text = torch.cat((first.sequences, ids_of(5)), 1)
    turn = generated(model, text, "full", past_key_values=first.past_key_values)
    for name, value in inputs.items():
        if "type" in name:
            inputs[name] = torch.nn.functional.pad(value, (0, 11))
    assert_same(turn, generated(model, text, **inputs))


@images
def test_a_padded_batch_with_images(build: Callable) -> None:
    model, image = built(build)
    (long, own), (short, _) = inputs_of(build, 40, image), inputs_of(build, 31, image)
    padded = torch.cat((torch.ones(1, 9, dtype=torch.long), short), 1)
    ids = torch.cat((long, padded))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    inputs = {name: torch.cat((value, value)) for name, value in own.items() if "type" not in name}
    inputs |= {name: (ids == IMAGE).long() for name in own if "type" in name}
    plain = generated(model, ids, attention_mask=mask, **inputs)
    ours = generated(model, ids, "full", attention_mask=mask, **inputs)
    for row in range(2):
        for own_logits, their in zip(ours.logits, plain.logits, strict=True):
            torch.testing.assert_close(own_logits[row], their[row], rtol=0, atol=1e-3)
