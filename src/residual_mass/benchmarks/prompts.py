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

from residual_mass.benchmarks.catalogue import task_named, tasks_of, too_long
from residual_mass.benchmarks.examples import Doc, DoesNotFitError, Request
from residual_mass.files import jsonl, read_json, read_jsonl, sha256_of, sha256_text, write_meta, write_text
from residual_mass.spec_json import to_json
from residual_mass.specs import PromptsSpec, tokens_of

logger = logging.getLogger(__name__)

MANIFEST_KEYS = {"benchmark", "length", "tokenizer", "harness", "examples", "tasks", "left_out", "sha256"}
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
        self, task: str, tokenizer: Any, length: int, count: int, seed: int, assets: Path | None
    ) -> list[Doc]:
        """At most `count` examples (a data set may hold fewer), of `length` tokens; assets None is the benchmark's own
        data.

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

    length = tokens_of(spec.length)
    names, left_out = tasks_of(spec.benchmark, length), too_long(spec.benchmark, length)
    builder: Builder = importlib.import_module(f"residual_mass.benchmarks.{spec.benchmark}")  # a name of the catalogue
    tokenizer = load_tokenizer(spec.model_id, spec.revision, spec.tokenizer_source, assets)
    source = assets if spec.data_source == "assets" else None
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
    write_meta(out, spec=json.loads(to_json(spec)))


def _table_sha256(tasks: dict[str, Any]) -> str:
    return sha256_text(json.dumps(list(tasks.items()), sort_keys=True))


def load_manifest(path: Path) -> dict[str, Any]:
    """The manifest of frozen prompts.

    Raises:
        ValueError: it is missing, not a prompts manifest, or its task table was changed.
    """
    manifest = read_json(path)
    if not isinstance(manifest, dict) or set(manifest) != MANIFEST_KEYS:
        raise ValueError(f"{path}: not a prompts manifest; {REMEDY}")
    if _table_sha256(manifest["tasks"]) != manifest["sha256"]:
        raise ValueError(f"{path}: its task table does not match its sha256; {REMEDY}")
    return manifest


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
    if not file.exists():
        raise ValueError(f"{file}: no such file, though {manifest} names it; {REMEDY}")
    if sha256_of(file) != entry["sha256"]:
        raise ValueError(f"{file}: not the file that {manifest} vouches for (sha256); {REMEDY}")
    return [Prompt(**row) for row in read_jsonl(file)[:count]]
