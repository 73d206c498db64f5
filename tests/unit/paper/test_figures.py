"""Figures by their label; those of the training show what the log holds, in reproducible bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from tests.records import recorded

from residual_mass.files import csv_text
from residual_mass.paper.figures import FIGURES
from residual_mass.paper.figures.render import run
from residual_mass.paper.figures.style import LOOKS, round_ticks
from residual_mass.paper.figures.training import (
    draw_training_curves,
    training_curves_points,
)
from residual_mass.study.sections import figures as configured
from residual_mass.study.sections.figures import kind_of
from residual_mass.study.specs import FigureSpec


def spec(label: str, *maps: str, title: str = "a title") -> FigureSpec:
    return FigureSpec(label=label, title=title, maps=maps)


TRAINING = spec("training_curves", "512", "1k")


def test_every_kind_of_figure_is_drawn_and_no_other(tmp_path: Path) -> None:
    assert set(FIGURES) == set(configured.FIGURES)
    assert kind_of("fixedk_breakdown_1b") == "fixedk_breakdown"
    for label in ("nothing", "", "entropy", "entropy_gains", "1b_entropy_gain", "entropy_gain_1b"):
        with pytest.raises(ValueError, match=f"^{label} is not one of fidelity, .*training_curves"):
            run(spec(label), [tmp_path], tmp_path / "f.pdf", tmp_path / "f.png")
    assert not list(tmp_path.iterdir())


Row = dict[str, Any]


def log_rows(recipe: str = "study", seed: int = 0, ks: Sequence[int] = (1, 21), scale: float = 1.0) -> list[Row]:
    """A log of three measurements, of which figures show the rows of all layers on wiki."""
    rows = []
    for number, (step, corpus, k, layer) in enumerate(product((0, 20, 30), ("wiki", "books"), ks, ("all", 0, 1))):
        shown = corpus == "wiki" and layer == "all"
        e_sub = scale * (2 - step / 20) / (1 + k) if shown else 100.0
        rows.append({
            "recipe": recipe, "variant": recipe, "seed": seed, "step": step, "seconds": f"{step * (1 + seed):.1f}",
            "corpus": corpus, "k": k, "layer": layer, "e_topk": 1 / (1 + k), "e_sub": e_sub, "e_nosub": 1.1 * e_sub,
            "heads_below_topk": 0.5, "kl": 1 + (60 - step) / 60 if shown else number, "log_z_error": "nan",
        })  # fmt: skip
    return rows


def write_log(path: Path, *logs: list[Row]) -> Path:
    rows = [row for log in logs for row in log]
    path.write_text(csv_text(list(rows[0]), rows))
    return recorded(path)


def lines(axis: Axes) -> dict[str, list[tuple[float, float]]]:
    """Points of a panel's lines by colour and style; a level has two."""
    return {
        f"{line.get_color()} {line.get_linestyle()} {line.get_linewidth()}": [
            (float(x), float(y)) for x, y in line.get_xydata()
        ]
        for line in axis.lines
    }


@pytest.fixture
def training(tmp_path: Path) -> list[Path]:
    """Logs of two lengths; at the shorter one two budgets have the same K."""
    short = write_log(tmp_path / "training_smol_512.csv", log_rows(ks=(0, 0, 1)))
    return [short, write_log(tmp_path / "training_smol_1k.csv", log_rows(ks=(1, 21, 62), scale=2))]


def test_training_curves_show_the_errors_of_every_length(training: list[Path]) -> None:
    points = training_curves_points(TRAINING, training)
    assert len(points) == 3 * 2 + 3 * 3 and set(points["corpus"]) == {"wiki"}
    figure = draw_training_curves(TRAINING, points)
    assert [axis.get_title() for axis in figure.axes[:3]] == ["$K$ = 1", "$K$ = 0, 21", "$K$ = 1, 62"]
    for axis, shown in zip(figure.axes, [{"1k": 1}, {"512": 0, "1k": 21}, {"512": 1, "1k": 62}], strict=False):
        seen = lines(axis)
        assert len(seen) == 3 * len(shown)
        for length, k in shown.items():
            look = LOOKS[["512", "1k"].index(length)]
            curve = [(step, (2 - step / 20) / (1 + k) * (1 + (length == "1k"))) for step in (0, 20, 30)]
            np.testing.assert_allclose(seen[f"{look.colour} - 1.2"], curve)
            np.testing.assert_allclose(seen[f"{look.colour} - 0.5"], [(x, 1.1 * y) for x, y in curve])
            np.testing.assert_allclose([y for _, y in seen[f"{look.colour} -- 0.8"]], 1 / (1 + k))
    divergence = figure.axes[3]
    for curve in lines(divergence).values():
        np.testing.assert_allclose(curve, [(step, 1 + (60 - step) / 60) for step in (0, 20, 30)])
    assert len(divergence.lines) == 2 and len(figure.axes) == 4


def test_training_figures_are_the_same_bytes_twice(training: list[Path], tmp_path: Path) -> None:
    made = []
    for name in ("first", "second"):
        hostile = replace(TRAINING, title="Costs $5 & more_")
        run(hostile, training, pdf := tmp_path / f"{name}.pdf", png := tmp_path / f"{name}.png")
        made.append((pdf.read_bytes(), png.read_bytes()))
    assert made[0] == made[1] and made[0][0].startswith(b"%PDF") and b"CreationDate" not in made[0][0]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.5, 5, [0.5, 1, 2, 5]), (0.82, 1.33, [0.9, 1, 1.1, 1.2, 1.3]), (10, 20000, [10, 100, 1000, 10000])],
)
def test_ticks_are_round_numbers_within_the_range(low: float, high: float, ticks: list[float]) -> None:
    np.testing.assert_allclose(round_ticks(low, high), ticks)
