"""The target that says what a machine can run."""

from __future__ import annotations

import re
from pathlib import Path

from runs import snakemake, without_gpus

SECRET = "hf_" + "Kq7" * 11


def test_it_works_on_a_bare_machine_and_keeps_the_token_to_itself(tmp_path: Path) -> None:
    """No assets, no network, the token set; `snakemake` makes every import of torch fail."""
    environment = {"HF_TOKEN": SECRET, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "huggingface")}
    environment["PATH"] = without_gpus(tmp_path / "front")
    run = snakemake(tmp_path, "--cores", "1", "doctor", **environment)
    assert run.code == 0, run.output
    assert "offline: HF_HUB_OFFLINE is set; a token is set" in run.output
    rows = re.findall(r"^  (mini, smol|paper, 1b|paper, 3b) +(?:(?:[\d.]+ [MGT]B|0) *){8}$", run.output, re.MULTILINE)
    assert rows == ["mini, smol", "paper, 1b", "paper, 3b"], run.output
    verdicts = run.output.partition("\nStudies\n")[2].splitlines()[:2]
    assert verdicts[0].startswith("  mini: can") and verdicts[1].startswith("  paper: cannot run here, because of ")
    assert re.search(r"^  1\. .+: ", run.output, re.MULTILINE)
    assert (tmp_path / "logs" / "doctor.log").read_text().count("\nStudies\n") == 1
    assert not (tmp_path / "results").exists()
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not leaks and SECRET not in run.output
