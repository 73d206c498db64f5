from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from residual_mass.benchmarks import ruler, scoring
from residual_mass.benchmarks.catalogue import scorer_of, tasks_of
from residual_mass.benchmarks.prompts import load_manifest, load_prompts
from residual_mass.files import jsonl
from residual_mass.specs import BackboneSpec, ScoreSpec

ErrorLine = Callable[[pytest.ExceptionInfo[ValueError]], str]
Row = dict[str, Any]

BACKBONE = BackboneSpec("tiny", "test", "tests/Tiny-Llama", "r1", "random", "float32", "tiny", 4096)
SPEC = ScoreSpec("test", BACKBONE, "ruler", "1k", bootstrap_resamples=200, seed=0, recipe=1)
ARMS = (("full", None), ("topk", 2.0), ("topk_phi", 2.0))


def rows_of(manifest: Path, answer: Callable[[str, str, Any], str]) -> list[Row]:
    """Rows for every prompt and arm; `answer` gives the text from task, method and doc."""
    return [
        {
            "key": f"{task}{prompt.index}{method}",
            "task": task,
            "index": prompt.index,
            "method": method,
            "budget_percent": budget,
            "k": 900 if method == "full" else prompt.index,
            "text": answer(task, method, prompt.doc),
            "phi_sha": "f00" if method == "topk_phi" else None,
            "prompt_sha": prompt.sha256,
        }
        for task, entry in load_manifest(manifest)["tasks"].items()
        for prompt in load_prompts(manifest, task, entry["examples"])
        for method, budget in ARMS
    ]


def score(manifest: Path, rows: list[Row], folder: Path) -> list[dict[str, str]]:
    generations, out = folder / "all.jsonl", folder / "ruler_tiny_1k.csv"
    generations.write_text(jsonl(rows))
    scoring.run(SPEC, manifest, [generations], out)
    with open(out, newline="") as stream:
        return list(csv.DictReader(stream))


def gold(_task: str, _method: str, doc: Any) -> str:
    return " and ".join(doc["outputs"])


@pytest.fixture
def rows(manifest: Path) -> list[Row]:
    return rows_of(manifest, gold)


def test_gold_scores_one_and_silence_zero(manifest: Path, tmp_path: Path) -> None:
    table = score(manifest, rows_of(manifest, lambda t, m, d: gold(t, m, d) if m == "full" else ""), tmp_path)
    assert {line["task"] for line in table} == {*tasks_of("ruler", 1024), "all"}
    for line in table:
        expected = "1.000000" if line["method"] == "full" else "0.000000"
        assert [line[c] for c in ("value", "ci_low", "ci_high")] == [expected] * 3
        assert line["stderr"] == "0.000000"


@pytest.mark.parametrize("task", tasks_of("ruler", 1024))
@pytest.mark.parametrize("text", ["", "{0}", "it is {0}\x00.", "none of these", "{0} {1}"])
def test_score_is_the_harness_s(task: str, text: str, manifest: Path) -> None:
    config = ruler.harness_config(task)
    for prompt in load_prompts(manifest, task, 2):
        said = text.format(*prompt.doc["outputs"][:1], prompt.doc["outputs"][-1].upper())
        expected = config["process_results"](prompt.doc, [said])["1024"]
        assert scoring.harness_score(scorer_of("ruler", task), prompt.doc, said) == expected


def test_partial_answers_count_by_share(manifest: Path, tmp_path: Path) -> None:
    def first_of_four(task: str, method: str, doc: Any) -> str:
        return doc["outputs"][0] if task == "niah_multivalue" and doc["index"] == 0 else ""

    table = score(manifest, rows_of(manifest, first_of_four), tmp_path)
    by_task = {line["task"]: line for line in table if line["method"] == "topk"}
    assert by_task["niah_multivalue"]["value"] == "0.125000"
    assert by_task["niah_multivalue"]["stderr"] == "0.125000"  # (0.25, 0): sd 0.176777 / sqrt 2
    assert by_task["niah_single_1"]["value"] == "0.000000"
    assert by_task["all"]["value"] == f"{0.125 / 12:.6f}"
    assert by_task["all"]["stderr"] == f"{0.125 / 12:.6f}"


