"""Targets that only look run while other jobs still work here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runs import snakemake

from residual_mass.files import write_json
from residual_mass.provenance import Record


def test_they_run_beside_other_jobs(tmp_path: Path) -> None:
    write_json(result := tmp_path / "results" / "phi" / "left.safetensors", {})
    Record("prompts", {}, []).write(result)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "squeue").write_text(f"#!/bin/sh\necho '7|rule_train_smol_2k|{tmp_path}'\n")
    (programs / "squeue").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    run = snakemake(tmp_path, "--cores", "1", "verify", PATH=path)
    assert run.code == 1 and "0 of 1 results are as recorded" in run.output, run.output  # of an earlier recipe
    run = snakemake(tmp_path, "--cores", "1", "results/phi/smol_2k.safetensors", PATH=path)
    assert run.code == 1 and "jobs of an earlier run still work in this folder" in run.said[-1], run.output
