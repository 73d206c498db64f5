"""What is wrong is told before any job, in one line that names it and what is known."""

from __future__ import annotations

import shlex
import shutil
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, configuration_error, dry_run, snakemake
from snakemake.iocontainers import Wildcards

from residual_mass.machine import preflight
from residual_mass.study.plan import Plan, load

TARGETS = [
    ("results/ruler_7b_64k.csv", "backbone '7b' is not in config/config.yaml, which has smol, smol-methods, 1b, 3b"),
    (
        "paper_tables/mini/no_such_table.tex",
        "table 'no_such_table' is not in config/studies/mini.yaml, which has natural_main, stress_1pct, ruler_sweep, "
        "babilong_sweep, cross_length_mismatch, dphi_ablation, loss_ablation, fidelity, fidelity_answers, "
        "residual_estimators, deployable, exact_accounting, phi_param_count, training_cost_64k, runtime_smol",
    ),
    (
        "paper_tables/published/runtime_smol.tex",
        "table 'runtime_smol' is not in the paper, which has babilong_sweep, cross_length_mismatch, dphi_ablation, "
        "exact_accounting, loss_ablation, natural_main, phi_param_count, ruler_sweep, runtime_1b, runtime_3b, "
        "stress_1pct, training_cost_64k",
    ),
    (
        "paper_tables/mini/figures/heat.pdf",
        "figure 'heat' is not in config/studies/mini.yaml, which has fidelity, fidelity_tokens, fidelity_tokens_ruler, "
        "entropy_gain, kernel_sanity, logz_calibration, "
        "fullsub_nosub_delta, ablation_kernel_fidelity, "
        "entropy_heatmap, mass_curves, quartile_error, "
        "fixedk_breakdown_smol, fixedk_breakdown_smol_cwe, training_curves",
    ),
    ("paper_tables/small/main.pdf", "study 'small' is not in config/studies, which has methods, mini, paper"),
]


@pytest.mark.parametrize(("target", "line"), TARGETS)
def test_an_unknown_target(target: str, line: str, tmp_path: Path) -> None:
    run = dry_run(tmp_path, target)
    assert (run.code, run.said) == (1, [line])


def test_an_unknown_setting_ends_the_run(tmp_path: Path) -> None:
    run = dry_run(tmp_path, "all", "--config", "exmples=3")
    assert (run.code, run.said) == (
        1,
        ["configuration: exmples: unknown key; `python -m residual_mass.study.reference` explains the keys"],
    )


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"study": "small"}, "config/config.yaml: study: small is not one of methods, mini, paper"),
    (
        {"examples": 0},
        "configuration: examples: Input should be greater than or equal to 1, not 0; `python -m ",
    ),
    (
        {"backbones": {"smol": {"contxt": 1}}},
        "configuration: backbones.smol.contxt: unknown key",
    ),
    ({"backbones": {"Smol": {}}}, "configuration: backbones.Smol: String should match pattern '^[a-z0-9]"),
    (
        {"backbones": {"smol": {"dtype": "bfloat16"}}},
        "configuration: backbones.smol.requires_gpu: a backbone in bfloat16 is run on a GPU; write `requires_gpu: ",
    ),
    (
        {"backbones": {"smol": {"study": "small"}}},
        "config/config.yaml: backbones.smol.study: small is not one of",
    ),
    (
        {"backbones": {"smol": {"context": 1024}}},
        "config/config.yaml: backbones.smol.context: 1024 tokens, but study mini has the length 2k",
    ),
    (
        {"backbones": {"smol": {"tokenizer": "llama32"}}},
        "config/config.yaml: backbones.1b.tokenizer: llama32 is of study mini; backbones share one within a study",
    ),
    (
        {"variants": {"narrow": {"map": {"d_phy": 8}}}},
        "configuration: variants.narrow.map.d_phy: unknown key",
    ),
    (
        {"variants": {"ours": {}}},
        "config/config.yaml: variants.ours: the name of a study's own recipe",
    ),
    (
        {"variants": {"wide": {"objective": {"budgets": []}}}},
        "configuration: variants.wide.objective.budgets: Tuple should have at least 1 item",
    ),
    ({"ablations": {"dphi": ["dphi_8"]}}, "config/config.yaml: ablations.dphi: dphi_8 is not one of ours, dphi_32, "),
    (
        {"backbones": {"smol": {"study": "paper", "tokenizer": "llama32", "context": 65536}}},
        "config/config.yaml: backbones: study mini has none; give one `study: mini`",
    ),
]


def test_the_configuration_as_it_is() -> None:
    assert configuration_error(ROOT) == ""


@pytest.mark.parametrize(("settings", "line"), SETTINGS)
def test_a_wrong_setting(settings: dict[str, Any], line: str) -> None:
    said = configuration_error(ROOT, settings)
    assert said.startswith(line) and "\n" not in said


