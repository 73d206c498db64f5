"""What a machine can run: its parts, room on its disk, and what is missing with its remedy."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import pytest
import torch
from tests.small_hub import Repository, SmallHub, serving

from residual_mass.backbones.phi_maps import HeadShape, PhiMaps
from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.core.settings import MapSpec, to_json
from residual_mass.machine import disk, doctor, facts
from residual_mass.machine.disk import Heads
from residual_mass.machine.facts import Gpu, Machine
from residual_mass.paper.published import MODELS
from residual_mass.study.jobs import Job, StudyJobs
from residual_mass.study.specs import BackboneSpec

SMALL = BackboneSpec("mini", "org/Small-135M-Instruct", "r1", "assets", "float32", "t", 2048, False, name="smol")
LARGE = BackboneSpec("paper", MODELS["1b"], "0" * 40, "hub", "bfloat16", "t", 2048, True, name="1b")
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "hidden_size": 64}
GIB = 2**30
NO_HUB = "http://127.0.0.1:9"
"""The port of `discard`, where nothing answers."""
LAPTOP = Machine(
    cores=8, memory=16 * GIB, gpus=(), gpu_fault="", hub="cannot be reached (ConnectError)", token=False,
    slurm=False, accounting=False,
)  # fmt: skip
SERVER = dataclasses.replace(LAPTOP, gpus=(Gpu("H200", 140 * GIB),), hub="")


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No programs, no devices, an empty folder, nothing of the hub's in the cache, and no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(Path, "glob", without_devices(Path.glob))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NO_HUB)
    monkeypatch.setattr("residual_mass.machine.preflight.metadata.version", lambda name: "2.13.0")


def without_devices(glob: object) -> object:
    def search(self: Path, pattern: str) -> Iterator[Path]:
        return iter(()) if self == Path("/dev") else glob(self, pattern)  # type: ignore[operator]

    return search


def write_program(name: str, text: str) -> None:
    Path("bin").mkdir(exist_ok=True)
    Path("bin", name).write_text(f"#!/bin/sh\n{text}\n")
    Path("bin", name).chmod(0o755)


def write_model(folder: Path, weights: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(bytes(weights))


def study_of(backbone: BackboneSpec, *jobs: Job) -> StudyJobs:
    return StudyJobs(backbone.study, (backbone,), jobs)


def freezing(path: str, examples: int, **changes: str) -> Job:
    """Of BABILong's five tasks at 1k."""
    spec = {"benchmark": "babilong", "length": "1k", "tokenizer": "t", "data_source": "hub"} | changes
    return Job("prompts", outputs=(path,), spec=spec | {"examples": examples, "tokenizer_source": "assets"})


def training(path: str, backbone: BackboneSpec, *shapes: MapSpec) -> Job:
    spec = {
        "backbone": dataclasses.asdict(backbone),
        "length": "1k",
        "steps": 9,
        "sequences_per_step": 1,
        "corpora": [],
    }
    spec |= {"variants": [{"map": dataclasses.asdict(shape)} for shape in shapes]}
    return Job("train", outputs=(path,), spec=spec)


def generating(path: str, backbone: BackboneSpec, examples: int, arms: int) -> Job:
    """Of two tasks with 30 and 128 tokens at most."""
    spec = {"backbone": dataclasses.asdict(backbone), "length": "4k", "benchmark": "ruler", "examples": examples}
    return Job("generate", outputs=(path,), spec=spec | {"arms": [{}] * arms, "tasks": ["ruler_vt", "niah_single_1"]})


def capturing(path: str, backbone: BackboneSpec, audited: int) -> Job:
    spec = {"backbone": dataclasses.asdict(backbone), "length": "1k", "corpus": "cwe", "audited": audited}
    return Job("capture", outputs=("heads", "mass", path), spec=spec)


def lacks(study: StudyJobs, machine: Machine) -> list[str]:
    needs = {(study.name, b.name): disk.estimate_need(study, b, Path("assets")) for b in study.backbones}
    return list(doctor.problems(study, machine, needs, Path("assets")))


@pytest.mark.parametrize("shape", [MapSpec("rezero", 12, 6), MapSpec("hedgehog", 12, 6)])
def test_parameters_are_those_of_the_real_maps(shape: MapSpec) -> None:
    torch.manual_seed(0)
    maps = PhiMaps(HeadShape(layers=2, query_heads=3, kv_heads=1, head_dim=8), shape)
    counted = disk.map_parameters(shape, 8) * 2 * (3 + 1)
    assert counted == sum(parameter.numel() for parameter in maps.parameters())
    assert disk.job_bytes(training("phi", SMALL, shape, shape), SMALL, Heads(8, 8)) == 2 * 4 * counted


