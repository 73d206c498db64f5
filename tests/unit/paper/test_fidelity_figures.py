"""Figures of the distance from full attention show what a slow reading of the rows gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from tests.records import recorded

from residual_mass.benchmarks.columns import FIDELITY
from residual_mass.benchmarks.statistics import resampled
from residual_mass.files import csv_text
from residual_mass.paper.figures.fidelity import (
    draw_fidelity,
    draw_fidelity_tokens,
    fidelity_points,
    fidelity_tokens_points,
)
from residual_mass.paper.figures.render import run
from residual_mass.study.sections.evaluation import Resampling
from residual_mass.study.specs import FigureSpec

pytestmark = pytest.mark.filterwarnings("error")

BUDGETS = FigureSpec(label="fidelity", title="Costs $5 & more_", maps=("2k",), texts=("ruler", "wiki"))
TOKENS = FigureSpec(
    label="fidelity_tokens", title="Costs $5 & more_", maps=("2k",), texts=("wiki",), budget_percent=4.0,
    score=Resampling(bootstrap_resamples=200, seed=3),
)  # fmt: skip
METHODS = ("full", "topk", "topk_phi", "topk_phi_nosub")
COLOURS = {"topk": "#D55E00", "topk_phi": "#0072B2", "topk_phi_nosub": "#009E73"}
Row = dict[str, Any]


# ---- against the budget ----------------------------------------------------------------------------------------------


def rows_at(length: str) -> Iterator[Row]:
    """Rows of a corpus and of a benchmark, of which the figure shows few."""
    rng = np.random.default_rng(len(length))
    places = [("wiki", "following", "own"), ("wiki", "following", "dense"), ("books", "following", "own")]
    places += [("ruler", "gold", "own"), ("ruler", "greedy", "own")]
    arms = [(method, budget, "2k" * ("phi" in method)) for method in METHODS[1:] for budget in (8, 2)]
    for (text, continuation, state), task, metric in product(places, ("niah", "all"), ("nll", "kl", "kl_max")):
        others = [("topk_phi", budget, maps) for maps in ("512", "1k") for budget in (8, 2) if text == "wiki"]
        for method, budget, maps in [*arms, *others]:
            value = rng.uniform(0.01, 1)
            yield {
                "text": text, "task": task, "continuation": continuation, "state": state, "length": length,
                "method": method, "budget_percent": budget, "maps": maps, "metric": metric, "value": value,
                "ci_low": value / 2, "ci_high": 2 * value, "documents": 12,
            }  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"fidelity_smol_{length}.csv" for length in ("512", "2k")]
    for path, length in zip(paths, ("512", "2k"), strict=True):
        path.write_text(csv_text(FIDELITY, rows_at(length)))
    return [recorded(path) for path in paths]


def slow_line(length: str, text: str, method: str, maps: str, column: str) -> list[tuple[float, float]]:
    place = {"text": text, "state": "own", "task": "all", "metric": "kl", "method": method, "maps": maps}
    chosen = [row for row in rows_at(length) if place.items() <= row.items() and row["continuation"] != "greedy"]
    return sorted((row["budget_percent"], row[column]) for row in chosen)


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_lines_and_bands_are_the_rows_of_all_tasks_in_the_own_state(files: list[Path]) -> None:
    figure = draw_fidelity(BUDGETS, fidelity_points(BUDGETS, files))
    for axis, (length, text) in zip(figure.axes, product(("512", "2k"), ("ruler", "wiki")), strict=True):
        arms = [(method, "2k" * ("phi" in method)) for method in METHODS[1:]]
        arms += [("topk_phi", "512"), ("topk_phi", "1k")] if text == "wiki" else []
        for line, band, (method, maps) in zip(axis.lines, axis.collections, arms, strict=True):
            np.testing.assert_allclose(line.get_xydata(), slow_line(length, text, method, maps, "value"))
            corners = {tuple(corner) for corner in np.round(band.get_paths()[0].vertices, 9)}
            edges = [edge for end in ("ci_low", "ci_high") for edge in slow_line(length, text, method, maps, end)]
            assert corners == {tuple(corner) for corner in np.round(edges, 9)}
            if maps in ("", "2k"):
                assert (line.get_color(), line.get_linestyle()) == (COLOURS[method], "-")
            else:
                assert line.get_color() not in COLOURS.values() and line.get_linestyle() != "-"
        title = {"wiki": "wiki", "ruler": "RULER"}[text]
        assert axis.get_title() == f"{title}, {length}: 12 {'documents' if text == 'wiki' else 'prompts'}"
        assert (axis.get_xscale(), axis.get_yscale(), list(axis.get_xticks())) == ("log", "log", [2, 8])
    assert len({axis.get_ylim() for axis in figure.axes}) == 1
    assert [axis.get_ylabel() for axis in figure.axes] == ["KL(Full || arm), nats", ""] * 2
    phi = r"Top-$K{+}\phi$"
    named = ["Top-$K$", phi, f"{phi} (NoSub)", f"{phi} (512-trained)", f"{phi} (1k-trained)", "95% interval"]
    assert legend(figure) == named


def test_a_single_document_has_no_band(tmp_path: Path) -> None:
    path = tmp_path / "fidelity_smol_2k.csv"
    path.write_text(csv_text(FIDELITY, (row | {"ci_low": "", "ci_high": "", "documents": 1} for row in rows_at("2k"))))
    figure = draw_fidelity(BUDGETS, fidelity_points(BUDGETS, [path]))
    figure.draw_without_rendering()
    assert all(len(line.get_xdata()) == 2 for axis in figure.axes for line in axis.lines)


# ---- token by token --------------------------------------------------------------------------------------------------


def forced(documents: int = 4, tokens: int = 6) -> pd.DataFrame:
    """Tokens under all arms; Full's likelihood of a token and what the prompt has of it are the same in all rows."""
    rng = np.random.default_rng(5)
    rows = []
    for index, position in product(range(documents), range(tokens - 1)):
        # Documents are of unequal lengths, and the last one alone has new tokens.
        if index == 1 and position > 2:
            continue
        about = {"task": "", "index": index, "position": position, "full_nll": rng.exponential()}
        about["seen"] = 0 if index == documents - 1 and position == 0 else int(rng.integers(1, 3))
        arms = product((("wiki", "following"), ("books", "following")), ("own", "dense"), METHODS, (2.0, 4.0))
        for (text, continuation), state, method, budget in arms:
            for maps in ("2k", "512") if "phi" in method else ("",):
                kl = 0.0 if method == "full" else rng.lognormal(-4, 2)
                budgets = np.nan if method == "full" else budget
                place = {"text": text, "continuation": continuation, "state": state}
                rows.append(place | about | {"method": method, "budget_percent": budgets, "maps": maps, "kl": kl})
    return pd.DataFrame(rows).sample(frac=1, random_state=1, ignore_index=True)


