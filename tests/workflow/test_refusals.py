"""What is wrong is told before any job, in one line that names it and what is known."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, configuration_error, dry_run, snakemake
from snakemake.iocontainers import Wildcards

from residual_mass.machine import preflight
from residual_mass.study.plan import Plan, load
from residual_mass.study.sections.figures import FIGURES

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
    assert (run.code, run.said) == (1, ["configuration: exmples: unknown key; config/README.md explains the keys"])


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"study": "small"}, "study 'small' is not known; known are methods, mini, paper (config/studies)"),
    (
        {"examples": 0},
        "configuration: examples: Input should be greater than or equal to 1, not 0; config/README.md ",
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
    ({"backbones": {"smol": {"study": "small"}}}, "config/config.yaml: backbones.smol.study: 'small' is not a study"),
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
    ({"variants": {"ours": {}}}, "configuration: variants.ours: the name of a study's own recipe; rename the variant"),
    (
        {"variants": {"wide": {"objective": {"budgets": []}}}},
        "configuration: variants.wide.objective.budgets: Tuple should have at least 1 item",
    ),
    ({"ablations": {"dphi": ["dphi_8"]}}, "configuration: ablations.dphi: dphi_8 is not ours and not one of dphi_32, "),
    (
        {"backbones": {"smol": {"study": "paper", "tokenizer": "llama32", "context": 65536}}},
        "study mini has no backbone;",
    ),
]


def test_the_configuration_as_it_is() -> None:
    assert configuration_error(ROOT) == ""


@pytest.mark.parametrize(("settings", "line"), SETTINGS)
def test_a_wrong_setting(settings: dict[str, Any], line: str) -> None:
    said = configuration_error(ROOT, settings)
    assert said.startswith(line) and "\n" not in said


def add_key(study: dict[str, Any]) -> None:
    study["phi"]["objective"]["lambda_l"] = 1


def drop_key(study: dict[str, Any]) -> None:
    del study["diagnostics"]["packs"]


def forget_quotes(study: dict[str, Any]) -> None:
    study["lengths"] = [512, "2k"]


def evaluate_untrained_maps(study: dict[str, Any]) -> None:
    study["maps"]["trained"] = ["512", "1k"]


def show_uncaptured_text(study: dict[str, Any]) -> None:
    study["figures"]["entropy_gain"]["corpus"] = "poems"


def ask_for_unknown_table(study: dict[str, Any]) -> None:
    study["tables"].append("table_nine")


def tabulate_latencies_of_a_foreign_backbone(study: dict[str, Any]) -> None:
    study["tables"].append("runtime_1b")


def go_below_every_task(study: dict[str, Any]) -> None:
    study["benchmarks"]["babilong"]["lengths"] = ["512"]


def compare_untrained_maps(study: dict[str, Any]) -> None:
    study["mismatch"]["maps"] = ["256", "2k"]


def ablate_beyond_the_benchmark(study: dict[str, Any]) -> None:
    study["benchmarks"]["babilong"]["lengths"] = ["2k"]
    study["ablations"]["benchmarks"] = ["babilong"]


def ablate_at_another_budget(study: dict[str, Any]) -> None:
    study["ablations"]["budget"] = 3


def evaluate_longer_than_the_maps(study: dict[str, Any]) -> None:
    study["benchmarks"]["longbench"]["lengths"] = ["4k"]


def cut_to_more_than_the_maps(study: dict[str, Any]) -> None:
    study["truncate_to"] = "4k"


def show_two_lengths_of_longbench(study: dict[str, Any]) -> None:
    study["benchmarks"]["longbench"]["lengths"] = None


def compare_without_topk(study: dict[str, Any]) -> None:
    study["methods"], study["tables"] = ["full", "topk_phi"], []


def show_an_ablation_of_nothing(study: dict[str, Any]) -> None:
    study["ablations"]["backbones"] = []


def show_fidelity_at_no_length(study: dict[str, Any]) -> None:
    study["fidelity"] |= {"lengths": [], "prompts_at": []}


def show_fidelity_on_no_text(study: dict[str, Any]) -> None:
    study["fidelity"]["corpora"] = []


def show_answers_at_unanswered_lengths(study: dict[str, Any]) -> None:
    study["fidelity"] |= {"lengths": ["1k"], "prompts_at": ["1k"], "benchmarks": ["longbench"]}


def share_out_unevenly(study: dict[str, Any]) -> None:
    study["phi"] |= {"gpus": 2, "sequences_per_step": 3}


def start_longer_than_trained(study: dict[str, Any]) -> None:
    study["phi"]["curriculum"] = {"length": "1k", "share": 0.5}


def start_without_a_share(study: dict[str, Any]) -> None:
    study["phi"]["curriculum"] = {"length": "512"}


def show_curves_of_untrained_maps(study: dict[str, Any]) -> None:
    study["figures"]["training_curves"]["maps"] = ["1k", "4k"]


def show_ablations_where_nothing_is_captured(study: dict[str, Any]) -> None:
    study["diagnostics"]["lengths"] = ["2k"]
    for label in ("logz_calibration", "fullsub_nosub_delta"):
        study["figures"][label]["lengths"] = ["2k"]


def show_an_unknown_variant(study: dict[str, Any]) -> None:
    study["figures"]["ablation_kernel_fidelity"]["variants"] = ["dphi_7"]


def capture_at_another_budget(study: dict[str, Any]) -> None:
    study["diagnostics"]["budget"] = 3


def capture_a_foreign_backbone(study: dict[str, Any]) -> None:
    study["diagnostics"]["backbones"] = ["1b"]


def make_packs_of_prompts_that_are_not_there(study: dict[str, Any]) -> None:
    study["benchmarks"]["ruler"]["lengths"] = ["2k"]
    study["mismatch"]["lengths"], study["ablations"]["benchmarks"] = ["2k"], ["babilong"]
    study["fidelity"]["prompts_at"] = ["2k"]


def ablate_prompts_longer_than_the_maps(study: dict[str, Any]) -> None:
    study["benchmarks"]["longbench"]["lengths"] = ["1k"]
    study["ablations"]["benchmarks"] = ["ruler", "longbench"]


def compare_maps_on_prompts(study: dict[str, Any]) -> None:
    study["diagnostics"]["corpora"] = ["cwe", "wiki"]


def compare_maps_on_needles(study: dict[str, Any]) -> None:
    study["diagnostics"]["corpora"] = ["needles", "wiki"]


def continue_an_unknown_text(study: dict[str, Any]) -> None:
    study["fidelity"]["corpora"] = ["wiki", "poems"]


def continue_prompts_as_a_text(study: dict[str, Any]) -> None:
    study["fidelity"]["corpora"] = ["needles"]


def train_on_held_out_text(study: dict[str, Any]) -> None:
    study["phi"]["corpora"] = ["code"]


def tabulate_no_diagnostics(study: dict[str, Any]) -> None:
    study["diagnostics"]["backbones"] = []


def break_down_without_a_length(study: dict[str, Any]) -> None:
    study["figures"]["fixedk_breakdown_other"] = {"backbone": "smol", "corpus": "wiki"}


def capture_a_text_twice(study: dict[str, Any]) -> None:
    study["diagnostics"]["corpora"] = ["wiki", "cwe", "wiki"]


def show_more_panels_than_fit(study: dict[str, Any]) -> None:
    show_panels(study, "fullsub_nosub_delta", ["wiki", "books", "pydoc", "cwe"])


def show_panels(study: dict[str, Any], label: str, corpora: list[str]) -> None:
    """A panel for each at both lengths."""
    study["diagnostics"]["corpora"] = study["figures"][label]["corpora"] = corpora


def compare_an_unknown_method(study: dict[str, Any]) -> None:
    study["residuals"]["methods"] += ["topk_best"]


def compare_full_attention(study: dict[str, Any]) -> None:
    study["residuals"]["methods"] += ["full"]


def compare_methods_without_topk(study: dict[str, Any]) -> None:
    study["residuals"]["methods"].remove("topk")


def compare_methods_on_prompts(study: dict[str, Any]) -> None:
    study["residuals"]["corpora"] += ["cwe"]


def compare_methods_of_a_foreign_backbone(study: dict[str, Any]) -> None:
    study["residuals"]["backbones"] = ["1b"]


def tabulate_no_residuals(study: dict[str, Any]) -> None:
    study["residuals"]["backbones"] = []


def tabulate_a_budget_of_no_residuals(study: dict[str, Any]) -> None:
    study["residuals"]["budgets"].remove(4)


def draw_an_uncompared_text(study: dict[str, Any]) -> None:
    study["figures"]["error_by_k"]["texts"] = ["pydoc"]


def draw_an_uncompared_length(study: dict[str, Any]) -> None:
    study["residuals"]["lengths"] = ["1k"]


def draw_recall_of_an_uncompared_text(study: dict[str, Any]) -> None:
    study["figures"]["selection_recall"]["texts"] = ["pydoc"]


def draw_bytes_of_an_unmeasured_text(study: dict[str, Any]) -> None:
    study["fidelity"]["corpora"] = study["figures"]["fidelity"]["texts"] = ["wiki"]


def draw_more_pairs_than_fit(study: dict[str, Any]) -> None:
    study["figures"]["fidelity_by_bytes"]["texts"] += ["books"]


def tabulate_nothing_that_both_have(study: dict[str, Any]) -> None:
    study["residuals"]["corpora"] = ["books"]


def show_an_unmeasured_text(study: dict[str, Any]) -> None:
    study["figures"]["fidelity"]["texts"] = ["wiki", "pydoc"]


def show_an_unmeasured_length(study: dict[str, Any]) -> None:
    study["fidelity"] |= {"lengths": ["1k"], "prompts_at": ["1k"]}
    study["figures"]["fidelity"]["lengths"] = ["1k"]


def show_prompts_where_there_are_none(study: dict[str, Any]) -> None:
    study["fidelity"] |= {"benchmarks": ["longbench"], "prompts_at": ["1k", "2k"]}
    study["figures"]["fidelity"]["texts"] = ["wiki", "longbench"]


def ask_for_unknown_figure(study: dict[str, Any]) -> None:
    study["figures"]["heat"] = {}


STUDY_SLIPS = [
    (share_out_unevenly, "phi.sequences_per_step: 3 is not a multiple of gpus (2), which share them; change one"),
    (start_longer_than_trained, "phi.curriculum.length: 1k is beyond the trained length 512"),
    (start_without_a_share, "phi.curriculum.share: missing key"),
    (show_curves_of_untrained_maps, "figures.training_curves.maps: 4k is not one of 512, 1k, 2k"),
    (show_ablations_where_nothing_is_captured, "figures.ablation_kernel_fidelity: needs ablations.length (1k) in diag"),
    (show_an_unknown_variant, "figures.ablation_kernel_fidelity.variants: dphi_7 is not one of dphi_32, "),
    (capture_at_another_budget, "diagnostics.budget: 3 is not one of 2, 4, 8"),
    (capture_a_foreign_backbone, "diagnostics.backbones: 1b is not one of smol"),
    (make_packs_of_prompts_that_are_not_there, "diagnostics.corpora: cwe is made of RULER's prompts, which the study"),
    (
        compare_maps_on_prompts,
        "diagnostics.corpora: cwe comes first, where the text belongs that all maps are compared on",
    ),
    (
        compare_maps_on_needles,
        "diagnostics.corpora: needles comes first, where the text belongs that all maps are compa",
    ),
    (
        continue_an_unknown_text,
        "fidelity.corpora.1: poems is not one of sotu, wiki, pydoc, books, code, wikitext",
    ),
    (continue_prompts_as_a_text, "fidelity.corpora.0: needles is not one of sotu, wiki, "),
    (train_on_held_out_text, "phi.corpora.0: code is not one of sotu, wiki, pydoc, fineweb, arxiv, bigpatent"),
    (tabulate_no_diagnostics, "tables: exact_accounting needs a backbone in diagnostics.backbones"),
    (break_down_without_a_length, "figures.fixedk_breakdown_other.length: missing key"),
    (capture_a_text_twice, "diagnostics.corpora: has wiki twice; remove one"),
    (
        show_more_panels_than_fit,
        "figures.fullsub_nosub_delta: corpora and lengths make 8 panels, but the figure has room for 6",
    ),
    (show_an_unmeasured_text, "figures.fidelity.texts: pydoc is not one of wiki, code, ruler"),
    (show_an_unmeasured_length, "figures.fidelity_tokens.length: 2k is not one of 1k"),
    (show_prompts_where_there_are_none, "figures.fidelity.lengths: prompts of longbench are not continued at 1k; take"),
    (
        ask_for_unknown_figure,
        "figures: heat is not one of fidelity, fidelity_tokens, error_by_k, selection_recall, fidelity_by_bytes, ",
    ),
    (evaluate_longer_than_the_maps, "length 4k is beyond maps.main (2k), which the maps were trained on"),
    (cut_to_more_than_the_maps, "truncate_to: 4k is beyond maps.main (2k), which the maps were trained on"),
    (show_two_lengths_of_longbench, "tables: natural_main shows one length of longbench"),
    (compare_without_topk, "methods: topk is missing, which mismatch and ablations compare with"),
    (show_an_ablation_of_nothing, "tables: dphi_ablation needs a backbone in ablations.backbones"),
    (show_fidelity_at_no_length, "tables: fidelity needs a length in fidelity.lengths and a text in fidelity.corpora"),
    (show_fidelity_on_no_text, "tables: fidelity needs a length in fidelity.lengths and a text in fidelity.corpora"),
    (
        show_answers_at_unanswered_lengths,
        "tables: fidelity_answers needs one of fidelity.benchmarks at one of fidelity.prompts_at",
    ),
    (compare_untrained_maps, "mismatch.maps: 256 is not one of 512, 1k, 2k"),
    (ablate_prompts_longer_than_the_maps, "ablations.benchmarks: prompts of longbench are up to truncate_to (2k) long"),
    (ablate_beyond_the_benchmark, "ablations.length: 1k is not one of 2k"),
    (ablate_at_another_budget, "ablations.budget: 3 is not one of 2, 4, 8"),
    (add_key, "phi.objective.lambda_l: unknown key"),
    (drop_key, "diagnostics.packs: missing key"),
    (forget_quotes, "lengths.0: Input should be a valid string, not 512; config/README.md explains the keys"),
    (evaluate_untrained_maps, "maps.main: 2k is not among maps.trained"),
    (show_uncaptured_text, "figures.entropy_gain.corpus: poems is not one of wiki"),
    (ask_for_unknown_table, "tables: table_nine is not one of natural_main, stress_1pct, "),
    (
        tabulate_latencies_of_a_foreign_backbone,
        "tables: runtime_1b is not one of natural_main, stress_1pct, ruler_sweep, babilong_sweep, "
        "cross_length_mismatch, dphi_ablation, loss_ablation, fidelity, fidelity_answers, residual_estimators, "
        "deployable, exact_accounting, phi_param_count, training_cost_64k, runtime_smol",
    ),
    (go_below_every_task, "benchmarks.babilong: length 512: babilong needs at least 1024 tokens"),
]
METHODS_SLIPS = [
    (compare_an_unknown_method, "residuals.methods: topk_best is not one of topk, topk_phi, "),
    (compare_full_attention, "residuals.methods: full is not one of topk, topk_phi, "),
    (compare_methods_without_topk, "residuals.methods: topk is missing, with which the others are compared; add it"),
    (compare_methods_on_prompts, "residuals.corpora.2: cwe is not one of "),
    (compare_methods_of_a_foreign_backbone, "residuals.backbones: 1b is not one of smol-methods"),
    (tabulate_no_residuals, "tables: residual_estimators needs a backbone in residuals.backbones"),
    (
        tabulate_a_budget_of_no_residuals,
        "residuals.budgets: 4 is missing, which table residual_estimators shows; add it",
    ),
    (draw_an_uncompared_text, "figures.error_by_k.texts: pydoc is not one of wiki, code"),
    (draw_an_uncompared_length, "figures.error_by_k.lengths: 4k is not one of 1k"),
    (draw_recall_of_an_uncompared_text, "figures.selection_recall.texts: pydoc is not one of wiki, code"),
    (draw_bytes_of_an_unmeasured_text, "figures.fidelity_by_bytes.texts: code is not one of wiki"),
    (
        draw_more_pairs_than_fit,
        "figures.fidelity_by_bytes: texts and lengths make 6 pairs of panels, but the figure has room for 4",
    ),
    (
        tabulate_nothing_that_both_have,
        "tables: deployable needs a length and a text of residuals that fidelity has, too",
    ),
]


@pytest.mark.parametrize(
    ("study", "slip", "line"),
    [("mini", *each) for each in STUDY_SLIPS] + [("methods", *each) for each in METHODS_SLIPS],
)
def test_a_wrong_study(study: str, slip: Callable[[dict[str, Any]], None], line: str, checkout: Path) -> None:
    path = checkout / "config" / "studies" / f"{study}.yaml"
    protocol = yaml.safe_load(path.read_text())
    slip(protocol)
    path.write_text(yaml.safe_dump(protocol))
    said = configuration_error(checkout)
    assert said.startswith(f"config/studies/{study}.yaml: {line}") and "\n" not in said


def test_a_study_may_not_be_called_like_the_papers_tables(checkout: Path) -> None:
    shutil.copy(checkout / "config/studies/mini.yaml", checkout / "config/studies/published.yaml")
    said = configuration_error(checkout)
    assert (
        said
        == "config/studies/published.yaml: that name is for the tables with the paper's own values; rename the study"
    )


@pytest.mark.parametrize("label", ["logz_calibration", "fullsub_nosub_delta"])
def test_a_figure_may_show_as_many_panels_as_it_draws(label: str, checkout: Path) -> None:
    path = checkout / "config" / "studies" / "mini.yaml"
    study = yaml.safe_load(path.read_text())
    show_panels(study, label, ["wiki", "books", "cwe"])
    assert len(study["figures"][label]["corpora"]) * len(study["figures"][label]["lengths"]) == FIGURES[label].room[0]
    path.write_text(yaml.safe_dump(study))
    assert configuration_error(checkout) == ""


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
        plan.compared_tables(Wildcards(fromdict={"study": "mini"}))
    study["figures"] = {}
    path.write_text(yaml.safe_dump(study))
    plan = plan_of(checkout)
    assert plan.rendered("mini") == [] and plan.targets("mini") == plan.results("mini")
    with pytest.raises(SystemExit, match="^config/studies/mini.yaml: tables, figures: has neither"):
        plan.document_tables(Wildcards(fromdict={"study": "mini"}))


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
