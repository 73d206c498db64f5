"""The graph of jobs of every study and target, and what each job is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, Run, dry_run, snakemake

from residual_mass.cli import _parser
from residual_mass.core.settings import to_json, tokens_of
from residual_mass.paper.tables import TABLES
from residual_mass.study.specs import (
    CaptureSpec,
    ComparisonSpec,
    DocumentSpec,
    FidelitySpec,
    FigureSpec,
    FindingsSpec,
    ForceSpec,
    GenerateSpec,
    KernelsSpec,
    NumbersSpec,
    PromptsSpec,
    ReportSpec,
    ResidualErrorsSpec,
    ScoreSpec,
    TableSpec,
    TrainSpec,
    parse_spec,
)

SPECS: dict[str, type[Any]] = {
    "prompts": PromptsSpec,
    "train": TrainSpec,
    "generate": GenerateSpec,
    "force": ForceSpec,
    "fidelity": FidelitySpec,
    "score": ScoreSpec,
    "residual-errors": ResidualErrorsSpec,
    "capture": CaptureSpec,
    "kernels": KernelsSpec,
    "findings": FindingsSpec,
    "table": TableSpec,
    "comparison": ComparisonSpec,
    "numbers": NumbersSpec,
    "figure": FigureSpec,
    "document": DocumentSpec,
    "report": ReportSpec,
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


def test_every_job_is_told_what_its_stage_understands(studies: dict[str, Run]) -> None:
    for command in (command for run in studies.values() for command in run.commands):
        options = _parser(command[0]).parse_args(command)
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
    main = [s for s in generated if len(s.arms) > 1 and s.arms[0].method == "full"]
    for benchmark, lengths in [("ruler", FOUR), ("babilong", FOUR), ("longbench", {"64k"})]:
        points = {(s.backbone.name, s.length) for s in main if s.benchmark == benchmark}
        assert points == {(b, length) for b in ("1b", "3b") for length in lengths}
    assert all(len(s.tasks) == 1 and s.maps[0].length == 65536 and len(s.arms) == 1 + 3 * 4 for s in main)
    assert {s.examples for s in main} == {500, 1000, 200} and {s.truncate_to for s in main} == {"64k"}
    assert not any(s.stop_when_saturated or s.answer_margin is not None for s in generated)
    trained = specs(studies["paper"], "train", TrainSpec)
    assert sorted((s.backbone.name, s.length) for s in trained) == [
        ("1b", "16k"), ("1b", "4k"), ("1b", "4k"), ("1b", "64k"), ("1b", "8k"), ("3b", "64k"),
    ]  # fmt: skip
    for each in trained:
        assert (each.steps, each.queries_per_step) == (200000, 100)
        assert round(each.query_window * 65536) == 33000
    shared = {tuple(given["prompts"]) for given in told(studies["paper"], "generate")}
    assert len(shared) == 9, "both backbones read one set of prompts per benchmark and length"


FOUR = {"4k", "8k", "16k", "64k"}


def test_the_ablations_change_one_thing_each(studies: dict[str, Run]) -> None:
    (variants,) = [s.variants for s in specs(studies["paper"], "train", TrainSpec) if len(s.variants) > 1]
    (ours,) = {s.variants[0] for s in specs(studies["paper"], "train", TrainSpec) if len(s.variants) == 1}
    changed = {v.label: (v.map != ours.map, v.objective != ours.objective) for v in variants}
    assert changed == {
        "dphi_32": (True, False), "dphi_128": (True, False), "hedgehog_map": (True, False),
        "lolcats_loss": (False, True), "kl_only": (False, True), "aux_only": (False, True),
        "residual_loss": (False, True),
    }  # fmt: skip
    ablated = [s for s in specs(studies["paper"], "generate", GenerateSpec) if len(s.maps) == 8]
    assert len(ablated) == 13 + 5 and {s.length for s in ablated} == {"4k"}
    for s in ablated:
        assert [arm.maps for arm in s.arms] == ["4k", *(f"4k-{v.label}" for v in variants)]
        assert {(arm.method, arm.budget_percent) for arm in s.arms} == {("topk_phi", 1.0)}


def test_only_the_mismatch_extrapolates(studies: dict[str, Run]) -> None:
    generated = [s for run in studies.values() for s in specs(run, "generate", GenerateSpec)]
    for s in generated:
        mismatch = [maps.label for maps in s.maps] in (["512", "1k"], ["4k", "8k", "16k"])
        assert s.allow_extrapolation == mismatch
        assert mismatch or min(maps.length for maps in s.maps) >= tokens_of(s.length)
    assert {s.length for s in generated if s.allow_extrapolation} == {"1k", "4k", "8k", "16k"}


def test_latencies_of_a_backbone_have_a_table_whatever_its_name(checkout: Path) -> None:
    config, study = checkout / "config" / "config.yaml", checkout / "config" / "studies" / "mini.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["backbones"]["smol-1.7b"] = settings["backbones"]["smol"]
    config.write_text(yaml.safe_dump(settings))
    protocol = yaml.safe_load(study.read_text())
    study.write_text(yaml.safe_dump(protocol | {"tables": ["runtime_smol-1.7b"]}))
    run = dry_run(checkout, "paper_tables/mini/runtime_smol-1.7b.csv", snakefile=checkout / "Snakefile")
    assert run.jobs == {"assets": 1, "runtime": 1, "table": 1, "total": 3}, run.output


def test_the_papers_own_tables_need_nothing_else(tmp_path: Path) -> None:
    run = dry_run(tmp_path, "published")
    assert run.jobs == {"published_table": 12, "published": 1, "total": 13}, run.output
    given = {each["label"][0]: each for each in told(run, "published")}
    tables = yaml.safe_load((ROOT / "config" / "studies" / "paper.yaml").read_text())["tables"]
    own = {label for label, table in TABLES.items() if table.of in ("fidelity", "answers", "residuals")}
    assert set(given) == set(tables) - own
    for label, each in given.items():
        _parser("published").parse_args(["published", *(word for flag in each for word in (f"--{flag}", *each[flag]))])
        assert each["out"] == [f"paper_tables/published/{label}.tex"]
        template = "runtime" if label.startswith("runtime") else label
        assert Path(each["template"][0]).name == f"{template}.tex.j2"
        assert (tmp_path / each["template"][0]).is_file()


def test_the_paper_study_is_told_to_be_under_the_papers_protocol(studies: dict[str, Run]) -> None:
    (paper,), (mini,) = (specs(studies[name], "comparison", ComparisonSpec) for name in ("paper", "mini"))
    assert mini.paper == paper.paper == paper.settings != mini.settings
    kept = {"phi.steps": "200000", "anchors.tail": "16", "phi.map.d_phi": "64", "backbones.1b.dtype": "bfloat16",
            "truncate_to": "64k", "benchmarks.longbench.budget_length": "real", "phi.curriculum": "null"}  # fmt: skip
    assert kept.items() <= paper.settings.items()
    other = {key for key in mini.settings if mini.settings[key] != paper.settings[key]}
    assert {"phi.steps", "phi.corpora", "phi.map.d_emb", "phi.schedule", "phi.objective.lambda_kl"} < other
    assert paper.settings.keys() - mini.settings.keys() == {"backbones.1b.dtype", "backbones.3b.dtype"}
    assert mini.variants["kl_only"] == {"phi.objective.name": "kl"} and "residual_loss" in mini.variants


@pytest.mark.parametrize(("backbone", "babilong", "length"), [("smol", "1k", "2k"), ("1b", "64k", "64k")])
def test_every_result_is_a_target_in_both_studies(backbone: str, babilong: str, length: str, tmp_path: Path) -> None:
    targets = [f"results/babilong_{backbone}_{babilong}.csv", f"results/longbench_{backbone}_{length}.csv"]
    targets += [
        f"results/{name}_{backbone}.csv" for name in ("cross_length_mismatch", "ablation_dphi", "ablation_loss")
    ]
    run = dry_run(tmp_path, *targets)
    assert run.code == 0, run.output
    outputs = [path for command in run.commands for path in flags(command)["out"]]
    assert set(targets) <= set(outputs)
    assert not {f"results/ruler_{backbone}_{length}.csv", f"results/phi/{backbone}_{length}-ours.safetensors"} & set(
        outputs
    )


def test_what_must_survive_an_interrupted_job_is_no_declared_output(studies: dict[str, Run]) -> None:
    outputs = [path for run in studies.values() for c in run.commands for path in flags(c).get("out", [])]
    kept = [path for run in studies.values() for s in ("generate", "force", "train") for path in kept_files(run, s)]
    assert len(set(kept)) == len(kept) > 200
    assert not set(kept) & set(outputs)


def set_phi(checkout: Path, study: str, **changes: Any) -> None:
    set_section(checkout, study, "phi", **changes)


def set_section(checkout: Path, study: str, section: str, **changes: Any) -> None:
    path = checkout / "config" / "studies" / f"{study}.yaml"
    content = yaml.safe_load(path.read_text())
    content[section] |= changes
    path.write_text(yaml.safe_dump(content))


@pytest.mark.slow
def test_several_gpus_train_through_torchrun(checkout: Path) -> None:
    targets = [f"results/phi/{name}.safetensors" for name in ("1b_4k", "1b_4k-kl_only", "smol_1k")]
    alone = dry_run(checkout, *targets, snakefile=checkout / "Snakefile")
    for study in ("mini", "paper"):
        set_phi(checkout, study, gpus=2)
    refused = dry_run(checkout, *targets, snakefile=checkout / "Snakefile")
    line = "config/studies/mini.yaml: phi.sequences_per_step: 1 is not a multiple of gpus (2), which share them"
    assert (refused.code, refused.said) == (1, [f"{line}; change one"])
    for study in ("mini", "paper"):
        set_phi(checkout, study, gpus=2, sequences_per_step=4)
    run = dry_run(checkout, *targets, snakefile=checkout / "Snakefile")
    # The mini study's backbone runs on the CPU, in one process.
    on_two = "python -m residual_mass.machine.gpus 2 python -m torch.distributed.run --standalone --nproc-per-node 2"
    assert launchers(run) == ["python", *[on_two] * 2], run.output
    on_one = dry_run(checkout, *targets, "--resources", "gpu=1", snakefile=checkout / "Snakefile")
    assert launchers(on_one) == ["python"] * 3 and on_one.commands == run.commands
    assert {s.sequences_per_step for s in specs(run, "train", TrainSpec)} == {4}
    assert [set(given) for given in told(run, "train")] == [set(given) for given in told(alone, "train")]


def launchers(run: Run) -> list[str]:
    return sorted(re.findall(r"^Shell command: exec (.*?) -m residual_mass train ", run.output, re.MULTILINE))


@pytest.mark.slow
def test_another_number_of_gpus_trains_nothing_again(checkout: Path) -> None:
    set_phi(checkout, "paper", sequences_per_step=2)
    made = ["results/phi/1b_4k.safetensors", "results/training_1b_4k.csv", "results/assets/manifest.json"]
    for path in made:
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text("{}")
    snakefile = checkout / "Snakefile"
    touched = snakemake(checkout, "--cores", "1", "--touch", "--force", made[0], snakefile=snakefile)
    assert touched.code == 0, touched.output
    set_phi(checkout, "paper", sequences_per_step=2, gpus=2)
    assert dry_run(checkout, made[0], snakefile=snakefile).commands == []
    set_phi(checkout, "paper", sequences_per_step=4, gpus=2)
    assert len(dry_run(checkout, made[0], snakefile=snakefile).commands) == 1


def kept_files(run: Run, stage: str) -> list[str]:
    return [given["checkpoint" if stage == "train" else "store"][0] for given in told(run, stage)]


def test_the_example_count_can_be_set_for_all(tmp_path: Path) -> None:
    run = dry_run(tmp_path, "results/ruler_smol_1k.csv", "--config", "examples=7")
    assert [s.examples for s in specs(run, "prompts", PromptsSpec) + specs(run, "generate", GenerateSpec)] == [7, 7]


def test_prompts_that_are_continued_are_frozen_where_fewer_are_decoded(checkout: Path) -> None:
    set_section(checkout, "mini", "fidelity", examples=2)

    def told_of(decoded: int) -> list[int]:
        target = "results/fidelity_smol_1k.csv", "results/ruler_smol_1k.csv"
        run = dry_run(checkout, *target, "--config", f"examples={decoded}", snakefile=checkout / "Snakefile")
        assert run.code == 0, run.output
        frozen = {s.benchmark: s.examples for s in specs(run, "prompts", PromptsSpec)}
        (scored,) = specs(run, "score", ScoreSpec)
        (generated,) = {s.examples for s in specs(run, "generate", GenerateSpec)}
        (forced,) = {a.examples for s in specs(run, "force", ForceSpec) for a in s.asked}
        return [frozen["ruler"], forced, generated, scored.examples]

    assert told_of(1) == [2, 2, 1, 1] and told_of(9) == [9, 2, 9, 9]


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
    assert specs_by_output(run) == specs_by_output(studies["mini"])


def specs_by_output(run: Run) -> dict[str, list[str]]:
    given = [flags(command) for command in run.commands if "--spec" in command]
    outputs = [next(g[flag][0] for flag in ("out", "accounting", "heads", "pdf") if flag in g) for g in given]
    assert len(set(outputs)) == len(given)
    return dict(zip(outputs, [g["spec"] for g in given], strict=True))
