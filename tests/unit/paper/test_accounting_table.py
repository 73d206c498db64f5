"""The table of accounting errors, read back from its LaTeX: every value, what is in bold, what is refused."""

from __future__ import annotations

import csv
import random
import re
from pathlib import Path
from typing import Any

import pytest
from printed import caption_of, open_braces, pdflatex, printed_fields, row_widths, without_comments
from rendered import refusal, table, written_cells
from sample_results import TEMPLATES, table_spec
from tests.needs import LATEX, needs
from tests.records import recorded

from residual_mass.diagnostics.columns import ACCOUNTING
from residual_mass.paper import published
from residual_mass.paper.tables.accounting_table import COLUMNS, QUANTITIES
from residual_mass.paper.tables.render import make_published
from residual_mass.study.specs import TableSpec

LABEL = "exact_accounting"
TEMPLATE = TEMPLATES / f"{LABEL}.tex.j2"
K = {("1k", 2.0): "1", ("1k", 4.0): "21", ("2k", 2.0): "21", ("2k", 4.0): "62"}

Row = dict[str, str]
Rows = list[Row]


def accounting_rows(seed: int = 0, **facts: str) -> Rows:
    """Two corpora at two lengths and two budgets, as the findings stage writes them, with random values."""
    generator = random.Random(seed)
    constant = {
        "study": "mini", "backbone": "smol", "maps": "2k", "clamped_share": "0.000000", "packs": "3", "heads": "270",
        "rows": "6480", "model_id": "org/Small-LM", "revision": "r1", "weights": "pretrained", "phi_sha": "ab" * 32,
    }  # fmt: skip
    rows = []
    for corpus in ("wiki", "cwe"):
        for length, budget in K:
            row = constant | {
                "corpus": corpus,
                "length": length,
                "budget_percent": f"{budget:g}",
                "k": K[length, budget],
            }
            for name in ("e_topk", "e_nosub", "e_sub", "log_z_error"):
                value = generator.uniform(0.1, 0.9) if name != "log_z_error" else generator.uniform(-2, 2)
                row |= {name: f"{value:.6f}"}
                row |= {f"{name}_ci_low": f"{value - 0.02:.6f}", f"{name}_ci_high": f"{value + 0.03:.6f}"}
            row |= {"e_exact_sub": f"{generator.uniform(1e-8, 1e-7):.3e}", "e_exact_nosub": f"{generator.random():.6f}"}
            rows.append(row | facts)
    return rows


def edit(rows: Rows, corpus: str, length: str, **fields: str) -> Rows:
    """The rows with `fields` set on those of 4 %."""
    for row in rows:
        if (row["corpus"], row["length"], row["budget_percent"]) == (corpus, length, "4"):
            row.update(fields)
    return rows


def write(path: Path, rows: Rows, columns: list[str] = ACCOUNTING) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return recorded(path)


def spec(**changes: Any) -> TableSpec:
    return table_spec(LABEL, **{"lengths": ("1k", "2k"), "budgets": (4.0,), "benchmarks": ()} | changes)


def plain(field: str) -> str:
    return re.sub(r"\\textbf\{(.*)\}", r"\1", field).strip("$")


def is_bold(field: str) -> bool:
    return field.startswith(r"\textbf{")


def widths(tex: str) -> set[int]:
    """`row_widths` of a tabular that has columns aligned to the right as well."""
    assert tex.count("{llrccccr}") == 1
    return row_widths(tex.replace("{llrccccr}", "{llcccccc}"))


# ---- the paper's values ----------------------------------------------------------------------------------------------


def test_the_papers_table_has_its_values_its_order_and_its_bold_type() -> None:
    tex = make_published(LABEL).latex(TEMPLATE)
    rows = {(row[0], row[1]): row for row in printed_fields(tex)}
    assert list(rows) == [("WikiText", "4k"), ("CWE", "4k"), ("WikiText", "64k"), ("CWE", "64k")]
    order = ["topk", "topk_phi_nosub", "topk_phi", "exact_nosub", "mean_log_z_error"]
    with open(Path(published.__file__).with_name(f"{LABEL}.csv"), newline="") as stream:
        facts = list(csv.DictReader(stream))
    assert len(facts) == 20
    for fact in facts:
        row = rows[{"wikitext": "WikiText", "cwe": "CWE"}[fact["corpus"]], fact["length"]]
        field = row[3 + order.index(fact["quantity"])]
        assert (plain(field), is_bold(field), row[2]) == (fact["value"], fact["bold"] == "1", fact["k"]), fact
    assert widths(tex) == {8} and open_braces(tex) == 0
    assert "none was computed here" in caption_of(tex) and "1\\% of the" in tex
    assert "Backbone Llama-3.2-1B-Instruct, feature maps 64k." in caption_of(tex)


