"""Result CSVs of one benchmark and of several; what they lack is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_results import Rows, edit, maps_arms, place, result_rows, write_rows

from residual_mass.benchmarks.columns import RESULTS
from residual_mass.paper.readers.results import load_results
from residual_mass.paper.table import Interval


def test_summary_and_tasks_are_read(tmp_path: Path) -> None:
    rows = edit(result_rows({("topk", 4.0): 0.625}), {"task": "all"}, n=12, flags="beats_full floor", cut_share="0.25")
    path = write_rows(tmp_path / "ruler_smol_1k.csv", edit(rows, {"task": "vt"}, data="simulated+stand-in"))
    (result,) = load_results(path)
    assert (result.benchmark, result.backbone, result.length, result.study) == ("ruler", "smol", "1k", "mini")
    assert (result.tasks, result.examples("all"), result.examples("vt")) == (("niah", "vt"), 12, 8)
    assert list(result.phi_shas) == ["2k"] and {len(arms) for arms in result.scores.values()} == {10}
    score = result.score(place("ruler", "1k", "smol", "topk", 4.0))
    assert (score.value, score.interval, score.gain, score.gain_p) == (0.625, Interval(0.525, 0.775), None, None)
    assert (score.flags, score.cut_share, score.source) == (("beats_full", "floor"), 0.25, path)
    completed = result.score(place("ruler", "1k", "smol", "topk_phi", 4.0, task="vt"))
    assert (completed.value, completed.gain, completed.gain_p, completed.mde) == (0.25, 0.01, 0.8, 0.2)
    assert completed.data == ("simulated", "stand-in")


def mixed(**facts: str) -> Rows:
    """Two lengths in one file, each with two feature maps."""
    arms = maps_arms("512", "1k")
    return result_rows({("topk_phi", 4.0, "512"): 0.7}, arms, length="512", prompts_sha="a", **facts) + result_rows(
        {("topk_phi", 4.0, "512"): 0.01}, arms, length="1k", prompts_sha="b", **facts
    )


def test_a_mixed_file_is_told_apart_by_length_and_maps(tmp_path: Path) -> None:
    short, long = load_results(write_rows(tmp_path / "mixed.csv", mixed()))
    assert (short.length, short.prompts_sha, long.length, long.prompts_sha) == ("512", "a", "1k", "b")
    assert list(short.phi_shas) == list(long.phi_shas) == ["512", "1k"]
    values = [
        result.score(place("ruler", result.length, "smol", "topk_phi", 4.0, maps=maps)).value
        for result in (short, long)
        for maps in ("512", "1k")
    ]
    assert values == [0.7, 0.5, 0.01, 0.5]


def test_maps_that_only_one_length_uses_are_not_told_of_the_other(tmp_path: Path) -> None:
    rows = result_rows(None, maps_arms("512"), length="512") + result_rows(None, maps_arms("512", "1k"), length="1k")
    short, long = load_results(write_rows(tmp_path / "mixed.csv", rows))
    assert (list(short.phi_shas), list(long.phi_shas)) == (["512"], ["512", "1k"])


def test_a_point_that_does_not_say_which_of_two_maps_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mixed.csv", mixed())
    with pytest.raises(ValueError, match=rf"{path}: has ruler smol 512 topk_phi at 4% with maps 512 and 1k"):
        load_results(path)[0].score(place("ruler", "512", "smol", "topk_phi", 4.0))


@pytest.mark.parametrize(
    ("task", "method", "maps"), [("ghost", "topk", None), ("all", "topk_phi_nosub", None), ("all", "topk_phi", "4k")]
)
def test_a_point_that_is_not_there_is_named(tmp_path: Path, task: str, method: str, maps: str | None) -> None:
    path = write_rows(tmp_path / "mixed.csv", mixed())
    wanted = place("ruler", "512", "smol", method, 4.0, task, maps)
    with pytest.raises(ValueError, match=rf"{path}: no cell for {wanted}; rerun"):
        load_results(path)[0].score(wanted)


@pytest.mark.parametrize("column", ["value", "gain_p", "data"])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    """As in a file of an older version."""
    (path := tmp_path / "r.csv").write_text(",".join(name for name in RESULTS if name != column) + "\n")
    with pytest.raises(ValueError, match=rf"{path}: column {column} is missing"):
        load_results(path)
