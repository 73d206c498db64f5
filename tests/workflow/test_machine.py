"""What a machine lacks for a study: messages of the preflight, and of the targets and runs that use it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import NO_ACCESS, before_others, programs, snakemake

from residual_mass.files import write_json
from residual_mass.machine import preflight
from residual_mass.provenance import Record
from residual_mass.spec.specs import BackboneSpec

SECRET = "hf_" + "Kq7" * 11
LOCAL = BackboneSpec("mini", "org/Small-LM", "r1", "assets", "float32", "t", 2048, False, name="smol")
HUB = BackboneSpec("paper", "org/Big-LM", "0" * 40, "hub", "float32", "t", 2048, False, name="big")
ON_GPU = dataclasses.replace(LOCAL, name="fast", requires_gpu=True)
NO_GPU = "" if preflight.has_gpu() else "no NVIDIA GPU here for backbone 1b, 3b: run on a machine with one"
NO_MODEL = "backbone {}: meta-llama/Llama-3.2-{}-Instruct is neither public nor in the Hugging Face cache"

# ---- the preflight ---------------------------------------------------------------------------------------------------


def said_about_hub(home: Path, **environment: str) -> str:
    """Lines of a fresh process, for the hub's library reads its settings when it is imported."""
    code = (
        "from pathlib import Path; from residual_mass.machine import preflight;"
        "from residual_mass.spec.specs import BackboneSpec;"
        f"print(*preflight.backbone_problems([{HUB!r}], Path('assets')), sep='\\n')"
    )
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    source = str(Path(preflight.__file__).parents[2])
    clean = {**inherited, "HF_HOME": str(home), "PYTHONPATH": source, **environment}
    return subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True).stdout


def test_a_hub_model_needs_a_token_or_its_cached_weights(tmp_path: Path) -> None:
    line = said_about_hub(tmp_path)
    assert line.startswith("backbone big: org/Big-LM is neither public nor in the Hugging Face cache")
    assert line.count("\n") == 1 and said_about_hub(tmp_path, HF_TOKEN="hf_something") == "\n"
    snapshot = tmp_path / "hub" / "models--org--Big-LM" / "snapshots" / HUB.revision
    snapshot.mkdir(parents=True)
    for name, said in (("config.json", line), ("model.safetensors", "\n")):
        (snapshot / name).write_text("{}")
        assert said_about_hub(tmp_path) == said


@pytest.mark.parametrize("tool", ["nvidia-smi", "sbatch"])
def test_a_backbone_that_requires_a_gpu(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(preflight.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))  # no device files, whatever runs this test
    assert preflight.backbone_problems([LOCAL], tmp_path) == []
    (line,) = preflight.backbone_problems([LOCAL, ON_GPU], tmp_path)
    assert line.startswith("no NVIDIA GPU here for backbone fast:")
    programs(tmp_path / "bin", **{tool: ""})
    assert preflight.backbone_problems([LOCAL, ON_GPU], tmp_path) == []
    alone = preflight.backbone_problems([LOCAL, ON_GPU], tmp_path, submits=False)
    assert alone == ([] if tool == "nvidia-smi" else [line])  # SLURM is there, but Snakemake was not told to use it
    monkeypatch.setattr(preflight.metadata, "version", lambda name: "2.13.0+cpu")
    assert preflight.backbone_problems([LOCAL], tmp_path) == []
    (line,) = preflight.backbone_problems([LOCAL, ON_GPU], tmp_path)
    assert line.startswith("torch 2.13.0+cpu is built for CPUs, and backbone fast needs") and "TORCH_INDEX=" in line


def test_a_gguf_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    spec = dataclasses.replace(LOCAL, source="gguf", model_id=str(file), revision="0" * 64)
    for name in (str(file), "/a.gguf", "/nowhere/a.gguf", "a.gguf", "a/b.gguf", "a/b/c/d.gguf"):
        (line,) = preflight.backbone_problems([dataclasses.replace(spec, model_id=name)], tmp_path)
        assert line == f"backbone smol: no file {name}: correct model_id, or put the file there"
    file.write_bytes(b"")
    assert preflight.backbone_problems([spec], tmp_path) == []


def test_a_model_that_the_assets_lack_is_named_once_they_are_there(tmp_path: Path) -> None:
    assert preflight.backbone_problems([LOCAL], tmp_path) == []
    (tmp_path / "manifest.json").write_text("{}")
    (line,) = preflight.backbone_problems([LOCAL], tmp_path)
    assert line.startswith(f"backbone smol: no model in {tmp_path}/models/small-lm:")
    (tmp_path / "models" / "small-lm").mkdir(parents=True)
    (tmp_path / "models" / "small-lm" / "config.json").write_text("{}")
    assert preflight.backbone_problems([LOCAL], tmp_path) == []


# ---- what a run says of it -------------------------------------------------------------------------------------------


def bare(tmp_path: Path) -> str:
    """PATH of this machine without SLURM."""
    folders = [folder for folder in map(Path, os.environ["PATH"].split(os.pathsep)) if folder.is_dir()]
    found = {program.name for folder in folders for program in folder.glob("*") if os.access(program, os.X_OK)}
    return programs(tmp_path / "programs", *found - {"sbatch"})