STUDIES: list[tuple[str, dict[str, Any], str]] = [
    ("mini", {"phi.objective.lambda_l": 1}, "phi.objective.lambda_l: unknown key"),
    ("mini", {"diagnostics.packs": ...}, "diagnostics.packs: missing key"),
    ("mini", {"lengths": [512, "2k"]}, "lengths.0: Input should be a valid string, not 512; `python -m residual_mass."),
    ("mini", {"maps.trained": ["512", "1k"]}, "maps.main: 2k is not among maps.trained"),
    ("mini", {"diagnostics.corpora": ["wiki", "cwe", "wiki"]}, "diagnostics.corpora: has wiki twice; remove one"),
    ("mini", {"diagnostics.corpora": ["cwe", "wiki"]}, "diagnostics.corpora: cwe comes first, where the text belongs"),
    ("mini", {"fidelity.corpora": ["needles"]}, "fidelity.corpora.0: needles is not one of sotu, wiki, pydoc, books, "),
    ("mini", {"phi.corpora": ["code"]}, "phi.corpora.0: code is not one of sotu, wiki, pydoc, fineweb, arxiv, bigp"),
    ("mini", {"phi.curriculum": {"length": "512"}}, "phi.curriculum.share: missing key"),
    ("mini", {"phi.curriculum": {"length": "1k", "share": 0.5}}, "phi.curriculum.length: 1k is beyond the trained len"),
    ("mini", {"phi.gpus": 2, "phi.sequences_per_step": 3}, "phi.sequences_per_step: 3 is not a multiple of gpus (2)"),
    ("mini", {"truncate_to": "4k"}, "maps.main: 2k is what the maps are trained on, but the study has the length 4k"),
    ("mini", {"benchmarks.longbench.lengths": ["4k"]}, "maps.main: 2k is what the maps are trained on, but the study"),
    ("mini", {"benchmarks.babilong.lengths": ["512"]}, "benchmarks.babilong: length 512: babilong needs at least 1024"),
    ("mini", {"benchmarks.longbench.lengths": None}, "tables: natural_main shows one length of longbench"),
    ("mini", {"methods": ["full", "topk_phi"]}, "methods: topk is missing, which tables of the paper, mismatch and "),
    ("mini", {"methods": ["full", "topk_best"]}, "methods: topk_best is not one of full, topk, topk_phi, "),
    ("mini", {"fidelity.methods": ["topk_best"]}, "fidelity.methods: topk_best is not one of "),
    ("mini", {"diagnostics.budget": 3}, "diagnostics.budget: 3 is not one of 2, 4, 8"),
    ("mini", {"diagnostics.backbones": ["1b"]}, "diagnostics.backbones: 1b is not one of smol"),
    ("mini", {"mismatch.maps": ["256", "2k"]}, "mismatch.maps: 256 is not one of 512, 1k, 2k"),
    ("mini", {"ablations.budget": 3}, "ablations.budget: 3 is not one of 2, 4, 8"),
    ("mini", {"ablations.benchmarks": ["babilong"], "benchmarks.babilong.lengths": ["2k"]}, "ablations.length: 1k is "),
    (
        "mini",
        {"ablations.benchmarks": ["longbench"], "benchmarks.longbench.lengths": ["1k"]},
        "ablations.benchmarks: prompts of longbench are up to truncate_to (2k) long, beyond ablations.length (1k)",
    ),
    (
        "mini",
        {"ablations.backbones": [], "figures": {}},
        "tables: dphi_ablation needs a backbone in ablations.back",
    ),
    ("mini", {"diagnostics.backbones": []}, "tables: exact_accounting needs a backbone in diagnostics.backbones"),
    ("mini", {"fidelity.lengths": [], "fidelity.prompts_at": []}, "tables: fidelity needs a length in fidelity.len"),
    (
        "mini",
        {"fidelity.lengths": ["1k"], "fidelity.benchmarks": ["longbench"], "figures": {}},
        "tables: fidelity_answers needs one of fidelity.benchmarks at one of fidelity.prompts_at",
    ),
    ("mini", {"tables": ["table_nine"]}, "tables: table_nine is not one of natural_main, stress_1pct, "),
    ("mini", {"tables": ["runtime_1b"]}, "tables: runtime_1b is not one of natural_main, "),
    ("mini", {"figures.heat": {}}, "figures: heat is not one of fidelity, fidelity_tokens, error_by_k, "),
    ("mini", {"figures.fixedk_breakdown_x": {"backbone": "smol"}}, "figures.fixedk_breakdown_x.corpus: missing key"),
    ("mini", {"figures.fidelity.texts": ["wiki", "pydoc"]}, "figures.fidelity.texts: pydoc is not one of wiki, code, "),
    ("mini", {"figures.ablation_kernel_fidelity.variants": ["dphi_7"]}, "figures.ablation_kernel_fidelity.variants: d"),
    ("methods", {"residuals.methods": ["topk", "full"]}, "residuals.methods: full is not one of topk, topk_phi, "),
    ("methods", {"residuals.methods": ["topk_moments"]}, "residuals.methods: topk is missing, with which the others "),
    ("methods", {"residuals.corpora": ["cwe"]}, "residuals.corpora.0: cwe is not one of "),
    (
        "methods",
        {"residuals.backbones": [], "figures": {}},
        "tables: residual_estimators needs a backbone in",
    ),
    ("methods", {"residuals.budgets": [2]}, "residuals.budgets, as residual_estimators shows: 0.5 is not one of 2"),
    ("methods", {"residuals.corpora": ["books"], "figures": {}}, "tables: deployable needs a length and a text of r"),
    ("methods", {"figures.error_by_k.texts": ["pydoc"]}, "figures.error_by_k.texts: pydoc is not one of wiki, code"),
]
"""A study, what is changed in it by dotted key (`...` takes it out), and the beginning of the message."""


