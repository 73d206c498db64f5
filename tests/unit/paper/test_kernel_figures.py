"""Figures of kernels show what a slow reading of the rows gives."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from sample_results import diagnostics

from residual_mass.paper.figures.kernels import (
    SHOWN,
    ablation_kernel_fidelity_points,
    draw_ablation_kernel_fidelity,
    draw_kernel_sanity,
    kernel_sanity_points,
)
from residual_mass.paper.figures.style import BLUE, VERMILLION, paper_style, save
from residual_mass.paper.figures.summaries import bulk
from residual_mass.study.specs import FigureSpec

pytestmark = pytest.mark.filterwarnings("error")

MAPS = ("1k", "1k-hedgehog_map", "1k-lolcats_loss", "1k-kl_only", "1k-aux_only")
SANITY = FigureSpec(label="kernel_sanity", title="A $5 model", budget_percent=4.0, maps=("1k",))
FIDELITY = FigureSpec(label="ablation_kernel_fidelity", title="A model", budget_percent=4.0, maps=MAPS)
HEAD = (1, 2)
"""Layer and head of the kernels."""


def kernels(
    maps: tuple[str, ...] = MAPS, queries: int = 3, keys: int = 40, k: int = 21, **facts: object
) -> pd.DataFrame:
    """Shuffled rows of kernels that all maps share and of scores that are the further off the later the maps."""
    generator = np.random.default_rng(3)
    index = pd.MultiIndex.from_product([range(queries), range(4, 4 + keys)], names=["query", "position"])
    base = index.to_frame(index=False).assign(log_kernel=generator.normal(2, 1.5, len(index)).astype("float32"))
    order = base.groupby("query")["log_kernel"].rank(ascending=False, method="first")
    base = base.assign(retrieved=order <= k, layer=HEAD[0], head=HEAD[1], budget_percent=4.0, k=k)
    base = base.assign(**{"backbone": "smol", "corpus": "wiki", "length": "1k"} | facts)
    frames = []
    for number, label in enumerate(maps):
        noise = generator.normal(number**2, 0.7, len(base)).astype("float32")
        frames.append(base.assign(maps=label, log_phi=(0.8 * base["log_kernel"] + noise).astype("float32")))
    frame = pd.concat(frames).sample(frac=1, random_state=5, ignore_index=True)
    return frame.astype(dict.fromkeys(("maps", "backbone", "corpus", "length"), "category"))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Files of kernels and heads of one text."""
    paths = {name: tmp_path / f"{name}_smol_wiki_1k.parquet" for name in ("kernels", "heads")}
    kernels().to_parquet(paths["kernels"])
    diagnostics(layers=4, heads=5).to_parquet(paths["heads"])
    return paths


def clouds(axis: Axes) -> dict[str, list[tuple[float, float]]]:
    """Points of a panel by colour, wherever they are."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for cloud in axis.collections:
        if len(cloud.get_offsets()) and len(cloud.get_facecolor()):
            colour = to_hex(cloud.get_facecolor()[0]).upper()
            seen.setdefault(colour, []).extend(map(tuple, np.asarray(cloud.get_offsets()).tolist()))
    return seen


def assert_same_points(shown: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    assert len(shown) == len(expected) > 0
    np.testing.assert_allclose(sorted(shown), sorted(expected), rtol=1e-6, atol=1e-9)


# ---- scores of the main maps -----------------------------------------------------------------------------------------


def slow_keys(frame: pd.DataFrame, maps: str) -> dict[int, list[tuple[float, float, bool]]]:
    """By query: log kernel and log score less the log of the mid-region's mass, and whether retrieved."""
    rows: dict[int, list[tuple[float, float, bool]]] = {}
    for _, row in frame[frame["maps"] == maps].iterrows():
        entry = (float(row["log_kernel"]), float(row["log_phi"]), bool(row["retrieved"]))
        rows.setdefault(row["query"], []).append(entry)
    keys = {}
    for query, entries in rows.items():
        total = math.log(sum(math.exp(kernel) for kernel, _, _ in entries))
        keys[query] = [(kernel - total, score - total, retrieved) for kernel, score, retrieved in entries]
    return keys


