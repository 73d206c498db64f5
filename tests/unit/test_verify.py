"""Records say how results came to be, and results that are not what their records say are found, with all that is made
of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.needs import GIT, needs

from residual_mass import cli, provenance, verify
from residual_mass.files import read_json, sha256_of, write_json, write_text
from residual_mass.provenance import Record, device_name, recorded, sidecar_of
from residual_mass.recipes import RECIPES

SOURCE = Path(provenance.__file__).parents[1]
MANIFEST = Path("results/assets/manifest.json")
SPEECH = Path("results/assets/corpora/sotu/a.txt")
PROMPTS = Path("results/prompts/ruler_t_1k/manifest.json")
TASK = PROMPTS.with_name("niah.jsonl")
PHI = Path("results/phi/t_1k.safetensors")
TEXTS = Path("results/generations/ruler_t_1k_main/all.jsonl")
SCORES = Path("results/ruler_t_1k.csv")
JOINED = Path("results/ablation_loss_t.csv")
MADE_OF: dict[Path, list[Path]] = {
    PROMPTS: [MANIFEST],
    PHI: [MANIFEST],
    TEXTS: [MANIFEST, PROMPTS, PHI],
    SCORES: [PROMPTS, TEXTS],
    JOINED: [SCORES],
}
TOLD: dict[Path, dict[str, Any]] = {
    MANIFEST: {"pins": {"texts": "1.0"}},
    PROMPTS: {"recipe": RECIPES["prompts"], "seed": 0},
    PHI: {"recipe": RECIPES["train"], "variants": [{"map": {"d_phi": 8}}], "steps": 5},
    TEXTS: {"recipe": RECIPES["generate"], "examples": 3},
    SCORES: {"recipe": RECIPES["score"]},
    JOINED: {},
}
STAGES = {PROMPTS: "prompts", PHI: "train", TEXTS: "generate", SCORES: "score", JOINED: "join"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a chain of results from assets to a joined table."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        write_text(SPEECH, "Fellow citizens")
        entry = {"path": SPEECH.relative_to(MANIFEST.parent).as_posix(), "sha256": sha256_of(SPEECH)}
        write_json(MANIFEST, TOLD[MANIFEST] | {"files": [entry]})
        write_text(Path("results/generations/_store/ruler_t_1k_main/all.jsonl"), "a working file")
        for path, sources in MADE_OF.items():
            record = Record(STAGES[path], TOLD[path], sources)
            write_json(path, f"made of {sources}")
            members = [TASK] if path == PROMPTS else []
            for member in members:
                write_text(member, "prompts")
            record.write(path, *members)
    return folder


@pytest.fixture
def study(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and the working directory."""
    folder = tmp_path / "study"
    shutil.copytree(finished, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """What verify says of every result that is not as recorded."""

    def run(*results: Path | str) -> dict[str, str]:
        good = verify.run([Path(result) for result in results or ["results"]])
        *lines, count = capsys.readouterr().out.splitlines()
        found = dict(line.split(": ", 1) for line in lines)
        right, of = map(int, re.fullmatch(r"(\d+) of (\d+) results are as recorded", count).groups())  # type: ignore[union-attr]
        assert of - right == len(found) and good == (not found)
        return found

    return run


Said = Callable[..., dict[str, str]]


def test_a_study_that_nobody_touched_is_as_recorded(
    study: Path, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said() == said(SCORES) == said("results/phi", "results/assets") == {}
    verify.run([Path("results")])
    assert capsys.readouterr().out == f"{len(TOLD)} of {len(TOLD)} results are as recorded\n"


CHANGED = "has changed since this was made from it"
DAMAGES: dict[str, tuple[Callable[[], object], dict[Path, str]]] = {
    "a result": (
        lambda: PHI.write_text("other maps"), {PHI: f"{PHI} differs from the record", TEXTS: f"{PHI} {CHANGED}"}
    ),
    "a result is gone": (PHI.unlink, {PHI: f"{PHI} is missing", TEXTS: f"{PHI} is missing"}),
    "a member": (lambda: TASK.write_text("other"), {PROMPTS: f"{TASK} differs from the record"}),
    "an asset": (lambda: SPEECH.write_text("other"), {MANIFEST: "corpora/sotu/a.txt differs from the record"}),
    "no record": (sidecar_of(SCORES).unlink, {SCORES: f"has no record ({SCORES.name}.meta.json)"}),
    "a damaged record": (
        lambda: sidecar_of(SCORES).write_text("{"), {SCORES: f"has no record ({SCORES.name}.meta.json)"}
    ),
    "a record of something else": (
        lambda: sidecar_of(SCORES).write_text("[]"), {SCORES: f"has no record ({SCORES.name}.meta.json)"}
    ),
    "a new file": (
        lambda: write_text(Path("results/new.csv"), "x"), {Path("results/new.csv"): "has no record (new.csv.meta.json)"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_changed_is_named_and_so_is_what_was_made_from_it(damage: str, study: Path, said: Said) -> None:
    act, expected = DAMAGES[damage]
    act()
    assert said() == {str(path): reason for path, reason in expected.items()}


def test_an_earlier_recipe_is_named(study: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "score", RECIPES["score"] + 1)
    now = RECIPES["score"]
    assert said() == {str(SCORES): f"made by recipe {now - 1} of the stage score, which has recipe {now}"}


def test_a_study_is_verified_wherever_it_lies(study: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert said(study / "results") == {}


def test_the_exit_status_is_1_if_one_is_not_as_recorded(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["verify"])
    PHI.write_text("other maps")
    for arguments, status in ((["verify"], 1), (["verify", str(PHI)], 1), (["verify", "results/none"], 2)):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == status
    assert "results/none: no such file or folder" in capsys.readouterr().err
    cli.main(["verify", str(SCORES)])


# ---- records ---------------------------------------------------------------------------------------------------------


def test_a_record_says_what_ran_on_what(study: Path) -> None:
    before = PHI.read_bytes()
    record = Record("train", TOLD[PHI], [MANIFEST, None])
    PHI.write_text("new maps")
    record.write(PHI, device=torch.device("cpu"), processes=2, steps=5)
    found = read_json(sidecar_of(PHI))
    assert PHI.read_bytes() != before
    assert (found["stage"], found["spec"], found["steps"], found["processes"]) == ("train", TOLD[PHI], 5, 2)
    assert found["inputs"] == {str(MANIFEST): sha256_of(MANIFEST)} and found["outputs"] == {str(PHI): sha256_of(PHI)}
    assert found["device"] == "cpu" and found["hardware"] == device_name(torch.device("cpu"))
    assert found["hardware"] == f"{found['machine']['processor']}, {torch.get_num_threads()} threads"
    assert found["packages"]["torch"] == metadata.version("torch") and found["code"]["version"]
    assert found["gpu_seconds"] == 0 <= found["wall_seconds"] < 600
    assert 10 < found["peak_memory_mib"]["host"] < 2**20


def test_inputs_are_recorded_as_they_were_found(study: Path) -> None:
    record = Record("score", TOLD[SCORES], [TEXTS])
    before = sha256_of(TEXTS)
    TEXTS.write_text("changed while the stage ran")
    record.write(SCORES)
    assert read_json(sidecar_of(SCORES))["inputs"] == {str(TEXTS): before}


def test_only_the_manifest_of_the_assets_needs_no_record(study: Path) -> None:
    assert not sidecar_of(MANIFEST).exists() and recorded(MANIFEST) == sha256_of(MANIFEST)
    write_json(PROMPTS, {"tasks": {}})
    sidecar_of(PROMPTS).unlink()
    with pytest.raises(ValueError, match=rf"^{PROMPTS}: has no record \(manifest.json.meta.json\) beside it"):
        recorded(PROMPTS)


def test_neither_tokens_nor_home_directories_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    home, work = tmp_path / "home" / "lovelace", tmp_path / "scratch"
    brought = home / "assets" / "manifest.json"
    for folder in (brought.parent, work):
        folder.mkdir(parents=True)
    write_json(brought, {"pins": {}, "files": []})
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.chdir(work)
    result = work / "results" / "runtime_t.csv"
    record = Record("runtime", {"recipe": RECIPES["runtime"]}, [brought])
    write_text(result, "x")
    record.write(result)
    text = sidecar_of(result).read_text()
    assert "hf_secret" not in text and str(tmp_path) not in text and "lovelace" not in text
    assert set(json.loads(text)["inputs"]) == {"~/assets/manifest.json"}
    assert said() == {}
    write_json(brought, {"pins": {}, "files": [], "more": 1})
    assert said() == {"results/runtime_t.csv": f"~/assets/manifest.json {CHANGED}"}


def test_without_a_home_directory_names_are_those_from_the_working_directory(tmp_path: Path) -> None:
    """As for a user whom the machine does not know."""
    code = (
        "import os, pwd; del os.environ['HOME']; pwd.getpwuid = {}.__getitem__;"
        "from pathlib import Path; from residual_mass.provenance import relative_name as name;"
        "print(name(Path('/data/a.csv')))"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r}); {code}"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout == f"{os.path.relpath('/data/a.csv', tmp_path)}\n", run.stderr


def test_a_name_starts_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert provenance.relative_name(Path("results/../results/a.csv")) == "results/a.csv"
    assert provenance.relative_name(tmp_path / "assets" / "manifest.json") == "../assets/manifest.json"


# ---- code ------------------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=T", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def version_of(package: Path) -> dict[str, Any]:
    """What the code in a folder says of itself."""
    code = "import json; from residual_mass.provenance import code_version; print(json.dumps(code_version()))"
    command = [sys.executable, "-B", "-c", f"import sys; sys.path.insert(0, {str(package.parent)!r}); {code}"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@needs(GIT)
def test_the_commit_is_that_of_a_checkout_of_this_project_alone(tmp_path: Path) -> None:
    checkout, package = tmp_path / "checkout", tmp_path / "checkout" / "src" / "residual_mass"
    package.mkdir(parents=True)
    for name in ("__init__", "files", "provenance"):
        shutil.copy(Path(provenance.__file__).with_name(f"{name}.py"), package)
    for folder in ("core",):
        shutil.copytree(Path(provenance.__file__).with_name(folder), package / folder)
    assert version_of(package) == {"version": "0.1.0", "commit": None, "changed": None}
    git(checkout, "init", "-q")
    git(checkout, "add", "src")
    git(checkout, "commit", "-q", "-m", "first")
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout / "results.csv").write_text("a file elsewhere is no change of the code")
    assert version_of(package) == {"version": "0.1.0", "commit": commit, "changed": False}
    with open(package / "files.py", "a", encoding="utf-8") as stream:
        stream.write("\n# changed\n")
    assert version_of(package)["changed"] is True
    (tmp_path / "git").write_text(f'#!/bin/sh\ncase "$*" in *status*) exit 1;; esac\nexec {shutil.which("git")} "$@"\n')
    (tmp_path / "git").chmod(0o755)
    with pytest.MonkeyPatch.context() as context:
        context.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        assert version_of(package) == {"version": "0.1.0", "commit": commit, "changed": None}
    installed = checkout / ".venv" / "residual_mass"
    shutil.copytree(package, installed)
    assert version_of(installed)["commit"] is None
