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
from residual_mass.provenance import Record, beside, device_name, recorded
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
            write_text(path, f"made of {sources}")
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
    """What verify says of every result."""

    def run(*results: Path | str, expected: Path | None = None) -> dict[str, str]:
        good = verify.run([Path(result) for result in results or ["results"]], expected)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(verify.WORDS)]
        matches = [re.fullmatch(r"(ok|changed|stale|no record) +(\S+?)(?:: (.+))?", line) for line in lines]
        found = {m[2]: f"{m[1]}: {m[3]}" if m[3] else m[1] for m in matches if m}
        assert len(found) == len(lines) and good == (set(found.values()) == {"ok"})
        return found

    return run


ALL_OK = {str(path): "ok" for path in TOLD}
Said = Callable[..., dict[str, str]]


def test_a_study_that_nobody_touched_is_ok(study: Path, said: Said) -> None:
    assert said() == ALL_OK
    assert said(SCORES) == {str(SCORES): "ok"}
    assert said(TASK, SPEECH) == {str(TASK): "ok", str(SPEECH): "ok"}
    assert said("results/phi", PHI, "results/assets") == {str(PHI): "ok", str(MANIFEST): "ok"}


def another(path: Path) -> str:
    return f"stale: made from {path}, which has changed since"


def stale(path: Path, word: str = "stale") -> str:
    return f"stale: made from {path}, which is {word}"


def unrecorded(path: Path) -> str:
    return f"stale: made from {path}, which has no record"


def forget(path: Path) -> None:
    record = read_json(beside(path))
    write_json(beside(path), {name: record[name] for name in ("spec", "packages", "machine")})


