"""The folder that is served: the model by reference and no code but ours; flags that are refused before work starts."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.unit.serve.conftest import flags
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from residual_mass import cli
from residual_mass.serve.command import GENERATE_FILE, source_of, write_folder

ROOT = Path(__file__).parents[3]


def test_the_folder_refers_to_the_model(printable: Path, tmp_path: Path) -> None:
    (printable / "notes.txt").write_text("not a part of the model")
    options = flags(tmp_path / "served", str(printable), "--weights", "4", "--keep", str(tmp_path / "kept"))
    folder = write_folder(source_of(str(printable)), "tiny", options, 0.04)
    assert folder == tmp_path / "served" / "tiny"
    assert (folder / "model.safetensors").resolve() == printable / "model.safetensors"
    assert (folder / "custom_generate" / "generate.py").read_text() == GENERATE_FILE
    assert GENERATE_FILE in (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    stored = json.loads((folder / "custom_generate" / "settings.json").read_text())
    assert stored == {
        "model": str(printable), "method": "scan4_regression_64", "budget": 0.04, "weights": 4, "compile": False,
        "memory": 1024, "keep": str(tmp_path / "kept"),
    }  # fmt: skip
    names = {path.name for path in folder.iterdir()}
    assert "notes.txt" not in names and {"tokenizer.json", "config.json", "chat_template.jinja"} <= names
    loaded = LlamaForCausalLM.from_pretrained(folder)
    assert loaded.config.hidden_size == 256 and AutoTokenizer.from_pretrained(folder).chat_template


def test_a_folder_of_something_else_stays(printable: Path, tmp_path: Path) -> None:
    own = tmp_path / "tiny" / "thesis.tex"
    own.parent.mkdir()
    own.write_text("years of work")
    with pytest.raises(ValueError, match=r"tiny: not a folder of this command; choose another place with --out"):
        write_folder(printable, "tiny", flags(tmp_path), 0.04)
    assert own.read_text() == "years of work"


EVIL = "from pathlib import Path\nPath({victim!r}).touch()\n\n\nclass Evil:\n    pass\n"
MAPS = [
    ("config.json", {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}),
    ("config.json", {"auto_map": {"AutoModelForCausalLM": "someone/repository--evil.Evil"}}),
    ("config.json", {"text_config": {"auto_map": {"AutoModel": "evil.Evil"}}}),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}),
    ("processor_config.json", {"auto_map": {"AutoProcessor": "evil.Evil"}}),
]


@pytest.mark.parametrize(("file", "more"), MAPS)
def test_a_model_that_names_code_is_refused(
    file: str, more: dict[str, Any], printable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, before a folder is written; the code lies outside of the model's folder here."""
    evil = shutil.copytree(printable, tmp_path / "evil")
    path = evil / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | more))
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", str(evil), "--out", str(tmp_path / "served"), "--port", str(free_port())])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and f"{path}: auto_map names code of the model's own" in error
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize("place", ["modeling_evil.py", "custom_generate/generate.py"])
def test_a_model_that_brings_code_is_refused(place: str, printable: Path, tmp_path: Path) -> None:
    evil = shutil.copytree(printable, tmp_path / "evil")
    (evil / place).parent.mkdir(exist_ok=True)
    (evil / place).write_text(EVIL.format(victim=str(tmp_path / "pwned")))
    with pytest.raises(ValueError, match=rf"{place}: code of the model's own, which is never run"):
        write_folder(evil, "evil", flags(tmp_path / "served"), 0.04)
    assert not (tmp_path / "served").exists()


def test_code_that_comes_later_is_not_in_the_folder(
    printable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was checked is what is loaded, though the model's own folder may change while it is served."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = shutil.copytree(printable, tmp_path / "source")
    folder = write_folder(source, "tiny", flags(tmp_path / "served"), 0.04)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "evil"} | MAPS[0][1]))
    (source / "evil.py").write_text(EVIL.format(victim=str(tmp_path / "pwned")))
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "llama"
    assert not (tmp_path / "pwned").exists()
    with pytest.raises(Exception, match="Evil"):
        AutoConfig.from_pretrained(source, trust_remote_code=True)
    assert (tmp_path / "pwned").exists()  # where it is run


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "topk"], "--method topk: the CPU kernels do not serve it"),
        (["--method", "none"], "none"),
        (["--budget", "0.04"], "budget 0.04 may mean 4 % or 0.04 %"),
        (["--memory", "-1"], "--memory is -1"),
        (["--port", "70000"], "--port 70000"),
        (["nowhere"], "nowhere: no such folder, and no name on the hub"),
        (["empty"], "no model here (config.json and *.safetensors)"),
    ],
)
def test_wrong_flags_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    port = [] if "--port" in words else ["--port", str(free_port())]
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *words, *port])
    error = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and message in error and "\n" not in error
    assert os.listdir(tmp_path) == ["empty"]


def test_a_port_in_use(printable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        with pytest.raises(SystemExit):
            cli.main(["serve", str(printable), "--port", port, "--out", str(tmp_path)])
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in capsys.readouterr().err
