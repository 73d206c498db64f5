"""Damaged files of every format: a stage refuses them by their recorded sha256, and readers without a record refuse
them or return valid rows. Messages are one line with the file and the remedy.

Damage depends only on a seed, so that failures can be repeated.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import pytest
import torch
from tests.records import recorded as with_record

from residual_mass.benchmarks.store import GENERATED_FIELDS, RowStore
from residual_mass.files import (
    jsonl,
    read_csv,
    read_json,
    read_jsonl,
    read_parquet,
    write_json,
    write_parquet,
    write_text,
)
from residual_mass.model.phi_maps import HeadShape, PhiMaps, write_safetensors
from residual_mass.provenance import recorded
from residual_mass.spec.settings import MapSpec
from residual_mass.training.trainer import read_checkpoint, write_checkpoint

ROUNDS = 40
ROWS = [
    {"key": f"{method}{i}", "task": "ruler_vt", "index": i, "method": method, "budget_percent": budget, "maps": maps,
     "k": 3, "cut_tokens": 0, "text": "a", "tokens": [1, 2], "phi_sha": maps and "f00", "prompt_sha": f"{i}f"}
    for i in range(3) for method, budget, maps in (("full", None, None), ("topk", 3.0, None), ("topk_phi", 3, "1k"))
]  # fmt: skip


def write_maps(path: Path) -> None:
    torch.manual_seed(0)
    facts = {"model_id": "org/Tiny", "revision": "r1", "length": 1024}
    PhiMaps(HeadShape(layers=2, query_heads=4, kv_heads=2, head_dim=8), MapSpec(d_emb=8, d_phi=4), facts).save(path)


def read_store(path: Path) -> None:
    with RowStore(path, GENERATED_FIELDS) as rows:
        assert all(isinstance(key, str) for key in rows.rows)


@dataclass(frozen=True)
class Format:
    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    starts_over: bool = False
    """Whether a file that is missing or empty is a new one."""


TENSORS = {"a": torch.linspace(0, 1, 12).view(4, 3), "b": torch.ones(2)}
FORMATS = {
    "rows.csv": Format(
        lambda path: write_text(path, "task,value\nvt,0.5\nall,0.25\n"), lambda path: read_csv(path, ["task"], "score")
    ),
    "facts.json": Format(lambda path: write_json(path, {"rows": ROWS}), read_json),
    "rows.parquet": Format(
        lambda path: write_parquet(path, pd.DataFrame(ROWS)), lambda path: read_parquet(path, ["task", "k"], "force")
    ),
    "maps.safetensors": Format(write_maps, PhiMaps.load),
    "checkpoint.safetensors": Format(
        lambda path: write_checkpoint(path, {"step": 5, "log": [{"step": 0}]}, TENSORS), read_checkpoint
    ),
    "rows.jsonl": Format(lambda path: write_text(path, jsonl(ROWS)), read_jsonl, starts_over=True),
    "store.jsonl": Format(lambda path: write_text(path, jsonl(ROWS)), read_store, starts_over=True),
}  # fmt: skip


# ---- damages ---------------------------------------------------------------------------------------------------------


def cut(content: bytes, rng: Random) -> bytes:
    return content[: rng.randrange(1, len(content))]


def flipped(content: bytes, rng: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 4, 64))):
        changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
    return bytes(changed)


@pytest.fixture(params=FORMATS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Format]:
    path, kind = tmp_path / request.param, FORMATS[request.param]
    kind.write(path)
    kind.read(path)
    return path, kind


def one_line(path: Path, error: pytest.ExceptionInfo[ValueError]) -> None:
    said = str(error.value)
    assert path.name in said and "; " in said and "\n" not in said, said


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_not_one_changed_bit_of_an_input_goes_unnoticed(tmp_path: Path) -> None:
    write_maps(path := tmp_path / "maps.safetensors")
    assert recorded(with_record(path))
    whole, rng = path.read_bytes(), Random(path.name)
    lowest_bit = bytes([whole[0] ^ 1]) + whole[1:]
    for content in (b"", b"task,value\n", lowest_bit, *(harm(whole, rng) for harm in (cut, flipped) for _ in range(9))):
        path.write_bytes(content)
        with pytest.raises(ValueError) as error:
            recorded(path)
        one_line(path, error)


@pytest.mark.parametrize("harm", ["missing", "empty", "a folder", "of another kind"])
def test_what_is_no_such_file_is_refused_without_a_record(harm: str, file: tuple[Path, Format]) -> None:
    path, kind = file
    path.unlink()
    if harm == "a folder":
        path.mkdir()
    elif harm != "missing":
        path.write_bytes(b"" if harm == "empty" else b"\x89PNG\r\n\x1a\n\x00" + bytes(range(256)))
    if kind.starts_over and (harm == "empty" or (harm == "missing" and kind.read is read_store)):
        kind.read(path)
        return
    with pytest.raises((ValueError, OSError)) as error:
        kind.read(path)
    one_line(path, error)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def test_a_changed_file_without_a_record_is_read_or_refused(file: tuple[Path, Format]) -> None:
    path, kind = file
    whole = path.read_bytes()
    for seed in range(ROUNDS):
        rng = Random(f"{path.name}/{seed}")
        path.write_bytes(rng.choice((cut, flipped))(whole, rng))
        try:
            kind.read(path)
        except ValueError as error:
            assert path.name in str(error), f"seed {seed}: {str(error)[:500]}"
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def test_no_changed_checkpoint_is_read(tmp_path: Path) -> None:
    FORMATS["checkpoint.safetensors"].write(path := tmp_path / "checkpoint.safetensors")
    whole = path.read_bytes()
    for at in range(8, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"checkpoint\.safetensors: damaged (checkpoint|safetensors file)"):
            read_checkpoint(path)


@pytest.mark.parametrize(
    "header",
    [
        "[1]", '{"shape": 1, "map": {}, "training": {}}', "{" * 9000,
        '{"shape": {"layers": 1000000000, "query_heads": 1, "kv_heads": 1, "head_dim": 1}, "map": {}, "training": {}}',
        '{"shape": {"layers": 1, "query_heads": 1, "kv_heads": 1, "head_dim": 9}, "map": [], "training": 1}',
    ],
)  # fmt: skip
def test_a_header_that_describes_no_maps_is_refused(header: str, tmp_path: Path) -> None:
    write_safetensors(path := tmp_path / "phi.safetensors", {"a": torch.zeros(1)}, {"residual_mass_phi": header})
    with pytest.raises(ValueError) as caught:
        PhiMaps.load(path)
    assert str(caught.value).startswith(f"{path}: ") and str(caught.value).endswith("; delete the file and train again")
