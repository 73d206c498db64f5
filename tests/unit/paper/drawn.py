"""Files of every kind of figure, its drawing, and what a drawing shows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import sample_diagnostics as sample
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from sample_results import distance_row, error_row, write_rows
from tests.records import recorded

from residual_mass.benchmarks.columns import FIDELITY
from residual_mass.files import csv_text
from residual_mass.methods import names
from residual_mass.paper.figures import FIGURES
from residual_mass.paper.figures.style import paper_style
from residual_mass.study.figures import kind_of
from residual_mass.study.sections import Resampling
from residual_mass.study.specs import FigureSpec

Points = list[tuple[float, float]]
TITLE = "Costs $5 & more_"
COMPARED = [name for name in names()[1:] if name.startswith(("topk", "scan", "pages"))]
MEASURED = ("topk", "topk_phi", "scan4_moments", "pages")
"""Methods whose next tokens are measured as well."""
BUDGETS = (16, 0.5, 2)
SELECTORS = ("scan4", "scan3_regression_32", "pages")
"""The first method of each selector but the exact one."""


def spec(label: str, **facts: Any) -> FigureSpec:
    return FigureSpec(**{"label": label, "title": TITLE, "budget_percent": 4.0} | facts)


def parquet(path: Path, frame: pd.DataFrame) -> Path:
    frame.to_parquet(path)
    return recorded(path)


def csv(path: Path, rows: list[dict[str, Any]], columns: Sequence[str] = ()) -> Path:
    path.write_text(csv_text(columns or list(rows[0]), rows))
    return recorded(path)


def error(length: str, corpus: str, method: str, budget: float) -> float:
    return 0.01 * (1 + COMPARED.index(method)) * len(length) * len(corpus) / budget


def missed(length: str, corpus: str, method: str, budget: float) -> float:
    """Of methods with the same selector the same."""
    return 0 if method.startswith("topk") else 0.001 * len(method[:5].rstrip("_")) * len(length) * len(corpus) / budget


def share(method: str, budget: float) -> float:
    return 0.01 * budget + 0.001 * len(method) + (0.5 if method.startswith("topk") else 0.1)


def compared_files(folder: Path) -> list[Path]:
    """Residual errors of two lengths, then distances of the next token."""
    errors, distances = [], []
    for length in ("512", "2k"):
        rows = []
        for corpus, method, budget in product(("books", "poems", "wiki"), COMPARED, BUDGETS):
            recall = "" if budget == 0.5 else 1 - missed(length, corpus, method, budget)
            facts = {"corpus": corpus, "length": length, "recall": recall, "step_share": share(method, budget)}
            rows.append(error_row(method, budget, **facts, error=error(length, corpus, method, budget), packs=4))
        errors.append(write_rows(folder, "residual_errors", rows, length))
        rows = []
        for corpus, method, budget in product(("books", "wiki"), MEASURED, (2, 16)):
            value = 0.1 * error(length, corpus, method, budget) ** 2
            row = distance_row(method, budget, text=corpus, length=length, value=value)
            hidden = ({"state": "dense"}, {"metric": "kl_p90"}, {"task": "x"})
            rows += [row, *(row | {"value": 9} | change for change in hidden)]
        distances.append(write_rows(folder, "fidelity", rows, length))
    return [*errors, *distances]


def files_of(kind: str, folder: Path) -> tuple[FigureSpec, list[Path]]:
    """A spec and files of a kind of figure."""
    if kind in ("error_by_k", "selection_recall", "fidelity_by_bytes"):
        files = compared_files(folder)
        return spec(kind, texts=("wiki", "books")), files if kind == "fidelity_by_bytes" else files[:2]
    if kind == "fidelity":
        files = [csv(folder / f"{length}.csv", sample.distances(length), FIDELITY) for length in ("512", "2k")]
        return spec(kind, maps=("2k",), texts=("ruler", "wiki")), files
    if kind == "training_curves":
        logs = {"512": sample.log_rows((0, 0, 1)), "1k": sample.log_rows((1, 21, 62), 2)}
        return spec(kind, maps=tuple(logs)), [csv(folder / f"{length}.csv", rows) for length, rows in logs.items()]
    if kind == "fidelity_tokens":
        facts = {"maps": ("2k",), "texts": ("wiki",), "score": Resampling(bootstrap_resamples=200, seed=3)}
        return spec(kind, **facts), [parquet(folder / "smol_2k.parquet", sample.tokens())]
    frames = {"heads": sample.heads(), "mass": sample.mass(), "kernels": sample.kernels()}
    read = {"mass_curves": ["mass", "heads"], "kernel_sanity": ["kernels", "heads"]}
    read["ablation_kernel_fidelity"] = ["kernels"]
    files = [parquet(folder / f"{name}.parquet", frames[name]) for name in read.get(kind, ["heads"])]
    if kind in ("logz_calibration", "fullsub_nosub_delta"):
        places = product(("wiki", "cwe"), ("1k", "2k"))
        shown = [sample.heads(packs=n, corpus=corpus, length=length) for n, (corpus, length) in enumerate(places, 2)]
        files = [parquet(folder / f"heads_{n}.parquet", frame) for n, frame in enumerate(shown)]
    return spec(kind, maps=sample.VARIANTS), files


def draw(show: FigureSpec, files: Sequence[Path]) -> Figure:
    with paper_style():
        return FIGURES[kind_of(show.label)](show, files)


def drawn(kind: str, folder: Path) -> Figure:
    return draw(*files_of(kind, folder))


def lines(axis: Axes) -> list[np.ndarray]:
    """What lines of more than one point show."""
    return [np.asarray(line.get_xydata(), float) for line in axis.lines if len(line.get_xydata()) > 1]


def assert_drawn(axis: Axes, curve: Any) -> None:
    """A line has these points."""
    curve = np.asarray(curve, float)
    assert any(line.shape == curve.shape and np.allclose(line, curve, rtol=1e-6) for line in lines(axis)), curve


def marks(axis: Axes) -> Points:
    """Points of all scatters."""
    clouds = (each for each in axis.collections if isinstance(each, PathCollection))
    return sorted((float(x), float(y)) for cloud in clouds for x, y in cloud.get_offsets())


def assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(sorted(found), sorted(expected), rtol=1e-6, atol=1e-9)
