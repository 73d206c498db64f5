"""Names with shell syntax: each reaches the stage unchanged or is refused; nothing in them is run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import ROOT, before_others, copied, dry_run, programs, snakemake

HOSTILE = "a b'\"$(touch pwned)`touch pwned`;touch pwned;&& touch pwned|#\\x"
"""A folder or a title that makes a file called pwned wherever it is not quoted."""
STAGE = """
import sys
if sys.orig_argv[1:3] == ["-m", "residual_mass"]:
    import json, os
    from pathlib import Path
    with open(Path(__file__).with_name("record.jsonl"), "a") as stream:
        stream.write(json.dumps([os.environ["PYTHONPATH"], *sys.orig_argv[3:]]) + chr(10))
    given = [Path(word) for word in sys.orig_argv if word.startswith(("results/", "paper_tables/"))]
    for path in (path for path in given if path.suffix and not path.exists()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    os._exit(0)
"""
"""What a stage does first in a run: it writes down what the shell gave it, makes the files that it was asked for, and
ends.
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The workflow in a folder with a hostile name."""
    return copied(tmp_path / HOSTILE)


def run_recorded(checkout: Path, folder: Path, *arguments: str) -> list[list[str]]:
    """What the stages of a run were given, first of all PYTHONPATH."""
    stage = folder / "elsewhere" / "sitecustomize.py"
    stage.parent.mkdir()
    stage.write_text(STAGE)
    command = [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(stage.parent)}
    run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in stage.with_name("record.jsonl").read_text().splitlines()]


def assert_nothing_ran(folder: Path) -> None:
    assert [path for path in folder.rglob("*") if path.name.startswith("pwned")] == []
    assert not list(ROOT.glob("pwned*"))


def test_a_stage_really_runs_in_a_folder_that_a_shell_would_run(checkout: Path, tmp_path: Path) -> None:
    path = before_others(programs(tmp_path / "front", **{"nvidia-smi": "exit 9"}))  # so that torch is asked for no GPU
    targets = ("paper_tables/published/loss_ablation.tex", "estimate")
    run = snakemake(checkout, "--cores", "1", *targets, snakefile=checkout / "Snakefile", PATH=path)
    assert run.code == 0 and "smol, train: " in run.output, run.output
    assert (checkout / "paper_tables" / "published" / "loss_ablation.tex").read_text().startswith("%")
    assert_nothing_ran(tmp_path)


SLOW = pytest.mark.slow
SOME = ["results/phi/smol_2k.safetensors", "results/prompts/ruler_smollm2_1k/manifest.json",
        "paper_tables/mini/runtime_smol.tex"]  # fmt: skip


@pytest.mark.parametrize(("targets", "stages"), [(SOME, 5), pytest.param(["all"], 19, marks=SLOW)])
def test_titles_and_assets_reach_the_stages_as_they_are(
    targets: list[str], stages: int, checkout: Path, tmp_path: Path
) -> None:
    path, assets = checkout / "config" / "config.yaml", f"results/{HOSTILE} assets"
    config = yaml.safe_load(path.read_text())
    config["backbones"]["smol"]["title"] = HOSTILE
    path.write_text(yaml.safe_dump(config))
    given = run_recorded(checkout, tmp_path, *targets, "--config", f"assets={assets}")
    assert len({words[1] for words in given}) == stages
    assert {words[0] for words in given} == {f"{checkout / 'src'}:{tmp_path / 'elsewhere'}"}
    specs = [json.loads(words[words.index("--spec") + 1]) for words in given if "--spec" in words]
    assert {title for spec in specs for title in spec.get("backbone_titles", {}).values()} == {HOSTILE}
    assert {words[words.index("--assets") + 1] for words in given if "--assets" in words} == {assets}
    assert {words[words.index("--out") + 1] for words in given if words[1] == "assets"} == {f"{assets}/manifest.json"}
    assert_nothing_ran(tmp_path)


@pytest.mark.parametrize("name", ["a:b", pytest.param("a{b}", marks=SLOW), pytest.param("a\nb", marks=SLOW)])
def test_a_folder_that_pythonpath_cannot_name_is_refused(name: str, tmp_path: Path) -> None:
    folder = copied(tmp_path / name, "config", "docs", "src", "workflow", "paper_tables/templates")
    run = dry_run(tmp_path / "elsewhere", "all", snakefile=folder / "Snakefile")
    assert run.code == 1 and run.said[-1].endswith("a colon, a brace and a line break in it; move the checkout")


def test_make_runs_in_a_folder_that_a_shell_would_run(checkout: Path, tmp_path: Path) -> None:
    """`make test` with one trivial test, in an environment that is there already."""
    for name in ("requirements.lock", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, checkout)
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_one.py").write_text("def test_one():\n    pass\n")
    programs(checkout / ".venv" / "bin", python=f'exec {shlex.quote(sys.executable)} "$@"')
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # make runs us
    plan = ["make", "-n", "--no-print-directory", "mini"]
    planned = subprocess.run(plan, cwd=checkout, env=own, capture_output=True, text=True, check=True).stdout
    assert ".venv/bin/python -m pip" in planned and "pwned" not in planned
    (checkout / ".venv" / ".installed").touch()
    run = subprocess.run(
        ["make", "test", "CORES=1"], cwd=checkout, env=own, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout + run.stderr
    assert_nothing_ran(tmp_path)
