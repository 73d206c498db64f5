"""Every example of docs/extending.md, applied unchanged to a copy of the repository and then run."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
import yaml
from runs import ROOT, Run, change, copied, dry_run, snakemake
from tests.small_study import write_small_study
from tests.unit.paper.sample_results import distance_row, error_row, score_row, write_rows

from residual_mass.spec.tasks import BENCHMARKS

sys.path.append(str(ROOT / "tools"))

from preloaded import forks  # noqa: E402

PAGE = (ROOT / "docs" / "extending.md").read_text()


@dataclasses.dataclass(frozen=True)
class Example:
    """A fenced block: the file that it is for, where in it ("at the end", "in place of X", "under X"), and its text."""

    language: str
    file: str
    where: str
    text: str


def examples(title: str) -> list[Example]:
    """The examples of a section."""
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    blocks = re.findall(r"^```(\w+)\n[#%] ([^\n]*)\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    return [Example(language, *place.partition(", ")[::2], text) for language, place, text in blocks]


def test_the_page_has_examples_for_everything_it_lists() -> None:
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert [len(examples(title)) for title in titles[:7]] == [1, 2, 3, 2, 1, 2, 4]
    assert len(examples("A figure")) == 2
    assert sum(len(examples(title)) for title in titles) == PAGE.count("\n```") / 2
    assert "(docs/extending.md)" in (ROOT / "README.md").read_text()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what examples change."""
    return copied(tmp_path / "copy")


def apply(copy: Path, title: str) -> None:
    for example in examples(title):
        if example.language == "bash":
            subprocess.run(["bash", "-euc", example.text], cwd=copy, check=True)
            continue
        path = copy / example.file
        before = path.read_text() if path.exists() else ""
        path.write_text(edited(before, example))


def edited(before: str, example: Example) -> str:
    if example.where.startswith("under "):
        content = yaml.safe_load(before)
        added, key = yaml.safe_load(example.text), example.where.removeprefix("under ")
        content[key] = content[key] + added if isinstance(added, list) else content[key] | added
        return yaml.safe_dump(content)
    if example.where.startswith("in place of "):
        name = example.where.removeprefix("in place of ")
        lines = re.findall(rf"^{name}(?:: | = ).*\n", before, re.MULTILINE)
        assert len(lines) == 1, f"{example.file} has {len(lines)} lines that set {name}"
        return before.replace(lines[0], example.text)
    assert example.where in ("", "at the end") and bool(example.where) == bool(before), example
    return before + example.text


def plan(copy: Path, *arguments: str) -> Run:
    run = dry_run(copy, *arguments, snakefile=copy / "Snakefile")
    assert run.code == 0, run.output
    return run


def test_a_backbone_and_a_study(copy: Path) -> None:
    apply(copy, "A backbone")
    (target,) = re.findall(r"`snakemake --cores 8 (results/ruler_smol360m_\S+)`", PAGE)
    run = plan(copy, target)
    assert {name: run.jobs[name] for name in ("train", "generate", "score")} == {"train": 1, "generate": 1, "score": 1}
    assert "SmolLM2-360M-Instruct" in str(run.commands)
    apply(copy, "A study")
    (command,) = re.findall(r"`snakemake --cores 8 (all --config study=\w+)`", PAGE)
    assert plan(copy, *command.split()).jobs["table"] >= 9
    assert yaml.safe_load((copy / "config/studies/dense.yaml").read_text())["budgets"] == [1, 4, 16]


LIBRARY = """
import sys
import torch
from residual_mass import partial_kv
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])

def logits(method, budget):
    with partial_kv(model, method=method, budget=budget):
        made = model.generate(torch.arange(2, 202)[None], max_new_tokens=3, min_new_tokens=3, do_sample=False,
                              return_dict_in_generate=True, output_logits=True)
    return torch.stack(made.logits)

for name in ("topk_copies", "newest_mean"):
    part = logits(name, 0.15)
    torch.testing.assert_close(logits(name, 1.0), logits("full", None))
    assert part.isfinite().all() and not torch.allclose(part, logits("topk", 0.15))
"""
"""The methods of the page in the library: exact where nothing is left unread, and not what top-K makes elsewhere."""


BACKEND = """
import torch
from residual_mass import backend_for, partial_generate
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.methods.arms import arm_of
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=2))
names = {name: backend_for(model, arm_of(name, 0.2)).name for name in ("topk", "topk_moments")}
assert names == {"topk": "slow", "topk_moments": "torch"}, names
steps, own = [], TorchBackend.step
TorchBackend.step = lambda self, call: steps.append(self.name) or own(self, call)
partial_generate(model, torch.arange(2, 82)[None], max_new_tokens=3, method="topk", budget=0.4)
assert steps == ["slow"] * 4, steps
"""
"""What serves a method, and computes its steps, with the backend of the page."""


def test_a_backend(copy: Path) -> None:
    apply(copy, "A backend")
    subprocess.run([sys.executable, "-c", BACKEND], env={**os.environ, "PYTHONPATH": str(copy / "src")}, check=True)


