"""The examples of the pages run unchanged, on a tiny model in place of the mini study's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from tests.conftest import tiny_llama
from tests.needs import KERNELS, needs
from tests.unit.model.gguf_files import write_gguf

from residual_mass.model.loading import Backbone

ROOT = Path(__file__).parents[2]
MODEL = "results/assets/models/smollm2-135m-instruct"


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_block(block: str, folder: Path, names: dict[str, object]) -> None:
    """Runs an example with the model of a folder; its output is longer than its prompt."""
    names.pop("output", None)
    exec(re.sub(r'^folder = ".*"$', f"folder = {str(folder)!r}", block, flags=re.MULTILINE), names)
    if "output" in names:
        assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]


PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "config/README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The places of a page that a link can name, as GitHub and mkdocs make them of its titles."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page)):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_site_has_every_page() -> None:
    places = re.findall(r"- (?:\w+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if (ROOT / "docs") in page.parents}
    assert sorted(places) == sorted(pages | {"index.md", "configuration.md", "changelog.md"})


@pytest.mark.parametrize(("page", "number"), [("methods.md", 1), pytest.param("library.md", 5, marks=needs(KERNELS))])
def test_the_examples_of_a_page(
    page: str, number: int, tiny_backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_llama(width=64).save_pretrained(tmp_path)
    tiny_backbone.tokenizer.save_pretrained(tmp_path)
    write_gguf(tmp_path / "model.gguf", tiny_llama(width=64), lambda name: "Q8_0" if "embed" in name else "Q4_0")
    names: dict[str, object] = {}
    examples = blocks(page, "python")
    for block in examples:
        run_block(block, tmp_path, names)
        assert "output" in names
    assert len(examples) == number


def test_the_page_of_examples(tiny_backbone: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one go, as a reader would; each leaves an output longer than its prompt, or prints its distances."""
    tiny_backbone.model.save_pretrained(tmp_path)
    tiny_backbone.tokenizer.save_pretrained(tmp_path)
    names: dict[str, object] = {}
    for block in blocks("examples.md", "python"):
        run_block(block, tmp_path, names)
        assert ("output" in names) == ("output =" in block)
    printed = capsys.readouterr().out
    distances = {line.split()[0]: float(line.split()[1]) for line in printed.splitlines() if line.startswith("topk")}
    assert set(distances) == {"topk", "topk_moments"} and all(value > 0 for value in distances.values())


@pytest.fixture
def capitals(tiny_backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the model and the task of lm_eval.md."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))  # of another process; read at import here
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    tiny_backbone.model.save_pretrained(tmp_path / MODEL)
    tiny_backbone.tokenizer.save_pretrained(tmp_path / MODEL)
    (task,), (line,) = blocks("lm_eval.md", "yaml"), blocks("lm_eval.md", "json")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/capitals.yaml").write_text(task)
    (tmp_path / "tasks/capitals.jsonl").write_text(line)
    return tmp_path


def test_the_python_of_lm_eval(capitals: Path) -> None:
    names: dict[str, object] = {}
    examples = blocks("lm_eval.md", "python")
    for block in examples:
        exec(block, names)
        assert names["results"]["results"]["capitals"]["acc,none"] in (0, 1)
    assert names["results"]["config"]["partial_kv"]["method"] == "topk"
    assert len(examples) == 2


@pytest.mark.slow
def test_the_command_of_lm_eval(capitals: Path) -> None:
    (command,) = blocks("lm_eval.md", "sh")
    words = shlex.split(command.replace("\\\n", ""))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, *words[1:]], env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "|capitals|" in run.stdout
    assert list((capitals / "results/lm_eval").rglob("results_*.json"))
