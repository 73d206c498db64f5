"""The tables of fidelity, read back from their LaTeX: every value, bold type, tests, what is left out and refused."""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from printed import LEFT_OUT, Cells, Printed, caption_of, open_braces, pdflatex, printed_cells, row_widths
from rendered import DATA, refusal, table, written_cells
from sample_results import table_spec
from tests.needs import LATEX, needs
from tests.records import recorded

from residual_mass.benchmarks.columns import FIDELITY
from residual_mass.metrics import KL, LOG_PPL_RATIO, SAME_TOP, Metric
from residual_mass.paper.numbers import keyed_cells
from residual_mass.paper.report.findings import collect_distances
from residual_mass.paper.table import format_value, load_table
from residual_mass.paper.tables.render import make_published
from residual_mass.study.specs import TableSpec

BUDGETS = (2.0, 4.0, 8.0)
TOPK, PHI, NOSUB, SHORT = "Top-$K$", r"Top-$K{+}\phi$", r"Top-$K{+}\phi$ (NoSub)", r"Top-$K{+}\phi$ (512-trained)"
ARMS = {TOPK: ("topk", ""), PHI: ("topk_phi", "2k"), NOSUB: ("topk_phi_nosub", "2k"), SHORT: ("topk_phi", "512")}
FULL = ("full", "")
CORPORA, GRIDS = ("wiki", "books"), ("kl", "same_top", "log_ppl_ratio")
ANSWERS = {"nll": "gold", "first": "gold", "kept": "greedy"}

Row = dict[str, str]
Rows = list[Row]


def rows_of(
    texts: Iterable[str], metrics: dict[str, str], arms: Iterable[tuple[str, str]], length: str = "1k", **facts: str
) -> Rows:
    """As the fidelity stage writes them, with random values; what the tables do not show is always 99."""
    generator = random.Random(f"{length} {facts}")
    constant = {
        "backbone": "smol", "length": length, "documents": "12", "tokens": "384", "k_mean": "21", "study": "mini",
        "model_id": "org/Small-LM", "revision": "r1", "weights": "pretrained", "stderr": "0.1",
    }  # fmt: skip
    rows = []
    for text, (metric, continuation), (method, maps) in itertools.product(texts, metrics.items(), arms):
        for budget in BUDGETS if method != "full" else ("",):
            value = generator.uniform(0, 0.3) if metric != "log_ppl_ratio" else generator.uniform(-0.05, 0.1)
            row = constant | {
                "text": text, "continuation": continuation, "metric": metric, "method": method, "maps": maps,
                "budget_percent": f"{budget:g}" if budget else "", "phi_sha": f"{maps:x<64}" if maps else "",
                "value": f"{value:.6g}", "ci_low": f"{value - 0.1:.6g}", "ci_high": f"{value + 0.2:.6g}",
                "task": "all", "state": "own",
            }  # fmt: skip
            if method not in ("full", "topk"):
                p = 10 ** generator.uniform(-5, 0)
                row |= {"gain": f"{generator.uniform(-0.1, 0.1):.6g}", "gain_ci_low": "-0.2", "gain_ci_high": "0.2"}
                row |= {"gain_p": f"{p:.6g}"}
            others = ({"state": "dense"}, {"task": "babilong_qa1"}, {"metric": "kl_p90"}, {"continuation": "other"})
            rows += [row | facts, *(row | facts | other | {"value": "99"} for other in others)]
    return rows


def of_texts(length: str = "1k", **facts: str) -> Rows:
    arms = [arm for arm in ARMS.values() if arm[1] != "512" or facts.get("backbone", "smol") == "smol"]
    return rows_of(CORPORA, dict.fromkeys(GRIDS, "following"), arms, length, **facts)


def of_answers(length: str = "1k", texts: Iterable[str] = ("ruler", "babilong"), **facts: str) -> Rows:
    arms = [FULL, *list(ARMS.values())[:3]]
    rows = rows_of(texts, ANSWERS, arms, length, **facts)
    return [row for row in rows if (row["method"], row["metric"]) != ("full", "kept")]


