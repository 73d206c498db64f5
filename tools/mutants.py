"""Mutation tests: applies one change at a time to a copy of the checkout, and prints the first test that fails.

python tools/mutants.py                    all of tools/mutants.toml: a row each, and the counts
python tools/mutants.py core "K in"        those whose file or description has one of these words

A change does not apply if its text does not occur exactly once. Exits with status 1 if no test notices a change.
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
    mutants = [mutant for mutant in read(ROOT / "tools" / "mutants.toml") if chosen(mutant, sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT, Path(folder) / "checkout", ignore=NOT_COPIED)
        import transformers.models.llama.modeling_llama  # noqa: F401  # so that forks need not import it

        verdicts = [verdict(copy, mutant) for mutant in mutants]
    counts = {start: sum(text.startswith(start) for text in verdicts) for start in ("noticed", "NOT", "does not apply")}
    print("; ".join(f"{start}: {count}" for start, count in counts.items()))
    sys.exit(bool(counts["NOT"]))


def read(path: Path) -> list[Mutant]:
    groups = tomllib.loads(path.read_text("utf-8"))["group"]
    return [Mutant(group["file"], **fields, tests=group["tests"]) for group in groups for fields in group["mutants"]]


def chosen(mutant: Mutant, words: list[str]) -> bool:
    return not words or any(word in f"{mutant.file} {mutant.what}" for word in words)


def verdict(copy: Path, mutant: Mutant) -> str:
    """Returns and prints which test notices a change."""
    path = copy / mutant.file
    text = path.read_text("utf-8") if path.exists() else ""
    if text.count(mutant.old) != 1:
        outcome = f"does not apply: the text occurs {text.count(mutant.old)} times"
    else:
        path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
        outcome = first_failure(copy, mutant.tests)
        path.write_text(text, "utf-8")
    print(f"{mutant.file.removeprefix('src/residual_mass/')}: {mutant.what}: {outcome}", flush=True)
    return outcome


class FirstFailure:
    """A pytest plugin that keeps the name of the first test that fails, or of the file that cannot be collected."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.name = self.name or f"{report.nodeid} (collection)"


def first_failure(copy: Path, tests: list[str]) -> str:
    """Runs tests in a fork, so that only the fork imports the changed package."""
    known = [test for test in tests if (copy / test).exists()]
    if not known:
        return "does not apply: its tests are gone"
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.chdir(copy)
        sys.path[:0] = [str(copy / "src"), str(copy)]
        os.environ["PYTHONPATH"] = str(copy / "src")
        sys.dont_write_bytecode = True  # a cached file of the same size and time would hold the unchanged code
        plugin, code = FirstFailure(), 3
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--rootdir", str(copy)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = pytest.main([*options, *known], plugins=[plugin])
        os.write(writer, plugin.name.encode())
        os._exit(int(code))
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        name = pipe.read()
    code = os.waitstatus_to_exitcode(os.wait()[1])
    if code and not name:
        return f"does not apply: pytest ended with {code}"
    return f"noticed by {name}" if code else "NOT NOTICED"


if __name__ == "__main__":
    main()
