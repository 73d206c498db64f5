"""The whole pipeline on a random two-layer Llama, with a rerun and a damaged file. Jobs are forks of a process that has
imported torch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from select import select

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
LEFT_OUT = ("fidelity_tokens_ruler", "selection_recall", "entropy_gain", "entropy_heatmap", "quartile_error",
                   "fixedk_breakdown_smol", "fixedk_breakdown_smol_cwe", "fullsub_nosub_delta")  # fmt: skip
"""Figures that read the files that others read."""
SILENCE = 600
"""Seconds without a line of Snakemake, which says when a job starts and ends; jobs take seconds where idle."""


def snakemake(checkout: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of a run, however slow the machine; one that hangs is killed, and the test fails."""
    said = ""
    process = subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "2", *arguments], cwd=checkout,
        env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    while chunk := os.read(process.stdout.fileno(), 65536) if select([process.stdout], [], [], SILENCE)[0] else None:
        said += chunk.decode(errors="replace")
    if chunk is None:
        for job in (process, *psutil.Process(process.pid).children(recursive=True)):
            job.kill()
        raise AssertionError(f"no job started or ended for {SILENCE} s:\n{said[-4000:]}")
    return process.wait(), said


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "check out"  # a blank in the path must not matter
    write_small_study(folder)
    study = folder / "config/studies/mini.yaml"
    protocol = yaml.safe_load(study.read_text())
    protocol["figures"] = {label: of for label, of in protocol["figures"].items() if label not in LEFT_OUT}
    study.write_text(yaml.safe_dump(protocol))
    return folder


