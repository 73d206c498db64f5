"""The paper's statements as numbers, against loops over the rows, with every head and pack drawn by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
from tests.records import record

from residual_mass.diagnostics.claims import CLAIMS, JOINT_CLAIMS, Claim
from residual_mass.diagnostics.findings import read_settings
from residual_mass.diagnostics.resampling import CapturedSetting, Sample, estimate, estimate_extreme, resampled, whole
from residual_mass.study.specs import FindingsSpec

LAYERS, HEADS, PACKS, QUERIES = 2, 3, 3, 2
BUDGETS = {2.0: 1, 4.0: 7, 8.0: 30}
GRID = (1, 2, 3, 5, 7, 10, 40)
SPEC = FindingsSpec(
    study="test", budget_percent=4.0, corpus="wiki", length="1k", bootstrap_resamples=40, seed=0, recipe=1
)
PLACE = {"backbone": "tiny", "maps": "1k", "study": "test", "model_id": "a/b", "revision": "r0", "weights": "random"}
Row = dict[str, Any]
Head = tuple[int, int]
Files = tuple[pd.DataFrame, pd.DataFrame]


def make_rows(
    rng: np.random.Generator, corpus: str = "wiki", length: str = "1k", heads: int = HEADS, packs: int = PACKS
) -> Files:
    """Captured rows and mass curves of random numbers, in random order; one log mass in eight is -inf."""
    index = [
        {"pack": pack, "layer": layer, "head": head, "query": query, "k": k, "budget_percent": budget}
        for pack in range(packs)
        for layer in range(LAYERS)
        for head in range(heads)
        for query in range(QUERIES)
        for budget, k in BUDGETS.items()
    ]
    rows = pd.DataFrame(index)
    for name in "e_topk e_sub e_nosub e_exact_nosub residual_share_hat residual_share c_mid".split():
        rows[name] = rng.random(len(rows)).astype(np.float32)
    rows.loc[rows["head"] == 0, "residual_share_hat"] = 0  # ties among ranks
    rows["e_exact_sub"] = rng.random(len(rows)) * 2e-6
    for name in ("log_z_hat", "log_z_true"):
        rows[name] = np.where(rng.random(len(rows)) < 1 / 8, -np.inf, rng.normal(size=len(rows)))
    rows["clamped"] = rng.random(len(rows)) < 0.2
    place = ["pack", "layer", "head", "query"]
    entropies = rows[place].drop_duplicates()
    rows = rows.merge(entropies.assign(h_mid=rng.random(len(entropies)).astype(np.float32)), on=place)
    mass = rows[["pack", "layer", "head"]].drop_duplicates().merge(pd.DataFrame({"k": GRID}), how="cross")
    mass["c_mid"] = rng.random(len(mass)).astype(np.float32)
    where = {"backbone": "tiny", "corpus": corpus, "length": length}
    rows = rows.assign(**PLACE, corpus=corpus, length=length, phi_sha="f00")
    for name in (*PLACE, "corpus", "length", "phi_sha"):
        rows[name] = rows[name].astype("category")
    return (rows.sample(frac=1, random_state=rng), mass.assign(**where).sample(frac=1, random_state=rng))


def write_files(folder: Path, files: Iterable[Files]) -> tuple[list[Path], list[Path]]:
    paths: tuple[list[Path], list[Path]] = ([], [])
    for number, pair in enumerate(files):
        for of_kind, name, frame in zip(paths, ("heads", "mass"), pair, strict=True):
            of_kind.append(folder / f"{name}_{number}.parquet")
            frame.to_parquet(of_kind[-1], index=False)
            record(of_kind[-1])
    return paths


def read(folder: Path, files: Iterable[Files]) -> list[CapturedSetting]:
    return read_settings(*write_files(folder, files))


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
    k: int

    def of(self, head: Head, value: Callable[[Row], float], k: int | None = None) -> float:
        """A head's mean over drawn packs and all queries."""
        return mean(mean(map(value, self.rows[self.k if k is None else k, head, pack])) for pack in self.packs)

    def over(self, heads: list[Head], value: Callable[[Row], float], k: int | None = None) -> float:
        return mean(self.of(head, value, k) for head in heads)

    def everywhere(self, value: Callable[[Row], float], k: int | None = None) -> float:
        return self.over(self.heads, value, k)

    def log_z_errors(self, hat: str = "log_z_hat", k: int | None = None) -> list[float]:
        drawn = [self.rows[self.k if k is None else k, head, pack] for head in self.heads for pack in self.packs]
        gaps = [(row[hat], row["log_z_true"]) for rows in drawn for row in rows]
        return [hat - true for hat, true in gaps if math.isfinite(hat) and math.isfinite(true)]