def test_an_estimator_and_a_task(copy: Path, tmp_path: Path) -> None:
    """Both together, on the small study, for what takes time is to start."""
    apply(copy, "A residual estimator")
    apply(copy, "A selector")
    apply(copy, "A task of a benchmark")
    added = copy / "src/residual_mass/benchmarks/examples/longbench_2wikimqa_2k.jsonl"
    shutil.copy(added, added.with_name("longbench_2wikimqa_1k.jsonl"))  # the length of the small study
    write_small_study(study := tmp_path / "study", copy)
    csv, table = "results/longbench_tiny_1k.csv", "paper_tables/mini/natural_main.tex"
    with forks(tmp_path, study / "src") as environment:
        run = snakemake(study, "--cores", "1", csv, table, snakefile=study / "Snakefile", **environment)
    assert run.code == 0 and "copies" in (study / table).read_text(), run.output
    rows = pd.read_csv(study / csv, dtype=str, na_filter=False)
    tasks = {"longbench_gov_report", "longbench_qmsum", "longbench_2wikimqa", "all"}
    assert {*rows.groupby(["task", "method"]).groups} == {*product(tasks, {*rows["method"]})}
    own = rows[rows["method"] == "topk_copies"]
    assert len(own) and own["gain_p"].all() and not own["maps"].any() and not own["phi_sha"].any()
    assert {*rows["metric"][rows["task"] == "longbench_2wikimqa"]} == {"qa_f1_score"}
    model = study / "results" / "assets" / "models" / "tiny-llama"
    in_library = {**os.environ, "PYTHONPATH": str(copy / "src")}
    subprocess.run([sys.executable, "-c", LIBRARY, str(model)], env=in_library, check=True)
    template = copy / "paper_tables" / "templates" / "natural_main.tex.j2"
    published = ["published", "--label", "natural_main", "--template", str(template), "--out", str(tmp_path / "out")]
    subprocess.run([sys.executable, "-m", "residual_mass", *published], env=in_library, check=True)
    assert "2WikiMQA" in (study / table).read_text() and "2WikiMQA" not in (tmp_path / "out").read_text()


def test_a_table(copy: Path) -> None:
    """Rendered by Snakemake out of results that are there, without a word in the study's file."""
    apply(copy, "A table")
    mini = yaml.safe_load((ROOT / "config" / "studies" / "mini.yaml").read_text())
    tasks = tuple(task.name for task in BENCHMARKS["ruler"])
    arms = [("full", None), *product(mini["methods"][1:], mini["budgets"])]
    (copy / "results").mkdir()
    for length, fitting in (("1k", tasks[:-1]), ("2k", tasks)):
        rows = [score_row(task, *arm, length=length) for task in (*fitting, "all") for arm in arms]
        best = score_row("ruler_vt", "topk", 4, length=length)
        rows = [row | {"value": 0.75} if row == best else row for row in rows]
        write_rows(copy / "results", "ruler", rows, length)
        of_texts = [
            (name, *text) for name in ("topk", "scan4") for text in (("wiki", 0.1), ("code", 0.3), ("books", 0.2))
        ]
        forced = [distance_row(name, 4, text=text, length=length, value=value) for name, text, value in of_texts]
        write_rows(copy / "results", "fidelity", forced, length)
    targets = ["paper_tables/mini/ruler_tasks.tex", "paper_tables/mini/median_kl.csv"]
    run = snakemake(copy, "--cores", "1", *targets, snakefile=copy / "Snakefile")
    assert run.code == 0, run.output
    lines = (copy / "paper_tables/mini/ruler_tasks.tex").read_text().splitlines()
    found = [line for line in lines if "0.750" in line]
    assert len(found) == 1 and found[0].count(r"\textbf") == 3 and "Top-$K$" in found[0]
    cells = pd.read_csv(copy / "paper_tables/mini/ruler_tasks.csv", dtype=str)
    assert len(cells) == len(tasks) * (1 + 3 * (len(mini["methods"]) - 1))
    medians = pd.read_csv(copy / "paper_tables/mini/median_kl.csv", dtype=str)
    assert medians["text"].tolist() == ["0.200"] * 4 and medians["n"].tolist() == ["3"] * 4
    assert "Study mini, backbone org/Small-LM." in (copy / "paper_tables/mini/median_kl.tex").read_text()


def test_a_figure(copy: Path) -> None:
    """Drawn by Snakemake out of errors that are there."""
    apply(copy, "A figure")
    change(copy, "mini", {"figures.step_bytes": {"backbone": "smol", "texts": ["wiki"], "lengths": ["1k"]}})
    (copy / "results").mkdir()
    rows = [error_row(name, budget, step_share=0.1 * budget) for name in ("topk", "scan4") for budget in (2, 4)]
    write_rows(copy / "results", "residual_errors", rows)
    target = "paper_tables/mini/figures/step_bytes.png"
    run = snakemake(copy, "--cores", "1", target, snakefile=copy / "Snakefile")
    assert run.code == 0 and (copy / target).stat().st_size > 10_000, run.output
