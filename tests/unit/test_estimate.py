"""Costs from the work and the seconds that finished jobs wrote down."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from residual_mass import estimate
from residual_mass.core.settings import AnchorSpec, to_json
from residual_mass.estimate import PlannedJob
from residual_mass.files import write_json
from residual_mass.methods.arms import ArmSpec
from residual_mass.study.jobs import Job
from residual_mass.study.specs import AskedSpec, BackboneSpec, ForceSpec


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
    trained = {"backbone": {"name": "smol"}, "length": "1k", "variants": [{}, {}], "sequences_per_step": 4}
    facts = {"device": "cpu", "processes": 2, "steps": 10, "seconds": 40.0}  # 80 seconds of a device, 40 sequences
    finish(tmp_path / "phi/smol_1k.safetensors", spec=trained, **facts)
    forced = {"rows": 90, "rows_computed": 60, "wall_seconds": 30.0}
    finish(tmp_path / "forced/smol_1k.parquet", **generation("1k", **forced))
    finish(tmp_path / "forced/smol_2k.parquet", **generation("2k", **forced | {"rows_computed": 0}))
    return tmp_path


def test_hours_are_work_over_the_nearest_measured_rate(results: Path) -> None:
    finished = list(estimate.finished_jobs(results))
    assert len(finished) == 5, "a job that found everything in its store measured no rate"
    job = PlannedJob("x", "generate", "smol", "512", examples=5, decoded=400)
    rate = estimate.nearest_job(job, finished)
    assert rate is not None and rate.length == 1024 and rate.backbone == "smol"
    assert estimate.estimate_hours(job, rate) == pytest.approx((5 * 512 / 100 + 400 / 20) / 3600)
    longer = PlannedJob("x", "generate", "smol", "8k", examples=1, decoded=20)
    rate = estimate.nearest_job(longer, finished)
    assert rate is not None and rate.length == 4096
    assert estimate.estimate_hours(longer, rate) == pytest.approx((8192 / 25 + 20 / 20) / 3600)
    training = PlannedJob("x", "train", "smol", "2k", sequences=150, variants=6)
    rate = estimate.nearest_job(training, finished)
    assert rate is not None and estimate.estimate_hours(training, rate) == pytest.approx(150 * 6 * 2.0 * 2 / 3600)
    forced = PlannedJob("x", "force", "smol", "2k", rows=700)
    rate = estimate.nearest_job(forced, finished)
    assert rate is not None and estimate.estimate_hours(forced, rate) == pytest.approx(700 * 0.5 * 2 / 3600)
    assert estimate.nearest_job(PlannedJob("x", "generate", "3b", "4k"), finished) is None


def test_what_is_there_costs_nothing_more(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = results / "generations/ruler_smol_1k_main"
    (folder / "a.jsonl").write_text("")
    jobs = [
        PlannedJob(str(folder / f"{task}.jsonl"), "generate", "smol", "1k", examples=100, decoded=7200)
        for task in ("a", "b", "c")
    ]
    jobs += [PlannedJob("results/generations/ruler_1b_4k_main/a.jsonl", "generate", "1b", "4k", 10, 72000)]
    jobs += [PlannedJob("results/phi/3b_64k.safetensors", "train", "3b", "64k", sequences=5, variants=1)]
    estimate.print_costs("mini", jobs, list(estimate.finished_jobs(results)))
    said = capsys.readouterr().out
    assert re.search(rf"{folder} +partly +307,200 +21,600 +1.15\n", said)
    one = (100 * 1024 / 100 + 7200 / 20) / 3600
    assert f"smol, generate: 2 jobs, about {2 * one:.2f} hours\n" in said
    assert f"1b, generate: 1 jobs, about {(10 * 4096 / 100 + 72000 / 20) / 3600:.2f} GPU-hours\n" in said
    assert "3b, train: 1 jobs, no rate measured yet" in said


def test_the_time_that_is_left_in_one_line(results: Path) -> None:
    def training(backbone: str, maps: str) -> Job:
        spec = {
            "backbone": {"name": backbone},
            "length": maps,
            "steps": 1800,
            "sequences_per_step": 4,
            "variants": [{}],
        }
        return Job("train", outputs=(f"results/phi/{backbone}_{maps}.safetensors",), spec=spec)

    # 2 seconds for each of 7200 sequences of 1k
    known, unknown = training("smol", "1k"), training("3b", "1k")
    assert estimate.time_left([known], results) == "1 jobs that train or decode, about 4.00 hours"
    both = "2 jobs that train or decode, about 4.00 hours without the 1 that have no rate measured here yet"
    assert estimate.time_left([known, unknown], results) == both
    alone = "1 jobs that train or decode, no rate measured here yet"
    assert estimate.time_left([unknown], results) == alone
    assert estimate.time_left([Job("table", outputs=("a.tex",))], results) == "nothing to train or to decode"


def test_planned_work_counts_tasks_examples_and_arms() -> None:
    spec = {"backbone": {"name": "1b"}, "length": "4k", "benchmark": "ruler", "examples": 7, "arms": [{}] * 3}
    job = estimate.planned(Job("generate", outputs=("out",), spec=spec | {"tasks": ["ruler_vt", "niah_single_1"]}))
    assert job == PlannedJob("out", "generate", "1b", "4k", examples=14, decoded=7 * 3 * (30 + 128))
    spec = {"backbone": {"name": "1b"}, "length": "4k", "steps": 9, "sequences_per_step": 2, "variants": [{}, {}]}
    for rule in ("train", "train_variants"):
        trained = estimate.planned(Job(rule, outputs=("phi", "log"), spec=spec))
        assert trained == PlannedJob("phi", "train", "1b", "4k", sequences=18, variants=2)
    assert estimate.planned(Job("score", outputs=("csv",), spec=spec)) is None


def test_planned_continuations_are_those_of_documents_and_of_two_answers_to_each_prompt() -> None:
    asked = AskedSpec(
        benchmark="ruler", examples=3, chat_template=False, answer_margin=None, stop_when_saturated=False,
        budget_length="nominal", batch_tokens=1,
    )  # fmt: skip
    backbone = BackboneSpec("test", "a/b", "main", "assets", "float32", "t", 4096, name="smol")
    spec = ForceSpec(
        study="test", backbone=backbone, length="1k", corpora=("wiki", "books"), documents=5, tokens=8, seed=0,
        asked=(asked,), arms=(ArmSpec("full"), ArmSpec("topk", 1.0), ArmSpec("topk", 2.0)),
        arms_of_documents=(ArmSpec("topk_moments", 1.0),), anchors=AnchorSpec(), truncate_to="1k", maps=(), recipe=1,
    )  # fmt: skip
    job = estimate.planned(Job("force", outputs=("out",), spec=json.loads(to_json(spec))))
    tasks = 12  # of RULER, whose thirteenth needs longer prompts
    rows = 2 * 5 * (4 + 2) + 2 * 3 * tasks * 3  # documents: four arms, two of them in both states
    assert job == PlannedJob("out", "force", "smol", "1k", examples=10 + 3 * tasks, decoded=8 * rows, rows=rows)


@pytest.mark.parametrize("meta", [{}, [], {"spec": {}}, {"spec": 3}])
def test_a_record_that_says_nothing_is_named(meta: object, tmp_path: Path) -> None:
    write_json(tmp_path / "phi" / "smol_1k.safetensors.meta.json", meta)
    with pytest.raises(
        ValueError, match=r"smol_1k\.safetensors\.meta\.json: has no usable timings of its job .*delete it"
    ):
        list(estimate.finished_jobs(tmp_path))