# ---- our values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_rows_show_the_values_of_the_file_length_by_length(tmp_path: Path, seed: int) -> None:
    rows = accounting_rows(seed)
    tex = table(tmp_path, spec(), write(tmp_path / "accounting_smol.csv", rows))
    chosen = [row for length in ("1k", "2k") for row in rows if (row["length"], row["budget_percent"]) == (length, "4")]
    assert [row[:3] for row in printed_fields(tex)] == [
        ["Wikipedia", "1k", "21"], ["CWE", "1k", "21"], ["Wikipedia", "2k", "62"], ["CWE", "2k", "62"]
    ]  # fmt: skip
    for fields, row in zip(printed_fields(tex), chosen, strict=True):
        assert [plain(field) for field in fields[3:]] == [f"{float(row[name]):.3f}" for name in QUANTITIES]
        errors = [float(plain(field)) for field in fields[3:6]]
        assert [is_bold(field) for field in fields[3:]] == [*(x == min(errors) for x in errors), False, False]
        assert fields[-1].startswith("$") and fields[-1].endswith("$")
    assert widths(tex) == {8} and open_braces(tex) == 0 and r"4\% of the" in tex


def test_ties_at_the_printed_precision_are_all_bold_and_an_oracle_never_is(tmp_path: Path) -> None:
    rows = accounting_rows()
    edit(rows, "wiki", "1k", e_topk="0.200400", e_nosub="0.199600", e_sub="0.200600", e_exact_nosub="0.100000")
    edit(rows, "cwe", "1k", e_topk="0.200499", e_nosub="0.200501", e_sub="0.300000", log_z_error="-5.000000")
    fields = printed_fields(table(tmp_path, spec(), write(tmp_path / "a.csv", rows)))
    assert fields[0][3:7] == [r"\textbf{0.200}", r"\textbf{0.200}", "0.201", "0.100"]
    assert fields[1][3:6] == [r"\textbf{0.200}", "0.201", "0.300"] and fields[1][7] == "$-5.000$"


@pytest.mark.parametrize(
    ("value", "text"), [("-0.000499", "$0.000$"), ("-0.000000", "$0.000$"), ("-0.000501", "$-0.001$")]
)
def test_a_log_z_error_that_rounds_to_zero_has_no_minus(tmp_path: Path, value: str, text: str) -> None:
    rows = edit(accounting_rows(), "wiki", "1k", log_z_error=value, log_z_error_ci_low="-1", log_z_error_ci_high="1")
    fields = printed_fields(table(tmp_path, spec(), write(tmp_path / "a.csv", rows)))
    assert fields[0][-1] == text
    (line,) = [line for line in written_cells(tmp_path) if (line["value"], line["quantity"]) == (value, "log_z_error")]
    assert line["text"] == text.strip("$")


def test_without_lengths_all_of_the_file_are_shown_in_rising_order(tmp_path: Path) -> None:
    rows = [row | {"length": {"1k": "16k", "2k": "512"}[row["length"]]} for row in accounting_rows()]
    fields = printed_fields(table(tmp_path, spec(lengths=()), write(tmp_path / "a.csv", rows)))
    assert [row[1] for row in fields] == ["512", "512", "16k", "16k"]


def test_several_backbones_are_blocks_in_the_order_of_the_spec(tmp_path: Path) -> None:
    big = accounting_rows(1, backbone="big", model_id="org/Big-LM", packs="2", rows="900", corpus="my_corpus")
    files = [
        write(tmp_path / "small.csv", accounting_rows()),
        write(tmp_path / "big.csv", big[:4]),
        write(tmp_path / "other.csv", accounting_rows(2, backbone="not_shown")),
    ]
    wanted = spec(backbones=("big", "smol"), backbone_titles={"smol": "SmolLM2"})
    tex = table(tmp_path, wanted, *files)
    assert [row[0] for row in printed_fields(tex)] == [
        r"\multicolumn{8}{l}{Big-LM}", *[r"my\_corpus"] * 2,
        r"\multicolumn{8}{l}{SmolLM2}", *["Wikipedia", "CWE"] * 2,
    ]  # fmt: skip
    assert widths(tex) == {8} and tex.count(r"\midrule") == 2
    assert tex == table(tmp_path, wanted, *reversed(files))
    caption = caption_of(tex)
    assert "backbone org/Big-LM, org/Small-LM, feature maps 2k." in caption
    assert r"900 attention rows of 270 heads in 2 packs (big my\_corpus 1k, big my\_corpus 2k); 6480" in caption


