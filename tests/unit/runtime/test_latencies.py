"""The runtime stage on a tiny backbone, and its count of bytes against counts by hand."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.conftest import TINY, byte_tokenizer, tiny_llama
from tests.needs import GPU, KERNELS, needs
from tests.records import give_manifest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.decode.recording import prefill
from residual_mass.decode.text import Text
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.runtime import latencies
from residual_mass.runtime.decoders import time_decoder
from residual_mass.runtime.traffic import copy_rates, step_traffic
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.labels import PAPER_METHODS
from residual_mass.spec.settings import AnchorSpec, MapSpec
from residual_mass.spec.specs import RuntimeSpec

ANCHORS, MAP = AnchorSpec(4, 16), MapSpec(d_emb=24, d_phi=8)
SPEC = RuntimeSpec(
    study="test", backbone=TINY, contexts=("128", "256"), batches=(1, 2), budget=20.0, anchors=ANCHORS,
    map=MapSpec(d_emb=24, d_phi=16), repeats=2, seed=0, recipe=1,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick_copies() -> Iterator[None]:
    """Every measurement begins with the bandwidth, of which one round is enough here."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(latencies, "copy_rates", partial(copy_rates, rounds=1))
        yield


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An assets folder with a backbone that takes as little time as can be."""
    assets = tmp_path_factory.mktemp("assets")
    folder = assets / "models" / "tiny-llama"
    tiny_llama(layers=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    give_manifest(assets)
    return assets


@pytest.fixture(scope="module")
def model(one_layer: Path) -> PreTrainedModel:
    return load_backbone(TINY, one_layer, torch.device("cpu")).model


@pytest.fixture(scope="module")
def rows(one_layer: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    out = tmp_path_factory.mktemp("runtime") / "runtime_tiny.csv"
    latencies.run(SPEC, one_layer, out)
    meta = json.loads(out.with_name(f"{out.name}.meta.json").read_text())
    assert meta["device"] == "cpu" and meta["hardware"].endswith(", 1 thread")
    with open(out, encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_every_setting_has_a_row(rows: list[dict[str, str]]) -> None:
    places = {(r["implementation"], r["method"], r["context"], r["batch"]) for r in rows}
    assert len(places) == len(rows) == 2 * len(PAPER_METHODS) * 2 * 2
    assert {r["k"] for r in rows if r["context"] == "256" and r["method"] != "full"} == {"32"}
    assert {(r["k"], r["budget_percent"]) for r in rows if r["method"] == "full"} == {("", "")}
    assert {r["phi_weights"] for r in rows if "phi" in r["method"]} == {"random"}
    assert {r["tokens_as_prototype"] for r in rows} == {"1.000"}
    for row in rows:
        assert 0 < float(row["per_step_low_ms"]) <= float(row["per_step_ms"]) <= float(row["per_step_high_ms"])
        floor = int(row["step_bytes"]) / float(row["bandwidth_gb_s"]) / 1e6
        assert float(row["floor_ms"]) == pytest.approx(floor, rel=1e-2, abs=1e-3)
        assert row["peak_memory_mib"] == row["recording_ms"] == row["not_measured"] == ""


def test_methods_that_the_paper_lacks_are_measured_in_our_implementation_alone(model: PreTrainedModel) -> None:
    spec = replace(SPEC, contexts=("128",), batches=(1,), repeats=1, own_methods=("topk_moments", "scan4_moments"))
    *papers, own, scan = latencies.measure(spec, model)
    assert {row["method"] for row in papers} == set(PAPER_METHODS)
    assert (own["implementation"], own["method"], own["tokens_as_prototype"]) == ("fused", "topk_moments", "")
    assert own["k"] == 6 and own["phi_weights"] == "" and float(str(own["per_step_ms"])) > 0
    assert own["state_bytes"] == 2 * (2 * 16 * 16 + 2 * 16 + 2) * 4  # of one layer
    assert (scan["implementation"], scan["method"], scan["k"]) == ("fused", "scan4_moments", 6)


@needs(KERNELS)
def test_cpu_kernels_have_rows_where_they_serve_the_model_and_method() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=1024, initializer_range=0.08, bos_token_id=0,
    )  # fmt: skip
    model, own = LlamaForCausalLM(config).eval(), ("topk_moments", "scan4", "scan4_regression_64", "cache8")
    spec = replace(SPEC, contexts=("256",), repeats=1, own_methods=own)
    rows = list(latencies.measure(spec, model))
    served = [(row["method"], row["batch"]) for row in rows if row["implementation"] == "kernels"]
    assert served == [(method, batch) for batch in (1, 2) for method in ("full", *own[1:])]
    others = [row["method"] for row in rows if row["implementation"] != "kernels"]
    assert set(others) == {*PAPER_METHODS, "topk_moments", "scan4"} and all(
        float(str(row["per_step_ms"])) > 0 for row in rows
    )
    for method in ("full", *own[1:]):
        arm = ArmSpec(method, None if method == "full" else 20.0)
        backend = PackedBackend.open(model, arm, ANCHORS, None, None, 0)
        backend.take(prefill(model, [list(range(2, 258))]))
        text = Text(model, backend)
        with torch.no_grad():
            for _ in range(15):  # half of a run
                text.step(torch.tensor([[5]]))
        read = sum(layer.packed.read_bytes(2) for layer in backend.cache.layers)
        (row,) = (row for row in rows if (row["implementation"], row["method"], row["batch"]) == ("kernels", method, 1))
        assert row["step_bytes"] == read + sum(weight.nbytes for weight in model.parameters()) - 258 * 128 * 4


def test_full_is_that_of_the_fastest_attention_kernel(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has two of the three."""
    monkeypatch.setattr(latencies, "kernels_on", lambda device: ("cudnn", "flash", "math"))
    spec = replace(SPEC, contexts=("128",), batches=(1,), repeats=1)
    full, *others = latencies.measure(spec, model, ("fused",))
    told = [one.partition(" ")[::2] for one in str(full["attention_kernels"]).split("; ")]
    assert sorted(name for name, _ in told[:2]) == ["flash", "math"] and told[2] == ("cudnn", "not available")
    assert float(told[0][1]) <= float(told[1][1]) and full["per_step_ms"] == told[0][1]
    assert {row["attention_kernels"] for row in others} == {""}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"own_methods": ("topk_mean",)}, "runtime.methods: topk_mean has no kernels, on a CPU or a GPU; leave it out"),
        ({"contexts": ("2k",)}, r"runtime.contexts: 2k and 31 steps do not fit into the context of tiny"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    changes: dict[str, tuple[str]], problem: str, tiny_assets: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=problem):
        latencies.run(replace(SPEC, **changes), tiny_assets, tmp_path / "out.csv")
    assert not list(tmp_path.iterdir())