def test_columns_and_provenance(manifest: Path, rows: list[Row], tmp_path: Path) -> None:
    table = score(manifest, rows, tmp_path)
    assert ",".join(table[0]) == (
        "benchmark,backbone,length,task,method,budget_percent,metric,value,stderr,ci_low,ci_high,n,k_mean,"
        "k_zero_share,study,model_id,revision,phi_sha,prompts_sha,weights"
    )
    phi = next(line for line in table if (line["task"], line["method"]) == ("all", "topk_phi"))
    assert phi["budget_percent"] == "2" and phi["metric"] == "string_match" and phi["phi_sha"] == "f00"
    assert (phi["n"], phi["k_mean"], phi["k_zero_share"]) == ("24", "0.500000", "0.500000")
    assert (phi["study"], phi["model_id"], phi["revision"], phi["weights"]) == (
        "test",
        BACKBONE.model_id,
        "r1",
        "random",
    )
    assert phi["prompts_sha"] == json.loads(manifest.read_text())["sha256"]
    full = next(line for line in table if line["method"] == "full")
    assert (full["budget_percent"], full["phi_sha"], full["k_mean"], full["n"]) == ("", "", "900.000000", "2")
    assert [(line["task"], line["method"]) for line in table] == [
        (task, method) for task in (*tasks_of("ruler", 1024), "all") for method, _ in ARMS
    ]


def test_files_per_task_and_their_order_change_nothing(manifest: Path, rows: list[Row], tmp_path: Path) -> None:
    score(manifest, rows, tmp_path)
    whole = (tmp_path / "ruler_tiny_1k.csv").read_bytes()
    files = []
    for task in tasks_of("ruler", 1024):
        (tmp_path / f"{task}.jsonl").write_text(jsonl(row for row in rows if row["task"] == task))
        files.insert(0, tmp_path / f"{task}.jsonl")
    scoring.run(SPEC, manifest, files, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == whole


def _without(rows: list[Row], **where: Any) -> list[Row]:
    return [row for row in rows if any(row[key] != value for key, value in where.items())]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda rows: _without(rows, task="ruler_vt"), "all.jsonl: no rows for task ruler_vt"),
        (
            lambda rows: _without(rows, task="ruler_vt", index=1, method="topk"),
            "ruler_vt topk 2% lacks 1 of 2 examples (1)",
        ),
        (lambda rows: _without(rows, task="ruler_vt", method="full"), "ruler_vt full lacks 2 of 2 examples (0, 1)"),
        (lambda rows: rows[:-1], "ruler_qa_squad topk_phi 2% lacks 1 of 2 examples (1)"),
        (lambda rows: [*rows, rows[3]], "all.jsonl:73: a second row for niah_single_1 full example 1"),
        (lambda rows: [{**rows[0], "index": 2}, *rows], "all.jsonl:1: niah_single_1 has no example 2"),
        (lambda rows: [{**rows[0], "task": "other"}, *rows], "all.jsonl:1: task 'other' is not among the prompts"),
        (lambda rows: [{**rows[0], "method": "best"}, *rows], "all.jsonl:1: unknown method 'best'"),
        (lambda rows: [{**rows[0], "text": None}, *rows], "all.jsonl:1: text is None"),
        (lambda rows: [{"task": "ruler_vt"}, *rows], "all.jsonl:1: index is 'missing'"),
        (
            lambda rows: [{**rows[0], "prompt_sha": "0"}, *rows[1:]],
            "all.jsonl:1: niah_single_1 example 0 was generated from",
        ),
        (lambda rows: [*rows[:-1], {**rows[-1], "phi_sha": "b4r"}], "topk_phi: rows of 2 different phi files"),
        (lambda rows: [], "all.jsonl: no rows for task niah_single_1"),
    ],
)
def test_incomplete_or_foreign_rows_are_refused(
    manifest: Path,
    rows: list[Row],
    tmp_path: Path,
    damage: Callable[[list[Row]], list[Row]],
    complaint: str,
    error_line: ErrorLine,
) -> None:
    with pytest.raises(ValueError) as error:
        score(manifest, damage(rows), tmp_path)
    assert complaint in error_line(error)
    assert not (tmp_path / "ruler_tiny_1k.csv").exists()


def test_torn_generations_are_refused(manifest: Path, rows: list[Row], tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text(jsonl(rows)[:-20])
    with pytest.raises(ValueError, match=r"all\.jsonl:72: not a JSON object"):
        scoring.run(SPEC, manifest, [tmp_path / "all.jsonl"], tmp_path / "out.csv")
