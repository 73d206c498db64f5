"""The document of a study: what it shows, what LaTeX makes of it, what is refused."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from printed import open_braces
from sample_results import TEMPLATES
from tests.needs import LATEX, needs
from tests.records import recorded

from residual_mass.files import sha256_of
from residual_mass.paper import typesetting
from residual_mass.paper.document import CAPTIONS, run
from residual_mass.paper.figures.render import FIGURES
from residual_mass.paper.figures.style import TEXT_WIDTH, save
from residual_mass.paper.tables.render import run_published
from residual_mass.study.specs import BackboneSpec, DocumentSpec

TEMPLATE = TEMPLATES / "main.tex.j2"
HOSTILE = 'a_b & 50% $x$ #1 {y} ~ ^ \\input{z} <|> "q" [r]'
TABLES = ("phi_param_count", "exact_accounting", "ruler_sweep")


def backbone(model_id: str = "org/Small-LM", revision: str = "r1") -> BackboneSpec:
    return BackboneSpec("mini", model_id, revision, "assets", "float32", "t", 2048, False, name="small")


def spec(study: str = "mini", **titles: str) -> DocumentSpec:
    return DocumentSpec(study, (backbone(),), titles)


def make_tables(folder: Path) -> list[Path]:
    """The paper's own, which need no results."""
    paths = [folder / f"{label}.tex" for label in TABLES]
    for path in paths:
        run_published(path.stem, TEMPLATES / f"{path.stem}.tex.j2", path)
        recorded(path)
    return paths


def make_figures(folder: Path, *labels: str) -> list[Path]:
    paths = [folder / "figures" / f"{label}.pdf" for label in labels]
    for path in paths:
        save(Figure(figsize=(TEXT_WIDTH, 3)), path, path.with_suffix(".png"))
        recorded(path)
    return paths


def document(
    folder: Path, wanted: DocumentSpec, tables: list[Path], figures: list[Path], numbers: Path | None = None
) -> str:
    run(wanted, tables, figures, numbers, TEMPLATE, folder / "main.tex")
    return (folder / "main.tex").read_text(encoding="utf-8")


def refusal(folder: Path, tables: list[Path], figures: list[Path]) -> str:
    with pytest.raises(ValueError) as caught:
        document(folder, spec(), tables, figures)
    assert not (folder / "main.tex").exists() and "\n" not in str(caught.value)
    return str(caught.value)


def pdf_refusal(document: Path, out: Path) -> str:
    with pytest.raises(ValueError) as caught:
        typesetting.run(document, out)
    assert not out.exists() and "\n" not in str(caught.value)
    return str(caught.value)


# ---- what it shows ---------------------------------------------------------------------------------------------------


def test_every_kind_of_figure_has_a_caption_of_its_own() -> None:
    assert set(CAPTIONS) == set(FIGURES) and len(set(CAPTIONS.values())) == len(FIGURES)
    for caption in CAPTIONS.values():
        assert caption.endswith(".") and open_braces(caption) == 0 and caption.count("$") % 2 == 0


def test_tables_and_figures_stand_in_the_order_given(tmp_path: Path) -> None:
    tables = make_tables(tmp_path)
    figures = make_figures(tmp_path, "fixedk_breakdown_small_cwe", "entropy_gain", "fixedk_breakdown_small")
    tex = document(tmp_path, spec(fixedk_breakdown_small="Small, wiki"), tables, figures)
    assert re.findall(r"\\input\{(.*?)\}", tex) == [path.name for path in tables]
    assert re.findall(r"\\includegraphics\[.*?\]\{(.*?)\}", tex) == [f"figures/{path.name}" for path in figures]
    assert re.findall(r"\\label\{(.*?)\}", tex) == [f"fig:{path.stem}" for path in figures]
    labels = [f"tab:{name}" for name in TABLES] + [f"fig:{path.stem}" for path in figures]
    assert re.findall(r"\\ref\{(.*?)\}", tex) == re.findall(r"\\pageref\{(.*?)\}", tex) == labels
    breakdown = CAPTIONS["fixedk_breakdown"]
    assert re.findall(r"\\caption\{(.*)\}", tex) == [breakdown, CAPTIONS["entropy_gain"], f"{breakdown} Small, wiki."]
    assert "org/Small-LM at r1, pretrained weights." in tex and "The paper does not evaluate org/Small-LM" in tex


def test_a_study_of_one_half_has_a_document(tmp_path: Path) -> None:
    assert r"\includegraphics" not in document(tmp_path, spec(), make_tables(tmp_path), [])
    assert r"\input" not in document(tmp_path, spec(), [], make_figures(tmp_path, "mass_curves"))


def test_the_macros_of_the_numbers_are_read_before_the_text(tmp_path: Path) -> None:
    (numbers := tmp_path / "numbers.tex").write_text("\\newcommand{\\rmvalue}[1]{}\n")
    tex = document(tmp_path, spec(), make_tables(tmp_path), [], recorded(numbers))
    assert "\n\\input{numbers.tex}\n" in tex.partition("\\begin{document}")[0]


