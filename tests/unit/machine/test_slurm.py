"""Problems of a run under SLURM, with commands that answer as SLURM 22.05 does; tests/cluster has the real ones."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import snakemake_executor_plugin_slurm as plugin

from residual_mass.machine import slurm

OTHERWISE = "echo 'sbatch: error: Batch job submission failed: Job violates accounting/QOS policy' >&2; exit 1"
NO_ACCOUNTS = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
REFUSED = (
    "case \"$*\" in *night*) echo 'sbatch: error: invalid partition specified: night' >&2;"
    " echo 'allocation failure: Invalid partition name specified' >&2; exit 1;; esac"
)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that there is to run: SLURM with accounting and a partition `gpu`."""
    monkeypatch.setenv("PATH", str(tmp_path))
    answers(tmp_path, sacct="", sbatch=REFUSED, scontrol=remembering(300), squeue="")
    return tmp_path


def answers(cluster: Path, **scripts: str) -> None:
    for name, script in scripts.items():
        (cluster / name).write_text(f"#!/bin/sh\n{script}\n")
        (cluster / name).chmod(0o755)


def remembering(seconds: int) -> str:
    return f"echo 'MessageTimeout          = 10 sec'; echo 'MinJobAge               = {seconds} sec'"


def test_a_cluster_with_accounting_lacks_nothing(cluster: Path) -> None:
    answers(cluster, scontrol=remembering(60))
    for asked in ("sacct", "squeue"):
        assert slurm.submission_problems(asked, [("gpu", "myproject"), ("", "")]) == []
    (cluster / "sbatch").unlink()
    (line,) = slurm.submission_problems("sacct", [("gpu", "")])
    assert line.startswith("no sbatch here: ")


def test_without_accounting_sacct_is_refused_and_so_is_an_account(cluster: Path) -> None:
    answers(cluster, sacct=NO_ACCOUNTS)
    assert slurm.submission_problems("squeue", [("gpu", "")]) == []
    (line,) = slurm.submission_problems("sacct", [("gpu", "")])
    assert line.startswith("sacct does not answer (Slurm accounting storage is disabled)") and "squeue" in line
    (line,) = slurm.submission_problems("squeue", [("gpu", "myproject")])
    assert line.startswith("slurm_account is myproject, but there are no accounts here: remove it from ")
    (cluster / "sacct").unlink()
    assert slurm.submission_problems("squeue", [("gpu", "")]) == []


@pytest.mark.parametrize(
    ("says", "when"), [(remembering(239), "after 239 s"), ("exit 1", "at a time that scontrol does not show")]
)
def test_jobs_that_would_be_forgotten_too_soon(says: str, when: str, cluster: Path) -> None:
    answers(cluster, sacct=NO_ACCOUNTS, scontrol=says)
    (line,) = slurm.submission_problems("squeue", [("gpu", "")])
    assert line.startswith(f"SLURM forgets finished jobs {when} (MinJobAge)") and "\n" not in line
    for enough in (240, 0):  # 0 is for ever
        answers(cluster, scontrol=remembering(enough))
        assert slurm.submission_problems("squeue", [("gpu", "")]) == []


def test_every_partition_that_is_refused_is_named_once(cluster: Path) -> None:
    (line,) = slurm.submission_problems("sacct", [("night", "a"), ("gpu", "a"), ("night", "a")])
    assert line.startswith("sbatch refuses partition 'night', account 'a' (allocation failure: Invalid partition name")
    assert line.endswith(f"edit {slurm.PROFILE}")


def test_what_the_trial_lacks_and_the_jobs_may_have_is_no_refusal(cluster: Path) -> None:
    answers(cluster, sbatch=OTHERWISE)
    assert slurm.submission_problems("sacct", [("gpu", "myproject")]) == []
    answers(cluster, sbatch="echo 'allocation failure: Invalid account or account/partition combination' >&2; exit 1")
    (line,) = slurm.submission_problems("sacct", [("gpu", "other")])
    assert line.startswith("sbatch refuses partition 'gpu', account 'other' (allocation failure: Invalid account")


def test_jobs_of_an_earlier_run_are_named(cluster: Path) -> None:
    here = Path("/data/my study|1")
    lines = [
        f"7|rule_generate_wildcards_ruler_1b_4k|{here}",
        f"8|(null)|{here}",  # the user's own, Snakemake itself perhaps
        "9|rule_train_wildcards_1b_4k|/data/another",
        f"12|rule_train_wildcards_1b_4k|{here}",
    ]
    answers(cluster, squeue="\n".join(f"echo '{line}'" for line in lines))
    (line,) = slurm.unfinished(here)
    assert "`squeue --jobs 7,12`" in line and "`scancel 7 12`" in line and "\n" not in line
    assert slurm.unfinished(Path("/data/third")) == []
    (cluster / "squeue").unlink()
    assert slurm.unfinished(here) == []


def test_cancelled_jobs_are_seen_in_the_words_of_sacct(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def states() -> dict[str, str] | None:
        return asyncio.run(plugin.query_job_status("sacct", logging.getLogger()))[0]

    monkeypatch.setattr(plugin, "query_job_status", plugin.query_job_status)
    answers(cluster, sacct="echo '11|CANCELLED by 1000'; echo '12_3|RUNNING'; echo '13|OUT_OF_MEMORY'")
    assert states()["11"] == "CANCELLED by 1000"  # once the plugin reads this, patch_slurm_plugin may go
    slurm.patch_slurm_plugin()
    assert states() == {"11": "CANCELLED", "12_3": "RUNNING", "13": "OUT_OF_MEMORY"}
    answers(cluster, sacct=NO_ACCOUNTS)
    assert states() is None
