"""What is wrong is reported before any job, in one line that names it and what is known."""

from __future__ import annotations

import shlex
import shutil
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, configuration_error, dry_run, plan_of, snakemake
from snakemake.iocontainers import Wildcards

from residual_mass.machine import preflight

TARGETS = [
    ("results/ruler_7b_64k.csv", "backbone '7b' is not in config/config.yaml, which has smol, smol-methods, 1b, 3b"),
    (
        "paper_tables/mini/no_such_table.tex",
        "table 'no_such_table' is not in config/studies/mini.yaml, which has natur",
    ),
    ("paper_tables/published/runtime_smol.tex", "table 'runtime_smol' is not in the paper, which has babilong_sweep, "),
    ("paper_tables/mini/figures/heat.pdf", "figure 'heat' is not in config/studies/mini.yaml, which has fidelity, "),
    ("paper_tables/small/main.pdf", "study 'small' is not in config/studies, which has methods, mini, paper"),
]


@pytest.mark.parametrize(("target", "line"), TARGETS)
def test_an_unknown_target(target: str, line: str, tmp_path: Path) -> None:
    run = dry_run(tmp_path, target)
    assert run.code == 1 and len(run.said) == 1 and run.said[0].startswith(line), run.output


def test_an_unknown_setting_ends_the_run(tmp_path: Path) -> None:
    run = dry_run(tmp_path, "all", "--config", "exmples=3")
    line = "configuration: exmples: unknown key; `python -m residual_mass.study.reference` explains the keys"
    assert (run.code, run.said) == (1, [line])


PATTERN = "String should match pattern"
SETTINGS: list[tuple[str, Any, str]] = [
    ("study", "small", "study, of those with a backbone: small is not one of methods, mini, paper"),
    ("study", "mini; touch pwned", "mini; touch pwned is not one of methods, mini, paper"),
    ("examples", 0, "Input should be greater than or equal to 1, not 0"),
    ("examples", "1; touch pwned", "Input should be a valid integer, not '1; touch pwned'"),
    ("offline", "maybe", "Input should be a valid boolean"),
    ("assets", "-rf", PATTERN),
    ("assets", "results/{x}", PATTERN),
    ("assets", "results\ntouch pwned", PATTERN),
    ("backbones", {"Smol": {}}, f"backbones.Smol: {PATTERN}"),
    ("backbones", {"$(touch pwned)": {}}, f"backbones.$(touch pwned): {PATTERN}"),
    ("backbones", {"smol\n": {}}, f"backbones.smol: {PATTERN}"),
    ("backbones.smol.contxt", 1, "unknown key"),
    ("backbones.smol.dtype", "bfloat16", "write `requires_gpu: true`"),
    ("backbones.smol.study", "small", "small is not one of methods, mini, paper"),
    ("backbones.smol.context", 1024, "1024 tokens, but study mini has 2k"),
    ("backbones.smol.tokenizer", "llama32", "llama32 is of study mini"),
    ("backbones.smol.tokenizer", "t;id", PATTERN),
    ("backbones.smol.title", "a\x1b[2J", PATTERN),
    ("backbones.smol.model_id", "../../etc", PATTERN),
    ("backbones.smol.model_id", "a/..", PATTERN),
    ("backbones.smol.revision", "`id`", PATTERN),
    ("backbones.1b.revision", "main", "revision main may move; write the commit"),
    (
        "backbones.smol",
        {"study": "paper", "tokenizer": "llama32", "context": 65536},
        "a backbone: mini is not one of",
    ),
    ("variants", {"x;touch pwned": {}}, f"variants.x;touch pwned: {PATTERN}"),
    ("variants", {"ours": {}}, "variants.ours: the name of a study's own recipe"),
    ("variants", {"narrow": {"mop": {}}}, "variants.narrow.mop: Input should be 'map' or 'objective'"),
    ("ablations.loss", ["ours", "a b"], PATTERN),
]
"""A dotted key of config.yaml, a value for it, and words of the message."""


def test_the_configuration_as_it_is() -> None:
    assert configuration_error(ROOT) == ""


@pytest.mark.parametrize(("key", "value", "words"), SETTINGS)
def test_a_wrong_setting(key: str, value: Any, words: str) -> None:
    said = configuration_error(ROOT, reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value))
    assert words in said and "\n" not in said, said


