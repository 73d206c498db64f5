from __future__ import annotations

import csv
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.records import record
from tests.refusals import refused
from tests.small_assets import freeze_prompts
from tests.unit.test_metrics import LOSS

from residual_mass.benchmarks import scoring
from residual_mass.benchmarks.catalogue import both_scores
from residual_mass.files import jsonl
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.columns import SCORE_COLUMNS, decoding_settings, decoding_words
from residual_mass.spec.labels import PAPER_METHODS
from residual_mass.spec.sections import Decoding
from residual_mass.spec.specs import BackboneSpec, ScoreSpec
from residual_mass.spec.tasks import BENCHMARKS, tasks_of
from residual_mass.statistics import holm, means, minimal_detectable_effect, sign_flip_p
from residual_mass.texts.frozen_prompts import load_manifest, load_prompts

Row = dict[str, Any]
Table = list[dict[str, str]]

BACKBONE = BackboneSpec("test", "tests/Tiny-Llama", "r1", "random", "float32", "tiny", 4096, False, name="tiny")
SPEC = ScoreSpec(
    study="test", backbone=BACKBONE, benchmark="ruler", length="1k", data_source="assets", examples=1000, arms=None,
    decoding="greedy; cut to 2k", bootstrap_resamples=200, seed=0, recipe=1,
)  # fmt: skip
FULL = ArmSpec("full")
ARMS = (FULL, ArmSpec("topk", 2.0), ArmSpec("topk_phi", 2.0, "1k"))
NUMBERS = (
    "value stderr ci_low ci_high original_value original_stderr original_ci_low original_ci_high "
    "gain gain_ci_low gain_ci_high gain_p mde full_gap full_gap_p right_to_wrong wrong_to_right"
).split()


def rows_of(manifest: Path, answer: Callable[[str, ArmSpec, Any], str], arms: Sequence[ArmSpec] = ARMS) -> list[Row]:
    """Rows for every prompt and arm; `answer` gives the text from task, arm and doc."""
    return [
        {
            "task": task, "index": prompt.index, "method": arm.method, "budget_percent": arm.budget_percent,
            "maps": arm.maps, "k": 900 if arm == FULL else prompt.index, "text": answer(task, arm, prompt.doc),
            "cut_tokens": 7 * prompt.index if task == "ruler_cwe" else 0, "prompt_sha": prompt.sha256,
            "phi_sha": f"f00{arm.maps}" if arm.needs_maps else None,
        }
        for task, entry in load_manifest(manifest)["tasks"].items()
        for prompt in load_prompts(manifest, task, entry["examples"])
        for arm in arms
    ]  # fmt: skip


def written(file: Path, rows: Iterable[Row]) -> Path:
    """Generations as the generate stage leaves them."""
    file.write_text(jsonl(rows))
    record(file)
    return file


def score(manifest: Path, rows: list[Row], folder: Path, spec: ScoreSpec = SPEC) -> Table:
    return score_files(manifest, [written(folder / "all.jsonl", rows)], folder / "ruler_tiny_1k.csv", spec)


def score_files(manifest: Path, files: list[Path], out: Path, spec: ScoreSpec = SPEC) -> Table:
    scoring.run(spec, manifest, files, out)
    with open(out, newline="") as stream:
        return list(csv.DictReader(stream))


def line_of(table: Table, task: str, method: str, maps: str = "") -> dict[str, str]:
    (line,) = (x for x in table if (x["task"], x["method"]) == (task, method) and maps in ("", x["maps"]))
    return line


def gold(_task: str, _arm: ArmSpec, doc: Any) -> str:
    return " and ".join(doc["outputs"])


@pytest.fixture
def rows(manifest: Path) -> list[Row]:
    return rows_of(manifest, gold)


def test_columns_and_provenance(manifest: Path, rows: list[Row], tmp_path: Path) -> None:
    table = score(manifest, rows, tmp_path)
    assert list(table[0]) == SCORE_COLUMNS
    phi = line_of(table, "all", "topk_phi")
    assert phi.items() >= {
        "benchmark": "ruler", "backbone": "tiny", "length": "1k", "budget_percent": "2", "maps": "1k",
        "metric": "string_match", "phi_sha": "f001k", "n": "24", "k_mean": "0.500000", "k_zero_share": "0.500000",
        "cut_share": f"{1 / 24:.6f}", "study": "test", "model_id": BACKBONE.model_id, "revision": "r1",
        "weights": "random", "data": "original", "decoding": SPEC.decoding,
        "prompts_sha": json.loads(manifest.read_text())["sha256"],
    }.items()  # fmt: skip
    assert line_of(table, "ruler_cwe", "topk_phi")["cut_share"] == "0.500000"  # one example of one task
    full = line_of(table, "niah_single_1", "full")
    told = [full[name] for name in ("budget_percent", "maps", "phi_sha", "k_mean", "n")]
    assert told == ["", "", "", "900.000000", "2"]
    assert [(line["task"], line["method"]) for line in table] == [
        (task, arm.method) for task in (*tasks_of("ruler", 1024), "all") for arm in ARMS
    ]


