"""The graph of jobs of every study and target, and what each job is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, Run, dry_run

from residual_mass.cli import _parser
from residual_mass.specs import (
    CaptureSpec,
    GenerateSpec,
    PromptsSpec,
    ScoreSpec,
    TableSpec,
    TrainSpec,
    parse_spec,
    to_json,
)

SPECS: dict[str, type[Any]] = {
    "prompts": PromptsSpec,
    "train": TrainSpec,
    "generate": GenerateSpec,
    "score": ScoreSpec,
    "capture": CaptureSpec,
    "table": TableSpec,
}


def flags(command: list[str]) -> dict[str, list[str]]:
    """Flag -> values of one command line."""
    found: dict[str, list[str]] = {}
    for word in command[1:]:
        if word.startswith("--"):
            found[word[2:]] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def told(run: Run, stage: str) -> list[dict[str, list[str]]]:
    return [flags(command) for command in run.commands if command[0] == stage]


MINI = {"assets": 1, "prompts": 2, "train": 1, "generate": 2, "score": 2, "capture": 1, "table": 2, "figure": 1}
PAPER = {"assets": 1, "prompts": 4, "train": 2, "generate": 104, "score": 8, "capture": 1, "table": 2, "figure": 1}


@pytest.mark.parametrize(("study", "jobs"), [("mini", MINI), ("paper", PAPER)])
def test_all_of_a_study(study: str, jobs: dict[str, int], studies: dict[str, Run]) -> None:
    assert studies[study].code == 0, studies[study].output
    assert studies[study].jobs == {**jobs, "all": 1, "total": sum(jobs.values()) + 1}
    assert len(studies[study].commands) == sum(jobs.values())


def test_every_job_is_told_what_its_stage_understands(studies: dict[str, Run]) -> None:
    parser = _parser()
    for command in (command for run in studies.values() for command in run.commands):
        options = parser.parse_args(command)
        if options.name in SPECS:
            assert to_json(parse_spec(SPECS[options.name], options.spec)) == options.spec


def test_one_result_means_the_same_under_every_study(tmp_path: Path) -> None:
    runs = [dry_run(tmp_path, "results/ruler_1b_64k.csv", "--config", f"study={name}") for name in ("mini", "paper")]
    expected = {"assets": 1, "prompts": 1, "train": 1, "generate": 13, "score": 1, "total": 17}
    assert [run.jobs for run in runs] == [expected, expected]
    assert runs[0].commands == runs[1].commands
    assert {spec.study for spec in specs(runs[0], "generate", GenerateSpec)} == {"paper"}


def specs(run: Run, stage: str, cls: type[Any]) -> list[Any]:
    return [parse_spec(cls, given["spec"][0]) for given in told(run, stage)]


def test_the_paper_study_is_the_papers_protocol(studies: dict[str, Run]) -> None:
    generated = specs(studies["paper"], "generate", GenerateSpec)
    assert {(s.backbone.name, s.length) for s in generated} == {
        (b, length) for b in ("1b", "3b") for length in ("4k", "8k", "16k", "64k")
    }
    assert all(len(s.tasks) == 1 and s.maps.length == 65536 and len(s.arms) == 1 + 3 * 4 for s in generated)
    for trained in specs(studies["paper"], "train", TrainSpec):
        assert (trained.length, trained.steps, trained.queries_per_step) == ("64k", 200000, 100)
        assert round(trained.query_window * 65536) == 33000
        assert trained.objective == parse_spec(TrainSpec, to_json(trained)).objective
    shared = {tuple(given["prompts"]) for given in told(studies["paper"], "generate")}
    assert len(shared) == 4, "both backbones read one set of prompts per length"


def test_what_must_survive_an_interrupted_job_is_no_declared_output(studies: dict[str, Run]) -> None:
    outputs = [path for run in studies.values() for c in run.commands for path in flags(c).get("out", [])]
    kept = [path for run in studies.values() for s in ("generate", "train") for path in kept_files(run, s)]
    assert len(set(kept)) == len(kept) == 109
    assert not set(kept) & set(outputs)


def kept_files(run: Run, stage: str) -> list[str]:
    return [given["store" if stage == "generate" else "checkpoint"][0] for given in told(run, stage)]


def test_the_example_count_can_be_set_for_all(tmp_path: Path) -> None:
    run = dry_run(tmp_path, "results/ruler_smol_1k.csv", "--config", "examples=7")
    assert [s.examples for s in specs(run, "prompts", PromptsSpec) + specs(run, "generate", GenerateSpec)] == [7, 7]


def test_a_folder_of_assets_made_elsewhere_is_used(tmp_path: Path) -> None:
    brought = tmp_path / "brought along"
    brought.mkdir()
    (brought / "manifest.json").write_text("{}")
    run = dry_run(tmp_path, "results/phi/smol_2k.safetensors", "--config", f"assets={brought}")
    assert run.jobs == {"train": 1, "total": 1}, run.output
    assert told(run, "train")[0]["assets"] == [f"{brought}/manifest.json"]


@pytest.mark.parametrize("profile", ["slurm", "h200"])
def test_profiles_are_accepted(profile: str, tmp_path: Path, studies: dict[str, Run]) -> None:
    folder = str(ROOT / "workflow" / "profiles" / profile)
    run = dry_run(tmp_path, "all", "--config", "study=paper", "--workflow-profile", folder)
    assert run.code == 0, run.output
    assert run.commands == studies["paper"].commands


def reverse_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reverse_keys(value[key]) for key in reversed(value)}
    return [reverse_keys(item) for item in value] if isinstance(value, list) else value


def test_the_order_of_keys_changes_nothing(checkout: Path, studies: dict[str, Run]) -> None:
    for path in (checkout / "config").rglob("*.yaml"):
        before = path.read_text()
        path.write_text(yaml.safe_dump(reverse_keys(yaml.safe_load(before)), sort_keys=False))
        assert path.read_text() != before
    run = dry_run(checkout, "all", snakefile=checkout / "Snakefile")
    assert specs_by_output(run) == specs_by_output(studies["mini"])


def specs_by_output(run: Run) -> dict[str, list[str]]:
    given = [flags(command) for command in run.commands if "--spec" in command]
    return {g["out"][0]: g["spec"] for g in given}
