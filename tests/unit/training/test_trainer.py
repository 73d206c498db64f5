"""The trainer on a tiny backbone: objectives, replay, resume, several processes, failure."""

from __future__ import annotations

import copy
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.conftest import TINY, save_tiny, tiny_llama
from tests.needs import BFLOAT16, needs
from tests.records import give_manifest
from tests.unit.training.conftest import OURS, SPEC, Make, corpus, parameters
from torch import Tensor

from residual_mass.core.selection import retrieved_count
from residual_mass.files import read_csv
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.sections import ObjectiveSpec, ReplaySpec
from residual_mass.spec.settings import MapSpec, to_json
from residual_mass.spec.specs import TrainSpec, VariantSpec
from residual_mass.training import trainer as trainer_module
from residual_mass.training.learner import HeldOut, learning_rate, positive_random_features, row_losses
from residual_mass.training.teacher import LayerTrace, Passes, record_traces
from residual_mass.training.trainer import LOG_COLUMNS, Trainer

Files = tuple[Path, Path]


def logged(trainer: Trainer, label: str | None = None) -> list[dict[str, Any]]:
    """The log without its times."""
    rows = [row for row in trainer.log_rows if label in (None, row["variant"])]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@needs(BFLOAT16)
def test_passes_keep_values_only_where_an_objective_reads_them(make: Make, tiny_backbone: Backbone) -> None:
    """All in the dtype of the model."""
    for name, kept in (("ours", False), ("residual", True)):
        passes = make(variants=(replace(OURS, objective=ObjectiveSpec(name=name)),)).passes[0]
        passes.backbone = replace(tiny_backbone, model=copy.deepcopy(tiny_backbone.model).bfloat16())
        (trace, *_) = passes.first()
        assert (trace.values.untyped_storage().nbytes() > 0) == kept == (trace.targets is not None)
        assert trace.keys.dtype == trace.queries.dtype == torch.bfloat16


class Killed(BaseException):
    pass


def killed_at(trainer: Trainer, step: int) -> None:
    """Makes the trainer die when it begins this step."""
    update = trainer._update

    def dying(checkpoint: Path) -> tuple[float, bool]:
        if trainer.step == step:
            raise Killed
        return update(checkpoint)

    trainer._update = dying  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "changes",
    [
        {"replay": ReplaySpec(1, 1)},
        {"replay": ReplaySpec(3, 2)},
        {"replay": ReplaySpec(2, 5)},
        {"sequences_per_step": 2, "replay": ReplaySpec(1, 3)},
        {"variants": (replace(OURS, objective=ObjectiveSpec(name="residual")),)},
        *({"replay": ReplaySpec(*pool), "checkpoint_every": 1, "eval_every": 12} for pool in ((1, 4), (3, 2), (2, 5))),
    ],
    ids=["streamed", "replayed", "longer use", "two sequences", "residual", *(f"every step {i}" for i in range(3))],
)
def test_a_resumed_run_is_the_undisturbed_run_bit_for_bit(
    make: Make, files: Files, tmp_path: Path, changes: dict[str, Any]
) -> None:
    undisturbed = make(**changes)
    undisturbed.train(*files)
    expected, log = parameters(undisturbed), logged(undisturbed)
    every, before, checkpoint = undisturbed.spec.checkpoint_every, 0, tmp_path / "killed.safetensors"
    for step in (*((6, 7, 9, 11) if every > 1 else range(1, 12)), None):  # one life after the other
        life = make(**changes)
        if checkpoint.exists():
            life.resume(checkpoint)
        assert life.step == before // every * every
        if step is not None:
            killed_at(life, before := step)
            with pytest.raises(Killed):
                life.train(checkpoint, files[1])
    life.train(checkpoint, files[1])
    assert logged(life) == log
    assert all(torch.equal(p, expected[name]) for name, p in parameters(life).items())
    assert list(read_csv(files[1], LOG_COLUMNS, "train")["step"]) == [str(row["step"]) for row in log]


