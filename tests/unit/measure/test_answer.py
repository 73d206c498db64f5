"""What `residual-mass measure` answers: the fastest step here, what it costs, and the page that says so."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from tests.conftest import tiny_llama
from tests.needs import COMPILER, KERNELS, needs
from tests.unit.measure.test_measuring import METHODS, Found, measure, on_a_text, parsed

from residual_mass import cli
from residual_mass.kernels import library
from residual_mass.kernels.layout import BLOCK
from residual_mass.measure import times
from residual_mass.measure.answer import Measured, answer_of, faster_from, fewest_bytes, recipe, recommended
from residual_mass.measure.texts import Documents
from residual_mass.measure.times import Times
from residual_mass.methods import METHODS as REGISTRY
from residual_mass.methods import method_named
from residual_mass.methods.served import FEWEST_BYTES, READ_WHOLE, RECOMMENDED, backends_of
from residual_mass.model.phi_maps import HeadShape

ROOT = Path(__file__).parents[3]
SERVED = "--length 512 --budgets 8 --methods cache8 scan4_regression_64 scan3_regression_32 --target-kl 100"


class Cells(HTMLParser):
    """The cells of a page's tables, its links and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.sources: list[str] = []
        self.words: list[str] = []
        self.within = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.within = tag
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.within = ""

    def handle_data(self, data: str) -> None:
        self.words += data.split()
        if self.within in ("td", "th"):
            self.rows[-1][-1] += data


def page_of(path: Path) -> Cells:
    cells = Cells()
    cells.feed(path.read_text("utf-8"))
    return cells


def facts_of(text: str) -> dict[str, str]:
    """The facts of an answer by name, each in one line."""
    blocks = re.findall(r"^(\S.{15}) (.+(?:\n {17}.+)*)$", text, re.M)
    return {name.strip(): " ".join(fact.split()) for name, fact in blocks}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """On a model whose heads the kernels serve, one method that only torch serves beside two that have a fast step."""
    return measure(on_a_text(tiny_llama(width=64), tmp_path_factory.mktemp("served"), SERVED))


@needs(KERNELS)
def test_what_is_recommended_is_served_here_and_fastest(found: Found) -> None:
    table = found.table.set_index("method")
    assert table["backend"].to_dict() == found.settings["served"]
    (best,) = table.index[table["recommended"] == 1]
    fast = table[table["backend"] == "packed"]
    assert set(fast.index) == {"cache8", "scan4_regression_64"} and best in fast.index
    facts = facts_of(found.text)
    scatter = int(re.search(r"differ by (\d+) %", facts["a token"])[1]) / 100
    assert table["seconds"][best] <= fast["seconds"].min() * max(1 / 0.97, 1 + scatter + 0.01)
    assert table["read"].idxmin() == "scan3_regression_32"
    assert facts["fewest bytes"].startswith("scan3_regression_32 at 8 % reads")
    assert "by torch only, no faster here" in facts["fewest bytes"] and "drafts" not in found.text
    assert re.search(r"^ms a token, .*  512  4,096  16,384$", found.text, re.M)
    share = re.search(r"of cache for 512 tokens, (\d+) % of the", facts["memory"])
    assert int(share[1]) < 60


@needs(KERNELS)
def test_the_page_the_text_and_the_table_agree(found: Found) -> None:
    page = page_of(found.folder / "measured.html")
    assert all(source.startswith("data:image/png;base64,") for source in page.sources) and page.sources
    words = " ".join(page.words)
    question, lead, *_ = found.text.split("\n\n")
    limits = found.text.partition("Limits of this answer:\n* ")[2].split("\n* ")
    for part in (question, lead, *facts_of(found.text.partition("\n\n    from")[0]).values(), *limits):
        part = " ".join(part.split())
        assert part in words, part
    rows = {(row[0], row[1]): row for row in page.rows}
    for row in found.table.itertuples():
        shown = rows[row.method, "-" if row.method == "cache8" else f"{row.budget_percent:g} %"]
        assert shown[5] == f"{row.kl:.2g} [{row.ci_low:.2g}, {row.ci_high:.2g}]" and shown[9] == row.backend
        mark = ">" if row.recommended else " "
        assert re.search(rf"^{mark} +{re.escape(shown[0])} .* {row.backend}$", found.text, re.M)
    assert found.table["recommended"].sum() == 1


