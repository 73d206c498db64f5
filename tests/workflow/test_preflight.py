"""What a machine lacks for a backbone."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from residual_mass.machine import preflight
from residual_mass.study.specs import BackboneSpec

LOCAL = BackboneSpec("mini", "org/Small-LM", "r1", "assets", "float32", "t", 2048, False, name="smol")
HUB = BackboneSpec("paper", "org/Big-LM", "0" * 40, "hub", "float32", "t", 2048, False, name="big")
ON_GPU = dataclasses.replace(LOCAL, name="fast", requires_gpu=True)


def said_about_hub(home: Path, **environment: str) -> str:
    """Lines of a fresh process, for the hub's library reads its settings when it is imported."""
    code = (
        "from pathlib import Path; from residual_mass.machine import preflight;"
        "from residual_mass.study.specs import BackboneSpec;"
        f"print(*preflight.problems([{HUB!r}], Path('assets')), sep='\\n')"
    )
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    source = str(Path(preflight.__file__).parents[2])
    clean = {**inherited, "HF_HOME": str(home), "PYTHONPATH": source, **environment}
    return subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True).stdout


def cache_file(home: Path, name: str) -> None:
    snapshot = home / "hub" / "models--org--Big-LM" / "snapshots" / HUB.revision
    snapshot.mkdir(parents=True, exist_ok=True)
    (snapshot / name).write_text("{}")


def test_a_hub_model_needs_a_token_or_its_cached_weights(tmp_path: Path) -> None:
    line = said_about_hub(tmp_path / "empty")
    assert (
        line.startswith("backbone big: org/Big-LM is neither public nor in the Hugging Face cache")
        and line.count("\n") == 1
    )
    assert said_about_hub(tmp_path / "empty", HF_TOKEN="hf_something").strip() == ""
    cache_file(tmp_path / "config_only", "config.json")
    assert said_about_hub(tmp_path / "config_only") == line
    cache_file(tmp_path / "config_only", "model.safetensors")
    assert said_about_hub(tmp_path / "config_only").strip() == ""


@pytest.mark.parametrize("tool", ["nvidia-smi", "sbatch"])
def test_a_backbone_that_requires_a_gpu(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(preflight.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))  # no device files, whatever runs this test
    assert preflight.problems([LOCAL], tmp_path) == []
    (line,) = preflight.problems([LOCAL, ON_GPU], tmp_path)
    assert line.startswith("no NVIDIA GPU here for backbone fast:")
    (tmp_path / tool).write_text("#!/bin/sh\n")
    (tmp_path / tool).chmod(0o755)
    assert preflight.problems([LOCAL, ON_GPU], tmp_path) == []
    alone = preflight.problems([LOCAL, ON_GPU], tmp_path, submits=False)
    assert alone == ([] if tool == "nvidia-smi" else [line])  # SLURM is there, but Snakemake was not told to use it
    monkeypatch.setattr(preflight.metadata, "version", lambda name: "2.13.0+cpu")
    assert preflight.problems([LOCAL], tmp_path) == []
    (line,) = preflight.problems([LOCAL, ON_GPU], tmp_path)
    assert line.startswith("torch 2.13.0+cpu is built for CPUs, and backbone fast needs") and "TORCH_INDEX=" in line


def test_a_model_that_the_assets_lack_is_named_once_they_are_there(tmp_path: Path) -> None:
    assert preflight.problems([LOCAL], tmp_path) == []
    (tmp_path / "manifest.json").write_text("{}")
    (line,) = preflight.problems([LOCAL], tmp_path)
    assert line.startswith(f"backbone smol: no model in {tmp_path}/models/small-lm:")
    (tmp_path / "models" / "small-lm").mkdir(parents=True)
    (tmp_path / "models" / "small-lm" / "config.json").write_text("{}")
    assert preflight.problems([LOCAL], tmp_path) == []
