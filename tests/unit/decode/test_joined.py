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
from residual_mass.decode.joined import ONE, SEVERAL, JoinProducts

pytestmark = [needs(COMPILER), needs(KERNELS)]


class Seen(JoinProducts):
    """Counts the products of a graph."""

    def __init__(self) -> None:
        self.counts: Counter[object] = Counter()

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        self.counts = Counter(node.target for node in graph.nodes if node.target in (ONE, SEVERAL))

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
        self.parts = nn.ModuleList([attention.q_proj, attention.k_proj, attention.v_proj, mlp.up_proj, model.lm_head])
        self.last = mlp.down_proj

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = [part(x) for part in self.parts]
        return *outputs, self.last(outputs[3])


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 5)])
@torch.no_grad()
def test_they_are_one_operation_with_the_same_results(shape: tuple[int, int]) -> None:
    module = Projections()
    x = torch.randn(*shape, 64, generator=torch.Generator().manual_seed(0)).to(module.parts[0].like.dtype)
    seen = Seen()
    compiled = torch.compile(module, fullgraph=True, dynamic=False, options={"post_grad_custom_pre_pass": seen})
    for found, expected in zip(compiled(x), module(x), strict=True):
        assert torch.equal(found, expected)
    apart = 1 if x.dtype == torch.float32 else 2  # logits are of activations in float32
    assert seen.counts == {SEVERAL: 1, ONE: apart}
