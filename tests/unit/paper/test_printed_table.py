"""Tables read back from their LaTeX."""

from __future__ import annotations

from pathlib import Path

import pytest
from printed import printed_cells, row_widths
from sample_results import LABELS, TEMPLATES

from residual_mass.paper import published
from residual_mass.paper.report.latex_html import plain
from residual_mass.paper.report.printed_table import load_printed
from residual_mass.paper.tables.render import render_published


def template(label: str) -> Path:
    return TEMPLATES / f"{'runtime' if label.startswith('runtime') else label}.tex.j2"


@pytest.mark.parametrize("label", published.labels())
def test_every_row_fills_the_table_once(label: str, tmp_path: Path) -> None:
    (path := tmp_path / "t.tex").write_text(tex := render_published(label, template(label)), encoding="utf-8")
    table = load_printed(path)
    assert table.caption.strip() and "\\label" not in table.caption
    for grid in table.grids:
        width = next(iter(row_widths(tex)))
        for rows in (grid.head, *grid.blocks):
            reach: dict[int, int] = {}
            for number, row in enumerate(rows):
                taken = [cell.column + i for cell in row for i in range(cell.columns)]
                covered = [column for column, end in reach.items() if end > number]
                assert sorted([*taken, *covered]) == list(range(width))
                reach |= {cell.column: number + cell.rows for cell in row if cell.rows > 1}


@pytest.mark.parametrize("label", LABELS)
def test_its_cells_are_those_of_a_reader_of_another_make(label: str, tmp_path: Path) -> None:
    (path := tmp_path / "t.tex").write_text(tex := render_published(label, template(label)), encoding="utf-8")
    (grid,) = load_printed(path).grids
    values = [plain(cell.latex) for block in grid.blocks for row in block for cell in row]
    known = [cell.text for cell in printed_cells(tex).values()]
    assert {text for text in values if text[0].isdigit() and "." in text} == {text for text in known if text != "--"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file; run the table stage"),
        ("", "0 captions and 0 tabulars, not one and some"),
        (r"\caption{a}\begin{tabular}{l}a \\\end{tabular}", "a tabular has no head"),
        (r"\caption{a \begin{tabular}{l}a \\ \midrule b \\\end{tabular}", "a brace is not closed"),
    ],
)
def test_a_damaged_file_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.tex"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_printed(path)
    assert str(caught.value).startswith(f"{path}: {message}")
