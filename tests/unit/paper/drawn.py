"""Files of every kind of figure, its points and its drawing, and what a drawing shows."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
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
from residual_mass.study.sections import Resampling
from residual_mass.study.specs import FigureSpec

pytestmark = pytest.mark.filterwarnings("error")

Points = list[tuple[float, float]]
Head = tuple[int, int]
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
    captured = {"heads": sample.heads, "mass": sample.mass, "kernels": sample.kernels}
    if kind in ("error_by_k", "selection_recall", "fidelity_by_bytes"):
        files = compared_files(folder)
        return spec(kind, texts=("wiki", "books")), files if kind == "fidelity_by_bytes" else files[:2]
    if kind == "fidelity":
        paths = [folder / f"fidelity_smol_{length}.csv" for length in ("512", "2k")]
        for path, length in zip(paths, ("512", "2k"), strict=True):
            path.write_text(csv_text(FIDELITY, sample.distances(length)))
        return spec(kind, maps=("2k",), texts=("ruler", "wiki")), [recorded(path) for path in paths]
    if kind == "fidelity_tokens":
        resampling = Resampling(bootstrap_resamples=200, seed=3)
        return spec(kind, maps=("2k",), texts=("wiki",), score=resampling), [
            parquet(folder / "smol_2k.parquet", sample.tokens())
        ]
    if kind == "training_curves":
        logs = {"512": sample.log_rows((0, 0, 1)), "1k": sample.log_rows((1, 21, 62), 2)}
        for length, rows in logs.items():
            (folder / f"log_{length}.csv").write_text(csv_text(list(rows[0]), rows))
        return spec(kind, maps=("512", "1k")), [recorded(folder / f"log_{length}.csv") for length in logs]
    if kind in ("logz_calibration", "fullsub_nosub_delta"):
        places = list(product(("wiki", "cwe"), ("1k", "2k")))
        frames = (sample.heads(packs=n + 2, corpus=corpus, length=length) for n, (corpus, length) in enumerate(places))
        return spec(kind), [parquet(folder / f"heads_{n}.parquet", frame) for n, frame in enumerate(frames)]
    read = {"mass_curves": ["mass", "heads"], "kernel_sanity": ["kernels", "heads"]}
    read["ablation_kernel_fidelity"] = ["kernels"]
    files = [parquet(folder / f"{name}.parquet", captured[name]()) for name in read.get(kind, ["heads"])]
    return spec(kind, maps=sample.VARIANTS), files


def points_of(kind: str, folder: Path) -> tuple[pd.DataFrame, Figure]:
    show, files = files_of(kind, folder)
    points = FIGURES[kind].points(show, files)
    with paper_style():
        return points, FIGURES[kind].draw(show, points)


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
