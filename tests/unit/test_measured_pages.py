"""Pages on the study `mini` state the sample that its configuration takes."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
MINI = "measured/mini_cpu.md"
STATED = [
    (MINI, r"mean of (\w+) runs? of 31 tokens", ["runtime.repeats"]),
    (MINI, r"at batch (\w+) and (\w+) % read exactly", ["runtime.batches.0", "runtime.budget"]),
    (MINI, r"next token in nats, (\w+) documents of (\w+) tokens each", ["fidelity.documents", "fidelity.tokens"]),
    (MINI, r"first other token; (\w+) examples? a task", ["fidelity.examples"]),
    (MINI, r"9 heads and (\w+) queries in each of (\w+) packs", ["diagnostics.queries", "diagnostics.packs"]),
    (MINI, r"13 tasks \(2k\), (\w+) examples? per task", ["benchmarks.ruler.examples"]),
    (MINI, r"QA1 to QA5, (\w+) examples? each", ["benchmarks.babilong.examples"]),
    (MINI, r"Mean over four tasks, (\w+) examples? each", ["benchmarks.longbench.examples"]),
    (MINI, r"in one job \((\w+) steps,", ["phi.steps"]),
    (MINI, r"its failure within (\w+) steps", ["phi.steps"]),
    ("paper.md", r"maps trained for (\w+) steps instead of", ["phi.steps"]),
    ("paper.md", r"trains for (\w+) steps only", ["phi.steps"]),
    ("paper.md", r"than maps of (\w+) steps", ["phi.steps"]),
    ("measured/methods_cpu.md", r"maps of the mini study are trained for (\w+) steps", ["phi.steps"]),
    (
        "deviations.md", r"\| RULER and BABILong (\w+), .*?; LongBench (\w+),",
        ["benchmarks.babilong.examples", "benchmarks.longbench.examples"],
    ),
    ("deviations.md", r"also (\w+) tokens past the length", ["benchmarks.ruler.answer_margin"]),
    ("deviations.md", r"200,000; 100 \| (\w+); (\w+) \|", ["phi.steps", "phi.queries_per_step"]),
    ("deviations.md", r"a new one every (\w+) steps", ["phi.replay.reuse"]),
    ("deviations.md", r"warm-up of (\w+) steps", ["phi.warmup_steps"]),
]  # fmt: skip
"""A page of docs/, a sentence with numbers, and the key of each number in the study's configuration."""


def setting(study: dict[str, Any], key: str) -> Any:
    return reduce(lambda value, name: value[int(name) if name.isdigit() else name], key.split("."), study)


@pytest.mark.parametrize(("page", "sentence", "keys"), STATED)
def test_a_page_states_the_sample_of_the_study(page: str, sentence: str, keys: list[str]) -> None:
    study = yaml.safe_load((ROOT / "config" / "studies" / "mini.yaml").read_text(encoding="utf-8"))
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    (found,) = re.finditer(sentence, text)
    stated = [WORDS.index(word) if word in WORDS else int(word) for word in found.groups()]
    assert stated == [setting(study, key) for key in keys]


def test_an_interval_is_of_several_examples() -> None:
    """Tables of a single example for each task have values alone."""
    text = (ROOT / "docs" / MINI).read_text(encoding="utf-8")
    for name in ("longbench", "gold", "kept"):
        (rows,) = re.findall(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
        assert rows.count("|") > 20 and "[" not in rows
