"""LaTeX: escapes, numbers for prose, the document, and damaged templates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from samples import TEMPLATES, made, study_rows, template, written
from tests.needs import LATEX, needs
from tests.records import recorded

from residual_mass.paper import document, published
from residual_mass.paper.frames import field_texts, read_frame
from residual_mass.paper.latex import escape, render, run_pdf
from residual_mass.spec.specs import BackboneSpec, DocumentSpec, NumbersSpec

BACKBONE = BackboneSpec("mini", "org/Small_LM", "r&d", "hub", "float32", "small", 4096, False, name="smol")


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("50% of a_b & {c} #1", r"50\% of a\_b \& \{c\} \#1"),
        ("Top-$K{+}\\phi$ < 1", "Top-$K{+}\\phi$ \\textless{} 1"),
        ("a\nb\t c", "a b c"),
        ('"~^\\|>', r"{''}\textasciitilde{}\textasciicircum{}\textbackslash{}\textbar{}\textgreater{}"),
    ],
)  # fmt: skip
def test_text_is_escaped_and_mathematics_is_not(text: str, latex: str) -> None:
    assert escape(text) == latex


def test_a_wrong_template_is_named_with_the_remedy(tmp_path: Path) -> None:
    for text, reason in (
        ("<< a", "unexpected end"),
        ("<% if %>\n", "Expected"),
        ("<< missing >>\n", "'missing' is undefined"),
    ):
        damaged = tmp_path / "table.tex.j2"
        damaged.write_text(text)
        with pytest.raises(ValueError, match=reason) as caught:
            render(damaged)
        assert str(damaged) in str(caught.value) and "restore it from the repository" in str(caught.value)


def macros(folder: Path, *tables: Path) -> dict[tuple[str, str], str]:
    out = folder / "numbers.tex"
    document.run_numbers(NumbersSpec("paper"), tables, TEMPLATES / "numbers.tex.j2", out)
    found = re.findall(r"^\\rmset\{(\w+)\}\{([^{}]*)\}\{(.*)\}%$", out.read_text(), re.MULTILINE)
    return {(kind, key): text for kind, key, text in found}


def test_numbers_are_the_cells_by_their_keys(tmp_path: Path) -> None:
    rows, spec = study_rows()
    tested = rows["method"] == "topk_phi"
    rows.loc[tested, ["gain", "gain_ci_low", "gain_ci_high", "gain_p"]] = [-0.25, -0.3, -0.2, 1e-7]
    table = written(tmp_path, made("ruler_sweep", rows, spec))
    found = macros(tmp_path, table)
    for cell in field_texts(read_frame(table), ".6f").to_dict("records"):
        names = ("table", "backbone", "benchmark", "task", "length", "method", "budget_percent", "maps")
        key = "/".join(cell[name] for name in names if cell[name])
        assert found["value", key] == cell["text"] and found["count", key] == "6500"
        assert found["interval", key] == f"$[{float(cell['ci_low']):.3f}, {float(cell['ci_high']):.3f}]$"
        assert (("gain", key) in found) == (cell["method"] == "topk_phi")
    key = "ruler_sweep/1b/ruler/all/4k/topk_phi/1/64k"
    assert (found["gain", key], found["gaininterval", key]) == ("$-0.250$", "$[-0.300, -0.200]$")
    assert found["gainp", key] == "$p < 0.001$"
    rows[["ci_low", "ci_high", "gain_ci_low", "gain_ci_high"]] = None  # of one example for each task
    alone = macros(tmp_path, written(tmp_path, made("ruler_sweep", rows, spec)))
    assert {kind for kind, _ in found} - {kind for kind, _ in alone} == {"interval", "gaininterval"}
    assert found["gain", key] == alone["gain", key]


def test_the_document_shows_everything_in_order(tmp_path: Path) -> None:
    tables = [tmp_path / "ruler_sweep.tex", tmp_path / "loss_ablation.tex"]
    figures = [tmp_path / "figures" / "fidelity.pdf", tmp_path / "figures" / "fixedk_breakdown_smol.pdf"]
    figures[0].parent.mkdir()
    for path in (*tables, *figures):
        path.write_text("x")
        recorded(path)
    spec = DocumentSpec("mini", (BACKBONE,), {"fidelity": "Small & wiki"})
    out = tmp_path / "main.tex"
    document.run_document(spec, tables, figures, None, TEMPLATES / "main.tex.j2", out)
    text = out.read_text()
    places = [text.index(each) for each in (r"\input{ruler_sweep.tex}", r"\input{loss_ablation.tex}",
              "{figures/fidelity.pdf}", "{figures/fixedk_breakdown_smol.pdf}")]  # fmt: skip
    assert places == sorted(places) and r"Small \& wiki." in text and r"r\&d, pretrained weights" in text
    assert r"The paper does not evaluate org/Small\_LM" in text


@needs(LATEX)
def test_latex_accepts_every_table(tmp_path: Path) -> None:
    for label in published.labels():
        document.run_published(label, template(label), tmp_path / f"{label}.tex")
    inputs = "".join(rf"\input{{{label}.tex}}" for label in published.labels())
    head = r"\documentclass{article}\usepackage[textwidth=5.5in]{geometry}\usepackage{booktabs,multirow}"
    (tmp_path / "page.tex").write_text(rf"{head}\begin{{document}}{inputs}\end{{document}}")
    run_pdf(tmp_path / "page.tex", tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").stat().st_size > 1000
