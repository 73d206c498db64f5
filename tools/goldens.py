"""Writes the files of tests/golden/; read the difference before committing it.

python tools/goldens.py                      jobs_{study}.txt: inputs, outputs and spec of every job of each study
python tools/goldens.py --numbers [STUDY]    numbers.csv as well, from a finished tiny study, or from a new run of it
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from preloaded import forks

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
QUANTITIES = {
    "ruler_tiny_1k.csv": ("task == 'all'", "method budget_percent", "value k_mean"),
    "babilong_tiny_1k.csv": ("task == 'all'", "method budget_percent", "value k_mean"),
    "longbench_tiny_1k.csv": ("task == 'all'", "method budget_percent", "value k_mean"),
    "fidelity_tiny_1k.csv": (
        "task == 'all' and metric in ('kl', 'nll')",
        "text continuation state method budget_percent maps metric",
        "value",
    ),
    "residual_errors_tiny_1k.csv": ("budget_percent in (2, 8)", "method budget_percent", "error recall state_share"),
    "training_tiny_1k.csv": ("layer == 'all'", "corpus step k", "e_topk e_sub e_nosub kl log_z_error"),
    "training_tiny_1k-variants.csv": ("layer == 'all' and step == 6", "variant corpus k", "e_sub kl"),
    "diagnostics/accounting_tiny.csv": ("", "corpus budget_percent", "e_topk e_sub e_nosub e_exact_nosub log_z_error"),
}  # fmt: skip
"""By result of the tiny study: a query for rows, the columns that name them, and the columns that are compared."""
LONG = 60
"""Longer values of a spec are written once for all jobs of a rule."""


def studies() -> list[str]:
    return sorted(path.stem for path in (ROOT / "config" / "studies").glob("*.yaml"))


def golden_jobs(study: str) -> str:
    """Returns a block for each rule: flags, values that all of its jobs share (=), long values (@), and the jobs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "tools" / "jobs.py", "--directory", folder, "--config", f"study={study}"]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        jobs = json.loads(printed.replace(f"{os.path.relpath(ROOT, folder)}/", ""))
    blocks = [block(rule, list(group)) for rule, group in groupby(jobs, key=lambda job: job["rule"])]
    return "\n".join(blocks)


def block(rule: str, jobs: list[dict[str, Any]]) -> str:
    specs = [json.loads(job["params"].get("spec", "{}")) for job in jobs]
    shared = {key: value for key, value in specs[0].items() if all(spec.get(key, spec) == value for spec in specs)}
    own = [{key: written(value) for key, value in spec.items() if key not in shared} for spec in specs]
    long = sorted({value for spec in own for value in spec.values() if len(value) > LONG})
    lines = [f"{rule} ({len(jobs)})", *sorted({f"  $ {flags(job['shell'])}" for job in jobs})]
    lines += [f"  = {key}: {written(shared[key])}" for key in sorted(shared)]
    lines += [f"  @{number} {value}" for number, value in enumerate(long)]
    for job, spec in zip(jobs, own, strict=True):
        lines += [f"  {' '.join(job['output'])}"] + [f"    < {path}" for path in runs(job["input"])]
        pairs = [f"{key}: {f'@{long.index(value)}' if value in long else value}" for key, value in sorted(spec.items())]
        lines += [f"    = {', '.join(pairs)}"] if pairs else []
    return "\n".join(lines) + "\n"


def written(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def flags(shell: str) -> str:
    """Returns the stage and its flags, without values and without a launcher for several GPUs."""
    stage = re.search(r"-m residual_mass (\S+)(.*)", shell, re.DOTALL)
    return " ".join([stage[1], *(word for word in shlex.split(stage[2]) if word.startswith("--"))]) if stage else shell


def runs(paths: list[str]) -> list[str]:
    """Returns lines of paths in order: one line per folder, or a single line if there are at most six."""
    lines = [" ".join(group) for _, group in groupby(dict.fromkeys(paths), key=os.path.dirname)]
    return lines if len(lines) > 6 else [" ".join(lines)] * bool(lines)


def golden_numbers(results: Path) -> pd.DataFrame:
    """Returns one row for each number of QUANTITIES, from the results/ of the tiny study."""
    parts = []
    for name, (rows, places, numbers) in QUANTITIES.items():
        table = pd.read_csv(results / name, dtype={"budget_percent": float, "maps": str, "layer": str})
        table = table.query(rows) if rows else table
        place = table[places.split()].astype(object).fillna("-").astype(str).agg(" ".join, axis=1)
        parts += [pd.DataFrame({"file": name, "place": place, "number": column, "value": table[column].astype(float)})
                  for column in numbers.split()]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def run_tiny(made: Path) -> None:
    """Runs the tiny study in a copy of the checkout, with stages as forks.

    Raises:
        SystemExit: a job failed; the message has the end of Snakemake's output and of the logs.
    """
    write = "import sys; from pathlib import Path; from tests.small_study import write_small_study as write"
    path = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-P", "-c", f"{write}; write(Path(sys.argv[1]))", str(made)], env=path, check=True)
    study = made / "config" / "studies" / "mini.yaml"
    protocol = yaml.safe_load(study.read_text())
    protocol["runtime"] |= {"contexts": ["512"], "batches": [1]}  # few, because times are not compared
    study.write_text(yaml.safe_dump(protocol))
    places = ["--snakefile", str(made / "Snakefile"), "--directory", str(made)]
    with tempfile.TemporaryDirectory() as folder, forks(Path(folder), made / "src") as environment:
        run = subprocess.run(
            [sys.executable, "-m", "snakemake", *places, "--cores", "2", "--show-failed-logs", "all"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if run.returncode:
        sys.exit(f"{run.stdout[-6000:]}\nthe tiny study ended with {run.returncode}")


def main() -> None:
    for study in studies():
        path = GOLDEN / f"jobs_{study}.txt"
        path.write_text(golden_jobs(study), encoding="utf-8")
        print(path.relative_to(ROOT))
    if sys.argv[1:2] == ["--numbers"]:
        with tempfile.TemporaryDirectory() as folder:
            finished = Path(*sys.argv[2:] or [folder, "made"])
            if not sys.argv[2:]:
                run_tiny(finished)
            golden_numbers(finished / "results").to_csv(GOLDEN / "numbers.csv", index=False)


if __name__ == "__main__":
    main()
