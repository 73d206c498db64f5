"""Captured rows of random numbers, and the claims about them by loops over the rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tests.records import record

from residual_mass.diagnostics.samples import Sample

LAYERS, HEADS, QUERIES = 2, 3, 2
BUDGETS = {2.0: 1, 4.0: 7, 8.0: 30}
GRID = (1, 2, 3, 5, 7, 10, 40)
SETTINGS = (("wiki", "1k", 3), ("cwe", "1k", 2), ("wiki", "2k", 1))
"""Corpus, length and packs."""
ABOUT = {
    "backbone": "tiny", "maps": "1k", "study": "test", "model_id": "a/b", "revision": "r0", "weights": "random",
    "phi_sha": "f00",
}  # fmt: skip
Row = dict[str, Any]
Head = tuple[int, int]
Files = tuple[pd.DataFrame, pd.DataFrame]


def make_rows(
    rng: np.random.Generator, corpus: str = "wiki", length: str = "1k", heads: int = HEADS, packs: int = 3
) -> Files:
    """Captured rows and mass curves of random numbers; one log mass in eight is -inf."""
    place = ["pack", "layer", "head", "query"]
    index = pd.MultiIndex.from_product([range(packs), range(LAYERS), range(heads), range(QUERIES)], names=place)
    entropies = pd.DataFrame({"h_mid": rng.random(len(index)).astype(np.float32)}, index).reset_index()
    rows = entropies.merge(pd.DataFrame({"budget_percent": BUDGETS.keys(), "k": BUDGETS.values()}), how="cross")
    for name in "e_topk e_sub e_nosub e_exact_nosub residual_share_hat residual_share c_mid".split():
        rows[name] = rng.random(len(rows)).astype(np.float32)
    rows.loc[rows["head"] == 0, "residual_share_hat"] = 0  # ties among ranks
    rows["e_exact_sub"] = rng.random(len(rows)) * 2e-6
    for name in ("log_z_hat", "log_z_true"):
        rows[name] = np.where(rng.random(len(rows)) < 1 / 8, -np.inf, rng.normal(size=len(rows)))
    rows["clamped"] = rng.random(len(rows)) < 0.2
    mass = rows[["pack", "layer", "head"]].drop_duplicates().merge(pd.DataFrame({"k": GRID}), how="cross")
    mass["c_mid"] = rng.random(len(mass)).astype(np.float32)
    about = {name: pd.Categorical([fact]).repeat(len(rows)) for name, fact in about_rows(corpus, length).items()}
    return rows.assign(**about), mass


def about_rows(corpus: str, length: str) -> dict[str, str]:
    return {**ABOUT, "corpus": corpus, "length": length}


def write_files(folder: Path, files: Iterable[Files]) -> tuple[list[Path], list[Path]]:
    paths: tuple[list[Path], list[Path]] = ([], [])
    for number, pair in enumerate(files):
        for of_kind, name, frame in zip(paths, ("heads", "mass"), pair, strict=True):
            of_kind.append(folder / f"{name}_{number}.parquet")
            frame.to_parquet(of_kind[-1], index=False)
            record(of_kind[-1])
    return paths


def read(folder: Path, files: Iterable[Files], budget: float = 4.0) -> list[Sample]:
    return [Sample.read(*pair, budget) for pair in zip(*write_files(folder, files), strict=True)]


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


@dataclass
class Slow:
    """One draw from a setting, read row by row."""

    rows: dict[tuple[int, Head, int], list[Row]]
    mass: dict[tuple[int, Head, int], float]
    corpus: str
    heads: list[Head]
    quartiles: list[list[Head]]
    packs: list[int]

    def of(self, head: Head, value: Callable[[Row], float] | str, k: int = 7) -> float:
        """A head's mean over drawn packs and all queries."""
        value = value if callable(value) else lambda row, name=value: row[name]
        return mean(mean(map(value, self.rows[k, head, pack])) for pack in self.packs)

    def over(self, heads: list[Head], value: Callable[[Row], float] | str, k: int = 7) -> float:
        return mean(self.of(head, value, k) for head in heads)

    def everywhere(self, value: Callable[[Row], float] | str, k: int = 7) -> float:
        return self.over(self.heads, value, k)

    def log_z_errors(self, k: int = 7) -> list[float]:
        drawn = [row for head in self.heads for pack in self.packs for row in self.rows[k, head, pack]]
        gaps = [(row["log_z_hat"], row["log_z_true"]) for row in drawn]
        return [hat - true for hat, true in gaps if math.isfinite(hat) and math.isfinite(true)]

    def log_z_of(self, side: Callable[[float], bool]) -> float:
        """The mean over the drawn heads of one side of a head's mean log-Z error."""
        alone = [(head, dataclasses.replace(self, heads=[head]).log_z_errors()) for head in self.heads]
        errors = [mean(of_head) for head, of_head in alone if of_head and side(self.of(head, delta))]
        return mean(errors) if errors else math.nan


def gain(row: Row) -> float:
    return row["e_topk"] - row["e_sub"]


def delta(row: Row) -> float:
    return row["e_sub"] - row["e_nosub"]


