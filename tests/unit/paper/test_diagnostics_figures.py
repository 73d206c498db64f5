"""Figures of captured rows show the points that a slow reading of them gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sample_diagnostics as sample
from drawn import (
    Head,
    Points,
    assert_drawn,
    assert_same,
    files_of,
    marks,
    parquet,
    points_of,
    spec,
)

from residual_mass.diagnostics.findings import read_settings
from residual_mass.paper.figures import FIGURES
from residual_mass.paper.figures.kernels import SHOWN
from residual_mass.paper.figures.points import bulk
from residual_mass.paper.figures.style import paper_style

pytestmark = pytest.mark.filterwarnings("error")

# ---- heads -----------------------------------------------------------------------------------------------------------


def slow_means(frame: pd.DataFrame, column: str, k: int | None = None) -> dict[Head, float]:
    """Mean of a column over the packs and queries of every (layer, head) at `k`, one row at a time."""
    seen: dict[Head, list[float]] = {}
    for row in frame.to_dict("records"):
        if k is None or row["k"] == k:
            seen.setdefault((row["layer"], row["head"]), []).append(float(row[column]))
    return {head: sum(values) / len(values) for head, values in sorted(seen.items())}


def slow_gains(frame: pd.DataFrame, k: int) -> dict[Head, float]:
    without, completed = slow_means(frame, "e_topk", k), slow_means(frame, "e_sub", k)
    return {head: without[head] - completed[head] for head in without}


def by_head(points: pd.DataFrame, column: str) -> dict[Head, float]:
    assert not points.duplicated(["layer", "head"]).any()
    return {(row["layer"], row["head"]): row[column] for row in points.to_dict("records")}


def pairs(x: dict[Head, float], y: dict[Head, float]) -> Points:
    return [(x[head], y[head]) for head in x]


def test_gains_of_every_backbone_and_budget(tmp_path: Path) -> None:
    frames = {"smol": sample.heads(), "lar$ge": sample.heads(3, 4, packs=1, backbone="lar$ge")}
    data = [parquet(tmp_path / f"{name}.parquet", frame) for name, frame in frames.items()]
    show = spec("entropy_gain", backbone_titles={"smol": "Smol-1"})
    points = FIGURES["entropy_gain"].points(show, data)
    figure = FIGURES["entropy_gain"].draw(show, points)
    for axis, (name, (k, budget)) in zip(figure.axes, product(frames, ((1, 2), (21, 4))), strict=True):
        gains = slow_gains(frames[name], k)
        panel = points[(points["backbone"] == name) & (points["k"] == k)]
        assert by_head(panel, "gain") == pytest.approx(gains, rel=1e-9)
        assert_same(marks(axis), pairs(slow_means(frames[name], "h_mid", k), gains))
        helped, hurt = (np.asarray(each.get_offsets()) for each in axis.collections)
        assert (helped[:, 1] > 0).all() and (hurt[:, 1] <= 0).all()
        share = f"{len(helped) / len(gains):.1%} of {len(gains)} heads gain"
        assert axis.get_title() == f"$K = {k}$ ({budget}%)\n{share}"
    assert [figure.axes[row].get_ylabel() for row in (0, 2)] == ["Smol-1", r"lar\$ge"]
    assert len({axis.get_ylim() for axis in figure.axes}) == 1


def slow_bins(pairs: Points) -> Points:
    """(median x, median y) of the bins of width 0.1 in x."""
    bins: dict[float, Points] = {}
    for pair in pairs:
        bins.setdefault(pair[0] // 0.1, []).append(pair)
    return sorted(tuple(np.median(each, axis=0)) for each in bins.values())


def test_the_breakdown_shows_errors_gains_and_their_medians(tmp_path: Path) -> None:
    points, figure = points_of("fixedk_breakdown", tmp_path)
    entropy, gains = slow_means(sample.heads(), "h_mid", 21), slow_gains(sample.heads(), 21)
    expected = {name: slow_means(sample.heads(), name, 21) for name in ("e_topk", "e_sub")} | {"gain": gains}
    for axis, (name, values) in zip(figure.axes, expected.items(), strict=True):
        assert by_head(points, name) == pytest.approx(values, rel=1e-9)
        assert_same(marks(axis), pairs(entropy, values))
        assert_same(axis.collections[0].get_offsets()[:, 0], [entropy[head] for head in gains if gains[head] > 0])
        assert_drawn(axis, slow_bins(pairs(entropy, values)))
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert figure.get_suptitle().endswith("$K = 21$ (4%)")


def test_the_map_of_entropies_has_layers_upwards_and_heads_to_the_right(tmp_path: Path) -> None:
    points, _ = points_of("entropy_heatmap", tmp_path)
    expected, shares = (slow_means(sample.heads(), name, 21) for name in ("h_mid", "residual_share_hat"))
    assert by_head(points, "h_mid") == pytest.approx(expected) and by_head(
        points, "residual_share_hat"
    ) == pytest.approx(shares)
    absent = points[(points["layer"] != 1) | (points["head"] != 2)]
    entropies, right, _ = FIGURES["entropy_heatmap"].draw(spec("entropy_heatmap"), absent).axes
    (image,) = entropies.images
    assert image.origin == "lower" and [*image.get_extent()] == [-0.5, 4.5, -0.5, 3.5]
    for (layer, head), value in expected.items():
        assert image.get_array().mask[layer, head] or image.get_array()[layer, head] == pytest.approx(value)
    assert image.get_array().mask.sum() == 1 and image.get_array().mask[1, 2]
    del expected[1, 2]
    assert_same(marks(right), pairs(expected, shares))


@pytest.mark.parametrize("tied", [False, True])
def test_quartile_errors_are_means_over_the_heads_of_a_quartile(tmp_path: Path, tied: bool) -> None:
    frame = sample.heads(layers=3, heads=6)
    if tied:
        frame["h_mid"] = np.float32(0.3)
    points = FIGURES["quartile_error"].points(spec("quartile_error"), [parquet(tmp_path / "h.parquet", frame)])
    figure = FIGURES["quartile_error"].draw(spec("quartile_error"), points)
    entropies = slow_means(frame, "h_mid")
    order = sorted(entropies, key=lambda head: (round(entropies[head], 12), head))
    for quartile, axis in enumerate(figure.axes):
        heads = [head for place, head in enumerate(order) if place * 4 // len(order) == quartile]
        panel = points[points["quartile"] == quartile]
        assert set(panel["heads"]) == {len(heads)}
        for error in ("e_topk", "e_sub"):
            means = [slow_means(frame, error, k) for k in (1, 21)]
            of_heads = [[mean[head] for head in heads] for mean in means]
            assert panel[error].tolist() == pytest.approx([sum(values) / len(values) for values in of_heads])
            for side, place in (("low", 0.25), ("high", 0.75)):
                assert panel[f"{error}_{side}"].tolist() == pytest.approx([np.quantile(v, place) for v in of_heads])
            assert_drawn(axis, list(enumerate(panel[error])))
        assert [label.get_text() for label in axis.get_xticklabels()] == ["1\n2%", "21\n4%"]


AWKWARD: dict[str, dict[str, Any]] = {
    "one head": {"layers": 1, "heads": 1},
    "K = 0": {"k": 0},
    "no errors, entropy 1": {"e_topk": 0.0, "e_sub": 0.0, "h_mid": 1.0, "residual_share_hat": 1.0},
}


@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_heads_are_drawn(tmp_path: Path, case: str) -> None:
    heads, mass = sample.heads(**AWKWARD[case]), sample.mass(4, 5)
    files = {"heads": parquet(tmp_path / "heads.parquet", heads), "mass": parquet(tmp_path / "mass.parquet", mass)}
    for kind in ("entropy_gain", "entropy_heatmap", "fixedk_breakdown", "quartile_error", "mass_curves"):
        data = [files["mass"], files["heads"]] if kind == "mass_curves" else [files["heads"]]
        with paper_style():
            figure = FIGURES[kind].draw(spec(kind), FIGURES[kind].points(spec(kind), data))
            figure.draw_without_rendering()


def test_curves_are_of_heads_at_fixed_ranks_of_the_entropy(tmp_path: Path) -> None:
    points, figure = points_of("mass_curves", tmp_path)
    entropies, (axis,) = slow_means(sample.heads(), "h_mid"), figure.axes
    order = sorted(entropies, key=lambda head: (entropies[head], head))
    curves: dict[Head, Points] = {head: [] for head in entropies}
    for k in (1, 3, 10, 30, 70):
        for head, value in slow_means(sample.mass(), "c_mid", k).items():
            curves[head].append((k, value))
    for place in (0.02, 0.10, 0.25, 0.75, 0.90, 0.98):
        assert_drawn(axis, curves[order[round(place * 19)]])
    at_10 = [curve[2][1] for curve in curves.values()]
    of_all = points[(points["family"] == "all") & (points["k"] == 10)]
    np.testing.assert_allclose(of_all[["low", "y", "high"]].iloc[0], np.quantile(at_10, (0.25, 0.5, 0.75)))
    assert sorted({line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == ":"}) == [1, 21]
    assert "$K$ of the study: 1, 21" in axis.get_legend_handles_labels()[1]


# ---- calibration -----------------------------------------------------------------------------------------------------


def check_bins(panel: pd.DataFrame, values: Sequence[float]) -> None:
    """Every value is counted once, in its bin or, outside of all, in the outermost one."""
    low, high = panel["low"].tolist(), panel["high"].tolist()
    assert low[1:] == high[:-1] and 0 in low and all(a < b for a, b in zip(low, high, strict=True)) and len(low) < 200
    inside, beyond = [0] * len(low), [0] * len(low)
    for value in values:
        if not low[0] <= value <= high[-1]:
            beyond[0 if value < low[0] else -1] += 1
        else:
            inside[max(i for i in range(len(low)) if low[i] <= value)] += 1
    np.testing.assert_allclose(panel["share"], np.array(inside) / len(values))
    np.testing.assert_allclose(panel["beyond"], np.array(beyond) / len(values), atol=1e-15)
    facts = panel.iloc[0]
    expected = np.mean(values), np.median(values), np.mean(np.less(values, 0)), np.mean(np.greater(values, 0))
    np.testing.assert_allclose([facts[name] for name in ("mean", "median", "below", "above")], expected, rtol=1e-9)


def slow_values(kind: str, frame: pd.DataFrame) -> list[float]:
    """Errors of the rows of K = 21 that have one, or differences of the heads."""
    if kind == "fullsub_nosub_delta":
        sub, nosub = slow_means(frame, "e_sub", 21), slow_means(frame, "e_nosub", 21)
        return [sub[head] - nosub[head] for head in sub]
    rows = [row for row in frame.to_dict("records") if row["k"] == 21]
    errors = [float(row["log_z_hat"]) - float(row["log_z_true"]) for row in rows]
    return [value for value in errors if math.isfinite(value)]


@pytest.mark.parametrize("kind", ["logz_calibration", "fullsub_nosub_delta"])
def test_histograms_count_every_row_or_head_and_are_drawn(kind: str, tmp_path: Path) -> None:
    show, files = files_of(kind, tmp_path)
    frames = [pd.read_parquet(path) for path in files]
    clamped, empty = np.flatnonzero(frames[0]["k"] == 21)[:2]
    frames[0].loc[clamped, "log_z_hat"] = frames[0].loc[empty, "log_z_true"] = -np.inf
    parquet(files[0], frames[0])
    points = FIGURES[kind].points(show, files)
    figure = FIGURES[kind].draw(show, points)
    panels = points.groupby(["corpus", "length"], sort=False)
    for axis, frame, (place, panel) in zip(figure.axes, frames, panels, strict=True):
        values = slow_values(kind, frame)
        assert place == (frame["corpus"].iloc[0], frame["length"].iloc[0])
        check_bins(panel, values)
        bars = {(round(bar.get_x(), 9), round(bar.get_height(), 9)) for bar in axis.patches}
        shown = list(zip(panel["low"], panel["share"], strict=True))
        assert bars >= {(round(low, 9), round(share, 9)) for low, share in shown}
        assert axis.get_title().startswith(f"{place[0]}, {place[1]}, $K = 21$")
        assert (
            np.mean(values) in [line.get_xdata()[0] for line in axis.lines]
            or abs(np.mean(values)) > abs(panel["high"]).max()
        )
    if kind == "logz_calibration":
        assert (
            points["left_out"].unique().tolist() == [2, 0] and "\n2 of 120 rows left out" in figure.axes[0].get_title()
        )
        reaches = [bulk(np.array(slow_values(kind, frame))) for frame in frames]
        assert points["low"].min() <= min(low for low, _ in reaches) and points["beyond"].max() > 0
    else:
        assert points["beyond"].max() == 0


@pytest.mark.parametrize("values", [[0.0], [2.0], [-1e-9], [1e-9, 5.0], [-40.0, 1e30], [1.0] * 9 + [-300.0], [-0.0, 0]])
def test_awkward_values_are_drawn(tmp_path: Path, values: list[float]) -> None:
    frame = sample.heads(1, len(values), packs=1, queries=1)
    frame = frame[frame["k"] == 21].sort_values("head")
    rows = {"log_z_hat": values, "log_z_true": 0.0, "e_sub": values, "e_nosub": 0.0}
    file = parquet(tmp_path / "heads.parquet", frame.assign(**rows))
    for kind in ("logz_calibration", "fullsub_nosub_delta"):
        points = FIGURES[kind].points(spec(kind), [file])
        check_bins(points, values)
        FIGURES[kind].draw(spec(kind), points).draw_without_rendering()


def test_nothing_subtracted_and_nothing_left(tmp_path: Path) -> None:
    file = parquet(tmp_path / "heads.parquet", sample.heads(k=0, log_z_hat=-np.inf))
    with pytest.raises(ValueError, match=f"^{file}: K is 0 at 4%, where nothing is subtracted; set a larger"):
        FIGURES["fullsub_nosub_delta"].points(spec("fullsub_nosub_delta"), [file])
    points = FIGURES["logz_calibration"].points(spec("logz_calibration"), [file])
    (axis,) = FIGURES["logz_calibration"].draw(spec("logz_calibration"), points).axes
    assert axis.get_title().endswith("no row is left\n120 of 120 rows left out")


# ---- kernels ---------------------------------------------------------------------------------------------------------


def slow_keys(frame: pd.DataFrame, maps: str) -> dict[int, list[tuple[float, float, bool]]]:
    """By query: log kernel and log score less the log of the mid-region's mass, and whether retrieved."""
    rows: dict[int, list[tuple[float, float, bool]]] = {}
    for row in frame[frame["maps"] == maps].to_dict("records"):
        entry = (float(row["log_kernel"]), float(row["log_phi"]), bool(row["retrieved"]))
        rows.setdefault(row["query"], []).append(entry)
    totals = {query: math.log(sum(math.exp(kernel) for kernel, _, _ in each)) for query, each in rows.items()}
    return {query: [(a - totals[query], b - totals[query], c) for a, b, c in each] for query, each in rows.items()}


