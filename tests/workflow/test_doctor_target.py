"""What a machine lacks for a study, said by the target `doctor` and at the end of a dry run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from runs import snakemake

from residual_mass.machine import preflight

SECRET = "hf_" + "Kq7" * 11


GPU = "" if preflight.has_gpu() else "no NVIDIA GPU here for backbone 1b, 3b: run on a machine with one"


def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without SLURM, network or models, the token set."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in folder.glob("*") if folder.is_dir() else ():
            link = programs / program.name
            if program.name != "sbatch" and not link.is_symlink():
                link.symlink_to(program)
    home = str(tmp_path / "huggingface")
    return {
        "HF_TOKEN": SECRET,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": home,
        "PATH": f"{Path(sys.executable).parent}:{programs}",
    }


def test_it_works_on_a_bare_machine_and_keeps_the_token_to_itself(tmp_path: Path) -> None:
    """`snakemake` makes every import of torch fail."""
    run = snakemake(tmp_path, "--cores", "1", "doctor", **bare(tmp_path))
    assert run.code == 0, run.output
    said = re.findall(r"^(mini|paper): (.+)$", run.output, re.MULTILINE)
    of_paper = [line for study, line in said if study == "paper"]
    assert of_paper[0].startswith(GPU) and of_paper[-2].startswith("offline, and the cache of the hub lacks: ")
    assert of_paper[-1].endswith("jobs that train or decode, no rate measured here yet")
    assert (tmp_path / "logs" / "doctor.log").read_text().count("paper: ") == len(of_paper)
    assert not (tmp_path / "results").exists()
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not leaks and SECRET not in run.output


def test_a_dry_run_ends_with_what_is_missing_and_how_long_it_takes(tmp_path: Path) -> None:
    environment = bare(tmp_path) | {"HF_TOKEN": "", "HF_TOKEN_PATH": str(tmp_path / "none")}
    run = snakemake(tmp_path, "--dry-run", "all", "--config", "study=paper", **environment)
    last = run.output.splitlines()[-1]
    assert run.code == 0 and last.startswith(f"Before the first job: {GPU}"), last
    for backbone, model in (("1b", "1B"), ("3b", "3B")):
        assert f"backbone {backbone}: meta-llama/Llama-3.2-{model}-Instruct is neither public nor in" in last
    assert re.search(r"\. Time: \d+ jobs that train or decode, no rate measured here yet\.$", last), last
    run = snakemake(tmp_path, "--dry-run", "results/babilong_smol_1k.csv", **environment)
    last = run.output.splitlines()[-1]
    assert re.fullmatch(
        r"Before the first job: this machine lacks nothing\. Time: \d jobs that train or decode, no rate .*", last
    )


def test_a_refused_dry_run_says_why_and_no_more(tmp_path: Path) -> None:
    run = snakemake(tmp_path, "--dry-run", "results/ruler_9b_64k.csv")
    assert run.code == 1 and len(run.said) == 1 and "backbone '9b' is not in" in run.said[0]