def _without(rows: list[Row], **where: Any) -> list[Row]:
    return [row for row in rows if any(row[key] != value for key, value in where.items())]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda rows: _without(rows, task="ruler_vt", index=1, method="topk"),
         "ruler_vt topk 2% lacks 1 of 2 examples (1)"),
        (lambda rows: [*rows, {**rows[-1], "maps": "2k"}],
         "all.jsonl: niah_single_1 topk_phi 2% 2k lacks 2 of 2 examples (0, 1)"),
        (lambda rows: [*rows, rows[3]], "all.jsonl: a second row for niah_single_1 full example 1"),
        (lambda rows: [{**rows[0], "prompt_sha": "0"}, *rows[1:]], "niah_single_1 example 0 was generated from other"),
    ],
)  # fmt: skip
def test_incomplete_or_foreign_rows_are_refused(
    manifest: Path, rows: list[Row], tmp_path: Path, damage: Any, complaint: str
) -> None:
    with refused(complaint):
        score(manifest, damage(rows), tmp_path)
    assert not (tmp_path / "ruler_tiny_1k.csv").exists()


def test_maps_of_a_second_generate_job_are_arms_of_their_own(manifest: Path, rows: list[Row], tmp_path: Path) -> None:
    other = [{**row, "maps": "0.5k", "phi_sha": "b4r", "text": ""} for row in rows if row["maps"] == "1k"]
    written(tmp_path / "main.jsonl", rows)
    written(tmp_path / "maps.jsonl", other)
    files = [tmp_path / "main.jsonl", tmp_path / "maps.jsonl"]
    table = score_files(manifest, files, tmp_path / "a.csv")
    assert score_files(manifest, files[::-1], tmp_path / "b.csv") == table
    assert [(line["method"], line["maps"], line["phi_sha"], line["value"]) for line in table[-4:]] == [
        ("full", "", "", "1.000000"),
        ("topk", "", "", "1.000000"),
        ("topk_phi", "0.5k", "b4r", "0.000000"),
        ("topk_phi", "1k", "f001k", "1.000000"),
    ]
    assert [line["gain"] for line in table[-4:]] == ["", "", "-1.000000", "0.000000"]


def test_arms_named_by_the_spec_are_all_that_is_scored(manifest: Path, rows: list[Row], tmp_path: Path) -> None:
    whole = {(line["task"], line["method"]): line for line in score(manifest, rows, tmp_path)}
    unwanted = {**rows[0], "method": "topk", "budget_percent": 4.0}  # of an arm that is far from complete, and twice
    written(tmp_path / "all.jsonl", [*rows, unwanted, unwanted])
    out = tmp_path / "out.csv"
    table = score_files(manifest, [tmp_path / "all.jsonl"], out, replace(SPEC, arms=(ARMS[2], ARMS[1])))
    assert [line["method"] for line in table] == ["topk", "topk_phi"] * 13
    for line in table:
        against_full = ("full_gap", "full_gap_p", "right_to_wrong", "wrong_to_right")
        assert line == whole[line["task"], line["method"]] | dict.fromkeys(against_full, "")
    with refused("all.jsonl: niah_single_1 topk 8% lacks 2 of 2 examples (0, 1)"):
        scoring.run(replace(SPEC, arms=(*ARMS, ArmSpec("topk", 8.0))), manifest, [tmp_path / "all.jsonl"], out)
    (phi,) = score(manifest, [row for row in rows if row["index"] == 0], tmp_path, replace(SPEC, examples=1))[2:3]
    unknown = [f"{kind}{name}" for kind in ("", "original_") for name in ("stderr", "ci_low", "ci_high")]
    unknown += ["gain_ci_low", "gain_ci_high", "mde"]
    assert [name for name in NUMBERS if phi[name] == ""] == unknown  # of one example
    assert (phi["gain"], phi["gain_p"], phi["full_gap_p"], phi["n"]) == ("0.000000", "1.000000", "1.000000", "1")


def frozen(folder: Path, docs: dict[str, list[dict[str, Any]]], benchmark: str = "ruler") -> Path:
    """A prompts manifest over hand-made docs."""
    return freeze_prompts(folder / "prompts" / "manifest.json", benchmark, "1k", docs)


RIGHT = {"full": 0.7, "topk": 0.3, "topk_phi": 0.6, "topk_phi_nosub": 0.9}
"""How often the arms of `study` answer right."""
STUDY_ARMS = (
    ArmSpec("full"),
    *(ArmSpec("topk", b) for b in (2.0, 4.0)),
    *(ArmSpec(m, b, "1k") for m in PAPER_METHODS[2:] for b in (2.0, 8.0)),
)