STUDIES: list[tuple[str, dict[str, Any], str]] = [
    ("mini", {"phi.objective.lambda_l": 1}, "phi.objective.lambda_l: unknown key"),
    ("mini", {"diagnostics.packs": ...}, "diagnostics.packs: missing key"),
    ("mini", {"lengths": [512, "2k"]}, "lengths.0: Input should be a valid string, not 512"),
    ("mini", {"lengths": ["1k\n"]}, f"lengths.0: {PATTERN}"),
    ("mini", {"maps.trained": ["1k;id"]}, f"maps.trained.0: {PATTERN}"),
    ("mini", {"mismatch.backbones": ["--help"]}, f"mismatch.backbones.0: {PATTERN}"),
    ("mini", {"tables": ["$(touch pwned)"]}, f"tables.0: {PATTERN}"),
    ("mini", {"methods": ["full", "$(id)"]}, f"methods.1: {PATTERN}"),
    ("mini", {"diagnostics.corpora": ["wiki; touch pwned"]}, "diagnostics.corpora.0: Input should be 'sotu', 'wiki'"),
    ("mini", {"diagnostics.corpora": ["wiki", "cwe", "wiki"]}, "diagnostics.corpora: has wiki twice; remove one"),
    ("mini", {"fidelity.corpora": ["needles"]}, "fidelity.corpora.0: Input should be 'sotu', 'wiki'"),
    ("mini", {"phi.corpora": ["code"]}, "phi.corpora.0: Input should be 'sotu', 'wiki'"),
    ("mini", {"phi.curriculum": {"length": "512"}}, "phi.curriculum.share: missing key"),
    ("mini", {"phi.gpus": 2, "phi.sequences_per_step": 3}, "sequences_per_step (3) is not a multiple of gpus (2)"),
    ("mini", {"truncate_to": "4k"}, "maps.main: trained on 2k, but the study evaluates 4k"),
    ("mini", {"benchmarks.longbench.lengths": ["4k"]}, "maps.main: trained on 2k, but the study evaluates 4k"),
    ("mini", {"benchmarks.longbench.lengths": None}, "tables: natural_main shows one length of longbench"),
    ("mini", {"methods": ["full", "topk_phi"]}, "methods, of the paper's tables and comparisons: topk is not one of f"),
    ("mini", {"methods": ["full", "topk"], "tables": []}, "comparisons: topk_phi is not one of full, topk"),
    ("mini", {"fidelity.methods": ["topk_best"]}, "fidelity.methods: topk_best is not one of "),
    ("mini", {"fidelity.methods": ["topk_phi"]}, "fidelity.methods: topk_phi is not one of "),
    ("mini", {"diagnostics.budget": 3}, "diagnostics.budget: 3 is not one of 2, 4, 8"),
    ("mini", {"diagnostics.backbones": ["1b"]}, "diagnostics.backbones: 1b is not one of smol"),
    ("mini", {"mismatch.budget": 3}, "mismatch.budget: 3 is not one of 2, 4, 8"),
    ("mini", {"ablations.budget": 3}, "ablations.budget: 3 is not one of 2, 4, 8"),
    (
        "mini",
        {"ablations.benchmarks": ["longbench"], "benchmarks.longbench.lengths": ["1k"]},
        "ablations.benchmarks: longbench has prompts of up to 2k, its maps only 1k",
    ),
    ("mini", {"ablations.benchmarks": []}, "ablations.benchmarks: empty; name one, or"),
    ("methods", {"residuals.lengths": ["512"]}, "tables: deployable shows texts and lengths that residuals and"),
    ("mini", {"figures.heat": {}}, "heat is not one of fidelity, fidelity_tokens, error_by_k, "),
    ("mini", {"figures.fixedk_breakdown_x": {"backbone": "smol"}}, "figures.fixedk_breakdown_x.corpus: missing key"),
    ("mini", {"figures.fidelity.maps": ["2k"]}, "figures.fidelity.maps: unknown key"),
    ("mini", {"figures.fidelity.texts": ["wiki", "pydoc"]}, "figures.fidelity: pydoc is not one of wiki, code, ruler"),
    ("methods", {"residuals.methods": ["topk_moments"]}, "residuals.methods: topk is not one of topk_moments"),
    ("methods", {"residuals.corpora": ["cwe"]}, "residuals.corpora.0: Input should be "),
    ("methods", {"residuals.budgets": [2]}, "budgets, of the table residual_estimators: 0.5 is not one of 2"),
    ("methods", {"figures.error_by_k.texts": ["pydoc"]}, "figures.error_by_k: pydoc is not one of wiki, code"),
]
"""A study, what is changed in it by dotted key (`...` takes it out), and words of the message."""


@pytest.mark.parametrize(("study", "changes", "words"), STUDIES)
def test_a_wrong_study(study: str, changes: dict[str, Any], words: str, checkout: Path) -> None:
    change(checkout, study, changes)
    said = configuration_error(checkout)
    assert said.startswith(f"config/studies/{study}.yaml:") and words in said and "\n" not in said, said


