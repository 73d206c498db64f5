"""Makes changes of meaning, one at a time, in a copy of the checkout and says which test notices each.

python tools/mutants.py                    all of tools/mutants.toml: a row each, and the counts
python tools/mutants.py core "K in"        those whose file or description has one of these words

A change whose text is not found exactly once does not apply. Exit status 1 where one is not noticed.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "results", "logs", ".snakemake", "__pycache__", ".*_cache")


class Mutant(NamedTuple):
    file: str
    what: str
    old: str
    new: str
    tests: list[str]


def main() -> None:
    mutants = [each for each in read(ROOT / "tools" / "mutants.toml") if chosen(each, sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT, Path(folder) / "checkout", ignore=NOT_COPIED)
        import transformers.models.llama.modeling_llama  # noqa: F401  # forks then start at once

        said = [verdict(copy, mutant) for mutant in mutants]
    counts = {start: sum(each.startswith(start) for each in said) for start in ("noticed", "NOT", "does not apply")}
    print("; ".join(f"{start}: {count}" for start, count in counts.items()))
    sys.exit(bool(counts["NOT"]))


def read(path: Path) -> list[Mutant]:
    groups = tomllib.loads(path.read_text("utf-8"))["group"]
    return [Mutant(group["file"], **each, tests=group["tests"]) for group in groups for each in group["mutants"]]


def chosen(mutant: Mutant, words: list[str]) -> bool:
    return not words or any(word in f"{mutant.file} {mutant.what}" for word in words)


def verdict(copy: Path, mutant: Mutant) -> str:
    """Which test notices a change; prints it too."""
    path = copy / mutant.file
    text = path.read_text("utf-8") if path.exists() else ""
    if text.count(mutant.old) != 1:
        said = f"does not apply: the text occurs {text.count(mutant.old)} times"
    else:
        path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
        said = told_by(copy, mutant.tests)
        path.write_text(text, "utf-8")
    print(f"{mutant.file.removeprefix('src/residual_mass/')}: {mutant.what}: {said}", flush=True)
    return said


class FirstFailure:
    """A plugin that keeps the name of the first test that fails, or of the file that cannot be collected."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.name = self.name or f"{report.nodeid} (collection)"


def told_by(copy: Path, tests: list[str]) -> str:
    """Runs tests in a fork, which alone imports the changed package."""
    known = [test for test in tests if (copy / test).exists()]
    if not known:
        return "does not apply: its tests are gone"
    found, into = os.pipe()
    if os.fork() == 0:
        os.chdir(copy)
        sys.path[:0] = [str(copy / "src"), str(copy)]
        os.environ["PYTHONPATH"] = str(copy / "src")
        sys.dont_write_bytecode = True  # a cached file of the same size and second would be the unchanged one
        plugin, code = FirstFailure(), 3
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--rootdir", str(copy)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = pytest.main([*options, *known], plugins=[plugin])
        os.write(into, plugin.name.encode())
        os._exit(int(code))
    os.close(into)
    with open(found, encoding="utf-8") as answer:
        name = answer.read()
    code = os.waitstatus_to_exitcode(os.wait()[1])
    if code and not name:
        return f"does not apply: pytest ended with {code}"
    return f"noticed by {name}" if code else "NOT NOTICED"


if __name__ == "__main__":
    main()
