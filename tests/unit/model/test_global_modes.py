"""Global modes of torch that callers may have set: the default dtype and device, inference mode, autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.conftest import tiny_llama
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass import PhiMaps, partial_generate, partial_kv
from residual_mass.core.feature_maps import orthogonal_directions
from residual_mass.decode.backend import LayerCall
from residual_mass.decode.backends import backend_for
from residual_mass.methods import METHODS, Method
from residual_mass.methods.arms import arm_of
from residual_mass.model.phi_maps import HeadShape
from residual_mass.spec.settings import AnchorSpec, MapSpec


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "inference": torch.inference_mode,
    "elsewhere": lambda: torch.device("meta"),  # a tensor made there by default has no numbers
}
modes = pytest.mark.parametrize("mode", MODES)
AUTOCAST = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)}


@cache
def model() -> PreTrainedModel:
    made = tiny_llama(layers=2).requires_grad_(False)
    made.generation_config.eos_token_id = None
    return made


@cache
def maps() -> PhiMaps:
    torch.manual_seed(3)
    return PhiMaps(HeadShape.of(model().config), MapSpec(d_emb=12, d_phi=4)).requires_grad_(False)


def texts(method: Method) -> list[Tensor]:
    """Of a generation in which tokens join the prompt, and of a left-padded batch."""
    generator = torch.Generator("cpu").manual_seed(2)
    ids = torch.randint(2, 258, (2, 30), generator=generator, device="cpu")
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    settings = {
        "method": method, "budget": 0.8 if method.chooses else None, "phi": maps() if method.needs_maps else None,
    }  # fmt: skip
    with partial_kv(model(), **settings):
        options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
        made = model().generate(ids, **options)
    return [made, partial_generate(model(), ids[:1], max_new_tokens=68 if method.name in LONG else 4, **settings)]


LONG = ("topk_moments", "scan4_regression_64")


@cache
def expected(method: Method) -> list[Tensor]:
    return texts(method)


@modes
@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
def test_texts_do_not_depend_on_them(mode: str, method: Method) -> None:
    without = expected(method)
    with MODES[mode]():
        found = texts(method)
    for ours, theirs in zip(found, without, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("method", [one for one in METHODS if not one.whole_prefix], ids=lambda one: one.name)
@torch.no_grad()
def test_attention_of_a_step_is_computed_in_float32_under_autocast(method: Method) -> None:
    """On the same queries, keys and values: autocast changes those that the model computes."""
    layer = model().model.layers[0].self_attn
    arm = arm_of(method, 0.4 if method.chooses else None)
    generator = torch.Generator().manual_seed(4)
    query, new = (torch.randn(1, heads, 61, 16, generator=generator) for heads in (4, 2))
    value = torch.randn(1, 2, 61, 16, generator=generator)
    outputs = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            backend = backend_for(model(), arm, AnchorSpec(), maps() if method.needs_maps else None)
            backend.read(LayerCall(layer, *(x[:, :, :60] for x in (query, new, value)), None, 0.25))
            outputs.append(backend.step(LayerCall(layer, *(x[:, :, 60:] for x in (query, new, value)), None, 0.25)))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("mode", MODES | AUTOCAST)
@pytest.mark.parametrize(
    "spec", [MapSpec(d_emb=12, d_phi=4), MapSpec(kind="hedgehog", d_phi=4)], ids=["own", "hedgehog"]
)
def test_maps_are_written_and_read_as_without_them(mode: str, spec: MapSpec, tmp_path: Path) -> None:
    shape = HeadShape(layers=2, query_heads=4, kv_heads=2, head_dim=6)
    torch.manual_seed(0)
    made = PhiMaps(shape, spec, {"model_id": "m"})
    made.save(tmp_path / "without")
    with (MODES | AUTOCAST)[mode]():
        loaded = PhiMaps.load(tmp_path / "without")
        loaded.save(tmp_path / "within")
        own = PhiMaps(shape, spec)
    assert (tmp_path / "without").read_bytes() == (tmp_path / "within").read_bytes()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, made.state_dict()[name]) and not tensor.is_inference() and not tensor.requires_grad
    assert {tensor.dtype for tensor in own.state_dict().values()} == {torch.float32}


@modes
def test_random_directions_are_the_same(mode: str) -> None:
    def drawn() -> Tensor:
        return orthogonal_directions(2, 8, 4, torch.Generator("cpu").manual_seed(1))

    without = drawn()
    with MODES[mode]():
        assert torch.equal(drawn(), without)
