"""Products of the same activations in a compiled graph."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.conftest import tiny_llama
from tests.needs import COMPILER, KERNELS, needs
from torch import nn
from torch.fx import Graph

from residual_mass import pack_weights
from residual_mass.decode.joined import ONE, JoinProducts
from residual_mass.kernels.operations import product_operations

pytestmark = [needs(COMPILER), needs(KERNELS)]


class Seen(JoinProducts):
    """Counts the products of a graph."""

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        self.counts = Counter(node.target for node in graph.nodes if node.target in (ONE, *self.operations))

    def uuid(self) -> None:
        """Nothing is taken from a graph on disk."""


class Projections(nn.Module):
    """Queries, keys and values, with biases, of several widths and kinds of codes, and a product of something else."""

    def __init__(self) -> None:
        super().__init__()
        model = tiny_llama(layers=2)
        attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
        attention.q_proj.bias = nn.Parameter(torch.randn(attention.q_proj.out_features))
        pack_weights(model, mixed=False)
        joined = [attention.q_proj, attention.k_proj, attention.v_proj, mlp.up_proj, mlp.gate_proj]
        self.parts = nn.ModuleList([*joined, model.lm_head])
        self.last = mlp.down_proj

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = [part(x) for part in self.parts]
        return *outputs, self.last(outputs[3])


def computed(shape: tuple[int, ...], dtype: torch.dtype) -> Counter[object]:
    """Compares a compiled module with itself, and returns the operations of its graph."""
    module = Projections()
    module.parts[0].bias.data = module.parts[0].bias.to(dtype)  # inductor rounds no bias that is in float32
    x = torch.randn(*shape, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = Seen()
    compiled = torch.compile(module, fullgraph=True, dynamic=False, options={"post_grad_custom_pre_pass": seen})
    for found, expected in zip(compiled(x), module(x), strict=True):
        assert torch.equal(found, expected)
    return seen.counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 5)])
@torch.no_grad()
def test_they_are_one_operation_with_the_same_results(shape: tuple[int, int], dtype: torch.dtype) -> None:
    counts = computed(shape, dtype)
    assert counts[product_operations()[3]] == 1
    # The fifth product of the same activations; the head, whose activations are float32; the last one.
    assert counts.total() == (3 if dtype == torch.float32 else 4)


@torch.no_grad()
def test_what_kernels_do_not_multiply_stays_as_it_is() -> None:
    assert computed((1, 2), torch.float64) == {ONE: 7}
