"""Tables read back from their LaTeX: every cell, what is refused, what the caption owns up to."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from printed import LEFT_OUT, METHODS, Printed, caption_of, open_braces, pdflatex, printed_cells, row_widths
from rendered import CELLS, DATA, refusal, table, written_cells
from sample_results import (
    BUDGETS,
    LABELS,
    LONGBENCH,
    TEMPLATES,
    Row,
    edit,
    files_of,
    maps_arms,
    result_rows,
    sweep_arms,
    table_spec,
    write_rows,
)
from tests.needs import LATEX, needs

from residual_mass.cli import main
from residual_mass.core.settings import to_json
from residual_mass.holm import holm
from residual_mass.paper.table import load_table
from residual_mass.paper.tables.layouts import layout_of
from residual_mass.paper.tables.render import make_published, run
from residual_mass.paper.tables.score_table import COLUMNS
from residual_mass.provenance import beside, recorded

_, TOPK, PHI, NOSUB = METHODS


# ---- cells -----------------------------------------------------------------------------------------------------------


def test_a_sweep_shows_the_values_of_its_files(tmp_path: Path) -> None:
    short = {("full", None): 0.75, ("topk", 2.0): 0.1, ("topk_phi", 2.0): 0.4444, ("topk_phi_nosub", 2.0): 0.4441}
    long = {("full", None): 0.7, ("topk", 8.0): 0.6}
    files = [
        write_rows(tmp_path / "b.csv", result_rows(long, length="2k")),
        write_rows(tmp_path / "a.csv", result_rows(short)),
    ]
    cells = printed_cells(table(tmp_path, table_spec(lengths=("1k", "2k")), *files))
    assert len(cells) == 2 * 4 * 3
    assert [cells["1k", method, 0] for method in METHODS] == [
        Printed("0.750"), Printed("0.100"), Printed("0.444", bold=True), Printed("0.444", bold=True)
    ]  # fmt: skip
    assert [cells["2k", method, 2] for method in METHODS] == [
        Printed("0.700"), Printed("0.600", bold=True), Printed("0.500"), Printed("0.500")
    ]  # fmt: skip


def test_babilong_has_a_sweep_of_its_own(tmp_path: Path) -> None:
    spec = table_spec("babilong_sweep", benchmarks=("ruler", "babilong"), lengths=("1k", "2k"))
    facts = {"benchmark": "babilong", "data": "simulated", "tasks": ("babilong_qa1", "babilong_qa2")}
    short, long = (
        write_rows(tmp_path / f"{length}.csv", result_rows({("topk", 4.0): value}, length=length, **facts))
        for length, value in (("1k", 0.7), ("2k", 0.1))
    )
    cells = printed_cells(tex := table(tmp_path, spec, short, long))
    blocks = [rf"\shortstack[l]{{{length}\\(simulated)}}" for length in ("1k", "2k")]
    assert list(dict.fromkeys(block for block, _, _ in cells)) == blocks
    assert [cells[block, TOPK, 1].text for block in blocks] == ["0.700", "0.100"]
    caption = caption_of(tex)
    assert "BABILong accuracy" in caption and "Examples of BABILong are simulated" in caption
    assert "BABILong 1k: 8 from 2 tasks; BABILong 2k: 8 from 2 tasks" in caption


def test_natural_text_shows_single_tasks(tmp_path: Path) -> None:
    values = {(task, "topk", 2.0): 0.1 * number for number, task in enumerate(LONGBENCH, start=1)}
    rows = result_rows(values | {("topk", 2.0): 0.9}, benchmark="longbench", tasks=LONGBENCH, length="2k")
    edit(rows, {"task": "longbench_gov_report"}, data="stand-in", cut_share="0.375000")
    edit(rows, {"task": "longbench_qmsum"}, n=4)
    spec = table_spec("natural_main", benchmarks=("longbench",), lengths=("2k",))
    cells = printed_cells(tex := table(tmp_path, spec, write_rows(tmp_path / "longbench_smol_2k.csv", rows)))
    blocks = [r"\shortstack[l]{GovReport\\(stand-in)}", "QMSum", "MuSiQue", "HotpotQA"]
    assert [cells[block, TOPK, 0].text for block in blocks] == ["0.100", "0.200", "0.300", "0.400"]
    assert len(cells) == 4 * 4 * 3
    caption = caption_of(tex)
    assert "Examples of GovReport are stand-in, which means other real text" in caption
    assert "GovReport 2k: 8; QMSum 2k: 4; MuSiQue 2k: 8; HotpotQA 2k: 8." in caption
    assert r"Prompts cut to the context: GovReport 2k 37.5\%." in caption
    above = r"Top-$K{+}\phi$ is above Top-$K$ in"
    assert f"Summarisation: {above} 2 of 6 cells, equal in 4, mean change $+0.033$." in caption
    assert f"Question answering: {above} 0 of 6 cells, equal in 4, mean change $-0.033$." in caption


def test_a_task_that_does_not_fit_the_length_is_left_out(tmp_path: Path) -> None:
    rows = result_rows(benchmark="longbench", tasks=LONGBENCH[:2], length="1k")
    spec = table_spec("natural_main", benchmarks=("longbench",))
    cells = printed_cells(tex := table(tmp_path, spec, write_rows(tmp_path / "a.csv", rows)))
    assert {cells["MuSiQue", method, 1] for method in METHODS} == {LEFT_OUT}
    assert cells["QMSum", TOPK, 1] == Printed("0.250", bold=True)
    assert "does not evaluate (MuSiQue, HotpotQA)" in caption_of(tex)


def test_a_task_that_fits_and_is_missing_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", result_rows(benchmark="longbench", tasks=LONGBENCH[:3], length="2k"))
    message = refusal(tmp_path, table_spec("natural_main", benchmarks=("longbench",), lengths=("2k",)), path)
    assert message.startswith(f"{path}: no cell for longbench smol 2k longbench_hotpotqa full")


def test_the_one_percent_table_takes_the_middle_budget_and_marks_what_is_left_out(tmp_path: Path) -> None:
    values = {("topk", 4.0): 0.3, ("topk_phi", 4.0): 0.4, ("topk_phi_nosub", 4.0): 0.2}
    tex = table(tmp_path, table_spec("stress_1pct"), write_rows(tmp_path / "a.csv", result_rows(values)))
    cells = printed_cells(tex)
    assert [cells["RULER", method, 0].text for method in METHODS] == ["0.500", "0.300", "0.400", "0.200"]
    assert {cells["BABILong", method, 0] for method in METHODS} == {LEFT_OUT}
    assert r"4\% of the cached positions" in tex and "does not evaluate (BABILong)" in caption_of(tex)


def test_the_one_percent_table_with_both_benchmarks(tmp_path: Path) -> None:
    spec, files = files_of(tmp_path, "stress_1pct")
    cells = printed_cells(tex := table(tmp_path, spec, *files))
    assert {block for block, _, _ in cells} == {"RULER", r"\shortstack[l]{BABILong\\(simulated)}"}
    assert LEFT_OUT not in cells.values() and "A dash" not in caption_of(tex)


def test_a_length_at_which_a_benchmark_is_not_evaluated_is_a_dash(tmp_path: Path) -> None:
    babilong = {"benchmark": "babilong", "data": "simulated", "tasks": ("babilong_qa1", "babilong_qa2")}
    files = [
        write_rows(tmp_path / f"{number}.csv", result_rows(**facts))
        for number, facts in enumerate([{"length": "1k"}, {"length": "2k"}, babilong | {"length": "2k"}])
    ]
    spec = table_spec("stress_1pct", lengths=("1k", "2k"), benchmarks=("babilong", "ruler"))
    with pytest.raises(ValueError, match="no cell for babilong"):
        table(tmp_path, spec, *files)
    cells = printed_cells(table(tmp_path, replace(spec, lengths_of={"babilong": ("2k",)}), *files))
    assert len(cells) == 2 * 4 * 2
    for (block, _, column), cell in cells.items():
        assert (cell == LEFT_OUT) == ("BABILong" in block and column == 0), (block, column)


def test_the_middle_of_the_papers_budgets_is_one_percent() -> None:
    assert layout_of(table_spec("stress_1pct", budgets=(0.5, 1.0, 2.0, 4.0))).budget_percent == 1


def test_maps_trained_at_other_lengths_stand_in_rows(tmp_path: Path) -> None:
    arms = maps_arms("512", "1k", "1k-residual_loss")
    rows = [
        *result_rows({("topk_phi", 4.0, "512"): 0.8}, arms, length="512"),
        *result_rows({("topk_phi", 4.0, "512"): 0.01, ("topk_phi", 4.0, "1k"): 0.7}, arms, length="1k"),
    ]
    spec = table_spec(
        "cross_length_mismatch", lengths=("512", "1k"), budgets=(4.0,), maps=("512", "1k", "1k-residual_loss")
    )
    cells = printed_cells(tex := table(tmp_path, spec, write_rows(tmp_path / "cross_length_mismatch_smol.csv", rows)))
    assert {title: [cells["", title, column] for column in (0, 1)] for _, title, _ in cells} == {
        "Full": [Printed("0.500"), Printed("0.500")],
        TOPK: [Printed("0.500"), Printed("0.500")],
        f"{PHI} (512-trained)": [Printed("0.800"), Printed("0.010")],
        f"{PHI} (1k-trained)": [Printed("0.500"), Printed("0.700")],
        rf"{PHI} (1k-residual\_loss)$^{{*}}$": [Printed("0.500"), Printed("0.500")],
    }
    assert r"    Method & 512 & 1k \\" in tex and "cells, equal in" not in caption_of(tex)
    assert {row["maps"] for row in written_cells(tmp_path)} == {"", "512", "1k", "1k-residual_loss"}


@pytest.mark.parametrize(
    ("label", "variants", "titles"),
    [
        ("dphi_ablation", ("-dphi_32", "", "-dphi_128"), (r"$d_\phi{=}32$", "Ours", r"$d_\phi{=}128$")),
        (
            "loss_ablation",
            ("", "-hedgehog_map", "-lolcats_loss", "-kl_only", "-aux_only", "-residual_loss", "-my_own"),
            (
                "Ours", "Hedgehog-style map", "LoLCATs-style loss", "KL only", "Auxiliary only",
                "Residual objective$^{*}$", r"1k-my\_own$^{*}$",
            ),
        ),
    ],
)  # fmt: skip
def test_variants_of_the_maps_stand_in_rows(
    tmp_path: Path, label: str, variants: tuple[str, ...], titles: tuple[str, ...]
) -> None:
    maps = tuple(f"1k{variant}" for variant in variants)
    values = {("topk_phi", 4.0, name): 0.1 * (index + 1) for index, name in enumerate(maps)}
    babilong = {"benchmark": "babilong", "tasks": ("babilong_qa1",), "data": "simulated"}
    rows = [*result_rows(values, maps_arms(*maps)), *result_rows(None, maps_arms(*maps), **babilong)]
    spec = table_spec(label, budgets=(4.0,), maps=maps, benchmarks=("ruler", "babilong"))
    cells = printed_cells(tex := table(tmp_path, spec, write_rows(tmp_path / "ablation.csv", rows)))
    assert [title for _, title, column in cells if column == 0] == ["Full", TOPK, *titles]
    expected = [Printed(f"{0.1 * (index + 1):.3f}") for index in range(len(maps))]
    ruler = {title: cells["", title, 0] for title in (TOPK, *titles)}
    assert [Printed(cell.text) for cell in ruler.values()] == [Printed("0.500"), *expected]
    theirs = {title: cell for title, cell in ruler.items() if "*" not in title}
    best = max(cell.text for cell in theirs.values())
    assert {title for title, cell in ruler.items() if cell.bold} == {
        t for t, cell in theirs.items() if cell.text == best
    }
    assert all(cells["", title, 1] == Printed("0.500", bold="*" not in title) for title in ruler)
    assert r"    Feature maps & RULER 1k & \shortstack[c]{BABILong 1k\\(simulated)} \\" in tex


OWN_ROWS = "Rows with $^{*}$ are our additions to the paper's table: they stand apart and are never bold."


def test_rows_of_ours_stand_apart_and_take_no_bold_from_the_papers(tmp_path: Path) -> None:
    """Our variant is the best of all and is listed first; the paper's best row is bold, ties with ours included."""
    maps = ("1k-residual_loss", "1k", "1k-kl_only")
    values = {("topk_phi", 4.0, "1k-residual_loss"): 0.9, ("topk_phi", 4.0, "1k"): 0.7}
    spec = table_spec("loss_ablation", budgets=(4.0,), maps=maps)
    tex = table(tmp_path, spec, write_rows(tmp_path / "a.csv", result_rows(values, maps_arms(*maps))))
    body = tex.split(r"\midrule", 1)[1].split(r"\bottomrule")[0]
    theirs, ours = body.split(r"\midrule")
    assert [line.split(" & ")[0].strip() for line in theirs.splitlines() if "&" in line] == [
        "Full", TOPK, "Ours", "KL only",
    ]  # fmt: skip
    assert ours.strip() == r"Residual objective$^{*}$ & 0.900 & -- \\" and r"Ours & \textbf{0.700} & -- \\" in theirs
    assert OWN_ROWS in caption_of(tex) and tex.count(r"\textbf") == 1
    assert {row["maps"] for row in written_cells(tmp_path) if row["bold"] == "1"} == {"1k"}


