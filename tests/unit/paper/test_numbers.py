"""The numbers that prose quotes: each as its table prints it, an unknown one is seen, a doubtful file is refused."""

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

from residual_mass.files import csv_text
from residual_mass.paper.numbers import run
from residual_mass.paper.tables import render as tables
from residual_mass.study.specs import NumbersSpec

TEMPLATE = TEMPLATES / "numbers.tex.j2"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The CSVs of every score table, and of one with columns of its own."""
    folder = tmp_path_factory.mktemp("tables")
    paths = [cells_file(folder, label) for label in LABELS]
    line = {"table": "sizes", "backbone": "smol", "d_phi": "64", "quantity": "total", "text": "14,561", "value": 14561}
    (other := folder / "sizes.csv").write_text(csv_text([*line, "study"], [line | {"study": "mini"}]))
    return [*paths, other]


def cells_file(folder: Path, label: str) -> Path:
    spec, results = files_of(folder, label)
    path = folder / f"{label}.csv"
    tables.run(spec, results, TEMPLATES / f"{label}.tex.j2", folder / f"{label}.tex", path)
    return path


def numbers(folder: Path, cells: list[Path], study: str = "mini") -> dict[str, dict[str, str]]:
    """What is defined in the file, by kind and key."""
    run(NumbersSpec(study), cells, TEMPLATE, folder / "numbers.tex")
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
        with open(path, encoding="utf-8", newline="") as stream:
            lines += list(csv.DictReader(stream))
    return lines


# ---- what is defined -------------------------------------------------------------------------------------------------


def test_every_printed_cell_has_its_value_under_one_key(tmp_path: Path, cells: list[Path]) -> None:
    defined = numbers(tmp_path, cells)
    lines = [line for line in lines_of(cells) if line["text"] != "--"]
    assert len(defined["value"]) == len(lines) > 90
    for line in lines:
        head = ["table", "backbone", "benchmark", "task", "length", "method", "budget_percent", "maps"]
        if line["table"] == "sizes":
            head = ["table", "backbone", "d_phi", "quantity"]
        key = "/".join(line[name] for name in head if line[name])
        assert defined["value"][key] == line["text"]
        assert defined["count"].get(key) == line.get("n")


def test_a_value_is_what_the_table_shows(tmp_path: Path, cells: list[Path]) -> None:
    rows = result_rows({("topk_phi", 2.0): 0.4444})
    path = tmp_path / "ruler_sweep.csv"
    tex = path.with_suffix(".tex")
    result = write_rows(tmp_path / "a.csv", rows)
    tables.run(table_spec(), [result], TEMPLATES / "ruler_sweep.tex.j2", tex, path)
    shown = printed_cells(tex.read_text())["1k", r"Top-$K{+}\phi$", 0]
    key = "ruler_sweep/smol/ruler/all/1k/topk_phi/2/2k"
    assert numbers(tmp_path, [path])["value"][key] == shown.text == "0.444"


def test_uncertainty_is_printed_like_the_value(tmp_path: Path) -> None:
    rows = result_rows({("topk", 2.0): 0.1})
    where = {"task": "all", "method": "topk_phi", "budget_percent": "2"}
    edit(rows, where, gain="-0.051499", gain_ci_low="-0.2", gain_ci_high="-0.0001", gain_p="0.000100", ci_low="-0.0002")
    path = tmp_path / "ruler_sweep.csv"
    result = write_rows(tmp_path / "a.csv", rows)
    tables.run(table_spec(), [result], TEMPLATES / "ruler_sweep.tex.j2", path.with_suffix(".tex"), path)
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
    path = tmp_path / "exact_accounting.csv"
    tex, results = path.with_suffix(".tex"), [write_accounting(tmp_path / "accounting_smol.csv", rows)]
    tables.run(accounting_spec(), results, TEMPLATES / "exact_accounting.tex.j2", tex, path)
    defined = numbers(tmp_path, [path])
    negative = [line for line in lines_of([path]) if line["text"].startswith("-")]
    assert negative and all(f" ${line['text']}$ " in tex.read_text() for line in negative)
    key = "exact_accounting/smol/cwe/1k/21/4/2k/log_z_error"
    assert (defined["value"][key], defined["count"][key]) == ("$-0.574$", "3")
    assert sum(text.startswith("$-") for text in defined["value"].values()) == len(negative)
    assert defined["value"][key.replace("log_z_error", "e_topk")][0].isdigit()


def test_what_a_study_leaves_out_has_no_key(tmp_path: Path) -> None:
    spec, results = files_of(tmp_path, "stress_1pct")
    path = tmp_path / "stress_1pct.csv"
    alone = table_spec("stress_1pct", benchmarks=("ruler",))
    tables.run(alone, results[:1], TEMPLATES / "stress_1pct.tex.j2", path.with_suffix(".tex"), path)
    assert {key.split("/")[2] for key in numbers(tmp_path, [path])["value"]} == {"ruler"}
    assert "--" in path.read_text()


def test_the_same_cells_give_the_same_bytes(tmp_path: Path, cells: list[Path]) -> None:
    for name in ("a", "b"):
        run(NumbersSpec("mini"), cells, TEMPLATE, tmp_path / name)
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
def test_latex_prints_every_value(tmp_path: Path, cells: list[Path]) -> None:
    defined = numbers(tmp_path, cells)["value"]
    body = "".join(f"\\noindent({number})\\rmvalue{{{key}}}.\n\n" for number, key in enumerate(defined))
    text, said = page(tmp_path, "\\input{numbers}", body)
    found = dict(re.findall(r"^ *\((\d+)\)(\S+)\.$", text, re.MULTILINE))
    assert list(found.values()) == list(defined.values()) and "Warning: No" not in said


@needs(PDFTOTEXT)
@needs(LATEX)
def test_latex_prints_what_else_is_known_wherever_it_is_asked(tmp_path: Path, cells: list[Path]) -> None:
    """The file is read in the text, twice, and a number stands in a heading."""
    numbers(tmp_path, cells)
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
def test_an_unknown_key_is_seen_on_the_page_and_in_the_log(tmp_path: Path, cells: list[Path]) -> None:
    numbers(tmp_path, cells)
    key = "ruler_sweep/smol/ruler/all/1k/topk_fi/4"
    topk = key.replace("topk_fi", "topk")
    text, said = page(tmp_path, "\\input{numbers}", f"It is \\rmvalue{{{key}}}, \n\nnot \\rmgain{{{topk}}}.")
    assert f"It is ?? {key}, not ?? {topk}." in " ".join(text.split())
    assert f"LaTeX Warning: No value of {key} among" in " ".join(said.replace("\n", "").split())


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(folder: Path, *cells: Path, study: str = "mini") -> str:
    with pytest.raises(ValueError) as caught:
        run(NumbersSpec(study), list(cells), TEMPLATE, folder / "numbers.tex")
    assert not (folder / "numbers.tex").exists() and "\n" not in str(caught.value)
    return str(caught.value)


def damaged(folder: Path, **fields: str) -> Path:
    """A table of its own kind with a line that says `fields`."""
    line = {"table": "sizes", "backbone": "smol", "quantity": "total", "text": "1.5", "value": "1.5", "study": "mini"}
    lines = [line, line | {"quantity": "per_head"} | fields]
    (path := folder / "sizes.csv").write_text(csv_text(list(line | fields), lines))
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value": "nan"}, ":3: value is 'nan', not a finite number; delete it and run the table stage again"),
        ({"gain": "inf"}, ":3: gain is 'inf', not a finite number; delete it and run the table stage again"),
        ({"ci_low": "0.1"}, ":3: ci_high is '', not a finite number; delete it and run the table stage again"),
        ({"quantity": "total"}, ":3: a second cell sizes/smol/total; delete it and run the table stage again"),
        ({"study": "paper"}, ": study should have one value, found 'mini' and 'paper'; delete it and run the table"),
        (
            {"backbone": "a}\\input{b"},
            ":3: backbone is 'a}\\\\input{b', which no key can hold; letters, digits and . _ + - are safe",
        ),
    ],
)
def test_a_doubtful_line_is_refused(tmp_path: Path, fields: dict[str, str], message: str) -> None:
    if "ci_low" in fields:
        fields = fields | {"ci_high": ""}
    path = damaged(tmp_path, **fields)
    assert refusal(tmp_path, path).startswith(f"{path}{message}")


def test_a_file_of_another_study_is_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path)
    assert refusal(tmp_path, path, study="paper") == (
        f"{path}: table sizes is of study 'mini', not of 'paper'; delete it and run the table stage again"
    )


def test_a_cut_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = cells_file(tmp_path, "ruler_sweep")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines)[:-5])
    assert refusal(tmp_path, path).startswith(f"{path}: empty or cut short, its last line does not end")
    two = cells_file(tmp_path, "stress_1pct")
    two.write_text("".join(two.read_text().splitlines(keepends=True)[:-1]))
    assert refusal(tmp_path, two).startswith(f"{two}: cut short, ")
    assert refusal(tmp_path, gone := tmp_path / "gone.csv") == f"{gone}: no such file; run the table stage"
