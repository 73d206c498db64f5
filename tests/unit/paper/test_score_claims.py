"""The paper's statements about scores, read on scores and on the likelihood of right answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.records import record

from residual_mass.benchmarks.columns import FIDELITY, RESULTS
from residual_mass.files import csv_text, read_csv
from residual_mass.paper import score_claims
from residual_mass.statements import COLUMNS
from residual_mass.study.specs import ScoreClaimsSpec

SCORE = {
    "benchmark": "ruler", "backbone": "smol", "length": "1k", "task": "all", "method": "topk_phi", "maps": "2k",
    "metric": "string_match", "budget_percent": "4", "k_mean": "21.000000", "gain": "0.010000",
    "gain_ci_low": "-0.020000", "gain_ci_high": "0.040000",
}  # fmt: skip
DISTANCE = {
    "text": "ruler", "backbone": "smol", "length": "1k", "task": "all", "continuation": "gold", "state": "own",
    "method": "topk_phi", "maps": "2k", "metric": "nll", "budget_percent": "4", "k_mean": "21", "gain": "-0.05",
    "gain_ci_low": "-0.07", "gain_ci_high": "-0.01",
}  # fmt: skip
SHORT_MAPS = {"maps": "512", "length": "1k"}


def claims(folder: Path, scores: list[dict[str, str]], distances: list[dict[str, str]]) -> list[dict[str, str]]:
    mismatch = [SCORE | SHORT_MAPS | {"gain": "-0.3", "gain_ci_low": "-0.4", "gain_ci_high": "-0.2"}]
    tables = {
        "ruler.csv": (RESULTS, scores), "mismatch.csv": (RESULTS, mismatch), "fidelity.csv": (FIDELITY, distances),
    }  # fmt: skip
    for name, (columns, rows) in tables.items():
        (folder / name).write_text(csv_text(columns, rows))
        record(folder / name)
    out = folder / "claims.csv"
    spec = ScoreClaimsSpec(budget_percent=4.0, recipe=1)
    score_claims.run(spec, [folder / "ruler.csv"], folder / "mismatch.csv", [folder / "fidelity.csv"], out)
    return read_csv(out, COLUMNS, "score-claims")


def test_a_statement_is_read_on_scores_and_on_likelihood(tmp_path: Path) -> None:
    on_scores, on_gold, *_ = claims(tmp_path, [SCORE], [DISTANCE])
    assert (on_scores["statement"], on_gold["statement"]) == ("Completion is better than top-K on RULER.",) * 2
    assert (on_scores["estimate"], on_scores["verdict"]) == ("0.010000", "undecided")
    # A lower negative log-likelihood is better, so the gain counts with the other sign and the interval turns round.
    assert (on_gold["estimate"], on_gold["ci_low"], on_gold["ci_high"]) == ("0.050000", "0.010000", "0.070000")
    assert on_gold["verdict"] == "holds" and on_gold["statistic"].startswith("negative log-likelihood: gain at 4 %")
    assert on_scores["primary"] == on_gold["primary"] == "1" and on_gold["k"] == "21"


def test_only_gold_answers_all_tasks_and_completion_are_read(tmp_path: Path) -> None:
    others = [
        DISTANCE | {"continuation": "greedy"}, DISTANCE | {"task": "ruler_vt"}, DISTANCE | {"method": "topk_phi_nosub"},
        DISTANCE | {"metric": "same_top"},
    ]  # fmt: skip
    found = claims(tmp_path, [SCORE | {"task": "ruler_vt"}, SCORE | {"method": "topk"}], others)
    assert [row["claim"] for row in found] == ["maps_beyond_their_length"]


@pytest.mark.parametrize(
    ("gain", "low", "high", "expected"),
    [("0.4", "0.3", "0.5", "holds"), ("-0.4", "-0.5", "-0.3", "does not hold"), ("0.1", "", "", "undecided")],
)
def test_short_maps_are_read_on_scores_and_on_text(
    gain: str, low: str, high: str, expected: str, tmp_path: Path
) -> None:
    """A larger KL than top-K's is in favour of the statement; dense states and long enough maps are not asked."""
    gains = {"gain": gain, "gain_ci_low": low, "gain_ci_high": high}
    text = DISTANCE | SHORT_MAPS | {"text": "wiki", "continuation": "following", "metric": "kl"} | gains
    not_asked = [text | {"state": "dense"}, text | {"maps": "2k"}, text | {"continuation": "greedy"}]
    on_scores, on_text = claims(tmp_path, [], [text, *not_asked])
    assert on_scores["verdict"] == "holds" and (on_scores["ci_low"], on_scores["ci_high"]) == ("0.200000", "0.400000")
    assert (on_text["corpus"], on_text["verdict"]) == ("wiki", expected)
    assert on_text["statistic"] == "KL(Full || arm): loss at 4 %, maps of 512"