def write(path: Path, rows: Rows) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, FIDELITY, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return recorded(path)


def spec(label: str = "fidelity", **changes: Any) -> TableSpec:
    shown = {"maps": ("2k", "512"), "benchmarks": ()} if label == "fidelity" else {"maps": ("2k",)}
    return table_spec(label, **shown | changes)


def grids(tex: str) -> list[Cells]:
    """The cells of each grid, in a sound float of its own."""
    parts = tex.split(r"\begin{table}")[1:]
    for part in parts:
        assert len(row_widths(part)) == 1 and part.count(r"\end{table}") == 1
    assert open_braces(tex) == 0
    return [printed_cells(part) for part in parts]


def shown(rows: Rows) -> dict[tuple[str, str, str, str, str, str], Row]:
    """What a table must show, by text, metric, method, maps, budget and length."""
    names = ("text", "metric", "method", "maps", "budget_percent", "length")
    return {tuple(row[name] for name in names): row for row in rows if row["value"] != "99"}  # type: ignore[misc]


def places(rows: Rows, metric: str, length: str) -> dict[tuple[str, int], Row]:
    """The rows of a grid's block, by the title of their line and their column."""
    found, columns = shown(rows), list(itertools.product(CORPORA, BUDGETS))
    return {
        (title, column): found[text, metric, *arm, f"{budget:g}", length]
        for title, arm in ARMS.items()
        for column, (text, budget) in enumerate(columns)
    }


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        (KL, 0.0032, "0.0032"), (KL, 0.012345, "0.0123"), (KL, 0.09999, "0.100"), (KL, 1.805, "1.80"),
        (KL, 0.99951, "1.00"), (KL, 23.46, "23.5"), (KL, 1234.0, "1234"), (KL, 0.0, "0.00"), (KL, 1e-9, "0.000000"),
        (KL, 0.00077, "0.00077"), (KL, -0.00123, "-0.0012"), (KL, -1e-9, "0.000000"), (KL, 4.44e-5, "0.000044"),
        (SAME_TOP, 0.91249, "0.912"), (SAME_TOP, 1.0, "1.000"),
        (LOG_PPL_RATIO, -0.0004, "0.000"), (LOG_PPL_RATIO, -0.0126, "-0.013"), (LOG_PPL_RATIO, 1.2344, "1.234"),
    ],
)  # fmt: skip
def test_a_divergence_has_three_digits_and_a_share_three_decimals(metric: Metric, value: float, text: str) -> None:
    assert format_value(value, metric) == text


@pytest.mark.parametrize("seed", range(3))
def test_every_value_is_printed_in_its_place_and_the_best_is_bold(tmp_path: Path, seed: int) -> None:
    rows = of_texts("1k", revision=f"r{seed}") + of_texts("2k", revision=f"r{seed}")
    tex = table(tmp_path, spec(lengths=("1k", "2k")), write(tmp_path / "a.csv", rows))
    found = grids(tex)
    for metric, cells, best in zip(GRIDS, found, (min, max, min), strict=True):
        assert len(cells) == 2 * 4 * 6
        for length in ("1k", "2k"):
            block = places(rows, metric, length)
            for column in range(6):
                digits = {title: cells[length, title, column].text.strip("$") for title in ARMS}
                for title, text in digits.items():
                    value = float(block[title, column]["value"])
                    decimals = len(text.partition(".")[2])
                    assert text == f"{value:z.{decimals}f}" and 3 <= decimals <= 6
                    assert cells[length, title, column].bold == (Decimal(text) == best(map(Decimal, digits.values())))