@needs(KERNELS)
@pytest.mark.parametrize("flags", ["", "--compile", "--weights 4"])
@pytest.mark.parametrize(("method", "backend"), [("scan4_regression_64", "packed"), ("topk", "torch")])
def test_the_lines_of_an_answer_run(flags: str, method: str, backend: str) -> None:
    answer = measured([("a", method, 0.2, 0.005, 0.05, backend)])
    arm = fewest_bytes(answer.table, 100.0)
    lines = recipe(replace(answer, request=parsed("m", *flags.split())), arm)
    assert ("compile=True" in lines) == (flags == "--compile" and backend == "packed") and "budget=0.02" in lines
    ids = torch.ones(1, 130, dtype=torch.long)
    names = {"model": tiny_llama(width=64), "inputs": {"input_ids": ids, "max_new_tokens": 3}}
    exec(lines.replace(", compile=True", ""), names)
    assert names["output"].shape == (1, 133) and ("pack_weights" in names) == ("weights" in flags)
    assert hasattr(names["model"], "packed_weights") == ("weights" in flags)


def test_without_kernels_the_answer_begins_with_what_it_cannot_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESIDUAL_MASS_KERNELS", "off")
    library.load.cache_clear()
    try:
        options = "--length 128 --budgets 25 --target-kl 100"
        found = measure(on_a_text(tiny_llama(width=64, layers=1), tmp_path, options))
    finally:
        library.load.cache_clear()
    lines = capsys.readouterr().out.split("\n\n")
    assert " ".join(lines[1].split()).startswith(
        "Nothing is faster here than full attention: torch alone serves these methods (the kernels are not built here, "
        "or turned off"
    )
    assert set(found.table["backend"]) == {"torch"} and found.table["recommended"].sum() == 0


