"""The log's held-out numbers against the diagnostics' own measures."""

from __future__ import annotations

import pytest
import torch
from tests.unit.training.conftest import LENGTH, SPEC, Make
from torch import Tensor

from residual_mass.core.feature_maps import log_kernel
from residual_mass.model.errors import ReadLayer
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.training.held_out import MEASURES, HeldOut, held_out_rows
from residual_mass.training.teacher import LayerTrace

BUDGETS = {9: 30.0, 28: 50.0}
"""By K at 96 tokens: 29 - 20 and 48 - 20."""


@torch.no_grad()
def measures(maps: PhiMaps, layer: int, trace: LayerTrace, k: int) -> dict[str, Tensor]:
    """The diagnostics' measures of a layer at one K: [Hq, Q]."""
    inputs = trace.queries, trace.keys, trace.values, trace.scale
    read = ReadLayer(*inputs, [BUDGETS[k]], SPEC.anchors, maps.folded()[layer])
    return {name: value[..., 0] for name, value in read.accounting().items()}


@pytest.mark.parametrize("sharper", [1, 10])
def test_rows_are_the_means_of_the_diagnostics_by_layer_and_over_all(
    make: Make, held_out: list[HeldOut], sharper: float
) -> None:
    """Also of maps so sharp that in some rows the retrieved tokens hold all of their mass, and the rest is dropped."""
    maps = make(steps=3).learners[0].maps
    with torch.no_grad():
        for parameter in maps.key.parameters():
            parameter *= sharper
    rows = {(row["k"], row["layer"]): row for row in held_out_rows(maps, held_out[0], SPEC)}
    assert set(rows) == {(k, layer) for k in BUDGETS for layer in ("all", 0, 1, 2)}
    for k in BUDGETS:
        by_layer, gaps = [], []
        for layer, trace in enumerate(held_out[0].packs[0]):
            assert trace.keys.shape[1] == LENGTH
            measured = measures(maps, layer, trace, k)
            student = log_kernel(
                maps.query[layer](trace.queries).unflatten(0, (2, 2)), maps.key[layer](trace.keys).unsqueeze(1)
            )
            teacher = trace.queries.unflatten(0, (2, 2)) @ trace.keys.unsqueeze(1).transpose(-1, -2) * trace.scale
            p = teacher.double().softmax(-1)
            kl = (p * (p.log() - student.double().log_softmax(-1))).sum(-1).mean().item()
            gain = (measured["e_topk"] - measured["e_sub"]).mean(-1)
            gap = measured["log_z_hat"] - measured["log_z_true"]
            gaps.append(gap[gap.isfinite()])
            expected = {name: measured[name].mean().item() for name in ("e_topk", "e_sub", "e_nosub")} | {
                "heads_below_topk": (gain > 0).double().mean().item(),
                "kl": kl,
                "log_z_error": gaps[-1].mean().item(),
                "clamped_share": measured["clamped"].double().mean().item(),
            }
            found = rows[k, layer]
            assert [float(found[name]) for name in MEASURES] == pytest.approx(  # type: ignore[arg-type]
                [expected[name] for name in MEASURES], rel=1e-3, abs=2e-6
            )
            by_layer.append(expected)
        assert sharper == 1 or 0 < float(rows[k, "all"]["clamped_share"]) < 1
        for name in MEASURES:
            of_layers = torch.tensor([of_layer[name] for of_layer in by_layer])
            mean = (torch.cat(gaps) if name == "log_z_error" else of_layers).mean().item()
            assert float(rows[k, "all"][name]) == pytest.approx(mean, rel=1e-3, abs=2e-6)  # type: ignore[arg-type]
