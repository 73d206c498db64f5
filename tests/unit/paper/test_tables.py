"""Tables: the paper's own as goldens, bold type and marks, and refusals."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sample_results import ABOUT, distance_row, error_row, write_log, write_rows
from samples import latex, made, study_rows, template

from residual_mass.metrics import KL, RELATIVE_ERROR, SAME_TOP
from residual_mass.paper import document, published
from residual_mass.paper.digits import format_value
from residual_mass.paper.figures.style import DRAWINGS, figure
from residual_mass.paper.tables import find, layout
from residual_mass.paper.tables.layout import table
from residual_mass.spec.specs import TableSpec

TABULARS = Path(__file__).with_name("tabulars")
PLACE = ["backbone", "benchmark", "task", "length", "budget_percent"]


@pytest.mark.parametrize("label", published.labels())
def test_the_papers_tables_are_set_as_before(label: str, tmp_path: Path) -> None:
    document.run_published(label, template(label), out := tmp_path / "out.tex")
    tabulars = re.findall(r"  \\begin\{tabular\}.*?\\end\{tabular\}", out.read_text(), re.DOTALL)
    assert "\n".join(tabulars) + "\n" == (TABULARS / f"{label}.tex").read_text()


# ---- bold and marks --------------------------------------------------------------------------------------------------


def test_own_methods_come_last_and_are_never_bold() -> None:
    rows, spec = study_rows()
    own = rows[rows["method"] == "topk"].assign(method="topk_moments", value=0.999999)
    cells = made("ruler_sweep", pd.concat([rows, own]), replace(spec, own_methods=("topk_moments",)))
    ours = cells[cells["own"]]
    assert len(ours) == len(own) and not ours["bold"].any() and set(ours["row"]) == {"Top-$K$+moments$^{*}$"}
    assert r"\cmidrule(l){2-10}" in latex(cells)


@pytest.mark.parametrize("label", ["ruler_sweep", "babilong_sweep", "natural_main", "stress_1pct"])
def test_bold_against_a_slow_reference(label: str) -> None:
    rows, spec = study_rows(label)
    generator = random.Random(7)
    values = [generator.choice([0, -0.0001, 0.25, 0.5, 0.5004, 0.7]) for _ in range(len(rows))]
    flags = [generator.choice(["", "", "", "floor"]) for _ in range(len(rows))]
    made_cells = made(label, rows.assign(value=values, flags=flags), spec)
    cells = made_cells.assign(budget_percent=made_cells["budget_percent"].fillna(0)).to_dict("records")
    for cell in cells:
        column = [other for other in cells if all(other[name] == cell[name] for name in PLACE)]
        column += [cell] * (cell["method"] == "full")
        of_task = [other for other in cells if all(other[name] == cell[name] for name in PLACE[:-1])]
        dead = any("floor" in other["flags"] for other in of_task if other["method"] == "full")
        competing = [other for other in column if other["method"] != "full" and "floor" not in other["flags"]]
        best = max((float(other["text"]) for other in competing), default=None)
        wins = not dead and cell in competing and float(cell["text"]) == best
        assert cell["bold"] == wins and cell["text"] != "-0.000", cell


def test_marks_are_holms_over_the_whole_table() -> None:
    rows, spec = study_rows(gain_ci_low=-0.2, gain_ci_high=0.2)
    tested = rows["method"].isin(["topk_phi", "topk_phi_nosub"])
    generator = random.Random(3)
    ps = [10 ** generator.uniform(-6, 0) for _ in range(tested.sum())]
    rows.loc[tested, "gain_p"] = ps
    rows.loc[tested, "gain"] = [generator.choice([0.1, -0.1, 0]) for _ in ps]
    cells = made("ruler_sweep", rows, spec)
    cells = cells[cells["gain_p"].notna()].sort_values("gain_p")
    highest = 0.0
    for rank, cell in enumerate(cells.to_dict("records")):  # Holm's procedure, step by step
        highest = max(highest, min(1, (len(ps) - rank) * cell["gain_p"]))
        assert cell["gain_p_holm"] == pytest.approx(highest)
        side = {0.1: "above", -0.1: "below", 0: ""}[cell["gain"]]
        assert cell["mark"] == (side if highest < 0.05 else "")
    survivors = (cells["mark"] != "").sum()
    assert 0 < survivors < len(ps)
    assert f"Of {len(ps)} paired comparisons" in latex(made("ruler_sweep", rows, spec))


# ---- what is refused, left out and reported -------------------------------------------------------------------------


def test_a_missing_cell_is_refused_by_name_and_one_that_is_left_out_is_a_dash() -> None:
    rows, spec = study_rows("stress_1pct")
    lacking = rows[~((rows["benchmark"] == "babilong") & (rows["method"] == "topk"))]
    with pytest.raises(ValueError, match="no result for babilong .* topk"):
        made("stress_1pct", lacking, spec)
    with pytest.raises(ValueError, match="not a many-to-one merge"):
        made("stress_1pct", pd.concat([rows, rows.iloc[:1]]), spec)
    cells = made("stress_1pct", rows[rows["benchmark"] == "ruler"], replace(spec, benchmarks=("ruler",)))
    assert set(cells[cells["benchmark"] == "babilong"]["text"]) == {"--"}
    assert "A dash stands for" in latex(cells)
    with pytest.raises(ValueError, match="evaluates none of its benchmarks; leave the table out"):
        made("stress_1pct", rows, replace(spec, benchmarks=("longbench",)))


def test_an_ablation_has_no_column_of_a_benchmark_that_is_not_evaluated() -> None:
    rows, spec = study_rows("loss_ablation")
    cells = made("loss_ablation", rows, replace(spec, benchmarks=("ruler",)))
    assert set(cells["benchmark"]) == {"ruler"} and "BABILong" not in latex(cells)
    assert set(made("loss_ablation", rows, spec)["benchmark"]) == {"ruler", "babilong"}


def test_captions_name_data_weights_and_sizes() -> None:
    rows, spec = study_rows("babilong_sweep", data="simulated", weights="random", n=40, model_id="org/Other_LM")
    tex = latex(made("babilong_sweep", rows, spec))
    assert r"\shortstack[l]{4k\\(simulated)}" in tex and "generated here from the benchmark's definition" in tex
    assert r"Random weights (org/Other\_LM)" in tex and "Examples behind a value: 40." in tex
    assert r"The paper does not evaluate org/Other\_LM" in tex
    rows, spec = study_rows(flags="beats_full")
    assert "Alarm: " in latex(made("ruler_sweep", rows, spec))


def test_an_unknown_label_names_the_known_ones_and_a_second_of_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="table 'nothing' is unknown; known are natural_main, "):
        find("nothing")
    with pytest.raises(ValueError, match="the paper has no table 'fidelity'; it has "):
        published.results("fidelity")
    monkeypatch.setattr(layout, "TABLES", [*layout.TABLES])
    table("fidelity", of="fidelity", heads=(), keys="")(find("deployable").make)
    with pytest.raises(ValueError, match=r"^table 'fidelity' is registered in \S+scores and \S+residuals; give one "):
        find("fidelity")
    with pytest.raises(ValueError, match=r"^figure mass_curves is registered in (\S+) and \1; give one of them "):
        figure(DRAWINGS["mass_curves"])


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (0.5, SAME_TOP, "0.500"), (-0.00001, SAME_TOP, "0.000"), (1.10449, KL, "1.10"), (0.0263, KL, "0.0263"),
        (0.000209, KL, "0.00021"), (0.0000439, KL, "0.000044"), (0.00000004, KL, "0.000000"),
        (12.345, RELATIVE_ERROR, "12.345"),
    ],
)  # fmt: skip
def test_values_have_the_digits_that_they_need(value: float, metric: Any, text: str) -> None:
    found = format_value(value, metric)
    assert found == text or (value > 1 and found.startswith(text[:3]))


# ---- the stage, on files ---------------------------------------------------------------------------------------------

TITLES = {"smol": "Small"}


def forced(method: str, value: float, metric: str = "kl", **facts: Any) -> dict[str, Any]:
    return distance_row(method, 4, metric=metric, value=value, documents=16, **facts)


def run_table(folder: Path, label: str, files: list[Path], **shown: Any) -> tuple[str, pd.DataFrame]:
    spec = {"study": "mini", "label": label, "backbones": ("smol",), "lengths": ("1k",), "budgets": (4.0,)}
    spec |= {"benchmarks": (), "maps": ("2k",), "backbone_titles": TITLES} | shown
    out, cells = folder / "out.tex", folder / "cells.csv"
    document.run(TableSpec(**spec), files, template(label), out, cells)
    return out.read_text(), pd.read_csv(cells, dtype=str, keep_default_na=False)


def test_fidelity_sets_the_least_divergence_in_bold_and_a_minus_in_mathematics(tmp_path: Path) -> None:
    values = {"topk": 0.3, "topk_phi": 0.1, "topk_phi_nosub": 0.2, "topk_moments": 0.1}
    rows = [forced(method, value) for method, value in values.items()]
    rows += [forced(method, 1 - value, "same_top") for method, value in values.items()]
    rows += [forced(method, value - 0.25, "log_ppl_ratio") for method, value in values.items()]
    rows += [forced("topk_phi", 0.4, metric, maps="1k") for metric in ("kl", "same_top", "log_ppl_ratio")]
    tex, cells = run_table(tmp_path, "fidelity", [write_rows(tmp_path, "fidelity", rows)])
    bold = {quantity: of[of["bold"] == "1"]["method"].tolist() for quantity, of in cells.groupby("quantity")}
    assert bold["kl"] == bold["same_top"] == ["topk_phi", "topk_moments"]
    assert bold["log_ppl_ratio"] == ["topk_phi", "topk_moments"] and r"\textbf{$-0.150$}" in tex
    assert r"Top-$K{+}\phi$ (1k-trained)" in tex and "Small\\\\Wikipedia" in tex
    assert "Documents behind a value: 16." in tex
    lacking = [row for row in rows if (row["method"], row["metric"]) != ("topk_phi_nosub", "same_top")]
    with pytest.raises(ValueError, match="no result for same_top 1k topk_phi_nosub smol wiki 4"):
        run_table(tmp_path, "fidelity", [write_rows(tmp_path, "fidelity", lacking)])


def test_residuals_have_errors_distances_and_costs(tmp_path: Path) -> None:
    errors = {"topk": 0.3, "topk_phi": 0.2, "topk_exact_mass": 0.1}
    rows = [error_row(method, 4, error=error) for method, error in errors.items()]
    distances = [forced("topk", 0.3), forced("topk_phi", 0.1), forced("topk_phi", 0.001, maps="1k")]
    files = [write_rows(tmp_path, "residual_errors", rows), write_rows(tmp_path, "fidelity", distances)]
    _, cells = run_table(tmp_path, "residual_estimators", [*files, write_log(tmp_path)])
    texts = {(cell["quantity"], cell["method"]): cell["text"] for cell in cells.to_dict("records")}
    assert texts["kl", "topk_phi"] == "0.100" and texts["kl", "topk_exact_mass"] == "--"
    assert texts["training_seconds", "topk_phi"] == "231 s" and texts["training_steps", "topk"] == "none"
    bold = cells[cells["bold"] == "1"]
    assert list(zip(bold["quantity"], bold["method"], strict=True)) == [
        ("relative_error", "topk_phi"), ("kl", "topk_phi")
    ]  # fmt: skip


def test_deployable_shows_the_front_then_topk_beside_it(tmp_path: Path) -> None:
    points = {"topk": (0.5, 0.3), "topk_phi": (0.55, 0.2), "scan4": (0.3, 0.25), "pages": (0.35, 0.26)}
    rows = [error_row(method, 4, step_share=share) for method, (share, _) in points.items()]
    distances = [forced(method, kl) for method, (_, kl) in points.items()]
    distances += [forced(method, 0.9, "same_top") for method in points]
    files = [write_rows(tmp_path, "residual_errors", rows), write_rows(tmp_path, "fidelity", distances)]
    tex, cells = run_table(tmp_path, "deployable", files)
    assert cells["method"].drop_duplicates().tolist() == ["scan4", "topk_phi", "topk"]
    found = cells[(cells["quantity"] == "kl") & (cells["method"] == "scan4")].iloc[0]
    assert (found["text"], found["n"], found["counted"]) == ("0.250", "16", "documents")
    assert tex.count(r"\cmidrule(l){2-9}") == 1 and r"Top-$K$$^{\circ}$ & 4\% & 50.0\% & 0.300" in tex


LATENCIES = {
    "step_bytes": 4_000_000_000, "bandwidth_gb_s": 2000, "floor_ms": 2, "per_step_low_ms": 1,
    "per_step_high_ms": 2, "dtype": "float32", "device": "cpu", "not_measured": "", "model_id": "org/LM",
}  # fmt: skip


def test_latencies_have_traffic_and_what_was_not_measured_has_no_times() -> None:
    rows, spec = study_rows("runtime_1b", **LATENCIES)
    lacking = (rows["method"] == "topk") & (rows["context"] == "64k")
    rows.loc[lacking, ["not_measured", "per_step_ms", "end_to_end_ms"]] = ["out of memory", None, None]
    cells = made("runtime_1b", rows, spec)
    texts = cells.set_index(["quantity", "method", "length"])["text"]
    step = rows[(rows["method"] == "full") & (rows["context"] == "4k")]["per_step_ms"].iloc[0]
    assert texts["over_floor", "full", "4k"] == f"{step / 2:.2f}" and texts["step_bytes", "full", "4k"] == "4.000"
    assert texts["per_step_ms", "topk", "64k"] == texts["over_floor", "topk", "64k"] == "--"
    assert texts["floor_ms", "topk", "64k"] == "2.00" and "-- / --" in latex(cells)
    theirs = made("runtime_1b", rows.assign(model_id=published.MODELS["1b"]), spec)
    assert "The paper, batch 1" in latex(theirs)
    assert theirs["value"].notna().sum() == cells["value"].notna().sum()
    steps = cells["quantity"] == "per_step_ms"
    assert set(cells["low"][steps & cells["value"].notna()]) == {1} and cells["low"][~steps].isna().all()
    once = made("runtime_1b", rows.assign(repeats=1), spec)
    assert once["low"].isna().all() and once["high"].isna().all()  # one repeat has no range


def test_kernels_of_the_cpu_are_rows_beside_the_others_and_change_none_of_them() -> None:
    rows, spec = study_rows("runtime_1b", **LATENCIES)
    own = rows[rows["method"] == "full"].assign(implementation="kernels", batch=1)
    scan = own.assign(method="scan4_regression_64", budget_percent=4.0, k=100)
    before, after = (latex(made("runtime_1b", each, spec)) for each in (rows, pd.concat([rows, own, scan])))
    added = [line for line in after.splitlines() if line not in before.splitlines()]
    assert set(before.splitlines()) <= set(after.splitlines())
    assert any("CPU kernels, batch 1" in line for line in added) and "scan" not in after


@pytest.mark.parametrize(("seconds", "text"), [("90.2", "90 s"), ("600", "10.0 min"), ("68400", "19.0 h")])
def test_training_times_have_a_fitting_unit(seconds: str, text: str) -> None:
    log = ABOUT | {"length": "2k", "step": "200", "seconds": seconds, "steps": "200", "sequences_per_step": "2"}
    log |= {"reuse": "3", "hardware": "NVIDIA H200", "processes": "8", "source": "log.csv"}
    spec = TableSpec("mini", "training_cost_64k", ("smol",), (), (), (), backbone_titles=TITLES)
    cells = made("training_cost_64k", pd.DataFrame([log]), spec)
    assert cells["text"].tolist() == ["200", "400", "134", text]
    assert r"200 steps on 8$\times$H200" in latex(cells)
    beside = made("training_cost_64k", pd.DataFrame([log | {"model_id": published.MODELS["1b"]}]), spec)
    assert "in the paper" in latex(beside)
    assert beside["value"].dropna().tolist() == cells["value"].tolist()  # the paper's are not the study's
