"""The graph of jobs of every study and target, and what each job is told."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, Run, dry_run, made, snakemake

from residual_mass.cli import _parser
from residual_mass.core.settings import MapsSpec, to_json, tokens_of
from residual_mass.paper.comparison import COMPARED
from residual_mass.paper.tables import TABLES
from residual_mass.study.sections.evaluation import Resampling
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


MINI = {
    "assets": 1, "prompts": 4, "train": 3, "train_variants": 1, "generate": 6, "score": 4, "score_comparison": 3,
    "mismatch": 1, "ablation": 2, "capture": 4, "kernels": 2, "findings": 1,
    "residual_errors": 2, "force": 2, "fidelity": 2, "runtime": 1, "table": 13, "comparison": 1,
    "numbers": 1, "figure": 14, "document": 1, "report": 1,
}  # fmt: skip
GENERATE_1B = 4 * (13 + 5) + 4 + 3 * 13 + 13 + 5
"""RULER and BABILong at four lengths, LongBench at one; the mismatch on RULER at three; the ablations at one."""
PAPER = {
    "assets": 1, "prompts": 9, "train": 5, "train_variants": 1, "generate": GENERATE_1B + 4 * (13 + 5) + 4, "score": 18,
    "score_comparison": 3 + 4, "mismatch": 1, "ablation": 2, "capture": 4 + 1, "kernels": 2,
    "findings": 1, "residual_errors": 2, "force": 8, "fidelity": 8, "runtime": 2,
    "table": 15, "comparison": 1, "numbers": 1, "figure": 15, "document": 1, "report": 1,
}  # fmt: skip


METHODS = {
    "assets": 1, "force": 4, "fidelity": 4, "residual_errors": 4, "table": 3, "numbers": 1, "figure": 4, "document": 1,
    "report": 1,
}  # fmt: skip


@pytest.mark.parametrize(("study", "jobs"), [("mini", MINI), ("paper", PAPER), ("methods", METHODS)])
def test_all_of_a_study(study: str, jobs: dict[str, int], studies: dict[str, Run]) -> None:
    assert studies[study].code == 0, studies[study].output
    assert studies[study].jobs == {**jobs, "all": 1, "total": sum(jobs.values()) + 1}
    assert len(studies[study].commands) == sum(jobs.values())


def test_a_study_of_selectors_needs_no_maps_and_no_prompts(studies: dict[str, Run]) -> None:
    for spec in specs(studies["methods"], "force", ForceSpec):
        assert not spec.maps and not spec.asked and len(spec.corpora) == 2


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


def test_continuations_are_decoded_with_the_main_arms(studies: dict[str, Run]) -> None:
    """And on documents with the maps of other lengths, of which generation has a table of its own."""
    for study, others in (("mini", {"smol": ["512", "1k"]}), ("paper", {"1b": ["4k", "8k", "16k"]})):
        kept = yaml.safe_load((ROOT / "config" / "studies" / f"{study}.yaml").read_text())
        run = studies[study]
        jobs = list(zip(specs(run, "force", ForceSpec), told(run, "force"), strict=True))
        assert {s.length for s, _ in jobs} == set(kept["fidelity"]["lengths"])
        arms = {s.backbone.name: s.arms for s in specs(run, "generate", GenerateSpec) if s.arms[0].is_full}
        for s, given in jobs:
            name, main = s.backbone.name, kept["maps"]["main"]
            labels = [main, *others.get(name, [])]
            assert s.arms == arms[name]
            assert [maps.label for maps in s.maps] == labels
            assert given["phi"] == [f"results/phi/{name}_{label}.safetensors" for label in labels]
            assert [(arm.method, arm.budget_percent, arm.maps) for arm in s.arms_of_documents] == [
                (method, budget, label)
                for method, label in [
                    *(("topk_phi", label) for label in labels[1:]),
                    *((name, main if "phi" in name else None) for name in kept["fidelity"]["methods"]),
                ]
                for budget in kept["budgets"]
            ]
            frozen = [Path(path).parent.name for path in given.get("prompts", [])]
            assert frozen == [f"{a.benchmark}_{s.backbone.tokenizer}_{s.length}" for a in s.asked]
            assert [a.benchmark for a in s.asked] == [
                b for b in kept["fidelity"]["benchmarks"]
                if s.length in (kept["benchmarks"][b]["lengths"] or kept["lengths"])
                and s.length in kept["fidelity"]["prompts_at"]
            ]  # fmt: skip
            assert {a.examples for a in s.asked} <= {kept["fidelity"]["examples"]}


def by_place(run: Run, stage: str, cls: type[Any]) -> dict[tuple[str, str, str], tuple[Any, dict[str, list[str]]]]:
    """What every job of a stage is told and its flags, by backbone, corpus and length."""
    jobs = [(parse_spec(cls, given["spec"][0]), given) for given in told(run, stage)]
    places = {(spec.backbone.name, spec.corpus, spec.length): (spec, given) for spec, given in jobs}
    assert len(places) == len(jobs)
    return places


def of_captures(name: str, places: list[str]) -> list[str]:
    return [f"results/diagnostics/{name}_{place}.parquet" for place in places]


SETTINGS_1B = [f"1b_{corpus}_{length}" for corpus in ("wikitext", "cwe") for length in ("4k", "64k")]


def test_captures_see_the_main_maps_and_for_cwe_the_prompts(studies: dict[str, Run]) -> None:
    captures = by_place(studies["paper"], "capture", CaptureSpec)
    assert {"_".join(place) for place in captures} == {*SETTINGS_1B, "3b_wikitext_64k"}
    for (backbone, corpus, length), (told_to, given) in captures.items():
        assert told_to.maps == MapsSpec("64k", 65536)
        assert given["phi"] == [f"results/phi/{backbone}_64k.safetensors"]
        assert given["prompts"] == [f"results/prompts/ruler_llama32_{length}/manifest.json"] * (corpus == "cwe")
        for name in ("heads", "mass"):
            assert given[name] == of_captures(name, [f"{backbone}_{corpus}_{length}"])


def test_kernels_are_of_the_main_maps_and_at_the_ablations_length_of_theirs(
    studies: dict[str, Run], tmp_path: Path
) -> None:
    kernels = by_place(studies["paper"], "kernels", KernelsSpec)
    variants = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())["variants"]
    expected = {"4k": ["64k", "4k", *(f"4k-{name}" for name in sorted(variants))], "64k": ["64k"]}
    assert set(kernels) == {("1b", "wikitext", length) for length in expected}
    for (backbone, _, length), (told_to, given) in kernels.items():
        assert [maps.label for maps in told_to.maps] == expected[length]
        assert {maps.length for maps in told_to.maps[1:]} <= {4096} and told_to.maps[0].length == 65536
        assert given["phi"] == [f"results/phi/{backbone}_{label}.safetensors" for label in expected[length]]
        assert (told_to.budget_percent, told_to.layer, told_to.head) == (1, 0, 31)
    # 3b has no ablations, so their maps must not be trained for it.
    run = dry_run(tmp_path, "results/diagnostics/kernels_3b_wikitext_4k.parquet")
    (told_to,) = specs(run, "kernels", KernelsSpec)
    assert [maps.label for maps in told_to.maps] == ["64k"]
    assert run.jobs == {"assets": 1, "train": 1, "kernels": 1, "total": 3}


def test_findings_read_every_capture_in_one_order(studies: dict[str, Run]) -> None:
    (given,) = told(studies["paper"], "findings")
    (told_to,) = specs(studies["paper"], "findings", FindingsSpec)
    assert given["heads"] == of_captures("heads", SETTINGS_1B)
    assert given["mass"] == of_captures("mass", SETTINGS_1B)
    assert (told_to.study, told_to.corpus, told_to.length, told_to.budget_percent) == ("paper", "wikitext", "64k", 1)
    written = [f"results/diagnostics/{name}_1b.csv" for name in ("accounting", "claims")]
    assert given["accounting"] + given["claims"] == written


MAIN = "1b_wikitext_64k"
FIGURES = {
    "fidelity": ["results/fidelity_1b_4k.csv", "results/fidelity_1b_64k.csv"],
    "fidelity_tokens": ["results/forced/1b_64k.parquet"],
    "fidelity_tokens_ruler": ["results/forced/1b_64k.parquet"],
    "error_by_k": ["results/residual_errors_1b_4k.csv", "results/residual_errors_1b_64k.csv"],
    "entropy_gain": of_captures("heads", [MAIN, "3b_wikitext_64k"]),
    "kernel_sanity": of_captures("kernels", [MAIN]) + of_captures("heads", [MAIN]),
    "logz_calibration": of_captures("heads", SETTINGS_1B),
    "fullsub_nosub_delta": of_captures("heads", SETTINGS_1B),
    "ablation_kernel_fidelity": of_captures("kernels", ["1b_wikitext_4k"]),
    "entropy_heatmap": of_captures("heads", [MAIN]),
    "mass_curves": of_captures("mass", [MAIN]) + of_captures("heads", [MAIN]),
    "quartile_error": of_captures("heads", [MAIN]),
    "fixedk_breakdown_1b": of_captures("heads", [MAIN]),
    "fixedk_breakdown_3b": of_captures("heads", ["3b_wikitext_64k"]),
    "training_curves": [f"results/training_1b_{maps}.csv" for maps in ("4k", "8k", "16k", "64k")],
}
ONE_BUDGET = {
    "fidelity_tokens", "fidelity_tokens_ruler", "kernel_sanity", "logz_calibration", "fullsub_nosub_delta",
    "entropy_heatmap", "fixedk_breakdown_1b", "fixedk_breakdown_3b",
}  # fmt: skip


def test_figures_read_their_files_in_the_documented_order(studies: dict[str, Run]) -> None:
    assert {Path(given["pdf"][0]).stem: given["data"] for given in told(studies["paper"], "figure")} == FIGURES
    figures = {figure.label: figure for figure in specs(studies["paper"], "figure", FigureSpec)}
    assert set(figures) == set(FIGURES)
    assert {label for label, figure in figures.items() if figure.budget_percent == 1} == ONE_BUDGET
    assert {figures[label].budget_percent for label in set(FIGURES) - ONE_BUDGET} == {None}
    variants = ("hedgehog_map", "lolcats_loss", "kl_only", "aux_only")
    assert {label: figure.maps for label, figure in figures.items() if figure.maps} == {
        **dict.fromkeys(("fidelity", "fidelity_tokens", "fidelity_tokens_ruler", "kernel_sanity"), ("64k",)),
        "ablation_kernel_fidelity": ("4k", *(f"4k-{name}" for name in variants)),
        "training_curves": ("4k", "8k", "16k", "64k"),
    }
    titles = {"1b": "Llama-3.2-1B-Instruct", "3b": "Llama-3.2-3B-Instruct"}
    assert {label: figure.backbone_titles for label, figure in figures.items() if figure.backbone_titles} == {
        "entropy_gain": titles
    }
    texts = {label: (figure.texts, figure.score) for label, figure in figures.items() if figure.texts}
    drawn = Resampling(bootstrap_resamples=10000, seed=0)
    assert texts == {
        "fidelity": (("wikitext", "ruler", "babilong"), None),
        "fidelity_tokens": (("wikitext",), drawn),
        "fidelity_tokens_ruler": (("ruler",), drawn),
        "error_by_k": (("wikitext",), None),
    }
    assert figures["entropy_gain"].title == "wikitext, 64k"
    assert figures["fidelity_tokens"].title == "Llama-3.2-1B-Instruct, wikitext, 64k"
    assert figures["fixedk_breakdown_3b"].title == "Llama-3.2-3B-Instruct, wikitext, 64k"


def test_what_methods_read_is_shown_with_their_errors_and_distances(studies: dict[str, Run]) -> None:
    def measured(*lengths: str) -> list[str]:
        names = ("residual_errors", "fidelity")
        return [f"results/{name}_smol-methods_{length}.csv" for name in names for length in lengths]

    figures = {Path(given["pdf"][0]).stem: given["data"] for given in told(studies["methods"], "figure")}
    assert figures["selection_recall"] == measured("1k", "4k", "8160")[:3]
    assert figures["fidelity_by_bytes"] == measured("2k", "8160")
    tables = {Path(given["out"][0]).stem: given["results"] for given in told(studies["methods"], "table")}
    assert tables["deployable"] == measured("1k", "2k", "4k", "8160")
    assert tables["deployable"] == tables["residual_estimators"]


def test_parameters_are_counted_of_the_main_maps_and_of_other_widths(studies: dict[str, Run]) -> None:
    expected = {
        "mini": ["smol_2k", "smol_1k-dphi_32", "smol_1k-dphi_128"],
        "paper": ["1b_64k", "1b_4k-dphi_32", "1b_4k-dphi_128", "3b_64k"],
    }
    for study, names in expected.items():
        given = {Path(each["out"][0]).stem: each for each in told(studies[study], "table")}["phi_param_count"]
        assert given["results"] == [f"results/phi/{name}.safetensors" for name in names]
        told_to = parse_spec(TableSpec, given["spec"][0])
        assert not told_to.budgets and not told_to.benchmarks, "what is not shown must not render it again"


def test_costs_are_those_of_the_main_maps_and_of_one_backbone_each(studies: dict[str, Run]) -> None:
    for study, main, backbones in (("mini", "2k", ["smol"]), ("paper", "64k", ["1b", "3b"])):
        protocol = yaml.safe_load((ROOT / "config" / "studies" / f"{study}.yaml").read_text())
        given = {Path(each["out"][0]).stem: each for each in told(studies[study], "table")}
        assert given["training_cost_64k"]["results"] == [f"results/training_{name}_{main}.csv" for name in backbones]
        told_to = parse_spec(TableSpec, given["training_cost_64k"]["spec"][0])
        assert (list(told_to.backbones), told_to.budgets, told_to.benchmarks) == (backbones, (), ())
        for name in backbones:
            each = given[f"runtime_{name}"]
            assert each["results"] == [f"results/runtime_{name}.csv"]
            assert Path(each["template"][0]).name == "runtime.tex.j2"
            told_to = parse_spec(TableSpec, each["spec"][0])
            assert (told_to.backbones, told_to.budgets, told_to.benchmarks) == ((name,), (), ())
            assert list(told_to.lengths) == protocol["runtime"]["contexts"]


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
        _parser().parse_args(["published", *(word for flag in each for word in (f"--{flag}", *each[flag]))])
        assert each["out"] == [f"paper_tables/published/{label}.tex"]
        template = "runtime" if label.startswith("runtime") else label
        assert Path(each["template"][0]).name == f"{template}.tex.j2"
        assert (tmp_path / each["template"][0]).is_file()


def test_a_comparison_reads_every_table_that_the_paper_has_cells_for(studies: dict[str, Run]) -> None:
    for study, run in studies.items():
        if study == "methods":  # none of its tables is the paper's
            assert not told(run, "comparison")
            continue
        (given,) = told(run, "comparison")
        latencies = {label for label in COMPARED if label.startswith("runtime_")}
        assert latencies == {"runtime_1b", "runtime_3b"}
        there = set(COMPARED) if study == "paper" else set(COMPARED) - latencies
        assert {Path(path).stem for path in given["tables"]} == there
        assert given["out"] + given["picture"] == [
            f"paper_tables/{study}/comparison{ending}.csv" for ending in ("", "_picture")
        ]


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


def test_a_document_shows_all_tables_and_figures_of_a_study(studies: dict[str, Run]) -> None:
    for study, run in studies.items():
        (given,) = told(run, "document")
        for flag, stage, output in (("tables", "table", "out"), ("figures", "figure", "pdf")):
            assert sorted(given[flag]) == sorted(each[output][0] for each in told(run, stage))
        labels = list(yaml.safe_load((ROOT / "config" / "studies" / f"{study}.yaml").read_text())["figures"])
        assert [Path(path).stem for path in given["figures"]] == [label for label in labels]
        assert given["out"] == [f"paper_tables/{study}/main.tex"]
        (numbers,) = told(run, "numbers")
        assert numbers["out"] == given["numbers"] == [f"paper_tables/{study}/numbers.tex"]
        assert sorted(numbers["tables"]) == sorted(each["cells"][0] for each in told(run, "table"))
        (told_to,) = specs(run, "document", DocumentSpec)
        titles = {figure.label: figure.title for figure in specs(run, "figure", FigureSpec)}
        assert (told_to.study, told_to.figure_titles) == (study, titles)
        assert [backbone.study for backbone in told_to.backbones] == [study] * len(told_to.backbones)


def test_a_page_shows_all_that_a_study_makes(studies: dict[str, Run]) -> None:
    for study, run in studies.items():
        (given,) = told(run, "report")
        (shown,) = told(run, "document")
        assert given["tables"] == [path.replace(".tex", ".csv") for path in shown["tables"]]
        figures = [path.replace(".pdf", ".png") for path in shown["figures"]]
        assert (given["figures"], given["out"]) == (figures, ["results/report.html"])
        compared = told(run, "comparison") or [{"out": []}]
        assert given["comparison"] == compared[0]["out"]
        (told_to,), (document,) = specs(run, "report", ReportSpec), specs(run, "document", DocumentSpec)
        assert (told_to.study, told_to.backbones) == (study, document.backbones)
        assert told_to.figure_titles == document.figure_titles
        kept = yaml.safe_load((ROOT / "config" / "studies" / f"{study}.yaml").read_text())
        assert told_to.budgets == tuple(kept["budgets"]) and told_to.recommended == kept["methods"][-1]


@pytest.mark.parametrize(("study", "jobs"), [("mini", MINI), ("paper", PAPER)])
def test_the_pdf_needs_the_document_and_what_it_shows(study: str, jobs: dict[str, int], tmp_path: Path) -> None:
    run = dry_run(tmp_path, "pdf", "--config", f"study={study}")
    assert {name: run.jobs[name] for name in ("table", "figure", "document", "document_pdf", "pdf")} == {
        "table": jobs["table"], "figure": jobs["figure"], "document": 1, "document_pdf": 1, "pdf": 1
    }, run.output  # fmt: skip
    assert set(run.jobs) - {"document_pdf", "pdf", "total"} <= set(jobs)
    (given,) = told(run, "pdf")
    assert given == {"document": [f"paper_tables/{study}/main.tex"], "out": [f"paper_tables/{study}/main.pdf"]}


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
    jobs = [MINI, PAPER, METHODS]
    count = sum(counts.get(rule, 0) for counts in jobs for rule in ("train", "train_variants", "generate", "force"))
    assert len(set(kept)) == len(kept) == count
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


def of_smol(run: Run) -> tuple[dict[str, int], set[str]]:
    """Jobs by rule, without the totals, and the figures among them."""
    jobs = {name: count for name, count in run.jobs.items() if name not in ("all", "total")}
    return jobs, {figure.label for figure in specs(run, "figure", FigureSpec)}


@pytest.mark.slow
def test_what_is_captured_is_made_again_only_where_it_changes(
    tmp_path: Path, checkout: Path, studies: dict[str, Run]
) -> None:
    folder = made(tmp_path / "made", checkout / "Snakefile", studies["mini"])
    dry = functools.partial(dry_run, folder, "all", snakefile=checkout / "Snakefile")
    assert dry().commands == []
    everything = {figure.label for figure in specs(studies["mini"], "figure", FigureSpec)}
    unread = {"fidelity", "fidelity_tokens", "fidelity_tokens_ruler"}
    captured = everything - {"ablation_kernel_fidelity", "training_curves"} - unread
    rendered = {"table": 1, "comparison": 1, "numbers": 1, "document": 1, "report": 1}
    set_section(checkout, "mini", "diagnostics", budget=8)
    of_several = {"fidelity", "entropy_gain", "mass_curves", "quartile_error", "training_curves"}
    one_budget = everything - of_several
    jobs = {"kernels": 2, "findings": 1, "figure": len(one_budget)} | rendered
    assert of_smol(dry()) == (jobs, one_budget)
    set_section(checkout, "mini", "diagnostics", budget=4, packs=9)
    jobs = {"capture": 4, "findings": 1, "figure": len(captured)} | rendered
    assert of_smol(dry()) == (jobs, captured)


def kept_files(run: Run, stage: str) -> list[str]:
    return [given["checkpoint" if stage == "train" else "store"][0] for given in told(run, stage)]


def test_the_example_count_can_be_set_for_all(tmp_path: Path) -> None:
    run = dry_run(tmp_path, "results/ruler_smol_1k.csv", "--config", "examples=7")
    assert [s.examples for s in specs(run, "prompts", PromptsSpec) + specs(run, "generate", GenerateSpec)] == [7, 7]


def test_prompts_that_are_continued_are_frozen_where_fewer_are_decoded(checkout: Path) -> None:
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
    outputs = [next(g[flag][0] for flag in ("out", "accounting", "heads", "pdf") if flag in g) for g in given]
    assert len(set(outputs)) == len(given)
    return dict(zip(outputs, [g["spec"] for g in given], strict=True))