def test_a_dry_run_ends_with_what_is_missing_and_how_long_it_takes(tmp_path: Path) -> None:
    """And keeps the token to itself. `snakemake` makes every import of torch fail."""
    path = bare(tmp_path)
    run = snakemake(tmp_path, "--dry-run", "all", "--config", "study=paper", PATH=path, HF_HUB_OFFLINE="1", **NO_ACCESS)
    last = run.output.splitlines()[-1]
    assert run.code == 0 and last.startswith(f"Before the first job: {NO_GPU}"), last
    assert NO_MODEL.format("1b", "1B") in last and NO_MODEL.format("3b", "3B") in last
    assert re.search(r"\. Time: \d+ jobs that train or decode, no rate measured here yet\.$", last), last
    offline = {"HF_TOKEN": SECRET, "HF_HOME": str(tmp_path / "huggingface")}
    run = snakemake(tmp_path, "--dry-run", "all", "--config", "study=paper", "offline=true", PATH=path, **offline)
    last = run.output.splitlines()[-1]
    assert run.code == 0 and "; offline, and the cache of the hub lacks: " in last
    assert not (tmp_path / "results").exists()
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not leaks and SECRET not in run.output
    last = snakemake(tmp_path, "--dry-run", "results/babilong_smol_1k.csv", PATH=path).output.splitlines()[-1]
    assert re.fullmatch(r"Before .*: this machine lacks nothing\. Time: \d jobs that train or decode, no rate .*", last)


@pytest.mark.parametrize("lost", ["heads", "mass", None])
def test_a_run_without_the_model_ends_before_its_first_job(lost: str | None, tmp_path: Path) -> None:
    """And leaves nothing that blocks the next run; of a capture a part may be lost."""
    target, parts = "results/ruler_1b_64k.csv", {"heads", "mass"}
    if lost:
        target = f"results/diagnostics/{lost}_1b_wikitext_64k.parquet"
        captured = [f"diagnostics/{name}_1b_wikitext_64k.parquet" for name in parts - {lost}]
        for path in ("assets/manifest.json", "phi/1b_64k.safetensors", *captured):
            (tmp_path / "results" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "results" / path).write_text("{}")
    there = {path for path in tmp_path.rglob("*") if path.is_file()}
    run = snakemake(tmp_path, "--cores", "2", target, **NO_ACCESS)
    line = run.output.splitlines()[-1]
    assert run.code == 1 and NO_MODEL.format("1b", "1B") in line and "HF_TOKEN" in line and "3b" not in line
    assert "Traceback" not in run.output and ("no NVIDIA GPU" in line) == (
        not preflight.has_gpu()
    )  # SLURM is not asked
    made = {path for name in ("results", "logs") for path in (tmp_path / name).rglob("*") if path.is_file()}
    assert made <= there and not list((tmp_path / ".snakemake").glob("locks/*"))


def test_a_pdf_without_latex_ends_before_the_first_job(tmp_path: Path) -> None:
    """Whatever else is asked for; and only where a PDF is to be made."""
    path = programs(tmp_path / "bin", "bash", "sh", "which")
    run = snakemake(tmp_path, "--cores", "1", "published", "pdf", PATH=path)
    assert run.code == 1 and "Traceback" not in run.output
    assert run.output.splitlines()[-1] == (
        "no LaTeX on PATH (pdflatex or tectonic); install one, on Debian `apt install texlive-latex-extra`"
    )
    assert not [path for name in ("results", "logs", "paper_tables") for path in (tmp_path / name).rglob("*.*")]
    table = "paper_tables/published/ruler_sweep.tex"
    run = snakemake(tmp_path, "--cores", "1", table, PATH=path)
    assert run.code == 0 and (tmp_path / table).is_file(), run.output


def test_an_input_from_the_future_is_told_where_a_job_reads_it(tmp_path: Path) -> None:
    """As after a clock was set back: Snakemake would throw away what is made of it."""
    write_json(manifest := tmp_path / "results" / "assets" / "manifest.json", {})
    os.utime(manifest, (later := time.time() + 86_400, later))
    run = snakemake(tmp_path, "--cores", "1", "results/phi/smol_2k.safetensors")
    assert run.code == 1 and "; results/assets/manifest.json: modified in the future (" in run.said[-1], run.output
    os.utime(manifest)
    assert preflight.with_future_mtimes([manifest, tmp_path / "none"]) == []


def test_targets_that_only_look_run_beside_other_jobs(tmp_path: Path) -> None:
    write_json(result := tmp_path / "results" / "phi" / "left.safetensors", {})
    Record("prompts", {}, []).write(result)
    path = before_others(programs(tmp_path / "programs", squeue=f"echo '7|rule_train_smol_2k|{tmp_path}'"))
    run = snakemake(tmp_path, "--cores", "1", "verify", PATH=path)
    assert run.code == 1 and "0 of 1 results are as recorded" in run.output, run.output  # of an earlier recipe
    run = snakemake(tmp_path, "--cores", "1", "results/phi/smol_2k.safetensors", PATH=path)
    assert run.code == 1 and "jobs of an earlier run still work in this folder" in run.said[-1], run.output