def test_heads_come_from_the_model_or_from_the_paper() -> None:
    assert disk.count_heads(LARGE, Path("assets")) == Heads(16 * (32 + 8), 64)
    assert disk.count_heads(dataclasses.replace(LARGE, model_id=MODELS["3b"]), Path("assets")) == Heads(28 * 32, 128)
    assert disk.count_heads(dataclasses.replace(SMALL, model_id="a/Nameless"), Path("assets")) is None
    assert disk.count_heads(SMALL, Path("assets")) == Heads(359, 64)  # a guess: SmolLM2-135M has 360
    write_model(Path("assets/models/small-135m-instruct"), 1000)
    assert disk.count_heads(SMALL, Path("assets")) == Heads(3 * 6, 16)


@pytest.mark.parametrize(
    ("model_id", "dtype", "size"),
    [
        ("a/b-135M-Instruct", "float32", 675e6),
        ("a/Llama-3.2-1B", "bfloat16", 2.5e9),
        ("a/x-1.5B-it", "bfloat16", 3.75e9),
    ],
)
def test_a_model_that_is_not_here_is_sized_by_its_name(model_id: str, dtype: str, size: float) -> None:
    backbone = dataclasses.replace(LARGE, model_id=model_id, dtype=dtype)
    assert disk.weights_bytes(backbone, Path("assets")) == size


def test_a_model_that_is_here_is_measured() -> None:
    assert disk.weights_bytes(dataclasses.replace(LARGE, model_id="a/Nameless"), Path("assets")) is None
    write_model(Path("assets/models/small-135m-instruct"), 1000)
    assert disk.weights_bytes(SMALL, Path("assets")) == 1000
    write_model(Path("assets/hub/models") / LARGE.model_id, 2000)  # as `prefetch` leaves it
    assert disk.weights_bytes(LARGE, Path("assets")) == 2000


def test_what_is_there_is_no_longer_asked_for() -> None:
    jobs = freezing("prompts.json", 2), generating("texts.jsonl", LARGE, 7, arms=3), capturing("rows", LARGE, 50)
    study = study_of(LARGE, *jobs)
    need = disk.estimate_need(study, LARGE, Path("assets"))
    assert need.total == need.left
    assert need.total == {
        "model": 2_500_000_000, "prompts": 2 * 5 * 1024 * 5 * 3, "maps": 0, "checkpoint": 0,
        "generations": 2 * (7 * 2 * 3 * 450 + 7 * 3 * (30 + 128) * 12), "rows": 50 * 1024 * 2 * 64 * 2,
    }  # fmt: skip
    Path("texts.jsonl").write_text("")
    after = disk.estimate_need(study, LARGE, Path("assets"))
    assert after.total == need.total and after.left == need.left | {"generations": 0}


def test_prompts_of_the_assets_are_kept_once_and_rulers_own_as_well() -> None:
    once = 2 * 5 * 1024 * 5
    assert disk.job_bytes(freezing("p", 2, data_source="assets"), LARGE, None) == once
    assert disk.job_bytes(freezing("p", 2), LARGE, None) == 3 * once
    ruler = freezing("p", 2, benchmark="ruler")
    assert disk.job_bytes(ruler, LARGE, None) == 2 * len(tasks_of("ruler", 1024)) * 1024 * 5


@pytest.mark.parametrize("order", [1, -1])
def test_the_checkpoint_of_the_largest_training_that_is_left_needs_room(order: int) -> None:
    one, seven = (MapSpec("rezero", 16, 8),), (MapSpec("rezero", 16, 8),) * 7
    study = study_of(LARGE, *(training(f"phi{len(maps)}", LARGE, *maps) for maps in (one, seven)[::order]))
    need = disk.estimate_need(study, LARGE, Path("assets"))
    assert need.left["maps"] == 8 * need.left["checkpoint"] / 7 / 3
    Path("phi7").write_text("")
    after = disk.estimate_need(study, LARGE, Path("assets"))
    assert after.left["checkpoint"] == 3 * after.left["maps"] == need.left["checkpoint"] / 7


def test_sizes_of_finished_results_are_not_above_the_estimate() -> None:
    """Rows as the store writes them, at the shortest and at the longest."""
    row = {
        "key": "0" * 64, "task": "longbench_hotpotqa", "index": 99, "method": "topk_phi_nosub", "budget_percent": 0.5,
        "maps": "64k", "k": 65536, "prompt_tokens": 65536, "cut_tokens": 0, "text": "", "tokens": [],
        "finish": "length", "phi_sha": "0" * 64, "prompt_sha": "0" * 64,
    }  # fmt: skip
    assert len(json.dumps(row)) + 1 <= disk.ROW_BYTES
    longer = row | {"text": "word " * 100, "tokens": [49152] * 100}
    assert len(json.dumps(longer)) + 1 <= disk.ROW_BYTES + 100 * disk.BYTES_PER_GENERATED


def test_a_small_study_runs_on_a_laptop_without_a_network() -> None:
    assert lacks(study_of(SMALL), LAPTOP) == []