def test_ties_as_printed_are_all_bold_and_full_attention_is_not(tmp_path: Path) -> None:
    rows = of_answers()
    for row in rows:
        if (row["metric"], row["text"], row["budget_percent"]) == ("nll", "ruler", "2") and row["value"] != "99":
            row["value"] = {"topk": "0.53149", "topk_phi": "0.53051", "topk_phi_nosub": "0.53151"}[row["method"]]
        if (row["metric"], row["text"], row["method"]) == ("nll", "ruler", "full") and row["value"] != "99":
            row["value"] = "0.001"
    cells = grids(table(tmp_path, spec("fidelity_answers", benchmarks=("ruler",)), write(tmp_path / "a.csv", rows)))[0]
    block = {(title, column): cell for (_, title, column), cell in cells.items()}
    assert [block[title, 0][:2] for title in (TOPK, PHI, NOSUB)] == [("0.531", True), ("0.531", True), ("0.532", False)]
    assert {block["Full", column] for column in range(3)} == {Printed("0.0010")}


# ---- tests -----------------------------------------------------------------------------------------------------------


def slow_holm(p_values: list[float]) -> list[bool]:
    """Which are rejected at 0.05: in rising order, each against 0.05 over the number of those that are left, up to the
    first that is not.
    """
    rejected = [False] * len(p_values)
    left = len(p_values)
    for index in sorted(range(len(p_values)), key=lambda index: p_values[index]):
        if p_values[index] * left >= 0.05:
            break
        rejected[index], left = True, left - 1
    return rejected


@pytest.mark.parametrize("seed", range(3))
def test_marks_are_those_of_holms_correction_over_the_comparisons_of_a_metric(tmp_path: Path, seed: int) -> None:
    rows = of_texts("1k", revision=f"r{seed}") + of_texts("2k", revision=f"r{seed}")
    tex = table(tmp_path, spec(lengths=("1k", "2k")), write(tmp_path / "a.csv", rows))
    marked_cells = 0
    for metric, cells in zip(GRIDS, grids(tex), strict=True):
        tested = {
            (length, *where): row
            for length in ("1k", "2k")
            for where, row in places(rows, metric, length).items()
            if row.get("gain_p")
        }
        assert len(tested) == 2 * 3 * 6
        rejected = dict(zip(tested, slow_holm([float(row["gain_p"]) for row in tested.values()]), strict=True))
        sides = {where: "above" if float(tested[where]["gain"]) > 0 else "below" for where in tested}
        assert {where: cell.mark for where, cell in cells.items()} == {
            where: sides[where] if rejected.get(where) else "" for where in cells
        }
        sums = [sum(rejected[where] and sides[where] == side for where in tested) for side in ("above", "below")]
        found = rf"Of 36 paired comparisons with {TOPK} at the same budget, {sum(sums) or 'none'} remain"
        if sum(sums) > 1:
            assert found in caption_of(tex) and rf"({sums[0]} above, $\dagger$; {sums[1]} below" in caption_of(tex)
        marked_cells += sum(sums)
    assert marked_cells > 5


def test_every_cell_is_a_line_with_its_tests_and_has_a_key_of_its_own(tmp_path: Path) -> None:
    rows = of_texts()
    table(tmp_path, spec(), write(tmp_path / "fidelity_smol_1k.csv", rows))
    lines, wanted = written_cells(tmp_path), shown(rows)
    assert len(lines) == len(wanted)
    for line in lines:
        row = wanted[tuple(line[name] for name in ("corpus", "quantity", "method", "maps", "budget_percent", "length"))]
        copied = "value ci_low ci_high gain gain_p documents tokens phi_sha model_id weights study".split()
        assert {name: line[name] for name in copied} == {name: row.get(name, "") for name in copied}
        assert bool(line["gain_p_holm"]) == (row["method"] != "topk") and line["source"] == "fidelity_smol_1k.csv"
    saved = load_table(tmp_path / DATA, "mini")
    keys = [key for key, _ in keyed_cells(saved)]
    assert len(keys) == len(set(keys)) == len(lines) and "fidelity/smol/wiki/1k/topk_phi/4/2k/kl" in keys
    cell = next(cell for cell in saved.cells if cell.gain)
    low, high = (format_value(float(cell.row[f"ci_{side}"]), KL) for side in ("low", "high"))
    assert f"95% interval {low} to {high}" in cell.notes and "12 documents, 384 tokens" in cell.notes
    assert any(note.startswith("difference to Top-K at the same budget") for note in cell.notes)


