"""Records describe how results were made. `verify` finds results that differ from their records, and all results made
from these.
"""

from __future__ import annotations

import json
import pwd
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

from residual_mass import __version__, cli, provenance, verify
from residual_mass.files import read_json, sha256_of, write_json, write_text
from residual_mass.provenance import Record, recorded, sidecar_of
from residual_mass.recipes import RECIPES

MANIFEST = Path("results/assets/manifest.json")
SPEECH = Path("results/assets/corpora/sotu/a.txt")
PROMPTS = Path("results/prompts/ruler_t_1k/manifest.json")
TASK = PROMPTS.with_name("niah.jsonl")
PHI = Path("results/phi/t_1k.safetensors")
SCORES = Path("results/ruler_t_1k.csv")
MADE: dict[Path, tuple[str, list[Path]]] = {
    PROMPTS: ("prompts", [MANIFEST]),
    PHI: ("train", [MANIFEST]),
    SCORES: ("score", [PROMPTS, PHI]),
}
"""Stage and inputs of each result."""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a chain of results from assets to scores, and the working directory."""
    monkeypatch.chdir(tmp_path)
    write_text(SPEECH, "Fellow citizens")
    entry = {"path": SPEECH.relative_to(MANIFEST.parent).as_posix(), "sha256": sha256_of(SPEECH)}
    write_json(MANIFEST, {"pins": {"texts": "1.0"}, "files": [entry]})
    write_text(Path("results/generations/_store/ruler_t_1k_main/all.jsonl"), "a working file")
    for path, (stage, inputs) in MADE.items():
        record = Record(stage, {"recipe": RECIPES[stage], "seed": 0}, inputs)
        write_json(path, f"made of {inputs}")
        members = [TASK] if path == PROMPTS else []
        for member in members:
            write_text(member, "prompts")
        record.write(path, *members)
    return tmp_path


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
CHANGED = "has changed since this was made from it"
NEW = Path("results/new.csv")
NO_RECORD = {SCORES: f"has no record ({SCORES.name}.meta.json)"}
DAMAGES: dict[str, tuple[Callable[[], object], dict[Path, str]]] = {
    "nothing": (lambda: None, {}),
    "a result": (lambda: PHI.write_text("x"), {PHI: f"{PHI} differs from the record", SCORES: f"{PHI} {CHANGED}"}),
    "a result is gone": (PHI.unlink, {PHI: f"{PHI} is missing", SCORES: f"{PHI} is missing"}),
    "a member": (lambda: TASK.write_text("other"), {PROMPTS: f"{TASK} differs from the record"}),
    "an asset": (lambda: SPEECH.write_text("other"), {MANIFEST: "corpora/sotu/a.txt differs from the record"}),
    "no record": (sidecar_of(SCORES).unlink, NO_RECORD),
    "a damaged record": (lambda: sidecar_of(SCORES).write_text("{"), NO_RECORD),
    "a new file": (lambda: write_text(NEW, "x"), {NEW: "has no record (new.csv.meta.json)"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_changed_is_named_and_so_is_what_was_made_from_it(
    damage: str, study: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, expected = DAMAGES[damage]
    act()
    assert said() == {str(path): reason for path, reason in expected.items()}
    monkeypatch.chdir("/")  # a study is verified wherever it lies
    assert said(study / "results").keys() == {str(study / path) for path in expected}


def test_an_earlier_recipe_is_named(study: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "score", RECIPES["score"] + 1)
    now = RECIPES["score"]
    assert said() == {str(SCORES): f"made by recipe {now - 1} of the stage score, which has recipe {now}"}


def test_the_exit_status_is_1_if_one_is_not_as_recorded(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["verify"])
    PHI.write_text("other maps")
    for arguments, status in ((["verify"], 1), (["verify", str(PHI)], 1), (["verify", "results/none"], 2)):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == status
    assert "results/none: no such file or folder" in capsys.readouterr().err
    cli.main(["verify", str(PROMPTS), "results/assets"])


def test_a_crate_says_what_made_which_file_from_which(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["crate", "--out", "ro-crate-metadata.json"])
    content = json.loads(Path("ro-crate-metadata.json").read_text())
    graph = {entity["@id"]: entity for entity in content["@graph"]}
    assert len(graph) == len(content["@graph"])
    references = re.findall(r'"@id": ("(?:[^"\\]|\\.)*")(?=\s*\})', Path("ro-crate-metadata.json").read_text())
    assert {json.loads(name) for name in references} - {"https://w3id.org/ro/crate/1.1"} <= graph.keys()
    assert graph["ro-crate-metadata.json"]["about"] == {"@id": "./"}
    files = {name for name, entity in graph.items() if entity["@type"] == "File"}
    assert files == {part["@id"] for part in graph["./"]["hasPart"]} == {str(path) for path in (MANIFEST, TASK, *MADE)}
    assert all(graph[str(path)]["sha256"] == sha256_of(path) for path in MADE)
    run = graph[f"#run-for-{SCORES}"]
    assert run["name"] == "score" and run["result"] == [{"@id": str(SCORES)}]
    settings = graph[run["object"][-1]["@id"]]
    assert run["object"][:-1] == [{"@id": str(PHI)}, {"@id": str(PROMPTS)}] and '"seed": 0' in settings["value"]
    shutil.rmtree("results")
    with pytest.raises(SystemExit):
        cli.main(["crate", "--out", "ro-crate-metadata.json"])
    assert "no result with a record; run a study first" in capsys.readouterr().err


# ---- records ---------------------------------------------------------------------------------------------------------


def test_a_record_says_what_ran_on_what(study: Path) -> None:
    record, before = Record("train", {"recipe": 3}, [PROMPTS, None]), sha256_of(PROMPTS)
    PROMPTS.write_text("changed while the stage ran")
    PHI.write_text("new maps")
    record.write(PHI, device=torch.device("cpu"), processes=2, steps=5)
    found = read_json(sidecar_of(PHI))
    assert (found["stage"], found["spec"], found["steps"], found["processes"]) == ("train", {"recipe": 3}, 5, 2)
    assert found["inputs"] == {str(PROMPTS): before} and found["outputs"] == {str(PHI): sha256_of(PHI)}
    assert found["device"] == "cpu" and found["hardware"] == f"{found['machine']['processor']}, 1 thread"
    assert found["packages"]["torch"] == metadata.version("torch") and found["code"]["version"]
    assert found["gpu_seconds"] == 0 <= found["wall_seconds"] < 600
    assert 10 < found["peak_memory_mib"]["host"] < 2**20


def test_only_the_manifest_of_the_assets_needs_no_record(study: Path) -> None:
    assert not sidecar_of(MANIFEST).exists() and recorded(MANIFEST) == sha256_of(MANIFEST)
    sidecar_of(PROMPTS).unlink()
    with pytest.raises(ValueError, match=rf"^{PROMPTS}: has no record \(manifest.json.meta.json\) beside it"):
        recorded(PROMPTS)


def test_neither_tokens_nor_home_directories_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    home, result = tmp_path / "home" / "lovelace", tmp_path / "scratch" / "results" / "runtime_t.csv"
    write_json(brought := home / "assets" / "manifest.json", {"pins": {}, "files": []})
    write_text(result, "x")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.chdir(tmp_path / "scratch")
    Record("runtime", {"recipe": RECIPES["runtime"]}, [brought]).write(result)
    text = sidecar_of(result).read_text()
    assert "hf_secret" not in text and str(tmp_path) not in text and "lovelace" not in text
    assert set(json.loads(text)["inputs"]) == {"~/assets/manifest.json"}
    assert said() == {}
    write_json(brought, {"pins": {}, "files": [], "more": 1})
    assert said() == {"results/runtime_t.csv": f"~/assets/manifest.json {CHANGED}"}


def test_a_name_starts_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a user whom the machine does not know."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert provenance.relative_name(Path("results/../results/a.csv")) == "results/a.csv"
    assert provenance.relative_name(tmp_path / "assets" / "manifest.json") == "../assets/manifest.json"


def version_of(package: Path) -> dict[str, Any]:
    """What the code in a folder says of itself."""
    code = "import json; from residual_mass.provenance import code_version; print(json.dumps(code_version()))"
    command = [sys.executable, "-B", "-c", f"import sys; sys.path.insert(0, {str(package.parent)!r}); {code}"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@needs(GIT)
def test_the_commit_is_that_of_a_checkout_of_this_project_alone(tmp_path: Path) -> None:
    checkout, package = tmp_path / "checkout", tmp_path / "checkout" / "src" / "residual_mass"
    source = Path(provenance.__file__).parent
    shutil.copytree(source / "spec", package / "spec")
    for name in ("__init__", "files", "provenance"):
        shutil.copy(source / f"{name}.py", package)

    def git(*words: str) -> str:
        command = ["git", "-C", str(checkout), "-c", "user.name=T", "-c", "user.email=t@example.org", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert version_of(package) == {"version": __version__, "commit": None, "changed": None}
    git("init", "-q")
    git("add", "src")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    (checkout / "results.csv").write_text("a file elsewhere is no change of the code")
    assert version_of(package) == {"version": __version__, "commit": commit, "changed": False}
    with open(package / "files.py", "a", encoding="utf-8") as stream:
        stream.write("\n# changed\n")
    assert version_of(package)["changed"] is True
    installed = checkout / ".venv" / "residual_mass"
    shutil.copytree(package, installed)
    assert version_of(installed)["commit"] is None