DAMAGES: dict[str, tuple[Callable[[], Any], dict[Path, str]]] = {
    "result": (
        lambda: SCORES.write_text("0.9"),
        {SCORES: "changed: it differs from the record", JOINED: another(SCORES)},
    ),
    "maps": (
        lambda: PHI.write_text("other maps"),
        {PHI: "changed: it differs from the record", TEXTS: another(PHI), SCORES: stale(TEXTS), JOINED: stale(SCORES)},
    ),
    "asset": (
        lambda: SPEECH.write_text("Fellow travellers"),
        {
            MANIFEST: "changed: corpora/sotu/a.txt differs from the record", PROMPTS: stale(MANIFEST, "changed"),
            PHI: stale(MANIFEST, "changed"), TEXTS: stale(MANIFEST, "changed"), SCORES: stale(TEXTS),
            JOINED: stale(SCORES),
        },
    ),
    "a task's prompts": (
        lambda: TASK.write_text("other prompts"),
        {
            PROMPTS: f"changed: {TASK} differs from the record", TEXTS: stale(PROMPTS, "changed"), SCORES: stale(TEXTS),
            JOINED: stale(SCORES),
        },
    ),
    "no maps": (
        PHI.unlink,
        {
            PHI: "changed: missing, but its record exists", TEXTS: stale(PHI, "missing"), SCORES: stale(TEXTS),
            JOINED: stale(SCORES),
        },
    ),
    "no record": (
        beside(SCORES).unlink,
        {SCORES: f"no record: {beside(SCORES).name} is missing", JOINED: unrecorded(SCORES)},
    ),
    "an earlier version's": (
        lambda: forget(SCORES),
        {
            SCORES: f"no record: {beside(SCORES).name} has no hashes, as written by an earlier version",
            JOINED: unrecorded(SCORES),
        },
    ),
    "another file's": (
        lambda: shutil.copy(beside(PHI), beside(JOINED)),
        {JOINED: f"no record: {beside(JOINED).name} belongs to another file"},
    ),
    "a user's file": (
        lambda: Path("results/notes.csv").write_text("1"),
        {Path("results/notes.csv"): "no record: notes.csv.meta.json is missing"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_changed_is_named_and_so_is_all_that_is_made_of_it(damage: str, study: Path, said: Said) -> None:
    change, expected = DAMAGES[damage]
    change()
    assert said() == ALL_OK | {str(path): line for path, line in expected.items()}


@pytest.mark.parametrize("text", ["{", "[]", '{"spec": [], "inputs": {}, "outputs": {}}'])
def test_a_damaged_record_is_none(text: str, study: Path, said: Said) -> None:
    beside(JOINED).write_text(text)
    assert said(JOINED)[str(JOINED)].startswith("no record: ")


@pytest.mark.parametrize("name", [str(JOINED), "~nobody-of-that-name/x", "", "."])
def test_a_record_that_names_what_no_stage_would_is_stale(name: str, study: Path, said: Said) -> None:
    record = read_json(beside(JOINED))
    path = Path(name)
    write_json(beside(JOINED), record | {"inputs": {name: sha256_of(path) if path.is_file() else None}})
    assert said(JOINED)[str(JOINED)].startswith(f"stale: made from {name}, which ")


def test_a_bumped_recipe_makes_its_results_stale(study: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    before = RECIPES["generate"]
    monkeypatch.setitem(RECIPES, "generate", before + 1)
    changed = {TEXTS: f"stale: spec.recipe was {before}, is {before + 1}", SCORES: stale(TEXTS), JOINED: stale(SCORES)}
    assert said() == ALL_OK | {str(path): line for path, line in changed.items()}


def workflow(**changes: Any) -> Path:
    """What a workflow that made the study would say, but for some results."""
    expected = {
        str(path): {"rule": "any", "spec": told, "inputs": [str(source) for source in MADE_OF.get(path, [])]}
        for path, told in TOLD.items()
    }
    for path, change in changes.items():
        expected[path] = expected[path] | change
    write_json(Path("expected.json"), expected)
    return Path("expected.json")


def test_results_of_the_same_configuration_are_ok(study: Path, said: Said) -> None:
    assert said(expected=workflow()) == ALL_OK


@pytest.mark.parametrize(
    ("path", "change", "reason"),
    [
        (PHI, {"spec": TOLD[PHI] | {"variants": [{"map": {"d_phi": 16}}]}}, "spec.variants[0].map.d_phi was 8, is 16"),
        (PHI, {"spec": TOLD[PHI] | {"variants": []}}, 'spec.variants was [{"map": {"d_phi": 8}}], is []'),
        (PHI, {"spec": TOLD[PHI] | {"seed": 1}}, "spec.seed is new"),
        (SCORES, {"spec": {}}, "spec.recipe is gone"),
        (MANIFEST, {"spec": {"pins": {"texts": "2.0"}}}, 'spec.pins.texts was "1.0", is "2.0"'),
        (SCORES, {"inputs": [str(PROMPTS)]}, f"no longer made from {TEXTS}"),
        (JOINED, {"inputs": [str(SCORES), str(PHI)]}, f"now made from {PHI} as well"),
        (SCORES, {"refused": "length '1k' is not in mini.yaml"}, "no job makes it: length '1k' is not in mini.yaml"),
    ],
)
def test_results_of_another_configuration_are_stale(
    path: Path, change: dict[str, Any], reason: str, study: Path, said: Said
) -> None:
    found = said(expected=workflow(**{str(path): change}))
    assert found[str(path)] == f"stale: {reason}"
    below = {str(other) for other, sources in MADE_OF.items() if path in sources}
    assert all(found[other].startswith(f"stale: made from {path}, which is stale") for other in below)


def test_a_result_that_no_rule_makes_is_stale(study: Path, said: Said) -> None:
    expected = read_json(workflow())
    del expected[str(JOINED)]
    write_json(Path("expected.json"), expected)
    assert said(JOINED, expected=Path("expected.json")) == {str(JOINED): "stale: no rule makes it"}


def test_a_study_is_verified_wherever_it_lies(study: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = study.parent / "elsewhere" / "study"
    moved.parent.mkdir()
    monkeypatch.chdir(study.parent)
    study.rename(moved)
    assert said(moved / "results") == {str(moved / path): "ok" for path in TOLD}
    (moved / PHI).write_text("other maps")
    assert said(moved / JOINED) == {str(moved / JOINED): stale(SCORES)}


def test_a_single_result_that_was_moved_is_compared_with_what_it_was_made_of(study: Path, said: Said) -> None:
    Path("paper").mkdir()
    for path in (SCORES, beside(SCORES)):
        shutil.copy(path, "paper")
    assert said("paper") == {"paper/ruler_t_1k.csv": "ok"}
    Path("paper/ruler_t_1k.csv").write_text("0.9")
    assert said("paper") == {"paper/ruler_t_1k.csv": "changed: it differs from the record"}


def test_every_file_is_hashed_once(study: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []

    def counting(path: Path) -> str:
        hashed.append(path)
        return sha256_of(path)

    monkeypatch.setattr(verify, "sha256_of", counting)
    assert said("results", SCORES) == ALL_OK
    assert len(hashed) == len(set(hashed)) and {path.relative_to(study) for path in hashed} == {*TOLD, SPEECH, TASK}


def test_the_exit_status_is_0_only_when_all_are_ok(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["verify"])
    assert "6 ok\n" in capsys.readouterr().out
    JOINED.write_text("x")
    for arguments, status in ((["verify"], 1), (["verify", str(PHI), str(JOINED)], 1), (["verify", "results/none"], 2)):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == status
    assert "results/none: no such file or folder; name a result" in capsys.readouterr().err
    cli.main(["verify", str(PHI)])


def test_verifying_loads_nothing_heavy(study: Path) -> None:
    code = "import sys, residual_mass.verify; print({'torch', 'numpy', 'pandas'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# ---- records ---------------------------------------------------------------------------------------------------------


def test_a_record_says_what_ran_on_what(study: Path) -> None:
    before = PHI.read_bytes()
    record = Record("train", TOLD[PHI], [MANIFEST, None])
    PHI.write_text("new maps")
    record.write(PHI, device=torch.device("cpu"), processes=2, steps=5)
    found = read_json(beside(PHI))
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
    assert read_json(beside(SCORES))["inputs"] == {str(TEXTS): before}


def test_only_the_manifest_of_the_assets_needs_no_record(study: Path) -> None:
    assert not beside(MANIFEST).exists() and recorded(MANIFEST) == sha256_of(MANIFEST)
    write_json(PROMPTS, {"tasks": {}})
    beside(PROMPTS).unlink()
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
    text = beside(result).read_text()
    assert "hf_secret" not in text and str(tmp_path) not in text and "lovelace" not in text
    assert set(json.loads(text)["inputs"]) == {"~/assets/manifest.json"}
    assert said() == {"results/runtime_t.csv": "ok"}
    write_json(brought, {"pins": {}, "files": [], "more": 1})
    assert said()["results/runtime_t.csv"] == "stale: made from ~/assets/manifest.json, which has changed since"


def test_without_a_home_directory_names_are_those_from_the_working_directory(tmp_path: Path) -> None:
    """As for a user whom the machine does not know."""
    code = (
        "import os, pwd; del os.environ['HOME']; pwd.getpwuid = {}.__getitem__;"
        "from pathlib import Path; from residual_mass.provenance import named; print(named(Path('/data/a.csv')))"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r}); {code}"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout == f"{os.path.relpath('/data/a.csv', tmp_path)}\n", run.stderr


def test_a_name_starts_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert provenance.named(Path("results/../results/a.csv")) == "results/a.csv"
    assert provenance.named(tmp_path / "assets" / "manifest.json") == "../assets/manifest.json"


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
    for folder in ("core", "inputs"):
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
