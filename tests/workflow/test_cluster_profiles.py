"""The decisions of the profiles, and what docs/clusters.md says about the rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from runs import ROOT, programs, snakemake
from snakemake.profiles import ProfileConfigFileParser

PROFILES = ROOT / "workflow" / "profiles"


def profile(name: str) -> dict[str, object]:
    with open(PROFILES / name / "config.yaml") as stream:
        return ProfileConfigFileParser().parse(stream)


@pytest.mark.parametrize(("status", "asked"), [(0, "sacct"), (1, "squeue"), (None, "squeue")])
def test_sacct_is_asked_where_it_answers(
    status: int | None, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sacct = {} if status is None else {"sacct": f"exit {status}"}
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", "sh", "timeout", **sacct))
    decided = profile("slurm")
    assert decided["slurm-status-command"] == asked
    accounts = [line for line in decided["default-resources"] if line.startswith("slurm_account=")]
    assert accounts == ["slurm_account=myproject"] * (asked == "sacct")
    assert {"slurm_partition=gpu", "nodes=1"} <= set(decided["default-resources"])


@pytest.mark.parametrize(("named", "count"), [("2,3,5", 3), ("0", 1), ("", 1), ("-1", 1), (None, 4)])
def test_the_gpus_that_may_be_used_are_counted(named: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self] * 4))  # there are four
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert profile("h200")["resources"] == [f"gpu={count}"]


def test_plain_snakemake_does_what_make_mini_does(tmp_path: Path) -> None:
    assert profile("default") == {"rerun-incomplete": "True", "show-failed-logs": "True"}
    recipe = re.search(r"^mini: .*\n\t(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None and recipe[1] == "python -m snakemake --cores $(CORES) all"
    run = snakemake(tmp_path, "-n", "all")
    assert run.code == 0 and "profiles/default for setting default" in run.output


def test_without_slurm_its_profile_is_refused_before_the_first_job(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", "sh", "bash", "which", "timeout")
    (tmp_path / "results" / "assets").mkdir(parents=True)
    (tmp_path / "results" / "assets" / "manifest.json").write_text("{}")
    target, slurm = "results/phi/smol_2k.safetensors", str(PROFILES / "slurm")
    run = snakemake(tmp_path, target, "--workflow-profile", slurm, PATH=path)
    assert run.code == 1 and "submitted" not in run.output
    assert "no sbatch here: run on a machine that submits to SLURM, or without the profile slurm" in run.said[-1]


def test_the_documented_site_settings_name_every_submitted_rule() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(), re.DOTALL)
    settings = yaml.safe_load(block)["set-resources"]
    rules = submitted_rules()
    assert set(settings) == set(rules)
    for name, text in rules.items():
        assert ("gpu_model" in settings[name]) == ("gpu=" in text) == ("slurm_partition" not in settings[name]), name


def submitted_rules() -> dict[str, str]:
    """Text of every rule that is no local one, with that of the rule it is made from."""
    rules = "\n".join(path.read_text() for path in (ROOT / "workflow" / "rules").glob("*.smk"))
    texts, bases = {}, {}
    for part in re.split(r"^(?=rule |use rule )", rules, flags=re.MULTILINE)[1:]:
        words = part.replace(":", " ").split()
        name = words[4] if words[0] == "use" else words[1]
        texts[name], bases[name] = part, words[2] if words[0] == "use" else None
    texts = {name: text + texts.get(bases[name], "") for name, text in texts.items()}
    return {name: text for name, text in texts.items() if "localrule: True" not in text}
