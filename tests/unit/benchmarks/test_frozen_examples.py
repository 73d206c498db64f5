"""The examples that come with the package: what the mini study asks for, readable by the harness and its scorers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from tests.refusals import refused

from residual_mass.benchmarks import frozen_examples
from residual_mass.benchmarks.catalogue import both_scores, harness_requests
from residual_mass.benchmarks.frozen_examples import checksums_of_examples, read_examples
from residual_mass.benchmarks.generate import reference_texts
from residual_mass.files import sha256_of
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.tasks import tasks_of

ROOT = Path(__file__).parents[3]
MINI = yaml.safe_load((ROOT / "config" / "studies" / "mini.yaml").read_text())["benchmarks"]
ASKED = [
    (name, task, length)
    for name in ("babilong", "longbench")
    for length in MINI[name]["lengths"]
    for task in tasks_of(name, tokens_of(length))
]
"""What the mini study asks for: benchmark, task and length."""


def test_the_files_are_those_of_the_mini_study() -> None:
    names = {f"{task}_{length}.jsonl" for _, task, length in ASKED}
    assert {file.name for file in frozen_examples.EXAMPLES_FOLDER.iterdir()} == names | {"README.md", "sha256.txt"}


@pytest.mark.parametrize(("benchmark", "task", "length"), ASKED)
def test_examples_are_sent_and_scored_as_the_harness_does(benchmark: str, task: str, length: str) -> None:
    assert sha256_of(frozen_examples.EXAMPLES_FOLDER / f"{task}_{length}.jsonl") in checksums_of_examples(
        benchmark, length
    )
    docs = read_examples(task, length, 99)
    count = MINI[benchmark]["examples"]
    assert len(docs) >= count and read_examples(task, length, 1) == docs[:1]
    text = "input" if benchmark == "babilong" else "context"
    for doc, (prompt, _) in zip(docs, harness_requests(benchmark, task, docs), strict=True):
        assert doc[text] in prompt and doc["question"] in prompt
        assert both_scores(benchmark, task, doc, reference_texts(doc)[0]) == pytest.approx((1.0, 1.0))
        assert both_scores(benchmark, task, doc, "nothing of the kind")[0] < 0.3


@pytest.mark.parametrize("task", tasks_of("babilong", 1024))
def test_the_facts_of_a_story_lie_in_order_in_its_text(task: str) -> None:
    for doc in read_examples(task, "1k", 2):
        end = 0
        for fact in doc["facts"]:
            end = doc["input"].index(fact, end) + len(fact)


def test_other_lengths_and_changed_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("length 4k: no examples of longbench_gov_report without the hub (there are: ", "_2k.jsonl); choose"):
        checksums_of_examples("longbench", "4k")
    shutil.copytree(frozen_examples.EXAMPLES_FOLDER, tmp_path / "examples")
    monkeypatch.setattr(frozen_examples, "EXAMPLES_FOLDER", tmp_path / "examples")
    changed = tmp_path / "examples" / "babilong_qa1_1k.jsonl"
    changed.write_bytes(changed.read_bytes().replace(b"kitchen", b"bedroom", 1))
    with refused("babilong_qa1_1k.jsonl: not the file that sha256.txt lists (sha256)"):
        read_examples("babilong_qa1", "1k", 1)
    assert read_examples("babilong_qa2", "1k", 1)