def test_the_page_counts_what_completion_changes_by_the_main_maps_alone(tmp_path: Path) -> None:
    rows = of_texts()
    for row in rows:
        if row["metric"] in GRIDS and row["value"] != "99" and row["method"] != "topk":
            good = row["maps"] == "2k"
            row |= {"value": "0.1" if good == (row["metric"] != "same_top") else "0.9", "gain_p": "0.00001"}
            row |= {"gain": "-0.4" if float(row["value"]) < 0.5 else "0.4"}
        elif row["method"] == "topk" and row["value"] != "99":
            row["value"] = "0.5"
    table(tmp_path, spec(), write(tmp_path / "a.csv", rows))
    found = collect_distances([load_table(tmp_path / DATA, "mini")])
    assert [(each.title, each.tally.wins, each.tally.cells, each.better, each.worse) for each in found] == [
        ("KL(Full || arm), held-out text", 6, 6, 6, 0),
        ("equal top tokens, held-out text", 6, 6, 6, 0),
        ("log perplexity ratio, held-out text", 6, 6, 6, 0),
    ]


# ---- what is left out ------------------------------------------------------------------------------------------------


def test_a_dash_stands_for_maps_that_a_backbone_does_not_have(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "a.csv", of_texts()),
        write(tmp_path / "b.csv", of_texts(backbone="big", model_id="org/Big-LM")),
    ]
    tex = table(tmp_path, spec(backbones=("smol", "big")), *files)
    for cells in grids(tex):
        assert {where for where, cell in cells.items() if cell == LEFT_OUT} == {("1k", SHORT, i) for i in range(6, 12)}
    assert "A dash stands for what the study does not measure with big." in caption_of(tex)
    assert "A dash" not in caption_of(table(tmp_path, spec(), files[0]))


def _without(**fields: str) -> Callable[[Rows], Rows]:
    return lambda rows: [row for row in rows if not all(row[name] == value for name, value in fields.items())]


@pytest.mark.parametrize(
    ("drop", "named"),
    [
        (_without(method="topk_phi", maps="2k", budget_percent="4"), "wiki smol 1k topk_phi at 4% kl"),
        (_without(method="topk", text="books", metric="same_top"), "books smol 1k topk at 2% same_top"),
        (_without(maps="512", text="books", budget_percent="8"), "books smol 1k topk_phi at 8% with maps 512 kl"),
        (_without(method="topk_phi_nosub"), "wiki smol 1k topk_phi_nosub at 2% kl"),
    ],
)
def test_a_point_that_the_study_has_is_missed(tmp_path: Path, drop: Callable[[Rows], Rows], named: str) -> None:
    said = refusal(tmp_path, spec(), write(tmp_path / "a.csv", drop(of_texts())))
    assert said == f"no cell for {named} in the files of --results; rerun the force and fidelity stages with it"


def test_other_studies_doubled_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", of_texts(study="paper"))
    assert refusal(tmp_path, spec(), path) == f"{path}: is of study 'paper', table fidelity of 'mini'; give its own"
    path, twin = (write(tmp_path / name, of_texts()) for name in ("a.csv", "b.csv"))
    assert refusal(tmp_path, spec(), path, twin) == f"{twin}: has wiki smol 1k topk at 2% kl, as has {path}; give one"
    said = refusal(tmp_path, spec(backbones=("smol", "big")), path)
    assert said == "table fidelity: no file shows backbone big; pass its files to --results"
    assert "no cell for" in refusal(tmp_path, spec(lengths=("1k", "2k")), path)


