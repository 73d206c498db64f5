"""Captured rows of random numbers, and a slow computation of the claims about them from the drawn rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
HEAD = ["layer", "head"]
Files = tuple[pd.DataFrame, pd.DataFrame]


def make_rows(
    rng: np.random.Generator, corpus: str = "wiki", length: str = "1k", heads: int = HEADS, packs: int = 3
) -> Files:
    """Captured rows and mass curves of random numbers; one log mass in eight is -inf."""
    place = ["pack", *HEAD, "query"]
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
    mass = rows[["pack", *HEAD]].drop_duplicates().merge(pd.DataFrame({"k": GRID}), how="cross")
    mass["c_mid"] = rng.random(len(mass)).astype(np.float32)
    about = ABOUT | {"corpus": corpus, "length": length}
    return rows.assign(**{name: pd.Categorical([fact]).repeat(len(rows)) for name, fact in about.items()}), mass


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


@dataclass
class Slow:
    """One draw from a setting: rows of heads drawn among all, rows and mass curves of those drawn within quartiles."""

    corpus: str
    rows: pd.DataFrame
    quartiles: list[pd.DataFrame]
    curves: list[pd.DataFrame]

    def mean(self, name: str, k: int = 7) -> float:
        return at(self.rows, k)[name].mean()

    def by_head(self, name: str) -> pd.Series:
        return at(self.rows).groupby("place")[name].mean()


def at(rows: pd.DataFrame, k: int = 7) -> pd.DataFrame:
    return rows[rows["k"] == k]


def slow_quartiles(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """The heads of each."""
    order = rows.astype({"h_mid": float}).groupby(HEAD)["h_mid"].mean().reset_index().sort_values(["h_mid", *HEAD])
    return [heads[HEAD] for _, heads in order.groupby(np.arange(len(order)) * 4 // len(order))]


def slow_draws(files: Files, sample: Sample) -> list[Slow]:
    """What the draws of a sample stand for."""
    rows, curve = files
    rows = rows.astype(dict.fromkeys(rows.select_dtypes(["float32", "bool"]), float))
    gap = np.where(np.isfinite(rows["log_z_hat"]) & np.isfinite(rows["log_z_true"]), rows["log_z_hat"], np.nan)
    gain, delta = rows["e_topk"] - rows["e_sub"], rows["e_sub"] - rows["e_nosub"]
    rows = rows.assign(gap=gap - rows["log_z_true"], gain=gain, delta=delta)
    heads, packs = rows[HEAD].drop_duplicates().sort_values(HEAD), np.unique(rows["pack"])
    quartiles = slow_quartiles(rows)
    draws = []
    for of_all, within, of_packs in zip(sample.heads, sample.stratified, sample.packs, strict=True):
        drawn_packs = pd.DataFrame({"pack": np.repeat(packs, of_packs.astype(int))})

        def drawn(frame: pd.DataFrame, heads: pd.DataFrame, packs: pd.DataFrame = drawn_packs) -> pd.DataFrame:
            """Rows of these heads, each named by its place among them, as often as their packs are drawn."""
            return frame.merge(packs).merge(heads.reset_index(drop=True).reset_index(names="place"), on=HEAD)

        stratified = heads.loc[heads.index.repeat(within.astype(int))]
        groups = [stratified.merge(quartile) for quartile in quartiles]
        assert [*map(len, groups)] == [*map(len, quartiles)]
        everyone = drawn(rows, heads.loc[heads.index.repeat(of_all.astype(int))])
        of_groups = ([drawn(frame, group) for group in groups] for frame in (rows, curve.astype({"c_mid": float})))
        draws.append(Slow(rows["corpus"].iloc[0], everyone, *of_groups))
    return draws


def slow_claims(s: Slow) -> dict[str, float]:
    """The numbers of the claims about one setting, as their descriptions say."""
    gains = [at(quartile)["gain"].mean() for quartile in s.quartiles]
    of_heads = [at(quartile).groupby("place")["gain"].mean() for quartile in s.quartiles]
    lowest, rest = of_heads[0], pd.concat(of_heads[1:])
    curves = [[at(s.curves[q], k)["c_mid"].mean() for q in (0, 3)] for k in (1, 2, 3, 5, 7)]
    delta, gap, entropy = s.by_head("delta"), s.by_head("gap"), s.by_head("h_mid")

    def with_entropy(name: str) -> float:
        other = s.by_head(name)
        return entropy.corr(other, method="spearman") if min(entropy.nunique(), other.nunique()) > 1 else 0.0

    numbers = {
        "gain_largest_at_high_entropy": gains[3] - max(gains[:3]),
        "gain_rises_with_entropy": with_entropy("gain"),
        "losses_at_low_entropy": rest[rest < 0].mean() - lowest[lowest < 0].mean(),
        "losses_more_frequent_at_low_entropy": (lowest < 0).mean() - (rest < 0).mean(),
        "completion_helps_in_every_quartile": min(
            at(quartile, k)["gain"].mean() for quartile in s.quartiles for k in BUDGETS.values()
        ),
        "topk_error_rises_with_entropy": with_entropy("e_topk"),
        "completion_error_rises_with_entropy": with_entropy("e_sub"),
        "errors_fall_with_k": min(
            s.mean(name, a) - s.mean(name, b) for name in ("e_topk", "e_sub") for a, b in ((1, 7), (7, 30))
        ),
        "mass_recovered_faster_at_low_entropy": min(low - high for low, high in curves),
        "residual_share_rises_with_entropy": with_entropy("residual_share_hat"),
        "subtraction_wins_by_more": -delta[delta < 0].mean() - delta[delta > 0].mean(),
        "subtraction_better_on_average": -delta.mean(),
        "nosub_wins_where_underestimated": gap[delta < 0].mean() - gap[delta > 0].mean(),
    }
    if s.corpus == "cwe":
        return numbers | {"sub_wins_on_most_heads": (delta < 0).mean() - 0.5}
    return numbers | {
        "residual_underestimated": -s.mean("gap"), "nosub_wins_on_most_heads": (delta > 0).mean() - 0.5,
    }  # fmt: skip


def slow_joint_claims(draws: Sequence[Slow]) -> dict[str, float]:
    errors = [s.mean("gap") for s in draws]
    assert not any(map(math.isnan, errors))
    return {
        "residual_underestimated_somewhere": -min(errors),
        "residual_overestimated_somewhere": max(errors),
        "exact_nosub_lower_somewhere": max(s.mean("e_sub") - s.mean("e_exact_nosub") for s in draws),
        "sub_lowest_everywhere": min(s.mean(e) - s.mean("e_sub") for s in draws for e in ("e_topk", "e_nosub")),
        "exact_sub_is_exact": 1e-6 - max(s.mean("e_exact_sub", k) for s in draws for k in BUDGETS.values()),
    }
