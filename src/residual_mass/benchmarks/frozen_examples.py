"""Examples of BABILong and LongBench for studies that do not read the hub: files of this package.

Each file holds the examples of one task at one length. Like a data set on the hub, it is the same for every tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from residual_mass.benchmarks.catalogue import Doc
from residual_mass.files import read_jsonl, sha256_of
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.tasks import tasks_of

EXAMPLES_FOLDER = Path(__file__).with_name("examples")
CHECKSUMS = EXAMPLES_FOLDER / "sha256.txt"
"""The sha256 of every file, as `sha256sum` writes them."""


def checksums_of_examples(benchmark: str, length: str) -> tuple[str, ...]:
    """Returns the sha256 of the file of every task that fits the length, in the order of the tasks.

    Raises:
        ValueError: a task has no examples at the length; names the files that it has.
    """
    listed = _checksums()
    found = []
    for task in tasks_of(benchmark, tokens_of(length)):
        if _file_name(task, length) not in listed:
            others = ", ".join(name for name in listed if name.startswith(f"{task}_")) or "none"
            raise ValueError(
                f"length {length}: no examples of {task} without the hub (there are: {others}); choose another length "
                f"in benchmarks.{benchmark}.lengths, or `data_source: hub`"
            )
        found.append(listed[_file_name(task, length)])
    return tuple(found)


def read_examples(task: str, length: str, count: int) -> list[Doc]:
    """Returns the first `count` examples of a task, or all where there are fewer, in the fields of its data set.

    Raises:
        ValueError: the file is not the one that CHECKSUMS lists.
    """
    name = _file_name(task, length)
    file = EXAMPLES_FOLDER / name
    if _checksums().get(name) != sha256_of(file):
        raise ValueError(f"{file}: not the file that {CHECKSUMS.name} lists (sha256); run `sha256sum` if this is meant")
    return read_jsonl(file)[:count]


def _file_name(task: str, length: str) -> str:
    return f"{task}_{length}.jsonl"


def _checksums() -> dict[str, str]:
    """Returns the sha256 of every file by its name."""
    found = {}
    for line in CHECKSUMS.read_text(encoding="utf-8").splitlines():
        sha256, name = line.split()
        found[name] = sha256
    return found
