"""The paper's statements as numbers, against means of the rows, with every head and pack drawn by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pytest
from tests.unit.diagnostics.slow_claims import SETTINGS, make_rows, read, slow_claims, slow_draws, slow_joint_claims

from residual_mass.diagnostics.claims import PAPER_CLAIMS, Claim
from residual_mass.diagnostics.samples import estimate

CLAIM = {claim.name: claim for claim in PAPER_CLAIMS}


def the_one(claim: Claim, data: object) -> np.ndarray:
    """[B]: a claim's number, or the one of its numbers that counts."""
    numbers = claim.number(data)
    numbers = numbers.reshape(len(numbers), -1)
    return numbers.min(axis=1) if claim.extreme == "least" else numbers.max(axis=1)


def budget_of_five(rows: pd.DataFrame) -> pd.DataFrame:
    """With a budget that gives the K of another one."""
    return pd.concat([rows, rows[rows["k"] == 7].assign(budget_percent=5.0)])


CHANGES = {
    "as it is": lambda rows: rows,
    "heads of equal entropy": lambda rows: rows.assign(h_mid=np.where(rows["layer"] == 1, 0.25, 0.5)),
    "two budgets of one K": budget_of_five,
}


@pytest.mark.parametrize("change", CHANGES)
def test_numbers_are_those_of_the_drawn_rows(change: str, tmp_path: Path) -> None:
    """Of the full data, and of all draws."""
    rng = np.random.default_rng()
    files = [make_rows(rng, corpus, length, packs=packs) for corpus, length, packs in SETTINGS]
    files = [(CHANGES[change](rows), mass) for rows, mass in files]
    as_is = read(tmp_path, files)
    for samples in (as_is, [sample.resampled(5, seed=3) for sample in as_is]):
        draws = [slow_draws(pair, sample) for pair, sample in zip(files, samples, strict=True)]
        about_all = {claim.name for claim in PAPER_CLAIMS if claim.about == "all"}
        settings = [(about_all, samples, [slow_joint_claims(of_draw) for of_draw in zip(*draws, strict=True)])]
        for of_setting, sample in zip(draws, samples, strict=True):
            applying = {claim.name for claim in PAPER_CLAIMS if claim.applies(sample)}
            settings.append((applying, sample, [slow_claims(draw) for draw in of_setting]))
        for names, data, expected in settings:
            assert names == set(expected[0])
            for name in names:
                numbers = [draw[name] for draw in expected]
                np.testing.assert_allclose(the_one(CLAIM[name], data), numbers, rtol=0, atol=1e-9, err_msg=name)


def test_a_single_budget_says_nothing_about_several(tmp_path: Path) -> None:
    rows, mass = make_rows(np.random.default_rng())
    (single,) = read(tmp_path, [(rows[rows["k"] == 7], mass)])
    assert CLAIM["errors_fall_with_k"].number(single).size == 0


def test_settings_share_heads_and_have_packs_of_their_own(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    settings = read(tmp_path, [make_rows(rng, corpus, length, packs=packs) for corpus, length, packs in SETTINGS])
    first, second, third = (setting.resampled(200, seed=3) for setting in settings)
    assert (first.heads == second.heads).all() and (first.heads == third.heads).all()
    assert len(np.unique(first.heads, axis=0)) > 100
    assert [np.unique(sample.packs.sum(axis=1)).tolist() for sample in (first, second, third)] == [[2], [1], [1]]
    other = settings[0].resampled(200, seed=4)
    assert all((getattr(other, name) != getattr(first, name)).any() for name in ("heads", "stratified", "packs"))


@pytest.mark.parametrize("extreme", ["least", "largest"])
def test_the_interval_of_an_extreme_comes_from_those_of_each_number(extreme: Literal["least", "largest"]) -> None:
    rng = np.random.default_rng()
    true, draws = rng.normal(size=(1, 5)), rng.normal(size=(2000, 5))
    draws[7, 2], true[0, 3:], draws[:, 3:] = np.nan, np.nan, np.nan  # one draw, two numbers that are not defined
    defined = [[value for value in draws[:, column] if not math.isnan(value)] for column in range(3)]

    def ends(share: float) -> list[float]:
        return [np.quantile(values, share) for values in defined]

    expected = (true[0, :3].min(), min(ends(0.025)), min(ends(1 - 0.025 / 3)))
    if extreme == "largest":
        expected = (true[0, :3].max(), max(ends(0.025 / 3)), max(ends(0.975)))
    assert tuple(estimate(true, draws, extreme)) == pytest.approx(expected)
    alone = (true[0, 0], ends(0.025)[0], ends(0.975)[0])
    assert tuple(estimate(true[:, 0], draws[:, 0], extreme)) == pytest.approx(alone)


def test_ranks_of_what_is_constant_say_nothing(tmp_path: Path) -> None:
    rows, mass = make_rows(np.random.default_rng(), heads=15, packs=8)
    # The same on all heads, and their means must not be rounded apart.
    rows["residual_share_hat"] = rows["pack"].map(np.random.default_rng(0).random(8).item)
    (setting,) = read(tmp_path, [(rows, mass)])
    assert (CLAIM["residual_share_rises_with_entropy"].number(setting.resampled(300, seed=0)) == 0).all()


@pytest.mark.parametrize(("smallest", "k"), [(1, 1), (9, 10)])
def test_mass_curves_are_read_at_their_first_k_at_least(smallest: int, k: int, tmp_path: Path) -> None:
    rows, mass = make_rows(np.random.default_rng())
    rows["k"] = rows["k"].map({1: 0, 7: 0, 30: 1})
    mass = mass[mass["k"] >= smallest]
    (setting,) = read(tmp_path, [(rows, mass)])
    (slow,) = slow_draws((rows, mass), setting)
    low, *_, high = (curve.loc[curve["k"] == k, "c_mid"].mean() for curve in slow.curves)
    found = CLAIM["mass_recovered_faster_at_low_entropy"].number(setting)
    assert found.tolist() == [[pytest.approx(low - high, abs=1e-9)]]