def slow_tokens(frame: pd.DataFrame, method: str) -> list[Row]:
    place = {"text": "wiki", "state": "own", "method": method, "budget_percent": 4.0}
    rows = [row for row in frame.to_dict("records") if place.items() <= row.items() and row["maps"] != "512"]
    return sorted(rows, key=lambda row: (row["index"], row["position"]))


def quarters(rows: list[Row]) -> list[int]:
    order = sorted(row["full_nll"] for row in rows)
    return [order.index(row["full_nll"]) * 4 // len(rows) for row in rows]


GROUPS: dict[str, Callable[[list[Row]], list[int]]] = {
    "likelihood": quarters,
    "seen": lambda rows: [row["seen"] for row in rows],
    "position": lambda rows: [[0, 1, 2, 2, 3][row["position"]] for row in rows],
}


def slow_mean(rows: list[Row], weights: np.ndarray) -> float:
    counted = [weights[row["index"]] for row in rows]
    return sum(w * row["kl"] for w, row in zip(counted, rows, strict=True)) / sum(counted) if sum(counted) else np.nan


def slow_interval(rows: list[Row], documents: int) -> tuple[float, float]:
    draws = [slow_mean(rows, weights) for part in resampled(documents, 200, 3, "wiki") for weights in part]
    return float(np.quantile(draws, 0.025)), float(np.quantile(draws, 0.975))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    forced().to_parquet(path := tmp_path / "smol_2k.parquet")
    return recorded(path)


def test_the_distribution_counts_every_token_of_the_text(tokens: Path) -> None:
    points = fidelity_tokens_points(TOKENS, [tokens])
    axis = draw_fidelity_tokens(TOKENS, points).axes[0]
    lines = {line.get_color(): line for line in axis.lines}
    assert len(lines) == 3
    for method, colour in COLOURS.items():
        values = [row["kl"] for row in slow_tokens(forced(), method)]
        expected = [(value, sum(other >= value for other in values) / len(values)) for value in sorted(values)]
        np.testing.assert_allclose(lines[colour].get_xydata(), expected)


def mark(axis: Axes, method: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Means of a method in a panel, and the intervals that are drawn."""
    (line,) = [line for line in axis.lines if line.get_color() == COLOURS[method]]
    number = list(axis.lines).index(line)
    bars = axis.collections[number]
    assert isinstance(bars, LineCollection)
    return np.asarray(line.get_ydata()), [segment[:, 1] for segment in bars.get_segments() if segment.size]


def test_means_of_groups_have_intervals_over_documents(tokens: Path) -> None:
    figure = draw_fidelity_tokens(TOKENS, fidelity_tokens_points(TOKENS, [tokens]))
    for axis, (panel, grouped) in zip(figure.axes[1:], GROUPS.items(), strict=True):
        for method in COLOURS:
            rows = slow_tokens(forced(), method)
            groups: dict[int, list[Row]] = {}
            for group, row in sorted(zip(grouped(rows), rows, strict=True), key=lambda pair: pair[0]):
                groups.setdefault(group, []).append(row)
            means, bars = mark(axis, method)
            np.testing.assert_allclose(means, [slow_mean(of_group, np.ones(4)) for of_group in groups.values()])
            ends = [slow_interval(of_group, 4) for of_group in groups.values()]
            np.testing.assert_allclose(bars, [pair for pair in ends if pair[0] > 0])
            counts = [label.get_text().split("\n")[1] for label in axis.get_xticklabels()]
            assert counts == [f"({len(of_group)})" for of_group in groups.values()]
            assert panel != "seen" or np.isnan(ends[0]).all()  # of the one document with new tokens
    names = [[label.get_text().split("\n")[0] for label in axis.get_xticklabels()] for axis in figure.axes[2:]]
    assert names == [["nothing", "the token", "its bigram"], ["1", "2", "3–4", "5"]]
    likely = sorted(np.exp(-row["full_nll"]) for row in slow_tokens(forced(), "topk"))[::-1]
    named = [label.get_text().split("\n")[0] for label in figure.axes[1].get_xticklabels()]
    assert named[0] == f"≥ {likely[quarters(slow_tokens(forced(), 'topk')).count(0) - 1]:.3g}" and named[-1] == "less"


@pytest.mark.parametrize("length", [3, 6])
def test_one_document_has_means_and_no_interval(length: int, tokens: Path) -> None:
    forced(documents=1, tokens=length).to_parquet(tokens)
    points = fidelity_tokens_points(TOKENS, [tokens])
    assert points["low"].isna().all() and points["high"].isna().all()
    draw_fidelity_tokens(TOKENS, points).draw_without_rendering()


# ---- both ------------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_refused_in_one_line(files: list[Path], tokens: Path) -> None:
    with pytest.raises(ValueError, match=f"^{files[0]}: has no rows of poems; run the fidelity stage with it$"):
        fidelity_points(replace(BUDGETS, texts=("wiki", "poems")), files)
    with pytest.raises(ValueError, match=f"^{tokens}: has no rows of poems; run the force stage with it$"):
        fidelity_tokens_points(replace(TOKENS, texts=("poems",)), [tokens])
    with pytest.raises(ValueError, match=f"^{tokens}: no tokens at a budget of 3%; run the force stage with it$"):
        fidelity_tokens_points(replace(TOKENS, budget_percent=3.0), [tokens])
    forced().drop(columns="seen").to_parquet(tokens)
    with pytest.raises(ValueError, match=f"^{tokens}: column seen is missing; delete it and run the force stage again"):
        fidelity_tokens_points(TOKENS, [tokens])


def test_figures_are_the_same_bytes_twice(files: list[Path], tokens: Path, tmp_path: Path) -> None:
    for spec, data in ((BUDGETS, files), (TOKENS, [tokens])):
        made = []
        for name in ("first", "second"):
            run(spec, data, pdf := tmp_path / f"{name}.pdf", png := tmp_path / f"{name}.png")
            made.append((pdf.read_bytes(), png.read_bytes()))
        assert made[0] == made[1] and made[0][0].startswith(b"%PDF")
