"""Figures by heads show the points that a slow reading of the rows gives, whole and in reproducible bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from sample_results import diagnostics
from tests.records import recorded

from residual_mass.paper.figures import FIGURES
from residual_mass.paper.figures.heads import (
    draw_entropy_gain,
    draw_entropy_heatmap,
    draw_fixedk_breakdown,
    draw_quartile_error,
    entropy_gain_points,
    entropy_heatmap_points,
    fixedk_breakdown_points,
    quartile_error_points,
)
from residual_mass.paper.figures.render import run
from residual_mass.paper.figures.style import paper_style
from residual_mass.paper.figures.summaries import binned_medians
from residual_mass.study.specs import FigureSpec

KINDS = ("entropy_gain", "entropy_heatmap", "fixedk_breakdown", "quartile_error")
Head = tuple[int, int]


def spec(label: str, budget: float | None = 4.0) -> FigureSpec:
    return FigureSpec(label=label, title="Costs $5 & more_", budget_percent=budget)


def write(path: Path, frame: pd.DataFrame) -> Path:
    frame.to_parquet(path)
    return recorded(path)


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return write(tmp_path / "heads.parquet", diagnostics(layers=3, heads=5))


def slow_means(path: Path, column: str, k: int | None = None) -> dict[Head, float]:
    """Mean of a column over the packs and queries of every (layer, head) at `k`, one row at a time."""
    seen: dict[Head, list[float]] = {}
    for _, row in pd.read_parquet(path).iterrows():
        if k is None or row["k"] == k:
            seen.setdefault((row["layer"], row["head"]), []).append(float(row[column]))
    return {head: sum(values) / len(values) for head, values in seen.items()}


def slow_gains(path: Path, k: int) -> dict[Head, float]:
    without, completed = slow_means(path, "e_topk", k), slow_means(path, "e_sub", k)
    return {head: without[head] - completed[head] for head in without}


def by_head(points: pd.DataFrame, column: str) -> dict[Head, float]:
    assert not points.duplicated(["layer", "head"]).any()
    return {(int(row["layer"]), int(row["head"])): row[column] for _, row in points.iterrows()}


def shown(axis: Axes) -> list[tuple[float, float]]:
    """All marks of a panel's scatters, in ascending order."""
    scatters = (each for each in axis.collections if isinstance(each, PathCollection))
    return sorted((float(x), float(y)) for scatter in scatters for x, y in scatter.get_offsets())


def pairs(x: dict[Head, float], y: dict[Head, float]) -> list[tuple[float, float]]:
    return sorted((x[head], y[head]) for head in x)


# ---- points and what is drawn of them --------------------------------------------------------------------------------


def test_gains_are_means_over_packs_and_queries(tmp_path: Path) -> None:
    small = write(tmp_path / "small.parquet", diagnostics())
    large = write(tmp_path / "large.parquet", diagnostics(layers=3, heads=4, packs=1, backbone="large"))
    points = entropy_gain_points(spec("entropy_gain"), [small, large])
    assert list(points["backbone"].unique()) == ["smol", "large"]
    assert len(points) == 2 * (2 * 3 + 3 * 4)
    for (backbone, k), of_panel in points.groupby(["backbone", "k"]):
        path = {"smol": small, "large": large}[backbone]
        assert by_head(of_panel, "gain") == pytest.approx(slow_gains(path, k), rel=1e-9)
        assert by_head(of_panel, "h_mid") == pytest.approx(slow_means(path, "h_mid", k), rel=1e-9)


def test_every_panel_of_gains_shows_every_head_and_its_sign(tmp_path: Path) -> None:
    frames = {"smol": diagnostics(), "lar$ge": diagnostics(layers=3, heads=4, packs=1, backbone="lar$ge")}
    data = [write(tmp_path / f"{name}.parquet", frame) for name, frame in frames.items()]
    figure = draw_entropy_gain(spec("entropy_gain"), entropy_gain_points(spec("entropy_gain"), data))
    panels = iter(figure.axes)
    for path, count in zip(data, (6, 12), strict=True):
        for k, budget in ((1, 2), (21, 4)):
            axis = next(panels)
            expected = pairs(slow_means(path, "h_mid", k), slow_gains(path, k))
            np.testing.assert_allclose(shown(axis), expected, rtol=1e-9)
            helped, hurt = (np.asarray(each.get_offsets()) for each in axis.collections)
            assert (helped[:, 1] > 0).all() and (hurt[:, 1] <= 0).all()
            title = f"$K = {k}$ ({budget}%)\n{len(helped) / count:.1%} of {count} heads gain"
            assert axis.get_title() == title
    assert next(panels, None) is None
    assert [figure.axes[row].get_ylabel() for row in (0, 2)] == ["smol", r"lar\$ge"]
    assert len({axis.get_ylim() for axis in figure.axes}) == 1


