"""The numbers that prose quotes: each as its table prints it, and an unknown one is seen."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path

import pytest
from printed import open_braces, printed_cells, without_comments
from sample_results import LABELS, TEMPLATES, edit, files_of, result_rows, table_spec, write_rows
from test_accounting_table import accounting_rows
from test_accounting_table import edit as edit_accounting
from test_accounting_table import spec as accounting_spec
from test_accounting_table import write as write_accounting
from tests.needs import LATEX, PDFTOTEXT, needs

from residual_mass.paper.numbers import run
from residual_mass.paper.tables import render as tables
from residual_mass.study.specs import NumbersSpec, TableSpec

TEMPLATE = TEMPLATES / "numbers.tex.j2"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Every score table."""
    folder = tmp_path_factory.mktemp("tables")
    return [made(folder, *files_of(folder, label)) for label in LABELS]


def made(folder: Path, spec: TableSpec, results: list[Path]) -> Path:
    """A saved table, with its LaTeX and its CSV beside it."""
    data = folder / f"{spec.label}.json"
    template = TEMPLATES / f"{spec.label}.tex.j2"
    tables.run(spec, results, template, data.with_suffix(".tex"), data.with_suffix(".csv"), data)
    return data


def numbers(folder: Path, saved: list[Path], study: str = "mini") -> dict[str, dict[str, str]]:
    """What is defined in the file, by kind and key."""
    run(NumbersSpec(study), saved, TEMPLATE, folder / "numbers.tex")
    tex = without_comments((folder / "numbers.tex").read_text(encoding="utf-8"))
    assert open_braces(tex) == 0
    defined: dict[str, dict[str, str]] = {}
    for kind, key, text in re.findall(r"^\\rmset\{(\w+)\}\{(.*?)\}\{(.*)\}$", tex, re.MULTILINE):
        assert key not in defined.setdefault(kind, {})
        defined[kind][key] = text
    return defined


def lines_of(paths: list[Path]) -> list[dict[str, str]]:
    lines = []
    for path in paths:
        with open(path.with_suffix(".csv"), encoding="utf-8", newline="") as stream:
            lines += list(csv.DictReader(stream))
    return lines


# ---- what is defined -------------------------------------------------------------------------------------------------


def test_every_printed_cell_has_its_value_under_one_key(tmp_path: Path, saved: list[Path]) -> None:
    defined = numbers(tmp_path, saved)
    lines = [line for line in lines_of(saved) if line["text"] != "--"]
    assert len(defined["value"]) == len(lines) > 90
    for line in lines:
        head = ["table", "backbone", "benchmark", "task", "length", "method", "budget_percent", "maps"]
        key = "/".join(line[name] for name in head if line[name])
        assert defined["value"][key] == line["text"]
        assert defined["count"].get(key) == line.get("n")


def test_a_value_is_what_the_table_shows(tmp_path: Path) -> None:
    rows = result_rows({("topk_phi", 2.0): 0.4444})
    path = made(tmp_path, table_spec(), [write_rows(tmp_path / "a.csv", rows)])
    shown = printed_cells(path.with_suffix(".tex").read_text())["1k", r"Top-$K{+}\phi$", 0]
    key = "ruler_sweep/smol/ruler/all/1k/topk_phi/2/2k"
    assert numbers(tmp_path, [path])["value"][key] == shown.text == "0.444"


def test_uncertainty_is_printed_like_the_value(tmp_path: Path) -> None:
    rows = result_rows({("topk", 2.0): 0.1})
    where = {"task": "all", "method": "topk_phi", "budget_percent": "2"}
    edit(rows, where, gain="-0.051499", gain_ci_low="-0.2", gain_ci_high="-0.0001", gain_p="0.000100", ci_low="-0.0002")
    path = made(tmp_path, table_spec(), [write_rows(tmp_path / "a.csv", rows)])
    defined, key = numbers(tmp_path, [path]), "ruler_sweep/smol/ruler/all/1k/topk_phi/2/2k"
    assert {kind: texts[key] for kind, texts in defined.items()} == {
        "value": "0.500", "interval": "$[0.000, 0.650]$", "count": "8", "gain": "$-0.051$",
        "gaininterval": "$[-0.200, 0.000]$", "gainp": "$p < 0.001$",
    }  # fmt: skip
    assert defined["gainp"][key.replace("/2/", "/4/")] == "$p = 1.000$"
    topk = "ruler_sweep/smol/ruler/all/1k/topk/2"
    assert {kind for kind, texts in defined.items() if topk in texts} == {"value", "interval", "count"}


def test_a_negative_value_has_a_minus_as_in_its_table(tmp_path: Path) -> None:
    rows = edit_accounting(accounting_rows(), "cwe", "1k", log_z_error="-0.574", log_z_error_ci_low="-1")
    path = made(tmp_path, accounting_spec(), [write_accounting(tmp_path / "accounting_smol.csv", rows)])
    tex = path.with_suffix(".tex")
    defined = numbers(tmp_path, [path])
    negative = [line for line in lines_of([path]) if line["text"].startswith("-")]
    assert negative and all(f" ${line['text']}$ " in tex.read_text() for line in negative)
    key = "exact_accounting/smol/cwe/1k/21/4/2k/log_z_error"
    assert (defined["value"][key], defined["count"][key]) == ("$-0.574$", "3")
    assert sum(text.startswith("$-") for text in defined["value"].values()) == len(negative)
    assert defined["value"][key.replace("log_z_error", "e_topk")][0].isdigit()


