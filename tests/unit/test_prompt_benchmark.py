"""The benchmark of prompts that are read in part, on a tiny model."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from tests.conftest import byte_tokenizer, tiny_llama
from tests.needs import KERNELS, needs

from residual_mass.kernels import load

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@needs(KERNELS)
def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama(width=64).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("A prompt of a tiny model. " * 60)
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    benchmark = importlib.import_module("prompt")
    options = ["--lengths", "1300", "--left", "0.5", "--parts", "256", "0", "--most", "9"]
    monkeypatch.setattr(sys, "argv", ["prompt.py", str(tmp_path), str(text), *options])
    if load().target == "portable":
        with pytest.raises(SystemExit, match="no kernels read prompts in float32 here"):
            benchmark.main()
        return
    benchmark.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    distances = {name.strip(): float(numbers[1]) for name, *numbers in rows}
    assert list(distances) == ["all", *(f"50% left, blocks of 128, {rest}" for rest in ("parts of 256", "dropped"))]
    full, in_part, dropped = distances.values()
    assert full == 0 < min(in_part, dropped)