def change(checkout: Path, study: str, changes: dict[str, Any]) -> None:
    path = checkout / "config" / "studies" / f"{study}.yaml"
    protocol = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = reduce(dict.__getitem__, sections, protocol)
        section.pop(last, None)
        section |= {} if value is ... else {last: value}
    path.write_text(yaml.safe_dump(protocol))


MINI = "config/studies/mini.yaml"
BABILONG = "generate smol benchmark=babilong length=512 group=main tasks=all"
JOBS: list[tuple[dict[str, Any], str, str]] = [
    ({"diagnostics.corpora": ["wiki"]}, "capture smol corpus=cwe length=1k", f"corpus 'cwe' is not in {MINI}, which"),
    ({"diagnostics.lengths": ["2k"]}, "capture smol corpus=wiki length=1k", "length '1k' is not in diagnostics.length"),
    ({"maps.trained": ["512", "1k"]}, "train smol maps=2k", f"maps '2k' is not in {MINI}, which has 512, 1k"),
    ({"fidelity.lengths": ["1k"]}, "force smol length=2k", "length '2k' is not in fidelity.lengths of config/studies/"),
    ({"benchmarks.babilong.lengths": ["512"]}, BABILONG, "length 512: babilong needs at least 1024"),
    ({"methods": ["full", "topk", "topk_phi", "topk_b"]}, "force smol length=1k", "method 'topk_b' is unknown; the"),
    ({"residuals.methods": ["topk", "full"]}, "residual_errors smol length=1k", "arm 'full': full takes no budget_p"),
    ({}, "table study=mini label=table_nine", f"table 'table_nine' is not in {MINI}, which has natural_main, "),
    ({}, "table study=mini label=runtime_1b", f"table 'runtime_1b' is not in {MINI}, which has natural_main, "),
    ({"ablations.backbones": []}, "table study=mini label=dphi_ablation", f"{MINI}: tables: dphi_ablation has noth"),
    ({"diagnostics.backbones": []}, "table study=mini label=exact_accounting", f"{MINI}: tables: exact_accounting h"),
    ({"fidelity.prompts_at": []}, "table study=mini label=fidelity_answers", f"{MINI}: tables: fidelity_answers has"),
]
"""What is changed in a mini study without tables and figures, a job, and how the line begins that refuses it."""


@pytest.mark.parametrize(("changes", "job", "line"), JOBS)
def test_a_job_that_the_study_cannot_have(changes: dict[str, Any], job: str, line: str, checkout: Path) -> None:
    stage, *words = job.replace(" smol ", " backbone=smol ").split()
    change(checkout, "mini", {"tables": [], "figures": {}} | changes)
    plan, place = plan_of(checkout), dict(word.split("=") for word in words)
    with pytest.raises(SystemExit) as refused:
        plan.work(stage, Wildcards(fromdict=place))
    assert str(refused.value).startswith(line)


def test_a_figure_of_what_no_job_makes_ends_the_run(checkout: Path) -> None:
    change(checkout, "mini", {"figures.entropy_gain.corpus": "poems"})
    run = dry_run(checkout, "all", snakefile=checkout / "Snakefile")
    assert run.code == 1 and run.said[-1].startswith(f"corpus 'poems' is not in {MINI}, which has wiki, cwe")


def test_a_wrong_key_of_a_variant_ends_its_training() -> None:
    plan, place = plan_of(ROOT, variants={"x": {"map": {"d_phy": 8}}}), {"backbone": "smol", "maps": "1k"}
    with pytest.raises(SystemExit, match="^config/config.yaml: variants.x.map.d_phy: unknown key"):
        plan.work("train_variants", Wildcards(fromdict=place))


@pytest.mark.parametrize("name", ["published", "$(touch pwned)"])
def test_a_name_that_no_study_may_have(name: str, checkout: Path) -> None:
    shutil.copy(checkout / "config/studies/mini.yaml", checkout / f"config/studies/{name}.yaml")
    line = f"config/studies: '{name}.yaml': a study's name has letters, digits, _ and - only"
    assert configuration_error(checkout).startswith(line)