def test_a_stop_that_only_another_process_was_asked_for_takes_effect_where_signals_are_ignored() -> None:
    """As under nohup, or where a launcher has its own handlers: there is no former handler to put back."""
    code = (
        "import signal; from residual_mass.training.trainer import StopSignals\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "with StopSignals() as stop: stop.take_effect()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr


def test_a_run_that_died_after_its_last_checkpoint_has_a_log_again(make: Make, files: Files) -> None:
    """Snakemake deletes the log of a job that did not finish, and no evaluation is left to write it."""
    make(steps=4, checkpoint_every=4).train(*files)
    log = files[1].read_bytes()
    files[1].unlink()
    resumed = make(steps=4, checkpoint_every=4)
    resumed.resume(files[0])
    assert resumed.step == 4
    resumed.train(*files)
    assert files[1].read_bytes() == log


def test_a_checkpoint_of_another_spec_or_other_weights_is_ignored(
    make: Make, files: Files, tmp_path: Path, held_out: HeldOut, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, _ = files
    made = make(steps=5)
    made.train(*files)
    save_tiny(tiny_llama(seed=1), tmp_path)
    backbone = load_backbone(TINY, tmp_path, torch.device("cpu"))
    for other in (
        make(steps=5, learning_rate=1e-4), Trainer(replace(SPEC, steps=5), backbone, {0: corpus(backbone)}, held_out)
    ):  # fmt: skip
        before = parameters(other)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            other.resume(checkpoint)
        assert other.step == 0 and other.log_rows == []
        assert all(torch.equal(p, before[name]) for name, p in parameters(other).items())
        assert f"{checkpoint} belongs to another spec and is ignored" in caplog.text
    checkpoint.write_bytes(b"half")
    with pytest.raises(ValueError, match="checkpoint.safetensors: damaged"):
        made.resume(checkpoint)


@pytest.mark.parametrize("objective", ["ours", "residual"])
def test_training_lowers_the_held_out_error(make: Make, files: Files, objective: str) -> None:
    variant = replace(OURS, objective=ObjectiveSpec(name=objective, lambda_kl=0.5))
    t = make(variants=(variant,), steps=60, eval_every=20, replay=ReplaySpec(8, 4))
    t.train(*files)
    rows = read_csv(files[1], LOG_COLUMNS, "train").query("layer == 'all'").to_dict("records")
    first, last = rows[0], rows[-2]
    assert (first["step"], last["step"]) == ("0", "60") and first["k"] == last["k"]
    assert first["e_topk"] == last["e_topk"] and float(first["seconds"]) < float(last["seconds"])
    assert float(last["e_sub"]) < float(first["e_sub"])


def test_a_loss_that_is_nan_stops_with_its_place_and_keeps_the_checkpoint(make: Make, files: Files) -> None:
    t = make()
    save = t.save_checkpoint

    def saved_and_poisoned(path: Path) -> None:
        save(path)
        t.learners[0].maps.query[2].out.data[3, 0, 0] = torch.nan

    t.save_checkpoint = saved_and_poisoned  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"ours: the loss is nan in layer 2, head 3, step 5 \(the last checkpoint"):
        t.train(*files)
    fresh = make()
    fresh.resume(files[0])
    assert fresh.step == 5 and all(bool(p.isfinite().all()) for p in fresh.learners[0].maps.parameters())


@pytest.mark.parametrize("wrong, norm", [(torch.inf, "inf"), (torch.nan, "nan"), (3e38, r"\d\.\d+e\+39")])
def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_maps(
    wrong: float, norm: str, make: Make, files: Files
) -> None:
    """Nor one of finite numbers whose squares are not."""
    t = make(checkpoint_every=100)
    t.initialise()
    before = parameters(t)
    t.learners[0].maps.key[1].out.register_hook(lambda g: g.index_fill(0, torch.tensor([1]), wrong))
    message = rf"gradient of out has the norm {norm} in layer 1, key head 1, step 0 \(no check"
    with pytest.raises(ValueError, match=message):
        t.train(*files)
    assert all(torch.equal(p, before[name]) for name, p in parameters(t).items())


def test_positive_random_features_match_the_mean_log_mass_of_what_is_left(tiny_backbone: Backbone) -> None:
    positions = torch.tensor([95, 60, 71, 50])
    traces = record_traces(tiny_backbone, corpus(tiny_backbone).sequence(0), positions, lambda trace: trace)
    maps = PhiMaps(tiny_backbone.shape, MapSpec(d_emb=20, d_phi=32))
    positive_random_features(maps, traces, SPEC.anchors, (30.0, 50.0), seed=0)
    for layer, trace in enumerate(traces):
        log_q, log_k = maps.query[layer](trace.queries), maps.key[layer](trace.keys)
        for head in range(4):
            gaps = []
            for row, position in enumerate(positions.tolist()):
                s = (trace.keys[head // 2] @ trace.queries[head, row] * trace.scale).tolist()
                s_hat = (log_q[head, row] + log_k[head // 2]).logsumexp(-1)
                for budget in (30.0, 50.0):
                    k = retrieved_count(budget, position + 1, 20)
                    mid = sorted(range(4, position + 1 - 16), key=lambda j: -s[j])
                    if rest := mid[k:]:
                        gaps.append(torch.tensor([s[j] for j in rest]).logsumexp(0) - s_hat[rest].logsumexp(0))
            assert len(gaps) == 8 and torch.stack(gaps).mean().abs() < 1e-4


def test_initial_maps_are_the_same_on_any_number_of_cores() -> None:
    shape, generator = HeadShape(layers=2, query_heads=6, kv_heads=3, head_dim=64), torch.Generator().manual_seed(7)
    traces = [
        LayerTrace(
            queries=torch.randn(6, 16, 64, generator=generator) * 3,
            keys=torch.randn(3, 600, 64, generator=generator) * 3,
            values=torch.empty(0),
            positions=torch.arange(584, 600),
            scale=0.125,
        )
        for _ in range(shape.layers)
    ]
    made = []
    for cores in (1, 2):
        torch.manual_seed(0)
        made.append(PhiMaps(shape, MapSpec(d_emb=64, d_phi=64, init="positive_random_features")))
        torch.set_num_threads(cores)
        try:
            positive_random_features(made[-1], traces, SPEC.anchors, (2.0, 8.0), seed=0)
            assert torch.get_num_threads() == cores
        finally:
            torch.set_num_threads(1)
    one, two = (maps.state_dict() for maps in made)
    assert all(torch.equal(one[name], two[name]) and one[name].isfinite().all() for name in one)


@pytest.mark.parametrize("pool", [ReplaySpec(1, 1), ReplaySpec(3, 2)], ids=["streamed", "replayed"])
def test_variants_share_teacher_passes_and_end_as_if_trained_alone(
    make: Make, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: ReplaySpec
) -> None:
    residual = ObjectiveSpec(name="residual", budgets=(30.0,))
    variants = (
        OURS,
        VariantSpec("wide", replace(OURS.map, d_phi=12), OURS.objective),
        VariantSpec("hedgehog", MapSpec("hedgehog", d_phi=8), OURS.objective),
        VariantSpec("lolcats", OURS.map, ObjectiveSpec(name="lolcats")),
        VariantSpec("residual", OURS.map, residual),
        VariantSpec("residual_at_all", OURS.map, ObjectiveSpec(name="residual")),
    )
    streamed = pool == ReplaySpec(1, 1)
    variants = variants[::4] if streamed else variants
    together = make(variants=variants, replay=pool)
    passes = []
    text = Passes.text
    monkeypatch.setattr(Passes, "text", lambda self, index: passes.append(index) or text(self, index))
    together.train(*files)
    assert sorted(passes) == sorted([0, *range(12)] if streamed else range(6))
    for i, variant in enumerate(variants):
        alone = make(variants=(variant,), replay=pool)
        alone.train(*files)
        alone.learners[0].maps.save(tmp_path / "alone.safetensors")
        together.learners[i].maps.save(tmp_path / "together.safetensors")
        assert (tmp_path / "alone.safetensors").read_bytes() == (tmp_path / "together.safetensors").read_bytes()
        assert logged(together, variant.label) == logged(alone)


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "shares"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
        ("constant", 3, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("cosine", 0, [1, (2 + 3**0.5) / 4, 3 / 4, 1 / 2, 1 / 4, (2 - 3**0.5) / 4]),
        ("cosine", 3, [1 / 3, (2 + 3**0.5) / 6, 3 / 4, 1 / 2, 1 / 4, (2 - 3**0.5) / 4]),
    ],
)
def test_the_learning_rate_of_every_step(schedule: Any, warmup_steps: int, shares: list[float]) -> None:
    """(1 + cos x) / 2 at multiples of 30 degrees, times the share of the warm-up."""
    spec = replace(SPEC, steps=6, schedule=schedule, warmup_steps=warmup_steps, learning_rate=0.02)
    assert [learning_rate(spec, step) for step in range(6)] == pytest.approx([0.02 * share for share in shares])


def test_loss_and_gradient_of_a_step_are_means_over_its_sequences(make: Make, tiny_backbone: Backbone) -> None:
    """Seen here because Adam takes the same step whatever the scale of the gradient."""
    learner = make(sequences_per_step=3).learners[0]
    maps, objective = copy.deepcopy(learner.maps).double(), learner.objective
    layers, text, positions = range(maps.shape.layers), corpus(tiny_backbone), torch.tensor([50, 95, 70, 88])
    expected: dict[int, Tensor] = {layer: torch.tensor(0.0) for layer in layers}
    for index in range(3):
        traces = record_traces(tiny_backbone, text.sequence(index), positions, lambda trace: trace)
        for layer, trace in enumerate(traces):
            learner.backward(layer, trace)
            exact = replace(trace, queries=trace.queries.double(), keys=trace.keys.double())
            losses = row_losses(maps.query[layer], maps.key[layer], exact, objective, SPEC.anchors)
            expected[layer] = expected[layer] + losses.mean() / 3
    assert learner.losses.mean().item() == pytest.approx(
        sum(loss.item() for loss in expected.values()) / len(layers), rel=1e-4
    )
    sum(expected.values()).backward()
    ours, wanted = (torch.cat([p.grad.flatten().double() for p in each.parameters()]) for each in (learner.maps, maps))
    assert wanted.norm() > 0
    assert (ours - wanted).norm() < 1e-3 * wanted.norm()


def first_layers(passes: Passes, steps: int) -> list[LayerTrace]:
    """The traces of the first layer, step by step."""
    seen: dict[tuple[int, int], LayerTrace] = {}
    for step in range(steps):
        passes.run(step, lambda layer, trace, step=step: seen.update({(step, layer): trace}))
    return [seen[step, 0] for step in range(steps)]


@pytest.mark.parametrize("replay", [ReplaySpec(3, 2), ReplaySpec(2, 5), ReplaySpec(1, 3)])
def test_the_pool_holds_the_newest_passes_and_no_more(make: Make, replay: ReplaySpec) -> None:
    passes = make(replay=replay).passes[0]
    for step in range(12):
        passes.run(step, lambda layer, trace: None)
        made = range(step // replay.reuse + 1)
        assert sorted(passes.pool) == list(made[-replay.pool :])


@pytest.mark.parametrize("replay", [ReplaySpec(1, 1), ReplaySpec(2, 2)], ids=["streamed", "replayed"])
def test_the_sequences_of_a_step_have_query_positions_of_their_own(make: Make, replay: ReplaySpec) -> None:
    passes = make(sequences_per_step=3, replay=replay).passes.values()
    seen = [[tuple(sorted(trace.positions.tolist())) for trace in first_layers(each, 4)] for each in passes]
    assert all(len(set(of_step)) == 3 for of_step in zip(*seen, strict=True))
    assert replay.pool > 1 or len(set(sum(seen, []))) == 12, "nor those of a sequence of another step"


# ---- several processes -----------------------------------------------------------------------------------------------

TWO = replace(
    SPEC, corpora=("pydoc",), sequences_per_step=2, held_out=("wiki",), steps=4, replay=ReplaySpec(2, 2), eval_every=2,
    checkpoint_every=3, variants=(OURS, replace(OURS, label="residual", objective=ObjectiveSpec(name="residual"))),
)  # fmt: skip

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def assets(tiny_assets: Path) -> Path:
    """The tiny backbone, and paragraphs to measure on."""
    (tiny_assets / "qa").mkdir()
    items = [{"context": [[f"Title {i}", [f"Paragraph {i} is about {i % 7}. " * 4]]]} for i in range(200)]
    (tiny_assets / "qa" / "hotpotqa.json").write_text(json.dumps(items))
    return tiny_assets


def command(spec: TrainSpec, assets: Path, out: Path, processes: int = 1) -> list[str]:
    """As the rule starts it."""
    launcher = [sys.executable, "-m"]
    if processes > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    flags = ["--spec", to_json(spec), "--assets", str(assets), "--checkpoint", str(out / "checkpoint.safetensors")]
    maps = [str(out / f"{variant.label}.safetensors") for variant in spec.variants]
    return [*launcher, "residual_mass", "train", *flags, "--log-csv", str(out / "log.csv"), "--out", *maps]


def train(
    spec: TrainSpec, assets: Path, out: Path, processes: int = 1, largest_file: int = -1
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end; no file may grow beyond `largest_file` bytes, where it is positive."""
    out.mkdir(exist_ok=True)
    return subprocess.run(
        command(spec, assets, out, processes), capture_output=True, text=True, env=ENVIRONMENT, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file)), timeout=120,
    )  # fmt: skip


def kill_after_a_checkpoint(spec: TrainSpec, assets: Path, out: Path, processes: int = 1) -> None:
    out.mkdir()
    started = command(spec, assets, out, processes)
    with subprocess.Popen(started, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        while not (out / "checkpoint.safetensors").exists():
            assert process.poll() is None
            time.sleep(0.005)
        for job in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            job.kill()


@pytest.mark.slow
def test_two_processes_train_what_one_does(assets: Path, tmp_path: Path) -> None:
    for count in (1, 2):
        done = train(TWO, assets, tmp_path / str(count), count)
        assert done.returncode == 0, done.stderr
    for variant in TWO.variants:
        alone, both = (PhiMaps.load(tmp_path / n / f"{variant.label}.safetensors").state_dict() for n in "12")
        for name, parameter in alone.items():
            torch.testing.assert_close(both[name], parameter, rtol=1e-4, atol=1e-5)
    alone_log, both_log = (read_csv(tmp_path / n / "log.csv", LOG_COLUMNS, "train").to_dict("records") for n in "12")
    assert len(alone_log) == len(both_log) == 3 * 2 * 2 * 4  # evaluations, variants, budgets, layers and all
    for ours, expected in zip(both_log, alone_log, strict=True):
        assert float(ours["e_sub"]) == pytest.approx(float(expected["e_sub"]), rel=1e-3)


SLOW_WRITER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from residual_mass.training import trainer

def write(path, facts, tensors):
    time.sleep(2)
    path.touch()

trainer.write_checkpoint = write
with trainer.processes() as group:
    trained = SimpleNamespace(group=group, passes={}, learners=[], step=3, log_rows=[], seconds=0.0, spec_hash="")
    trainer.Trainer.save_checkpoint(trained, Path(sys.argv[1]))
    print("there" if Path(sys.argv[1]).exists() else "gone before it was written", flush=True)
"""


@pytest.mark.slow
def test_no_process_goes_before_the_checkpoint_is_written(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SLOW_WRITER)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launcher, tmp_path / "script.py", tmp_path / "checkpoint"], capture_output=True, text=True, check=True,
        env=ENVIRONMENT, timeout=120,
    )  # fmt: skip
    assert run.stdout.count("there") == 2, run.stdout  # lines of two processes may mix


@pytest.mark.slow
def test_two_processes_are_resumed_by_one(assets: Path, tmp_path: Path) -> None:
    spec = replace(TWO, steps=40, eval_every=40, checkpoint_every=10)
    assert train(spec, assets, tmp_path / "undisturbed").returncode == 0
    out = tmp_path / "out"
    kill_after_a_checkpoint(spec, assets, out, 2)
    done = train(spec, assets, out)
    assert done.returncode == 0 and "resumed from" in done.stderr, done.stderr
    for variant in spec.variants:
        name = f"{variant.label}.safetensors"
        expected = PhiMaps.load(tmp_path / "undisturbed" / name).state_dict()
        for key, parameter in PhiMaps.load(out / name).state_dict().items():
            torch.testing.assert_close(parameter, expected[key], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_process_that_fails_alone_ends_the_others(assets: Path, tmp_path: Path) -> None:
    """Only the leading one writes; here it cannot."""
    done = train(TWO, assets, tmp_path / "out", 2, largest_file=40_000)
    assert done.returncode != 0 and "cannot be written" in done.stderr


@pytest.mark.slow
def test_sequences_that_cannot_be_shared_out_are_refused(assets: Path, tmp_path: Path) -> None:
    done = train(replace(TWO, sequences_per_step=1), assets, tmp_path / "out", 2)
    assert done.returncode != 0
    assert "phi.sequences_per_step (1) must be a multiple of the 2 processes" in done.stderr


def test_each_variant_has_a_file(tmp_path: Path) -> None:
    give_manifest(tmp_path)
    spec = replace(SPEC, variants=(OURS, replace(OURS, label="b")))
    with pytest.raises(ValueError, match="--out has 1 files"):
        trainer_module.run(spec, tmp_path, tmp_path / "c", [tmp_path / "o"], tmp_path / "l")