def gain(row: Row) -> float:
    return row["e_topk"] - row["e_sub"]


def delta(row: Row) -> float:
    return row["e_sub"] - row["e_nosub"]


def slow_quartiles(rows: Iterable[Row]) -> list[list[Head]]:
    entropies: dict[Head, list[float]] = {}
    for row in rows:
        entropies.setdefault((row["layer"], row["head"]), []).append(row["h_mid"])
    order = sorted(entropies, key=lambda head: (mean(entropies[head]), head))
    return [[head for i, head in enumerate(order) if i * 4 // len(order) == q] for q in range(4)]


def slow_draws(files: Files, sample: Sample) -> list[Slow]:
    """What the places of a sample stand for, one entry per draw."""
    frame, curve = files
    rows: dict[tuple[int, Head, int], list[Row]] = {}
    for row in frame.to_dict("records"):
        rows.setdefault((row["k"], (row["layer"], row["head"]), row["pack"]), []).append(row)
    mass = {(row["k"], (row["layer"], row["head"]), row["pack"]): row["c_mid"] for row in curve.to_dict("records")}
    quartiles = slow_quartiles(frame.to_dict("records"))
    heads, packs = sorted({head for _, head, _ in rows}), sorted({pack for _, _, pack in rows})
    draws = []
    for draw in range(len(sample.heads)):
        within = [heads[place] for place in sample.stratified[draw]]
        groups = [[head for head in within if head in quartile] for quartile in quartiles]
        assert [len(group) for group in groups] == [len(quartile) for quartile in quartiles]
        of_packs = [packs[place] for place in sample.packs[draw]]
        of_heads = [heads[place] for place in sample.heads[draw]]
        draws.append(Slow(rows, mass, frame["corpus"].iloc[0], of_heads, groups, of_packs, BUDGETS[4.0]))
    return draws


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
    entropies = [s.of(head, lambda row: row["h_mid"]) for head in s.heads]
    topk, sub = ([s.of(head, lambda row, e=e: row[e]) for head in s.heads] for e in ("e_topk", "e_sub"))
    lost = [[-of_head[head] for head in group if of_head[head] < 0] for group in (s.quartiles[0], rest)]
    falls = [
        s.everywhere(lambda row, e=e: row[e], a) - s.everywhere(lambda row, e=e: row[e], b)
        for e in ("e_topk", "e_sub")
        for a, b in ((1, 7), (7, 30))
    ]
    curves = [
        [mean(mean(s.mass[k, head, pack] for pack in s.packs) for head in s.quartiles[q]) for q in (0, 3)]
        for k in (1, 2, 3, 5, 7)
    ]
    deltas = [s.of(head, delta) for head in s.heads]
    for_sub, for_nosub = [-d for d in deltas if d < 0], [d for d in deltas if d > 0]
    errors = s.log_z_errors()
    numbers = {
        "gain_largest_at_high_entropy": gains[3] - max(gains[:3]),
        "gain_rises_with_entropy": spearman(entropies, [of_head[head] for head in s.heads]),
        "losses_at_low_entropy": mean(lost[0]) - mean(lost[1]) if all(lost) else math.nan,
        "losses_more_frequent_at_low_entropy": mean(of_head[head] < 0 for head in s.quartiles[0])
        - mean(of_head[head] < 0 for head in rest),
        "completion_helps_in_every_quartile": min(s.over(q, gain, k) for q in s.quartiles for k in BUDGETS.values()),
        "topk_error_rises_with_entropy": spearman(entropies, topk),
        "completion_error_rises_with_entropy": spearman(entropies, sub),
        "errors_fall_with_k": min(falls),
        "mass_recovered_faster_at_low_entropy": min(low - high for low, high in curves),
        "residual_share_rises_with_entropy": spearman(
            entropies, [s.of(head, lambda row: row["residual_share_hat"]) for head in s.heads]
        ),
        "subtraction_wins_by_more": mean(for_sub) - mean(for_nosub) if for_sub and for_nosub else math.nan,
        "subtraction_better_on_average": -mean(deltas),
        "nosub_wins_where_underestimated": log_z_of(s, lambda d: d < 0) - log_z_of(s, lambda d: d > 0),
    }
    if s.corpus == "cwe":
        return numbers | {"sub_wins_on_most_heads": len(for_sub) / len(deltas) - 0.5}
    numbers["residual_underestimated"] = -mean(errors) if errors else math.nan
    return numbers | {"nosub_wins_on_most_heads": len(for_nosub) / len(deltas) - 0.5}


def log_z_of(s: Slow, side: Callable[[float], bool]) -> float:
    """The mean over the drawn heads of one side of a head's mean log-Z error."""
    errors = []
    for head in s.heads:
        of_head = dataclasses.replace(s, heads=[head]).log_z_errors()
        if of_head and side(s.of(head, delta)):
            errors.append(mean(of_head))
    return mean(errors) if errors else math.nan


def slow_joint_claims(draws: Sequence[Slow]) -> dict[str, float]:
    errors = [mean(s.log_z_errors()) for s in draws]
    levels = [
        {e: s.everywhere(lambda row, e=e: row[e]) for e in ("e_topk", "e_sub", "e_nosub", "e_exact_nosub")}
        for s in draws
    ]
    return {
        "residual_underestimated_somewhere": -min(errors),
        "residual_overestimated_somewhere": max(errors),
        "exact_nosub_lower_somewhere": max(e["e_sub"] - e["e_exact_nosub"] for e in levels),
        "sub_lowest_everywhere": min(min(e["e_topk"], e["e_nosub"]) - e["e_sub"] for e in levels),
        "exact_sub_is_exact": 1e-6
        - max(s.everywhere(lambda row: row["e_exact_sub"], k) for s in draws for k in BUDGETS.values()),
    }


SETTINGS = (("wiki", "1k", 3), ("cwe", "1k", 2), ("wiki", "2k", 1))


@pytest.fixture
def files() -> list[Files]:
    rng = np.random.default_rng()
    return [make_rows(rng, corpus, length, packs=packs) for corpus, length, packs in SETTINGS]


def the_one(claim: Claim, data: Any) -> np.ndarray:
    """[B]: a claim's number, or the one of its numbers that counts."""
    numbers = claim.number(data)
    if claim.extreme is None:
        return numbers
    return numbers.min(axis=1) if claim.extreme == "least" else numbers.max(axis=1)


def slow_and_fast(files: list[Files], samples: list[Sample]) -> None:
    """All numbers of all draws, in loops and at once."""
    draws = [slow_draws(pair, sample) for pair, sample in zip(files, samples, strict=True)]
    for of_setting, sample in zip(draws, samples, strict=True):
        expected = [slow_claims(draw) for draw in of_setting]
        claims = [claim for claim in CLAIMS if claim.applies(sample.setting)]
        assert {claim.name for claim in claims} == set(expected[0])
        for claim in claims:
            numbers = [draw[claim.name] for draw in expected]
            np.testing.assert_allclose(the_one(claim, sample), numbers, rtol=0, atol=1e-9, err_msg=claim.name)
    expected = [slow_joint_claims(of_draw) for of_draw in zip(*draws, strict=True)]
    assert {claim.name for claim in JOINT_CLAIMS} == set(expected[0])
    for joint in JOINT_CLAIMS:
        numbers = [draw[joint.name] for draw in expected]
        np.testing.assert_allclose(the_one(joint, samples), numbers, rtol=0, atol=1e-9, err_msg=joint.name)


def test_numbers_are_those_of_loops_over_rows(files: list[Files], tmp_path: Path) -> None:
    samples = whole(read(tmp_path, files), 4.0)
    assert [len(sample.heads) for sample in samples] == [1, 1, 1]
    slow_and_fast(files, samples)


def test_resamples_are_those_of_loops_over_draws(files: list[Files], tmp_path: Path) -> None:
    slow_and_fast(files, resampled(read(tmp_path, files), 4.0, 25, seed=3))


def test_settings_share_heads_and_have_packs_of_their_own(files: list[Files], tmp_path: Path) -> None:
    settings = read(tmp_path, files)
    first, second, third = resampled(settings, 4.0, 200, seed=3)
    assert (first.heads == second.heads).all() and (first.heads == third.heads).all()
    assert len(np.unique(first.heads, axis=0)) > 100
    assert [sample.packs.max() + 1 for sample in (first, second, third)] == [3, 2, 1]
    (alone,) = resampled(settings[1:2], 4.0, 200, seed=3)
    for name in ("heads", "stratified", "packs"):
        assert (getattr(alone, name) == getattr(second, name)).all()  # whatever other settings there are
    (other,) = resampled(settings[:1], 4.0, 200, seed=4)
    for name in ("heads", "stratified", "packs"):
        assert (getattr(other, name) != getattr(first, name)).any()


@pytest.mark.parametrize("packs", [1, 2, 3, 6])
def test_means_of_drawn_packs_vary_as_those_of_as_many_new_texts_would(packs: int, tmp_path: Path) -> None:
    """Their variance is that of the packs, divided by n - 1, over n. Of n packs drawn it would be smaller by 1 / n."""
    rows, mass = make_rows(np.random.default_rng(0), packs=packs)
    rows["e_sub"] = rows["pack"] ** 2
    (drawn,) = resampled(read(tmp_path, [(rows, mass)]), 4.0, 5000, seed=0)
    assert drawn.packs.shape == (5000, max(1, packs - 1))
    expected = np.var(np.arange(packs) ** 2, ddof=1) / packs if packs > 1 else 0
    assert np.var(drawn.mean("e_sub")) == pytest.approx(expected, rel=0.1)


def test_intervals_hold_95_percent_of_the_draws(files: list[Files], tmp_path: Path) -> None:
    settings = read(tmp_path, files)
    (as_is, *_), (drawn, *_) = whole(settings, 4.0), resampled(settings, 4.0, 400, seed=0)
    numbers = estimate(Sample.mean, as_is, drawn, "e_topk", 8.0)
    values = np.sort(drawn.mean("e_topk", 8.0))
    assert numbers.value == pytest.approx(files[0][0].query("k == 30").e_topk.mean(), abs=1e-6)
    assert values[9] <= numbers.low <= values[10] and values[389] <= numbers.high <= values[390]


@pytest.mark.parametrize("extreme", ["least", "largest"])
def test_the_interval_of_an_extreme_comes_from_those_of_each_number(extreme: Literal["least", "largest"]) -> None:
    rng = np.random.default_rng()
    true, draws = rng.normal(size=(1, 5)), rng.normal(size=(2000, 5))
    true[0, 3], draws[7, 2], draws[:, 4] = np.nan, np.nan, np.nan  # two numbers that are not defined, one draw
    found = estimate_extreme(lambda values: values, true, draws, extreme)
    plain, corrected = ([], []), ([], [])
    for column in range(3):
        values = sorted(value for value in draws[:, column] if not math.isnan(value))
        for ends, share in ((plain, 0.025), (corrected, 0.025 / 3)):
            ends[0].append(values[round(share * (len(values) - 1))])
            ends[1].append(values[round((1 - share) * (len(values) - 1))])
    if extreme == "least":
        expected = (true[0, :3].min(), min(plain[0]), min(corrected[1]))
    else:
        expected = (true[0, :3].max(), max(corrected[0]), max(plain[1]))
    assert tuple(found) == pytest.approx(expected, abs=0.1)
    assert found.low < found.high


def width(settings: list[CapturedSetting], name: str) -> float:
    numbers = estimate(Sample.mean, *whole(settings, 4.0), *resampled(settings, 4.0, 300, seed=0), name)
    return numbers.high - numbers.low


def test_spread_over_heads_and_over_packs_both_widen_intervals(tmp_path: Path) -> None:
    rows, mass = make_rows(np.random.default_rng(0), packs=8)
    rows["e_topk"] = rows["layer"] + rows["head"]
    rows["e_sub"] = rows["pack"]
    rows["e_nosub"] = rows["e_topk"] + rows["e_sub"]
    rows["e_exact_nosub"] = 0.1 * (1 + rows["query"])
    settings = read(tmp_path, [(rows, mass)])
    # Means of n draws have a standard error of the standard deviation over the root of n.
    for_heads = 2 * 1.96 * np.std([0, 1, 2, 1, 2, 3]) / np.sqrt(6)
    for_packs = 2 * 1.96 * np.std(range(8)) / np.sqrt(8 - 1)
    assert width(settings, "e_topk") == pytest.approx(for_heads, rel=0.2)
    assert width(settings, "e_sub") == pytest.approx(for_packs, rel=0.2)
    assert width(settings, "e_nosub") == pytest.approx(np.hypot(for_heads, for_packs), rel=0.2)
    assert width(settings, "e_exact_nosub") == pytest.approx(0, abs=1e-12)  # the same in every head and pack
    one = (rows[rows["pack"] == 5], mass[mass["pack"] == 5])
    assert width(read(tmp_path, [one]), "e_sub") == pytest.approx(0, abs=1e-12)


def test_heads_of_equal_entropy_go_by_layer_and_number(tmp_path: Path) -> None:
    rows, mass = make_rows(np.random.default_rng(), heads=5)
    rows["h_mid"] = np.where(rows["layer"] == 1, 0.25, 0.5)
    (setting,) = read(tmp_path, [(rows, mass)])
    assert [group.tolist() for group in setting.quartiles] == [[5, 6, 7], [8, 9], [0, 1, 2], [3, 4]]
    assert [[setting.heads[place] for place in group] for group in setting.quartiles] == slow_quartiles(
        rows.to_dict("records")
    )


def test_ranks_of_what_is_constant_say_nothing(tmp_path: Path) -> None:
    rows, mass = make_rows(np.random.default_rng(), heads=15, packs=8)
    # The same on all heads, and their means must not be rounded apart.
    rows["residual_share_hat"] = rows["pack"].map(np.random.default_rng(0).random(8).item)
    settings = read(tmp_path, [(rows, mass)])
    (claim,) = (claim for claim in CLAIMS if claim.name == "residual_share_rises_with_entropy")
    assert (claim.number(resampled(settings, 4.0, 300, seed=0)[0]) == 0).all()


def test_budgets_of_the_same_k_count_once(tmp_path: Path) -> None:
    rows, mass = make_rows(np.random.default_rng())
    (claim,) = (claim for claim in CLAIMS if claim.name == "errors_fall_with_k")
    (before,) = whole(read(tmp_path, [(rows, mass)]), 4.0)
    twice = pd.concat([rows, rows[rows["k"] == 7].assign(budget_percent=5.0)])
    (after,) = whole(read(tmp_path, [(twice, mass)]), 4.0)
    assert claim.number(after).tolist() == claim.number(before).tolist()
    (single,) = whole(read(tmp_path, [(twice[twice["k"] == 7], mass)]), 4.0)
    assert [claim.applies(sample.setting) for sample in (before, after, single)] == [True, True, False]


@pytest.mark.parametrize(("smallest", "ks"), [(1, [1]), (9, [10])])
def test_mass_curves_are_read_at_their_first_k_at_least(smallest: int, ks: list[int], tmp_path: Path) -> None:
    rows, mass = make_rows(np.random.default_rng())
    rows["k"] = rows["k"].map({1: 0, 7: 0, 30: 1})
    rows = rows[rows["budget_percent"] != 2]
    mass = mass[mass["k"] >= smallest]
    (sample,) = whole(read(tmp_path, [(rows, mass)]), 4.0)
    (claim,) = (claim for claim in CLAIMS if claim.name == "mass_recovered_faster_at_low_entropy")
    low, *_, high = slow_quartiles(rows.to_dict("records"))
    expected = [
        mean(row["c_mid"] for row in of_k if (row["layer"], row["head"]) in low)
        - mean(row["c_mid"] for row in of_k if (row["layer"], row["head"]) in high)
        for k in ks
        for of_k in [mass[mass["k"] == k].to_dict("records")]
    ]
    assert claim.number(sample)[0] == pytest.approx(min(expected), abs=1e-9)
