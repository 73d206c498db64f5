"""Frozen prompts: one JSONL file per task, and a manifest with their sha256."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from residual_mass.files import read_json, read_jsonl, sha256_of, sha256_text

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
    """The hash of a manifest's task table."""
    return sha256_text(json.dumps(list(tasks.items()), sort_keys=True))


def load_manifest(path: Path) -> dict[str, Any]:
    """The manifest of frozen prompts; raises ValueError where the file is missing or something else."""
    manifest = read_json(path)
    if not isinstance(manifest, dict) or "tasks" not in manifest:
        raise ValueError(f"{path}: not a prompts manifest; {REMEDY}")
    return manifest


def require_prompts_of(path: Path, benchmark: str, length: str, tokenizer: str) -> None:
    """Raises ValueError where the manifest is of something else."""
    manifest = load_manifest(path)
    for key, wanted in (("benchmark", benchmark), ("length", length), ("tokenizer", tokenizer)):
        if manifest[key] != wanted:
            raise ValueError(f"{path}: {key} is {manifest[key]}, not {wanted}; give --prompts those of {wanted}")


def load_prompts(manifest: Path, task: str, count: int) -> list[Prompt]:
    """The first `count` frozen examples of `task`, or all of a smaller data set.

    Raises:
        ValueError: the manifest holds no such task or too few examples, or the task's file is not the one it lists.
    """
    content = load_manifest(manifest)
    entry = content["tasks"].get(task)
    if entry is None:
        reason = content["left_out"].get(task, "no such task")
        raise ValueError(
            f"{manifest}: holds no prompts of {task} ({reason}); name one of {', '.join(content['tasks'])}"
        )
    if content["examples"] < count:
        raise ValueError(f"{manifest}: has {content['examples']} examples per task, not {count}; {REMEDY}")
    file = manifest.parent / entry["file"]
    if not file.is_file() or sha256_of(file) != entry["sha256"]:
        raise ValueError(f"{file}: missing, or not the file that {manifest} lists (sha256); {REMEDY}")
    return [Prompt(**row) for row in read_jsonl(file)[:count]]