def test_kernels_of_one_head_against_a_slow_reading(tmp_path: Path) -> None:
    points, figure = points_of("kernel_sanity", tmp_path)
    scores, ranks, errors = figure.axes
    keys = slow_keys(sample.kernels(), "1k")
    assert_same(marks(scores), [(x, y) for each in keys.values() for x, y, _ in each])
    for series, kind in (("retrieved", True), ("unretrieved", False)):
        chosen = points[(points["panel"] == "scores") & (points["series"] == series)]
        expected = [(x, y) for each in keys.values() for x, y, retrieved in each if retrieved is kind]
        assert_same(zip(chosen["x"], chosen["y"], strict=True), expected)
        assert set(chosen["total"]) == {len(expected)} and not chosen["outside"].any()
    by_rank = [sorted(each, reverse=True) for each in keys.values()]
    of_exact = points[(points["panel"] == "ranks") & (points["series"] == "exact")]
    first = 1
    for row in of_exact.sort_values("x").itertuples():
        last = round(row.x**2 / first)
        inside = [each[rank - 1][0] for each in by_rank for rank in range(first, last + 1)]
        np.testing.assert_allclose((row.low, row.y, row.high), np.quantile(inside, (0.25, 0.5, 0.75)), rtol=1e-9)
        first = last + 1
    assert first == 41 and ranks.get_xscale() == "log"
    assert_drawn(ranks, of_exact[["x", "y"]])
    rows = [row for row in sample.heads().to_dict("records") if (row["layer"], row["head"], row["k"]) == (1, 2, 21)]
    for row in rows:
        assert_drawn(errors, [(0, row["e_topk"]), (1, row["e_sub"])])
    mean = [np.mean([row[name] for row in rows]) for name in ("e_topk", "e_sub")]
    assert_drawn(errors, list(enumerate(mean)))
    assert [label.get_text().split("\n")[1] for label in errors.get_xticklabels()] == [f"{each:.3f}" for each in mean]


