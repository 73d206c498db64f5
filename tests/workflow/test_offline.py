"""Runs in a network namespace without any network."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT
from tests.needs import NAMESPACES, needs, unshare
from tests.small_study import write_small_study

pytestmark = needs(NAMESPACES)

WATCH = """
import os, socket
_connect, _lookup = socket.socket.connect, socket.getaddrinfo
def tell(what):
    with open(os.environ["ATTEMPTS"], "a") as log:
        log.write(f"{what}\\n")
def connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
        tell(f"connect {address}")
    return _connect(self, address)
def lookup(host, *rest, **more):
    if host not in ("localhost", "127.0.0.1", "::1", socket.gethostname(), None, ""):
        tell(f"look up {host}")
    return _lookup(host, *rest, **more)
socket.socket.connect, socket.getaddrinfo = connect, lookup
"""
"""Run by every Python process of a test: whoever tries the network is written down."""


def without_network(folder: Path, *arguments: str, snakefile: Path = ROOT / "Snakefile") -> tuple[int, str, str]:
    """A run of Snakemake: its status, what it said, and who tried the network."""
    isolated = unshare()
    assert isolated is not None
    watch, attempts = folder / "watch", folder / "attempts"
    watch.mkdir(parents=True, exist_ok=True)
    (watch / "sitecustomize.py").write_text(WATCH)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "NLTK_"))}
    environment |= {
        "PYTHONPATH": str(watch),
        "ATTEMPTS": str(attempts), "HF_HOME": str(folder / "huggingface"), "HF_TOKEN": "hf_never_to_be_seen",
    }  # fmt: skip
    command = [*isolated, sys.executable, "-m", "snakemake", "--snakefile", str(snakefile), "--directory", str(folder)]
    run = subprocess.run(
        [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return run.returncode, run.stdout, attempts.read_text() if attempts.exists() else ""


def test_what_is_missing_is_told_before_any_job(tmp_path: Path) -> None:
    code, said, attempts = without_network(
        tmp_path, "--cores", "1", "results/ruler_1b_64k.csv", "--config", "offline=true", "assets=brought"
    )
    line = said.splitlines()[-1]
    assert code == 1 and "Traceback" not in said and "hf_never" not in said
    for missing in (
        "offline, and the assets folder lacks brought/manifest.json; copy it from a machine with network",
        "model meta-llama/Llama-3.2-1B-Instruct at 9213176726f574b556790deb65791e0c5aa438b6; ",
        "data set Salesforce/wikitext (wikitext-103-raw-v1, test)",
        "data set baber/paul_graham_essays (default, train)",
        "data set HuggingFaceFW/fineweb (sample-10BT, train)", "data set ccdv/arxiv-summarization (default, train)",
    ):  # fmt: skip
        assert missing in line
    assert "run the target `prefetch` on a machine with network" in line and "babilong" not in line
    assert attempts == "" and not list((tmp_path / "logs").rglob("*.log"))


@pytest.mark.slow
def test_a_study_runs_from_the_assets_folder_alone(tmp_path: Path) -> None:
    """Every job of it, and none so much as looks a name up; the hub's files are checked on the way."""
    checkout = tmp_path / "check out"
    write_small_study(checkout)
    assets = tmp_path / "brought"
    shutil.move(checkout / "results" / "assets", assets)
    arguments = ("--cores", "2", "all", "--config", "offline=true", f"assets={shlex.quote(str(assets))}")
    code, said, attempts = without_network(checkout, *arguments, snakefile=checkout / "Snakefile")
    assert code == 0, said + "".join(log.read_text() for log in checkout.glob("logs/**/*.log"))[-4000:]
    assert attempts == ""
    assert (checkout / "results" / "ruler_tiny_1k.csv").is_file() and (checkout / "results" / "report.html").is_file()
    code, said, attempts = without_network(
        checkout, "--cores", "1", "prefetch", *arguments[3:], snakefile=checkout / "Snakefile"
    )
    assert code == 0, said
    (assets / "qa" / "squad.json").unlink()
    code, said, _ = without_network(
        checkout, *arguments[:2], "--forcerun", "prompts", *arguments[2:], snakefile=checkout / "Snakefile"
    )
    assert code == 1 and f"the assets folder lacks {assets}/qa/squad.json; copy it" in said.splitlines()[-1]
    files = [path for path in checkout.rglob("*") if path.is_file() and path.suffix != ".py"]
    assert len(files) > 300 and not [path for path in files if b"hf_never" in path.read_bytes()]  # the token
