"""Figures show the points that a slow reading of their files gives, whole and in reproducible bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import (
    COMPARED,
    assert_drawn,
    corners,
    distances,
    draw,
    drawn,
    errors,
    files_of,
    lines,
    next_tokens,
    spec,
    tokens,
)
from matplotlib.figure import Figure
from sample_results import error_row, write_rows

from residual_mass import methods
from residual_mass.benchmarks.columns import DRAFTED
from residual_mass.benchmarks.statistics import resampled
from residual_mass.methods import method_named
from residual_mass.methods.step_bytes import bytes_per_verified_token
from residual_mass.paper.figures import FIGURES, run
from residual_mass.paper.figures.style import BLUE, VERMILLION, make_logarithmic, paper_style
from residual_mass.paper.titles import method_title, trained_at_title
from residual_mass.study import figures as configured

pytestmark = pytest.mark.filterwarnings("error")

# ---- all figures -----------------------------------------------------------------------------------------------------


def test_every_kind_of_figure_is_drawn_and_no_other(tmp_path: Path) -> None:
    assert set(FIGURES) == set(configured.FIGURES)
    assert configured.kind_of("fixedk_breakdown_1b") == "fixedk_breakdown"
    for label in ("nothing", "", "entropy", "entropy_gains", "1b_entropy_gain", "entropy_gain_1b"):
        with pytest.raises(ValueError, match=f"^{label} is not one of fidelity, .*training_curves"):
            run(spec(label), [tmp_path], tmp_path / "f.pdf", tmp_path / "f.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", FIGURES)
def test_nothing_leaves_the_page(kind: str) -> None:
    figure = drawn(kind)
    with paper_style():
        figure.draw_without_rendering()
        boxes = [axis.title.get_window_extent() for axis in figure.axes] + [figure.legends[0].get_window_extent()]
    assert all(-1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1 for box in boxes)
    assert r"Costs \$5 & more_" in figure.get_suptitle()


def test_a_figure_is_the_same_bytes_twice(tmp_path: Path) -> None:
    show, files = files_of("kernel_sanity", tmp_path)
    made = []
    for name in ("first", "second"):
        run(show, files, pdf := tmp_path / f"{name}.pdf", png := tmp_path / f"{name}.png")
        made.append((pdf.read_bytes(), png.read_bytes()))
    assert made[0] == made[1] and made[0][0].startswith(b"%PDF")
    assert b"CreationDate" not in made[0][0] and b"Matplotlib" not in made[0][0]
    assert int.from_bytes(made[0][1][16:20]) == 1100  # 5.5 in at 200 dpi


@pytest.mark.parametrize("ends", [(0.5, 5), (0.82, 1.33), (10, 20000), (1e-6, 3), (2, 8)])
def test_logarithmic_axes_have_some_ticks_and_not_many(ends: tuple[float, float]) -> None:
    (axis := Figure().subplots()).set_xlim(*ends)
    make_logarithmic(axis.xaxis)
    assert 2 <= sum(ends[0] <= tick <= ends[1] for tick in axis.get_xticks()) <= 8


# ---- fidelity --------------------------------------------------------------------------------------------------------


def test_lines_and_bands_are_the_rows_of_all_tasks_in_the_own_state() -> None:
    figure = drawn("fidelity")
    for axis, (length, text) in zip(figure.axes, product(("512", "2k"), ("ruler", "wiki")), strict=True):
        place = {"length": length, "text": text, "state": "own", "task": "all", "metric": "kl"}
        rows = distances(length).sort_values("budget_percent").to_dict("records")
        rows = [row for row in rows if place.items() <= row.items() and row["continuation"] != "greedy"]
        arms: dict[str, list[Any]] = {}
        for row in rows:
            title = trained_at_title(row["maps"]) if row["maps"] in ("512", "1k") else method_title(row["method"])
            arms.setdefault(title, []).append(row)
        for line, band in zip(axis.lines, axis.collections, strict=False):
            shown = arms[line.get_label()]
            np.testing.assert_allclose(line.get_xydata(), [(row["budget_percent"], row["value"]) for row in shown])
            ends = product(shown, ("ci_low", "ci_high"))
            assert corners(band) == {(row["budget_percent"], round(row[end], 9)) for row, end in ends}
            assert (line.get_linestyle() == "-") == (shown[0]["maps"] in ("", "2k"))
        assert len(axis.lines) == len(arms) == (5 if text == "wiki" else 3)
        title, counted = ("wiki", "documents") if text == "wiki" else ("RULER", "prompts")
        assert axis.get_title() == f"{title}, {length}: 12 {counted}"
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {*arms, "95% interval"}


def quarters(rows: list[dict[str, Any]]) -> list[int]:
    order = sorted(row["full_nll"] for row in rows)
    return [order.index(row["full_nll"]) * 4 // len(rows) for row in rows]


GROUPS: tuple[Callable[[list[dict[str, Any]]], list[int]], ...] = (
    quarters,
    lambda rows: [row["seen"] for row in rows],
    lambda rows: [[0, 1, 2, 2, 3][row["position"]] for row in rows],
)


def slow_mean(rows: list[dict[str, Any]], weights: Sequence[float]) -> float:
    counted = [weights[row["index"]] for row in rows]
    return sum(w * row["kl"] for w, row in zip(counted, rows, strict=True)) / sum(counted) if sum(counted) else math.nan


def test_tokens_are_counted_and_means_of_groups_have_intervals_over_documents() -> None:
    figure = drawn("fidelity_tokens")
    place = {"text": "wiki", "state": "own", "budget_percent": 4.0}
    own = [row for row in tokens().to_dict("records") if place.items() <= row.items() and row["maps"] != "512"]
    for number, method in enumerate(dict.fromkeys(row["method"] for row in own)):
        rows = sorted((row for row in own if row["method"] == method), key=lambda row: (row["index"], row["position"]))
        values = sorted(row["kl"] for row in rows)
        shares = [(value, sum(other >= value for other in values) / len(values)) for value in values]
        assert_drawn(figure.axes[0], shares)
        for axis, grouped in zip(figure.axes[1:], GROUPS, strict=True):
            groups = grouped(rows)
            means, intervals = lines(axis)[number][:, 1], axis.collections[number].get_segments()
            for x, group in enumerate(sorted(set(groups))):
                of_group = [row for row, each in zip(rows, groups, strict=True) if each == group]
                assert means[x] == pytest.approx(slow_mean(of_group, np.ones(4)))
                draws = [slow_mean(of_group, weights) for part in resampled(4, 200, 3, "wiki") for weights in part]
                interval = np.quantile(draws, [0.025, 0.975])  # NaN where a resample lacks the group
                np.testing.assert_allclose(np.ravel(intervals[x])[1::2], interval[~np.isnan(interval)])
                assert axis.get_xticklabels()[x].get_text().endswith(f"\n({len(of_group)})")
    names = [[label.get_text().split("\n")[0] for label in axis.get_xticklabels()] for axis in figure.axes[1:]]
    assert names[1:] == [["nothing", "the token", "its bigram"], ["1", "2", "3–4", "5"]]
    assert names[0][-1] == "less" and names[0][0].startswith("≥ 0.")


# ---- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["error_by_k", "selection_recall"])
def test_lines_of_methods_are_the_rows_of_the_files(kind: str) -> None:
    figure = drawn(kind)
    first = ("scan4", "scan3_regression_32", "pages")  # methods of selectors other than exact top-K
    shown = first if kind == "selection_recall" else [name for name in COMPARED if name.startswith("topk")]
    for axis, (length, corpus) in zip(figure.axes, product(("512", "2k"), ("wiki", "books")), strict=True):
        for line, method in zip(axis.lines, shown, strict=True):
            rows = [row for row in errors(length) if (row["method"], row["corpus"]) == (method, corpus)]
            values = [row["error"] if kind == "error_by_k" else row["recall"] and 1 - row["recall"] for row in rows]
            expected = [(float(row["budget_percent"]), y) for row, y in zip(rows, values, strict=True) if y]
            np.testing.assert_allclose(line.get_xydata(), sorted(expected))
        assert axis.get_title() == f"{ {'wiki': 'Wikipedia', 'books': 'Books'}[corpus] }, {length}: 4 packs"
    assert len(figure.legends[0].texts) == len(shown)


def test_recall_of_exact_selection_alone_is_refused(tmp_path: Path) -> None:
    exact = write_rows(tmp_path, "residual_errors", [error_row("topk", 2, recall=1)])
    with pytest.raises(ValueError, match="^figure selection_recall: no method selects otherwise than by exact scores;"):
        draw(spec("selection_recall", texts=("wiki",)), [exact])


def test_points_by_bytes_are_those_of_the_files_and_the_front_is_of_each_panel() -> None:
    figure = drawn("fidelity_by_bytes")
    places = product(("512", "2k"), ("wiki", "books"), ("kl", "relative_error", "bytes_per_verified_token"))
    for axis, (length, corpus, quantity) in zip(figure.axes, places, strict=True):
        rows = [row for row in errors(length) if row["corpus"] == corpus]
        arms = {(row["method"], row["budget_percent"]): (100 * row["step_share"], row["error"]) for row in rows}
        if quantity != "relative_error":
            metric = "kl" if quantity == "kl" else "first_differences"
            rows = [row for row in next_tokens(length) if row["text"] == corpus and row["value"] != 9]
            values = {(row["method"], row["budget_percent"]): row["value"] for row in rows if row["metric"] == metric}
            arms = {arm: (arms[arm][0], value) for arm, value in values.items()}
        if quantity == "bytes_per_verified_token":
            arms = {arm: (b, bytes_per_verified_token(b / 100, h, DRAFTED)[0]) for arm, (b, h) in arms.items()}
        for method in {method for method, _ in arms}:
            of_method = sorted((float(budget), *point) for (name, budget), point in arms.items() if name == method)
            assert_drawn(axis, [point for _, *point in of_method])
        competing = {point for (name, _), point in arms.items() if name != "topk_exact_mass"}
        best = [p for p in competing if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in competing)]
        (front,) = (line.get_xydata() for line in axis.lines if line.get_label() == "front")
        np.testing.assert_allclose(front, sorted(best))


def test_every_kind_of_selector_and_residual_has_a_title_a_colour_and_a_mark() -> None:
    decoded = [one for one in methods.METHODS if not one.whole_prefix]
    assert all(part.title for one in decoded for part in (one.selector, one.residual) if part is not None)
    axis, found = drawn("fidelity_by_bytes").axes[1], [method_named(name) for name in COMPARED]
    looks = [(line.get_markeredgecolor(), line.get_marker()) for line in axis.lines[: len(COMPARED)]]
    for (one, first), (two, second) in product(zip(looks, found, strict=True), repeat=2):
        assert (one[0] == two[0]) == (type(first.selector) is type(second.selector))
        assert (one[1] == two[1]) == (type(first.residual) is type(second.residual))


# ---- training --------------------------------------------------------------------------------------------------------


def test_training_curves_show_the_errors_of_every_length() -> None:
    figure = drawn("training_curves")
    assert [axis.get_title() for axis in figure.axes[:3]] == ["$K$ = 1", "$K$ = 0, 21", "$K$ = 1, 62"]
    for axis, shown in zip(figure.axes, [{"1k": 1}, {"512": 0, "1k": 21}, {"512": 1, "1k": 62}], strict=False):
        assert len(lines(axis)) == 3 * len(shown)
        for length, k in shown.items():
            curve = [(step, (2 - step / 20) / (1 + k) * (1 + (length == "1k"))) for step in (0, 20, 30)]
            assert_drawn(axis, curve)
            assert_drawn(axis, [(x, 1.1 * y) for x, y in curve])
            assert any(np.allclose(line[:, 1], 1 / (1 + k)) for line in lines(axis))
    for curve in lines(figure.axes[3]):
        np.testing.assert_allclose(curve, [(step, 1 + (60 - step) / 60) for step in (0, 20, 30)])
    assert {line.get_color() for line in figure.axes[3].lines} == {BLUE, VERMILLION} and len(figure.axes) == 4
    assert figure.get_suptitle().endswith("held-out text: wiki")