def test_backbones_have_the_titles_of_the_spec(tmp_path: Path) -> None:
    data = [write(tmp_path / f"{name}.parquet", diagnostics(backbone=name)) for name in ("large", "smol", "other")]
    named = replace(spec("entropy_gain"), backbone_titles={"smol": "Smol $1", "large": "Large-2", "absent": "x"})
    figure = draw_entropy_gain(named, entropy_gain_points(named, data))
    assert [axis.get_ylabel() for axis in figure.axes[::2]] == ["Large-2", r"Smol \$1", "other"]


def test_one_backbone_is_named_by_the_title_alone(heads: Path) -> None:
    figure = draw_entropy_gain(spec("entropy_gain"), entropy_gain_points(spec("entropy_gain"), [heads]))
    assert [axis.get_ylabel() for axis in figure.axes][1:] == [""]
    assert figure.axes[0].get_ylabel().startswith("gain $e") and figure.get_supylabel() == ""
    assert figure.get_suptitle() == r"Costs \$5 & more_"


def test_the_map_of_entropies_has_layers_upwards_and_heads_to_the_right(heads: Path) -> None:
    points = entropy_heatmap_points(spec("entropy_heatmap"), [heads])
    assert by_head(points, "h_mid") == pytest.approx(slow_means(heads, "h_mid", 21), rel=1e-9)
    assert by_head(points, "residual_share_hat") == pytest.approx(slow_means(heads, "residual_share_hat", 21), rel=1e-9)
    absent = points.query("not (layer == 1 and head == 2)")
    figure = draw_entropy_heatmap(spec("entropy_heatmap"), absent)
    entropies, shares, _ = figure.axes
    (image,) = entropies.images
    assert image.origin == "lower" and entropies.get_ylabel().startswith("layer")
    assert [*image.get_extent()] == [-0.5, 4.5, -0.5, 2.5]
    grid = image.get_array()
    expected = by_head(points, "h_mid")
    for layer, head in expected:
        assert grid.mask[layer, head] if (layer, head) == (1, 2) else grid[layer, head] == expected[layer, head]
    low, high = image.get_clim()
    assert low <= grid.min() and grid.max() <= high
    without = {head: value for head, value in expected.items() if head != (1, 2)}
    np.testing.assert_allclose(shown(shares), pairs(without, by_head(points, "residual_share_hat")))
    assert "$K = 21$ (4%)" in shares.get_title() and r"\rho_{\mathrm{res}} = " in shares.get_ylabel()


