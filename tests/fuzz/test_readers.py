"""Files without a record, changed at random: read as valid rows, or refused in one line that names the file.

Every round is a seed, so that a failure repeats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from damage import CUT, FLIPPED, Damage

from residual_mass.benchmarks.store import GENERATED, RowStore
from residual_mass.core.settings import MapSpec
from residual_mass.files import jsonl, read_json, read_jsonl, sha256_text
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.training.trainer import read_checkpoint, write_checkpoint

QUICK, THOROUGH = 8, 200
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
    return dict(store(folder / "store") | binaries(folder / "binaries"))


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
        with RowStore(path, GENERATED) as rows:
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
        "checkpoint": Case(checkpoint, read_checkpoint, changed_bytes),
    }


NAMES = (
    "store", "any JSON", "any JSON lines", "maps", "checkpoint",
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
