"""How long Snakemake's own jobs take, before the first of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT

EXPECT = """
import sys
from pathlib import Path
from snakemake.api import SnakemakeApi
from snakemake.settings.enums import Quietness
from snakemake.settings.types import DAGSettings, OutputSettings, ResourceSettings
from residual_mass.study.progress import Progress, tasks_of

snakefile, folder, cores, nodes = sys.argv[1:]
size = ResourceSettings(cores=int(cores), nodes=int(nodes) or None)
with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
    workflow = api.workflow(snakefile=Path(snakefile), workdir=Path(folder), resource_settings=size)
    workflow.dag(DAGSettings(targets={"all"})).execute_workflow(executor="dryrun")
    print("left:", *Progress(tasks_of(workflow._workflow, Path("results"))).seconds_left(0))
"""


def left(folder: Path, cores: int, nodes: int = 0) -> float:
    """Minutes of the mini study on an empty machine."""
    command = [sys.executable, "-c", EXPECT, str(ROOT / "Snakefile"), str(folder), str(cores), str(nodes)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("left: ")] or [run.stderr]
    _, seconds, unknown = line.split()
    assert unknown == "0"
    return float(seconds) / 60


def test_the_mini_study_takes_what_it_took(tmp_path: Path) -> None:
    """21 minutes without the installation on two cores; on one, twice as much; on many, its longest chain."""
    minutes = left(tmp_path, 2)
    assert 17 < minutes < 22
    assert left(tmp_path, 1) == pytest.approx(2 * minutes, rel=0.1)
    assert 6 < left(tmp_path, 2, nodes=64) < 12