@pytest.mark.parametrize(
    ("label", "maps"), [("dphi_ablation", ("1k-dphi_32", "1k")), ("cross_length_mismatch", ("512", "1k"))]
)
def test_a_table_of_the_papers_rows_alone_has_no_row_of_ours(tmp_path: Path, label: str, maps: tuple[str, ...]) -> None:
    spec = table_spec(label, budgets=(4.0,), maps=maps)
    tex = table(tmp_path, spec, write_rows(tmp_path / "a.csv", result_rows(None, maps_arms(*maps))))
    assert "$^{*}$" not in tex and tex.count(r"\midrule") == 1


def test_a_variant_of_another_table_of_the_papers_is_ours_here(tmp_path: Path) -> None:
    maps = ("1k", "1k-kl_only")
    spec = table_spec("dphi_ablation", budgets=(4.0,), maps=maps)
    tex = table(tmp_path, spec, write_rows(tmp_path / "a.csv", result_rows(None, maps_arms(*maps))))
    assert "KL only$^{*}$" in tex and OWN_ROWS in caption_of(tex)


def test_what_is_at_the_floor_is_not_bold(tmp_path: Path) -> None:
    """One column has nothing but zeros, of another the best is above the floor."""
    rows = result_rows({("topk", 2.0): 0.0, ("topk_phi", 2.0): 0.0, ("topk_phi_nosub", 2.0): 0.02, ("topk", 4.0): 0.0})
    for row in rows:
        row["flags"] = "floor" if float(row["value"]) <= 0.02 else ""
    cells = printed_cells(tex := table(tmp_path, table_spec(), write_rows(tmp_path / "a.csv", rows)))
    assert not any(cells["1k", method, 0].bold for method in METHODS)
    assert [cells["1k", method, 1].bold for method in METHODS] == [False, False, True, True]
    assert "decide nothing here" not in caption_of(tex)


