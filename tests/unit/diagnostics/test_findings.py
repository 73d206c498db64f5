"""The CSV files of findings: columns, numbers, verdicts, and refused files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tests.unit.diagnostics.slow_claims import (
    ABOUT,
    BUDGETS,
    SETTINGS,
    Files,
    make_rows,
    read,
    slow_claims,
    slow_draws,
    slow_joint_claims,
    write_files,
)

from residual_mass.diagnostics import findings
from residual_mass.spec.specs import FindingsSpec

SPEC = FindingsSpec(
    study="test", budget_percent=4.0, corpus="wiki", length="1k", bootstrap_resamples=20, seed=0, recipe=1
)
OUT = ("accounting.csv", "claims.csv")


def run(folder: Path, files: list[Files], spec: FindingsSpec = SPEC) -> list[pd.DataFrame]:
    findings.run(spec, *write_files(folder, files), *(folder / name for name in OUT))
    return [pd.read_csv(folder / name) for name in OUT]


@pytest.fixture
def files() -> list[Files]:
    rng = np.random.default_rng()
    return [make_rows(rng, corpus, length, packs=packs) for corpus, length, packs in SETTINGS]


def test_accounting_is_that_of_rows_and_draws(files: list[Files], tmp_path: Path) -> None:
    table, _ = run(tmp_path, files)
    assert list(table) == findings.ACCOUNTING_COLUMNS and len(table) == len(SETTINGS) * len(BUDGETS)
    lines = table.itertuples()
    for pair, one, (corpus, length, packs) in zip(files, read(tmp_path, files), SETTINGS, strict=True):
        (s,), draws = slow_draws(pair, one), slow_draws(pair, one.resampled(SPEC.bootstrap_resamples, SPEC.seed))
        for budget, k in BUDGETS.items():
            line = next(lines)
            assert (line.budget_percent, line.k, line.packs, line.heads, line.rows) == (budget, k, packs, 6, 12 * packs)
            assert {name: getattr(line, name) for name in ABOUT} == ABOUT
            assert (line.corpus, line.length) == (corpus, length)
            for name in ("e_topk", "e_nosub", "e_sub", "log_z_error"):
                value, *drawn = (draw.mean("gap" if name == "log_z_error" else name, k) for draw in (s, *draws))
                found = [getattr(line, f"{name}{end}") for end in ("", "_ci_low", "_ci_high")]
                assert found == pytest.approx([value, *np.nanquantile(drawn, [0.025, 0.975])], abs=1e-6)
            assert line.e_exact_nosub == pytest.approx(s.mean("e_exact_nosub", k), abs=1e-6)
            assert line.e_exact_sub == pytest.approx(s.mean("e_exact_sub", k), abs=1e-9)
            assert line.clamped_share == pytest.approx(s.mean("clamped", k), abs=1e-6)


def test_claims_are_those_of_every_setting_and_of_all(files: list[Files], tmp_path: Path) -> None:
    *_, table = run(tmp_path, files)
    assert list(table) == findings.CLAIM_COLUMNS and len(table) == 2 * 15 + 14 + 5
    of_all_k = ["completion_helps_in_every_quartile", "errors_fall_with_k", "exact_sub_is_exact"]
    draws = [slow_draws(pair, one)[0] for pair, one in zip(files, read(tmp_path, files), strict=True)]
    dropped = [{k: s.mean("clamped", k) for k in BUDGETS.values()} for s in draws]
    for s, clamped, (corpus, length, packs) in zip(draws, dropped, SETTINGS, strict=True):
        lines = table.query("corpus == @corpus and length == @length").set_index("claim")
        assert lines["estimate"].to_dict() == pytest.approx(slow_claims(s), abs=1e-6, nan_ok=True)
        only_cwe = lines.index == "sub_wins_on_most_heads"
        primary = (length == "1k") & np.where(only_cwe, corpus == "cwe", corpus == "wiki")
        assert (lines["primary"] == primary.astype(int)).all() and set(lines["packs"]) == {packs}
        assert (lines["k"].fillna(0) == np.where(lines.index.isin(of_all_k), 0, 7)).all()
        shares = np.where(lines.index.isin(of_all_k), np.mean([*clamped.values()]), clamped[7])
        assert lines["clamped_share"].to_numpy() == pytest.approx(shares, abs=1e-6)
    joint = table.query("corpus == 'all'").set_index("claim")
    assert set(joint["length"]) == {"all"} and set(joint["primary"]) == {1} and set(joint["packs"]) == {1}
    at_one = np.mean([each[7] for each in dropped])
    at_all = np.mean([[*each.values()] for each in dropped])
    shares = np.where(joint.index.isin(of_all_k), at_all, at_one)
    assert joint["clamped_share"].to_numpy() == pytest.approx(shares, abs=1e-6) and joint["k"].isna().all()
    expected = slow_joint_claims(draws)
    assert joint["estimate"].to_dict() == pytest.approx(expected, abs=1e-6)
    exact = joint.loc["exact_sub_is_exact"]
    assert exact.estimate == pytest.approx(expected["exact_sub_is_exact"], rel=1e-3)
    assert exact.ci_low < exact.estimate < exact.ci_high
    signs = (table["ci_low"] > 0).astype(int) - (table["ci_high"] < 0)
    assert (table["verdict"] == signs.map({1: "holds", 0: "undecided", -1: "does not hold"})).all()
    assert table["statement"].str.endswith(".").all() and table[["statistic", "shown_in"]].notna().all(axis=None)


def test_rounding_errors_decide_nothing(tmp_path: Path) -> None:
    rows, mass = make_rows(np.random.default_rng(), heads=5)
    rows = rows.assign(e_topk=0.1, e_sub=0.1, e_nosub=0.1, log_z_hat=0.3, log_z_true=0.1 + 0.2, residual_share_hat=0.7)
    accounting, table = run(tmp_path, [(rows, mass.assign(c_mid=0.1))])
    assert set(accounting["e_topk_ci_low"]) == set(accounting["e_topk_ci_high"]) == {0.1}
    undecided = table[~table["claim"].isin(["exact_sub_is_exact", "exact_nosub_lower_somewhere"])]
    decided = undecided[undecided["verdict"] != "undecided"]
    assert decided["claim"].tolist() == ["nosub_wins_on_most_heads"]  # none of the heads, which is no rounding error
    assert not any("-0.000000" in (tmp_path / name).read_text() for name in OUT)


def test_where_nothing_is_left_there_is_no_log_mass(tmp_path: Path) -> None:
    """K is all of the mid-region: no residual, no errors, and no mean of no logarithms."""
    rows, mass = make_rows(np.random.default_rng())
    other = make_rows(np.random.default_rng(), "cwe")
    gone = rows["k"] == 30
    for name in ("e_topk", "e_sub", "residual_share_hat"):
        rows.loc[gone, name] = 0
    for name in ("log_z_hat", "log_z_true"):
        rows.loc[gone, name] = -np.inf
    spec = dataclasses.replace(SPEC, budget_percent=8.0)
    accounting, claims = run(tmp_path, [(rows, mass), other], spec)
    assert accounting["log_z_error"].isna().tolist() == [False, False, True, False, False, False]
    assert accounting["log_z_error_ci_low"].isna().tolist() == [False, False, True, False, False, False]
    lines = claims.query("corpus == 'wiki'").set_index("claim")
    underestimated = lines.loc["residual_underestimated"]
    assert underestimated[["estimate", "ci_low", "ci_high"]].isna().all() and underestimated.verdict == "undecided"
    for name in ("gain_largest_at_high_entropy", "gain_rises_with_entropy", "residual_share_rises_with_entropy"):
        assert lines.loc[name, ["estimate", "ci_low", "ci_high"]].tolist() == [0, 0, 0]
    assert lines.loc["completion_helps_in_every_quartile"].estimate <= 0
    somewhere = claims.set_index("claim").loc["residual_overestimated_somewhere"]
    (error,) = accounting.query("corpus == 'cwe' and k == 30")["log_z_error"]
    assert somewhere.estimate == pytest.approx(error, abs=2e-6)  # of the other setting alone


def test_draws_that_define_no_mean_are_left_out(tmp_path: Path) -> None:
    rows, mass = make_rows(np.random.default_rng(), packs=1)
    first = (rows["layer"] == 0) & (rows["head"] == 0)
    rows["log_z_true"] = 1.0
    rows["log_z_hat"] = np.where(first, 1.5, -np.inf)  # a third of all draws lack this head
    accounting, _ = run(tmp_path, [(rows, mass)])
    for name in ("log_z_error", "log_z_error_ci_low", "log_z_error_ci_high"):
        assert accounting[name].tolist() == [0.5, 0.5, 0.5]


def test_rows_in_another_order_give_the_same_bytes(files: list[Files], tmp_path: Path) -> None:
    run(tmp_path, files)
    (other := tmp_path / "other").mkdir()
    run(other, [tuple(frame.sample(frac=1) for frame in pair) for pair in files])
    for name in OUT:
        assert (other / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_backbone_needs_four_heads(files: list[Files], tmp_path: Path) -> None:
    rows, mass = (frame[frame["layer"] == 0] for frame in files[0])
    with pytest.raises(ValueError, match="heads_0.parquet: quartiles need 4 heads, the backbone has 3; leave it out"):
        read(tmp_path, [(rows, mass)])
    read(tmp_path, [make_rows(np.random.default_rng(), heads=2)])