def test_what_a_study_leaves_out_has_no_key(tmp_path: Path) -> None:
    _, results = files_of(tmp_path, "stress_1pct")
    path = made(tmp_path, table_spec("stress_1pct", benchmarks=("ruler",)), results[:1])
    assert {key.split("/")[2] for key in numbers(tmp_path, [path])["value"]} == {"ruler"}
    assert "--" in path.read_text()


def test_the_same_cells_give_the_same_bytes(tmp_path: Path, saved: list[Path]) -> None:
    for name in ("a", "b"):
        run(NumbersSpec("mini"), saved, TEMPLATE, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ---- LaTeX -----------------------------------------------------------------------------------------------------------


def page(folder: Path, head: str, body: str) -> tuple[str, str]:
    """The text of a page, and what LaTeX says of it."""
    head = f"\\documentclass{{article}}\\pagestyle{{empty}}{head}"
    (folder / "page.tex").write_text(f"{head}\\begin{{document}}{body}\\end{{document}}", encoding="utf-8")
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "page.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    command = ["pdftotext", "-layout", "page.pdf", "-"]
    text = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return text.replace("\f", ""), done.stdout


@needs(PDFTOTEXT)
@needs(LATEX)
def test_latex_prints_every_value(tmp_path: Path, saved: list[Path]) -> None:
    defined = numbers(tmp_path, saved)["value"]
    body = "".join(f"\\noindent({number})\\rmvalue{{{key}}}.\n\n" for number, key in enumerate(defined))
    text, said = page(tmp_path, "\\input{numbers}", body)
    found = dict(re.findall(r"^ *\((\d+)\)(\S+)\.$", text, re.MULTILINE))
    assert list(found.values()) == list(defined.values()) and "Warning: No" not in said


@needs(PDFTOTEXT)
@needs(LATEX)
def test_latex_prints_what_else_is_known_wherever_it_is_asked(tmp_path: Path, saved: list[Path]) -> None:
    """The file is read in the text, twice, and a number stands in a heading."""
    numbers(tmp_path, saved)
    key = "ruler_sweep/smol/ruler/all/1k/topk_phi/4/2k"
    asked = "".join(f"\\rm{kind}{{{key}}}; " for kind in ("interval", "count", "gain", "gaininterval", "gainp"))
    head = "\\usepackage{hyperref}"
    text, _ = page(
        tmp_path, head, f"A\\input{{numbers}}B\\input{{numbers}}C \\section{{At \\rmvalue{{{key}}}}} {asked}"
    )
    said = " ".join(text.split())
    assert said.startswith("ABC 1 At 0.500 [0.400, 0.650]; 8; +0.010; [−0.100, 0.100]; p = 1.000;")


@needs(PDFTOTEXT)
@needs(LATEX)
def test_an_unknown_key_is_seen_on_the_page_and_in_the_log(tmp_path: Path, saved: list[Path]) -> None:
    numbers(tmp_path, saved)
    key = "ruler_sweep/smol/ruler/all/1k/topk_fi/4"
    topk = key.replace("topk_fi", "topk")
    text, said = page(tmp_path, "\\input{numbers}", f"It is \\rmvalue{{{key}}}, \n\nnot \\rmgain{{{topk}}}.")
    assert f"It is ?? {key}, not ?? {topk}." in " ".join(text.split())
    assert f"LaTeX Warning: No value of {key} among" in " ".join(said.replace("\n", "").split())


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(folder: Path, *saved: Path, study: str = "mini") -> str:
    with pytest.raises(ValueError) as caught:
        run(NumbersSpec(study), list(saved), TEMPLATE, folder / "numbers.tex")
    assert not (folder / "numbers.tex").exists() and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_key_that_tex_cannot_hold_or_that_two_cells_share_is_refused(tmp_path: Path) -> None:
    name = "a}\\input{b"
    results = write_rows(tmp_path / "a.csv", result_rows(backbone=name))
    path = made(tmp_path, table_spec(backbones=(name,)), [results])
    assert refusal(tmp_path, path) == (
        f"{name!r}: no key of table ruler_sweep can hold it; use letters, digits, . _ + -"
    )
    path = made(tmp_path, table_spec(), [write_rows(tmp_path / "a.csv", result_rows())])
    assert refusal(tmp_path, path, path).startswith(f"{path}: two cells have the key ruler_sweep/smol/ruler/")
    assert refusal(tmp_path) == "study mini: no table with a number; give one"


def test_a_table_that_is_not_what_was_recorded_is_refused(tmp_path: Path, saved: list[Path]) -> None:
    path = made(tmp_path, table_spec(), [write_rows(tmp_path / "a.csv", result_rows())])
    assert refusal(tmp_path, path, study="paper").startswith(f"{path}: is of study 'mini', not of 'paper'; ")
    path.write_text(path.read_text().replace("0.500", "0.600"))
    assert refusal(tmp_path, path).startswith(f"{path}: is not what ruler_sweep.json.meta.json recorded: ")