@pytest.fixture
def study(tmp_path: Path) -> tuple[Path, list[Row]]:
    """Two tasks of different size, one with several references; arms of different quality, not all with a topk."""
    docs = {
        "niah_single_1": [{"outputs": [str(100 + i)], "max_length": 1024} for i in range(40)],
        "ruler_qa_squad": [{"outputs": [str(100 + i), f"<{i}>"], "max_length": 1024} for i in range(25)],
    }
    rng = np.random.default_rng(0)

    def answer(_task: str, arm: ArmSpec, doc: Any) -> str:
        return " ".join(output for output in doc["outputs"] if rng.random() < RIGHT[arm.method])

    manifest = frozen(tmp_path, docs)
    return manifest, rows_of(manifest, answer, STUDY_ARMS)


def _scores(manifest: Path, rows: list[Row], task: str, arm: ArmSpec) -> np.ndarray:
    """Scores by harness and authors, (examples, 2)."""
    count = load_manifest(manifest)["tasks"][task]["examples"]
    docs = [prompt.doc for prompt in load_prompts(manifest, task, count)]
    mine = [r for r in rows if (r["task"], r["method"], r["budget_percent"]) == (task, arm.method, arm.budget_percent)]
    return np.array([both_scores("ruler", task, docs[row["index"]], row["text"]) for row in mine])


def test_every_number_by_definition(study: tuple[Path, list[Row]], tmp_path: Path) -> None:
    manifest, rows = study
    table = score(manifest, rows, tmp_path)
    tasks = list(load_manifest(manifest)["tasks"])
    assert len(table) == 3 * len(STUDY_ARMS)
    for line, (task, arm) in zip(table, product([*tasks, "all"], STUDY_ARMS), strict=True):
        assert (line["task"], line["method"]) == (task, arm.method)
        assert line["budget_percent"] == (f"{arm.budget_percent:g}" if arm.budget_percent else "")
        covered = tasks if task == "all" else [task]
        of_arm = {name: _scores(manifest, rows, name, arm) for name in covered}
        expected: dict[str, Any] = {}
        for column, prefix in enumerate(("", "original_")):
            of_scorer = means({name: scores[:, column][None] for name, scores in of_arm.items()}, 200, 0).frame
            expected |= of_scorer.add_prefix(prefix).iloc[0].to_dict()

        def minus(other: ArmSpec, of_arm: dict[str, np.ndarray] = of_arm) -> dict[str, np.ndarray]:
            return {
                name: (scores - _scores(manifest, rows, name, other))[:, 0][None] for name, scores in of_arm.items()
            }

        if arm.needs_maps and arm.budget_percent == 2.0:  # there is no topk at 8 %
            differences = minus(ArmSpec("topk", 2.0))
            gain = means(differences, 200, 0).frame.iloc[0]
            expected |= {"gain": gain["value"], "gain_ci_low": gain["ci_low"], "gain_ci_high": gain["ci_high"]}
            expected |= {"gain_p": sign_flip_p(differences, 200, 0)[0]}
            expected |= {"mde": minimal_detectable_effect(gain["stderr"])}
        if arm.method != "full":
            differences = minus(FULL)
            expected |= {"full_gap": means(differences, 2, 0).value[0]}
            expected |= {"full_gap_p": sign_flip_p(differences, 200, 0)[0]}
            turned = Counter(
                (bool(before == 1), bool(after == 1))  # half of two references is not right
                for name, after_all in of_arm.items()
                for before, after in zip(_scores(manifest, rows, name, ARMS[0])[:, 0], after_all[:, 0], strict=True)
            )
            expected |= {"right_to_wrong": turned[True, False], "wrong_to_right": turned[False, True]}
        for name in NUMBERS:
            if name in expected:
                assert float(line[name]) == pytest.approx(expected[name], abs=6e-7), (task, arm, name)
            else:
                assert line[name] == "", (task, arm, name)
    squad = line_of(table, "ruler_qa_squad", "full")
    assert float(squad["original_value"]) > float(squad["value"]) + 0.1  # one of two references suffices the authors