def test_where_full_is_at_the_floor_nothing_wins(tmp_path: Path) -> None:
    values = {("longbench_musique", "full", None): 0.01, ("longbench_musique", "topk", 2.0): 0.5}
    rows = result_rows(values, benchmark="longbench", tasks=LONGBENCH, length="2k")
    edit(rows, {"task": "longbench_musique", "method": "full"}, flags="floor")
    spec = table_spec("natural_main", benchmarks=("longbench",), lengths=("2k",))
    cells = printed_cells(tex := table(tmp_path, spec, write_rows(tmp_path / "a.csv", rows)))
    assert not any(cells["MuSiQue", method, column].bold for method in METHODS for column in range(3))
    assert all(cells["QMSum", method, column].bold for method in METHODS[1:] for column in range(3))
    told = (
        "Tasks that decide nothing here, for Full itself is at the floor: LongBench 2k: MuSiQue. No method wins there."
    )
    assert told in caption_of(tex)


def test_tasks_at_whose_floor_full_is_are_named_behind_a_mean_too(tmp_path: Path) -> None:
    tasks = ("ruler_vt", "ruler_cwe", "ruler_fwe")
    files = []
    for backbone, low in (("smol", tasks[:2]), ("big", tasks[1:2])):
        facts = {"backbone": backbone, "model_id": f"org/{backbone}"}
        rows = result_rows(tasks=tasks, **facts)
        for task in low:
            edit(rows, {"task": task, "method": "full"}, flags="floor")
        files.append(write_rows(tmp_path / f"{backbone}.csv", rows))
    cells = printed_cells(tex := table(tmp_path, table_spec(backbones=("smol", "big")), *files))
    assert "at the floor: RULER 1k: vt, cwe (smol); RULER 1k: cwe (big). No method wins there." in caption_of(tex)
    assert all(cells["1k", method, column].bold for method in METHODS[1:] for column in range(6))