def slow_bins(x: Sequence[float], y: Sequence[float], width: float) -> list[tuple[float, float]]:
    """(median x, median y) of the row's bin, for every row."""
    return [
        tuple(np.median([pair for pair in zip(x, y, strict=True) if pair[0] // width == each // width], axis=0))
        for each in x
    ]


def test_medians_are_of_the_rows_in_the_same_bin() -> None:
    generator = np.random.default_rng()
    frame = pd.DataFrame({"x": [0.0, 1.0, 0.35, *generator.random(40)], "y": generator.normal(size=43)})
    medians = binned_medians(frame.sample(frac=1), "x", ["y"], 0.125)
    np.testing.assert_allclose(medians.loc[frame.index], slow_bins(frame["x"], frame["y"], 0.125))


def test_the_breakdown_shows_errors_gains_and_their_medians(heads: Path) -> None:
    points = fixedk_breakdown_points(spec("fixedk_breakdown_1b"), [heads])
    entropy = slow_means(heads, "h_mid", 21)
    expected = {name: slow_means(heads, name, 21) for name in ("e_topk", "e_sub")} | {"gain": slow_gains(heads, 21)}
    figure = draw_fixedk_breakdown(spec("fixedk_breakdown_1b"), points)
    assert figure.get_suptitle() == r"Costs \$5 & more_, $K = 21$ (4%)"
    order = list(entropy)
    for axis, (name, values) in zip(figure.axes, expected.items(), strict=True):
        assert by_head(points, name) == pytest.approx(values, rel=1e-9)
        np.testing.assert_allclose(shown(axis), pairs(entropy, values), rtol=1e-9)
        helped, _ = axis.collections
        gaining = {head: value for head, value in entropy.items() if expected["gain"][head] > 0}
        assert sorted(helped.get_offsets()[:, 0]) == pytest.approx(sorted(gaining.values()))
        bins = slow_bins([entropy[head] for head in order], [values[head] for head in order], 0.1)
        (medians,) = (line for line in axis.lines if line.get_marker() == "D")
        np.testing.assert_allclose(medians.get_xydata(), sorted(set(bins)))
    without, completed, gains = figure.axes
    assert without.get_ylim() == completed.get_ylim()
    assert any(set(line.get_ydata()) == {0} for line in gains.lines)


def slow_quartile(values: list[float], share: float) -> float:
    """Linear between the two nearest of the sorted values."""
    ordered, place = sorted(values), share * (len(values) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(values) - 1)] - ordered[low])


@pytest.mark.parametrize("tied", [False, True])
def test_quartile_errors_are_means_over_the_heads_of_a_quartile(tmp_path: Path, tied: bool) -> None:
    frame = diagnostics(layers=3, heads=5)
    heads = write(tmp_path / "heads.parquet", frame.assign(h_mid=np.float32(0.5)) if tied else frame)
    points = quartile_error_points(spec("quartile_error"), [heads])
    entropy = slow_means(heads, "h_mid")
    order = sorted(entropy, key=lambda head: (entropy[head], head))  # equal entropies by layer and head
    quartiles = [[head for place, head in enumerate(order) if place * 4 // 15 == part] for part in range(4)]
    assert [len(part) for part in quartiles] == [4, 4, 4, 3]
    assert len(points) == 4 * 2
    for _, row in points.iterrows():
        chosen = quartiles[int(row["quartile"])]
        assert row["heads"] == len(chosen)
        assert row["h_mid_low"] == pytest.approx(entropy[chosen[0]])
        assert row["h_mid_high"] == pytest.approx(entropy[chosen[-1]])
        for name in ("e_topk", "e_sub"):
            means = slow_means(heads, name, row["k"])
            errors = [means[head] for head in chosen]
            assert row[name] == pytest.approx(sum(errors) / len(errors))
            assert row[f"{name}_low"] == pytest.approx(slow_quartile(errors, 0.25))
            assert row[f"{name}_high"] == pytest.approx(slow_quartile(errors, 0.75))


def test_quartile_panels_show_means_and_bands_from_low_to_high(heads: Path) -> None:
    points = quartile_error_points(spec("quartile_error"), [heads])
    figure = draw_quartile_error(spec("quartile_error"), points)
    for letter, axis, (_, panel) in zip("abcd", figure.axes, points.groupby("quartile"), strict=True):
        assert axis.get_title().startswith(f"({letter}) ")
        assert axis.get_title().endswith(f" {panel['h_mid_low'].iloc[0]:.2f} to {panel['h_mid_high'].iloc[0]:.2f}")
        assert [label.get_text() for label in axis.get_xticklabels()] == ["1\n2%", "21\n4%"]
        drawn = [tuple(line.get_ydata()) for line in axis.lines]
        columns = [f"{name}{side}" for name in ("e_topk", "e_sub") for side in ("_low", "_high", "")]
        assert drawn == [tuple(panel[name]) for name in columns]
        for band, name in zip(axis.collections, ("e_topk", "e_sub"), strict=True):
            box = band.get_datalim(axis.transData)
            assert (box.y0, box.y1) == pytest.approx((panel[f"{name}_low"].min(), panel[f"{name}_high"].max()))
    assert len({axis.get_ylim() for axis in figure.axes}) == 1


# ---- awkward data ----------------------------------------------------------------------------------------------------


def rows_of(layers: int, heads: int, budgets: Sequence[tuple[int, float]], tail: float = 1.0) -> pd.DataFrame:
    """One query per head and budget, with errors whose logarithms have the standard deviation `tail`."""
    generator = np.random.default_rng(3)
    index = pd.MultiIndex.from_product([range(layers), range(heads), range(len(budgets))])
    frame = index.to_frame(index=False, name=["layer", "head", "budget"])
    frame[["k", "budget_percent"]] = pd.DataFrame(budgets).loc[frame.pop("budget")].to_numpy()
    for name in ("e_topk", "e_sub"):
        frame[name] = np.exp(generator.normal(-2, tail, len(frame)))
    frame["h_mid"], frame["residual_share_hat"] = generator.random((2, len(frame)))
    return frame.assign(pack=0, query=0, backbone="smol", corpus="wiki", length="64k")


BUDGETS = ((308, 0.5), (636, 1.0), (1291, 2.0), (2602, 4.0))
AWKWARD: dict[str, pd.DataFrame] = {
    "one head": rows_of(1, 1, BUDGETS[3:]),
    "three heads at one K": rows_of(3, 1, BUDGETS[3:]),
    "28 layers of 24 heads": rows_of(28, 24, BUDGETS),
    "heavy tails and K = 0 twice": rows_of(8, 9, ((0, 0.5), (0, 1.0), (1, 2.0), (21, 4.0)), tail=4.0),
    "six budgets": rows_of(4, 9, (*BUDGETS, (4000, 6.0), (5300, 8.0))),
    "no errors, entropy 1": rows_of(4, 9, BUDGETS).assign(e_topk=0.0, e_sub=0.0, h_mid=1.0, residual_share_hat=1.0),
    "small errors, entropy 0": rows_of(4, 9, BUDGETS).assign(
        e_topk=1e-7, e_sub=3e-7, h_mid=0.0, residual_share_hat=0.0
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_data_are_drawn_whole_and_without_overlap(tmp_path: Path, case: str) -> None:
    data = [write(tmp_path / "heads.parquet", AWKWARD[case])]
    for kind in KINDS:
        points_of, draw = FIGURES[kind].points, FIGURES[kind].draw
        with paper_style():
            figure = draw(spec(kind), points_of(spec(kind), data))
            figure.draw_without_rendering()
            check_marks_are_whole(figure)
            check_titles_are_apart(figure)
            if kind == "entropy_heatmap":
                check_heads_are_whole_numbers(figure.axes[0])


def check_marks_are_whole(figure: Figure) -> None:
    """All lie within their panel, at a distance from its edges."""
    for axis in figure.axes:
        on_lines = (xy for line in axis.lines if line.get_marker() != "None" for xy in line.get_xydata())
        for mark in [*shown(axis), *on_lines]:
            place = (axis.transData - axis.transAxes).transform(mark)
            assert place.min() > 0.02 and place.max() < 0.98


def check_heads_are_whole_numbers(axis: Axes) -> None:
    for side in (axis.xaxis, axis.yaxis):
        low, high = side.get_view_interval()
        ticks = [tick for tick in side.get_ticklocs() if low <= tick <= high]
        assert ticks and all(tick == round(tick) for tick in ticks)


def check_titles_are_apart(figure: Figure) -> None:
    """Panel titles and tick labels of the x axes do not touch their neighbours or leave the page."""
    titles = [axis.title.get_window_extent() for axis in figure.axes]
    ticks = [box for axis in figure.axes for box in tick_boxes(axis)]
    assert ticks
    for boxes in (titles, ticks):
        boxes = [box for box in boxes if box.width > 0]
        assert all(0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
        for number, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:number])


def tick_boxes(axis: Axes) -> list[Bbox]:
    """Of the labels below a panel."""
    if not axis.xaxis.get_tick_params().get("labelbottom", True):
        return []
    left, right = axis.get_xlim()
    return [tick.label1.get_window_extent() for tick in axis.xaxis.get_major_ticks() if left <= tick.get_loc() <= right]


DRAW_ALL = f"""
import sys, pathlib
from residual_mass.paper.figures.render import run
from residual_mass.study.specs import FigureSpec
data, out = map(pathlib.Path, sys.argv[1:])
for kind in {KINDS}:
    spec = FigureSpec(label=kind, title="Costs $5 & more_", budget_percent=4.0)
    run(spec, [data], out / (kind + ".pdf"), out / (kind + ".png"))
"""


@pytest.mark.slow
def test_two_processes_draw_the_same_bytes(heads: Path, tmp_path: Path) -> None:
    (here := tmp_path / "here").mkdir()
    (there := tmp_path / "there").mkdir()
    subprocess.run([sys.executable, "-c", DRAW_ALL, heads, there], check=True)
    for kind in KINDS:
        run(spec(kind), [heads], here / f"{kind}.pdf", here / f"{kind}.png")
        pdf, png = ((here / f"{kind}.{ending}").read_bytes() for ending in ("pdf", "png"))
        assert pdf == (there / f"{kind}.pdf").read_bytes() and png == (there / f"{kind}.png").read_bytes()
        assert pdf.startswith(b"%PDF") and b"CreationDate" not in pdf
        assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20]) == 1100  # 5.5 in at 200 dpi


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_what_was_recorded_is_refused_in_one_line(heads: Path, tmp_path: Path) -> None:
    heads.write_bytes(heads.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"^{heads}: is not what {heads.name}.meta.json recorded: .*; delete it and"):
        run(spec(KINDS[0]), [heads], tmp_path / "f.pdf", tmp_path / "f.png")
    assert not list(tmp_path.glob("*.p[dn][fg]"))


@pytest.mark.parametrize("kind", ["entropy_heatmap", "fixedk_breakdown"])
def test_an_unknown_budget_is_refused(heads: Path, kind: str) -> None:
    points_of = FIGURES[kind].points
    with pytest.raises(ValueError, match=f"^{heads}: no rows at a budget of 1%; spec.budget_percent can be 2, 4$"):
        points_of(spec(kind, 1.0), [heads])
    with pytest.raises(ValueError, match=f"^{heads}: .*; set spec.budget_percent$"):
        points_of(spec(kind, None), [heads])
