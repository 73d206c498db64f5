"""The trainer on a tiny backbone: gradients, replay, resume, failure."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import TINY
from torch import Tensor

from residual_mass.backbones.corpora import PackedDocuments
from residual_mass.backbones.loading import Backbone
from residual_mass.backbones.measured import layer_measures
from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.core import objectives
from residual_mass.core.feature_maps import log_kernel
from residual_mass.core.support import retrieved_count
from residual_mass.specs import AnchorSpec, MapSpec, ObjectiveSpec, ReplaySpec, TrainSpec, VariantSpec
from residual_mass.training import trainer
from residual_mass.training.initialise import positive_random_features
from residual_mass.training.teacher import LayerTrace, record_traces, stream_traces
from residual_mass.training.trainer import Trainer, layer_loss, learning_rate

LENGTH = 96


OURS = VariantSpec("ours", MapSpec(d_emb=20, d_phi=8, init="positive_random_features"), ObjectiveSpec(lambda_kl=0.5))


def spec(**changes: object) -> TrainSpec:
    base = TrainSpec(
        backbone=TINY, length=str(LENGTH), corpora=("text",), steps=12, learning_rate=3e-3, weight_decay=1e-4,
        schedule="cosine", warmup_steps=2, queries_per_step=5, query_window=0.5,
        variants=(OURS,),
        replay=ReplaySpec(pool=3, reuse=2), anchors=AnchorSpec(4, 16), eval_budgets=(30.0, 50.0), eval_every=4,
        checkpoint_every=5, seed=0, recipe=1,
    )  # fmt: skip
    return replace(base, **changes)


def corpus(backbone: Backbone, length: int = LENGTH) -> PackedDocuments:
    documents = [f"Document {i} says {i * 7919 % 10007} things about {chr(97 + i % 26) * 9}." * 3 for i in range(40)]
    return PackedDocuments("text", documents, backbone.tokenizer, length, seed=0)


@pytest.fixture(scope="module")
def held_out(tiny_backbone: Backbone) -> list[list[LayerTrace]]:
    ids = corpus(tiny_backbone, LENGTH + 3).sequence(99)
    traces = record_traces(tiny_backbone, ids, torch.arange(LENGTH, LENGTH + 3), keep_values=True)
    return [[LayerTrace(t.queries, t.keys[:, :LENGTH], t.values[:, :LENGTH], t.positions, t.scale) for t in traces]]


def make(backbone: Backbone, held_out: list[list[LayerTrace]], **changes: object) -> Trainer:
    return Trainer(spec(**changes), backbone, corpus(backbone), held_out)


def parameters(t: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in t.learners[0].maps.named_parameters()}


def test_layer_loss_is_the_mean_of_the_heads_own_losses(tiny_backbone: Backbone) -> None:
    torch.manual_seed(0)
    maps = PhiMaps(tiny_backbone.shape, MapSpec(d_emb=20, d_phi=8)).double()
    positions = torch.tensor([95, 60, 71])
    trace = record_traces(tiny_backbone, corpus(tiny_backbone).sequence(0), positions, True)[1]
    trace = LayerTrace(trace.queries.double(), trace.keys.double(), trace.values.double(), positions, trace.scale)
    weights = ObjectiveSpec(lambda_kl=0.3)
    losses = []
    for head in range(4):
        log_q = maps.query[1](trace.queries)[head]
        log_k = maps.key[1](trace.keys)[head // 2]  # heads 0, 1 read KV head 0
        for row, position in enumerate(positions.tolist()):
            keys = trace.keys[head // 2, : position + 1]
            s = (keys @ trace.queries[head, row] * trace.scale)[None]
            s_hat = log_kernel(log_q[row : row + 1], log_k[: position + 1])
            x = objectives.shifted(s, s_hat, torch.ones_like(s, dtype=torch.bool))
            losses.append(0.3 * objectives.kl_term(x, 10.0) + 0.7 * objectives.aux_term(x, 1.0, 2.0, 4.0, 12.0, 1.0))
    torch.testing.assert_close(
        layer_loss(maps, 1, trace, weights, AnchorSpec(), ()), torch.stack(losses).mean(), rtol=1e-10, atol=1e-12
    )


def test_residual_loss_is_the_error_that_is_measured(tiny_backbone: Backbone) -> None:
    """Without the log-mass term it is e_sub of the diagnostics, with the anchors and K of what a query sees."""
    torch.manual_seed(0)
    maps = PhiMaps(tiny_backbone.shape, MapSpec(d_emb=20, d_phi=8))
    anchors, budgets = AnchorSpec(4, 16), (40.0, 60.0)
    positions = torch.tensor([95, 60, 71])
    trace = record_traces(tiny_backbone, corpus(tiny_backbone).sequence(0), positions, True)[1]
    errors = []
    for column, position in enumerate(positions.tolist()):
        seen = position + 1
        row = trace.at(torch.tensor([column]))
        for budget in budgets:
            k = retrieved_count(budget, seen, 20)
            assert 0 < k < seen - 20
            measured = layer_measures(
                maps, 1, row.queries, row.keys[:, :seen], row.values[:, :seen], row.scale, k, anchors
            )
            errors.append(measured["e_sub"].mean())
    loss = layer_loss(maps, 1, trace, ObjectiveSpec(name="residual", weight_z=0.0), anchors, budgets)
    torch.testing.assert_close(loss, torch.stack(errors).mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ours", "kl", "aux", "lolcats", "residual"])
def test_every_objective_moves_the_maps(tiny_backbone: Backbone, held_out: list[list[LayerTrace]], name: str) -> None:
    t = make(tiny_backbone, held_out, variants=(replace(OURS, objective=ObjectiveSpec(name=name)),), steps=2)
    before = parameters(t)
    t.train()
    assert all(bool((before[n] != p).any()) for n, p in parameters(t).items() if "key.0.out" in n)


def test_streamed_training_is_training_on_the_recorded_traces(tiny_backbone: Backbone) -> None:
    ids, positions = corpus(tiny_backbone).sequence(1), torch.tensor([50, 95, 70])
    recorded = record_traces(tiny_backbone, ids, positions, True)
    seen: list[LayerTrace] = []
    stream_traces(tiny_backbone, ids, positions, lambda layer, trace: seen.append(trace))
    assert len(seen) == 3
    for ours, expected in zip(seen, recorded, strict=True):
        assert torch.equal(ours.queries, expected.queries) and torch.equal(ours.keys, expected.keys)
    model = tiny_backbone.model
    assert not any(hasattr(m, "residual_mass_handler") for m in model.modules())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("replay", [ReplaySpec(1, 1), ReplaySpec(3, 2), ReplaySpec(2, 5)])
def test_a_resumed_run_is_the_undisturbed_run_bit_for_bit(
    tiny_backbone: Backbone, held_out: list[list[LayerTrace]], tmp_path: Path, replay: ReplaySpec
) -> None:
    undisturbed = make(tiny_backbone, held_out, replay=replay)
    undisturbed.train()
    for stop in (5, 10):
        checkpoint = tmp_path / f"{stop}.safetensors"
        first = make(tiny_backbone, held_out, replay=replay)
        update = first._update

        def killed(first: Trainer = first, update=update, stop: int = stop) -> float:  # noqa: ANN001
            if first.step == stop + 1:
                raise KeyboardInterrupt
            return update()

        first._update = killed  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            first.train(checkpoint)
        second = make(tiny_backbone, held_out, replay=replay)
        second.resume(checkpoint)
        assert second.step == stop
        second.train(checkpoint)
        assert second.log_rows == undisturbed.log_rows
        expected = parameters(undisturbed)
        assert all(torch.equal(p, expected[name]) for name, p in parameters(second).items())


def test_a_checkpoint_of_another_spec_is_ignored(
    tiny_backbone: Backbone, held_out: list[list[LayerTrace]], tmp_path: Path
) -> None:
    t = make(tiny_backbone, held_out, steps=5)
    t.train(tmp_path / "c.safetensors")
    other = make(tiny_backbone, held_out, steps=5, learning_rate=1e-4)
    other.resume(tmp_path / "c.safetensors")
    assert other.step == 0
    (tmp_path / "c.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="c.safetensors: damaged"):
        t.resume(tmp_path / "c.safetensors")


def test_training_lowers_the_held_out_error(tiny_backbone: Backbone, held_out: list[list[LayerTrace]]) -> None:
    t = make(tiny_backbone, held_out, steps=60, eval_every=20, replay=ReplaySpec(8, 4))
    t._log_held_out()
    t.train()
    rows = list(csv.DictReader([trainer.LOG_COLUMNS, *t.log_rows]))
    first, last = rows[0], rows[-2]
    assert first["k"] == last["k"] and first["e_topk"] == last["e_topk"]
    assert float(last["e_sub"]) < float(first["e_sub"])
    assert abs(float(last["log_z_error"])) < abs(float(first["log_z_error"]))


def test_nan_stops_with_layer_and_step_and_keeps_the_checkpoint(
    tiny_backbone: Backbone, held_out: list[list[LayerTrace]], tmp_path: Path
) -> None:
    t = make(tiny_backbone, held_out)
    checkpoint = tmp_path / "c.safetensors"
    save = t.save_checkpoint

    def save_then_poison(path: Path) -> None:
        save(path)
        t.learners[0].maps.query[2].out.data[0, 0, 0] = torch.nan

    t.save_checkpoint = save_then_poison  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="ours: loss is nan in layer 2 at step 5"):
        t.train(checkpoint)
    fresh = make(tiny_backbone, held_out)
    fresh.resume(checkpoint)
    assert fresh.step == 5 and all(bool(p.isfinite().all()) for p in fresh.learners[0].maps.parameters())


def test_positive_random_features_match_the_mean_log_partition(tiny_backbone: Backbone) -> None:
    positions = torch.tensor([95, 60, 71, 50])
    traces = record_traces(tiny_backbone, corpus(tiny_backbone).sequence(0), positions, False)
    maps = PhiMaps(tiny_backbone.shape, MapSpec(d_emb=20, d_phi=32))
    positive_random_features(maps, traces, seed=0)
    for layer, trace in enumerate(traces):
        log_q, log_k = maps.query[layer](trace.queries), maps.key[layer](trace.keys)
        for group in range(2):
            gaps = []
            for head in (2 * group, 2 * group + 1):
                for row, position in enumerate(positions.tolist()):
                    s = trace.keys[group, : position + 1] @ trace.queries[head, row] * trace.scale
                    s_hat = (log_q[head, row] + log_k[group, : position + 1]).logsumexp(-1)
                    gaps.append(s.logsumexp(0) - s_hat.logsumexp(0))
            assert torch.stack(gaps).mean().abs() < 1e-4


@pytest.mark.parametrize("pool", [ReplaySpec(1, 1), ReplaySpec(3, 2)])
def test_variants_share_teacher_passes_and_end_as_if_trained_alone(
    tiny_backbone: Backbone, held_out: list[list[LayerTrace]], tmp_path: Path, pool: ReplaySpec
) -> None:
    hedgehog = MapSpec("hedgehog", d_phi=8)
    variants = (
        OURS,
        VariantSpec("wide", replace(OURS.map, d_phi=12), OURS.objective),
        VariantSpec("hedgehog", hedgehog, OURS.objective),
        VariantSpec("lolcats", OURS.map, ObjectiveSpec(name="lolcats")),
    )
    passes = []
    text = corpus(tiny_backbone)
    counted = type("Counted", (), {"sequence": lambda _, index: passes.append(index) or text.sequence(index)})()
    together = Trainer(spec(variants=variants, replay=pool), tiny_backbone, counted, held_out)
    together.train()
    steps = range(12) if pool == ReplaySpec(1, 1) else range(6)
    assert sorted(passes) == sorted([0, *steps] if pool == ReplaySpec(1, 1) else steps)
    for variant, learner in zip(variants, together.learners, strict=True):
        alone = make(tiny_backbone, held_out, variants=(variant,), replay=pool)
        alone.train()
        alone.learners[0].maps.save(tmp_path / "alone.safetensors")
        learner.maps.save(tmp_path / "together.safetensors")
        assert (tmp_path / "alone.safetensors").read_bytes() == (tmp_path / "together.safetensors").read_bytes()
        assert [row for row in together.log_rows if row.startswith(f"{variant.label},")] == alone.log_rows


def test_learning_rate_schedules() -> None:
    constant = spec(schedule="constant", warmup_steps=0)
    assert {learning_rate(constant, step) for step in range(12)} == {3e-3}
    cosine = [learning_rate(spec(), step) for step in range(12)]
    assert cosine[0] == pytest.approx(1.5e-3) and cosine[1] > cosine[2] > cosine[11] > 0


def test_query_positions_come_from_the_final_share(tiny_backbone: Backbone) -> None:
    t = make(tiny_backbone, [], query_window=0.25)
    positions = t._positions(3, 10)
    assert len(set(positions.tolist())) == 10 and int(positions.min()) >= 72 and int(positions.max()) < LENGTH
    assert not torch.equal(positions, t._positions(4, 10))
