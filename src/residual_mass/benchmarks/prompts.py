"""Benchmark examples, built once and frozen: one JSONL file per task and a manifest that vouches for them."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from residual_mass.benchmarks.catalogue import parts_of, task_named, tasks_of, too_long
from residual_mass.benchmarks.examples import Doc, DoesNotFitError, Request, Source
from residual_mass.files import jsonl, read_json, read_jsonl, sha256_of, sha256_text, write_text
from residual_mass.inputs.assets import MANIFEST, require_whole
from residual_mass.inputs.hub_commits import commits_of
from residual_mass.inputs.hub_folder import HubFolder
from residual_mass.provenance import Record
from residual_mass.specs import PromptsSpec, tokens_of

logger = logging.getLogger(__name__)

MANIFEST_TYPES = {
    "benchmark": str, "length": str, "tokenizer": str, "harness": dict, "examples": int, "tasks": dict,
    "left_out": dict, "sha256": str,
}  # fmt: skip
ENTRY_TYPES = {"file": str, "sha256": str, "examples": int, "data": str}
"""Of a task in the manifest."""
PROMPT_TYPES = {"task": str, "index": int, "prompt": str, "max_generation_tokens": int, "stop": list, "doc": dict}
ASSET_PLACES = ("haystack", "qa", "nltk_data", "corpora/books")
"""What the builders read of the assets."""
REMEDY = "delete the manifest and run the prompts stage again"
LONG_FIELDS = {
    "ruler": ("input", "input_example"),  # the prompt itself, and cwe's example that the harness never sends
    "babilong": ("input",),
    "longbench": ("context",),
}
"""What a frozen example leaves out: the prompt holds it already."""


class Builder(Protocol):
    """A benchmark's module: its examples, and what the harness makes of them."""

    def build_examples(
        self, task: str, tokenizer: Any, length: int, count: int, seed: int, source: Source
    ) -> list[Doc]:
        """At most `count` examples (a data set may hold fewer), of `length` tokens.

        Raises:
            DoesNotFitError: too few fit the length.
        """

    def build_requests(self, task: str, docs: list[Doc]) -> list[Request]:
        """What the harness sends for each example."""


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


def run(spec: PromptsSpec, assets: Path, out: Path) -> None:
    """Builds every task of the benchmark that fits the length; writes the task files, then the manifest `out`."""
    from residual_mass.backbones.loading import load_tokenizer

    record = Record("prompts", spec, [assets / MANIFEST])
    length = tokens_of(spec.length)
    names, left_out = tasks_of(spec.benchmark, length), too_long(spec.benchmark, length)
    builder: Builder = importlib.import_module(f"residual_mass.benchmarks.{spec.benchmark}")  # a name of the catalogue
    tokenizer = load_tokenizer(spec.model_id, spec.revision, spec.tokenizer_source, assets)
    source = assets if spec.data_source == "assets" else HubFolder(assets)
    require_whole(assets, *(ASSET_PLACES if spec.data_source == "assets" else ["nltk_data"]))
    tasks: dict[str, dict[str, Any]] = {}
    for name in names:
        logger.info("%s at %s: building %d examples", name, spec.length, spec.examples)
        try:
            docs = builder.build_examples(name, tokenizer, length, spec.examples, spec.seed, source)
        except DoesNotFitError as error:
            left_out[name] = str(error)
            continue
        file = out.parent / f"{name}.jsonl"
        write_text(file, jsonl(_rows(spec.benchmark, name, docs, builder.build_requests(name, docs))))
        data = task_named(spec.benchmark, name).data(spec.data_source)
        tasks[name] = {"file": file.name, "sha256": sha256_of(file), "examples": len(docs), "data": data}
    for name, reason in left_out.items():
        logger.warning("%s at %s is left out: %s", name, spec.length, reason)
    _write_manifest(spec, tasks, left_out, out)
    parts = parts_of(spec.benchmark, length) if spec.data_source == "hub" else []
    commits = commits_of((part.data_set for part in parts), HubFolder(assets))
    record.write(out, *(out.parent / entry["file"] for entry in tasks.values()), data_sets=commits)


def _rows(benchmark: str, task: str, docs: list[Doc], requests: list[Request]) -> Iterator[dict[str, Any]]:
    long_fields = LONG_FIELDS.get(benchmark, ())
    for index, (doc, (prompt, settings)) in enumerate(zip(docs, requests, strict=True)):
        yield {
            "task": task,
            "index": index,
            "prompt": prompt,
            "max_generation_tokens": settings["max_gen_toks"],
            "stop": settings["until"],
            "doc": {key: value for key, value in doc.items() if key not in long_fields},
        }


def _write_manifest(spec: PromptsSpec, tasks: dict[str, Any], left_out: dict[str, str], out: Path) -> None:
    manifest = {
        "benchmark": spec.benchmark,
        "length": spec.length,
        "tokenizer": spec.tokenizer,
        "harness": {name: metadata.version(name) for name in ("lm_eval", "nltk", "wonderwords")},
        "examples": spec.examples,
        "tasks": tasks,
        "left_out": left_out,
        "sha256": _table_sha256(tasks),
    }
    write_text(out, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")  # unsorted: the order of tasks counts


def _table_sha256(tasks: dict[str, Any]) -> str:
    return sha256_text(json.dumps(list(tasks.items()), sort_keys=True))


def load_manifest(path: Path) -> dict[str, Any]:
    """The manifest of frozen prompts.

    Raises:
        ValueError: it is missing, not a prompts manifest, or its task table was changed.
    """
    manifest = read_json(path)
    if not isinstance(manifest, dict) or set(manifest) != set(MANIFEST_TYPES) or not _is_sound(manifest):
        raise ValueError(f"{path}: not a prompts manifest; {REMEDY}")
    if _table_sha256(manifest["tasks"]) != manifest["sha256"]:
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
