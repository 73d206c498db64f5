"""Figures show the points of a slow computation from their files, completely and in reproducible bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import drawn
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sample_results import error_row
from scipy.stats import spearmanr

from residual_mass import methods
from residual_mass.methods import method_named
from residual_mass.paper.figures import DRAWINGS, run
from residual_mass.paper.figures.style import BLUE, VERMILLION, make_logarithmic, paper_style
from residual_mass.paper.titles import method_title, text_title, title_parts, trained_at_title
from residual_mass.spec import figures as configured
from residual_mass.statistics import resampled

pytestmark = pytest.mark.filterwarnings("error")

Head = tuple[int, int]

# ---- all figures -----------------------------------------------------------------------------------------------------


def test_every_kind_of_figure_is_drawn_and_no_other(tmp_path: Path) -> None:
    assert set(DRAWINGS) == set(configured.FIGURES)
    assert configured.kind_of("fixedk_breakdown_1b") == "fixedk_breakdown"
    for label in ("nothing", "", "entropy", "entropy_gains", "1b_entropy_gain", "entropy_gain_1b"):
        with pytest.raises(ValueError, match=f"^{label} is not one of fidelity, .*training_curves"):
            run(drawn.spec(label), [tmp_path], tmp_path / "f.pdf", tmp_path / "f.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", DRAWINGS)
def test_nothing_leaves_the_page(kind: str) -> None:
    figure = drawn.figure(kind)
    with paper_style():
        figure.draw_without_rendering()
        boxes = [axis.title.get_window_extent() for axis in figure.axes] + [figure.legends[0].get_window_extent()]
        labels = [(axis.yaxis.label.get_window_extent().height, axis.bbox.height) for axis in figure.axes]
    assert all(-1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1 for box in boxes)
    assert all(label <= height for label, height in labels)
    assert r"Costs \$5 & more_" in figure.get_suptitle()


def test_a_figure_is_the_same_bytes_twice(tmp_path: Path) -> None:
    show, files = drawn.files_of("kernel_sanity", tmp_path)
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


def slow_lines(kind: str, length: str, text: str) -> dict[str, list[dict[str, Any]]]:
    """The rows that each line shows, by its title; of a recall what is missed, where there is a recall."""
    if kind == "fidelity":
        kept = {"text": text, "state": "own", "task": "all", "metric": "kl"}
        rows = [row for row in drawn.distances(length).to_dict("records") if kept.items() <= row.items()]
        rows = [row for row in rows if row["continuation"] != "greedy"]
        others = {maps: trained_at_title(maps) for maps in ("512", "1k")}
        titles = [others.get(row["maps"], method_title(row["method"])) for row in rows]
    elif kind == "error_by_k":
        rows = [row | {"value": row["error"]} for row in drawn.errors(length) if row["method"].startswith("topk")]
        titles = [method_title(row["method"]).removeprefix("Top-$K$") or "Top-$K$" for row in rows]
    else:
        first = ("scan4", "scan3_regression_32", "pages")  # methods of selectors other than exact top-K
        rows = [row for row in drawn.errors(length) if row["method"] in first and row["recall"]]
        rows = [row | {"value": 1 - row["recall"]} for row in rows]
        titles = [title_parts(row["method"])[0] for row in rows]
    lines: dict[str, list[dict[str, Any]]] = {}
    for row, title in sorted(zip(rows, titles, strict=True), key=lambda pair: float(pair[0]["budget_percent"])):
        if row.get("corpus", text) == text:
            lines.setdefault(title, []).append(row)
    return lines


OF_METHODS = {"wiki": "Wikipedia, {}: 4 packs", "books": "Books, {}: 4 packs"}


@pytest.mark.parametrize(
    ("kind", "texts"),
    [("fidelity", {"ruler": "RULER, {}: 12 prompts", "wiki": "Wikipedia, {}: 12 documents"}),
     ("error_by_k", OF_METHODS), ("selection_recall", OF_METHODS)],
)  # fmt: skip
def test_lines_against_the_budget_are_the_rows_of_the_files(kind: str, texts: dict[str, str]) -> None:
    figure, names = drawn.figure(kind), set()
    for axis, (length, text) in zip(figure.axes, product(("512", "2k"), texts), strict=True):
        expected = slow_lines(kind, length, text)
        found = {line.get_label(): line for line in axis.lines if len(line.get_xydata())}
        assert found.keys() == expected.keys() and len(found) > 2
        for title, rows in expected.items():
            points = [(float(row["budget_percent"]), row["value"]) for row in rows]
            np.testing.assert_allclose(found[title].get_xydata(), points)
            own_maps = rows[0].get("maps", "") in ("", "2k")  # others are grey, with broken lines
            assert kind != "fidelity" or (found[title].get_linestyle() == "-") == own_maps
        for band, rows in zip(axis.collections, (expected[line.get_label()] for line in axis.lines), strict=False):
            ends = product(rows, ("ci_low", "ci_high"))
            assert drawn.corners(band) == {(row["budget_percent"], round(row[end], 9)) for row, end in ends}
        assert axis.get_title() == texts[text].format(length)
        names |= expected.keys()
    names |= {"95% interval"} if kind == "fidelity" else set()
    assert {text.get_text() for text in figure.legends[0].get_texts()} == names


def groups_by_panel(rows: list[dict[str, Any]]) -> list[list[int]]:
    order = sorted(row["full_nll"] for row in rows)
    quarters = [order.index(row["full_nll"]) * 4 // len(rows) for row in rows]
    return [quarters, [row["seen"] for row in rows], [[0, 1, 2, 2, 3][row["position"]] for row in rows]]


def slow_mean(rows: list[dict[str, Any]], weights: Sequence[float]) -> float:
    counted = [weights[row["index"]] for row in rows]
    return sum(w * row["kl"] for w, row in zip(counted, rows, strict=True)) / sum(counted) if sum(counted) else math.nan


def test_tokens_are_counted_and_means_of_groups_have_intervals_over_documents() -> None:
    figure = drawn.figure("fidelity_tokens")
    place = {"text": "wiki", "state": "own", "budget_percent": 4.0}
    own = [row for row in drawn.tokens().to_dict("records") if place.items() <= row.items() and row["maps"] != "512"]
    for number, method in enumerate(dict.fromkeys(row["method"] for row in own)):
        rows = sorted((row for row in own if row["method"] == method), key=lambda row: (row["index"], row["position"]))
        values = sorted(row["kl"] for row in rows)
        shares = [(value, sum(other >= value for other in values) / len(values)) for value in values]
        drawn.assert_drawn(figure.axes[0], shares)
        for axis, groups in zip(figure.axes[1:], groups_by_panel(rows), strict=True):
            means, intervals = drawn.lines(axis)[number][:, 1], axis.collections[number].get_segments()
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


def test_means_of_one_document_have_no_interval(tmp_path: Path) -> None:
    show, _ = drawn.files_of("fidelity_tokens", tmp_path)
    tokens = drawn.tokens()
    figure = drawn.draw(show, [drawn.written(tmp_path / "one.parquet", tokens[tokens["index"] == 0])])
    for axis in figure.axes[1:]:
        assert len(axis.lines) > 1 and axis.collections
        assert not any(len(segment) for intervals in axis.collections for segment in intervals.get_segments())


# ---- methods ---------------------------------------------------------------------------------------------------------


def test_points_by_bytes_are_those_of_the_files_and_the_front_is_of_each_panel() -> None:
    figure = drawn.figure("fidelity_by_bytes")
    places = product(("512", "2k"), ("wiki", "books"), ("kl", "relative_error"))
    for axis, (length, corpus, quantity) in zip(figure.axes, places, strict=True):
        rows = [row for row in drawn.errors(length) if row["corpus"] == corpus]
        arms = {(row["method"], row["budget_percent"]): (100 * row["step_share"], row["error"]) for row in rows}
        if quantity == "kl":
            rows = [row for row in drawn.next_tokens(length) if row["text"] == corpus and row["value"] != 9]
            values = {(row["method"], row["budget_percent"]): row["value"] for row in rows if row["metric"] == "kl"}
            arms = {arm: (arms[arm][0], value) for arm, value in values.items()}
        for method in {method for method, _ in arms}:
            of_method = sorted((float(budget), *point) for (name, budget), point in arms.items() if name == method)
            drawn.assert_drawn(axis, [point for _, *point in of_method])
        competing = {point for (name, _), point in arms.items() if name != "topk_exact_mass"}
        best = [p for p in competing if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in competing)]
        (front,) = (line.get_xydata() for line in axis.lines if line.get_label() == "front")
        np.testing.assert_allclose(front, sorted(best))


def test_every_kind_of_selector_and_residual_has_a_title_a_colour_and_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = [one for one in methods.METHODS if not one.whole_prefix]
    assert all(part.title for one in decoded for part in (one.selector, one.residual) if part is not None)
    axis, found = drawn.figure("fidelity_by_bytes").axes[1], [method_named(name) for name in drawn.COMPARED]
    looks = [(line.get_markeredgecolor(), line.get_marker()) for line in axis.lines[: len(drawn.COMPARED)]]
    for (one, first), (two, second) in product(zip(looks, found, strict=True), repeat=2):
        assert (one[0] == two[0]) == (type(first.selector) is type(second.selector))
        assert (one[1] == two[1]) == (type(first.residual) is type(second.residual))
    monkeypatch.setattr("residual_mass.paper.figures.residuals.RESIDUAL_MARKERS", "os")
    with pytest.raises(ValueError, match="kinds of residual have 2 looks; add one in figures/residuals.py"):
        drawn.figure.__wrapped__("fidelity_by_bytes")


# ---- training --------------------------------------------------------------------------------------------------------


def test_training_curves_show_the_errors_of_every_length() -> None:
    figure = drawn.figure("training_curves")
    assert [axis.get_title() for axis in figure.axes[:3]] == ["$K$ = 1", "$K$ = 0, 21", "$K$ = 1, 62"]
    for axis, shown in zip(figure.axes, [{"1k": 1}, {"512": 0, "1k": 21}, {"512": 1, "1k": 62}], strict=False):
        assert len(drawn.lines(axis)) == 3 * len(shown)
        for length, k in shown.items():
            curve = [(step, (2 - step / 20) / (1 + k) * (1 + (length == "1k"))) for step in (0, 20, 30)]
            drawn.assert_drawn(axis, curve)
            drawn.assert_drawn(axis, [(x, 1.1 * y) for x, y in curve])
            assert any(np.allclose(line[:, 1], 1 / (1 + k)) for line in drawn.lines(axis))
    for curve in drawn.lines(figure.axes[3]):
        np.testing.assert_allclose(curve, [(step, 1 + (60 - step) / 60) for step in (0, 20, 30)])
    assert {line.get_color() for line in figure.axes[3].lines} == {BLUE, VERMILLION} and len(figure.axes) == 4
    assert figure.get_suptitle().endswith("held-out text: Wikipedia")


# ---- heads -----------------------------------------------------------------------------------------------------------


def slow_means(frame: pd.DataFrame, k: int | None = None) -> dict[Head, dict[str, float]]:
    """Means of all columns over the packs and queries of every (layer, head) at `k`, one row at a time, and gains."""
    seen: dict[Head, list[dict[str, Any]]] = {}
    for row in frame.to_dict("records"):
        if k is None or row["k"] == k:
            seen.setdefault((row["layer"], row["head"]), []).append(row)
    names = frame.select_dtypes("floating")
    found = {head: {name: sum(row[name] for row in rows) / len(rows) for name in names} for head, rows in seen.items()}
    for means in found.values():
        means["gain"] = means.get("e_topk", 0) - means.get("e_sub", 0)
    return dict(sorted(found.items()))


def against_entropy(frame: pd.DataFrame, k: int, name: str) -> drawn.Points:
    return [(means["h_mid"], means[name]) for means in slow_means(frame, k).values()]


def test_gains_of_every_backbone_and_budget(tmp_path: Path) -> None:
    frames = {"smol": drawn.heads(), "lar$ge": drawn.heads({"layer": range(3)}, backbone="lar$ge")}
    data = [drawn.written(tmp_path / f"{name}.parquet", frame) for name, frame in frames.items()]
    figure = drawn.draw(drawn.spec("entropy_gain", backbone_titles={"smol": "Smol-1"}), data)
    for axis, (name, (k, budget)) in zip(figure.axes, product(frames, ((1, 2), (21, 4))), strict=True):
        expected = against_entropy(frames[name], k, "gain")
        drawn.assert_same(drawn.marks(axis), expected)
        helped, hurt = (np.asarray(each.get_offsets()) for each in axis.collections)
        assert (helped[:, 1] > 0).all() and (hurt[:, 1] <= 0).all()
        share = f"{len(helped) / len(expected):.1%} of {len(expected)} heads gain"
        assert axis.get_title() == f"$K = {k}$ ({budget}%)\n{share}"
    assert [figure.axes[row].get_ylabel() for row in (0, 2)] == ["Smol-1", r"lar\$ge"]
    assert len({axis.get_ylim() for axis in figure.axes}) == 1


def assert_medians(axis: Axes, points: drawn.Points) -> None:
    """The medians of x and of y in bins of width 0.1 in x are drawn."""
    bins: dict[float, drawn.Points] = {}
    for point in points:
        bins.setdefault(point[0] // 0.1, []).append(point)
    drawn.assert_drawn(axis, sorted(tuple(np.median(each, axis=0)) for each in bins.values()))


def test_the_breakdown_shows_errors_gains_and_their_medians() -> None:
    figure = drawn.figure("fixedk_breakdown")
    helped = [x for x, gain in against_entropy(drawn.heads(), 21, "gain") if gain > 0]
    for axis, name in zip(figure.axes, ("e_topk", "e_sub", "gain"), strict=True):
        points = against_entropy(drawn.heads(), 21, name)
        drawn.assert_same(drawn.marks(axis), points)
        drawn.assert_same(axis.collections[0].get_offsets()[:, 0], helped)
        assert_medians(axis, points)
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert figure.get_suptitle().endswith("$K = 21$ (4%)")


def test_the_map_of_entropies_has_layers_upwards_and_heads_to_the_right() -> None:
    entropies, right, _ = drawn.figure("entropy_heatmap").axes
    (image,) = entropies.images
    assert image.origin == "lower" and [*image.get_extent()] == [-0.5, 4.5, -0.5, 3.5]
    for place, means in slow_means(drawn.heads(), 21).items():
        assert image.get_array()[place] == pytest.approx(means["h_mid"])
    points = against_entropy(drawn.heads(), 21, "residual_share_hat")
    drawn.assert_same(drawn.marks(right), points)
    assert_medians(right, points)


@pytest.mark.parametrize("tied", [False, True])
def test_quartile_errors_are_means_over_the_heads_of_a_quartile(tmp_path: Path, tied: bool) -> None:
    frame = drawn.heads({"head": range(7)}, **{"h_mid": np.float32(0.3)} if tied else {})
    figure = drawn.of_frame("quartile_error", frame, tmp_path)
    entropies = {head: round(means["h_mid"], 12) for head, means in slow_means(frame).items()}
    order = sorted(entropies, key=lambda head: (entropies[head], head))
    for quartile, axis in enumerate(figure.axes):
        group = [head for place, head in enumerate(order) if place * 4 // len(order) == quartile]
        for error, band in zip(("e_topk", "e_sub"), axis.collections, strict=True):
            of_heads = [[slow_means(frame, k)[head][error] for head in group] for k in (1, 21)]
            drawn.assert_drawn(axis, [(place, sum(values) / len(values)) for place, values in enumerate(of_heads)])
            drawn.assert_middle_half(band, enumerate(of_heads))
        assert [label.get_text() for label in axis.get_xticklabels()] == ["1\n2%", "21\n4%"]
        assert axis.get_title().endswith(f"{entropies[group[0]]:.2f} to {entropies[group[-1]]:.2f}")


@pytest.mark.parametrize(
    "kind", ["entropy_gain", "entropy_heatmap", "fixedk_breakdown", "quartile_error", "mass_curves"]
)
def test_heads_without_budget_or_errors_are_drawn(tmp_path: Path, kind: str) -> None:
    show, files = drawn.files_of(kind, tmp_path)
    drawn.written(files[-1], drawn.heads(k=0, e_topk=0.0, e_sub=0.0, h_mid=1.0, residual_share_hat=1.0))
    drawn.draw(show, files).draw_without_rendering()


def test_curves_are_of_heads_at_fixed_ranks_of_the_entropy() -> None:
    (axis,) = drawn.figure("mass_curves").axes
    order = sorted((means["h_mid"], head) for head, means in slow_means(drawn.heads()).items())
    at = {k: [slow_means(drawn.mass(), k)[head]["c_mid"] for _, head in order] for k in (1, 3, 10, 30, 70)}
    for share in (0.02, 0.10, 0.25, 0.75, 0.90, 0.98):
        drawn.assert_drawn(axis, [(k, values[round(share * 19)]) for k, values in at.items()])
    drawn.assert_drawn(axis, [(k, np.median(values)) for k, values in at.items()])
    band, budgets = axis.collections
    drawn.assert_middle_half(band, at.items())
    assert [path.vertices[0, 0] for path in budgets.get_paths()] == [1, 21]
    assert "$K$ of the study: 1, 21" in axis.get_legend_handles_labels()[1]


# ---- calibration -----------------------------------------------------------------------------------------------------


def check_bins(axis: Axes, values: Sequence[float]) -> None:
    """Every value is counted once, in its bin or, outside of all, in the outermost one; 0 is an edge; the mean is
    drawn.
    """
    below, above, *beyond = (patch.get_data() for patch in axis.patches)
    edges = [*below.edges, *above.edges[1:]]
    assert below.edges[-1] == above.edges[0] == 0 and edges == sorted(set(edges)) and len(edges) < 200
    inside = [value for value in values if edges[0] <= value <= edges[-1]]
    bins = [max(i for i in range(len(edges) - 1) if edges[i] <= value) for value in inside]
    counts = np.bincount(bins, minlength=len(edges) - 1)
    np.testing.assert_allclose([*below.values, *above.values], counts / len(values))
    outside = {end: (patch.values[0] - patch.baseline).item() for patch in beyond for end in patch.edges}
    for edge, count in ((edges[0], np.less(values, edges[0]).sum()), (edges[-1], np.greater(values, edges[-1]).sum())):
        assert outside.get(edge, 0) == pytest.approx(count / len(values))
    assert any(line.get_xdata()[0] == pytest.approx(np.mean(values)) for line in axis.lines)


def slow_values(kind: str, frame: pd.DataFrame) -> list[float]:
    """Errors of the rows of K = 21 that have one, or differences of the heads."""
    if kind == "fullsub_nosub_delta":
        return [means["e_sub"] - means["e_nosub"] for means in slow_means(frame, 21).values()]
    rows = [row for row in frame.to_dict("records") if row["k"] == 21]
    return [value for row in rows if math.isfinite(value := row["log_z_hat"] - row["log_z_true"])]


@pytest.mark.parametrize("kind", ["logz_calibration", "fullsub_nosub_delta"])
def test_histograms_count_every_row_or_head(kind: str, tmp_path: Path) -> None:
    show, files = drawn.files_of(kind, tmp_path)
    frames = [pd.read_parquet(path) for path in files]
    clamped, empty = np.flatnonzero(frames[0]["k"] == 21)[:2]
    frames[0].loc[clamped, "log_z_hat"] = frames[0].loc[empty, "log_z_true"] = -np.inf
    drawn.written(files[0], frames[0])
    figure = drawn.draw(show, files)
    for axis, frame in zip(figure.axes, frames, strict=True):
        values, title = slow_values(kind, frame), axis.get_title()
        check_bins(axis, values)
        assert title.startswith(f"{text_title(frame['corpus'].iloc[0])}, {frame['length'].iloc[0]}, $K = 21$")
        assert f"{np.mean(np.less(values, 0)):.1%} " in title and f"mean ${np.mean(values):+.2f}"[:-1] in title
    beyond = "beyond the range, in the outermost bin" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert beyond == (kind == "logz_calibration") == figure.axes[0].get_title().endswith("\n2 of 120 rows left out")


@pytest.mark.parametrize("values", [[1.0, 3.0], [-3.0, -1.0], [-40.0, 1e30], [1.0] * 9 + [-300.0]])
@pytest.mark.parametrize("kind", ["logz_calibration", "fullsub_nosub_delta"])
def test_one_sided_and_extreme_values_are_drawn(tmp_path: Path, kind: str, values: list[float]) -> None:
    one = {"pack": [0], "layer": [0], "head": range(len(values)), "query": [0], "k": [21]}
    frame = drawn.heads(one, log_z_hat=values, log_z_true=0.0, e_sub=values, e_nosub=0.0)
    figure = drawn.of_frame(kind, frame, tmp_path)
    check_bins(figure.axes[0], values)
    assert kind == "logz_calibration" or len(figure.axes[0].patches) == 2  # none beyond the bins
    figure.draw_without_rendering()


# ---- kernels ---------------------------------------------------------------------------------------------------------


def test_kernels_of_one_head_against_a_slow_reading() -> None:
    figure = drawn.figure("kernel_sanity")
    scores, ranks, errors = figure.axes
    frame = drawn.kernels().astype({"log_kernel": float, "log_phi": float})
    keys: dict[int, list[tuple[float, float, bool]]] = {}
    for row in frame[frame["maps"] == "1k"].to_dict("records"):
        keys.setdefault(row["query"], []).append((row["log_kernel"], row["log_phi"], row["retrieved"]))
    for each in keys.values():  # less the log of the mid-region's mass
        mass = math.log(sum(math.exp(kernel) for kernel, _, _ in each))
        each[:] = sorted(((x - mass, y - mass, retrieved) for x, y, retrieved in each), reverse=True)
    for cloud, kind in zip(scores.collections, (False, True), strict=True):
        expected = [(x, y) for each in keys.values() for x, y, retrieved in each if retrieved is kind]
        drawn.assert_same(map(tuple, cloud.get_offsets()), expected)
    assert figure.get_suptitle().endswith(
        "layer 1, head 2, $K = 21$\n(a) 120 of 120 scores in view, at most 20,000 of a kind drawn"
    )
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named[:3] == ["unretrieved", "retrieved", "score = kernel"] and len(named) == 8
    middles = ranks.lines[0].get_xdata()
    for number, band in enumerate(ranks.collections):
        first, bins = 1, {}
        for middle in middles:
            last = round(middle**2 / first)
            bins[middle] = [each[rank - 1][number] for each in keys.values() for rank in range(first, last + 1)]
            first = last + 1
        assert first == 41 and ranks.get_xscale() == "log"
        drawn.assert_drawn(ranks, [(middle, np.median(values)) for middle, values in bins.items()])
        drawn.assert_middle_half(band, bins.items())
    rows = [row for row in drawn.heads().to_dict("records") if (row["layer"], row["head"], row["k"]) == (1, 2, 21)]
    for row in rows:
        drawn.assert_drawn(errors, [(0, row["e_topk"]), (1, row["e_sub"])])
    mean = [np.mean([row[name] for row in rows]) for name in ("e_topk", "e_sub")]
    drawn.assert_drawn(errors, list(enumerate(mean)))
    assert [label.get_text().split("\n")[1] for label in errors.get_xticklabels()] == [f"{each:.3f}" for each in mean]


def test_far_off_keys_do_not_widen_the_panel_and_are_counted(tmp_path: Path) -> None:
    show, files = drawn.files_of("kernel_sanity", tmp_path)
    frame = drawn.kernels(queries=1, keys=400)
    order = frame[frame["maps"] == "1k"].sort_values("log_kernel").index
    frame.loc[order[0], "log_kernel"], frame.loc[order[9], "log_phi"], frame.loc[order[-9], "log_phi"] = -1e3, -1e4, 1e4
    for moved, count in ((0, 397), (1000, 0)):
        frame["log_phi"] += moved
        figure = drawn.draw(show, [drawn.written(files[0], frame), files[1]])
        assert figure.get_suptitle().split("(a) ")[1].startswith(f"{count} of 400 ")
        assert all(np.ptp(limits) < 60 for limits in (figure.axes[0].get_xlim(), figure.axes[0].get_ylim()))


def test_fidelity_of_variants_is_over_the_unretrieved_keys_within_queries(tmp_path: Path) -> None:
    frame = drawn.kernels(queries=5)
    frame["log_kernel"] = frame["log_kernel"].round(1) + 9 * frame["query"]  # equal ranks, and levels that do not count
    frame["log_phi"] += 9 * frame["query"]
    frame.loc[frame["query"] == 3, "retrieved"] = frame["position"] > 4  # one key is left
    frame.loc[(frame["query"] == 4) & ~frame["retrieved"], "log_phi"] = 38.0
    show, (file,) = drawn.files_of("ablation_kernel_fidelity", tmp_path)
    figure = drawn.draw(show, [drawn.written(file, frame)])
    titles = ("Hedgehog-style map", "LoLCATs-style loss", "KL only", "Auxiliary only")
    for axis, letter, title, maps in zip(figure.axes, "abcd", titles, drawn.VARIANTS[1:], strict=True):
        expected, said = [], [f"({letter}) {title}"]
        for label, name in (("1k", "own"), (maps, "variant")):
            rest = frame[(frame["maps"] == label) & ~frame["retrieved"]]
            x, y = rest["log_kernel"].to_numpy(float), rest["log_phi"].to_numpy(float)
            queries = [each for _, each in rest.groupby("query") if each["log_phi"].nunique() > 1]  # others have none
            spearman = np.mean([spearmanr(each["log_kernel"], each["log_phi"]).statistic for each in queries])
            said.append(f"{name}: RMS {math.sqrt(np.mean((y - x) ** 2)):.2f} nats, Spearman ${spearman:.2f}$")
            expected += zip(x, y, strict=True)
        drawn.assert_same(drawn.marks(axis), expected)
        assert axis.get_title() == "\n".join(said)


@pytest.mark.parametrize(
    ("kind", "frame", "problem"),
    [
        ("fullsub_nosub_delta", drawn.heads(k=0), "figure fullsub_nosub_delta: K is 0 at 4%, where nothing is"),
        ("logz_calibration", drawn.heads(log_z_hat=-np.inf), "figure logz_calibration: no row has a finite estimate"),
        ("ablation_kernel_fidelity", drawn.kernels(k=40), ".*: every key is retrieved; set a smaller diagnostics"),
        ("selection_recall", pd.DataFrame([error_row(one, 2) for one in ("topk", "cache8")]), ".*: no method selects"),
    ],
)
def test_what_has_nothing_to_show_is_refused(tmp_path: Path, kind: str, frame: pd.DataFrame, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}"):
        drawn.of_frame(kind, frame, tmp_path, maps=drawn.VARIANTS, texts=("wiki",))