def test_a_benchmark_that_the_study_lacks_is_a_dash_in_an_ablation(tmp_path: Path) -> None:
    spec = table_spec("dphi_ablation", budgets=(4.0,), maps=("1k",))
    path = write_rows(tmp_path / "a.csv", result_rows(None, maps_arms("1k")))
    cells = printed_cells(tex := table(tmp_path, spec, path))
    assert {cell for (_, _, column), cell in cells.items() if column == 1} == {LEFT_OUT}
    assert "does not evaluate (BABILong)" in caption_of(tex)


def test_two_backbones_stand_side_by_side(tmp_path: Path) -> None:
    spec = table_spec(backbones=("smol", "big"), backbone_titles={"big": "Big & bold"})
    big = {"backbone": "big", "model_id": "org/Big-LM"}
    files = [
        write_rows(tmp_path / "a.csv", result_rows()),
        write_rows(tmp_path / "b.csv", result_rows({("topk", 2.0): 1}, **big)),
    ]
    tex = table(tmp_path, spec, *files)
    assert r"& & \multicolumn{3}{c}{Small-LM} & \multicolumn{3}{c}{Big \& bold} \\" in tex
    assert printed_cells(tex)["1k", TOPK, 3] == Printed("1.000", bold=True)
    assert r"\cmidrule(lr){3-5}" in tex and r"\cmidrule(lr){6-8}" in tex


@pytest.mark.parametrize("label", LABELS)
def test_the_latex_is_sound(tmp_path: Path, label: str) -> None:
    spec, files = files_of(tmp_path, label)
    tex = table(tmp_path, spec, *files)
    assert len(row_widths(tex)) == 1 and open_braces(tex) == 0
    assert f"\\label{{tab:{label}}}" in tex and LEFT_OUT not in printed_cells(tex).values()


# ---- comparisons -----------------------------------------------------------------------------------------------------


def with_gains(**gains: tuple[float, float]) -> list[Row]:
    """Rows of a sweep whose gains at 2 % have the effect and p-value given by method; all others show nothing."""
    rows = result_rows()
    for method, (gain, p_value) in gains.items():
        where = {"task": "all", "method": method, "budget_percent": "2"}
        edit(rows, where, gain=f"{gain:.6f}", gain_p=f"{p_value:.6f}")
    return rows


def test_a_dagger_marks_what_survives_correction_over_the_table(tmp_path: Path) -> None:
    rows = with_gains(topk_phi=(0.1, 0.001), topk_phi_nosub=(-0.1, 0.002))
    cells = printed_cells(tex := table(tmp_path, table_spec(), write_rows(tmp_path / "a.csv", rows)))
    marked = {(row, column): cell.mark for (_, row, column), cell in cells.items() if cell.mark}
    assert marked == {(PHI, 0): "above", (NOSUB, 0): "below"}
    assert (
        r"Of 6 paired comparisons with Top-$K$ at the same budget, 2 remain at $p < 0.05$ after Holm's correction over "
        r"this table (1 above, $\dagger$; 1 below, $\ddagger$)." in caption_of(tex)
    )