def test_every_printed_value_is_a_line_with_its_origin(tmp_path: Path) -> None:
    rows = edit(accounting_rows(), "cwe", "2k", clamped_share="0.012000")
    path = write(tmp_path / "accounting_smol.csv", rows)
    fields = {(row[0], row[1]): row[3:] for row in printed_fields(table(tmp_path, spec(), path))}
    lines = written_cells(tmp_path)
    assert len(lines) == 4 * 5 and len({(x["corpus"], x["length"], x["quantity"]) for x in lines}) == 20
    assert list(lines[0]) == [*COLUMNS]
    for line in lines:
        (row,) = [
            row for row in rows if all(row[name] == line[name] for name in ("corpus", "length", "budget_percent", "k"))
        ]
        name = line["quantity"]
        has_interval = name != "e_exact_nosub"
        assert line["value"] == row[name]
        assert line["ci_low"] == (row[f"{name}_ci_low"] if has_interval else "")
        assert line["ci_high"] == (row[f"{name}_ci_high"] if has_interval else "")
        subtracts = name in ("e_sub", "log_z_error")  # what dropped residuals change
        assert line["clamped_share"] == (row["clamped_share"] if subtracts else "")
        for origin in ("backbone", "study", "model_id", "revision", "weights", "phi_sha", "packs", "rows"):
            assert line[origin] == row[origin]
        assert (line["table"], line["source"]) == (LABEL, path.name)
        field = fields[{"wiki": "Wikipedia", "cwe": "CWE"}[line["corpus"]], line["length"]][QUANTITIES.index(name)]
        assert (line["text"], line["bold"]) == (plain(field), str(int(is_bold(field))))


def test_a_missing_log_z_error_is_a_dash(tmp_path: Path) -> None:
    empty = {"log_z_error": "", "log_z_error_ci_low": "", "log_z_error_ci_high": ""}
    rows = edit(accounting_rows(), "cwe", "2k", **empty)
    tex = table(tmp_path, spec(), write(tmp_path / "a.csv", rows))
    assert [row[-1] == "--" for row in printed_fields(tex)] == [False, False, False, True]
    assert "A dash stands where no row has a residual." in caption_of(tex)
    tex = table(tmp_path, spec(), write(tmp_path / "b.csv", [row | empty for row in rows]))
    assert "interval over heads and packs: 0.025 of an error." in caption_of(tex)


# ---- captions --------------------------------------------------------------------------------------------------------


def test_the_caption_owns_up_to_what_is_measured(tmp_path: Path) -> None:
    rows = accounting_rows(e_exact_sub="1.000e-07")
    edit(rows, "wiki", "2k", e_exact_sub="2.340e-07", e_nosub_ci_low="0.100000", e_nosub_ci_high="0.400000")
    edit(rows, "cwe", "1k", log_z_error_ci_low="-1.000000", log_z_error_ci_high="2.000000")
    for row in rows:  # what another budget has is of no concern here
        if row["budget_percent"] == "2":
            row.update(e_exact_sub="9.000e-03", e_sub_ci_high="99.000000", clamped_share="1.000000")
    tex = table(tmp_path, spec(), write(tmp_path / "accounting_smol.csv", rows))
    caption = caption_of(tex)
    assert "Study mini, backbone org/Small-LM, feature maps 2k." in caption
    assert "The paper does not evaluate org/Small-LM; the values are not comparable with the paper's." in caption
    assert "Behind a value: 6480 attention rows of 270 heads in 3 packs." in caption
    assert r"bootstrap interval over heads and packs: 0.150 of an error, 1.500 of a log-$Z$ error." in caption
    assert r"is $2\times10^{-7}$." in caption and r"\log\hat Z_{\mathcal{R}}-\log Z_{\mathcal{R}}" in caption
    assert "retrieved tokens twice: a diagnostic, and no method" in caption
    for absent in ("Random weights", "dropped", "A dash"):
        assert absent not in caption
    assert (
        "% accounting_smol.csv: org/Small-LM at r1, pretrained weights, phi maps 2k abababababab, wiki 1k: 6480 "
        "attention rows of 270 heads in 3 packs; cwe 1k: " in tex
    )
    assert tex.startswith("% Table exact_accounting of study mini; generated, changes are overwritten.\n")
    assert "reproduc" not in tex.lower()


def test_the_error_of_the_exact_partition_may_be_zero(tmp_path: Path) -> None:
    tex = table(tmp_path, spec(), write(tmp_path / "a.csv", accounting_rows(e_exact_sub="0.000e+00")))
    assert "mean error of a row of this table is $0$." in caption_of(tex)


