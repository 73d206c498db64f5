"""What figures read and compute of captured rows, against slow readings and against what the claims make of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sample_results import diagnostics

from residual_mass.diagnostics.findings import read_settings
from residual_mass.diagnostics.resampling import CapturedSetting
from residual_mass.paper.figures.heads import quartile_error_points
from residual_mass.paper.figures.summaries import bulk, equal_parts, head_means
from residual_mass.study.specs import FigureSpec, FindingsSpec


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3], (3, 3)), ([1, 2, 2, 2, 3], (2, 2)), ([0, 1, 2, 3, 4, 50], (0, 11.25)), ([-90, *range(9)], (-12.25, 8))],
)
def test_the_bulk_ends_three_interquartile_ranges_from_the_quartiles(
    values: list[float], expected: tuple[float, float]
) -> None:
    assert bulk(np.array(values, dtype=float)) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 270])
def test_parts_are_in_ascending_order_and_of_even_size(count: int) -> None:
    values = pd.Series(np.random.default_rng().integers(0, 5, count) / 4)
    parts = equal_parts(values, 4)
    sizes = [int((parts == part).sum()) for part in range(4)]
    assert sum(sizes) == count and max(sizes) - min(sizes) <= 1
    order = sorted(range(count), key=lambda index: (values[index], index))
    assert parts[order].is_monotonic_increasing


def test_means_are_taken_in_float64() -> None:
    values = np.float32([1e8, 1, -1e8, 3])
    frame = pd.DataFrame({"head": 0, "clamped": [True, False, False, False], "value": values})
    (row,) = head_means(frame, ["head"]).to_dict("records")
    assert row == {"head": 0, "clamped": 0.25, "value": 1.0}


# ---- quartiles of figures and claims ---------------------------------------------------------------------------------


def head_numbers(rows: pd.DataFrame) -> np.ndarray:
    return rows.groupby(["layer", "head"]).ngroup().to_numpy()


HEADS = {4: (2, 2), 6: (1, 6), 9: (3, 3), 270: (30, 9), 271: (271, 1), 272: (16, 17), 273: (13, 21), 512: (16, 32)}
"""Layers and heads by their product."""
ENTROPIES: dict[str, Callable[[np.random.Generator, pd.DataFrame], object]] = {
    "all differ": lambda rng, rows: rng.random(len(rows), dtype=np.float32),
    "heads tie": lambda rng, rows: rng.random(3, dtype=np.float32)[rng.integers(0, 3, 512)[head_numbers(rows)]],
    "rows tie": lambda rng, rows: rng.integers(0, 5, len(rows)) / np.float32(4),
    "all tie": lambda rng, rows: np.float32(0.3),
}


def claimed(folder: Path, frame: pd.DataFrame) -> CapturedSetting:
    """As the claims read the rows."""
    mass = frame[["backbone", "corpus", "length", "layer", "head", "pack"]].drop_duplicates().assign(k=1, c_mid=0.5)
    frame.to_parquet(heads := folder / "heads.parquet")
    mass.to_parquet(folder / "mass.parquet")
    spec = FindingsSpec(
        study="mini", budget_percent=4.0, corpus="wiki", length="1k", bootstrap_resamples=10, seed=0, recipe=1
    )
    (setting,) = read_settings(spec, [heads], [folder / "mass.parquet"])
    return setting


@pytest.mark.parametrize("count", HEADS)
@pytest.mark.parametrize("ties", ENTROPIES)
def test_quartiles_are_those_of_the_claims(tmp_path: Path, count: int, ties: str) -> None:
    layers, heads = HEADS[count]
    frame = diagnostics(layers, heads, packs=3, queries=3)
    rows = frame[["pack", "layer", "head", "query"]].drop_duplicates()
    rows["h_mid"] = ENTROPIES[ties](np.random.default_rng(), rows)
    frame = frame.drop(columns="h_mid").merge(rows)
    setting = claimed(tmp_path, frame)
    means = head_means(frame[["layer", "head", "h_mid"]], ["layer", "head"])
    assert tuple(zip(means["layer"], means["head"], strict=True)) == setting.heads
    parts = equal_parts(means["h_mid"], 4)
    for number, quartile in enumerate(setting.quartiles):
        assert sorted(quartile) == np.flatnonzero(parts == number).tolist()
    # What the figure shows of a quartile is what the claims compute of it.
    points = quartile_error_points(FigureSpec(label="quartile_error", title=""), [tmp_path / "heads.parquet"])
    for row in points.itertuples():
        quartile = setting.quartiles[row.quartile]
        assert row.heads == len(quartile)
        for name in ("e_topk", "e_sub"):
            errors = setting.cells[row.budget_percent][name][quartile]
            assert getattr(row, name) == pytest.approx(errors.mean(), rel=1e-9)