def slow_quartiles(rows: pd.DataFrame) -> list[list[Head]]:
    entropies: dict[Head, list[float]] = {}
    for row in rows.to_dict("records"):
        entropies.setdefault((row["layer"], row["head"]), []).append(row["h_mid"])
    order = sorted(entropies, key=lambda head: (mean(entropies[head]), head))
    return [[head for i, head in enumerate(order) if i * 4 // len(order) == q] for q in range(4)]


def slow_draws(files: Files, sample: Sample) -> list[Slow]:
    """What the draws of a sample stand for."""
    frame, curve = files
    rows: dict[tuple[int, Head, int], list[Row]] = {}
    for row in frame.to_dict("records"):
        rows.setdefault((row["k"], (row["layer"], row["head"]), row["pack"]), []).append(row)
    mass = {(row["k"], (row["layer"], row["head"]), row["pack"]): row["c_mid"] for row in curve.to_dict("records")}
    heads, packs = sorted({head for _, head, _ in rows}), sorted({pack for _, _, pack in rows})
    draws = []
    for of_all, within, of_packs in zip(sample.heads, sample.stratified, sample.packs, strict=True):
        drawn = repeated(heads, within)
        groups = [[head for head in drawn if head in quartile] for quartile in slow_quartiles(frame)]
        assert [len(group) for group in groups] == [len(quartile) for quartile in slow_quartiles(frame)]
        draws.append(
            Slow(rows, mass, frame["corpus"].iloc[0], repeated(heads, of_all), groups, repeated(packs, of_packs))
        )
    return draws


def repeated(values: Sequence[Any], times: np.ndarray) -> list[Any]:
    return [value for value, count in zip(values, times, strict=True) for _ in range(int(count))]


def rank(values: list[float]) -> list[float]:
    return [sum(x < value for x in values) + (sum(x == value for x in values) + 1) / 2 for value in values]


def spearman(x: list[float], y: list[float]) -> float:
    x, y = rank(x), rank(y)
    x, y = [value - mean(x) for value in x], [value - mean(y) for value in y]
    spread = math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
    return sum(a * b for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


def slow_claims(s: Slow) -> dict[str, float]:
    """The numbers of the claims about one setting, as their descriptions say."""
    gains = [s.over(quartile, gain) for quartile in s.quartiles]
    of_head = {head: s.of(head, gain) for heads in (s.heads, *s.quartiles) for head in heads}
    rest = [head for quartile in s.quartiles[1:] for head in quartile]
    lost = [[-of_head[head] for head in group if of_head[head] < 0] for group in (s.quartiles[0], rest)]
    falls = [s.everywhere(e, a) - s.everywhere(e, b) for e in ("e_topk", "e_sub") for a, b in ((1, 7), (7, 30))]
    curves = [
        [mean(mean(s.mass[k, head, pack] for pack in s.packs) for head in s.quartiles[q]) for q in (0, 3)]
        for k in (1, 2, 3, 5, 7)
    ]
    deltas = [s.of(head, delta) for head in s.heads]
    for_sub, for_nosub = [-d for d in deltas if d < 0], [d for d in deltas if d > 0]

    def with_entropy(value: Callable[[Row], float] | str) -> float:
        return spearman([s.of(head, "h_mid") for head in s.heads], [s.of(head, value) for head in s.heads])

    numbers = {
        "gain_largest_at_high_entropy": gains[3] - max(gains[:3]),
        "gain_rises_with_entropy": with_entropy(gain),
        "losses_at_low_entropy": mean(lost[0]) - mean(lost[1]) if all(lost) else math.nan,
        "losses_more_frequent_at_low_entropy": len(lost[0]) / len(s.quartiles[0]) - len(lost[1]) / len(rest),
        "completion_helps_in_every_quartile": min(s.over(q, gain, k) for q in s.quartiles for k in BUDGETS.values()),
        "topk_error_rises_with_entropy": with_entropy("e_topk"),
        "completion_error_rises_with_entropy": with_entropy("e_sub"),
        "errors_fall_with_k": min(falls),
        "mass_recovered_faster_at_low_entropy": min(low - high for low, high in curves),
        "residual_share_rises_with_entropy": with_entropy("residual_share_hat"),
        "subtraction_wins_by_more": mean(for_sub) - mean(for_nosub) if for_sub and for_nosub else math.nan,
        "subtraction_better_on_average": -mean(deltas),
        "nosub_wins_where_underestimated": s.log_z_of(lambda d: d < 0) - s.log_z_of(lambda d: d > 0),
    }
    if s.corpus == "cwe":
        return numbers | {"sub_wins_on_most_heads": len(for_sub) / len(deltas) - 0.5}
    errors = s.log_z_errors()
    numbers["residual_underestimated"] = -mean(errors) if errors else math.nan
    return numbers | {"nosub_wins_on_most_heads": len(for_nosub) / len(deltas) - 0.5}


def slow_joint_claims(draws: Sequence[Slow]) -> dict[str, float]:
    errors = [mean(s.log_z_errors()) for s in draws]
    return {
        "residual_underestimated_somewhere": -min(errors),
        "residual_overestimated_somewhere": max(errors),
        "exact_nosub_lower_somewhere": max(s.everywhere("e_sub") - s.everywhere("e_exact_nosub") for s in draws),
        "sub_lowest_everywhere": min(
            s.everywhere(e) - s.everywhere("e_sub") for s in draws for e in ("e_topk", "e_nosub")
        ),
        "exact_sub_is_exact": 1e-6 - max(s.everywhere("e_exact_sub", k) for s in draws for k in BUDGETS.values()),
    }