def test_scores_are_relative_to_the_mass_of_the_mid_region(files: dict[str, Path]) -> None:
    points = kernel_sanity_points(SANITY, [files["kernels"], files["heads"]])
    keys = [key for entries in slow_keys(kernels(), "1k").values() for key in entries]
    figure = draw_kernel_sanity(SANITY, points)
    seen = clouds(figure.axes[0])
    for series, kind, colour in (("retrieved", True, VERMILLION), ("unretrieved", False, BLUE)):
        expected = [(x, y) for x, y, retrieved in keys if retrieved is kind]
        chosen = points[(points["panel"] == "scores") & (points["series"] == series)]
        assert set(chosen["total"]) == {len(expected)} and not chosen["outside"].any()
        assert_same_points(list(zip(chosen["x"], chosen["y"], strict=True)), expected)
        assert_same_points(seen[colour], expected)
    low, high = figure.axes[0].get_xlim()
    assert figure.axes[0].get_ylim() == (low, high) and all(low < value < high for x, y, _ in keys for value in (x, y))
    assert figure.get_suptitle().endswith("(a) shows 63 of 63 retrieved and 57 of 57 unretrieved keys")


def test_medians_are_over_queries_and_the_ranks_of_a_bin(files: dict[str, Path]) -> None:
    kernels(keys=400, queries=3).to_parquet(files["kernels"])
    points = kernel_sanity_points(SANITY, [files["kernels"], files["heads"]])
    ranks = points[points["panel"] == "ranks"]
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for entries in slow_keys(kernels(keys=400, queries=3), "1k").values():
        for rank, (kernel, score, _) in enumerate(sorted(entries, reverse=True), start=1):
            by_rank.setdefault(rank, []).append((kernel, score))
    first, seen = 1, 0
    exact, scores = (ranks[ranks["series"] == name].sort_values("x") for name in ("exact", "score"))
    for kernel, score in zip(exact.itertuples(), scores.itertuples(), strict=True):
        last = round(kernel.x**2 / first)
        inside = [pair for rank in range(first, last + 1) for pair in by_rank[rank]]
        for row, column in ((kernel, 0), (score, 1)):
            values = [pair[column] for pair in inside]
            np.testing.assert_allclose((row.low, row.y, row.high), np.quantile(values, (0.25, 0.5, 0.75)), rtol=1e-9)
        first, seen = last + 1, seen + len(inside)
    assert seen == 1200 and 20 < len(exact) <= 60
    assert exact["x"].tolist()[:3] == [1, 2, 3]  # the largest kernels have a bin each
    axis = draw_kernel_sanity(SANITY, points).axes[1]
    lines = {line.get_linestyle(): line.get_xydata() for line in axis.lines}
    np.testing.assert_allclose(lines["-"], exact[["x", "y"]])
    np.testing.assert_allclose(lines["--"], scores[["x", "y"]])
    assert set(lines[":"][:, 0]) == {21} and axis.get_xscale() == "log"
    for band, curve in zip(axis.collections, (exact, scores), strict=True):
        box = band.get_datalim(axis.transData)
        assert (box.y0, box.y1) == pytest.approx((curve["low"].min(), curve["high"].max()))


def test_errors_are_those_of_the_head_at_the_budget(files: dict[str, Path]) -> None:
    points = kernel_sanity_points(SANITY, [files["kernels"], files["heads"]])
    pairs = []
    for _, row in diagnostics(layers=4, heads=5).iterrows():
        if (row["layer"], row["head"]) == HEAD and row["budget_percent"] == 4:
            pairs.append((float(row["e_topk"]), float(row["e_sub"])))
    assert set(points["rows"]) == {len(pairs)} == {8}
    axis = draw_kernel_sanity(SANITY, points).axes[2]
    *rows, mean = [tuple(line.get_ydata()) for line in axis.lines]
    assert_same_points(rows, pairs)
    np.testing.assert_allclose(mean, np.mean(pairs, axis=0))
    labels = [label.get_text().split("\n")[1] for label in axis.get_xticklabels()]
    assert labels == [f"{value:.3f}" for value in mean] and axis.get_ylim()[0] == 0


