"""The model of decode steps: what it counts, and that its times are what it says."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import gpu_check
from tests.needs import COMPILER, needs

from residual_mass.backbones.phi_maps import HeadShape, PhiMaps
from residual_mass.core import fused
from residual_mass.core.fused import build_cache
from residual_mass.runtime.traffic import step_traffic

sys.path.append(str(Path(gpu_check.__file__).parent))  # the scripts there find each other like this

gpu_parts, step_model = (importlib.import_module(name) for name in ("gpu_parts", "step_model"))

TINY = gpu_parts.SHAPES["tiny"]
KERNELS = {
    name
    for path in Path(fused.__file__).parent.glob("triton_*.py")
    for name in re.findall(r"@triton\.jit.*\ndef (\w+)", path.read_text())
}


def test_only_what_is_a_kernel_is_counted() -> None:
    counts = {"body": step_model.Counter()}
    with step_model._Kernels(counts), torch.device("meta"):
        x = torch.empty(4, 3)
        (x.t().unsqueeze(0)[0] @ x).add_(1).reshape(9).to(torch.bfloat16).contiguous()
    assert counts["body"] == {"mm": 1, "add_": 1, "_to_copy": 1}


@pytest.mark.parametrize("method", step_model.METHODS)
def test_the_launches_of_a_step_are_those_of_its_layers(method: str) -> None:
    one = step_model.launches(TINY, method)
    three = step_model._counted(TINY, method, "4k", 1, 3)
    assert one.of_step(3) == three["body"].total() + three["attention"].total()
    assert one.body > 7  # the linear layers alone
    assert set(one.kernels) <= KERNELS and (method == "full") == (not one.kernels)
    assert one.attention >= sum(one.kernels.values()) + 2  # a new key and a new value are stored
    assert all(count > 0 for count in one.kernels.values())


def test_what_a_method_adds_is_counted() -> None:
    topk, moments, phi = (step_model.launches(TINY, name) for name in ("topk", "topk_moments", "topk_phi"))
    assert set(moments.kernels) - set(topk.kernels) == {"moments_kernel"}
    assert set(phi.kernels) - set(topk.kernels) == {"map_kernel"} and phi.attention == topk.attention + 1


@pytest.mark.slow  # compiling takes some seconds
@needs(COMPILER)
def test_a_compiled_layer_launches_less() -> None:
    assert 7 < step_model.compiled_body() < step_model.launches(TINY, "topk").body


def test_nothing_of_the_stand_in_is_left() -> None:
    before = {name: sys.modules.get(name) for name in ("triton", "triton.language")}
    with step_model.stand_in_for_triton(lambda name: None) as path:
        assert sys.modules["triton"] is not before["triton"] and fused.triton_path is path
    assert {name: sys.modules.get(name) for name in before} == before
    assert getattr(fused, "triton_path", None) is not path


def test_the_gpu_check_finds_the_kernels_that_it_times_alone() -> None:
    """Without a GPU nothing else would notice that they have changed their names."""
    launched: list[str] = []
    keys = torch.empty(2, 2, 256, 16, device="meta")
    first = torch.empty(2, dtype=torch.int32, device="meta")
    common = {"k": 5, "sink": 4, "tail": 16, "generated": 1, "scale": 1.0}
    with step_model.stand_in_for_triton(launched.append) as path:
        cache, query = build_cache(keys, keys, first, first, 4), torch.empty(2, 4, 16, device="meta")
        for name, work in gpu_parts._kernel_parts(path.decode_attention, query, cache, common).items():
            launched.clear()
            work()
            assert launched and set(launched) <= KERNELS, name
        alone = list(launched)
        launched.clear()
        path.decode_attention(query, cache, None, **common, subtracts=False)
    assert launched[: len(alone)] == alone


@pytest.mark.parametrize("method", ["full", "topk_phi", "scan4_moments"])
def test_a_step_takes_its_bytes_and_its_launches(method: str) -> None:
    model, phi = step_model.on_meta(TINY), PhiMaps(HeadShape.of(TINY), step_model.MAP)
    counted = step_model.Launches(body=10, attention=5, kernels={}, once=3)
    one = step_model.step_time(model, phi, counted, method, "4k", 2, rate=1e9, gap=1e-3)
    k = 0 if method == "full" else 21
    traffic = step_traffic(
        model, phi, "fused", method, batch=2, length=4096, k=k, anchors=step_model.ANCHORS, generated=15
    )
    assert one.floor == pytest.approx(1e3 * traffic.total / 1e9)
    assert one.total == pytest.approx(one.floor + counted.of_step(2))
    assert one.layer_bytes == (traffic.total - traffic.weights) / 2
