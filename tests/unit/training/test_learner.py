"""Losses and held-out errors of a layer's maps, against their equations and the diagnostics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.core.objective_checks import written_objective
from tests.unit.training.conftest import LENGTH, SPEC, Make, corpus
from torch import Tensor

from residual_mass.core.feature_maps import log_kernel
from residual_mass.core.score_matching import Weights
from residual_mass.core.selection import retrieved_count
from residual_mass.diagnostics.errors import ReadLayer
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.sections import ObjectiveSpec
from residual_mass.spec.settings import AnchorSpec, MapSpec
from residual_mass.training import learner, teacher
from residual_mass.training.learner import MEASURES, HeldOut, held_out_rows, row_losses
from residual_mass.training.teacher import LayerTrace, record_traces, with_targets

ANCHORS = AnchorSpec(4, 16)
POSITIONS = torch.tensor([95, 60, 71])


@pytest.fixture(scope="module")
def trace(tiny_backbone: Backbone) -> LayerTrace:
    """Layer 1, in float64."""
    found = record_traces(tiny_backbone, corpus(tiny_backbone).sequence(0), POSITIONS, lambda trace: trace)[1]
    queries, keys, values = found.queries.double(), found.keys.double(), found.values.double()
    return replace(found, queries=queries, keys=keys, values=values)


@pytest.fixture
def maps(tiny_backbone: Backbone) -> PhiMaps:
    torch.manual_seed(0)
    return PhiMaps(tiny_backbone.shape, MapSpec(d_emb=20, d_phi=8)).double()


@pytest.mark.parametrize(("name", "kl"), [("ours", 0.99), ("ours", 0.0), ("kl", 1.0), ("aux", 0.0)])
def test_the_papers_loss_and_gradients_are_those_of_whole_score_matrices(
    trace: LayerTrace, maps: PhiMaps, name: str, kl: float
) -> None:
    """Head by head and row by row, by autograd through maps that are not folded."""
    for parameter in maps.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))  # the gate too, or its block would have no gradient
    objective = ObjectiveSpec(name, lambda_kl=kl if name == "ours" else 0.5, band=2.0)
    top, fp, z = ((1 - kl) * x for x in (objective.lambda_top, objective.lambda_fp, objective.lambda_z))
    weights = Weights(kl, top, fp, z, objective.tau, objective.band, objective.huber_delta)
    log_query, log_key = maps.query[1].unfolded(trace.queries), maps.key[1].unfolded(trace.keys)
    losses = []
    for head, queries in enumerate(trace.queries):
        kv_head = head // (len(trace.queries) // len(trace.keys))
        scores, student = queries @ trace.keys[kv_head].T * trace.scale, log_kernel(log_query[head], log_key[kv_head])
        seen = [position + 1 for position in POSITIONS.tolist()]
        losses += [written_objective(scores[row, :n], student[row, :n], weights) for row, n in enumerate(seen)]
    expected = torch.stack(losses).mean()
    ours = row_losses(maps.query[1], maps.key[1], trace, objective, ANCHORS).mean()
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=0)
    parameters = [*maps.query[1].parameters(), *maps.key[1].parameters()]
    for one, other in zip(*(torch.autograd.grad(loss, parameters) for loss in (ours, expected)), strict=True):
        assert other.norm() > 0
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_half_precision_traces_lose_nothing(trace: LayerTrace, maps: PhiMaps) -> None:
    low = replace(trace, queries=trace.queries.bfloat16(), keys=trace.keys.bfloat16())
    query_map, key_map = (side[1].float() for side in (maps.query, maps.key))

    def loss_and_gradient(trace: LayerTrace) -> tuple[torch.Tensor, torch.Tensor]:
        loss = row_losses(query_map, key_map, trace, ObjectiveSpec(lambda_kl=0.3), ANCHORS).mean()
        return loss, torch.autograd.grad(loss, key_map.stem)[0]

    for ours, exact in zip(loss_and_gradient(low), loss_and_gradient(low.widened()), strict=True):
        assert torch.equal(ours, exact)


def test_residual_loss_is_the_error_that_the_diagnostics_measure(trace: LayerTrace, maps: PhiMaps) -> None:
    """Without the log-mass term it is e_sub, with the anchors and K of what a query sees."""
    budgets = (40.0, 60.0)
    maps, objective = maps.float(), ObjectiveSpec(name="residual", weight_z=0.0, relative=False)
    trace = replace(trace, queries=trace.queries.float(), keys=trace.keys.float(), values=trace.values.float())
    found = row_losses(maps.query[1], maps.key[1], with_targets(trace, ANCHORS, budgets), objective, ANCHORS)
    for column, position in enumerate(POSITIONS.tolist()):
        seen = position + 1
        assert all(0 < retrieved_count(budget, seen, 20) < seen - 20 for budget in budgets)
        queries, keys, values = trace.queries[:, column : column + 1], trace.keys[:, :seen], trace.values[:, :seen]
        with torch.no_grad():
            read = ReadLayer(queries, keys, values, trace.scale, budgets, ANCHORS, maps.folded()[1])
            errors = read.accounting()["e_sub"][:, 0].mean(-1)
        torch.testing.assert_close(found[:, column], errors, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ours", "residual", "lolcats"])
def test_blocks_of_keys_and_of_rows_change_nothing(
    trace: LayerTrace, maps: PhiMaps, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def gradients() -> list[torch.Tensor]:
        maps.zero_grad()
        prepared = with_targets(trace, ANCHORS, (40.0, 60.0))
        row_losses(maps.query[1], maps.key[1], prepared, ObjectiveSpec(name=name), ANCHORS).mean().backward()
        return [p.grad.clone() for p in maps.parameters() if p.grad is not None]

    whole = gradients()
    monkeypatch.setitem(learner.ACTIVATIONS_AT_ONCE, "cpu", 26 * 20)
    monkeypatch.setitem(teacher.SCORES_AT_ONCE, "cpu", 4 * 96)
    in_blocks = gradients()
    assert len(whole) == len(in_blocks) == 18
    for ours, expected in zip(in_blocks, whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


# ---- held-out errors -------------------------------------------------------------------------------------------------

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
    make: Make, held_out: HeldOut, sharper: float
) -> None:
    """Also of maps so sharp that in some rows the retrieved tokens hold all of their mass, and the rest is dropped."""
    maps = make(steps=3).learners[0].maps
    with torch.no_grad():
        for parameter in maps.key.parameters():
            parameter *= sharper
    rows = {(row["k"], row["layer"]): row for row in held_out_rows(maps, held_out["text"], SPEC)}
    assert set(rows) == {(k, layer) for k in BUDGETS for layer in ("all", 0, 1, 2)}
    for k in BUDGETS:
        by_layer, gaps = [], []
        for layer, trace in enumerate(held_out["text"][0]):
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
