"""Files without a record, changed at random: read as valid rows, or refused in one line that names the file.

Every round is a seed, so that a failure repeats.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from damage import CUT, FLIPPED, Damage
from sample_report import sample_study

from residual_mass.backbones.phi_maps import HeadShape, PhiMaps
from residual_mass.benchmarks.store import GenerationStore
from residual_mass.core.settings import MapSpec
from residual_mass.files import jsonl, read_json, read_jsonl, sha256_text
from residual_mass.paper import numbers
from residual_mass.paper.readers import training_log
from residual_mass.paper.readers.accounting_file import load_accounting
from residual_mass.paper.readers.results import load_results
from residual_mass.paper.readers.runtime_file import load_runtime
from residual_mass.paper.report.verdicts import load_claims, load_comparison, load_picture
from residual_mass.paper.tables.parameter_table import load_counts
from residual_mass.paper.tables.table_file import load_table
from residual_mass.training.checkpoints import read_checkpoint, write_checkpoint

QUICK, THOROUGH = 8, 200
HOSTILE = (
    "", " ", "nan", "-inf", "1e999", "-1", "0", "0.5", "1.0000001", "99999999999999999999", "²", "٣", "none", "true",
    "full", "all", "0k", "9" * 5000, '"', '"""', ",", ";", "\r", "\r\n", "\n", "\x00", "\u2028", "é", "😀", "{}", "[",
    "\\", "../../etc/passwd", "$(id)", "x" * 200_000, "=1+1", "%s{0}", "1_000", "0x10",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 10**30, 0.5, 1e308, float("nan"), float("inf"), "", "x", "é\u2028\n", [], {}, [1],
    [[]], {"a": 1}, "full", "ruler_vt", [None], "\ud800",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A file, what reads it, and what it may turn into."""

    path: Path
    read: Callable[[Path], Any]
    changed: Callable[[bytes, Random], bytes]


# ---- changes ---------------------------------------------------------------------------------------------------------


def changed_bytes(content: bytes, rng: Random) -> bytes:
    return Damage(rng.choice((CUT, FLIPPED)), rng.randrange(10**9)).of(content, "")


def changed_csv(content: bytes, rng: Random) -> bytes:
    """One cell, row or column of a table."""
    if rng.random() < 0.2:
        return changed_bytes(content, rng)
    rows = list(csv.reader(io.StringIO(content.decode())))
    at, column = rng.randrange(len(rows)), rng.randrange(len(rows[0]))
    match rng.randrange(7):
        case 0:
            del rows[at]
        case 1:
            rows.insert(rng.randrange(len(rows)), rows[at])
        case 2:
            rows = [row[:column] + row[column + 1 :] for row in rows]
        case 3:
            rows[at] = rows[at][:column]
        case 4:
            value = rng.choice(HOSTILE)
            rows = [rows[0], *([*row[:column], value, *row[column + 1 :]] for row in rows[1:])]
        case _:
            rows[at][column] = rng.choice((*HOSTILE, rows[rng.randrange(len(rows))][column]))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="surrogatepass")


def changed_value(value: Any, rng: Random) -> Any:
    """JSON with one thing in it replaced, taken out or doubled."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        copy = dict(value) if isinstance(value, dict) else list(value)
        if rng.random() < 0.2:
            del copy[key]
        else:
            copy[key] = changed_value(value[key], rng)
        return copy
    return rng.choice(VALUES)


def changed_jsonl(content: bytes, rng: Random) -> bytes:
    if rng.random() < 0.3:
        return changed_bytes(content, rng)
    rows = [json.loads(line) for line in content.splitlines()]
    at = rng.randrange(len(rows))
    rows[at] = rows[rng.randrange(len(rows))] if rng.random() < 0.2 else changed_value(rows[at], rng)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


# ---- files and their readers -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("files")
    return dict(tables(folder / "tables") | store(folder / "store") | binaries(folder / "binaries"))


def tables(folder: Path) -> dict[str, Case]:
    folder.mkdir()
    study = sample_study(folder)
    results, accounting, runtime = study.files.sources[0], study.files.sources[-4], study.files.sources[-3]
    (log := folder / "training_tiny_1k.csv").write_text(
        ",".join(training_log.COLUMNS) + "\n" + "".join(
            f"study,ours,0,{step},{step}.5,wiki,{k},{layer},0.5,0.4,0.45,0.9,0.01,-0.02,0.1\n"
            for step in (0, 3) for k in (1, 21) for layer in ("all", 0, 1)
        )
    )  # fmt: skip
    readers: dict[str, tuple[Path, Callable[[Path], Any]]] = {
        "results": (results, load_results),
        "accounting": (accounting, load_accounting),
        "runtime": (runtime, load_runtime),
        "training log": (log, training_log.shown_rows),
        "comparison": (study.files.comparison, lambda path: load_comparison(path, "paper")),
        "picture": (study.files.picture, load_picture),
        "claims": (study.files.claims[0], lambda path: load_claims(path, "paper")),
    }
    for label in ("ruler_sweep", "exact_accounting", "runtime_1b"):
        readers[f"cells {label}"] = (study.cells(label), lambda path: load_table(path, "paper"))
        readers[f"numbers {label}"] = (study.cells(label), lambda path: list(numbers._cells(path, "paper")))
    return {name: Case(path, read, changed_csv) for name, (path, read) in readers.items()}


