"""Targets that only look: whatever earlier configurations left, and while other jobs still work here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runs import snakemake

from residual_mass.files import read_json, write_json
from residual_mass.provenance import Record

LEFT = {
    "results/prompts/ruler_renamed_1k/manifest.json": "tokenizer 'renamed' is not in ",
    "results/prompts/dropped_smollm2_1k/manifest.json": "benchmark 'dropped' is not in ",
    "results/prompts/ruler_smollm2_7k/manifest.json": "length '7k' is not in ",
    "results/phi/renamed_1k.safetensors": "backbone 'renamed' is not in ",
    "results/dropped_smol_1k.csv": "benchmark 'dropped' is not in ",
    "results/compared/dropped/ruler_smol_1k.csv": "comparison 'dropped' is not in ",
    "results/ablation_dropped_smol.csv": "ablation 'dropped' is not in ",
    "results/diagnostics/heads_smol_dropped_1k.parquet": "corpus 'dropped' is not in ",
    "results/diagnostics/kernels_smol_dropped_1k.parquet": "corpus 'dropped' is not in ",
    "results/diagnostics/claims_renamed.csv": "backbone 'renamed' is not in ",
    "results/runtime_renamed.csv": "backbone 'renamed' is not in ",
}
"""Results of what the configuration no longer has, and why no job makes them."""


def test_they_run_beside_other_jobs_and_leftovers_are_stale(tmp_path: Path) -> None:
    for path in map(tmp_path.joinpath, LEFT):
        write_json(path, {})
        Record("prompts", {}, []).write(path)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "squeue").write_text(f"#!/bin/sh\necho '7|rule_train_smol_2k|{tmp_path}'\n")
    (programs / "squeue").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    run = snakemake(tmp_path, "--cores", "1", "verify", PATH=path)
    expected = read_json(tmp_path / "logs" / "verify.json")
    assert f"{len(LEFT)} stale\n" in run.output, run.output
    assert [name for name, why in LEFT.items() if not expected[name]["refused"].startswith(why)] == [], expected
    run = snakemake(tmp_path, "--cores", "1", "results/phi/smol_2k.safetensors", PATH=path)
    assert run.code == 1 and "jobs of an earlier run still work in this folder" in run.said[-1], run.output