def test_a_small_p_value_that_the_correction_removes_gets_no_dagger(tmp_path: Path) -> None:
    rows = with_gains(topk_phi=(0.1, 0.02))  # 0.02 alone would pass, 6 * 0.02 does not
    tex = table(tmp_path, table_spec(), write_rows(tmp_path / "a.csv", rows))
    assert not any(cell.mark for cell in printed_cells(tex).values())
    assert r"Of 6 paired comparisons" in caption_of(tex) and "none remain at $p < 0.05$" in caption_of(tex)
    phi = [row for row in written_cells(tmp_path) if row["gain_p"] == "0.020000"]
    assert [row["gain_p_holm"] for row in phi] == ["0.120000"]


def test_the_correction_counts_the_cells_that_the_table_shows(tmp_path: Path) -> None:
    rows = edit(with_gains(), {"task": "all", "method": "topk_phi", "budget_percent": "4"}, gain_p="0.020000")
    table(tmp_path, table_spec("stress_1pct"), write_rows(tmp_path / "a.csv", rows))
    cells = written_cells(tmp_path)
    assert [row["gain_p_holm"] for row in cells if row["gain_p_holm"]] == ["0.040000", "0.800000"]


def test_a_table_without_comparisons_claims_none(tmp_path: Path) -> None:
    rows = edit(result_rows(), {}, gain="", gain_p="", mde="", gain_ci_low="", gain_ci_high="")
    caption = caption_of(table(tmp_path, table_spec(), write_rows(tmp_path / "a.csv", rows)))
    assert "paired comparisons" not in caption and "Median smallest gain" not in caption


def test_the_caption_tells_what_the_sample_could_show(tmp_path: Path) -> None:
    rows = result_rows()
    detectable = [0.1, 0.2, 0.3, 0.4, 0.5, 0.9]
    compared = [row for row in rows if row["task"] == "all" and "gain" in row]
    for row, mde in zip(compared, detectable, strict=True):
        row["mde"] = f"{mde:.6f}"
    edit(rows, {"task": "all", "method": "topk", "budget_percent": "8"}, ci_low="0.100000", ci_high="0.900000")
    caption = caption_of(table(tmp_path, table_spec(), write_rows(tmp_path / "a.csv", rows)))
    assert "half-width of a 95\\% bootstrap interval over examples: 0.400." in caption
    assert f"power 80\\%): {statistics.median(detectable):.3f}." in caption


def test_floor_ceiling_and_alarms_are_owned_up_to(tmp_path: Path) -> None:
    rows = edit(result_rows(), {"task": "all", "method": "topk"}, flags="floor")
    edit(rows, {"task": "all", "method": "topk_phi"}, flags="beats_full ceiling")
    edit(rows, {"task": "all", "method": "topk_phi_nosub", "budget_percent": "4"}, flags="beats_full")
    caption = caption_of(table(tmp_path, table_spec(), write_rows(tmp_path / "a.csv", rows)))
    assert "Of 10 values 3 are at the floor (at most 0.02) and 3 at the ceiling (at least 0.98)" in caption
    assert (
        "Alarm, partial-KV values above Full by more than chance: 4 (ruler smol 1k topk\\_phi at 2\\%; "
        "ruler smol 1k topk\\_phi at 4\\%; ruler smol 1k topk\\_phi at 8\\%; ...)" in caption
    )


# ---- the saved table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", LABELS)
def test_a_saved_table_is_the_table_that_was_made(tmp_path: Path, label: str) -> None:
    spec, files = files_of(tmp_path, label)
    tex = table(tmp_path, spec, *files)
    loaded = load_table(path := tmp_path / DATA, "mini")
    assert loaded.latex(TEMPLATES / f"{label}.tex.j2") == tex
    assert loaded.csv() == (tmp_path / CELLS).read_text(encoding="utf-8")
    loaded.save(again := tmp_path / "again.json")
    assert again.read_bytes() == path.read_bytes() and recorded(path)


def test_a_table_of_another_study_or_version_is_refused_in_one_line(tmp_path: Path) -> None:
    table(tmp_path, table_spec(), write_rows(tmp_path / "a.csv", result_rows()))
    path = tmp_path / DATA
    with pytest.raises(ValueError, match=rf"^{path}: is of study 'mini', not of 'paper'; pass tables of one study$"):
        load_table(path, "paper")
    path.write_text(path.read_text().replace('"grids"', '"grid"'))
    with pytest.raises(ValueError, match=rf"^{path}: not a table of this version \(.*\); delete it and rerun"):
        load_table(path, "mini")


def test_a_caption_that_the_page_could_not_show_is_refused(tmp_path: Path) -> None:
    for name in ("frame", "ruler_sweep"):
        text = (TEMPLATES / f"{name}.tex.j2").read_text(encoding="utf-8")
        (tmp_path / f"{name}.tex.j2").write_text(text.replace("RULER score", r"\emph{RULER} score"))
    results = [write_rows(tmp_path / "a.csv", result_rows())]
    template, out = tmp_path / "ruler_sweep.tex.j2", tmp_path / "out"
    with pytest.raises(ValueError, match=rf"^{template}: '.*emph.*': captions are plain text with mathematics between"):
        run(table_spec(), results, template, out, out, out)
    assert not out.exists()


