"""The wheel with only the dependencies of pyproject.toml: its contents, and that it works."""

from __future__ import annotations

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
from tests.needs import COMPILER, needs

ROOT = Path(__file__).parents[2]
PIPELINE = ("accelerate", "datasets", "lm_eval", "matplotlib", "pandas", "pydantic", "snakemake")
"""Packages of the pipeline. One that a dependency asks for (pydantic, by way of typer) is left out as well."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, for a build writes beside its sources."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(source))
    (file,) = built.glob("*.whl")
    return file


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
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
    """What the code prints in an environment of this search path and nothing else."""
    start = f"import sys; sys.path[:0] = {path!r}\n"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", start + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


@needs(COMPILER)
def test_the_wheel_holds_kernels_for_any_python(wheel: Path) -> None:
    assert "residual_mass/kernels/_portable.so" in zipfile.ZipFile(wheel).namelist()
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")


def test_the_wheel_holds_the_marker_of_types_and_the_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "residual_mass/py.typed" in names
    for pattern in ("*.csv", "*.txt", "*.j2", "*.jsonl"):
        for file in (ROOT / "src").rglob(pattern):
            if ".egg-info" not in str(file):
                assert file.relative_to(ROOT / "src").as_posix() in names