@needs(KERNELS)
def test_what_weights_cost_is_told_apart_from_what_a_method_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference of a method has the same packed weights; results of other weights are never mixed in a store."""
    monkeypatch.setattr(times, "LONGER", ())
    options = "--length 512 --budgets 25 --methods scan4_regression_64 --target-kl 100"
    asked = on_a_text(tiny_llama(width=64), tmp_path, options)
    plain = measure(asked)
    packed = measure(asked, weights=4)
    again = measure(asked)
    assert "weights cost" not in plain.text and packed.folder.name == f"{plain.folder.name}-2"
    assert again.folder == plain.folder
    pd.testing.assert_series_equal(again.table["kl"], plain.table["kl"])
    (cost,) = pd.read_csv(packed.folder / "weights.csv").itertuples()
    scan, unpacked = (each.table.set_index("method").loc["scan4_regression_64"] for each in (packed, plain))
    assert scan.kl != unpacked.kl
    assert cost.kl > 0.1 > cost.rounding >= 0, "random weights do not survive 4 bits; rounding is small beside that"
    assert scan.kl < cost.kl / 4, "the method is measured from full attention with packed weights"
    assert cost.ci_low < cost.kl < cost.ci_high
    facts = facts_of(packed.text)
    assert facts["weights cost"].startswith(f"4 bits cost files {cost.kl:.2g} [") and "as loaded" in facts["a token"]
    assert "pack_weights(model, bits=4)" in packed.text and "linear layers in 4 bits" in facts["weights"]
    rows = (asked.out / "store.jsonl").read_text()
    measure(asked, weights=4)
    assert (asked.out / "store.jsonl").read_text() == rows, "nothing is computed twice"


@needs(KERNELS)
@needs(COMPILER)
@pytest.mark.slow
def test_compiled_steps_are_those_of_methods_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(times, "LONGER", ())
    options = "--length 512 --budgets 25 --methods scan4_regression_64 --target-kl 100 --compile"
    found = measure(on_a_text(tiny_llama(width=64), tmp_path, options))
    compiled = [record for record in caplog.records if record.message.startswith("compiled the decode step")]
    assert compiled and facts_of(found.text)["a token"].endswith("; steps of methods compiled, transformers' not)")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--weights 3", "argument --weights: invalid choice: 3"),
        ("--compile", "--compile: there is no C\\+\\+ compiler none: install one, .*; leave it out"),
    ],
)
def test_what_cannot_be_packed_or_compiled_is_told_in_one_line(
    options: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "none")
    asked = on_a_text(tiny_llama(layers=1), tmp_path, "")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["measure", asked.model, *asked.texts, *options.split(), "--length", "64", "--out", str(asked.out)])
    assert stopped.value.code == 2 and re.search(f"measure: error: {line}", capsys.readouterr().err)


# ---- answers to given numbers ----------------------------------------------------------------------------------------


def measured(rows: list[tuple[str, str, float, float, float, str]], full: float = 0.1, documents: int = 16) -> Measured:
    """An answer to (text, method, share of bytes, upper end of the interval, seconds, backend), all at 2 %."""
    table = pd.DataFrame(rows, columns=["text", "method", "read", "ci_high", "seconds", "backend"])
    table = table.assign(
        budget_percent=2.0, kl=table["ci_high"].fillna(1) / 2, ci_low=table["ci_high"] / 4, kl_over_topk=0.5, kept=0.4,
        kl_tail=1.0, same_top=0.9, cache_mib=10.0, recommended=0,
    )  # fmt: skip
    asked = parsed("m", "--target-kl", "0.01", "--documents", "16", "--methods", *dict.fromkeys(table["method"]))
    texts = [Documents(name, [[0]] * documents, documents) for name in dict.fromkeys(table["text"])]
    seconds = {name: {1024: full, 4096: 4 * full} for name in ("full attention", READ_WHOLE)}
    longer = pd.DataFrame.from_dict(seconds, orient="index")
    keys = [times.FULL_SIDE.key, (READ_WHOLE, 100.0)]
    steps = pd.DataFrame({"seconds": [full, 0.08], "cache_mib": [20.0, 9.0]}, pd.MultiIndex.from_tuples(keys))
    found = Times(steps, keys[1], longer=longer)
    title = "m, prompts of 1k"
    return Measured(asked, title, Path("f"), {}, texts, table, table, "largest", {}, found, None, {})


def test_the_fastest_served_step_that_meets_the_target_on_every_text_is_recommended() -> None:
    rows = [
        ("a", "topk", 0.2, 0.005, 0.01, "torch"), ("a", "scan4", 0.3, 0.009, 0.05, "packed"),
        ("a", "scan4_moments", 0.5, 0.02, 0.02, "packed"), ("a", "topk_moments", 0.6, 0.008, 0.07, "triton"),
        ("b", "topk", 0.2, 0.005, 0.01, "torch"), ("b", "scan4", 0.3, 0.01, 0.05, "packed"),
        ("b", "scan4_moments", 0.5, 0.001, 0.02, "packed"), ("b", "topk_moments", 0.6, 0.001, 0.07, "triton"),
    ]  # fmt: skip
    found = measured(rows)
    best = recommended(found.table, 0.01)
    assert (best.method, best.high, best.seconds) == ("scan4", 0.01, 0.05)
    assert fewest_bytes(found.table, 0.01).method == "topk"
    assert recommended(found.table, 0.01, 1 / 1.5).method == "topk_moments", "times scatter by half: the smaller KL"
    near = [(*row[:4], 0.0505, row[5]) if row[1] == "topk_moments" else row for row in rows]
    assert recommended(measured(near).table, 0.01).method == "topk_moments", "equally fast, and nearer"


def test_a_step_slower_than_full_attention_is_not_recommended_without_saying_so_first() -> None:
    for seconds, start in (
        (0.05, "Take scan4 at 2 %: 50 ms"),
        (0.099, "Nothing is faster"),
        (0.3, "Nothing is faster"),
    ):
        found = measured([("a", "scan4", 0.3, 0.009, seconds, "packed"), ("a", "topk", 0.3, 0.1, 0.2, "torch")])
        longer = found.times.longer
        longer.loc["scan4 at 2 %"] = [seconds, seconds]
        said = answer_of(found)
        assert said.lead.startswith(start) and "this text" in said.lead
        first = 1024 if seconds == 0.05 else 4096
        assert f"faster than full attention from {first:,} tokens on" in dict(said.facts)["pays"]
        assert dict(said.facts)["pays"].endswith("(measured at 1,024, 4,096 tokens; longer ones were not timed)")


@pytest.mark.parametrize(
    ("ends", "backends", "documents", "line"),
    [
        (
            (0.5, 0.02),
            ("torch", "packed"),
            16,
            "None of the methods with a fast step here stays below 0.01 nats. The n",
        ),
        ((0.5, 0.02), ("torch", "torch"), 16, "Nothing is faster here than full attention: torch alone.* nearest is t"),
        ((0.005, 0.02), ("torch", "packed"), 16, "None of the methods with a fast step here .* interval ends at 0.02"),
        ((float("nan"),), ("packed",), 1, "Nothing is recommended: a single document has no interval. Give more text."),
        ((0.5,), ("packed",), 16, "None of the methods .* The nearest is topk at 2 %, whose interval ends at 0.5."),
    ],
)
def test_where_none_meets_the_target_nothing_is_recommended(
    ends: tuple[float, ...], backends: tuple[str, ...], documents: int, line: str
) -> None:
    cells = zip(METHODS, ends, backends, strict=False)
    found = measured([("a", method, 0.2, end, 0.05, backend) for method, end, backend in cells], documents=documents)
    assert recommended(found.table, 0.01) is None
    assert re.match(line, answer_of(found).lead), answer_of(found).lead


def test_what_lies_within_the_scatter_of_times_is_not_faster() -> None:
    found = measured([("a", "scan4", 0.3, 0.009, 0.09, "packed")])
    found.times.longer.loc["scan4 at 2 %"] = [0.09, 0.05]
    for scatter, start in ((0.0, "Take scan4 at 2 %"), (0.2, "Nothing is faster here than full attention")):
        said = answer_of(replace(found, times=replace(found.times, scatter=scatter)))
        assert ("no more time than such times scatter (20 %)" in said.lead) == (scatter > 0.1)
        assert (
            said.lead.startswith(start) and f"turns that differ by {100 * scatter:.0f} %" in dict(said.facts)["a token"]
        )
        assert any("Measure again when the machine is idle" in limit for limit in said.limits) == (scatter > 0.1)


def test_a_side_is_faster_from_where_it_stays_so() -> None:
    steps = pd.DataFrame({1: [1.0, 2.0], 2: [3.0, 2.0], 4: [1.0, 2.0], 8: [1.0, 2.0]}, index=["a", "b"])
    assert faster_from(steps, "a", "b") == 4 and faster_from(steps, "b", "a") is None


def test_long_prompts_are_timed_as_far_as_they_fit() -> None:
    model = tiny_llama(width=64)
    shape = HeadShape.of(model.config)
    bytes_of_a_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize
    longest = times.MAX_BYTES // bytes_of_a_token
    assert times.fits(model, longest) and not times.fits(model, longest + 1)


# ---- one fact --------------------------------------------------------------------------------------------------------


def test_pages_and_studies_recommend_what_the_registry_does() -> None:
    assert {RECOMMENDED, FEWEST_BYTES, READ_WHOLE} <= {method.name for method in REGISTRY}
    assert "packed" in backends_of(method_named(RECOMMENDED)) and "packed" in backends_of(method_named(READ_WHOLE))
    assert backends_of(method_named(FEWEST_BYTES)) == ("torch",) and BLOCK == 64
    methods = (ROOT / "docs/methods.md").read_text("utf-8")
    first, second = re.findall(r"^\| [^|]+ \| `(\w+)`", methods, re.M)[:2]
    assert (first, second) == (RECOMMENDED, FEWEST_BYTES)
    for page in ("README.md", "docs/library.md"):
        named = set(re.findall(r'method="(scan\w+)"', (ROOT / page).read_text("utf-8")))
        assert named == {RECOMMENDED}, page
    for study in ("mini", "methods"):  # a study's page opens with its last method
        settings = yaml.safe_load((ROOT / f"config/studies/{study}.yaml").read_text("utf-8"))
        assert settings["methods"][-1] == RECOMMENDED, study
