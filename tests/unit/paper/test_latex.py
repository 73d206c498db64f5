"""Text from data cannot become LaTeX code."""

from __future__ import annotations

from pathlib import Path

import pytest

from residual_mass.paper.latex import Latex, escape, render

HOSTILE = 'a_b & 50% $x$ #1 {y} ~ ^ \\input{z} <|> "q"\n\\end{table}'


def test_special_characters_are_escaped() -> None:
    assert escape("a_b & 50%") == r"a\_b \& 50\%"
    assert escape("\\x{}~^") == r"\textbackslash{}x\{\}\textasciitilde{}\textasciicircum{}"
    assert escape("one\ntwo\u2028three") == "one two three"


def test_latex_passes_once_and_stays() -> None:
    assert escape(Latex("$K$")) == "$K$"
    assert escape(escape("a_b")) == r"a\_b"


def test_expressions_are_escaped_and_template_text_is_not(tmp_path: Path) -> None:
    (template := tmp_path / "t").write_text("\\textit{<< hostile >>}\n% << hostile | comment >>\nend\n")
    text = render(template, hostile=HOSTILE)
    printed, comment, end = text.splitlines()
    assert printed == f"\\textit{{{escape(HOSTILE)}}}"
    assert comment.startswith("% a_b & 50%") and end == "end"


@pytest.mark.parametrize(
    ("source", "message"), [("<< nothing >>", "'nothing' is undefined"), ("<% if %>", "Expected an expression")]
)
def test_a_faulty_template_is_named(tmp_path: Path, source: str, message: str) -> None:
    (template := tmp_path / "faulty.j2").write_text(f"{source}\n")
    with pytest.raises(ValueError, match=rf"faulty\.j2: .*{message}"):
        render(template)


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.j2: no such file; restore it from the repository"):
        render(tmp_path / "gone.j2")