@pytest.fixture(scope="module")
def forked(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which jobs are forks."""
    with forks(tmp_path_factory.mktemp("forks"), checkout / "src") as environment:
        yield environment


@pytest.fixture(scope="module")
def study(checkout: Path, forked: dict[str, str]) -> Path:
    """The checkout after `snakemake all`."""
    code, output = snakemake(checkout, "all", **forked)
    assert code == 0, output + "".join(log.read_text() for log in checkout.glob("logs/**/*.log"))[-4000:]
    lines = re.findall(r"^(\d+) of (\d+) jobs done, .* left.*; running: (.+)$", output, re.MULTILINE)
    assert len(lines) >= 3 and lines[0][0] == "0" and len({total for _, total, _ in lines}) == 1, output
    (kl,) = re.findall(r"KL from full attention in nats \(tiny, wiki at 1k, 2 % read exactly\): topk ([0-9.]+)", output)
    page = (checkout / "results" / "report.html").read_text(encoding="utf-8")
    assert "With 2% of the prompt read exactly" in page and f"</i> {kl} (" in page
    assert f"All results on one page: {checkout}/results/report.html" in output
    return checkout


def test_everything_is_made(study: Path) -> None:
    results, tables = study / "results", study / "paper_tables" / "mini"
    table = pd.read_csv(study / CSV)
    tasks = sorted(set(table.task) - {"all"})
    assert len(tasks) >= 10 and "ruler_qa_hotpot" not in tasks
    assert len(table) == (len(tasks) + 1) * 11 and set(table.n[table.task != "all"]) == {2}
    mismatch = pd.read_csv(results / "cross_length_mismatch_tiny.csv")
    assert list(mismatch[mismatch.task == "all"].maps.fillna("")) == ["", "", "1k", "512", "", ""]
    loss = pd.read_csv(results / "ablation_loss_tiny.csv").query("task == 'all'")
    assert list(zip(loss.benchmark, loss.maps.fillna(""), strict=True)) == [
        (benchmark, maps) for benchmark in ("ruler", "babilong") for maps in ("", "", "1k", "1k-kl_only", "", "")
    ]
    longbench = pd.read_csv(results / "longbench_tiny_1k.csv")
    assert set(longbench.task) == {"longbench_gov_report", "longbench_qmsum", "all"}
    claims = pd.read_csv(results / "diagnostics/claims_tiny.csv").set_index("claim")
    assert set(claims.verdict) <= {"holds", "does not hold", "undecided"}
    assert claims.verdict["exact_sub_is_exact"] == "holds"
    protocol = yaml.safe_load((study / "config/studies/mini.yaml").read_text())
    assert len(protocol["tables"]) == 15
    for label in protocol["tables"]:
        assert "Tiny" in (tables / f"{label}.tex").read_text()
        cells = pd.read_csv(tables / f"{label}.csv", dtype={"text": str})
        assert len(cells[cells.text != "--"]) and cells.text.notna().all()
    assert r"Tiny \& random\_Llama" in (tables / "ruler_sweep.tex").read_text()
    compared = pd.read_csv(tables / "comparison.csv")
    assert len(compared) == 469 and set(compared.verdict) <= {"not run", "not comparable"}
    trained = pd.read_csv(tables / "training_cost_64k.csv").set_index("quantity").value
    assert trained["steps"] == 6 and trained["teacher_passes"] == 1 and trained["wall_clock_h"] > 0
    latencies = pd.read_csv(tables / "runtime_tiny.csv")
    assert (latencies[latencies.source.notna()].value > 0).mean() > 0.8  # the prototype has no moments
    for name in (f"{label}.{kind}" for label in protocol["figures"] for kind in ("pdf", "png")):
        assert (tables / "figures" / name).stat().st_size > 1000


def test_the_numbers_are_those_that_were_reviewed(study: Path) -> None:
    """Within ten times what ATEN_CPU_CAPABILITY=default changes, which adds up in another order than AVX-512."""
    places = ["file", "place", "number"]
    golden = pd.read_csv(GOLDEN / "numbers.csv")
    both = golden.merge(golden_numbers(study / "results"), "outer", places, suffixes=("", "_now"), indicator=True)
    least = np.where(both.file.str.startswith("fidelity"), 1e-8, 2e-6)  # some have six digits, others six decimals
    close = np.isclose(both.value, both.value_now, rtol=1e-3, atol=least, equal_nan=True)
    changed = both[~close | (both["_merge"] != "both")]
    assert changed.empty, f"{changed.to_string()}\nwhere this is meant: python tools/goldens.py --numbers"


def test_every_result_has_a_record_that_holds_and_a_second_run_makes_nothing(study: Path) -> None:
    results = [path for path in (study / "results").rglob("*.*") if path.suffix in (".csv", ".parquet", ".safetensors")]
    results = [path for path in results if not {"assets", "_checkpoints"} & set(path.parts)]
    assert len(results) > 25
    for path in results:
        record = path.with_name(f"{path.name}.meta.json").read_text()
        assert str(study) not in record and str(Path.home()) not in record, path
    code, output = snakemake(study, "all", "verify")
    assert code == 0 and re.search(r"(\d+) of \1 results are as recorded", output), output
    assert re.search(r"^total +1$", output, re.MULTILINE), f"more than verify ran\n{output}"


def test_a_dry_run_with_nothing_left_to_do_says_what_was_found(study: Path) -> None:
    code, output = snakemake(study, "all", "--dry-run")
    assert code == 0 and "KL from full attention in nats (tiny, wiki at 1k, 2 % read exactly): topk " in output


def test_snakemakes_report_has_the_results_in_one_file(study: Path) -> None:
    code, output = snakemake(study, "all", "--report", "results/snakemake.html")
    assert code == 0 and "Report created" in output, output
    page = (study / "results" / "snakemake.html").read_text()
    for name in ("ruler_sweep.tex", "fidelity.png", "comparison.csv", "claims_tiny.csv", "training_tiny_1k.csv"):
        assert f'"name": "{name}"' in page, name


def test_every_job_has_recorded_all_that_it_read(study: Path) -> None:
    """A stage compares those of its inputs with their records that it names in its own."""
    jobs = subprocess.run([sys.executable, "tools/jobs.py"], cwd=study, stdout=subprocess.PIPE, text=True, check=True)
    for job in json.loads(jobs.stdout):
        read = {path for path in job["input"] if path.startswith(("results/", "paper_tables/"))}
        records = [path for output in job["output"] if (path := study / f"{output}.meta.json").exists()]
        recorded = set().union(*(json.loads(path.read_text())["inputs"] for path in records))
        assert read <= recorded or job["rule"] == "assets", job


def test_the_estimate_uses_the_rates_that_were_measured(study: Path) -> None:
    code, output = snakemake(study, "estimate", "--config", "examples=100")
    assert code == 0 and "no rate" not in output and "Left to do: nothing" in output, output
    (hours,) = re.findall(r"^results/generations/ruler_tiny_1k_main +1 +1 +(\S+)$", output, re.MULTILINE)
    assert float(hours) > 0


def test_the_readme_script_runs(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "".join(re.findall(r"```python\n(.*?)```", (study / "README.md").read_text(), re.DOTALL))
    script = script.replace("smollm2-135m-instruct", "tiny-llama").replace("smol_2k", "tiny_1k")
    monkeypatch.chdir(study)
    exec(script + "print(tokenizer.decode(output[0]))", {})
    assert capsys.readouterr().out.strip()


def test_a_damaged_input_is_named_in_one_line(study: Path, forked: dict[str, str]) -> None:
    whole, times = (study / STORE).read_bytes(), (study / STORE).stat()
    (study / STORE).write_bytes(b"{" + whole[: len(whole) // 2] + b"\n")
    code, output = snakemake(study, GENERATIONS, "--force", "--rerun-triggers", "mtime", **forked)
    log = (study / "logs" / "generate" / "ruler_tiny_1k_main" / "all.log").read_text()
    (study / STORE).write_bytes(whole)
    os.utime(study / STORE, ns=(times.st_atime_ns, times.st_mtime_ns))
    errors = [line for line in log.splitlines() if "error:" in line]
    assert code != 0 and len(errors) == 1 and "all.jsonl:1: not a row of this store" in errors[0], output + log
    assert "Traceback" not in log


def test_the_minutes_left_are_silenced_with_the_rest(study: Path, forked: dict[str, str]) -> None:
    for quiet, said in (("rules", True), ("progress", False), ("all", False)):
        code, output = snakemake(study, "paper_tables/mini/comparison.csv", "--force", "--quiet", quiet, **forked)
        assert code == 0 and ("0 of 1 jobs done, about 1 minute left; running: comparison" in output) == said, output


@pytest.mark.slow
def test_more_examples_keep_what_is_there(study: Path) -> None:
    before = (study / STORE).read_bytes()
    code, output = snakemake(study, CSV, "--config", "examples=3")
    assert code == 0, output
    after = (study / STORE).read_bytes()
    assert after.startswith(before) and after.count(b"\n") == before.count(b"\n") * 3 // 2
    assert set(pd.read_csv(study / CSV).query("task != 'all'").n) == {3}
