"""Costs from units of work and the recorded seconds of finished jobs."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from residual_mass import estimate
from residual_mass.files import write_text
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec, to_json
from residual_mass.spec.specs import BackboneSpec, ForcedPromptsSpec, ForceSpec, Job


def finish(path: Path, **facts: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".meta.json").write_text(json.dumps(facts))


def generation(length: str, backbone: str = "smol", **facts: object) -> dict[str, object]:
    spec = {"backbone": {"name": backbone}, "length": length}
    return {"spec": spec, "device": "cpu"} | facts


@pytest.fixture
def results(tmp_path: Path) -> Path:
    work = {"prefill_tokens": 1000, "prefill_seconds": 10.0, "decode_rows": 60, "decode_seconds": 3.0}
    finish(tmp_path / "generations/ruler_smol_1k_main/all.jsonl", **generation("1k", **work))
    slow = work | {"prefill_seconds": 40.0}
    finish(tmp_path / "generations/ruler_smol_4k_main/all.jsonl", **generation("4k", **slow))
    finish(tmp_path / "generations/ruler_1b_4k_main/all.jsonl", **generation("4k", "1b", **work, device="cuda:0"))
    nothing_to_do = generation("1k")
    finish(tmp_path / "generations/babilong_smol_1k_main/all.jsonl", **nothing_to_do)
    trained = {"backbone": {"name": "smol"}, "length": "1k", "variants": [{}, {}], "sequences_per_step": 4, "steps": 10}
    facts = {"device": "cpu", "processes": 2, "steps": 10, "seconds": 40.0}  # 80 seconds of a device, 40 sequences
    finish(tmp_path / "phi/smol_1k.safetensors", spec=trained, **facts)
    forced = {"rows": 90, "rows_computed": 60, "wall_seconds": 30.0}
    finish(tmp_path / "forced/smol_1k.parquet", **generation("1k", **forced))
    finish(tmp_path / "forced/smol_2k.parquet", **generation("2k", **forced | {"rows_computed": 0}))
    return tmp_path


def generating(backbone: str, length: str, examples: int, task: str = "ruler_vt") -> Job:
    """Of a task whose answers have at most 30 tokens, under two arms."""
    spec = {"backbone": {"name": backbone}, "length": length, "benchmark": "ruler", "examples": examples}
    folder = f"generations/ruler_{backbone}_{length}_main"
    return Job("generate", outputs=(f"{folder}/{task}.jsonl",), spec=spec | {"arms": [{}] * 2, "tasks": [task]})


def training(backbone: str, length: str, rule: str = "train", variants: int = 1) -> Job:
    spec = {"backbone": {"name": backbone}, "length": length, "steps": 1800, "sequences_per_step": 4}
    return Job(rule, outputs=(f"phi/{backbone}_{length}.safetensors",), spec=spec | {"variants": [{}] * variants})


def forcing(length: str) -> Job:
    """Ten documents and the prompts of RULER's twelve tasks that fit 1k; four arms, two of them in both states."""
    asked = ForcedPromptsSpec(
        benchmark="ruler", examples=3, chat_template=False, answer_margin=None, stop_when_saturated=False,
        budget_length="nominal", batch_tokens=1,
    )  # fmt: skip
    backbone = BackboneSpec("test", "a/b", "main", "assets", "float32", "t", 4096, name="smol")
    spec = ForceSpec(
        study="test", backbone=backbone, length=length, corpora=("wiki", "books"), documents=5, tokens=8, seed=0,
        asked=(asked,), arms=(ArmSpec("full"), ArmSpec("topk", 1.0), ArmSpec("topk", 2.0)),
        arms_of_documents=(ArmSpec("topk_moments", 1.0),), anchors=AnchorSpec(), truncate_to="1k", maps=(), recipe=1,
    )  # fmt: skip
    return Job("force", outputs=("forced/x.parquet",), spec=json.loads(to_json(spec)))


CONTINUATIONS = 2 * 5 * (4 + 2) + 2 * 3 * 12 * 3


@pytest.mark.parametrize(
    ("job", "seconds"),
    [
        (generating("smol", "512", 50), 50 * 512 / 100 + 50 * 2 * 30 / 20),
        (generating("smol", "8k", 50), 50 * 8192 / 25 + 50 * 2 * 30 / 20),  # at the rates of 4k
        (training("smol", "1k"), 7200 * 2.0),
        (training("smol", "2k", "train_variants", 6), 7200 * 6 * 2.0 * 2),
        (forcing("1k"), CONTINUATIONS * 0.5),
    ],
)
def test_hours_are_units_of_work_times_the_nearest_measured_seconds(job: Job, seconds: float, results: Path) -> None:
    assert estimate.time_left([job], results) == f"1 jobs that train or decode, about {seconds / 3600:.2f} hours"


@pytest.mark.parametrize(
    "record", ["{}", "[]", '{"spec": {"length": "x"}}', '{"spec": {"length": "1k", "backbone": 5}}']
)
def test_a_damaged_record_gives_no_rate_and_is_named(
    record: str, results: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = estimate.rates_of(results)
    damaged = results / "phi" / "smol_4k.safetensors.meta.json"
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_text(record)
    assert estimate.rates_of(results) == whole
    assert f"{damaged}: not the record of a job; delete it" in caplog.text


def test_what_has_no_rate_gets_no_hours(results: Path) -> None:
    known, unknown = training("smol", "1k"), training("3b", "1k")
    both = "2 jobs that train or decode, about 4.00 hours without the 1 that have no rate measured here yet"
    assert estimate.time_left([known, unknown], results) == both
    assert estimate.time_left([unknown], results) == "1 jobs that train or decode, no rate measured here yet"
    assert estimate.time_left([Job("table", outputs=("a.tex",))], results) == "nothing to train or to decode"


def test_what_is_there_costs_nothing_more(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(results)
    jobs = [generating("smol", "1k", 1000, task) for task in ("ruler_vt", "niah_single_1")]
    jobs += [generating("1b", "4k", 1000), training("3b", "1k")]
    write_text(Path(jobs[0].outputs[0]), "")
    write_text(Path("jobs.json"), json.dumps([asdict(job) for job in jobs]))
    estimate.run(Path("jobs.json"), results)
    said = capsys.readouterr().out
    hours = (1000 * 1024 / 100 + 1000 * 2 * 128 / 20) / 3600
    assert f"smol, generate: 1 jobs, about {hours:.2f} hours\n" in said
    assert f"1b, generate: 1 jobs, about {(1000 * 4096 / 100 + 1000 * 2 * 30 / 20) / 3600:.2f} hours\n" in said
    assert "3b, train: 1 jobs, no rate measured yet" in said
    assert re.search(r"generations/ruler_smol_1k_main +2 +1 +[0-9.]+\n", said)
