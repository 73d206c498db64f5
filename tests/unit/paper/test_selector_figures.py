"""Figures of selectors and of bytes show the rows of their files."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from sample_residuals import distance_row, error_row, write_rows

from residual_mass.methods import METHODS as KNOWN
from residual_mass.methods import method_named, names
from residual_mass.paper.figures.render import run
from residual_mass.paper.figures.selectors import (
    draw_fidelity_by_bytes,
    draw_selection_recall,
    fidelity_by_bytes_points,
    marks_of,
    selection_recall_points,
)
from residual_mass.paper.figures.style import paper_style
from residual_mass.paper.titles import RESIDUAL_TITLES, SELECTOR_TITLES
from residual_mass.study.specs import FigureSpec

pytestmark = pytest.mark.filterwarnings("error")

RECALL = FigureSpec(label="selection_recall", title="Costs $5 & more_", texts=("wiki", "books"))
BYTES = FigureSpec(label="fidelity_by_bytes", title="Costs $5 & more_", texts=("wiki", "books"))
METHODS = [name for name in names()[1:] if name.startswith(("topk", "scan", "pages"))]
BUDGETS, LENGTHS = (16, 0.5, 2), ("512", "2k")
MEASURED = ("topk", "topk_phi", "scan4_moments", "pages")
"""Methods whose next tokens are measured as well."""
SELECTORS = {"scan4": "4-bit scan", "scan3_regression_32": "3-bit scan", "pages": "Pages"}
"""The first method of each selector but the exact one, and its title."""
DECODED = [one for one in KNOWN if not one.whole_prefix]


def error(length: str, corpus: str, method: str, budget: float) -> float:
    return 0.01 * (1 + METHODS.index(method)) * len(length) * len(corpus) / budget


def missed(length: str, corpus: str, method: str, budget: float) -> float:
    """Of methods with the same selector the same."""
    return 0 if method.startswith("topk") else 0.001 * len(method[:5].rstrip("_")) * len(length) * len(corpus) / budget


def share(method: str, budget: float) -> float:
    return 0.01 * budget + 0.001 * len(method) + (0.5 if method.startswith("topk") else 0.1)


def kl(length: str, corpus: str, method: str, budget: float) -> float:
    return 0.1 * error(length, corpus, method, budget) ** 2


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Of errors, then of distances."""
    errors, distances = [], []
    for length in LENGTHS:
        rows = [
            error_row(method, budget, corpus=corpus, length=length, error=error(length, corpus, method, budget),
                      step_share=share(method, budget), packs=4,
                      recall="" if budget == 0.5 else 1 - missed(length, corpus, method, budget))
            for corpus, method, budget in product(("books", "poems", "wiki"), METHODS, BUDGETS)
        ]  # fmt: skip
        errors.append(write_rows(tmp_path, "residual_errors", rows, length))
        rows = [
            row | change
            for corpus, method, budget in product(("books", "wiki"), MEASURED, (2, 16))
            for row in [
                distance_row(method, budget, text=corpus, length=length, value=kl(length, corpus, method, budget))
            ]
            for change in (
                {},
                {"state": "dense", "value": 9},
                {"metric": "kl_p90", "value": 9},
                {"task": "x", "value": 9},
            )
        ]
        distances.append(write_rows(tmp_path, "fidelity", rows, length))
    return [*errors, *distances]


def test_each_selector_has_a_line_of_what_it_misses(files: list[Path]) -> None:
    with paper_style():
        figure = draw_selection_recall(RECALL, selection_recall_points(RECALL, files[:2]))
        figure.draw_without_rendering()
    assert len(figure.axes) == 4
    for axis, (length, corpus) in zip(figure.axes, product(LENGTHS, ("wiki", "books")), strict=True):
        assert len(axis.lines) == len(SELECTORS)
        for line, method in zip(axis.lines, ("scan4", "scan3_regression_32", "pages"), strict=True):
            expected = [(budget, missed(length, corpus, method, budget)) for budget in (2, 16)]
            np.testing.assert_allclose(line.get_xydata(), expected, err_msg=f"{length} {corpus} {method}")
        assert axis.get_title() == f"{ {'wiki': 'Wikipedia', 'books': 'Books'}[corpus] }, {length}: 4 packs"
    assert [text.get_text() for text in figure.legends[0].texts] == list(SELECTORS.values())


def test_a_selector_that_finds_everything_has_no_line(tmp_path: Path) -> None:
    rows = [error_row("scan4", 2, recall=1), error_row("pages", 2, recall=0.5), error_row("pages", 4, recall=0.75)]
    path, spec = write_rows(tmp_path, "residual_errors", rows), FigureSpec("selection_recall", "", texts=("wiki",))
    figure = draw_selection_recall(spec, selection_recall_points(spec, [path]))
    figure.draw_without_rendering()
    (line,) = figure.axes[0].lines
    np.testing.assert_allclose(line.get_xydata(), [(2, 0.5), (4, 0.25)])


def test_points_are_those_of_the_files_and_the_front_is_of_each_panel(files: list[Path]) -> None:
    points = fidelity_by_bytes_points(BYTES, files)
    panels = list(dict.fromkeys(points[["length", "corpus", "quantity"]].itertuples(index=False, name=None)))
    assert panels == list(product(LENGTHS, ("wiki", "books"), ("kl", "relative_error")))
    for (length, corpus, quantity), panel in points.groupby(["length", "corpus", "quantity"]):
        methods, budgets = (MEASURED, (2, 16)) if quantity == "kl" else (METHODS, BUDGETS)
        value = kl if quantity == "kl" else error
        expected = {
            (method, budget): (100 * share(method, budget), value(length, corpus, method, budget))
            for method, budget in product(methods, budgets)
        }
        assert set(zip(panel["method"], panel["budget_percent"], strict=True)) == set(expected)
        competing = [place for name, place in expected.items() if name[0] != "topk_exact_mass"]
        for row in panel.itertuples():
            x, y = expected[row.method, row.budget_percent]
            assert (row.share, row.value) == pytest.approx((x, y))
            beaten = any(a <= x and b <= y and (a, b) != (x, y) for a, b in competing)
            assert row.front == (not beaten and row.method != "topk_exact_mass")