def test_hostile_names_print_and_do_not_run(tmp_path: Path) -> None:
    wanted = DocumentSpec(HOSTILE, (backbone(HOSTILE, f"{HOSTILE}\n\\end{{document}}"),), {"mass_curves": HOSTILE})
    tex = document(tmp_path, wanted, [], make_figures(tmp_path, "mass_curves"))
    active = [re.split(r"(?<!\\)%", line)[0] for line in tex.splitlines()]
    assert not any(r"\input" in line for line in active) and open_braces("\n".join(active)) == 0
    assert sum(r"\end{document}" in line for line in active) == 1


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_file_that_is_missing_or_not_what_was_recorded_is_named(tmp_path: Path) -> None:
    table, figure = tmp_path / "t.tex", tmp_path / "mass_curves.pdf"
    assert refusal(tmp_path, [table], []) == f"{table}: no such file; rerun the rule that makes it"
    figure.write_bytes(b"%PDF-")
    recorded(figure).write_bytes(b"%PDF")
    assert refusal(tmp_path, [], [figure]).startswith(f"{figure}: is not what mass_curves.pdf.meta.json recorded: ")
    assert refusal(tmp_path, [], []) == "study mini: no table and no figure; give one"


def test_a_figure_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, [], make_figures(tmp_path, "heat")).startswith("heat is not one of fidelity, ")


@pytest.mark.parametrize("name", ["a b", "a%b", "a}b", "a~b", "a\\b", "a#b", "a$b", "é"])
def test_a_name_that_latex_would_not_find_is_refused(tmp_path: Path, name: str) -> None:
    (path := tmp_path / f"{name}.tex").write_text("\\label{tab:t}\n")
    assert refusal(tmp_path, [recorded(path)], []).startswith(f"{path.name!r}: LaTeX cannot read such a name; ")


def test_without_latex_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "main.tex").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = pdf_refusal(path, tmp_path / "main.pdf")
    assert said == ("no LaTeX on PATH (pdflatex or tectonic); install one, on Debian `apt install texlive-latex-extra`")
    path.unlink()
    assert pdf_refusal(path, tmp_path / "main.pdf") == f"{path}: no such file; run the document stage"


# ---- LaTeX -----------------------------------------------------------------------------------------------------------


def said_by_latex(folder: Path) -> str:
    """What pdflatex says of the document the second time."""
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "main.tex"]
    for _ in range(2):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


@needs(LATEX)
def test_a_study_of_many_figures_and_wild_names_compiles_within_its_margins(tmp_path: Path) -> None:
    tables = make_tables(tmp_path)
    figures = make_figures(tmp_path, *FIGURES, *(f"fixedk_breakdown_{number}" for number in range(30)))
    wanted = DocumentSpec(HOSTILE, (backbone(HOSTILE, HOSTILE),), {path.stem: HOSTILE for path in figures})
    document(tmp_path, wanted, tables, figures)
    said = said_by_latex(tmp_path)
    assert "undefined" not in said and "multiply" not in said and "Rerun" not in said
    assert all(float(width) < 1 for width in re.findall(r"Overfull \\hbox \((\S+)pt", said))
    assert "Overfull \\vbox" not in said and "Float too large" not in said


@needs(LATEX)
def test_the_pdf_is_the_same_wherever_it_is_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "a % strange ~ place"]
    for folder in folders:
        tables, figures = make_tables(folder), make_figures(folder, "mass_curves", "entropy_gain")
        document(folder, spec(), tables, figures)
        before = set(folder.rglob("*"))
        (folder / "main.log").write_text("of a run that failed")
        typesetting.run(folder / "main.tex", folder / "main.pdf")
        assert set(folder.rglob("*")) - before == {folder / "main.pdf"}
    one, other = (folder / "main.pdf" for folder in folders)
    assert one.read_bytes().startswith(b"%PDF") and sha256_of(one) == sha256_of(other)


@needs(LATEX)
def test_an_error_of_latex_is_one_line_and_leaves_the_last_pdf_and_a_log(tmp_path: Path) -> None:
    (path := tmp_path / "main.tex").write_text("\\documentclass{article}\\begin{document}x\\nonsense\\end{document}\n")
    out = tmp_path / "made" / "main.pdf"
    said = pdf_refusal(path, out)
    log = tmp_path / "made" / "main.log"
    assert said == f"{path}: pdflatex fails: ! Undefined control sequence.; all it says is in {log}"
    assert "\\nonsense" in log.read_text()
    out.write_bytes(b"older")
    with pytest.raises(ValueError, match="Undefined control sequence"):
        typesetting.run(path, out)
    assert out.read_bytes() == b"older"


@needs(LATEX)
def test_a_document_runs_no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("shell_escape", "t")  # an installation that would run any
    (path := tmp_path / "main.tex").write_text(
        "\\documentclass{article}\\begin{document}x\\immediate\\write18{touch ran}\\end{document}\n"
    )
    typesetting.run(path, tmp_path / "main.pdf")
    assert not (tmp_path / "ran").exists()
