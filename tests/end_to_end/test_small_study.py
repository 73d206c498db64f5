"""The whole pipeline on a random two-layer Llama: rerun, killed job, damaged files. The first run's jobs are forks of a
process that has imported torch; all others are real processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from select import select
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import yaml
from tests.small_study import write_small_study

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from goldens import GOLDEN, golden_numbers  # noqa: E402
from preloaded import forks  # noqa: E402

STORE = "results/generations/_store/ruler_tiny_1k_main/all.jsonl"
GENERATIONS = "results/generations/ruler_tiny_1k_main/all.jsonl"
CSV = "results/ruler_tiny_1k.csv"
SILENCE = 600
"""Seconds without a line of Snakemake, which says when a job starts and ends; jobs take seconds where idle."""


def command(checkout: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "2", *arguments],
        cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def snakemake(checkout: Path, *arguments: str) -> tuple[int, str]:
    return ended(command(checkout, *arguments))


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and output of a run, however slow the machine; one that hangs is killed, and the test fails."""
    said = ""
    while chunk := os.read(process.stdout.fileno(), 65536) if select([process.stdout], [], [], SILENCE)[0] else None:
        said += chunk.decode(errors="replace")
    if chunk is None:
        jobs = [process, *psutil.Process(process.pid).children(recursive=True)]
        for job in jobs:
            job.kill()
        raise AssertionError(f"no job started or ended for {SILENCE} s:\n{said[-4000:]}")
    return process.wait(), said


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "check out"  # a blank in the path must not matter
    write_small_study(folder)
    return folder


