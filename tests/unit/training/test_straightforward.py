"""What the trainer's speed is compared with computes the same thing: losses and gradients in float64."""

from __future__ import annotations

import pytest
import torch
from benchmarks.straightforward import copy_layer, gradient_deviation, layer_loss, trainers_loss

from residual_mass.core.settings import MapSpec
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.study.sections import ObjectiveSpec
from residual_mass.training.teacher import LayerTrace

LENGTH = 40


def maps() -> PhiMaps:
    torch.manual_seed(0)
    made = PhiMaps(HeadShape(layers=2, query_heads=4, kv_heads=2, head_dim=8), MapSpec(d_emb=12, d_phi=6)).double()
    for parameter in made.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))  # the gate too, or its block would have no gradient
    return made


def trace() -> LayerTrace:
    """Scores with keys on both sides of the band, and a query that sees the whole of the text but for one key."""
    generator = torch.Generator().manual_seed(1)
    queries, keys = (3 * torch.randn(h, n, 8, generator=generator).double() for h, n in ((4, 5), (2, LENGTH)))
    return LayerTrace(queries, keys, keys[:, :0], torch.tensor([38, 21, 30, 25, 36]), 8**-0.5)


@pytest.mark.parametrize("lambda_kl", [0.99, 0.0])
def test_losses_and_gradients_are_the_trainers(lambda_kl: float) -> None:
    ours, layer, objective = maps(), 1, ObjectiveSpec(lambda_kl=lambda_kl)
    theirs = copy_layer(ours, layer)
    expected = layer_loss(theirs, trace(), objective)
    loss = trainers_loss(ours, layer, trace(), objective)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    expected.backward()
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.norm() > 0) for p in theirs.parameters())
    assert gradient_deviation(ours, layer, theirs) < 1e-10
