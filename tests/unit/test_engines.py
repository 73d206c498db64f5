"""The benchmark of engines: what a side answers to commands, how runs are merged, and the table."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import byte_tokenizer, tiny_llama
from tests.needs import KERNELS, needs

ROOT = Path(__file__).parents[2]
TEXT = torch.randint(2, 258, (300,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    return importlib.import_module("engines")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(width=64).save_pretrained(folder)
    return folder


@contextmanager
def running(engines: types.ModuleType, model: Path, **options: Any) -> Iterator[Any]:
    """Yields a side whose process has loaded the tiny model."""
    given = {"threads": 1, "first": TEXT[:64], "model": str(model), **options}
    command = [sys.executable, str(ROOT / "benchmarks" / "engine_sides.py"), json.dumps(given)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    side = engines.Side(options["engine"], process, {}, limit=120)
    try:
        side.found["about"] = side.answer()
        yield side
    finally:
        side.end()


# ---- a side ----------------------------------------------------------------------------------------------------------

SIDES = [
    {"engine": "transformers", "dtype": "float32"},
    pytest.param({"engine": "residual_mass", "method": "full", "budget": None, "compile": False}, marks=needs(KERNELS)),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", SIDES)
def test_a_side_writes_what_the_model_writes(engines: types.ModuleType, model: Path, options: dict[str, Any]) -> None:
    """In parts, over several texts, and after a second turn."""
    plain = tiny_llama(width=64)
    plain.generation_config.eos_token_id = None

    def greedy(ids: list[int], count: int) -> list[int]:
        text = torch.tensor([ids])
        written = plain.generate(text, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return written[0, len(ids) :].tolist()

    with running(engines, model, **options) as side:
        for ids in (TEXT[:100], TEXT[50:200]):
            wanted = greedy(ids, 9)
            first = side.ask(do="read", ids=ids, count=1, most=9)
            later = side.ask(do="step", count=4)
            last = side.ask(do="step", count=4)
            assert first["tokens"] + later["tokens"] + last["tokens"] == wanted
            assert [len(answer["seconds"]) for answer in (first, later, last)] == [1, 4, 4]
            assert [top[0][0] for top in first["top"] + later["top"]] == wanted[:5]
        longer = [*ids, *wanted, *TEXT[200:240]]
        turn = side.ask(do="turn", ids=longer, count=2, most=2)
        assert turn["tokens"] == greedy(longer, 2)
        logits = plain(torch.tensor([TEXT[:64]])).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(TEXT[1:64])).item()
        assert side.ask(do="nll")["nll"] == pytest.approx(expected, rel=1e-4)
        assert 0 < side.found["about"]["libraries"] < turn["memory"]["resident"] <= turn["memory"]["peak"]


@pytest.mark.slow
@needs(KERNELS)
def test_a_saved_state_serves_the_second_turn(engines: types.ModuleType, model: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "state.safetensors")
    options = {"engine": "residual_mass", "method": "scan4_regression_64", "budget": 0.1, "compile": False}
    with running(engines, model, **options) as side:
        answer = side.ask(do="read", ids=TEXT[:200], count=9, most=9)["tokens"]
        assert side.ask(do="save", file=file)["seconds"] > 0
        longer = [*TEXT[:200], *answer, *TEXT[200:240]]
        kept = side.ask(do="turn", ids=longer, count=4, most=4)["tokens"]
        assert side.ask(do="turn", ids=longer, count=4, most=4, file=file)["tokens"] == kept


@pytest.mark.slow
def test_a_side_that_cannot_run_says_why(engines: types.ModuleType, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="nowhere"),
        running(engines, tmp_path / "nowhere", engine="transformers"),
    ):
        pass


# ---- what is stored --------------------------------------------------------------------------------------------------


def entry(side: str, length: int = 1024, version: str = "1", **more: Any) -> dict[str, Any]:
    """What is stored of a side: two rounds that read the prompt anew."""
    round_ = {"cpu": 1.0, "others": 0.5, "load": 2.0}
    steps = [{"seconds": seconds, "fresh": True, **round_} for seconds in ([0.5, 0.02, 0.04], [0.4, 0.1, 0.1])]
    return {
        "side": side, "engine": side.partition("-")[0], "threads": 1, "length": length, "when": "2026-01-01",
        "about": {"version": version, "libraries": 100.0, "load_seconds": 2.5, "first_seconds": 40.0},
        "commit": "abc", "nll": 3.25,
        "memory": {"resident": 400.0, "peak": 500.0},
        "reads": [{"seconds": [4.0], **round_}, {"seconds": [3.0], **round_}],
        "steps": steps, "turns": [], "tokens": [1, 2, 3],
        "top": [[[1, 5.0], [7, 4.5]], [[2, 5.0], [8, 4.75]], [[3, 5.0], [9, 4.0]]],
        **more,
    }  # fmt: skip


def test_rounds_of_one_version_are_added_and_others_replaced(engines: types.ModuleType) -> None:
    stored = [entry("openvino-f16")]
    engines.merge(stored, entry("openvino-f16"), "steps")
    engines.merge(stored, entry("openvino-f16", length=4096), "steps")
    assert [(len(each["reads"]), each["length"]) for each in stored] == [(4, 1024), (2, 4096)]
    engines.merge(stored, entry("openvino-f16", version="2"), "steps")
    assert [(len(each["reads"]), each["about"]["version"]) for each in stored] == [(2, "1"), (2, "2")]
    turn = entry("openvino-f16", version="2", reads=[], steps=[], turns=[{"kept": 1.0}])
    del turn["tokens"], turn["top"], turn["memory"]
    engines.merge(stored, turn, "turns")
    assert len(stored) == 2 and len(stored[-1]["steps"]) == 2 and stored[-1]["tokens"] == [1, 2, 3]


def test_what_is_found_is_written_after_every_turn(engines: types.ModuleType, tmp_path: Path) -> None:
    """Together with what was there, which a later turn does not find twice."""
    out, stored = tmp_path / "engines.json", {"machine": {}, "sides": [entry("openvino-u8")]}
    side = engines.Side("openvino-u8", None, entry("openvino-u8"), 1.0)
    for _ in range(2):
        engines.store(out, stored, [side], "steps")
        (found,) = json.loads(out.read_text())["sides"]
        assert len(found["reads"]) == 4


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_of_engines(
    engines: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OpenVINO writes another second token; a second turn alone has no steps, and 32,768 tokens nothing to compare."""
    slow = [{"seconds": [0.5, 0.04, 0.08], "fresh": True, "load": 2.0, "others": 0.5}]
    turn = {"first_token": 3.0, "kept": 1.5, "save": 0.25, "loaded": 1.75, "load": 1.0, "others": 0.0}
    sides = [
        entry("openvino-u8", steps=slow, tokens=[1, 8, 8]),
        entry("ours-scan2-int4", turns=[turn]),
        entry("openvino-u8", length=32768, steps=slow),
        entry("ours-cache8-int4", length=8000, reads=[], steps=[], turns=[turn]),
        entry("transformers-float32"),
    ]
    out = tmp_path / "engines.json"
    out.write_text(json.dumps({"sides": sides, "machine": engines.machine()}))
    monkeypatch.setattr(sys, "argv", ["engines.py", "--markdown", "--out", str(out)])
    engines.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head = rows[0]
    found = [dict(zip(head, row, strict=True)) for row in rows[2:]]
    places = [(row["tokens"], row["side"]) for row in found]
    names = ("ours-scan2-int4", "transformers-float32", "openvino-u8")
    assert places == [*(("1,024", name) for name in names), ("8,000", "ours-cache8-int4"), ("32,768", "openvino-u8")]
    ours, exact, other, turns, long = found
    assert (ours["first token, s"], ours["step (fastest), ms"], ours["MiB (most)"]) == ("3", "70.0 (20.0)", "300 (500)")
    assert ours["100 tokens, s"] == "6.34"  # 3 + 0.4 + 98 * 0.03
    assert (ours["second turn, s"], ours["to save, s"], ours["from a file, s"]) == ("1.50", "0.25", "1.75")
    assert ours["equal tokens"] == exact["equal tokens"] == "all 3" and other["equal tokens"] == "1, 0.25"
    assert (other["step (fastest), ms"], other["second turn, s"], long["equal tokens"]) == ("60.0 (40.0)", "", "")
    assert (turns["step (fastest), ms"], turns["second turn, s"], turns["to load, s"]) == ("", "1.50", "2.5")


