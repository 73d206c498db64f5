"""The jobs of every study and target, and their specs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, SPECS, Run, change, dry_run, plan_of, snakemake
from snakemake.iocontainers import Wildcards

from residual_mass.cli import _parser
from residual_mass.paper.tables import find
from residual_mass.spec.settings import to_json
from residual_mass.spec.specs import GenerateSpec, TrainSpec, parse_spec
from residual_mass.study.resources import JobSize

MINI = "config/studies/mini.yaml"


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


def test_every_job_is_told_what_its_stage_understands(studies: dict[str, Run]) -> None:
    for command in (command for run in studies.values() for command in run.commands):
        options = _parser(command[0]).parse_args(command)
        if "spec" in options:
            assert to_json(parse_spec(SPECS[options.name.replace("-", "_")], options.spec)) == options.spec


def test_one_result_means_the_same_under_every_study(tmp_path: Path) -> None:
    runs = [dry_run(tmp_path, "results/ruler_1b_64k.csv", "--config", f"study={name}") for name in ("mini", "paper")]
    expected = {"assets": 1, "prompts": 1, "train": 1, "generate": 13, "score": 1, "total": 17}
    assert [run.jobs for run in runs] == [expected, expected]
    assert runs[0].commands == runs[1].commands
    assert {spec.study for spec in specs(runs[0], "generate", GenerateSpec)} == {"paper"}


def specs(run: Run, stage: str, cls: type[Any]) -> list[Any]:
    return [parse_spec(cls, given["spec"][0]) for given in told(run, stage)]


def test_latencies_of_a_backbone_have_a_table_whatever_its_name(checkout: Path) -> None:
    config = checkout / "config" / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["backbones"]["smol-1.7b"] = settings["backbones"]["smol"]
    config.write_text(yaml.safe_dump(settings))
    change(checkout, "mini", {"tables": ["runtime_smol-1.7b"]})
    run = dry_run(checkout, "paper_tables/mini/runtime_smol-1.7b.csv", snakefile=checkout / "Snakefile")
    assert run.jobs == {"assets": 1, "runtime": 1, "table": 1, "total": 3}, run.output


def test_the_papers_own_tables_need_nothing_else(tmp_path: Path) -> None:
    run = dry_run(tmp_path, "published")
    assert run.jobs == {"published_table": 12, "published": 1, "total": 13}, run.output
    templates = {each["label"][0]: tmp_path / each["template"][0] for each in told(run, "published")}
    tables = yaml.safe_load((ROOT / "config" / "studies" / "paper.yaml").read_text())["tables"]
    assert set(templates) == {label for label in tables if find(label).of not in ("fidelity", "answers", "residuals")}
    assert all(path.is_file() for path in templates.values())


def test_what_must_survive_an_interrupted_job_is_no_declared_output(studies: dict[str, Run]) -> None:
    commands = [flags(command) for run in studies.values() for command in run.commands]
    kept = [path for given in commands for flag in ("checkpoint", "store") for path in given.get(flag, [])]
    assert len(set(kept)) == len(kept) > 200
    assert not set(kept) & {path for given in commands for path in given.get("out", [])}


@pytest.mark.slow
def test_several_gpus_train_through_torchrun(checkout: Path) -> None:
    targets = [f"results/phi/{name}.safetensors" for name in ("1b_4k", "1b_4k-kl_only", "smol_1k")]

    def planned(*arguments: str, **phi: int) -> Run:
        for study in ("mini", "paper"):
            change(checkout, study, {f"phi.{key}": value for key, value in phi.items()})
        return dry_run(checkout, *targets, *arguments, snakefile=checkout / "Snakefile")

    alone, refused = planned(), planned(gpus=2)
    line = f"{MINI}: phi: sequences_per_step (1) is not a multiple of gpus (2); change one"
    assert refused.code == 1 and len(refused.said) == 1 and refused.said[0].startswith(line)
    run, on_one = planned(gpus=2, sequences_per_step=4), planned("--resources", "gpu=1")
    # The mini study's backbone runs on the CPU, in one process.
    torchrun = '"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2'
    on_two = f'"$PYTHON" -m residual_mass.machine.gpus 2 {torchrun}'
    assert launchers(run) == ['"$PYTHON"', *[on_two] * 2], run.output
    assert launchers(on_one) == ['"$PYTHON"'] * 3 and on_one.commands == run.commands
    assert {spec.sequences_per_step for spec in specs(run, "train", TrainSpec)} == {4}
    assert [set(given) for given in told(run, "train")] == [set(given) for given in told(alone, "train")]


def launchers(run: Run) -> list[str]:
    return sorted(re.findall(r"^Shell command: exec (.*?) -m residual_mass train ", run.output, re.MULTILINE))


@pytest.mark.slow
def test_another_number_of_gpus_trains_nothing_again(checkout: Path) -> None:
    def commands(gpus: int, sequences: int, *arguments: str) -> list[list[str]]:
        change(checkout, "paper", {"phi.gpus": gpus, "phi.sequences_per_step": sequences})
        arguments = (*(arguments or ("--dry-run", "--printshellcmds")), made[0])
        return snakemake(checkout, *arguments, snakefile=checkout / "Snakefile").commands

    made = ["results/phi/1b_4k.safetensors", "results/training_1b_4k.csv", "results/assets/manifest.json"]
    for path in made:
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text("{}")
    commands(1, 2, "--cores", "1", "--touch", "--force")
    assert commands(2, 2) == [] and len(commands(2, 4)) == 1


@pytest.mark.parametrize(
    ("place", "megabytes"),
    [
        ({"backbone": "1b", "length": "64k"}, 64000),
        ({"backbone": "smol", "length": "2k"}, 7024),
        ({"backbone": "qwen", "length": "32640"}, 22320),
        ({"backbone": "smol"}, 7024),  # latencies up to 2k
        ({"backbone": "qwen"}, 22320),
    ],
)
def test_jobs_without_a_gpu_ask_for_memory_by_their_length(place: dict[str, str], megabytes: int) -> None:
    assert JobSize(plan_of(ROOT), None).memory(Wildcards(fromdict=place)) == megabytes


@pytest.mark.parametrize(("config", "counts"), [({}, [500, 20, 500, 500]), ({"examples": 1}, [20, 20, 1, 1])])
def test_as_many_prompts_are_frozen_as_are_decoded_or_continued(config: dict[str, int], counts: list[int]) -> None:
    place = {"backbone": "1b", "tokenizer": "llama32", "benchmark": "ruler", "length": "4k", "group": "main"}
    plan, found = plan_of(ROOT, **config), []
    for stage in ("prompts", "force", "generate", "score"):
        _, spec = plan.work(stage, Wildcards(fromdict=place | {"tasks": "ruler_cwe"}))
        found.append(spec.asked[0].examples if stage == "force" else spec.examples)
    assert found == counts


def test_the_estimate_counts_every_job_that_trains_or_decodes(tmp_path: Path, studies: dict[str, Run]) -> None:
    for name in ("mini", "paper"):
        run = snakemake(tmp_path, "--cores", "1", "estimate", "--config", f"study={name}")
        assert run.code == 0, run.output
        counts = re.findall(r"^  \w+, (train|generate|force): (\d+) jobs, no rate", run.output, re.MULTILINE)
        for stage in ("train", "generate", "force"):
            assert sum(int(count) for s, count in counts if s == stage) == len(told(studies[name], stage))


def test_a_folder_of_assets_made_elsewhere_is_used(tmp_path: Path) -> None:
    brought = tmp_path / "brought along"
    brought.mkdir()
    (brought / "manifest.json").write_text("{}")
    run = dry_run(tmp_path, "results/phi/smol_2k.safetensors", "--config", f"assets={brought}")
    assert run.jobs == {"train": 1, "total": 1}, run.output
    assert told(run, "train")[0]["assets"] == [str(brought)]


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
    here, before = (sorted(word for c in each.commands for word in c if "{" in word) for each in (run, studies["mini"]))
    assert here == before and len(here) > 50