@pytest.mark.parametrize(("study", "changes", "line"), STUDIES)
def test_a_wrong_study(study: str, changes: dict[str, Any], line: str, checkout: Path) -> None:
    change(checkout, study, changes)
    said = configuration_error(checkout)
    assert said.startswith(f"config/studies/{study}.yaml: {line}") and "\n" not in said


def change(checkout: Path, study: str, changes: dict[str, Any]) -> None:
    path = checkout / "config" / "studies" / f"{study}.yaml"
    protocol = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = reduce(dict.__getitem__, sections, protocol)
        section.pop(last, None)
        section |= {} if value is ... else {last: value}
    path.write_text(yaml.safe_dump(protocol))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"figures.entropy_gain.corpus": "poems"}, "corpus 'poems' is not in config/studies/mini.yaml, which has wiki"),
        ({"diagnostics.lengths": ["2k"]}, "length '1k' is not in diagnostics.lengths of config/studies/mini.yaml"),
        ({"figures.training_curves.maps": ["4k"]}, "maps '4k' is not in config/studies/mini.yaml, which has 512, 1k"),
        ({"fidelity.lengths": ["1k"]}, "length '2k' is not in fidelity.lengths of config/studies/mini.yaml, which has"),
    ],
)
def test_what_a_figure_needs_and_no_job_makes(changes: dict[str, Any], line: str, checkout: Path) -> None:
    change(checkout, "mini", changes)
    run = dry_run(checkout, "all", snakefile=checkout / "Snakefile")
    assert run.code == 1 and run.said[-1].startswith(line), run.output


def test_a_study_may_not_be_called_like_the_papers_tables(checkout: Path) -> None:
    shutil.copy(checkout / "config/studies/mini.yaml", checkout / "config/studies/published.yaml")
    assert configuration_error(checkout).startswith("config/studies: 'published.yaml': a study's name has letters")


def test_a_study_may_leave_comparisons_out(checkout: Path) -> None:
    path = checkout / "config" / "studies" / "mini.yaml"
    study = yaml.safe_load(path.read_text())
    study["benchmarks"] = {"babilong": study["benchmarks"]["babilong"] | {"lengths": ["2k"]}}
    study["mismatch"]["backbones"], study["ablations"]["backbones"] = [], []
    study["fidelity"] |= {"lengths": [], "benchmarks": [], "prompts_at": []}
    study["tables"] = ["stress_1pct", "babilong_sweep"]
    study["figures"] = {"training_curves": {"backbone": "smol", "maps": ["1k"]}}
    study["residuals"] |= {"backbones": []}
    study["diagnostics"] |= {"backbones": [], "corpora": ["wiki"]}
    path.write_text(yaml.safe_dump(study))
    assert configuration_error(checkout) == ""
    run = dry_run(checkout, "all", snakefile=checkout / "Snakefile")
    assert run.jobs == {
        "all": 1, "assets": 1, "prompts": 1, "train": 2, "generate": 1, "score": 1, "table": 2,
        "comparison": 1, "numbers": 1, "figure": 1, "document": 1, "runtime": 1, "report": 1, "total": 15,
    }, run.output  # fmt: skip
    study["tables"] = []
    path.write_text(yaml.safe_dump(study))
    plan = plan_of(checkout)
    assert plan.rendered("mini")[0] == "paper_tables/mini/main.tex"
    with pytest.raises(SystemExit, match="^config/studies/mini.yaml: tables: has none to compare"):
        plan.work("comparison", Wildcards(fromdict={"study": "mini"}))
    study["figures"] = {}
    path.write_text(yaml.safe_dump(study))
    plan = plan_of(checkout)
    assert plan.rendered("mini") == [] and plan.targets("mini") == plan.results("mini")
    with pytest.raises(SystemExit, match="^config/studies/mini.yaml: tables, figures: has neither"):
        plan.work("document", Wildcards(fromdict={"study": "mini"}))


def plan_of(checkout: Path) -> Plan:
    return load(checkout, yaml.safe_load((checkout / "config" / "config.yaml").read_text()))


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
