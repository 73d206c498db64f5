"""The wheel with only the dependencies of pyproject.toml: its contents, and that it works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.conftest import byte_tokenizer, tiny_llama
from tests.needs import ARM, COMPILER, needs

ROOT = Path(__file__).parents[2]
PIPELINE = ("accelerate", "datasets", "lm_eval", "matplotlib", "pandas", "pydantic", "snakemake")
"""Packages of the pipeline. One that a dependency asks for (pydantic, by way of typer) is left out as well."""
NO_COMPILER = str(Path(sys.executable).parent)
"""A PATH."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def plain_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a compiler."""
    return built(tmp_path_factory.mktemp("plain"), PATH=NO_COMPILER, CXX="")


def built(folder: Path, **environment: str) -> Path:
    """Built from a copy, for a build writes beside its sources."""
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    _pip("wheel", *options, str(source), **environment)
    (file,) = folder.glob("*.whl")
    return file


def _pip(*arguments: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def installed(wheel: Path, folder: Path, extra: str = "") -> list[str]:
    """The search path of an environment with the wheel and what it asks for, taken from this one."""
    _pip("install", "--no-deps", "--no-index", "--target", str(folder / "wheel"), str(wheel))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else [])]
    (folder / "needed").mkdir()
    for name in _closure(asked) - (set() if extra else set(PIPELINE)):
        for file in metadata.files(name) or []:
            top, link = file.parts[0], folder / "needed" / file.parts[0]
            if top not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    return [str(folder / "wheel"), str(folder / "needed")]


def _closure(lines: Iterable[str]) -> set[str]:
    """Names of installed distributions that these requirements need, with those that they need in turn."""
    found: set[str] = set()
    waiting = [(Requirement(line), "") for line in lines]
    while waiting:
        asked, extra = waiting.pop()
        if asked.name in found or (asked.marker is not None and not asked.marker.evaluate({"extra": extra})):
            continue
        found.add(asked.name)
        waiting += [
            (Requirement(line), one) for line in metadata.requires(asked.name) or [] for one in ("", *asked.extras)
        ]
    return found


def run(code: str, path: list[str]) -> str:
    """What the code prints in an environment of this search path and nothing else, without a compiler."""
    start = f"import sys; sys.path[:0] = {path!r}\n"
    command = [sys.executable, "-I", "-S", "-c", start + code]
    environment = {**os.environ, "PATH": NO_COMPILER, "CXX": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


LIBRARY = """
import importlib.util
import residual_mass, torch
from transformers import LlamaConfig, LlamaForCausalLM
from residual_mass import PhiMaps, partial_generate, partial_kv
import residual_mass.core, residual_mass.methods

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, max_position_embeddings=256, bos_token_id=0, eos_token_id=None)
model = LlamaForCausalLM(config).eval()
prompt = torch.arange(120)[None] % 64
with partial_kv(model, method="topk_moments", budget=0.2) as session:
    output = model.generate(prompt, max_new_tokens=4, do_sample=False)
assert session.partial_calls == {0: 3, 1: 3}, session.partial_calls
assert output.equal(partial_generate(model, prompt, max_new_tokens=4, method="topk_moments", budget=0.2))
print(residual_mass.__file__)
print(*[name for name in NAMES if importlib.util.find_spec(name)])
"""


def test_the_library_works_beside_its_dependencies_alone(wheel: Path, tmp_path: Path) -> None:
    path = installed(wheel, tmp_path)
    place, others = run(LIBRARY.replace("NAMES", repr(PIPELINE)), path).split("\n")[:2]
    assert Path(place).is_relative_to(tmp_path)
    assert others == "", "then the environment is not the light one"


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ("lm-eval", "import residual_mass.lm_eval, lm_eval.api.registry as known; known.get_model('partial_kv')"),
        ("measure", "import gguf, accelerate, residual_mass.cli, residual_mass.measure.page"),
        ("serve", "import residual_mass.serve.server"),
    ],
)
def test_an_extra_brings_what_its_part_needs(extra: str, code: str, wheel: Path, tmp_path: Path) -> None:
    run(code, installed(wheel, tmp_path, extra))


MEASURE = """
from residual_mass.__main__ import main
sys.argv[1:] = ["measure", MODEL, TEXT, "--length", "256", "--documents", "2", "--tokens", "4", "--budgets", "10",
                "--methods", "scan4_regression_64", "--device", "cpu", "--out", OUT]
main()
"""


@pytest.fixture
def measure(tmp_path: Path) -> str:
    """Code that measures a small model with heads of 32, which the kernels serve."""
    tiny_llama(width=32).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("Fellow citizens of the Senate. " * 100)
    code = MEASURE
    for name, path in {"MODEL": "model", "TEXT": "text.txt", "OUT": "out"}.items():
        code = code.replace(name, repr(str(tmp_path / path)))
    return code


@needs(COMPILER)
def test_measure_works_without_a_compiler(wheel: Path, measure: str, tmp_path: Path) -> None:
    said = run(measure, installed(wheel, tmp_path, "measure"))
    assert "not built here" not in said
    (table,) = tmp_path.glob("out/**/measured.csv")
    assert "packed" in table.read_text()


def test_a_wheel_without_kernels_says_what_it_lacks(plain_wheel: Path, measure: str, tmp_path: Path) -> None:
    assert plain_wheel.name.endswith("-py3-none-any.whl")
    said = run(measure, installed(plain_wheel, tmp_path, "measure"))
    assert "torch does the work of the CPU kernels, which are not built here" in said
    assert "install a C++ compiler and then this package again" in said
    (table,) = tmp_path.glob("out/**/measured.csv")
    assert "packed" not in table.read_text()


@needs(COMPILER)
def test_the_wheel_holds_kernels_for_any_python(wheel: Path) -> None:
    assert "residual_mass/kernels/_portable.so" in zipfile.ZipFile(wheel).namelist()
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")


@pytest.mark.parametrize(
    "machine", [pytest.param("", marks=needs(COMPILER)), pytest.param("aarch64", marks=needs(ARM))]
)
def test_the_tag_is_what_auditwheel_finds(machine: str, wheel: Path, tmp_path: Path) -> None:
    """In the libraries, for this machine and compiled for another one."""
    if machine:
        wheel = built(tmp_path, _PYTHON_HOST_PLATFORM=f"linux-{machine}", CXX=f"{machine}-linux-gnu-g++")
        libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
        assert libraries == ["residual_mass/kernels/_portable.so"]
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    tag = wheel.stem.rpartition("-")[2]
    assert tag.startswith("manylinux_2_") and tag.endswith(machine)
    assert json.loads(run.stdout)["overall_tag"] == tag, run.stderr


def test_the_wheel_holds_the_marker_of_types_and_the_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "residual_mass/py.typed" in names
    for pattern in ("*.csv", "*.txt", "*.j2", "*.jsonl"):
        for file in (ROOT / "src").rglob(pattern):
            if ".egg-info" not in str(file):
                assert file.relative_to(ROOT / "src").as_posix() in names