def traffic_of(backbone: Backbone, implementation: str, method: str, k: int = 30) -> dict[str, int]:
    phi = PhiMaps(backbone.shape, MAP)
    traffic = step_traffic(
        backbone.model, phi, implementation, method, batch=2, length=1000, k=k, anchors=ANCHORS, generated=15
    )
    return traffic | {"total": sum(traffic.values())}


def test_bytes_of_the_tiny_backbone_counted_by_hand(tiny_backbone: Backbone) -> None:
    """3 layers, 4 query and 2 KV heads of width 16, float32; maps of inner width 24 and 8 features."""
    weights = sum(p.numel() for p in tiny_backbone.model.parameters()) * 4 - 258 * 64 * 4  # the table is not read whole
    whole = 2 * 3 * 2 * 1015 * 16 * 4
    full = traffic_of(tiny_backbone, "fused", "full")
    assert full == {
        "weights": weights, "keys": whole, "values": whole, "features": 0, "maps": 0, "state": 0, "concatenation": 0,
        "scores": 0, "total": weights + 2 * whole,
    }  # fmt: skip
    topk = traffic_of(tiny_backbone, "fused", "topk")
    assert topk["values"] == 2 * 3 * 4 * (30 + 20 + 15) * 16 * 4
    assert topk["scores"] == 2 * 2 * 3 * 4 * 1015 * 4  # of every query head, written and read
    assert topk["total"] == weights + whole + topk["values"] + topk["scores"]
    assert traffic_of(tiny_backbone, "prototype", "topk")["scores"] == topk["scores"]
    phi = traffic_of(tiny_backbone, "fused", "topk_phi")
    state = 3 * 2 * 8 * 17 * 4
    assert phi["state"] == 2 * state
    assert phi["features"] == 2 * 3 * 4 * 30 * 8 * 4
    assert phi["maps"] == 3 * 4 * (16 * 8 + 24 * 8 + 16 * 24 + 24 + 8) * 4
    moments = traffic_of(tiny_backbone, "fused", "topk_moments")
    assert moments["state"] == 2 * 3 * 2 * (2 * 16 * 16 + 2 * 16 + 2) * 4
    assert moments["total"] - topk["total"] == moments["state"]
    clusters = traffic_of(tiny_backbone, "fused", "topk_moments_8")
    assert clusters["state"] == 8 * moments["state"]
    scan = traffic_of(tiny_backbone, "fused", "scan4_moments")
    codes = 2 * 3 * 2 * 1000 * 16 * (64 // 2 + 2 * 2) // 64  # half a byte each, and two scales of two bytes a block
    assert scan["keys"] == codes + topk["values"]
    assert scan["total"] - moments["total"] == scan["keys"] - whole
    nosub = traffic_of(tiny_backbone, "fused", "topk_phi_nosub")
    assert phi["total"] - nosub["total"] == phi["features"]
    ours = traffic_of(tiny_backbone, "prototype", "topk_phi")
    per_head = 16 * 24 + 24 + 2 * (24 * 24 + 24) + 24 * 8 + 8 + 1
    assert ours["maps"] == 3 * (4 + 2) * per_head * 4
    assert ours["features"] == 2 * 3 * 4 * 30 * 16 * 4  # keys of retrieved tokens, to be mapped again
    assert ours["state"] == 2 * state + 2 * 2 * 2 * state  # S_R of two query heads a KV head, written and read
    assert ours["concatenation"] == 4 * whole


# ---- what is timed, in what order ------------------------------------------------------------------------------------


class FakeClock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


BUILDS, PREPARING, RUNS = (50.0, 7.0), 100.0, (1000.0, 31.0, 93.0, 62.0)


class SlowDecoder:
    """Takes scripted seconds of a clock, and writes down what it does."""

    def __init__(self, clock: FakeClock, log: list[str], recorded: bool, build_seconds: float) -> None:
        self.clock = clock
        self.log = log
        self.recorded = recorded
        self.run_seconds = iter(RUNS)
        self.spend("build", build_seconds)

    def spend(self, what: str, seconds: float) -> None:
        self.log.append(what)
        self.clock.now += seconds

    def prepare(self) -> None:
        self.spend("prepare", PREPARING)

    def run(self, first: torch.Tensor) -> torch.Tensor:
        self.spend("run", next(self.run_seconds))
        return first.unsqueeze(1).repeat(1, 31)


@pytest.mark.parametrize("recorded", [False, True])
def test_the_second_build_and_all_runs_but_the_first_are_timed(recorded: bool) -> None:
    clock, log = FakeClock(), []
    build_seconds = iter(BUILDS)

    def build() -> SlowDecoder:
        return SlowDecoder(clock, log, recorded, next(build_seconds))

    times = time_decoder(build, torch.tensor([3, 4]), repeats=3, clock=clock)
    assert log == ["build", "build", *["prepare", "run"] * 4]
    assert times.build == 7.0 and times.steps == [1.0, 3.0, 2.0] and times.step == 2.0
    assert times.recording == (1000.0 if recorded else None) and times.peak is None
    assert times.tokens.tolist() == [[3] * 31, [4] * 31]


def test_which_calls_of_the_model_are_timed(model: PreTrainedModel) -> None:
    """Three of four readings of a prompt, and 31 steps of three of four runs, which begin where the prompt ends."""
    clock = FakeClock()
    reading_seconds = iter((500.0, 20.0, 40.0, 30.0))
    steps_of_runs: list[int] = []

    def slow(layer: torch.nn.Module, inputs: tuple[torch.Tensor], settings: dict[str, torch.Tensor]) -> None:
        position = int(settings["position_ids"][0, 0])
        if position == 0:
            clock.now += next(reading_seconds)
            return
        if position == 128:
            steps_of_runs.append(0)
        steps_of_runs[-1] += 1
        clock.now += (1000.0, 1.0, 3.0, 2.0)[len(steps_of_runs) % 4 - 1]

    hook = model.model.layers[0].register_forward_pre_hook(slow, with_kwargs=True)
    spec = replace(SPEC, contexts=("128",), batches=(2,), repeats=3)
    rows = list(latencies.measure(spec, model, clock=clock))
    hook.remove()
    assert [(row["method"], row["implementation"]) for row in rows] == [
        (method, implementation) for method in PAPER_METHODS for implementation in ("prototype", "fused")
    ]
    assert next(reading_seconds, None) is None and steps_of_runs == [31] * 4 * len(rows)
    for row in rows:
        assert [row[f"per_step_{name}ms"] for name in ("low_", "", "high_")] == ["1000.000", "2000.000", "3000.000"]
        assert row["prefill_ms"] == f"{1e3 * 2 * 30:.3f}"
        assert row["end_to_end_ms"] == f"{1e3 * (2 * 30 + 31 * 2):.3f}"
        assert row["recording_ms"] == ""


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_is_left_out_and_the_others_are_measured(model: PreTrainedModel) -> None:
    rows = list(latencies.measure(replace(SPEC, contexts=("128",), batches=(1, 10**8), repeats=1), model))
    assert len(rows) == 2 * 2 * len(PAPER_METHODS)
    for row in rows:
        if row["batch"] == 1:
            assert float(str(row["per_step_ms"])) > 0 and "not_measured" not in row
        else:
            assert "per_step_ms" not in row and int(str(row["step_bytes"])) > 10**12
            assert re.fullmatch(r"does not fit: needs [\d.]+ GB of [\d.]+ GB that are free", str(row["not_measured"]))


def test_running_out_of_memory_all_the_same_leaves_out_that_setting_alone(model: PreTrainedModel) -> None:
    bursting = 2 * PAPER_METHODS.index("topk_phi")  # each method's prototype is followed by our decoder
    runs = 0

    def burst(layer: torch.nn.Module, inputs: tuple[torch.Tensor], settings: dict[str, torch.Tensor]) -> None:
        nonlocal runs
        if int(settings["position_ids"][0, 0]) == 128:
            runs += 1
            if runs == 2 * bursting + 1:  # the others have two runs each
                raise torch.OutOfMemoryError("CUDA out of memory")

    hook = model.model.layers[0].register_forward_pre_hook(burst, with_kwargs=True)
    rows = list(latencies.measure(replace(SPEC, contexts=("128",), batches=(1,), repeats=1), model))
    hook.remove()
    (lacking,) = (row for row in rows if row.get("not_measured"))
    assert (lacking["implementation"], lacking["method"]) == ("prototype", "topk_phi")
    assert lacking["not_measured"] == "does not fit: out of memory while decoding"
    alone = next(row for row in rows if (row["implementation"], row["method"]) == ("fused", "topk_phi"))
    assert float(str(alone["per_step_ms"])) > 0 and alone["tokens_as_prototype"] == "", "nothing to compare with"


@pytest.mark.gpu
@needs(GPU)
def test_peak_memory_is_that_of_one_decoder(tiny_assets: Path) -> None:
    """More than keys and values, and no more than a few copies of them and what libraries take."""
    backbone = load_backbone(TINY, tiny_assets, torch.device("cuda"))
    whole = 2 * 8 * 3 * 2 * 1024 * 16 * 4 / 2**20
    for row in latencies.measure(replace(SPEC, contexts=("1k",), batches=(8,), repeats=1), backbone.model):
        assert whole < float(str(row["peak_memory_mib"])) < 4 * whole + 64
        assert (row["recording_ms"] != "") == (row["implementation"] == "fused")