def test_a_study_may_leave_most_out(checkout: Path) -> None:
    babilong = yaml.safe_load((ROOT / MINI).read_text())["benchmarks"]["babilong"]
    leaner = {
        "benchmarks": {"babilong": babilong | {"lengths": ["2k"]}}, "mismatch.backbones": [], "ablations.backbones": [],
        "fidelity.lengths": [], "fidelity.benchmarks": [], "fidelity.prompts_at": [], "residuals.backbones": [],
        "tables": ["stress_1pct", "babilong_sweep"], "diagnostics.backbones": [],
        "figures": {"training_curves": {"backbone": "smol", "maps": ["1k"]}},
    }  # fmt: skip
    change(checkout, "mini", leaner)
    run = dry_run(checkout, "all", snakefile=checkout / "Snakefile")
    assert run.jobs == {
        "all": 1, "assets": 1, "prompts": 1, "train": 2, "generate": 1, "score": 1, "table": 2,
        "comparison": 1, "numbers": 1, "figure": 1, "document": 1, "runtime": 1, "report": 1, "total": 15,
    }, run.output  # fmt: skip
    change(checkout, "mini", {"tables": []})
    assert plan_of(checkout).rendered("mini")[0] == "paper_tables/mini/main.tex"
    change(checkout, "mini", {"figures": {}})
    plan = plan_of(checkout)
    assert plan.rendered("mini") == [] and plan.targets("mini") == plan.results("mini")


def test_a_study_that_is_no_yaml(checkout: Path) -> None:
    (checkout / "config" / "studies" / "broken.yaml").write_text("lengths: [1k\n")
    said = configuration_error(checkout)
    assert said.startswith("config/studies/broken.yaml: not valid YAML: ") and "\n" not in said


def test_starting_what_this_machine_cannot_do(tmp_path: Path) -> None:
    """A real start, which must end before the first job and leave nothing that blocks the next run."""
    no_access = {"HF_HOME": str(tmp_path / "huggingface"), "HF_TOKEN": "", "HF_TOKEN_PATH": str(tmp_path / "none")}
    run = snakemake(tmp_path, "--cores", "2", "results/ruler_1b_64k.csv", **no_access)
    assert run.code == 1
    line = run.output.splitlines()[-1]
    assert "backbone 1b: meta-llama/Llama-3.2-1B-Instruct is neither public nor in the Hugging Face cache" in line
    assert "HF_TOKEN" in line and "3b" not in line and "Traceback" not in run.output
    assert ("no NVIDIA GPU" in line) == (not preflight.has_gpu())  # SLURM, where it is here, is not asked
    assert not [path for name in ("results", "logs") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert not list((tmp_path / ".snakemake").glob("locks/*"))


@pytest.mark.parametrize("lost", ["heads_1b_wikitext_64k.parquet", "mass_1b_wikitext_64k.parquet"])
def test_a_capture_of_which_a_part_is_lost_needs_its_backbone(lost: str, tmp_path: Path) -> None:
    captured = ["heads_1b_wikitext_64k.parquet", "mass_1b_wikitext_64k.parquet"]
    there = ["assets/manifest.json", "phi/1b_64k.safetensors", *(f"diagnostics/{n}" for n in captured if n != lost)]
    for path in (tmp_path / "results" / name for name in there):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    no_access = {"HF_HOME": str(tmp_path / "huggingface"), "HF_TOKEN": "", "HF_TOKEN_PATH": str(tmp_path / "none")}
    run = snakemake(tmp_path, "--cores", "2", f"results/diagnostics/{lost}", **no_access)
    assert run.code == 1
    assert "backbone 1b: meta-llama/Llama-3.2-1B-Instruct is neither public nor" in run.output.splitlines()[-1]
    assert not list((tmp_path / "logs").rglob("*.log"))


def test_a_pdf_without_latex_ends_before_the_first_job(tmp_path: Path) -> None:
    """Whatever else is asked for; and only where a PDF is to be made."""
    programs = str(programs_without_latex(tmp_path / "bin"))
    run = snakemake(tmp_path, "--cores", "1", "published", "pdf", PATH=programs)
    assert run.code == 1 and "Traceback" not in run.output
    assert run.output.splitlines()[-1] == (
        "no LaTeX on PATH (pdflatex or tectonic); install one, on Debian `apt install texlive-latex-extra`"
    )
    assert not [path for name in ("results", "logs", "paper_tables") for path in (tmp_path / name).rglob("*.*")]
    table = "paper_tables/published/ruler_sweep.tex"
    run = snakemake(tmp_path, "--cores", "1", table, PATH=programs)
    assert run.code == 0 and (tmp_path / table).is_file(), run.output


def programs_without_latex(folder: Path) -> Path:
    """A folder with what else a run needs."""
    folder.mkdir()
    for name in ("bash", "sh", "which"):
        (folder / name).symlink_to(str(shutil.which(name)))
    (folder / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (folder / "python").chmod(0o755)
    return folder