# ---- the cells file --------------------------------------------------------------------------------------------------


def test_every_printed_cell_is_traced_to_its_row(tmp_path: Path) -> None:
    rows = edit(with_gains(topk_phi=(0.1, 0.001)), {"task": "all"}, flags="ceiling", cut_share="0.125000", n=12)
    edit(rows, {"task": "all", "method": "topk_phi"}, original_value="0.470000", value="0.490000")
    path = write_rows(tmp_path / "ruler_smol_1k.csv", rows)
    table(tmp_path, table_spec(), path)
    lines = written_cells(tmp_path)
    assert list(lines[0]) == [*COLUMNS] and len(lines) == 10
    chosen = [row for row in rows if row["task"] == "all"]
    p_values = {row["method"] + row["budget_percent"]: float(row["gain_p"]) for row in chosen if row.get("gain_p")}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    for line in lines:
        (row,) = [row for row in chosen if all(row[n] == line[n] for n in ("method", "budget_percent"))]
        shared = [name for name in COLUMNS if name in row]
        assert {name: line[name] for name in shared} == {name: str(row[name]) for name in shared}
        expected_p = adjusted.get(row["method"] + row["budget_percent"])
        assert line["gain_p_holm"] == ("" if expected_p is None else f"{expected_p:.6f}")
        assert (line["table"], line["source"], line["text"]) == ("ruler_sweep", path.name, f"{float(row['value']):.3f}")
        assert line["bold"] == str(int(row["method"] in ("topk", "topk_phi_nosub")))


def test_cells_that_are_left_out_are_lines_too(tmp_path: Path) -> None:
    table(tmp_path, table_spec("stress_1pct"), write_rows(tmp_path / "a.csv", result_rows()))
    left_out = [row for row in written_cells(tmp_path) if row["benchmark"] == "babilong"]
    assert [(row["text"], row["value"], row["source"]) for row in left_out] == [("--", "", "")] * 4


@pytest.mark.parametrize("label", LABELS)
def test_the_cells_file_and_the_table_agree(tmp_path: Path, label: str) -> None:
    spec, files = files_of(tmp_path, label)
    cells = printed_cells(table(tmp_path, spec, *files))
    lines = written_cells(tmp_path)
    wide = len(spec.budgets) - 1 if layout_of(spec).budget_percent is None else 0
    assert len(cells) == len(lines) + wide * sum(line["method"] == "full" for line in lines)
    assert sorted({cell.text for cell in cells.values()}) == sorted({line["text"] for line in lines})
    assert {line["source"] for line in lines} == {path.name for path in files}


# ---- captions --------------------------------------------------------------------------------------------------------


def test_the_caption_names_study_model_and_sample(tmp_path: Path) -> None:
    tex = table(tmp_path, table_spec(), write_rows(tmp_path / "ruler_smol_1k.csv", result_rows()))
    caption = caption_of(tex)
    assert "Study mini, backbone org/Small-LM." in caption
    assert "The paper does not evaluate org/Small-LM; the values are not comparable with the paper's." in caption
    assert "RULER 1k: 8 from 2 tasks" in caption and "interval over examples: 0.125." in caption
    assert r"RULER: Top-$K{+}\phi$ is above Top-$K$ in 0 of 3 cells, equal in 3, mean change $+0.000$." in caption
    for absent in ("A dash", "Random weights", "cut to the context", "floor", "Alarm", "simulated", "stand-in"):
        assert absent not in caption
    assert "reproduc" not in tex.lower()
    assert (
        "% ruler_smol_1k.csv: ruler 1k, org/Small-LM at r1, pretrained weights, phi maps 2k 2kxxxxxxxxxx, "
        "prompts cdcdcdcdcdcd, 2 tasks, n = 8 over all of them" in tex
    )


def test_random_weights_are_owned_up_to(tmp_path: Path) -> None:
    facts = {"weights": "random", "model_id": "meta-llama/Llama-3.2-1B-Instruct"}
    tex = table(tmp_path, table_spec(), write_rows(tmp_path / "a.csv", result_rows(**facts)))
    assert "Random weights (meta-llama/Llama-3.2-1B-Instruct)" in tex and "random weights, phi maps" in tex
    assert "not comparable" not in tex


def test_unequal_samples_of_backbones_are_told_apart(tmp_path: Path) -> None:
    files = [
        write_rows(tmp_path / "a.csv", result_rows()),
        write_rows(tmp_path / "b.csv", result_rows(backbone="big", model_id="org/Big-LM", n=4)),
    ]
    tex = table(tmp_path, table_spec(backbones=("smol", "big")), *files)
    assert "RULER 1k: 8 from 2 tasks (smol); RULER 1k: 4 from 2 tasks (big)" in tex