# ---- servers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(engines: types.ModuleType) -> types.ModuleType:
    return importlib.import_module("server")


def test_the_table_of_servers_has_the_least_of_the_runs(server: types.ModuleType) -> None:
    found = {"ours": [[(9.0, 5.0), (2.0, 0.5)], [(8.0, 6.0), (1.0, 0.75)]], "other": [[(3.0, 3.0), (0.5, 0.25)]]}
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in server.table(found).splitlines()]
    assert rows[0] == ["side", "question 1", "question 2"]
    assert rows[2:] == [["ours", "8.00 (5.00)", "1.00 (0.50)"], ["other", "3.00 (3.00)", "0.50 (0.25)"]]


@pytest.mark.slow
@needs(KERNELS)
def test_a_server_is_asked_and_ended(server: types.ModuleType, model: Path, tmp_path: Path) -> None:
    """A further question about a text takes less of the CPU, and a server that does not start is told."""
    byte_tokenizer().save_pretrained(model)
    options = argparse.Namespace(threads=1, limit=120)
    words = [sys.executable, "-m", "residual_mass", "serve"]
    text = (TEXT * 6)[:1700]
    with contextlib.ExitStack() as stack:
        ask = server.served([*words, str(model)], options, stack)
        ask(TEXT)
        (first, first_cpu), (_, next_cpu) = ask([*text, 5]), ask([*text, 6])
        assert 0 < first and next_cpu < first_cpu
        stack.close()
        with pytest.raises(OSError):
            ask(TEXT)
        with pytest.raises(SystemExit, match="no such folder"):
            server.served([*words, str(tmp_path / "nothing")], options, stack)
