"""tools/same_results.py on two small finished studies: equal ones, and one change of each kind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from safetensors.numpy import load_file, save_file

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.append(str(TOOLS))

from preloaded import carry_points  # noqa: E402
from same_results import compare  # noqa: E402

RESULTS = "results/ruler_tiny_1k.csv"
FRAME = "results/forced/tiny_1k.parquet"
STORE = "results/generations/_store/ruler_tiny_1k_main/all.jsonl"
MAPS = "results/phi/tiny_1k.safetensors"
PAGE = "results/report.html"
TABULAR = "paper_tables/mini/ruler_sweep.tex"
CELLS = "paper_tables/mini/ruler_sweep.csv"
LATENCIES = "paper_tables/mini/runtime_tiny.csv"
NUMBERS = "paper_tables/mini/numbers.tex"
DATA = "paper_tables/mini/ruler_sweep.json"
FIGURE = "paper_tables/mini/figures/mass.png"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Figure, "savefig", Figure.savefig)  # carry_points replaces it
    carry_points()
    folder = tmp_path / "base"
    for path in (RESULTS, FRAME, STORE, MAPS, TABULAR, FIGURE):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_text("task,method,value,seconds\nall,topk,0.500000,1.2\nall,topk_phi,0.625000,1.4\n")
    (folder / f"{RESULTS}.meta.json").write_text('{"wall_seconds": 1}')
    pd.DataFrame({"method": ["topk", "topk_phi"], "kl": [0.25, np.nan]}).to_parquet(folder / FRAME)
    rows = [{"index": n, "tokens": [n, 7], "finish": "length"} for n in range(3)]
    (folder / STORE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({"0.weight": np.arange(6, dtype=np.float32)}, folder / MAPS)
    (folder / PAGE).write_text("<style>p { color: red }</style><h1>Results</h1><p>Made in 3.2 s</p>")
    (folder / TABULAR).write_text("% A\n\\begin{tabular}{lr}\nTopK & 0.500 \\\\\n\\end{tabular}\nMade today.\n")
    (folder / CELLS).write_text("table,method,text,bold\nruler_sweep,topk,0.500,0\nruler_sweep,topk_phi,0.625,1\n")
    (folder / LATENCIES).write_text("table,method,text,value\nruntime_tiny,topk,1.5,1.52\n")
    (folder / NUMBERS).write_text("\\rmset{value}{ruler/topk}{0.500}%\n\\rmset{value}{runtime_tiny/topk}{1.52}%\n")
    (folder / DATA).write_text(json.dumps({"rows": [{"text": "0.500", "value": 0.5}]}))
    draw(folder / FIGURE)
    return folder


def draw(path: Path, point: float = 2.0, band: float = 0.5, bar: float = 3.0, spot: float = 1.0, colour: str = "b", *,
         title: str = "Mass") -> None:  # fmt: skip
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 2, 3], [1.0, point, 3.0], color=colour, label="TopK")
    axes.fill_between([1, 2], [0, 0], [1, band])
    axes.scatter([1, 2], [spot, 2])
    axes.bar([1, 2], [1, bar])
    axes.imshow([[0.0, spot]])
    axes.set_title(title)
    figure.savefig(path, format="png", metadata={"Software": None})


@pytest.fixture
def head(base: Path) -> Path:
    return shutil.copytree(base, base.with_name("head"))


def edit(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / path).read_text()
        assert text.count(old) == 1
        (folder / path).write_text(text.replace(old, new))

    return change


def change_frame(folder: Path) -> None:
    pd.read_parquet(folder / FRAME).assign(kl=[0.250001, np.nan]).to_parquet(folder / FRAME)


def change_type(folder: Path) -> None:
    pd.read_parquet(folder / FRAME).astype({"kl": "float32"}).to_parquet(folder / FRAME)


def change_map(folder: Path) -> None:
    weight = load_file(folder / MAPS)["0.weight"]
    save_file({"0.weight": np.nextafter(weight, 9, dtype=np.float32)}, folder / MAPS)


CHANGES = [
    (RESULTS, edit(RESULTS, "0.625000", "0.625001"), "row 2, value: 0.625000 | 0.625001 (1 of 7"),
    (RESULTS, edit(RESULTS, "all,topk_phi,0.625000,1.4\n", ""), "row 2, task: all | nothing"),
    (FRAME, change_frame, "row 1, kl: 0.25 | 0.250001"),
    (FRAME, change_type, "types: "),
    (STORE, edit(STORE, '"tokens": [1, 7]', '"tokens": [1, 8]'), "row 2, tokens: [1, 7] | [1, 8]"),
    (MAPS, change_map, "0.weight[6], element 0: 0.0 | "),
    (PAGE, edit(PAGE, "Results", "Result"), "text 1: Results | Result"),
    (TABULAR, edit(TABULAR, "0.500", "0.501"), r"line 2: TopK & 0.500 \\ | TopK & 0.501 \\"),
    (CELLS, edit(CELLS, "0.625,1", "0.625,0"), "row 2, bold: 1 | 0"),
    (LATENCIES, edit(LATENCIES, "runtime_tiny,topk,", "runtime_tiny,topk_phi,"), "row 1, method: topk | topk_phi"),
    (NUMBERS, edit(NUMBERS, "0.500", "0.501"), "line 1: "),
    (DATA, edit(DATA, ": 0.5}", ": 0.6}"), "/rows/0/value: 0.5 | 0.6"),
    (FIGURE, lambda folder: draw(folder / FIGURE, point=2.1), "/axes 0 Line2D 'TopK' 0/xy/1/1: 2.0 | 2.1"),
    (FIGURE, lambda folder: draw(folder / FIGURE, band=0.6), "0.5 | 0.6"),
    (FIGURE, lambda folder: draw(folder / FIGURE, bar=4.0), "/axes 0 Rectangle"),
    (FIGURE, lambda folder: draw(folder / FIGURE, spot=1.5), "1.0 | 1.5"),
    (FIGURE, lambda folder: draw(folder / FIGURE, title="Mass of 1k"), "Mass | Mass of 1k"),
]


@pytest.mark.parametrize(("path", "change", "says"), CHANGES)
def test_a_planted_change_is_found(
    base: Path, head: Path, path: str, change: Callable[[Path], None], says: str
) -> None:
    assert not any(compare(base, head)) and len(compare(base, head)) == 11
    change(head)
    (found,) = filter(None, compare(base, head))
    assert found.startswith(f"{path}: ") and says in found


@pytest.mark.parametrize(
    "change",
    [
        edit(RESULTS, "0.625000,1.4", "0.625000,1.5"),
        edit(f"{RESULTS}.meta.json", "1", "2"),
        edit(PAGE, "3.2 s", "41 s"),
        edit(TABULAR, "% A", "% B"),
        edit(LATENCIES, "1.5,1.52", "1.6,1.61"),
        edit(NUMBERS, "1.52", "1.61"),
        lambda folder: draw(folder / FIGURE, point=2.0 + 1e-12, colour="r"),
    ],
)
def test_times_records_and_looks_are_not_compared(base: Path, head: Path, change: Callable[[Path], None]) -> None:
    change(head)
    assert not any(compare(base, head))


def test_numbers_may_be_close(base: Path, head: Path) -> None:
    edit(RESULTS, "0.625000", "0.625001")(head)
    assert any(compare(base, head, rtol=1e-6)) and not any(compare(base, head, rtol=1e-5))


def test_a_file_of_one_side_is_named(base: Path, head: Path) -> None:
    (head / DATA).unlink()
    (head / CELLS).rename(head / "paper_tables/mini/new.csv")
    assert [line for line in compare(base, head) if line] == [
        "paper_tables/mini/new.csv: only in HEAD", f"{CELLS}: only in BASE", f"{DATA}: only in BASE",
    ]  # fmt: skip


def test_the_command_ends_with_what_it_found(base: Path, head: Path) -> None:
    def run() -> tuple[int, str]:
        command = [sys.executable, TOOLS / "same_results.py", base, head]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.strip()

    assert run() == (0, "the same: 11 files")
    edit(CELLS, "0.625", "0.626")(head)
    assert run() == (1, f"{CELLS}: row 2, text: 0.625 | 0.626 (1 of 9 values differ)")