def test_each_lack_is_told_with_its_remedy() -> None:
    study = study_of(LARGE, freezing("prompts.json", 10**15 // 3 // 5 // 1024))
    said = lacks(study, LAPTOP)
    starts = ["no NVIDIA GPU here for backbone 1b: run on", "Hugging Face hub: cannot be reached", "disk: results, "]
    assert [line[: len(start)] for line, start in zip(said, starts, strict=True)] == starts
    assert "assets lacks some of what study paper reads" in said[1] and "`prefetch`" in said[1]
    assert "will take 5000.0 TB, but" in said[2] and "make room" in said[2]
    Path("prompts.json").write_text("")
    assert [line[:10] for line in lacks(study, LAPTOP)] == ["no NVIDIA "]


def test_memory_has_to_hold_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_something")
    monkeypatch.setattr("residual_mass.machine.preflight.has_gpu", lambda: True)
    small_gpu = dataclasses.replace(SERVER, gpus=(Gpu("old", 2 * GIB),))
    (line,) = lacks(study_of(LARGE), small_gpu)
    assert line.startswith("backbone 1b: its weights (2.5 GB) do not fit into a GPU here")
    (line,) = lacks(study_of(LARGE), dataclasses.replace(SERVER, memory=GIB))
    assert line.startswith("backbone 1b: its weights (2.5 GB) do not fit into the memory here")
    (line,) = lacks(study_of(LARGE), dataclasses.replace(SERVER, gpu_fault="torch 2 cannot use the GPU"))
    assert line.startswith("backbone 1b: torch 2 cannot use the GPU: install")
    assert lacks(study_of(LARGE), SERVER) == []


def test_who_may_not_read_a_model_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ofTheTests")
    monkeypatch.setattr("residual_mass.machine.preflight.has_gpu", lambda: True)
    study, asking = study_of(LARGE), dataclasses.replace(SERVER, token=True)
    hub = SmallHub({f"models/{LARGE.model_id}": Repository("0" * 40, {}, gated=True)})
    with serving(hub):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        assert facts.inspect_machine().hub == ""
        (line,) = lacks(study, asking)
        assert f"the token has no access to {LARGE.model_id}: accept the licence" in line
        hub.repositories.clear()
        (line,) = lacks(study, asking)
        assert f"{LARGE.model_id} is not on the hub, or the token is not valid" in line
        hub.status = 503
        (line,) = lacks(study, asking)
        assert f"the hub did not answer when asked for {LARGE.model_id} (503)" in line
    (line,) = lacks(study, asking)  # now it is gone
    assert f"the hub did not answer when asked for {LARGE.model_id} (Connect" in line
    write_model(Path("assets/hub/models") / LARGE.model_id, 2000)
    assert lacks(study, asking) == []


def test_gpus_are_those_that_nvidia_smi_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    write_program("nvidia-smi", 'echo "NVIDIA H200, 143771"; echo "NVIDIA A100, 81920"')
    gpus = facts.inspect_machine().gpus
    assert gpus == (Gpu("NVIDIA H200", 143771 * 2**20), Gpu("NVIDIA A100", 81920 * 2**20))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert facts.inspect_machine().gpu_fault.startswith("torch cannot be imported (import of torch halted")
    write_program("nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not reach the driver'; exit 9")
    assert facts.inspect_machine().gpus == ()


def test_slurm_with_and_without_accounting() -> None:
    assert not facts.inspect_machine().slurm
    write_program("sbatch", "exit 0")
    assert facts.inspect_machine().slurm and not facts.inspect_machine().accounting
    write_program("sacct", "echo 'connection refused' >&2; exit 1")
    assert not facts.inspect_machine().accounting
    write_program("sacct", "exit 0")
    assert facts.inspect_machine().accounting


def test_the_whole_of_it_in_a_fresh_process_tells_no_token_and_imports_no_torch(tmp_path: Path) -> None:
    studies = [json.loads(to_json(study_of(each))) for each in (SMALL, LARGE)]
    poison = tmp_path / "poison" / "torch"
    poison.mkdir(parents=True)
    (poison / "__init__.py").write_text("raise ImportError('doctor imports torch')\n")
    source = str(Path(doctor.__file__).parents[2])
    environment = {
        "PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": f"{poison.parent}{os.pathsep}{source}",
        "HF_TOKEN": "hf_secretOfTheTests", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    Path("jobs.json").write_text(json.dumps(studies))
    command = [sys.executable, "-m", "residual_mass", "doctor", "--jobs=jobs.json", "--assets=-- $(no) assets"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    assert "hf_" not in run.stdout + run.stderr and any("a token is set" in line for line in said)
    assert said[-2] == "  mini: can run here"
    assert said[-1].startswith("  paper: cannot run here, because of 1")
    assert "offline: HF_HUB_OFFLINE is set" in run.stdout
    assert ("no NVIDIA GPU here for backbone 1b" in run.stdout) == (not glob("/dev/nvidia[0-9]*"))
