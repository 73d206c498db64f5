"""Mistakes are reported before any job, in one line that names the mistake and the known values."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, change, configuration_error, dry_run, plan_of
from snakemake.iocontainers import Wildcards

from residual_mass.study.plan import check_files

MINI = "config/studies/mini.yaml"


def test_a_refusal_ends_a_dry_run_in_one_line(tmp_path: Path) -> None:
    """The other lines are asked for without Snakemake."""
    run = dry_run(tmp_path, "paper_tables/mini/no_such_table.tex")
    line = f"table 'no_such_table' is not in {MINI}, which has natural_main, "
    assert run.code == 1 and len(run.said) == 1 and run.said[0].startswith(line), run.output


PATTERN = "String should match pattern"
SETTINGS: list[tuple[str, Any, str]] = [
    ("examples", 2, ""),
    ("exmples", 3, "configuration: exmples: unknown key (did you mean examples?); `python -m "),
    ("study", "small", "study, of those with a backbone: small is not one of methods, mini, paper"),
    ("examples", 0, "Input should be greater than or equal to 1, not 0"),
    ("offline", "maybe", "Input should be a valid boolean"),
    ("assets", "-rf", PATTERN),
    ("assets", "~", ""),
    ("assets", "~unknown/x", "assets: ~unknown/x names the home folder of a user unknown here; write the whole path"),
    ("assets", "results/{x}", PATTERN),
    ("assets", "results\ntouch pwned", PATTERN),
    ("backbones", {"$(touch pwned)": {}}, f"backbones.$(touch pwned): {PATTERN}"),
    ("backbones.smol.contxt", 1, "unknown key (did you mean context?)"),
    ("backbones.smol.dtype", "bfloat16", "write `requires_gpu: true`"),
    ("backbones.smol.study", "small", "small is not one of methods, mini, paper"),
    ("backbones.smol.context", 1024, "1024 tokens, but study mini has 2k"),
    ("backbones.smol.tokenizer", "llama32", "llama32 is of study mini"),
    ("backbones.smol.tokenizer", "t;id", PATTERN),
    ("backbones.smol.title", "a\x1b[2J", PATTERN),
    ("backbones.smol.model_id", "../../etc", "is no name on the hub; write OWNER/NAME"),
    ("backbones.smol.model_id", "a/..", "is no name on the hub; write OWNER/NAME"),
    ("backbones.smol.revision", "`id`", PATTERN),
    ("backbones.1b.revision", "main", "revision main may move; write the commit"),
    ("backbones.smol", {"study": "paper", "tokenizer": "llama32", "context": 65536}, "a backbone: mini is not one of"),
    ("variants", {"x;touch pwned": {}}, f"variants.x;touch pwned: {PATTERN}"),
    ("variants", {"ours": {}}, "variants.ours: the name of a study's own recipe"),
    ("variants", {"narrow": {"mop": {}}}, "variants.narrow.mop: Input should be 'map' or 'objective'"),
    ("ablations.loss", ["ours", "a b"], PATTERN),
]
"""A dotted key of config.yaml, a value for it, and words of the message."""


@pytest.mark.parametrize(("key", "value", "words"), SETTINGS)
def test_a_wrong_setting(key: str, value: Any, words: str) -> None:
    said = configuration_error(ROOT, reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value))
    assert words in said and bool(words) == bool(said) and "\n" not in said, said


STUDIES: list[tuple[str, dict[str, Any], str]] = [
    ("mini", {"phi.objective.lambda_l": 1}, "phi.objective.lambda_l: unknown key (did you mean lambda_kl?); "),
    ("mini", {"phi.replay.resue": 2}, "phi.replay.resue: unknown key (did you mean reuse?); "),
    ("mini", {"figures.fidelity.txt": "wiki"}, "figures.fidelity.txt: unknown key (did you mean text?); "),
    ("mini", {"nothing_like_it": 1}, "nothing_like_it: unknown key; "),
    ("mini", {"diagnostics.packs": ...}, "diagnostics.packs: missing key"),
    ("mini", {"lengths": [512, "2k"]}, "lengths.0: Input should be a valid string, not 512"),
    ("mini", {"lengths": ["1k\n"]}, f"lengths.0: {PATTERN}"),
    ("mini", {"mismatch.backbones": ["--help"]}, f"mismatch.backbones.0: {PATTERN}"),
    ("mini", {"tables": ["$(touch pwned)"]}, f"tables.0: {PATTERN}"),
    ("mini", {"tables": ["no_such_table"]}, "table 'no_such_table' is unknown; known are natural_main, "),
    ("mini", {"diagnostics.corpora": ["wiki; touch pwned"]}, "diagnostics.corpora.0: Input should be 'sotu', 'wiki'"),
    ("mini", {"diagnostics.corpora": ["wiki", "cwe", "wiki"]}, "diagnostics.corpora: has wiki twice; remove one"),
    ("mini", {"fidelity.corpora": ["needles"]}, "fidelity.corpora.0: Input should be 'sotu', 'wiki'"),
    ("mini", {"phi.corpora": ["code"]}, "phi.corpora.0: Input should be 'sotu', 'wiki'"),
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
        "up to 2k, its maps only",
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


CURVES = {"training_curves": {"backbone": "smol", "maps": ["1k"]}}
BABILONG = "generate smol benchmark=babilong length=512 group=main tasks=all"
JOBS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "score benchmark=ruler backbone=7b length=64k", "backbone '7b' is not in config/config.yaml, which has s"),
    ({}, "published_table label=runtime_smol", "table 'runtime_smol' is not in the paper, which has babilong_sweep, "),
    ({"figures": CURVES}, "figure study=mini label=heat", f"figure 'heat' is not in {MINI}, which has training_curves"),
    ({}, "document study=small", "study 'small' is not in config/studies, which has methods, mini, paper"),
    ({"diagnostics.corpora": ["wiki"]}, "capture smol corpus=cwe length=1k", f"corpus 'cwe' is not in {MINI}, which"),
    ({"diagnostics.lengths": ["2k"]}, "capture smol corpus=wiki length=1k", "length '1k' is not in diagnostics.length"),
    ({"maps.trained": ["512", "1k"]}, "train smol maps=2k", f"maps '2k' is not in {MINI}, which has 512, 1k"),
    ({"fidelity.lengths": ["1k"]}, "force smol length=2k", "length '2k' is not in fidelity.lengths of config/studies/"),
    ({"benchmarks.babilong.lengths": ["512"]}, BABILONG, "length 512: babilong needs at least 1024"),
    (
        {"benchmarks.babilong.lengths": ["2k"]},
        "prompts benchmark=babilong tokenizer=smollm2 length=2k",
        "length 2k: no examples of babilong_qa1 without the hub (there are: babilong_qa1_1k.jsonl); choose another ",
    ),
    ({"methods": ["full", "topk", "topk_phi", "topk_b"]}, "force smol length=1k", "method 'topk_b' is unknown; the"),
    ({"residuals.methods": ["topk", "full"]}, "residual_errors smol length=1k", "arm 'full': full takes no budget_p"),
    ({}, "train_variants smol maps=1k", "config/config.yaml: variants.x.map.d_phy: unknown key (did you mean d_phi?)"),
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
    plan = plan_of(checkout, variants={"x": {"map": {"d_phy": 8}}})
    with pytest.raises(SystemExit) as refused:
        plan.work(stage, Wildcards(fromdict=dict(word.split("=") for word in words)))
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("published", None, "config/studies: 'published.yaml': a study's name has letters, digits, _ and - only"),
        ("$(touch pwned)", None, "config/studies: '$(touch pwned).yaml': a study's name has letters, digits, _ and"),
        ("broken", "lengths: [1k\n", "config/studies/broken.yaml: not valid YAML: "),
        (
            "twice",
            "lengths: [1k]\nlengths: [2k]\n",
            "config/studies/twice.yaml: not valid YAML: key lengths comes twice, in lines 1 and 2; rename or r",
        ),
    ],
)
def test_a_file_that_no_study_may_have(name: str, text: str | None, line: str, checkout: Path) -> None:
    (checkout / f"config/studies/{name}.yaml").write_text(text or (checkout / MINI).read_text())
    said = configuration_error(checkout)
    assert said.startswith(line) and "\n" not in said


BROKEN: list[tuple[bytes, bytes, str]] = [
    (b"  3b:\n", b"  1b:\n", "key 1b comes twice, in lines "),
    (b"mini\n", b"[mini\n", "flow sequence in line 4: expected ',' or ']', but got ':' in line 5; correct it"),
    (b"examples:", b"\texamples:", "found character '\\t' that cannot start any token in line 5; correct it"),
    (b"null", b"caf\xe9", "byte 0xe9 in line 5 is not UTF-8; save the file as UTF-8"),
    (b"null", b"\x07", "character 0x7 in line 5 is not allowed; remove it"),
    (b"null", b"2025-02-30", "day "),
]
"""What is replaced once in config.yaml, what replaces it, and words of the message."""


@pytest.mark.parametrize(("old", "new", "words"), BROKEN)
def test_a_file_of_settings_that_cannot_be_read(old: bytes, new: bytes, words: str, tmp_path: Path) -> None:
    text = (ROOT / "config/config.yaml").read_bytes()
    assert old in text
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_bytes(text.replace(old, new, 1))
    with pytest.raises(SystemExit) as refused:
        check_files(tmp_path)
    said = str(refused.value)
    assert said.startswith("config/config.yaml: not valid YAML: ") and words in said and "\n" not in said, said


def test_an_empty_file_of_settings(tmp_path: Path) -> None:
    check_files(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").touch()
    with pytest.raises(SystemExit, match=r"^config/config.yaml: has no keys; restore the file$"):
        check_files(tmp_path)


def test_snakemake_does_not_read_a_broken_file_of_settings_first(checkout: Path) -> None:
    path = checkout / "config/config.yaml"
    path.write_bytes(path.read_bytes().replace(b"null", b"caf\xe9", 1))
    run = dry_run(checkout, "all", snakefile=checkout / "Snakefile")
    assert run.code == 1 and len(run.said) == 1, run.output
    assert run.said[0].startswith("config/config.yaml: not valid YAML: byte 0xe9 in line 5"), run.output


def test_a_key_twice_in_a_file_of_settings_on_the_command_line(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("study: mini\nstudy: paper\n")
    (tmp_path / "own.json").write_text('{\n\t"study": "mini"\n}')
    run = dry_run(tmp_path, "all", "--configfile", str(tmp_path / "own.json"), str(own))
    line = f"{own}: not valid YAML: key study comes twice, in lines 1 and 2; rename or remove one"
    assert run.code == 1 and run.said == [line], run.output


def test_the_home_folder_in_the_name_of_the_assets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert plan_of(ROOT, assets="~/data").assets_manifest == "/home/someone/data/manifest.json"
    assert str(plan_of(ROOT, assets="results/~data").assets_folder) == "results/~data"


def test_a_study_may_leave_most_out(checkout: Path) -> None:
    babilong = yaml.safe_load((ROOT / MINI).read_text())["benchmarks"]["babilong"]
    leaner = {
        "benchmarks": {"babilong": babilong | {"lengths": ["1k"]}}, "mismatch.backbones": [], "ablations.backbones": [],
        "fidelity.lengths": [], "fidelity.benchmarks": [], "fidelity.prompts_at": [], "residuals.backbones": [],
        "tables": ["stress_1pct", "babilong_sweep"], "diagnostics.backbones": [],
        "figures": CURVES,
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