def test_cuts_that_differ_between_backbones_are_told_apart(tmp_path: Path) -> None:
    files = [
        write_rows(tmp_path / "a.csv", result_rows(cut_share="0.250000")),
        write_rows(tmp_path / "b.csv", result_rows(backbone="big", model_id="org/Big-LM")),
    ]
    caption = caption_of(table(tmp_path, table_spec(backbones=("smol", "big")), *files))
    assert r"Prompts cut to the context: RULER 1k 25.0\% (smol)." in caption


def test_hostile_names_print_and_do_not_run(tmp_path: Path) -> None:
    hostile = "evil_$x$\n\\input{/etc/passwd}%"
    rows = result_rows(backbone=hostile, model_id=hostile, revision="r\n\\end{table}", length="1k")
    spec = table_spec(backbones=(hostile,), backbone_titles={})
    tex = table(tmp_path, spec, write_rows(tmp_path / "a.csv", rows))
    active = [re.split(r"(?<!\\)%", line)[0] for line in tex.splitlines()]
    assert not any(r"\input" in line for line in active)
    assert sum(r"\end{table}" in line for line in active) == 1
    assert r"evil\_\$x\$ \textbackslash{}input\{" in tex


def test_the_command_line_makes_the_same_table(tmp_path: Path) -> None:
    tex = table(tmp_path, table_spec(), path := write_rows(tmp_path / "a.csv", result_rows()))
    made = {name: tmp_path / f"made.{name}" for name in ("out", "cells", "data")}
    command = ["table", "--spec", to_json(table_spec()), "--results", str(path)]
    command += ["--template", str(TEMPLATES / "ruler_sweep.tex.j2")]
    main([*command, *(word for name, file in made.items() for word in (f"--{name}", str(file)))])
    assert made["out"].read_text(encoding="utf-8") == tex
    assert made["cells"].read_bytes() == (tmp_path / CELLS).read_bytes()
    assert made["data"].read_bytes() == (tmp_path / DATA).read_bytes()


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / f"{length}.csv", result_rows(length=length)) for length in ("1k", "2k")]
    spec = table_spec(lengths=("1k", "2k"))
    assert table(tmp_path, spec, *files) == table(tmp_path, spec, *reversed(files))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_budget_that_a_file_lacks_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", result_rows())
    message = refusal(tmp_path, table_spec(budgets=(2.0, 4.0, 16.0)), path)
    assert message.startswith(f"{path}: no cell for ruler smol 1k topk at 16%")


def test_a_file_that_is_not_given_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", result_rows())
    message = refusal(tmp_path, table_spec(lengths=("1k", "2k")), path)
    assert message.startswith("no cell for ruler smol 2k full: ruler smol 2k is in none of a.csv; pass its file")


def test_a_file_of_another_study_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", result_rows(study="paper"))
    assert refusal(tmp_path, table_spec(), path).startswith(f"{path}: is of study 'paper', table ruler_sweep of 'mini'")


def test_files_that_the_table_does_not_show_change_nothing(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / f"{length}.csv", result_rows(length=length)) for length in ("1k", "4k")]
    assert table(tmp_path, table_spec(), *files) == table(tmp_path, table_spec(), files[0])


def test_two_files_for_one_place_are_an_error(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / name, result_rows()) for name in ("a.csv", "b.csv")]
    assert f"{files[1]}: has ruler smol 1k, as has another file; give one" in refusal(tmp_path, table_spec(), *files)


def test_maps_that_a_file_lacks_are_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", result_rows(None, maps_arms("1k")))
    message = refusal(tmp_path, table_spec("loss_ablation", budgets=(4.0,), maps=("1k", "1k-kl_only")), path)
    assert message.startswith(f"{path}: no cell for ruler smol 1k topk_phi at 4% with maps 1k-kl_only")


def test_a_sweep_does_not_choose_among_maps(tmp_path: Path) -> None:
    arms = [*sweep_arms(), *(("topk_phi", budget, "1k") for budget in BUDGETS)]
    path = write_rows(tmp_path / "a.csv", result_rows(None, arms))
    assert "has ruler smol 1k topk_phi at 2% with maps 2k and 1k" in refusal(tmp_path, table_spec(), path)


@pytest.mark.parametrize(
    ("label", "changes", "message"),
    [
        ("loss_ablation", {"maps": ("1k",)}, "table loss_ablation: budgets has 3 values, but the table shows one"),
        ("dphi_ablation", {"maps": ("1k",), "lengths": ()}, "table dphi_ablation: lengths has 0 values"),
        ("natural_main", {"lengths": ("1k", "2k")}, "table natural_main: lengths has 2 values"),
        ("cross_length_mismatch", {"budgets": (4.0,)}, "table cross_length_mismatch: maps is empty"),
    ],
)
def test_a_spec_that_does_not_fit_its_table_is_an_error(
    tmp_path: Path, label: str, changes: dict[str, tuple[str, ...]], message: str
) -> None:
    path = write_rows(tmp_path / "a.csv", result_rows())
    assert refusal(tmp_path, table_spec(label, **changes), path).startswith(message)