@pytest.fixture(scope="module")
def study(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout after `snakemake all`."""
    with forks(tmp_path_factory.mktemp("forks"), checkout / "src") as environment:
        code, output = ended(command(checkout, "all", **environment))
    assert code == 0, output + "".join(log.read_text() for log in checkout.glob("logs/**/*.log"))[-4000:]
    assert "KL from full attention in nats (tiny, wiki at 1k, 4 % read exactly): topk " in output
    assert f"All results on one page: {checkout}/results/report.html" in output
    return checkout


def test_everything_is_made_and_a_second_run_does_nothing(study: Path) -> None:
    table = pd.read_csv(study / CSV)
    tasks = sorted(set(table.task) - {"all"})
    assert len(tasks) >= 10 and "ruler_qa_hotpot" not in tasks
    assert len(table) == (len(tasks) + 1) * 16
    assert set(table.n[table.task != "all"]) == {2} and set(table.study) == {"mini"}
    assert table.phi_sha.isna().sum() == (len(tasks) + 1) * 10  # full, and topk, moments and a scan x 3
    assert set(table.data) == {"original"} and not table["gain"][table.method.str.startswith("topk_phi")].isna().any()
    mismatch = pd.read_csv(study / "results/cross_length_mismatch_tiny.csv")
    assert list(mismatch[mismatch.task == "all"].maps.fillna("")) == ["", "", "1k", "512", "", ""]
    loss = pd.read_csv(study / "results/ablation_loss_tiny.csv").query("task == 'all'")
    assert list(zip(loss.benchmark, loss.maps.fillna(""), strict=True)) == [
        (benchmark, maps) for benchmark in ("ruler", "babilong") for maps in ("", "", "1k", "1k-kl_only", "", "")
    ]
    assert set(pd.read_csv(study / "results/babilong_tiny_1k.csv").data) == {"simulated"}
    longbench = pd.read_csv(study / "results/longbench_tiny_1k.csv")
    assert set(longbench.task) == {"longbench_gov_report", "longbench_qmsum", "all"}
    assert set(longbench.data) == {"stand-in"} and set(longbench.metric) == {"rouge_score"}
    labels = yaml.safe_load((study / "config/studies/mini.yaml").read_text())["tables"]
    assert len(labels) == 15
    for label in labels:
        assert (study / "paper_tables" / "mini" / f"{label}.tex").read_text().count("Tiny") >= 1
    others = (
        "fidelity",
        "fidelity_answers",
        "residual_estimators",
        "deployable",
        "exact_accounting",
        "phi_param_count",
        "training_cost_64k",
        "runtime_tiny",
    )
    for label in (label for label in labels if label not in others):
        cells = pd.read_csv(study / "paper_tables" / "mini" / f"{label}.csv", dtype={"text": str})
        shown = cells[cells.text != "--"]
        assert len(shown) and shown[["n", "ci_low", "ci_high", "source"]].notna().all(axis=None)
    for label in ("fidelity", "fidelity_answers"):
        cells = pd.read_csv(study / "paper_tables" / "mini" / f"{label}.csv")
        assert cells[["value", "ci_low", "ci_high"]].notna().all(axis=None) and set(cells.maps.dropna()) >= {"1k"}
    rendered = (study / "paper_tables" / "mini" / "ruler_sweep.tex").read_text()
    assert r"Tiny \& random\_Llama" in rendered
    compared = pd.read_csv(study / "paper_tables" / "mini" / "comparison.csv")
    assert len(compared) == 469 and set(compared.verdict) <= {"not run", "not comparable"}
    picture = pd.read_csv(study / "paper_tables" / "mini" / "comparison_picture.csv")
    assert picture.note[picture.ours.notna()].str.startswith("other backbone").all()
    counts = pd.read_csv(study / "paper_tables" / "mini" / "phi_param_count.csv")
    assert list(counts[counts.quantity == "params_per_head"].maps) == ["1k-dphi_4", "1k"]
    trained = pd.read_csv(study / "paper_tables" / "mini" / "training_cost_64k.csv").set_index("quantity")
    assert trained.value["steps"] == 6 and trained.value["teacher_passes"] == 1 and trained.value["wall_clock_h"] > 0
    assert trained.hardware.str.fullmatch(r".+, \d+ threads").all() and set(trained.processes) == {1}
    latencies = pd.read_csv(study / "paper_tables" / "mini" / "runtime_tiny.csv")
    latencies = latencies[latencies.source.notna()]  # the prototype has none of ours
    blocks = latencies[["implementation", "batch", "length"]].astype(str).drop_duplicates()
    of_fused = 5 * 2 * 2  # topk_moments, which the prototype does not have
    assert len(latencies) == 4 * 5 * len(blocks) + of_fused == 4 * 5 * 2 * 2 * 2 + of_fused
    assert (latencies.value > 0).mean() > 0.8
    figures = yaml.safe_load((study / "config/studies/mini.yaml").read_text())["figures"]
    for name in (f"{label}.{kind}" for label in figures for kind in ("pdf", "png")):
        assert (study / "paper_tables" / "mini" / "figures" / name).stat().st_size > 1000
    check_fidelity(study / "results")
    check_diagnostics(study / "results" / "diagnostics")
    code, output = snakemake(study, "all")
    assert code == 0 and "Nothing to be done" in output


def test_the_numbers_are_those_that_were_reviewed(study: Path) -> None:
    """Within ten times what ATEN_CPU_CAPABILITY=default changes, which adds up in another order than AVX-512."""
    places = ["file", "place", "number"]
    golden = pd.read_csv(GOLDEN / "numbers.csv")
    both = golden.merge(golden_numbers(study / "results"), "outer", places, suffixes=("", "_now"), indicator=True)
    least = np.where(both.file.str.startswith("fidelity"), 1e-8, 2e-6)  # some have six digits, others six decimals
    close = np.isclose(both.value, both.value_now, rtol=1e-3, atol=least, equal_nan=True)
    changed = both[~close | (both["_merge"] != "both")]
    assert changed.empty, f"{changed.to_string()}\nwhere this is meant: python tools/goldens.py --numbers"


def test_every_result_has_a_record_that_holds(study: Path) -> None:
    results = [path for path in (study / "results").rglob("*.*") if path.suffix in (".csv", ".parquet", ".safetensors")]
    results = [path for path in results if not {"assets", "_checkpoints"} & set(path.parts)]
    assert len(results) > 25
    for path in results:
        record = path.with_name(f"{path.name}.meta.json").read_text()
        assert str(study) not in record and str(Path.home()) not in record, path
    code, output = snakemake(study, "verify")
    assert code == 0 and re.search(r"(\d+) of \1 results are as recorded", output), output


def test_every_job_has_recorded_all_that_it_read(study: Path) -> None:
    """A stage compares those of its inputs with their records that it names in its own."""
    jobs = subprocess.run([sys.executable, "tools/jobs.py"], cwd=study, stdout=subprocess.PIPE, text=True, check=True)
    for job in json.loads(jobs.stdout):
        read = {path for path in job["input"] if path.startswith(("results/", "paper_tables/"))}
        records = [path for output in job["output"] if (path := study / f"{output}.meta.json").exists()]
        recorded = set().union(*(json.loads(path.read_text())["inputs"] for path in records))
        assert read <= recorded or job["rule"] == "assets", job


def check_fidelity(folder: Path) -> None:
    table = pd.read_csv(folder / "fidelity_tiny_1k.csv", na_filter=False).set_index("metric")
    means = table.loc["kl"].astype({"value": float})
    assert set(means.text) == {"wiki", "ruler", "babilong"} and means.value.between(0, 10).all()
    arm = ["method", "budget_percent", "maps"]
    everywhere = {
        place: set(rows[arm].itertuples(index=False, name=None))
        for place, rows in means[means.task == "all"].groupby(["text", "continuation", "state"])
    }
    scores = pd.read_csv(folder.parent / CSV, dtype=str, na_filter=False).query("method != 'full'")
    scored = set(scores[arm].itertuples(index=False, name=None))
    of_prompts = {(text, kind, "own"): scored for text in ("ruler", "babilong") for kind in ("gold", "greedy")}
    more = [("topk_moments_8", ""), ("topk_phi", "512")]  # the study's further methods, and maps of another length
    on_documents = scored | {(method, budget, maps) for method, maps in more for _, budget, _ in scored}
    assert everywhere == of_prompts | {
        ("wiki", "following", "dense"): scored, ("wiki", "following", "own"): on_documents,
    }  # fmt: skip
    assert set(means[means.text == "wiki"].documents) == {3} and set(means[means.text == "wiki"].tokens) == {15}
    assert set(means[means.text == "wiki"].maps) == {"", "1k", "512"} and "full" not in set(means.method)
    assert (table.loc["first"].query("method == 'full' and continuation == 'greedy'").value.astype(float) == 1).all()


def check_diagnostics(folder: Path) -> None:
    accounting = pd.read_csv(folder / "accounting_tiny.csv")
    assert list(accounting.corpus) == ["wiki"] * 3 + ["cwe"] * 3 and set(accounting.packs) == {2}
    assert (accounting.e_exact_sub < 1e-6).all() and set(accounting.study) == {"mini"}
    claims = pd.read_csv(folder / "claims_tiny.csv")
    assert set(claims.verdict) <= {"holds", "does not hold", "undecided"}
    assert list(claims[claims.claim == "exact_sub_is_exact"].verdict) == ["holds"]


@pytest.mark.slow
def test_a_killed_generate_job_continues_where_it_was(study: Path) -> None:
    undisturbed = (study / CSV).read_bytes()
    generations = (study / GENERATIONS).read_bytes()
    for path in (STORE, GENERATIONS, CSV):
        (study / path).unlink()

    process = command(study, CSV)
    while not ((study / STORE).exists() and (study / STORE).read_bytes().count(b"\n") >= 30):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.02)
    (job,) = [
        child for child in psutil.Process(process.pid).children(recursive=True) if "generate" in child.cmdline()[3:4]
    ]
    job.kill()
    code, output = ended(process)
    assert code != 0 and "generate" in output
    kept = (study / STORE).read_bytes()
    assert 0 < len(kept) < len(generations) and not (study / CSV).exists()

    code, output = snakemake(study, CSV)
    assert code == 0, output
    assert (study / STORE).read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert (study / STORE).read_bytes().count(b"\n") == generations.count(b"\n")
    assert (study / GENERATIONS).read_bytes() == generations
    assert (study / CSV).read_bytes() == undisturbed


def test_the_estimate_uses_the_rates_that_were_measured(study: Path) -> None:
    code, output = snakemake(study, "estimate", "--config", "examples=100")
    assert code == 0 and "no rate" not in output and "Left to do in study mini: nothing" in output, output
    (hours,) = re.findall(r"^results/generations/ruler_tiny_1k_main +1 +1 +(\S+)$", output, re.MULTILINE)
    assert float(hours) > 0


def test_the_readme_script_runs(study: Path) -> None:
    script = "".join(re.findall(r"```python\n(.*?)```", (study / "README.md").read_text(), re.DOTALL))
    script += "print(tokenizer.decode(output[0]))"
    script = script.replace("smollm2-135m-instruct", "tiny-llama").replace("smol_2k", "tiny_1k")
    run = subprocess.run([sys.executable, "-c", script], cwd=study, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stdout.strip(), run.stderr


def slow(*case: str) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        slow("results/phi/tiny_1k.safetensors", "is not what tiny_1k.safetensors.meta.json recorded"),
        (STORE, "all.jsonl:1: not a row of this store"),
        slow("results/assets/models/tiny-llama/model.safetensors", "damaged safetensors file"),
        slow("results/prompts/ruler_tiny_1k/niah_single_1.jsonl", "niah_single_1.jsonl"),
    ],
)
def test_a_damaged_input_is_named_in_one_line(study: Path, path: str, says: str) -> None:
    whole = (study / path).read_bytes()
    times = (study / path).stat()
    (study / path).write_bytes(b"{" + whole[: len(whole) // 2] + b"\n")
    try:
        code, output = snakemake(study, GENERATIONS, "--force", "--rerun-triggers", "mtime")
        log = (study / "logs" / "generate" / "ruler_tiny_1k_main" / "all.log").read_text()
    finally:
        (study / path).write_bytes(whole)
        os.utime(study / path, ns=(times.st_atime_ns, times.st_mtime_ns))
    errors = [line for line in log.splitlines() if "error:" in line]
    assert code != 0 and len(errors) == 1 and says in errors[0], output + log
    assert "Traceback" not in log


@pytest.mark.slow
def test_more_examples_keep_what_is_there(study: Path) -> None:
    before = (study / STORE).read_bytes()
    code, output = snakemake(study, CSV, "--config", "examples=3")
    assert code == 0, output
    after = (study / STORE).read_bytes()
    assert after.startswith(before) and after.count(b"\n") == before.count(b"\n") * 3 // 2
    assert set(pd.read_csv(study / CSV).query("task != 'all'").n) == {3}
