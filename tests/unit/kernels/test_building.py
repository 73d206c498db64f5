"""Building and loading the kernels: without them, torch does the work, and one line gives the reason."""

from __future__ import annotations

import _ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.needs import CLANG, COMPILER, KERNELS, needs

from residual_mass.kernels import library

ROOT = Path(__file__).parents[3]
ALONE = "the CPU kernels are left out, and torch does their work"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a build needs, without libraries."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    no = shutil.ignore_patterns("*.so*", "__pycache__")
    shutil.copytree(
        ROOT / "src" / "residual_mass" / "kernels", tmp_path / "src" / "residual_mass" / "kernels", ignore=no
    )
    return tmp_path


def build(checkout: Path, **environment: str) -> tuple[str, list[str]]:
    """What an editable build writes on stderr, and the libraries that it leaves, whole or not."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=checkout, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, sorted(path.name for path in checkout.rglob("*.so*"))


def test_no_compiler(checkout: Path) -> None:
    said, made = build(checkout, PATH=str(Path(sys.executable).parent), CXX="")
    assert said.splitlines() == [f"residual-mass: no C++ compiler was found; {ALONE}"]
    assert made == []


def test_a_compiler_that_dies_leaves_nothing(checkout: Path) -> None:
    compiler = checkout / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho half > "$last"\necho "error: it broke" >&2\nexit 3\n')
    compiler.chmod(0o755)
    said, made = build(checkout, CXX=str(compiler))
    assert f"residual-mass: _portable.so did not compile (error: it broke); {ALONE}" in said.splitlines()
    assert made == []


@pytest.mark.slow
@needs(COMPILER)
def test_what_a_build_makes(checkout: Path) -> None:
    said, made = build(checkout)
    assert said == ""
    assert "_portable.so" in made and all(name.endswith(".so") for name in made)


def test_a_switch_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    load = library.load.__wrapped__
    monkeypatch.setenv(library.SWITCH, "off")
    assert load() is None
    monkeypatch.setenv(library.SWITCH, "sse")
    with pytest.raises(ValueError, match="RESIDUAL_MASS_KERNELS is 'sse', not one of portable, avx2, avx512, off"):
        load()


@needs(KERNELS)
def test_the_portable_ones_are_a_switch_away(monkeypatch: pytest.MonkeyPatch) -> None:
    load = library.load.__wrapped__
    monkeypatch.delenv(library.SWITCH, raising=False)
    loaded = load()
    assert loaded is not None and loaded.target == loaded.best_target()
    monkeypatch.setenv(library.SWITCH, "portable")
    assert load().target == "portable"


@needs(KERNELS)
def test_instructions_that_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.Library, "best_target", lambda _: "portable")
    monkeypatch.setenv(library.SWITCH, "avx2")
    with pytest.raises(
        ValueError, match="RESIDUAL_MASS_KERNELS is avx2, but this CPU has no instructions beyond portable"
    ):
        library.load.__wrapped__()


@pytest.mark.parametrize("found", ["none", "damaged", "another"])
def test_libraries_that_do_not_load(found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if found == "damaged":
        (tmp_path / "_portable.so").write_bytes(b"\x7fELF half of it")
    if found == "another":
        shutil.copy(_ctypes.__file__, tmp_path / "_portable.so")  # one without the functions
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.delenv(library.SWITCH, raising=False)
    with pytest.warns(UserWarning, match="torch does the work of the CPU kernels, which are not built here"):
        assert library.load.__wrapped__() is None


@needs(KERNELS)
def test_a_library_that_lacks_a_width_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would return without a result."""
    library.Library("portable")
    monkeypatch.setattr(library, "WIDTHS", (*library.WIDTHS, 72))
    with pytest.raises(OSError, match="_portable.so is of another version of this package"):
        library.Library("portable")


@needs(KERNELS)
def test_a_library_of_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read its arguments as something else."""
    monkeypatch.setattr(library, "INTERFACE", library.INTERFACE + 1)
    with pytest.raises(OSError, match="_portable.so is of another version of this package"):
        library.Library("portable")


def run_kernels(checkout: Path, **environment: str) -> None:
    """Runs the tests of steps, prompts and products with the libraries of a checkout."""
    shutil.copytree(
        ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"), dirs_exist_ok=True
    )
    files = [f"tests/unit/kernels/test_{name}.py" for name in ("steps", "prompt", "products")]
    tests = [*"-m pytest -q -p no:cacheprovider -o pythonpath=".split(), *files, "-k"]
    done = subprocess.run(
        [sys.executable, *tests, "not tokens_to_read and not aarch64"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{ROOT}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.slow
@needs(CLANG)
def test_clang_builds_them_too(checkout: Path) -> None:
    said, made = build(checkout, CXX="clang++")
    assert said == "" and "_portable.so" in made
    run_kernels(checkout)


@pytest.mark.slow
@needs(COMPILER)
def test_sanitizers_find_nothing(checkout: Path) -> None:
    """Libraries that look for reads out of bounds and undefined behaviour."""
    sanitizers = "-fsanitize=address,undefined -fno-sanitize-recover=all"
    said, made = build(checkout, CXX=f"g++ {sanitizers} -O1 -g")
    assert "_portable.so" in made, said
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    run_kernels(checkout, LD_PRELOAD=runtime.stdout.strip(), ASAN_OPTIONS="detect_leaks=0")
