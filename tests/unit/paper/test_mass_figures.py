"""The figure of recovered mass shows what a slow reading of the rows gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sample_results import diagnostics

from residual_mass.paper.figures.masses import draw_mass_curves, mass_curves_points
from residual_mass.paper.figures.style import paper_style, save
from residual_mass.study.specs import FigureSpec

pytestmark = pytest.mark.filterwarnings("error")

MASS = FigureSpec(label="mass_curves", title="A model")
Files = dict[str, Path]


def mass(layers: int = 4, heads: int = 5, packs: int = 2, ks: tuple[int, ...] = (1, 3, 10, 30, 70)) -> pd.DataFrame:
    index = pd.MultiIndex.from_product(
        [range(packs), range(layers), range(heads), ks], names=["pack", "layer", "head", "k"]
    )
    frame = index.to_frame(index=False).assign(backbone="smol", corpus="wiki", length="1k")
    frame["c_mid"] = np.random.default_rng(9).random(len(frame))
    return frame.sample(frac=1, random_state=2, ignore_index=True)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Files of mass and heads of one text."""
    paths = {name: tmp_path / f"{name}_smol_wiki_1k.parquet" for name in ("mass", "heads")}
    mass().to_parquet(paths["mass"])
    diagnostics(layers=4, heads=5).to_parquet(paths["heads"])
    return paths


def slow_entropies(frame: pd.DataFrame) -> list[tuple[float, int, int]]:
    """(mean entropy, layer, head), ascending."""
    seen: dict[tuple[int, int], list[float]] = {}
    for _, row in frame.iterrows():
        seen.setdefault((row["layer"], row["head"]), []).append(float(row["h_mid"]))
    return sorted((sum(values) / len(values), *head) for head, values in seen.items())


def slow_curves(frame: pd.DataFrame) -> dict[tuple[int, int], list[tuple[int, float]]]:
    seen: dict[tuple[int, int, int], list[float]] = {}
    for _, row in frame.iterrows():
        seen.setdefault((row["layer"], row["head"], row["k"]), []).append(row["c_mid"])
    curves: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for (layer, head, k), values in sorted(seen.items()):
        curves.setdefault((layer, head), []).append((k, sum(values) / len(values)))
    return curves


def test_curves_are_of_heads_at_fixed_ranks_of_the_entropy(files: Files) -> None:
    points = mass_curves_points(MASS, [files["mass"], files["heads"]])
    entropies = slow_entropies(diagnostics(layers=4, heads=5))
    curves = slow_curves(mass())
    chosen = [entropies[round(q * 19)] for q in (0.02, 0.10, 0.25, 0.75, 0.90, 0.98)]
    axis = (figure := draw_mass_curves(MASS, points)).axes[0]
    lines = {line.get_label(): line for line in axis.lines}
    labels = []
    for number, (h_mid, layer, head) in enumerate(chosen):
        labels.append(rf"layer {layer}, head {head}: $H_{{\mathrm{{mid}}}} = {h_mid:.2f}$")
        line = lines[labels[-1]]
        np.testing.assert_allclose(line.get_xydata(), curves[layer, head], rtol=1e-9)
        assert line.get_linestyle() == ("-" if number < 3 else "--")
    assert len({lines[label].get_color() for label in labels}) == 6
    median = [(k, np.median([curve[i][1] for curve in curves.values()])) for i, k in enumerate((1, 3, 10, 30, 70))]
    np.testing.assert_allclose(lines["median head"].get_xydata(), median)
    of_all = points[points["family"] == "all"]
    at_10 = [curve[2][1] for curve in curves.values()]
    np.testing.assert_allclose(of_all[["low", "high"]].iloc[2], np.quantile(at_10, (0.25, 0.75)))
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["middle half of heads", "median head", *labels, "$K$ of the study: 1, 21"]
    levels = [line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == ":" and len(line.get_xdata())]
    assert levels == [1, 21] and axis.get_xscale() == "log"


@pytest.mark.parametrize(("layers", "heads", "curves"), [(1, 1, 1), (1, 2, 2), (2, 2, 4), (2, 3, 4)])
def test_few_heads_give_few_curves_and_none_twice(files: Files, layers: int, heads: int, curves: int) -> None:
    mass(layers, heads).to_parquet(files["mass"])
    diagnostics(layers, heads, packs=1, queries=1).assign(k=0).to_parquet(files["heads"])
    points = mass_curves_points(MASS, [files["mass"], files["heads"]])
    single = points[points["family"].isin(["low", "high"])]
    assert len(single[["layer", "head"]].drop_duplicates()) == len(single) / 5 == curves
    assert "budgets" not in set(points["family"])  # K = 0 has no place
    draw_mass_curves(MASS, points).draw_without_rendering()


def test_the_order_of_rows_changes_no_byte(files: Files, tmp_path: Path) -> None:
    shown: list[pd.DataFrame] = []
    made: list[tuple[bytes, bytes]] = []
    for seed in (1, 3):
        mass().sample(frac=1, random_state=seed).to_parquet(files["mass"])
        diagnostics(layers=4, heads=5).sample(frac=1, random_state=seed).to_parquet(files["heads"])
        shown.append(mass_curves_points(MASS, [files["mass"], files["heads"]]))
        with paper_style():
            save(draw_mass_curves(MASS, shown[-1]), pdf := tmp_path / "f.pdf", png := tmp_path / "f.png")
        made.append((pdf.read_bytes(), png.read_bytes()))
    pd.testing.assert_frame_equal(*shown, check_exact=True)
    assert made[0] == made[1] and made[0][0].startswith(b"%PDF")