def test_files_that_disagree_on_the_maps_are_an_error(tmp_path: Path) -> None:
    later = edit(result_rows(length="2k"), {"maps": "2k"}, phi_sha="ee")
    files = [write_rows(tmp_path / "a.csv", result_rows()), write_rows(tmp_path / "b.csv", later)]
    assert f"{files[1]}: phi_sha of maps 2k is 'ee', but {files[0]} has" in refusal(
        tmp_path, table_spec(lengths=("1k", "2k")), *files
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def edited(path: Path) -> None:
    path.write_text(path.read_text().replace("0.500000", "0.600000"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            cut,
            "is not what a.csv.meta.json recorded: cut, damaged or edited; delete it and rerun the rule that makes it",
        ),
        (
            edited,
            "is not what a.csv.meta.json recorded: cut, damaged or edited; delete it and rerun the rule that makes it",
        ),
        (Path.unlink, "no such file; rerun the rule that makes it"),
        (
            lambda path: beside(path).unlink(),
            "has no record (a.csv.meta.json) beside it; bring that too, or rerun the rule that makes it",
        ),
    ],
)
def test_a_file_that_is_not_what_was_recorded_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], message: str
) -> None:
    damage(path := write_rows(tmp_path / "a.csv", result_rows()))
    out = {name: str(tmp_path / f"out.{name}") for name in ("tex", "csv", "json")}
    command = ["table", "--spec", to_json(table_spec()), "--results", str(path)]
    command += ["--template", str(TEMPLATES / "ruler_sweep.tex.j2")]
    with pytest.raises(SystemExit):
        main([*command, "--out", out["tex"], "--cells", out["csv"], "--data", out["json"]])
    assert capsys.readouterr().err == f"residual_mass table: error: {path}: {message}\n"
    assert not any(Path(name).exists() for name in out.values())


@pytest.mark.parametrize("fact", [{"model_id": "org/Else"}, {"revision": "r2"}, {"weights": "random"}])
def test_files_that_disagree_on_the_backbone_are_an_error(tmp_path: Path, fact: dict[str, str]) -> None:
    files = [
        write_rows(tmp_path / "a.csv", result_rows()),
        write_rows(tmp_path / "b.csv", result_rows(length="2k", **fact)),
    ]
    assert f"{files[1]}: {next(iter(fact))} is" in refusal(tmp_path, table_spec(lengths=("1k", "2k")), *files)


def test_an_unknown_table_and_a_study_without_its_benchmark_are_errors(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", result_rows())
    message = refusal(tmp_path, table_spec("nothing"), path)
    others = (
        "exact_accounting, phi_param_count, training_cost_64k, residual_estimators, deployable, fidelity, "
        "fidelity_answers, runtime_<backbone>"
    )
    assert message == f"table 'nothing' is unknown; known are {', '.join(LABELS)}, {others}"
    assert "study mini evaluates none of its benchmarks" in refusal(tmp_path, table_spec(benchmarks=("natural",)), path)


def test_the_package_needs_no_torch() -> None:
    modules = "residual_mass.paper.report.page, residual_mass.paper.figures.render"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# ---- LaTeX -----------------------------------------------------------------------------------------------------------


@needs(LATEX)
def test_latex_accepts_every_table_whatever_the_names(tmp_path: Path) -> None:
    hostile = 'a_b & 50% $x$ #1 {y} ~ ^ \\input{z} <|> "q" [r]'
    tables = []
    for label in LABELS:
        spec, files = files_of(tmp_path, label, backbone=hostile, model_id=hostile)
        spec = table_spec(**{**vars(spec), "backbones": (hostile,)})
        tables.append(table(tmp_path, spec, *files))
    assert "Output written" in pdflatex(tmp_path, "\\clearpage\n".join(tables))


@needs(LATEX)
def test_the_papers_tables_fit_the_page(tmp_path: Path) -> None:
    tables = [make_published(label).latex(TEMPLATES / f"{label}.tex.j2") for label in LABELS]
    assert "Overfull" not in pdflatex(tmp_path, "\\clearpage\n".join(tables))


@needs(LATEX)
def test_the_widest_of_our_tables_fits_the_page(tmp_path: Path) -> None:
    """Two backbones by four budgets, every gain marked, every block with a note on its data."""
    budgets, files = (0.5, 1.0, 2.0, 4.0), []
    for backbone in ("smol", "big"):
        facts = {"backbone": backbone, "benchmark": "longbench", "tasks": LONGBENCH, "length": "2k", "data": "stand-in"}
        rows = result_rows(None, sweep_arms(budgets), **facts)
        for row in rows:
            row.update({"gain_p": "0.000001"} if "gain" in row else {})
        files.append(write_rows(tmp_path / f"{backbone}.csv", rows))
    wide = {"backbones": ("smol", "big"), "lengths": ("2k",), "budgets": budgets, "benchmarks": ("longbench",)}
    tex = table(tmp_path, table_spec("natural_main", **wide), *files)
    assert {cell.mark for (_, row, _), cell in printed_cells(tex).items() if row in (PHI, NOSUB)} == {"above"}
    assert "Overfull" not in pdflatex(tmp_path, tex)
