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
REMEMBERED = 240
"""Seconds for which SLURM must remember a finished job (MinJobAge) if there is only squeue: Snakemake asks at least
every 180 s, and waits forever for a job that was forgotten before.
"""


def problems(status_command: str | None, sites: Iterable[tuple[str, str]]) -> list[str]:
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
        reason = (accounting.stderr.strip() or "no message").splitlines()[-1]
        lines.append(
            f"sacct does not answer ({reason}), and Snakemake would wait for its jobs forever: "
            f"set slurm-status-command: squeue, as {PROFILE} does by itself"
        )
    if accounting.returncode and status_command == "squeue":
        lines += _forgets()
    for partition, account in sorted(set(sites)):
        if account and accounting.returncode:
            lines.append(f"slurm_account is {account}, but there are no accounts here: remove it from {PROFILE}")
        elif refusal := _refusal(partition, account):
            lines.append(f"sbatch refuses partition {partition!r}, account {account!r} ({refusal}): edit {PROFILE}")
    return lines


def unfinished(folder: Path) -> list[str]:
    """Returns one line if jobs of an earlier run from `folder` still exist, which would write the same files."""
    run = _run("squeue", "--noheader", "--user", getuser(), "--format", "%i|%k|%Z")
    jobs = [job.split("|", 2) for job in run.stdout.splitlines() if job.count("|") >= 2]
    ids = [number for number, comment, where in jobs if comment.startswith("rule_") and Path(where) == folder]
    wait, stop = f"`squeue --jobs {','.join(ids)}` shows none", f"stop them with `scancel {' '.join(ids)}`"
    line = f"jobs of an earlier run still work in this folder: wait until {wait}, or {stop}; what they finish is kept"
    return [line] if ids else []


def see_cancelled_jobs() -> None:
    """Patches Snakemake's SLURM plugin so that it recognises cancelled jobs in the output of sacct.

    sacct prints "CANCELLED by 1000". The plugin, up to at least 2.8, only knows "CANCELLED" and would consider the job
    running forever.
    """
    import snakemake_executor_plugin_slurm as plugin

    original = plugin.query_job_status

    async def query(command: str, logger: Any) -> tuple[dict[str, str] | None, float | None]:
        states, seconds = await original(command, logger)
        return states and {job: state.partition(" ")[0] for job, state in states.items()}, seconds

    plugin.query_job_status = query


def _forgets() -> list[str]:
    """Returns one line if SLURM forgets finished jobs before Snakemake asks for them."""
    match = re.search(r"^MinJobAge\s*=\s*(\d+)", _run("scontrol", "show", "config").stdout, re.MULTILINE)
    if match and (match[1] == "0" or int(match[1]) >= REMEMBERED):  # 0 means forever
        return []
    after = f"after {match[1]} s" if match else "at a time that scontrol does not show"
    return [
        f"SLURM forgets finished jobs {after} (MinJobAge) and keeps no accounts (sacct), so that Snakemake would wait "
        f"for them forever: ask for MinJobAge={REMEMBERED} or more, or for accounting"
    ]


def _refusal(partition: str, account: str) -> str:
    """Returns SLURM's complaint about partition or account; empty if it refuses this test job because it lacks what
    real jobs may request, such as a GPU or a quality of service.
    """
    given = [f"--partition={partition}"] * bool(partition) + [f"--account={account}"] * bool(account)
    run = _run("sbatch", "--test-only", "--time=1", *given, "--wrap=true")
    said = [line for line in run.stderr.splitlines() if re.search("invalid (partition|account)", line, re.IGNORECASE)]
    return said[-1].strip() if run.returncode and said else ""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{command[0]} did not answer within a minute")