def test_an_arm_above_full_is_flagged_and_reported(
    study: tuple[Path, list[Row]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, rows = study
    with caplog.at_level(logging.WARNING):
        table = score(manifest, rows, tmp_path)
    flagged = []
    for task in {line["task"]: None for line in table}:
        partial = [line for line in table if line["task"] == task and line["method"] != "full"]
        adjusted = holm([float(line["full_gap_p"]) for line in partial])
        flagged += [line for line, p in zip(partial, adjusted, strict=True) if p < 0.05 and float(line["full_gap"]) > 0]
    assert flagged and all(line["method"] == "topk_phi_nosub" for line in flagged)
    assert [line for line in table if "beats_full" in line["flags"].split()] == flagged
    alarms = [record.message.partition(" (")[0] for record in caplog.records if "alarm: " in record.message]
    named = (f"{line['task']} {line['method']} {line['budget_percent']}% 1k" for line in flagged)
    assert alarms == [f"alarm: {name} is above full" for name in named]
    below = [line for line in table if line["method"] == "topk" and float(line["full_gap_p"]) < 0.01]
    assert below and not any("beats_full" in line["flags"] for line in below)  # below full is no alarm


def test_flags_and_alarm_follow_the_direction_of_the_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loss = replace(LOSS, floor=0.9, ceiling=0.1)
    monkeypatch.setitem(BENCHMARKS, "ruler", tuple(replace(task, metric=loss) for task in BENCHMARKS["ruler"]))
    manifest = frozen(tmp_path, {"ruler_vt": [{"outputs": [f"<{i}>"], "max_length": 1024} for i in range(30)]})
    rows = rows_of(manifest, lambda t, a, d: gold(t, a, d) if a.method == "full" else "", ARMS[:2])
    table = score(manifest, rows, tmp_path)
    assert [line["flags"] for line in table] == ["floor", "beats_full ceiling"] * 2
    assert {line["metric"] for line in table} == {"loss"}
    assert caplog.text.count("topk 2% is below full (adjusted p ") == 2


@pytest.mark.parametrize(
    ("benchmark", "source", "metrics", "data"),
    [
        ("babilong", "assets", ["acc"] * 6, ["simulated"] * 6),
        ("babilong", "hub", ["acc"] * 6, ["original"] * 6),
        ("longbench", "assets", ["rouge_score", "rouge_score", "qa_f1_score", "qa_f1_score", "mean"],
         ["stand-in", "stand-in", "stand-in", "original", "original+stand-in"]),
        ("longbench", "hub", ["rouge_score", "rouge_score", "qa_f1_score", "qa_f1_score", "mean"], ["original"] * 5),
    ],
)  # fmt: skip
def test_metric_and_data_of_the_other_benchmarks(
    benchmark: str, source: Any, metrics: list[str], data: list[str], tmp_path: Path
) -> None:
    doc = {"question": "Where?", "target": "office", "answers": ["the red house. It is old."]}
    manifest = frozen(tmp_path, {task.name: [doc] * 3 for task in BENCHMARKS[benchmark]}, benchmark)
    rows = rows_of(manifest, lambda t, a, d: d["target"] if benchmark == "babilong" else d["answers"][0])
    if benchmark == "babilong":
        for row in rows:
            row["text"] = "office" if row["task"] != "babilong_qa5" else "not the kitchen but the office"
    lines = score(manifest, rows, tmp_path, replace(SPEC, benchmark=benchmark, data_source=source))
    assert {line["right_to_wrong"] for line in lines if line["method"] == "topk"} == (
        {"0"} if benchmark == "babilong" else {""}  # ROUGE and F1 know no right answer
    )
    table = [line for line in lines if line["method"] == "full"]
    assert [line["metric"] for line in table] == metrics
    assert [line["data"] for line in table] == data
    assert {line["value"] for line in table} == {"1.000000"}
    originals = {line["task"]: line["original_value"] for line in table}
    assert originals["all"] == ("0.800000" if benchmark == "babilong" else "1.000000")  # office is no label of qa5


@pytest.mark.parametrize(("margin", "template", "length"), [(None, True, "nominal"), (8, False, "real")])
def test_settings_are_read_back_from_their_words(margin: int | None, template: bool, length: Any) -> None:
    settings = Decoding(
        answer_margin=margin, chat_template=template, budget_length=length, stop_when_saturated=True, batch_tokens=1
    )
    assert decoding_settings(decoding_words(settings, "2k")) == {
        "answer_margin": margin, "chat_template": template, "budget_length": length, "truncate_to": "2k"
    }  # fmt: skip


def test_join_puts_tables_one_after_the_other(manifest: Path, rows: list[Row], tmp_path: Path) -> None:
    score(manifest, rows, tmp_path)
    table = (tmp_path / "ruler_tiny_1k.csv").read_text()
    (tmp_path / "other.csv").write_text(table.replace(",tiny,", ",small,"))
    record(tmp_path / "other.csv")
    scoring.join([tmp_path / "ruler_tiny_1k.csv", tmp_path / "other.csv"], tmp_path / "joined.csv")
    header, _, lines = table.partition("\n")
    assert (tmp_path / "joined.csv").read_text() == f"{header}\n{lines}{lines.replace(',tiny,', ',small,')}"
    scoring.join([tmp_path / "joined.csv"], tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "joined.csv").read_bytes()
