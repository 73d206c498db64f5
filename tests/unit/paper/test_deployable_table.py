"""The table of methods on the front of bytes and distance, read back from its LaTeX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from printed import caption_of, open_braces, row_widths
from rendered import DATA, refusal, table, written_cells
from sample_residuals import Row, distance_row, error_row, write_log, write_rows
from sample_results import table_spec

from residual_mass.paper.numbers import keyed_cells
from residual_mass.paper.table import load_table
from residual_mass.paper.tables.render import make_published
from residual_mass.study.specs import TableSpec

MEASURED = {
    ("topk", 2): (0.6, 0.3),
    ("topk", 4): (0.7, 0.2),
    ("topk", 8): (0.8, 0.09),
    ("topk_phi", 2): (0.65, 0.05),
    ("topk_moments", 4): (0.75, 0.04),
    ("topk_exact_mass", 2): (0.6, 0.0001),
    ("scan4_moments", 4): (0.2, 0.08),
    ("scan4", 4): (0.19, 0.08),
    ("pages", 2): (0.1, 0.9),
    ("pages", 8): (0.25, 0.8),
}
"""By method and budget, what a step reads as a share of full attention's bytes, and the KL divergence."""
FRONT = [
    ["Pages", r"2\%", r"10.0\%", "0.900", "0.750", "0.500", "1,024", "none"],
    ["4-bit scan", r"4\%", r"19.0\%", "0.0800", "0.750", "0.500", "1,024", "none"],
    [r"Top-$K{+}\phi$", r"2\%", r"65.0\%", "0.0500", "0.750", "0.500", "1,024", "200 (231 s)"],
    ["Top-$K$+moments", r"4\%", r"75.0\%", "0.0400", "0.750", "0.500", "1,024", "none"],
]
BESIDE = [
    [r"Top-$K$$^{\circ}$", r"2\%", r"60.0\%", "0.300", "0.750", "0.500", "1,024", "none"],
    [r"Top-$K$$^{\circ}$", r"4\%", r"70.0\%", "0.200", "0.750", "0.500", "1,024", "none"],
]


def errors(**facts: Any) -> list[Row]:
    rows = [error_row(method, budget, step_share=share) for (method, budget), (share, _) in MEASURED.items()]
    return [row | facts for row in [*rows, error_row("topk_mean", 2, step_share=0.01)]]


def distances(**facts: Any) -> list[Row]:
    """Of both metrics, and rows that the table does not show: of other maps, states and texts."""
    rows = []
    for (method, budget), (_, kl) in MEASURED.items():
        rows += [
            distance_row(method, budget, value=kl) | facts,
            distance_row(method, budget, metric="same_top", value=0.75) | facts,
            distance_row(method, budget, value=0, state="dense") | facts,
            distance_row(method, budget, value=0, text="ruler", continuation="gold") | facts,
        ]
    return [*rows, distance_row("topk_phi", 2, value=0, maps="512"), distance_row("topk_centroids", 2, value=0)]


def files(folder: Path, **facts: Any) -> list[Path]:
    return [
        write_rows(folder, "residual_errors", errors(**facts)),
        write_rows(folder, "fidelity", distances(**facts)),
        write_log(folder),
    ]


def spec(**changes: Any) -> TableSpec:
    return table_spec("deployable", **{"benchmarks": ()} | changes)


def printed(tex: str) -> list[list[str]]:
    """The rows of the first block without its title."""
    body = tex.split(r"\midrule")[1].split(r"\bottomrule")[0]
    lines = [line.removesuffix(r"\\") for line in body.splitlines() if line.endswith(r"\\")]
    return [[field.strip() for field in line.split("&")][1:] for line in lines]


def test_the_front_stands_by_its_bytes_and_exact_top_k_beside_it(tmp_path: Path) -> None:
    tex = table(tmp_path, spec(), *files(tmp_path))
    assert printed(tex) == FRONT + BESIDE
    assert tex.index(r"\cmidrule(l){2-9}") < tex.index(r"$^{\circ}$ &")
    assert row_widths(tex) == {9} and open_braces(tex) == 0
    assert "Compared are 6 methods, 9 with their budgets." in caption_of(tex)
    assert "Wikipedia 1k: 12 documents and 8 packs." in caption_of(tex)


def test_exact_top_k_on_the_front_stands_there_alone(tmp_path: Path) -> None:
    paths = [
        write_rows(tmp_path, "residual_errors", [error_row("topk", 2)]),
        write_rows(tmp_path, "fidelity", [distance_row("topk", 2), distance_row("topk", 2, metric="same_top")]),
    ]
    (row,) = printed(table(tmp_path, spec(), *paths))
    assert row == ["Top-$K$", r"2\%", r"5.0\%", "0.100", "0.100", "0.500", "1,024", "none"]


def test_every_cell_has_a_key_and_a_line(tmp_path: Path) -> None:
    table(tmp_path, spec(), *files(tmp_path))
    keys = [key for key, _ in keyed_cells(load_table(tmp_path / DATA, "mini"))]
    assert len(keys) == len(set(keys)) and "deployable/smol/wiki/1k/topk_phi/2/2k/step_share" in keys
    lines = {(line["method"], line["budget_percent"], line["quantity"]): line for line in written_cells(tmp_path)}
    assert len(lines) == 7 * len(FRONT + BESIDE)
    share, kl = (lines["scan4", "4", quantity] for quantity in ("step_share", "kl"))
    assert (share["value"], share["front"], share["source"]) == ("0.19", "1", "residual_errors_smol_1k.csv")
    assert (kl["value"], kl["recall"], kl["source"]) == ("0.08", "0.9", "fidelity_smol_1k.csv")
    assert lines["topk", "2", "kl"]["front"] == "0"
    assert lines["topk_phi", "2", "training_seconds"]["value"] == "230.886"


def test_a_length_without_distances_is_left_out(tmp_path: Path) -> None:
    paths = [*files(tmp_path), write_rows(tmp_path, "residual_errors", errors(length="2k"), "2k")]
    tex = table(tmp_path, spec(lengths=("1k", "2k")), *paths)
    assert tex.count(r"\begin{table}") == 1 and "Small-LM, 2k" not in tex


def test_without_a_log_there_are_steps_alone(tmp_path: Path) -> None:
    tex = table(tmp_path, spec(), *files(tmp_path)[:2])
    assert [row[-1] for row in printed(tex)][2] == "200"


def test_what_is_missing_is_refused_in_one_line(tmp_path: Path) -> None:
    paths = files(tmp_path)
    assert refusal(tmp_path, spec(), paths[0]) == (
        "table deployable: no method of backbone smol has both errors and distances of the next token; run the "
        "fidelity stage with its texts and lengths"
    )
    said = refusal(tmp_path, spec(backbones=("big",)), *paths)
    assert said == "table deployable: no file shows backbone big; pass its files to --results"
    paths = files(tmp_path, study="paper")
    said = refusal(tmp_path, spec(), *paths)
    assert said == f"{paths[0]}: is of study 'paper', table deployable of 'mini'; give its own"


def test_the_paper_has_no_such_table() -> None:
    with pytest.raises(ValueError, match="the paper has no table 'deployable'"):
        make_published("deployable")
