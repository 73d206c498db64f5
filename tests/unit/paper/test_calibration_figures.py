"""Histograms of the calibration count what a slow reading of the rows counts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from sample_results import diagnostics

from residual_mass.paper.figures.calibration import (
    draw_fullsub_nosub_delta,
    draw_logz_calibration,
    fullsub_nosub_delta_points,
    logz_calibration_points,
)
from residual_mass.paper.figures.style import BLUE, VERMILLION, paper_style, save
from residual_mass.paper.figures.summaries import bulk
from residual_mass.study.specs import FigureSpec

pytestmark = pytest.mark.filterwarnings("error")

LOGZ = FigureSpec(label="logz_calibration", title="A $5 model", budget_percent=4.0)
DELTA = FigureSpec(label="fullsub_nosub_delta", title="A model", budget_percent=4.0)
FOUR = [("wiki", "1k"), ("wiki", "2k"), ("cwe", "1k"), ("cwe", "2k")]


def heads(seed: int, corpus: str = "wiki", length: str = "1k", **sizes: int) -> pd.DataFrame:
    """Shuffled rows with heavy tails on both sides, in which one row of K = 21 is clamped and one has nothing left."""
    generator = np.random.default_rng(seed)
    frame = diagnostics(corpus=corpus, length=length, **sizes)
    frame["log_z_hat"] = (frame["log_z_true"] + generator.standard_t(1.5, len(frame)) - 0.5).astype("float32")
    frame["e_nosub"] = (frame["e_sub"] + 0.01 * generator.standard_t(1.5, len(frame))).astype("float32")
    clamped, empty = np.flatnonzero(frame["k"] == 21)[:2]
    frame.loc[clamped, "log_z_hat"] = frame.loc[empty, "log_z_true"] = -np.inf
    return frame


def files_of(folder: Path, names: list[tuple[str, str]], **sizes: int) -> list[Path]:
    paths = [folder / f"heads_{corpus}_{length}.parquet" for corpus, length in names]
    for seed, (path, (corpus, length)) in enumerate(zip(paths, names, strict=True)):
        heads(seed, corpus, length, **sizes).to_parquet(path)
    return paths


def slow_errors(frame: pd.DataFrame) -> tuple[list[float], int]:
    """Errors of the rows of K = 21, one at a time, and how many rows have none."""
    errors, left_out = [], 0
    for _, row in frame.iterrows():
        if row["k"] == 21:
            if math.isinf(row["log_z_hat"]) or math.isinf(row["log_z_true"]):
                left_out += 1
            else:
                errors.append(float(row["log_z_hat"]) - float(row["log_z_true"]))
    return errors, left_out


def slow_deltas(frame: pd.DataFrame) -> list[float]:
    seen: dict[tuple[int, int], list[float]] = {}
    for _, row in frame.iterrows():
        if row["k"] == 21:
            seen.setdefault((row["layer"], row["head"]), []).append(float(row["e_sub"]) - float(row["e_nosub"]))
    return [sum(deltas) / len(deltas) for deltas in seen.values()]


def check_bins(panel: pd.DataFrame, values: list[float]) -> None:
    """Every value is counted once, in its bin or, outside of all, in the outermost one."""
    low, high = panel["low"].tolist(), panel["high"].tolist()
    assert low[1:] == high[:-1] and 0 in low and all(a < b for a, b in zip(low, high, strict=True))
    inside, beyond = [0] * len(low), [0] * len(low)
    for value in values:
        if value < low[0]:
            beyond[0] += 1
        elif value > high[-1]:
            beyond[-1] += 1
        else:
            inside[max(i for i in range(len(low)) if low[i] <= value)] += 1
    np.testing.assert_allclose(panel["share"], np.array(inside) / len(values))
    np.testing.assert_allclose(panel["beyond"], np.array(beyond) / len(values), atol=1e-15)
    facts = panel.iloc[0]
    np.testing.assert_allclose(facts["mean"], sum(values) / len(values), rtol=1e-9)
    np.testing.assert_allclose(facts["below"], sum(value < 0 for value in values) / len(values))
    np.testing.assert_allclose(facts["above"], sum(value > 0 for value in values) / len(values))


def test_log_z_errors_are_counted_by_row(tmp_path: Path) -> None:
    data = files_of(tmp_path, FOUR, packs=5)
    points = logz_calibration_points(LOGZ, data)
    panels = dict(list(points.groupby(["corpus", "length"], sort=False)))
    assert list(panels) == FOUR
    for seed, (name, panel) in enumerate(panels.items()):
        errors, left_out = slow_errors(heads(seed, *name, packs=5))
        check_bins(panel, errors)
        assert left_out == 2
        assert set(panel["left_out"]) == {2} and set(panel["rows"]) == {len(errors) + 2} and set(panel["k"]) == {21}
    assert points["beyond"].max() > 0
    widths = points["high"] - points["low"]
    assert widths.min() == pytest.approx(widths.max()) and 40 <= len(panels[FOUR[0]]) <= 110
    # Nothing but what is far out of its own panel is beyond the bins.
    reaches = [bulk(np.array(slow_errors(heads(seed, *name, packs=5))[0])) for seed, name in enumerate(FOUR)]
    assert points["low"].min() <= min(low for low, _ in reaches) < points["low"].min() + widths.max()
    assert points["high"].max() >= max(high for _, high in reaches) > points["high"].max() - widths.max()


def test_deltas_are_counted_by_head(tmp_path: Path) -> None:
    data = files_of(tmp_path, FOUR, layers=5, heads=7)
    points = fullsub_nosub_delta_points(DELTA, data)
    for seed, (name, panel) in enumerate(points.groupby(["corpus", "length"], sort=False)):
        deltas = slow_deltas(heads(seed, *name, layers=5, heads=7))
        check_bins(panel, deltas)
        assert set(panel["heads"]) == {35}
        assert panel["median"].iloc[0] == pytest.approx(sorted(deltas)[17])
    assert points["beyond"].max() == 0
    steps = np.diff(np.arcsinh(np.unique([points["low"], points["high"]]) / points["linear_width"].iloc[0]))
    assert steps.min() == pytest.approx(steps.max(), rel=1e-6)


def bars(axis: Axes) -> dict[tuple[str, bool], list[tuple[float, float, float, float]]]:
    """(left, bottom, width, height) of the bars of a panel by colour and whether they are hatched."""
    seen: dict[tuple[str, bool], list[tuple[float, float, float, float]]] = {}
    for bar in axis.patches:
        hatched = bar.get_hatch() is not None
        colour = to_hex(bar.get_edgecolor() if hatched else bar.get_facecolor()).upper()
        place = (bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height())
        seen.setdefault((colour, hatched), []).append(tuple(map(float, place)))
    return seen


@pytest.mark.parametrize("kind", ["logz", "delta"])
def test_panels_show_the_points(tmp_path: Path, kind: str) -> None:
    data = files_of(tmp_path, FOUR, packs=5)
    data = [data[1], data[0], data[3], data[2]]  # the files' order is that of rows and columns
    points = logz_calibration_points(LOGZ, data) if kind == "logz" else fullsub_nosub_delta_points(DELTA, data)
    figure = draw_logz_calibration(LOGZ, points) if kind == "logz" else draw_fullsub_nosub_delta(DELTA, points)
    assert len(figure.axes) == 4
    for axis, (corpus, length) in zip(figure.axes, [FOUR[1], FOUR[0], FOUR[3], FOUR[2]], strict=True):
        panel = points[(points["corpus"] == corpus) & (points["length"] == length)]
        seen = bars(axis)
        for colour, side in ((BLUE, panel[panel["high"] <= 0]), (VERMILLION, panel[panel["low"] >= 0])):
            assert len(side) > 0
            expected = [(row.low, 0, row.high - row.low, row.share) for row in side.itertuples()]
            np.testing.assert_allclose(seen.get((colour, False), []), expected, rtol=1e-6, atol=1e-12)
            expected = [(r.low, r.share, r.high - r.low, r.beyond) for r in side.itertuples() if r.beyond > 0]
            np.testing.assert_allclose(seen.get((colour, True), []), expected, rtol=1e-6)
        facts = panel.iloc[0]
        marks = {line.get_linestyle(): line.get_xdata()[0] for line in axis.lines}
        assert marks.pop("-") == 0
        names = {"--": "mean"} if kind == "logz" else {"--": "mean", ":": "median"}
        inside = {s: facts[n] for s, n in names.items() if panel["low"].min() <= facts[n] <= panel["high"].max()}
        assert inside and marks == inside
        top = (panel["share"] + panel["beyond"]).max()
        assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > top
        title = axis.get_title()
        assert title.startswith(f"{corpus}, {length}, $K = 21$")
        if kind == "logz":
            assert f"{facts['below']:.1%} underestimated\n2 of 120 rows left out" in title
        else:
            assert f"{facts['below']:.1%} favour subtraction, {facts['above']:.1%} NoSub" in title
            assert f"median {facts['median']:+.4f}".replace("-", "\N{MINUS SIGN}") in title
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    beyond = ["beyond the range, in the outermost bin"]
    assert labels == (
        ["underestimated", "overestimated", *beyond, "mean"] if kind == "logz"
        else ["subtraction better", "NoSub better", "mean", "median"]
    )  # fmt: skip


def grid(figure: Figure) -> list[tuple[int, int]]:
    return [(axis.get_subplotspec().rowspan.start, axis.get_subplotspec().colspan.start) for axis in figure.axes]


@pytest.mark.parametrize(
    ("names", "places"),
    [
        ([("wiki", "1k")], [(0, 0)]),
        ([("wiki", "1k"), ("wiki", "2k")], [(0, 0), (0, 1)]),
        ([("wiki", "1k"), ("cwe", "1k")], [(0, 0), (1, 0)]),
        ([("wiki", "1k"), ("cwe", "2k"), ("wiki", "2k")], [(0, 0), (0, 1), (0, 2)]),
        ([("wiki", "1k"), ("cwe", "2k"), ("cwe", "1k"), ("wiki", "2k")], [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ([("wiki", "1k"), *FOUR[1:], ("books", "1k")], [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]),
        ([(c, n) for n in ("1k", "2k", "4k") for c in ("wiki", "cwe")], [(r, c) for r in (0, 1) for c in (0, 1, 2)]),
    ],
)
def test_corpora_are_rows_and_lengths_are_columns(
    tmp_path: Path, names: list[tuple[str, str]], places: list[tuple[int, int]]
) -> None:
    figure = draw_logz_calibration(LOGZ, logz_calibration_points(LOGZ, files_of(tmp_path, names)))
    assert grid(figure) == places
    titles = [axis.get_title().split(", $")[0] for axis in figure.axes]
    assert sorted(titles) == sorted(", ".join(name) for name in names)
    corpora, lengths = (list(dict.fromkeys(part)) for part in zip(*names, strict=True))
    if len(corpora) * len(lengths) == len(names):
        assert titles == [f"{corpus}, {length}" for corpus in corpora for length in lengths]
    else:
        assert titles == [", ".join(name) for name in names]


def test_two_drawings_are_the_same_bytes(tmp_path: Path) -> None:
    data = files_of(tmp_path, FOUR)
    made = []
    for name in ("first", "second"):
        with paper_style():
            figure = draw_logz_calibration(LOGZ, logz_calibration_points(LOGZ, data))
            save(figure, pdf := tmp_path / f"{name}.pdf", png := tmp_path / f"{name}.png")
        made.append((pdf.read_bytes(), png.read_bytes()))
    assert made[0] == made[1] and made[0][0].startswith(b"%PDF")


def test_without_retrieved_tokens_nothing_is_subtracted(tmp_path: Path) -> None:
    heads(0).assign(k=0).to_parquet(data := tmp_path / "heads.parquet")
    with pytest.raises(ValueError, match=f"^{data}: K is 0 at 4%, where nothing is subtracted; set a larger"):
        fullsub_nosub_delta_points(DELTA, [data])
    assert set(logz_calibration_points(LOGZ, [data])["k"]) == {0}


ONE = {"layers": 1, "heads": 1, "packs": 1, "queries": 1}


@pytest.mark.parametrize("values", [[0.0], [2.0], [-1e-9], [1e-9, 5.0], [-40.0, 1e30], [1.0] * 9 + [-300.0], [-0.0, 0]])
def test_awkward_values_are_drawn(tmp_path: Path, values: list[float]) -> None:
    frame = diagnostics(**ONE | {"heads": len(values)})
    frame = frame[frame["k"] == 21].sort_values("head")
    rows = {"log_z_hat": values, "log_z_true": 0.0, "e_sub": values, "e_nosub": 0.0}
    frame.assign(**rows).to_parquet(data := tmp_path / "heads.parquet")
    points = logz_calibration_points(LOGZ, [data])
    check_bins(points, values)
    assert points["low"].min() < 0 < points["high"].max() and len(points) < 200
    deltas = fullsub_nosub_delta_points(DELTA, [data])
    check_bins(deltas, values)
    assert deltas["low"].min() < 0 < deltas["high"].max() and deltas["beyond"].max() == 0
    draw_logz_calibration(LOGZ, points).draw_without_rendering()
    (figure := draw_fullsub_nosub_delta(DELTA, deltas)).draw_without_rendering()
    assert "0" in [tick.get_text() for tick in figure.axes[0].get_xticklabels()]


@pytest.mark.parametrize(
    ("value", "logz", "delta"),
    [(-1e-5, "+0.00", "+0.0000"), (-0.25, "\N{MINUS SIGN}0.25", "\N{MINUS SIGN}0.2500"), (0.25, "+0.25", "+0.2500")],
)
def test_what_rounds_to_zero_has_no_minus(tmp_path: Path, value: float, logz: str, delta: str) -> None:
    frame = diagnostics(**ONE).assign(log_z_hat=value, log_z_true=0.0, e_sub=value, e_nosub=0.0)
    frame.to_parquet(data := tmp_path / "heads.parquet")
    (axis,) = draw_logz_calibration(LOGZ, logz_calibration_points(LOGZ, [data])).axes
    assert f"mean {logz}, {float(value < 0):.1%} underestimated\n" in axis.get_title()
    (axis,) = draw_fullsub_nosub_delta(DELTA, fullsub_nosub_delta_points(DELTA, [data])).axes
    assert f"mean {delta}, median {delta}\n" in axis.get_title()


def test_a_panel_without_any_residual_says_so(tmp_path: Path) -> None:
    clamped, other = files_of(tmp_path, FOUR[:2])
    heads(0).assign(log_z_hat=-np.inf).to_parquet(clamped)
    for data in ([clamped], [clamped, other]):
        points = logz_calibration_points(LOGZ, data)
        panel = points[points["length"] == "1k"]
        assert panel["share"].eq(0).all() and panel["left_out"].eq(panel["rows"]).all()
        (figure := draw_logz_calibration(LOGZ, points)).draw_without_rendering()
        assert figure.axes[0].get_title().endswith("no row is left\n48 of 48 rows left out")
        assert [text.get_text() for text in figure.axes[0].texts] == ["no residual\nin any row"]
        assert all(not axis.texts for axis in figure.axes[1:])
        if len(data) == 2:  # the empty panel does not set the scale
            assert figure.axes[1].get_ylim()[1] == pytest.approx(1.05 * (points["share"] + points["beyond"]).max())