def test_answers_are_shown_by_benchmark_at_the_lengths_that_have_them(tmp_path: Path) -> None:
    rows = of_answers("1k") + of_answers("2k", ("ruler", "longbench"))
    wanted = spec(
        "fidelity_answers", lengths=("1k", "2k"), benchmarks=("ruler", "babilong", "longbench"),
        lengths_of={"ruler": ("1k", "2k"), "babilong": ("1k",), "longbench": ("2k",)},
    )  # fmt: skip
    found, values = grids(table(tmp_path, wanted, write(tmp_path / "a.csv", rows))), shown(rows)
    for (metric, cells), first in zip(zip(ANSWERS, found, strict=True), ("Full", "Full", TOPK), strict=True):
        blocks = list(dict.fromkeys((block, title) for block, title, _ in cells))
        assert [block for block, title in blocks if title == first] == [
            "RULER 1k", "RULER 2k", "BABILong 1k", "LongBench 2k"
        ]  # fmt: skip
        assert next(title for _, title in blocks) == first and LEFT_OUT not in cells.values()
        row = values["longbench", metric, "topk_phi", "2k", "4", "2k"]
        assert float(cells["LongBench 2k", PHI, 1].text) == pytest.approx(float(row["value"]), abs=6e-4)


# ---- one document ----------------------------------------------------------------------------------------------------


def test_one_document_has_values_but_neither_intervals_nor_tests_and_a_note(tmp_path: Path) -> None:
    empty = dict.fromkeys(("stderr", "ci_low", "ci_high", "gain_ci_low", "gain_ci_high", "gain_p"), "")
    rows = of_texts()
    rows = [row | empty | {"documents": "1"} if row["text"] == "books" else row for row in rows]
    tex = table(tmp_path, spec(), write(tmp_path / "a.csv", rows))
    assert "Without intervals and tests, for a text or a task has one document only: Books 1k." in caption_of(tex)
    assert "Behind a value: 12 documents (Wikipedia 1k); 1 document (Books 1k)." in caption_of(tex)
    assert all(
        cell.text and (column < 3 or not cell.mark) for cells in grids(tex) for (*_, column), cell in cells.items()
    )
    assert caption_of(tex).count("Of 9 paired comparisons") == 3
    tex = table(tmp_path, spec(), write(tmp_path / "b.csv", [row | empty | {"documents": "1"} for row in rows]))
    assert "Books 1k." in caption_of(tex) and "paired" not in caption_of(tex) and "half-width" not in caption_of(tex)


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_own_methods_have_rows_after_the_papers(tmp_path: Path) -> None:
    own = rows_of(CORPORA, dict.fromkeys(GRIDS, "following"), [("mean_value", "")])
    tex = table(tmp_path, spec(), write(tmp_path / "a.csv", of_texts() + own))
    assert list(dict.fromkeys(title for _, title, _ in grids(tex)[0])) == [*ARMS, r"mean\_value"]


def test_the_paper_has_no_such_table() -> None:
    for label in ("fidelity", "fidelity_answers"):
        with pytest.raises(ValueError, match=f"the paper has no table '{label}'"):
            make_published(label)


@needs(LATEX)
def test_latex_accepts_the_tables_of_two_backbones_and_they_fit_the_page(tmp_path: Path) -> None:
    facts = {"backbone": "big", "model_id": "org/Big-LM"}
    titles = {"smol": "Llama-3.2-1B-Instruct", "big": "Llama-3.2-3B-Instruct"}
    wanted = {"backbones": ("smol", "big"), "backbone_titles": titles}
    texts = [row for row in of_texts() + of_texts(**facts) if row["text"] == "wiki"]
    said = pdflatex(tmp_path, table(tmp_path, spec(**wanted), write(tmp_path / "a.csv", texts)))
    assert "Overfull" not in said
    answers = write(tmp_path / "b.csv", of_answers() + of_answers(**facts))
    tex = table(tmp_path, spec("fidelity_answers", benchmarks=("ruler", "babilong"), **wanted), answers)
    assert "Overfull" not in pdflatex(tmp_path, tex)
