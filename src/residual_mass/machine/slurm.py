"""Checks that SLURM accepts and reports jobs, before the first one; imports no torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from getpass import getuser
from pathlib import Path
from typing import Any

PROFILE = "workflow/profiles/slurm/config.yaml"
MIN_JOB_AGE_S = 240
"""Seconds for which SLURM must remember a finished job (MinJobAge) if there is only squeue: Snakemake asks at least
every 180 s, and waits forever for a job that was forgotten before.
"""


def submission_problems(status_command: str | None, sites: Iterable[tuple[str, str]]) -> list[str]:
    """Returns one line per problem, with its remedy; empty if jobs can be submitted and watched.

    Args:
        status_command: command that Snakemake uses to ask for its jobs, sacct or squeue.
        sites: partition and account of the jobs, each "" if not given.
    """
    if shutil.which("sbatch") is None:
        return ["no sbatch here: run on a machine that submits to SLURM, or without the profile slurm"]
    accounting = _run("sacct", "--noheader", "--starttime", "now")  # fails without accounting
    lines = []
    if accounting.returncode and status_command == "sacct":
        message = accounting.stderr.strip() or "no message"
        reason = message.splitlines()[-1]
        remedy = f"set slurm-status-command: squeue, as {PROFILE} does by itself"
        lines.append(f"sacct does not answer ({reason}), and Snakemake would wait for its jobs forever: {remedy}")
    if accounting.returncode and status_command == "squeue":
        lines += _forgets()
    for partition, account in sorted(set(sites)):
        if account and accounting.returncode:
            lines.append(f"slurm_account is {account}, but there are no accounts here: remove it from {PROFILE}")
            continue
        refusal = _refusal(partition, account)
        if refusal:
            lines.append(f"sbatch refuses partition {partition!r}, account {account!r} ({refusal}): edit {PROFILE}")
    return lines


def unfinished(folder: Path) -> list[str]:
    """Returns one line if jobs of an earlier run from `folder` still exist, which would write the same files."""
    run = _run("squeue", "--noheader", "--user", getuser(), "--format", "%i|%k|%Z")
    ids = []
    for line in run.stdout.splitlines():
        if line.count("|") >= 2:
            number, comment, where = line.split("|", 2)
            if comment.startswith("rule_") and Path(where) == folder:
                ids.append(number)
    if not ids:
        return []
    wait = f"wait until `squeue --jobs {','.join(ids)}` shows none"
    stop = f"stop them with `scancel {' '.join(ids)}`"
    return [f"jobs of an earlier run still work in this folder: {wait}, or {stop}; what they finish is kept"]


def patch_slurm_plugin() -> None:
    """Patches Snakemake's SLURM plugin so that it recognises cancelled jobs in the output of sacct.

    sacct prints "CANCELLED by 1000". The plugin, up to at least 2.8, only knows "CANCELLED" and would consider the job
    running forever.
    """
    import snakemake_executor_plugin_slurm as plugin

    original = plugin.query_job_status

    async def query(command: str, logger: Any) -> tuple[dict[str, str] | None, float | None]:
        states, seconds = await original(command, logger)
        if states:
            states = {job: state.partition(" ")[0] for job, state in states.items()}
        return states, seconds

    plugin.query_job_status = query


def _forgets() -> list[str]:
    """Returns one line if SLURM forgets finished jobs before Snakemake asks for them."""
    config = _run("scontrol", "show", "config").stdout
    match = re.search(r"^MinJobAge\s*=\s*(\d+)", config, re.MULTILINE)
    if match and (match[1] == "0" or int(match[1]) >= MIN_JOB_AGE_S):  # 0 means forever
        return []
    after = f"after {match[1]} s" if match else "at a time that scontrol does not show"
    return [
        f"SLURM forgets finished jobs {after} (MinJobAge) and keeps no accounts (sacct), so that Snakemake would wait "
        f"for them forever: ask for MinJobAge={MIN_JOB_AGE_S} or more, or for accounting"
    ]


def _refusal(partition: str, account: str) -> str:
    """Returns SLURM's complaint about partition or account; empty if it refuses this test job because it lacks what
    real jobs may request, such as a GPU or a quality of service.
    """
    options = []
    if partition:
        options.append(f"--partition={partition}")
    if account:
        options.append(f"--account={account}")
    run = _run("sbatch", "--test-only", "--time=1", *options, "--wrap=true")
    if run.returncode == 0:
        return ""
    complaint = re.compile("invalid (partition|account)", re.IGNORECASE)
    said = [line for line in run.stderr.splitlines() if complaint.search(line)]
    return said[-1].strip() if said else ""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{command[0]} did not answer within a minute")