def test_many_keys_are_thinned_evenly_and_far_ones_put_on_the_border(files: dict[str, Path]) -> None:
    frame = kernels(("1k",), queries=1, keys=2 * SHOWN + 21)
    order = frame.sort_values("log_kernel").index
    frame.loc[order[0], "log_kernel"] = -1e3
    frame.loc[order[100], "log_phi"] = -1e4
    frame.loc[order[-50], "log_phi"] = 1e4
    frame.to_parquet(files["kernels"])
    points = kernel_sanity_points(SANITY, [files["kernels"], files["heads"]])
    shown = points[(points["panel"] == "scores") & (points["series"] == "unretrieved")]
    assert len(shown) == SHOWN and set(shown["total"]) == {2 * SHOWN} and set(shown["left_out"]) == {3}
    keys = sorted(x for x, _, retrieved in slow_keys(frame, "1k")[0] if not retrieved)
    assert shown["x"].max() == pytest.approx(keys[-1]) and shown["x"].min() > -40
    for start in range(0, SHOWN, SHOWN // 4):  # a quarter of the shown ones for a quarter of all
        low, high = keys[2 * start], keys[2 * start + SHOWN // 2 - 1]
        assert abs(shown["x"].between(low - 1e-9, high + 1e-9).sum() - SHOWN // 4) <= 2
    figure = draw_kernel_sanity(SANITY, points)
    assert figure.get_suptitle().endswith(
        "(a) shows 21 of 21 retrieved and 4,000 of 8,000 unretrieved keys; 3 of all are outside"
    )
    with paper_style():
        save(figure, pdf := tmp(files) / "f.pdf", tmp(files) / "f.png")
    assert pdf.stat().st_size < 2**20
    assert "outside, on the border" in [text.get_text() for text in figure.legends[0].get_texts()]


def tmp(files: dict[str, Path]) -> Path:
    return files["kernels"].parent


def test_retrieved_keys_alone_have_no_unretrieved_ones(files: dict[str, Path]) -> None:
    kernels(k=40).to_parquet(files["kernels"])
    points = kernel_sanity_points(SANITY, [files["kernels"], files["heads"]])
    figure = draw_kernel_sanity(SANITY, points)
    figure.draw_without_rendering()
    assert list(clouds(figure.axes[0])) == [VERMILLION]
    assert "unretrieved" not in [text.get_text() for text in figure.legends[0].get_texts()]
    with pytest.raises(ValueError, match=f"^{files['kernels']}: every key is retrieved; give kernels of a smaller"):
        ablation_kernel_fidelity_points(FIDELITY, [files["kernels"]])


# ---- fidelity of the variants ----------------------------------------------------------------------------------------


def slow_ranks(values: list[float]) -> list[float]:
    """Mean ranks, counted from 1."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


def slow_correlation(x: list[float], y: list[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))


def slow_spearman(frame: pd.DataFrame, maps: str) -> float:
    """Mean over queries, without those of fewer than two unretrieved keys or of one value alone."""
    correlations = []
    for query in set(frame["query"]):
        x, y = zip(*slow_rest(frame[frame["query"] == query], maps), strict=True)
        if len(set(x)) > 1 and len(set(y)) > 1:
            correlations.append(slow_correlation(slow_ranks(list(x)), slow_ranks(list(y))))
    return sum(correlations) / len(correlations)


def slow_rest(frame: pd.DataFrame, maps: str) -> list[tuple[float, float]]:
    chosen = frame[frame["maps"] == maps]
    return [(float(row.log_kernel), float(row.log_phi)) for row in chosen.itertuples() if not row.retrieved]


def test_fidelity_is_over_the_unretrieved_keys(files: dict[str, Path]) -> None:
    frame = kernels()
    frame.loc[~frame["retrieved"], "log_kernel"] = frame["log_kernel"].round(1)  # equal ranks
    frame.to_parquet(files["kernels"])
    points = ablation_kernel_fidelity_points(FIDELITY, [files["kernels"]])
    assert list(dict.fromkeys(points["maps"])) == list(MAPS)
    figure = draw_ablation_kernel_fidelity(FIDELITY, points)
    titles = ["Hedgehog-style map", "LoLCATs-style loss", "KL only", "Auxiliary only"]
    own = slow_rest(frame, "1k")
    for number, (axis, maps) in enumerate(zip(figure.axes, MAPS[1:], strict=True)):
        bottom, top = points["bottom"].iloc[0], points["top"].iloc[0]
        low, high = bulk(np.array([x for x, _ in own]))
        lines = [f"({'abcd'[number]}) {titles[number]}"]
        for label, colour, name in (("1k", BLUE, "own"), (maps, VERMILLION, "variant")):
            rest = slow_rest(frame, label)
            rms = math.sqrt(sum((y - x) ** 2 for x, y in rest) / len(rest))
            spearman = slow_spearman(frame, label)
            outside = sum(not (low <= a <= high and bottom <= b <= top) for a, b in rest)
            facts = points[points["maps"] == label].iloc[0]
            assert (facts["rms"], facts["spearman"]) == pytest.approx((rms, spearman), rel=1e-9)
            assert (facts["total"], facts["left_out"]) == (len(rest), outside)
            placed = [(min(max(a, low), high), min(max(b, bottom), top)) for a, b in rest]
            assert_same_points(clouds(axis)[colour], placed)
            text = f"{name}: RMS {rms:.2f} nats, Spearman {spearman:.2f}"
            lines.append(f"{text}, {outside} outside" if outside else text)
        assert axis.get_title() == "\n".join(lines)
        assert axis.get_ylim()[0] < bottom and axis.get_ylim()[1] > top
    # The last variant is 16 nats off: the panels reach as far beyond the kernels as these reach, and no further.
    assert top == pytest.approx(high + (high - low)) and low - 1 < bottom <= low
    assert set(points.loc[points["maps"] == "1k-aux_only", "left_out"]) == {len(own)}
    shown = "57 of 57 unretrieved keys shown; Spearman: mean over queries"
    assert figure.get_suptitle() == f"A model, layer 1, head 2\n{shown}"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["own maps (1k)", "the panel's variant", "outside, on the border", "score = kernel"]


def test_rank_correlation_is_within_queries(files: dict[str, Path]) -> None:
    frame = kernels(MAPS[:2], queries=5)
    frame["log_kernel"] += 9 * frame["query"]
    frame["log_phi"] += 9 * frame["query"]
    frame.loc[frame["query"] == 3, "retrieved"] = frame["position"] > 4  # one key is left
    frame.loc[(frame["query"] == 4) & ~frame["retrieved"], "log_phi"] = 38.0
    frame.to_parquet(files["kernels"])
    spec = FigureSpec(label="ablation_kernel_fidelity", title="", maps=MAPS[:2])
    points = ablation_kernel_fidelity_points(spec, [files["kernels"]])
    for maps, facts in points.groupby("maps"):
        (spearman,) = facts["spearman"].unique()
        assert spearman == pytest.approx(slow_spearman(frame[frame["query"] < 3], maps), rel=1e-9)
        x, y = zip(*slow_rest(frame, maps), strict=True)
        assert slow_correlation(slow_ranks(list(x)), slow_ranks(list(y))) > spearman + 0.02  # pooled
        rms = math.sqrt(sum((b - a) ** 2 for a, b in zip(x, y, strict=True)) / len(x))
        assert facts["rms"].to_numpy() == pytest.approx(rms, rel=1e-9)  # of all keys


@pytest.mark.parametrize(("spearman", "text"), [(-0.004, "0.00"), (-0.25, "\N{MINUS SIGN}0.25"), (0.125, "0.12")])
def test_rank_correlations_have_a_minus_where_one_is_seen(files: dict[str, Path], spearman: float, text: str) -> None:
    points = ablation_kernel_fidelity_points(FIDELITY, [files["kernels"]]).assign(spearman=spearman)
    for axis in draw_ablation_kernel_fidelity(FIDELITY, points).axes:
        assert axis.get_title().count(f"Spearman {text}") == 2


def test_scores_that_do_not_vary_have_no_rank_correlation(files: dict[str, Path]) -> None:
    frame = kernels(MAPS[:2])
    frame.loc[frame["maps"] == MAPS[1], "log_phi"] = 4.0
    frame.to_parquet(files["kernels"])
    spec = FigureSpec(label="ablation_kernel_fidelity", title="", maps=MAPS[:2])
    points = ablation_kernel_fidelity_points(spec, [files["kernels"]])
    figure = draw_ablation_kernel_fidelity(spec, points)
    figure.draw_without_rendering()
    assert len(figure.axes) == 1 and figure.axes[0].get_title().count("Spearman undefined") == 1


@pytest.mark.parametrize(
    ("maps", "titles"),
    [
        (("1k", "1k-dphi_32", "1k-new_idea$"), [r"(a) $d_\phi{=}32$", r"(b) 1k-new_idea\$"]),
        (("1k", "1k-kl_only", "1k-aux_only", "2k"), ["(a) KL only", "(b) Auxiliary only", "(c) 2k"]),
    ],
)
def test_panels_name_their_variant(files: dict[str, Path], maps: tuple[str, ...], titles: list[str]) -> None:
    kernels(maps).to_parquet(files["kernels"])
    spec = FigureSpec(label="ablation_kernel_fidelity", title="", maps=maps)
    figure = draw_ablation_kernel_fidelity(spec, ablation_kernel_fidelity_points(spec, [files["kernels"]]))
    figure.draw_without_rendering()
    assert [axis.get_title().split("\n")[0] for axis in figure.axes] == titles


# ---- refusals --------------------------------------------------------------------------------------------------------


# ---- drawing ---------------------------------------------------------------------------------------------------------


def test_one_query_with_one_key_is_drawn(files: dict[str, Path]) -> None:
    diagnostics(layers=2, heads=3, packs=1, queries=1).to_parquet(files["heads"])
    for k, colour in ((0, BLUE), (1, VERMILLION)):
        kernels(queries=1, keys=1, k=k).to_parquet(files["kernels"])
        figure = draw_kernel_sanity(SANITY, kernel_sanity_points(SANITY, [files["kernels"], files["heads"]]))
        figure.draw_without_rendering()
        assert [len(points) for points in clouds(figure.axes[0]).values()] == [1]
        assert list(clouds(figure.axes[0])) == [colour]
    kernels(queries=1, keys=1, k=0).to_parquet(files["kernels"])
    figure = draw_ablation_kernel_fidelity(FIDELITY, ablation_kernel_fidelity_points(FIDELITY, [files["kernels"]]))
    figure.draw_without_rendering()
    assert all("Spearman undefined" in axis.get_title() for axis in figure.axes)


def test_the_order_of_rows_changes_no_byte(files: dict[str, Path]) -> None:
    shown: list[pd.DataFrame] = []
    made: list[tuple[bytes, bytes]] = []
    for seed in (1, 3):
        for name, frame in (("kernels", kernels()), ("heads", diagnostics(layers=4, heads=5))):
            frame.sample(frac=1, random_state=seed).to_parquet(files[name])
        points = kernel_sanity_points(SANITY, [files["kernels"], files["heads"]])
        shown.append(pd.concat([points, ablation_kernel_fidelity_points(FIDELITY, [files["kernels"]])]))
        with paper_style():
            save(draw_kernel_sanity(SANITY, points), pdf := tmp(files) / "f.pdf", png := tmp(files) / "f.png")
        made.append((pdf.read_bytes(), png.read_bytes()))
    pd.testing.assert_frame_equal(*shown, check_exact=True)
    assert made[0] == made[1] and made[0][0].startswith(b"%PDF")