def test_an_oracle_beats_everything_and_is_not_on_the_front(tmp_path: Path) -> None:
    rows = [
        error_row("topk_exact_mass", 2, error=0.001, step_share=0.01),
        error_row("topk", 2, error=0.5, step_share=0.3),
        error_row("topk_mean", 2, error=0.5, step_share=0.3),
        error_row("topk_moments", 2, error=0.6, step_share=0.3),
    ]
    paths = [
        write_rows(tmp_path, "residual_errors", rows),
        write_rows(tmp_path, "fidelity", [distance_row("topk", 2), distance_row("topk_phi", 2, maps="512")]),
    ]
    points = fidelity_by_bytes_points(FigureSpec("fidelity_by_bytes", "", texts=("wiki",)), paths)
    assert list(points["method"][points["front"]]) == ["topk", "topk", "topk_mean"]


def test_a_single_method_is_the_front(tmp_path: Path) -> None:
    paths = [
        write_rows(tmp_path, "residual_errors", [error_row("topk", 2)]),
        write_rows(tmp_path, "fidelity", [distance_row("topk", 2)]),
    ]
    spec = FigureSpec("fidelity_by_bytes", "", texts=("wiki",))
    points = fidelity_by_bytes_points(spec, paths)
    assert list(points["value"]) == [0.1, 0.5] and points["front"].all()
    draw_fidelity_by_bytes(spec, points).draw_without_rendering()


def test_marks_tell_methods_apart_by_selector_and_residual(files: list[Path]) -> None:
    marks = marks_of(METHODS)
    kinds = {name: (type(method_named(name).selector), type(method_named(name).residual)) for name in METHODS}
    assert all((marks[a] == marks[b]) == (kinds[a] == kinds[b]) for a, b in product(METHODS, METHODS))
    every = marks_of(names())
    assert {type(one.selector).__name__ for one in DECODED} == set(SELECTOR_TITLES)
    assert {type(one.residual).__name__ for one in DECODED} == set(RESIDUAL_TITLES)
    assert len({mark.colour for mark in every.values()}) == len(SELECTOR_TITLES)
    assert marks["scan4_moments"][1:] == marks["topk_moments"][1:] and marks["scan4"].colour != marks["topk"].colour
    with paper_style():
        figure = draw_fidelity_by_bytes(BYTES, fidelity_by_bytes_points(BYTES, files))
        figure.draw_without_rendering()
    assert len(figure.axes) == 8
    distance, errors = figure.axes[:2]
    assert len(distance.lines) == len(MEASURED) + 1 and len(errors.lines) == len(METHODS) + 1
    for line, method in zip(errors.lines, METHODS, strict=False):
        assert to_hex(line.get_markeredgecolor()) == marks[method].colour.lower()
        expected = [(100 * share(method, budget), error("512", "wiki", method, budget)) for budget in sorted(BUDGETS)]
        np.testing.assert_allclose(line.get_xydata(), expected)
    assert distance.get_title() == "Wikipedia, 512: 12 documents" and errors.get_title() == "Wikipedia, 512: 4 packs"
    shown = [text.get_text() for text in figure.legends[0].texts]
    selectors, residuals = (
        ["TopK", "QuantisedScan", "Pages"],
        dict.fromkeys(type(method_named(n).residual) for n in METHODS),
    )
    expected = [RESIDUAL_TITLES[kind.__name__] for kind in residuals]
    assert shown == [*(SELECTOR_TITLES[kind] for kind in selectors), "front", *expected]


def test_what_is_missing_is_refused(files: list[Path], tmp_path: Path) -> None:
    other = FigureSpec(label="x", title="", texts=("wiki", "code"))
    with pytest.raises(ValueError, match=f"^{files[0]}: has no rows of code; run the residual-errors stage with it$"):
        selection_recall_points(other, files[:2])
    message = "^figure x: no kl of code at 512; run the fidelity stage with it$"
    with pytest.raises(ValueError, match=message):
        fidelity_by_bytes_points(other, files)
    with pytest.raises(ValueError, match="^figure x: no kl of wiki at 2k; run the fidelity stage with it$"):
        fidelity_by_bytes_points(FigureSpec("x", "", texts=("wiki",)), files[:3])
    exact = write_rows(tmp_path, "residual_errors", [error_row("topk", 2, recall=1)])
    with pytest.raises(ValueError, match="^figure x: no method selects otherwise than by exact scores; compare one$"):
        selection_recall_points(FigureSpec("x", "", texts=("wiki",)), [exact])


@pytest.mark.parametrize("spec", [RECALL, BYTES], ids=lambda spec: spec.label)
def test_the_figure_is_the_same_bytes_twice(spec: FigureSpec, files: list[Path], tmp_path: Path) -> None:
    made = []
    data = files if spec is BYTES else files[:2]
    for name in ("first", "second"):
        run(spec, data, pdf := tmp_path / f"{name}.pdf", png := tmp_path / f"{name}.png")
        made.append((pdf.read_bytes(), png.read_bytes()))
    assert made[0] == made[1] and made[0][0].startswith(b"%PDF")
