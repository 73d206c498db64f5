"""The figure of attention errors shows the rows of its files."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from tests.records import recorded

from residual_mass.diagnostics.residual_errors import RESIDUAL_ERRORS
from residual_mass.files import csv_text
from residual_mass.methods import names
from residual_mass.paper.figures.render import run
from residual_mass.paper.figures.residuals import GAP, draw_error_by_k, error_by_k_points, spread
from residual_mass.paper.figures.style import paper_style
from residual_mass.study.specs import FigureSpec

pytestmark = pytest.mark.filterwarnings("error")

SPEC = FigureSpec(label="error_by_k", title="Costs $5 & more_", texts=("wiki", "books"))
EVERY, BUDGETS, LENGTHS = names()[1:], (16, 0.5, 2), ("512", "2k")
METHODS = [name for name in EVERY if name.startswith("topk")]
"""Those that are shown."""


def value(length: str, corpus: str, method: str, budget: float) -> float:
    return 0.01 * (1 + EVERY.index(method)) * len(length) * len(corpus) / budget


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = []
    for length in LENGTHS:
        rows = [
            {"corpus": corpus, "length": length, "method": method, "budget_percent": budget, "packs": 4,
             "error": value(length, corpus, method, budget)}
            for corpus, method, budget in product(("books", "poems", "wiki"), EVERY, BUDGETS)
        ]  # fmt: skip
        paths.append(path := tmp_path / f"residual_errors_smol_{length}.csv")
        path.write_text(csv_text(RESIDUAL_ERRORS, rows))
        recorded(path)
    return paths


def test_a_line_per_method_ends_in_its_name(files: list[Path]) -> None:
    with paper_style():
        figure = draw_error_by_k(SPEC, error_by_k_points(SPEC, files))
        figure.draw_without_rendering()
    assert len(figure.axes) == 4
    for axis, (length, corpus) in zip(figure.axes, product(LENGTHS, ("wiki", "books")), strict=True):
        assert len(axis.lines) == len(axis.texts) == len(METHODS)
        for line, method in zip(axis.lines, METHODS, strict=True):
            expected = [(budget, value(length, corpus, method, budget)) for budget in sorted(BUDGETS)]
            np.testing.assert_allclose(line.get_xydata(), expected)
        assert axis.get_title() == f"{ {'wiki': 'Wikipedia', 'books': 'Books'}[corpus] }, {length}: 4 texts"
        ends = {text.xy[1]: text.get_color() for text in axis.texts}
        colours = {line.get_ydata()[-1]: line.get_color() for line in axis.lines}
        assert ends == colours
        styles = {(line.get_color(), line.get_linestyle()) for line in axis.lines}
        assert len(styles) == len(METHODS)
        heights = sorted(text.xyann[1] for text in axis.texts)
        assert np.diff(heights).min() > GAP - 1e-9


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([], []),
        ([0.2, 0.5], [0.2, 0.5]),
        ([0.2, 0.2, 0.2], [0.2, 0.3, 0.4]),
        ([0.95, 1.0, 1.0], [0.8, 0.9, 1.0]),
        ([-1.0, 0.0, 0.05], [0.0, 0.1, 0.2]),
        ([0.0, 0.5, 0.9, 0.95], [0.0, 0.5, 0.9, 1.0]),
    ],
)
def test_names_are_moved_apart_and_stay_in_order(wanted: list[float], places: list[float]) -> None:
    assert spread(wanted, 0.1, 0, 1) == pytest.approx(places)


def test_a_text_that_is_not_there_is_refused(files: list[Path]) -> None:
    with pytest.raises(ValueError, match=f"^{files[0]}: has no rows of code; run the residual-errors stage with it$"):
        error_by_k_points(FigureSpec(label="error_by_k", title="", texts=("wiki", "code")), files)


def test_the_figure_is_the_same_bytes_twice(files: list[Path], tmp_path: Path) -> None:
    made = []
    for name in ("first", "second"):
        run(SPEC, files, pdf := tmp_path / f"{name}.pdf", png := tmp_path / f"{name}.png")
        made.append((pdf.read_bytes(), png.read_bytes()))
    assert made[0] == made[1] and made[0][0].startswith(b"%PDF")