def test_rows_without_an_estimate_are_counted(tmp_path: Path) -> None:
    rows = edit(accounting_rows(), "wiki", "1k", clamped_share=f"{7 / 6480:.6f}")
    edit(rows, "cwe", "2k", clamped_share=f"{6479 / 6480:.6f}")
    caption = caption_of(table(tmp_path, spec(), write(tmp_path / "a.csv", rows)))
    assert r"log-$Z$ error: 6486 rows (Wikipedia 1k 7; CWE 2k 6479)." in caption


def test_random_weights_are_owned_up_to(tmp_path: Path) -> None:
    rows = accounting_rows(weights="random", model_id="meta-llama/Llama-3.2-1B-Instruct")
    tex = table(tmp_path, spec(), write(tmp_path / "a.csv", rows))
    caption = caption_of(tex)
    assert "Random weights (meta-llama/Llama-3.2-1B-Instruct): such values exercise the code and say nothing" in caption
    assert "random weights, phi maps" in tex and "not comparable" not in caption
    trained = write(tmp_path / "b.csv", accounting_rows(backbone="big", model_id=rows[0]["model_id"]))
    caption = caption_of(table(tmp_path, spec(backbones=("smol", "big")), tmp_path / "a.csv", trained))
    assert "Random weights (meta-llama/Llama-3.2-1B-Instruct)" in caption


HOSTILE = 'a_b & 50% $x$ #1 {y} ~ ^ \\input{z} <|> "q" [r]'


def hostile_table(folder: Path) -> str:
    facts = {name: HOSTILE for name in ("backbone", "model_id", "revision", "maps", "phi_sha", "study")}
    rows = [row | {"corpus": f"{HOSTILE} {row['corpus']}"} for row in accounting_rows(**facts)]
    wanted = spec(backbones=(HOSTILE, "big"), study=HOSTILE)
    big = accounting_rows(backbone="big", study=HOSTILE, model_id=f"{HOSTILE}\n\\end{{table}}")
    return table(folder, wanted, write(folder / "a.csv", rows), write(folder / "b.csv", big))


def test_hostile_names_print_and_do_not_run(tmp_path: Path) -> None:
    tex = hostile_table(tmp_path)
    active = without_comments(tex)
    assert r"\input" not in active and active.count(r"\end{table}") == 1
    assert open_braces(active) == 0 and widths(tex) == {8}


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    """As in a file of an older version."""
    path = write(tmp_path / "a.csv", accounting_rows(), [name for name in ACCOUNTING if name != "packs"])
    said = f"{path}: column packs is missing; delete it and run the findings stage again"
    assert refusal(tmp_path, spec(), path) == said


def test_nothing_retrieved_is_a_count(tmp_path: Path) -> None:
    tex = table(tmp_path, spec(), write(tmp_path / "a.csv", edit(accounting_rows(), "wiki", "1k", k="0")))
    assert printed_fields(tex)[0][2] == "0"


def test_a_budget_and_a_length_that_a_file_lacks_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", accounting_rows())
    assert (
        refusal(tmp_path, spec(budgets=(8.0,)), path)
        == f"{path}: no row for wiki 1k at 8%; capture it, or leave it out"
    )
    assert (
        refusal(tmp_path, spec(lengths=("1k", "4k")), path)
        == f"{path}: no row for wiki 4k at 4%; capture it, or leave it out"
    )


def test_other_studies_and_backbones_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", accounting_rows(study="paper"))
    message = refusal(tmp_path, spec(), path)
    assert message == f"{path}: is of study 'paper', table {LABEL} of 'mini'; give its own"
    path, twin = (write(tmp_path / name, accounting_rows()) for name in ("a.csv", "b.csv"))
    message = refusal(tmp_path, spec(backbones=("smol", "big")), path)
    assert message == f"table {LABEL}: no file is of backbone big; pass its file to --results"
    assert refusal(tmp_path, spec(), path, twin) == f"{twin}: a second file of backbone smol; give one"


def test_the_table_shows_one_budget(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", accounting_rows())
    assert refusal(tmp_path, spec(budgets=(2.0, 4.0)), path).startswith(f"table {LABEL}: budgets has 2 values")


# ---- LaTeX -----------------------------------------------------------------------------------------------------------


@needs(LATEX)
def test_latex_accepts_the_table_whatever_the_names_and_it_fits_the_page(tmp_path: Path) -> None:
    rows = edit(accounting_rows(), "wiki", "1k", clamped_share="0.100000")
    sound = table(tmp_path, spec(), write(tmp_path / "a.csv", rows))
    for name, tex in (
        ("paper", make_published(LABEL).latex(TEMPLATE)),
        ("ours", sound),
        ("names", hostile_table(tmp_path)),
    ):
        said = pdflatex(tmp_path, tex)
        assert name == "names" or "Overfull" not in said