def store(folder: Path) -> dict[str, Case]:
    folder.mkdir()
    rows = [
        {"key": f"{method}{i}", "task": "ruler_vt", "index": i, "method": method, "budget_percent": budget,
         "maps": maps, "k": 3, "prompt_tokens": 9, "cut_tokens": 0, "text": "a", "tokens": [1, 2], "finish": "length",
         "phi_sha": maps and "f00", "prompt_sha": sha256_text(f"prompt {i}")}
        for i in range(3) for method, budget, maps in (("full", None, None), ("topk", 3.0, None), ("topk_phi", 3, "1k"))
    ]  # fmt: skip
    (path := folder / "store.jsonl").write_text(jsonl(rows))
    (document := folder / "document.json").write_text(json.dumps(rows))

    def read_store(path: Path) -> None:
        with GenerationStore(path) as rows:
            assert all(isinstance(key, str) for key in rows.rows)

    return {
        "store": Case(path, read_store, changed_jsonl),
        "any JSON": Case(document, read_json, changed_bytes),
        "any JSON lines": Case(path, read_jsonl, changed_bytes),
    }


def binaries(folder: Path) -> dict[str, Case]:
    folder.mkdir()
    torch.manual_seed(0)
    shape = HeadShape(layers=2, query_heads=4, kv_heads=2, head_dim=8)
    phi = folder / "tiny_1k.safetensors"
    recipe = {"backbone": {"study": "mini", "name": "tiny"}, "variants": [{"label": "ours"}], "length": "1k"}
    facts = {"model_id": "org/Tiny", "revision": "r1", "length": 1024, "recipe": recipe}
    PhiMaps(shape, MapSpec(d_emb=8, d_phi=4), facts).save(phi)
    checkpoint = folder / "checkpoint.safetensors"
    write_checkpoint(
        checkpoint, {"step": 5, "log": [{"step": 0}], "spec": "f00"}, {"a": torch.rand(4, 3), "b": torch.ones(2)}
    )
    return {
        "maps": Case(phi, PhiMaps.load, changed_bytes),
        "maps' header": Case(phi, load_counts, changed_bytes),
        "checkpoint": Case(checkpoint, read_checkpoint, changed_bytes),
    }


NAMES = (
    "results", "accounting", "runtime", "training log", "comparison", "picture", "claims", "cells ruler_sweep",
    "cells exact_accounting", "cells runtime_1b", "numbers ruler_sweep", "numbers exact_accounting",
    "numbers runtime_1b", "store", "any JSON", "any JSON lines", "maps", "maps' header", "checkpoint",
)  # fmt: skip


def check(case: Case, rounds: range) -> None:
    whole = case.path.read_bytes()
    try:
        for seed in rounds:
            content = case.changed(whole, Random(f"{case.path.name}/{seed}"))
            case.path.write_bytes(content)
            try:
                case.read(case.path)
            except ValueError as error:
                assert case.path.name in str(error), f"seed {seed}: {str(error)[:500]}"
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
    finally:
        case.path.write_bytes(whole)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_file_is_read_or_refused(cases: dict[str, Case], name: str) -> None:
    check(cases[name], range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_hundreds_of_changed_files(cases: dict[str, Case], name: str) -> None:
    check(cases[name], range(QUICK, QUICK + THOROUGH))


def test_every_reader_is_there(cases: dict[str, Case]) -> None:
    assert set(cases) == set(NAMES)


def test_no_changed_checkpoint_is_read(cases: dict[str, Case]) -> None:
    whole = cases["checkpoint"].path.read_bytes()
    for at in range(8, len(whole), 7):
        changed = bytearray(whole)
        changed[at] ^= 1
        path = cases["checkpoint"].path.with_name("changed.safetensors")
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"changed\.safetensors: damaged (checkpoint|safetensors file)"):
            read_checkpoint(path)


def test_a_file_that_was_not_changed_is_read(cases: dict[str, Case]) -> None:
    for case in cases.values():
        case.read(case.path)
