"""Frozen prompts, read with suspicion: one JSONL file per task and a manifest that vouches for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from residual_mass.files import read_json, read_jsonl, sha256_of, sha256_text

MANIFEST_TYPES = {
    "benchmark": str, "length": str, "tokenizer": str, "harness": dict, "examples": int, "tasks": dict,
    "left_out": dict, "sha256": str,
}  # fmt: skip
ENTRY_TYPES = {"file": str, "sha256": str, "examples": int, "data": str}
"""Of a task in the manifest."""
PROMPT_TYPES = {"task": str, "index": int, "prompt": str, "max_generation_tokens": int, "stop": list, "doc": dict}
REMEDY = "delete the manifest and run the prompts stage again"


@dataclass(frozen=True)
class Prompt:
    """One frozen example."""

    task: str
    index: int
    prompt: str
    max_generation_tokens: int
    stop: list[str]
    doc: dict[str, Any]
    """What the harness's `process_results` needs."""

    @cached_property
    def sha256(self) -> str:
        return sha256_text(self.prompt)


def table_sha256(tasks: dict[str, Any]) -> str:
    return sha256_text(json.dumps(list(tasks.items()), sort_keys=True))


def load_manifest(path: Path) -> dict[str, Any]:
    """The manifest of frozen prompts.

    Raises:
        ValueError: it is missing, not a prompts manifest, or its task table was changed.
    """
    manifest = read_json(path)
    if not isinstance(manifest, dict) or set(manifest) != set(MANIFEST_TYPES) or not _is_sound(manifest):
        raise ValueError(f"{path}: not a prompts manifest; {REMEDY}")
    if table_sha256(manifest["tasks"]) != manifest["sha256"]:
        raise ValueError(f"{path}: its task table does not match its sha256; {REMEDY}")
    return manifest


def _is_sound(manifest: dict[str, Any]) -> bool:
    """Whether everything is of its type."""
    entries = manifest["tasks"].values() if isinstance(manifest["tasks"], dict) else [None]
    tables = [(manifest, MANIFEST_TYPES), *((entry, ENTRY_TYPES) for entry in entries)]
    return all(
        isinstance(table, dict) and all(isinstance(table.get(name), of) for name, of in types.items())
        for table, types in tables
    )


def load_prompts(manifest: Path, task: str, count: int) -> list[Prompt]:
    """The first `count` frozen examples of `task`; fewer only where its data set holds fewer.

    Raises:
        ValueError: the task or some examples are not there, or the file is not the one the manifest vouches for.
    """
    content = load_manifest(manifest)
    if task in content["left_out"]:
        raise ValueError(f"{manifest}: task {task} is left out: {content['left_out'][task]}")
    if task not in content["tasks"]:
        raise ValueError(f"{manifest}: no task {task}; it holds {', '.join(content['tasks'])}")
    entry = content["tasks"][task]
    if content["examples"] < count:
        raise ValueError(f"{manifest}: has {content['examples']} examples a task, not {count}; {REMEDY}")
    file = manifest.parent / entry["file"]
    if not file.is_file():
        raise ValueError(f"{file}: no such file, though {manifest} names it; {REMEDY}")
    if sha256_of(file) != entry["sha256"]:
        raise ValueError(f"{file}: not the file that {manifest} vouches for (sha256); {REMEDY}")
    rows = read_jsonl(file)[:count]
    for number, row in enumerate(rows, start=1):
        if set(row) != set(PROMPT_TYPES) or not all(isinstance(row[name], of) for name, of in PROMPT_TYPES.items()):
            raise ValueError(f"{file}:{number}: not a frozen prompt; {REMEDY}")
    return [Prompt(**row) for row in rows]