def test_many_keys_are_thinned_evenly_and_far_ones_put_on_the_border(tmp_path: Path) -> None:
    frame = sample.kernels(("1k",), queries=1, keys=2 * SHOWN + 21)
    order = frame.sort_values("log_kernel").index
    frame.loc[order[0], "log_kernel"], frame.loc[order[100], "log_phi"], frame.loc[order[-50], "log_phi"] = (
        -1e3,
        -1e4,
        1e4,
    )
    files = [parquet(tmp_path / "kernels.parquet", frame), parquet(tmp_path / "heads.parquet", sample.heads())]
    show = spec("kernel_sanity", maps=("1k",))
    points = FIGURES["kernel_sanity"].points(show, files)
    shown = points[(points["panel"] == "scores") & (points["series"] == "unretrieved")]
    assert len(shown) == SHOWN and set(shown["total"]) == {2 * SHOWN} and set(shown["left_out"]) == {3}
    keys = sorted(x for x, _, retrieved in slow_keys(frame, "1k")[0] if not retrieved)
    for start in range(0, SHOWN, SHOWN // 4):  # a quarter of the shown ones for a quarter of all
        low, high = keys[2 * start], keys[2 * start + SHOWN // 2 - 1]
        assert abs(shown["x"].between(low - 1e-9, high + 1e-9).sum() - SHOWN // 4) <= 2
    figure = FIGURES["kernel_sanity"].draw(show, points)
    assert "4,000 of 8,000 unretrieved keys; 3 of all are outside" in figure.get_suptitle()


def slow_ranks(values: Sequence[float]) -> list[float]:
    """Mean ranks, counted from 1."""
    return [sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values]


def slow_spearman(frame: pd.DataFrame) -> float:
    """Mean over queries, without those of fewer than two unretrieved keys or of one value alone."""
    correlations = []
    for query in set(frame["query"]):
        rows = frame[(frame["query"] == query) & ~frame["retrieved"]]
        x, y = (slow_ranks(rows[name].tolist()) for name in ("log_kernel", "log_phi"))
        if len(set(x)) > 1 and len(set(y)) > 1:
            correlations.append(np.corrcoef(x, y)[0, 1])
    return sum(correlations) / len(correlations)


def test_fidelity_of_variants_is_over_the_unretrieved_keys_within_queries(tmp_path: Path) -> None:
    frame = sample.kernels(queries=5)
    frame["log_kernel"] = frame["log_kernel"].round(1) + 9 * frame["query"]  # equal ranks, and levels that do not count
    frame["log_phi"] += 9 * frame["query"]
    frame.loc[frame["query"] == 3, "retrieved"] = frame["position"] > 4  # one key is left
    frame.loc[(frame["query"] == 4) & ~frame["retrieved"], "log_phi"] = 38.0
    show, file = spec("ablation_kernel_fidelity", maps=sample.VARIANTS), parquet(tmp_path / "kernels.parquet", frame)
    points = FIGURES[show.label].points(show, [file])
    figure = FIGURES[show.label].draw(show, points)
    bottom, top = points["bottom"].iloc[0], points["top"].iloc[0]
    low, high = bulk(frame[~frame["retrieved"]]["log_kernel"].to_numpy(float))
    for number, (axis, maps) in enumerate(zip(figure.axes, sample.VARIANTS[1:], strict=True)):
        expected = []
        for label in ("1k", maps):
            rest = frame[(frame["maps"] == label) & ~frame["retrieved"]]
            x, y = rest["log_kernel"].to_numpy(float), rest["log_phi"].to_numpy(float)
            facts = points[points["maps"] == label].iloc[0]
            assert facts["rms"] == pytest.approx(math.sqrt(np.mean((y - x) ** 2)), rel=1e-9)
            assert facts["spearman"] == pytest.approx(slow_spearman(frame[frame["maps"] == label]), rel=1e-9)
            assert facts["left_out"] == np.sum((x < low) | (x > high) | (y < bottom) | (y > top))
            expected += zip(x.clip(low, high), y.clip(bottom, top), strict=True)
        assert_same(marks(axis), expected)
        titles = ("Hedgehog-style map", "LoLCATs-style loss", "KL only", "Auxiliary only")
        assert axis.get_title().startswith(f"({'abcd'[number]}) {titles[number]}\nown: RMS ")


def test_all_keys_retrieved_or_scores_that_do_not_vary(tmp_path: Path) -> None:
    show = spec("ablation_kernel_fidelity", maps=sample.VARIANTS[:2])
    frame = sample.kernels(sample.VARIANTS[:2])
    frame.loc[frame["maps"] == sample.VARIANTS[1], "log_phi"] = 4.0
    file = parquet(tmp_path / "kernels.parquet", frame)
    (axis,) = FIGURES[show.label].draw(show, FIGURES[show.label].points(show, [file])).axes
    assert axis.get_title().count("Spearman undefined") == 1
    with pytest.raises(ValueError, match=f"^{file}: every key is retrieved; set a smaller diagnostics.budget"):
        FIGURES[show.label].points(show, [parquet(file, sample.kernels(k=40))])


# ---- claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entropies", [1000, 5, 1])
@pytest.mark.parametrize(("layers", "heads"), [(2, 2), (1, 6), (13, 21)])
def test_quartiles_are_those_of_the_claims(tmp_path: Path, layers: int, heads: int, entropies: int) -> None:
    """Also where heads tie: what the figure shows of a quartile is what the claims compute of it."""
    about = {"maps": "1k", "study": "mini", "model_id": "org/LM", "revision": "r1", "weights": "pretrained"}
    others = dict.fromkeys(("e_exact_sub", "e_exact_nosub", "residual_share", "c_mid"), 0.5)
    frame = sample.heads(layers, heads, packs=3, **about, **others, phi_sha="ab", clamped=False)
    rows = frame[["pack", "layer", "head", "query"]].drop_duplicates()
    rows["h_mid"] = np.random.default_rng().integers(0, entropies, len(rows)) / np.float32(entropies)
    frame = frame.drop(columns="h_mid").merge(rows)
    mass = frame[["backbone", "corpus", "length", "layer", "head", "pack"]].drop_duplicates().assign(k=1, c_mid=0.5)
    frame.to_parquet(tmp_path / "heads.parquet")
    mass.to_parquet(tmp_path / "mass.parquet")
    (setting,) = read_settings([tmp_path / "heads.parquet"], [tmp_path / "mass.parquet"])
    points = FIGURES["quartile_error"].points(spec("quartile_error"), [tmp_path / "heads.parquet"])
    for row in points.itertuples():
        quartile = setting.quartiles[row.quartile]
        assert row.heads == len(quartile)
        for name in ("e_topk", "e_sub"):
            expected = setting.cells[row.budget_percent][name][quartile].mean()
            assert getattr(row, name) == pytest.approx(expected, rel=1e-9)
