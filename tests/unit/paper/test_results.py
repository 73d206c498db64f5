"""A damaged or mixed result CSV is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sample_results import COLUMNS, Rows, edit, maps_arms, result_rows, write_rows

from residual_mass.benchmarks import scoring
from residual_mass.paper.cells import Point
from residual_mass.paper.readers import results
from residual_mass.paper.readers.results import load_results


def test_summary_and_tasks_are_read(tmp_path: Path) -> None:
    rows = edit(result_rows({("topk", 4.0): 0.625}), {"task": "all"}, n=12, flags="beats_full floor", cut_share="0.25")
    path = write_rows(tmp_path / "ruler_smol_1k.csv", edit(rows, {"task": "vt"}, data="simulated+stand-in"))
    (result,) = load_results(path)
    assert (result.benchmark, result.backbone, result.length, result.study) == ("ruler", "smol", "1k", "mini")
    assert (result.tasks, result.examples("all"), result.examples("vt")) == (("niah", "vt"), 12, 8)
    assert list(result.phi_shas) == ["2k"] and {len(arms) for arms in result.scores.values()} == {10}
    score = result.score(Point("ruler", "1k", "smol", "topk", 4.0))
    assert (score.value, score.low, score.high, score.gain, score.gain_p) == (0.625, 0.525, 0.775, None, None)
    assert (score.flags, score.cut_share, score.source) == (("beats_full", "floor"), 0.25, path)
    completed = result.score(Point("ruler", "1k", "smol", "topk_phi", 4.0, task="vt"))
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
        result.score(Point("ruler", result.length, "smol", "topk_phi", 4.0, maps=maps)).value
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
    with pytest.raises(ValueError, match=rf"{path}: ruler smol 512 topk_phi at 4% is there with maps 512 and 1k"):
        load_results(path)[0].score(Point("ruler", "512", "smol", "topk_phi", 4.0))


@pytest.mark.parametrize(
    ("task", "method", "maps"), [("ghost", "topk", None), ("all", "topk_phi_nosub", None), ("all", "topk_phi", "4k")]
)
def test_a_point_that_is_not_there_is_named(tmp_path: Path, task: str, method: str, maps: str | None) -> None:
    path = write_rows(tmp_path / "mixed.csv", mixed())
    point = Point("ruler", "512", "smol", method, 4.0, task, maps)
    with pytest.raises(ValueError, match=rf"{path}: no cell for {point}; rerun"):
        load_results(path)[0].score(point)


def change(index: int, **fields: str) -> Callable[[Rows], None]:
    return lambda rows: rows[index].update(fields)


@pytest.mark.parametrize(
    ("make", "change_rows", "message"),
    [
        (result_rows, change(-1, value="nan"), r":31: all topk_phi_nosub 8: value is 'nan'"),
        (result_rows, change(-1, value="inf"), r"value is 'inf'"),
        (result_rows, change(-1, ci_low=""), r"ci_low is ''"),
        (result_rows, change(0, value="nan"), r":2: niah full: value is 'nan'"),
        (result_rows, change(-1, gain="nan"), r"gain is 'nan'"),
        (result_rows, change(-1, gain=""), r"gain is '', but gain_p is '0.800000'"),
        (result_rows, change(-1, gain_p="1.5"), r"gain_p is 1.5, outside 0 to 1"),
        (result_rows, change(-1, cut_share="-0.1"), r"cut_share is -0.1, outside"),
        (result_rows, change(-1, mde="some"), r"mde is 'some', not a finite number"),
        (result_rows, change(-1, flags="floor roof"), r"flags holds 'roof'; known are beats_full"),
        (result_rows, change(-1, data="made up"), r"data holds 'made up'; known are original"),
        (result_rows, change(-1, study="other"), r"study should have one value, found 'mini' and 'other'"),
        (result_rows, change(3, model_id="org/Else"), r"model_id should have one value"),
        (result_rows, change(3, backbone="big"), r"backbone should have one value"),
        (result_rows, change(3, prompts_sha="ee"), r"prompts_sha should have one value"),
        (result_rows, change(-1, phi_sha="ee"), r"maps 2k have two values of phi_sha"),
        (result_rows, change(-1, phi_sha=""), r"maps 2k have two values of phi_sha"),
        (result_rows, change(-1, maps=""), r"maps is '' for method topk_phi_nosub"),
        (result_rows, change(1, maps="4k"), r":3: maps is '4k' for method topk"),
        (result_rows, change(1, phi_sha="ee"), r":3: phi_sha is 'ee' for method topk"),
        (result_rows, change(-1, n="9"), r"all was not scored on one and the same number of examples"),
        (result_rows, change(0, n="9"), r"niah was not scored on one and the same number of examples"),
        (result_rows, change(0, method="topk_magic"), r":2: unknown method 'topk_magic'"),
        (result_rows, change(0, budget_percent="4"), r":2: budget_percent is '4' for method full"),
        (result_rows, change(1, budget_percent=""), r":3: budget_percent is '' for method topk"),
        (result_rows, change(1, budget_percent="few"), r":3: budget_percent is 'few', not a finite number"),
        (result_rows, change(2, budget_percent="2"), r":4: a second row for niah topk at 2%"),
        (result_rows, lambda rows: rows.pop(), r"ruler 1k: cut short, no row for all topk_phi_nosub at 8%"),
        (result_rows, lambda rows: rows.pop(4), r"cut short, no row for niah topk_phi at 2% with maps 2k"),
        (result_rows, lambda rows: rows.__delitem__(slice(20, None)), r"cut short, no row for all full"),
        (result_rows, lambda rows: rows.__delitem__(slice(0, 20)), r"no row of a single task"),
        (result_rows, lambda rows: rows.clear(), r"backbone should have one value, found no row"),
        (mixed, lambda rows: rows.pop(2), r"ruler 512: cut short, no row for niah topk_phi at 4% with maps 512"),
        (mixed, lambda rows: rows.pop(), r"ruler 1k: cut short, no row for all topk_phi at 4% with maps 1k"),
        (mixed, lambda rows: rows.append(rows[-1]), r":26: a second row for all topk_phi at 4% with maps 1k"),
        (mixed, change(-1, study="other"), r"study should have one value"),
        (mixed, change(-1, phi_sha="ee"), r"maps 1k have two values of phi_sha"),
        (mixed, change(-1, length="2k"), r"ruler 1k: cut short, no row for all topk_phi at 4% with maps 1k"),
    ],
)
def test_bad_rows_are_refused(
    tmp_path: Path, make: Callable[[], Rows], change_rows: Callable[[Rows], None], message: str
) -> None:
    change_rows(rows := make())
    path = write_rows(tmp_path / "ruler_smol_1k.csv", rows)
    with pytest.raises(ValueError, match=rf"^{path}.*{message}"):
        load_results(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_rows(tmp_path / "whole.csv", result_rows()).read_bytes()
    cut = tmp_path / "cut.csv"
    line_ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in {*line_ends[:-1], *range(0, len(whole), 53), len(whole) - 1}:
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"^{cut}"):
            load_results(cut)


@pytest.mark.parametrize("column", ["value", "weights", "ci_high", "maps", "gain_p", "data"])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    (path := tmp_path / "r.csv").write_text(",".join(name for name in COLUMNS if name != column) + "\n")
    with pytest.raises(ValueError, match=rf"{path}: column {column} is missing"):
        load_results(path)


def test_a_missing_file_and_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.csv: no such file"):
        load_results(tmp_path / "gone.csv")
    (binary := tmp_path / "binary.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.csv: not UTF-8"):
        load_results(binary)


def test_the_score_stage_writes_the_columns_that_are_read_here() -> None:
    assert scoring.COLUMNS == COLUMNS and set(results.COLUMNS) <= set(COLUMNS)
    assert scoring.DATA_ORDER == results.KINDS
