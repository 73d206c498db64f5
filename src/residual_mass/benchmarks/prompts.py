"""Benchmark examples, built once and frozen: one JSONL file per task and a manifest with their sha256."""

from __future__ import annotations

import json
import logging
from importlib import metadata
from pathlib import Path
from typing import Any

from residual_mass.benchmarks import ruler
from residual_mass.benchmarks.catalogue import Doc, DoesNotFitError, harness_requests
from residual_mass.benchmarks.frozen_examples import read_examples
from residual_mass.files import jsonl, sha256_of, write_text
from residual_mass.provenance import Record
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import PromptsSpec
from residual_mass.spec.tasks import parts_of, task_named, too_long
from residual_mass.texts.assets import require_whole
from residual_mass.texts.frozen_prompts import table_sha256
from residual_mass.texts.hub import commits_of, hub_rows

log = logging.getLogger(__name__)

ASSET_PLACES = ("haystack", "qa", "nltk_data")
"""Files and folders of the assets that RULER's generators read."""
LONG_FIELDS = {
    "ruler": ("input", "input_example"),  # the latter is an example of cwe that the harness never sends
    "babilong": ("input",),
    "longbench": ("context",),
}
"""Fields left out of a frozen example, as its prompt contains them."""


def run(spec: PromptsSpec, assets: Path, out: Path) -> None:
    """The `prompts` stage: builds every task that fits the length; writes the task files, then the manifest `out`."""
    from residual_mass.model.loading import load_tokenizer

    record = Record("prompts", spec, [assets / MANIFEST])
    length = tokens_of(spec.length)
    left_out = too_long(spec.benchmark, length)
    tokenizer = load_tokenizer(spec.model_id, spec.revision, spec.tokenizer_source, assets)
    require_whole(assets, *(ASSET_PLACES if spec.data_source == "assets" else ["nltk_data"]))
    tasks: dict[str, Any] = {}
    for name in spec.tasks:
        log.info("%s at %s: building %d examples", name, spec.length, spec.examples)
        try:
            docs = examples_of(spec, name, tokenizer, assets)
        except DoesNotFitError as error:
            left_out[name] = str(error)
            continue
        file = out.parent / f"{name}.jsonl"
        write_text(file, jsonl(_rows(spec.benchmark, name, docs)))
        tasks[name] = {
            "file": file.name,
            "sha256": sha256_of(file),
            "examples": len(docs),
            "data": task_named(spec.benchmark, name).data(spec.data_source),
        }
    for name, reason in left_out.items():
        log.warning("%s at %s is left out: %s", name, spec.length, reason)
    manifest = {
        "benchmark": spec.benchmark,
        "length": spec.length,
        "tokenizer": spec.tokenizer,
        "harness": {name: metadata.version(name) for name in ("lm_eval", "nltk", "wonderwords")},
        "examples": spec.examples,
        "tasks": tasks,
        "left_out": left_out,
        "sha256": table_sha256(tasks),
    }
    write_text(out, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")  # unsorted: the order of tasks counts
    files = [out.parent / entry["file"] for entry in tasks.values()]
    parts = parts_of(spec.benchmark, length) if spec.data_source == "hub" else {}
    record.write(out, *files, data_sets=commits_of(parts.values()))


def _rows(benchmark: str, task: str, docs: list[Doc]) -> list[dict[str, Any]]:
    """Returns what is stored of each example: its prompt, the limits of its answer, and the doc for its scores."""
    long_fields = LONG_FIELDS.get(benchmark, ())
    requests = harness_requests(benchmark, task, docs)
    rows = []
    for index, (doc, (prompt, settings)) in enumerate(zip(docs, requests, strict=True)):
        row = {
            "task": task,
            "index": index,
            "prompt": prompt,
            "max_generation_tokens": settings["max_gen_toks"],
            "stop": settings["until"],
            "doc": {key: value for key, value in doc.items() if key not in long_fields},
        }
        rows.append(row)
    return rows


def examples_of(spec: PromptsSpec, task: str, tokenizer: Any, assets: Path) -> list[Doc]:
    """Returns the first `spec.examples` examples of a task, or all if a data set has fewer. RULER's are generated to
    fill the length; others are as their data set has them, not cut to the length.

    Raises:
        DoesNotFitError: too few fit the length.
    """
    length = tokens_of(spec.length)
    if spec.benchmark == "ruler":
        data = ruler.harness_data(assets) if spec.data_source == "hub" else ruler.assets_data(assets)
        return ruler.build_examples(task, tokenizer, length, spec.examples, spec.seed, data)
    if spec.data_source == "hub":
        rows = hub_rows(parts_of(spec.benchmark, length)[task])
        return rows.select(range(min(spec.examples, len(rows)))).to_list()
    return read_examples(task, spec.length, spec.examples)
