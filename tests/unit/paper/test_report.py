"""The page of a study: what it shows, that it is complete in itself, what hostile names become, what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sample_report import DEVIATIONS, TEMPLATE, Study, changed, edit_cells, edit_lines, read, sample_study
from sample_results import edit, maps_arms, place, result_rows, table_spec, write_rows

from residual_mass.cli import main
from residual_mass.core.settings import to_json
from residual_mass.paper.marked import to_html
from residual_mass.paper.readers.results import load_results
from residual_mass.paper.report import page as report
from residual_mass.paper.report.entries import PageTable
from residual_mass.paper.report.findings import collect_gains
from residual_mass.paper.report.origins import provenance
from residual_mass.paper.report.page import load_deviations
from residual_mass.paper.report.verdicts import Compared
from residual_mass.paper.table import Block, Cell, Entry, Grid, Place, Row, Table, load_table
from residual_mass.paper.tables.notes import on_score
from residual_mass.paper.tables.render import run as run_table

HOSTILE = '<script>alert("x")</script> $(rm) </title> \' & \\input{z} {{ 7 * 7 }}'
VOID = {"meta", "link", "br", "img", "circle", "line"}


class Element:
    """An element of a page, with its children and text in order."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes, self.parts = tag, attributes, list["Element | str"]()

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)

    def all(self, tag: str, name: str = "") -> list[Element]:
        """Descendants by tag and, if it is given, a class among theirs."""
        found = []
        for part in self.parts:
            if isinstance(part, Element):
                if part.tag == tag and (not name or name in part.attributes.get("class", "").split()):
                    found.append(part)
                found += part.all(tag, name)
        return found


class Page(HTMLParser):
    """Refuses elements that are not closed where they should be."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("page", {})]
        self.feed(html)
        self.close()
        assert len(self.open) == 1, [each.tag for each in self.open]

    @property
    def root(self) -> Element:
        return self.open[0]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        assert len(element.attributes) == len(attrs), f"{tag} has an attribute twice"
        self.open[-1].parts.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].parts.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, tag

    def handle_data(self, data: str) -> None:
        self.open[-1].parts.append(data)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return sample_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def page(study: Study) -> Element:
    return Page(study.page()).root


@pytest.fixture
def own(tmp_path: Path) -> Study:
    """A study whose files a test may change."""
    return sample_study(tmp_path)


def article(page: Element, label: str) -> Element:
    (found,) = [each for each in page.all("article") if each.attributes["aria-labelledby"] == f"table-{label}"]
    return found


def grid(table: Element) -> dict[tuple[int, int], Element]:
    """Cells by row and column, each in every place that it takes."""
    places: dict[tuple[int, int], Element] = {}
    for number, row in enumerate(table.all("tr")):
        column = 0
        for cell in [*row.all("th"), *row.all("td")]:
            while (number, column) in places:
                column += 1
            for down in range(int(cell.attributes.get("rowspan", 1))):
                for right in range(int(cell.attributes.get("colspan", 1))):
                    places[number + down, column + right] = cell
            column += int(cell.attributes.get("colspan", 1))
    return places


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_every_score_stands_under_its_titles(study: Study, page: Element) -> None:
    """Looked up by the words of row and column, as a reader would."""
    methods = {"full": "Full", "topk": "Top-K", "topk_phi": "Top-K+ϕ", "topk_phi_nosub": "Top-K+ϕ (NoSub)"}
    for label in ("ruler_sweep", "babilong_sweep"):
        (table,) = article(page, label).all("table")
        places = grid(table)
        height = max(row for row, _ in places) + 1
        titles = {places[1, column].text.strip(): column for column in range(2, 6)}
        for line in study.lines(label):
            (row,) = [
                row
                for row in range(2, height)
                if places[row, 0].text.startswith(line["length"]) and places[row, 1].text == methods[line["method"]]
            ]
            column = titles[f"{line['budget_percent']}%"] if line["budget_percent"] else 2
            (button,) = places[row, column].all("button")
            assert button.text == line["text"] and bool(button.all("strong")) == (line["bold"] == "1")
            told = button.attributes["aria-label"]
            low, high = (f"{float(line[name]):.3f}" for name in ("ci_low", "ci_high"))
            assert told.startswith(f"{line['text']}; ") and f"95% interval {low} to {high}" in told
            assert f"{line['n']} examples" in told and line["source"] in told
            assert (("difference to Top-K" in told) and f"p {float(line['gain_p']):.3g}" in told) == bool(line["gain"])
            assert button.attributes["data-notes"].split("\n") == told.split("; ")[1:]


def test_every_line_of_every_table_is_there_in_its_order(study: Study, page: Element) -> None:
    for label in (path.stem for path in study.files.tables if path.stem != "runtime_1b"):
        buttons, lines = article(page, label).all("button"), study.lines(label)
        assert [button.text.replace("−", "-") for button in buttons] == [line["text"] for line in lines]


def test_a_cell_of_several_values_tells_of_each(study: Study, page: Element) -> None:
    lines = study.lines("runtime_1b")
    by_place: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for line in lines:
        by_place.setdefault((line["length"], line["method"]), {})[line["quantity"]] = line
    latencies, traffic = article(page, "runtime_1b").all("table")
    shown = (
        (latencies, {"per_step_ms": "ms: one decoding step, repeats from {low} to {high} ms",
                     "end_to_end_ms": "ms: the prefill and 31 steps, end to end"}),
        (traffic, {"step_bytes": "GB: read and written in a step",
                   "floor_ms": "ms: that traffic at the measured bandwidth",
                   "over_floor": "times: the measured step over that floor"}),
    )  # fmt: skip
    for table, titles in shown:
        buttons = table.all("button")
        assert len(buttons) == len(by_place) == 8
        for button, of_place in zip(buttons, by_place.values(), strict=True):
            assert button.text.split(" / ") == [of_place[name]["text"] for name in titles]
            notes = button.attributes["data-notes"].split("\n")
            for name, title in titles.items():
                assert f"{of_place[name]['text']} {title.format(**of_place[name])}" in notes
            assert {"bandwidth of copies 4000.000 GB/s", "peak memory 900.000 MiB", "5 repeats"} <= set(notes)
            assert not [note for note in notes if "step bytes" in note or note.startswith(("low", "high"))]
    gigabytes = next(line for line in lines if line["quantity"] == "step_bytes")
    assert float(gigabytes["text"]) * 1e9 == float(gigabytes["value"])
    assert "5.500" not in latencies.text  # the paper's block is not taken for the study's
    assert "84.41 / 2798.91" in latencies.text


def test_a_latency_stands_by_its_own_verdict(study: Study, page: Element, own: Study) -> None:
    """End to end has no interval to compare with, which leaves the step's verdict as it is."""
    assert study.files.comparison and own.files.comparison
    runtime = [fact for fact in read(study.files.comparison) if fact["table"] == "runtime_1b" and fact["ours"]]
    steps = [fact for fact in runtime if fact["quantity"] == "per_step_ms"]
    assert len(runtime) == 2 * len(steps) == 16
    assert {fact["verdict"] for fact in runtime if fact not in steps} == {"not comparable"}
    kinds = ["agrees" if fact["verdict"] == "agrees" else "differs" for fact in steps]
    shown = article(page, "runtime_1b").all("span", "paper")
    assert [span.attributes["class"] for span in shown] == [f"paper {kind}" for kind in kinds]
    assert set(kinds) == {"agrees", "differs"}
    edit_lines(own.files.comparison, {"table": "runtime_1b"}, verdict="not comparable")
    shown = article(Page(own.page()).root, "runtime_1b").all("span", "paper")
    assert [span.attributes["class"] for span in shown] == ["paper open"] * len(steps)


def test_values_of_the_paper_in_its_own_rows_are_not_those_of_the_study() -> None:
    place = Place("1b", "64k", maps="64k", quantity="wall_clock_h")
    cell = Cell(place, "21.5 h", 21.5, notes=("from a.csv",))
    rows = Row(("A",), (Entry("21.5 h", (cell,)),)), Row(("in the paper",), (Entry("19 h"), Entry("--")))
    table = Table("training_cost_64k", "paper", (Grid(("",), ("",), (Block(rows),)),))
    page = PageTable(table, {place: Compared(table.label, place, "19", "21.500", "differs by +2.500", "")})
    own, theirs, dash = (entry for row in rows for entry in row.entries)
    assert page.notes(own) == ["the paper prints 19 h: differs by +2.500", "from a.csv"]
    assert page.notes(theirs) == page.notes(dash) == [] and page.published(theirs) is None
    assert (page.html(theirs), page.html(dash)) == ("19 h", "–")


def test_published_values_stand_beside_those_of_the_same_cell(study: Study, page: Element) -> None:
    assert study.files.comparison
    facts = read(study.files.comparison)
    compared = [fact for fact in facts if fact["ours"] and fact["table"] == "ruler_sweep"]
    shown = beside(article(page, "ruler_sweep"))
    assert len(compared) == len(shown) == 26
    signs = {"agrees": " ✓", "differs": " ≠"}
    for fact, (button, span) in zip(compared, shown, strict=True):
        kind = "agrees" if fact["verdict"] == "agrees" else "differs"
        assert span.text == fact["published"] + signs[kind] and kind in span.attributes["class"].split()
        assert span.attributes["aria-hidden"] == "true"  # told once, with the value
        told = f"; the paper prints {fact['published']}: {fact['verdict']}; "
        assert button.attributes["aria-label"].count(told) == 1
    assert {span.attributes["class"] for _, span in shown} == {"paper agrees", "paper differs"}
    for button, span in beside(article(page, "babilong_sweep")):
        assert "open" in span.attributes["class"] and "simulated data" in button.attributes["aria-label"]


def beside(table: Element) -> list[tuple[Element, Element]]:
    """Values with what the paper prints in their place."""
    cells = [cell for cell in table.all("td") if cell.all("span", "paper")]
    return [(cell.all("button")[0], cell.all("span", "paper")[0]) for cell in cells]


def test_the_authors_score_is_told_where_it_is_another(tmp_path: Path) -> None:
    for original, told in (("0.612300", True), ("0.500000", False), ("", False)):
        rows = edit(result_rows(), {"task": "all"}, original_value=original)
        (result,) = load_results(write_rows(tmp_path / "a.csv", rows))
        where = place("ruler", "1k", "smol", "topk", 2.0)
        notes = list(on_score(result.score(where), where.metric, None))
        assert ("by the authors' scorer 0.612" in notes) == told and "standard error 0.100" in notes


def test_captions_are_those_of_the_latex_tables(study: Study, page: Element) -> None:
    for path in study.files.tables:
        (caption,) = article(page, path.stem).all("p", "caption")
        words = re.findall(r"\b[a-z]{4,}\b", caption.text)
        tex = path.with_suffix(".tex").read_text(encoding="utf-8").split(r"\caption{")[1].split(r"\label")[0]
        assert words == re.findall(r"\b[a-z]{4,}\b", re.sub(r"\\[a-z]+", " ", tex)) and len(words) > 20


def test_rows_of_ours_stand_apart(tmp_path: Path) -> None:
    maps = ("1k", "1k-kl_only", "1k-residual_loss")
    results = write_rows(tmp_path / "ablation_loss_smol.csv", result_rows(None, maps_arms(*maps)))
    out = {name: tmp_path / f"loss_ablation.{name}" for name in ("tex", "csv", "json")}
    spec = table_spec("loss_ablation", budgets=(4.0,), maps=maps)
    run_table(spec, [results], TEMPLATE.with_name("loss_ablation.tex.j2"), out["tex"], out["csv"], out["json"])
    (block,) = load_table(out["json"], "mini").grids[0].blocks
    heads = [(to_html(row.heads[0]).striptags(), row.rule) for row in block.rows]
    assert heads == [
        ("Full", False), ("Top-K", False), ("Ours", False), ("KL only", False), ("Residual objective*", True)
    ]  # fmt: skip


# ---- what was found --------------------------------------------------------------------------------------------------


def section(page: Element, name: str) -> Element:
    (found,) = [each for each in page.all("section") if each.attributes["aria-labelledby"] == name]
    return found


def test_the_page_opens_with_what_the_study_found(study: Study, page: Element) -> None:
    assert [each.text for each in page.all("h2")][:3] == ["What this study found", "Beside the paper", "What was run"]
    gains, errors = section(page, "findings").all("table")
    lines = study.lines("ruler_sweep") + study.lines("babilong_sweep")
    expected: dict[tuple[str, str], list[str]] = {}
    for line in (line for line in lines if line["method"] == "topk_phi"):
        numbers = (f"{float(line[name]):+.3f}" for name in ("gain", "gain_ci_low", "gain_ci_high"))
        place = {"ruler": "RULER", "babilong": "BABILong"}[line["benchmark"]], line["length"]
        expected.setdefault(place, []).append("{} [{}, {}]".format(*numbers).replace("-", "−"))
    shown = [[cell.text.strip() for cell in [*row.all("th"), *row.all("td")]] for row in gains.all("tr")[1:]]
    assert {(row[0], row[1]): row[2:] for row in shown} == expected and len(shown) == 4
    accounting = study.lines("exact_accounting")
    for row in errors.all("tr")[1:]:
        text, length, k, *methods, change = (cell.text.strip() for cell in [*row.all("th"), *row.all("td")])
        of_text = {
            line["quantity"]: line for line in accounting if line["corpus"] == {"CWE": "cwe"}.get(text, "wikitext")
        }
        topk, nosub, sub = (of_text[name] for name in ("e_topk", "e_nosub", "e_sub"))
        assert (length, k) == (
            topk["length"],
            topk["k"],
        ) and change == f"{100 * float(sub['value']) / float(topk['value']) - 100:+.0f}%"
        for cell, line in zip(methods, (topk, nosub, sub), strict=True):
            assert cell == f"{line['text']} [{float(line['ci_low']):.3f}, {float(line['ci_high']):.3f}]"


def test_the_page_tells_the_answers_that_methods_turn(own: Study) -> None:
    edit_cells(
        own.table("ruler_sweep"),
        lambda cell: (cell.place.method, cell.place.length, cell.place.budget_percent) == ("topk", "4k", 2.0),
        lambda cell: replace(cell, row=cell.row | {"right_to_wrong": "17", "wrong_to_right": "0"}),
    )
    page = Page(own.page()).root
    told = [" ".join(line.text.split()) for line in section(page, "findings").all("li") if "answers" in line.text]
    assert [line.partition(",")[0] for line in told] == ["RULER 4k", "RULER 8k", "BABILong 4k", "BABILong 8k"]
    assert "RULER 4k, 6500 answers: at 0.5% / 1% / 2% / 4% Top-K turns 3 / 3 / 17 / 3 from right to wrong" in told[0]
    assert "and 1 / 1 / 0 / 1 from wrong to right; " in told[0]
    notes = [button.attributes["data-notes"] for button in page.all("button", "value")]
    assert any(
        "answers turned relative to Full: 3 from right to wrong, 1 from wrong to right" in note for note in notes
    )


def test_gains_beyond_chance_are_marked_and_cells_of_two_tables_count_once(own: Study) -> None:
    marks = {1.0: (0.2, "above"), 2.0: (-0.2, "below"), 4.0: (0.2, "")}

    def gaining(cell: Cell) -> bool:
        return cell.place.method == "topk_phi" and cell.place.length == "4k" and cell.place.budget_percent in marks

    def gain(cell: Cell) -> Cell:
        value, mark = marks[cell.place.budget_percent or 0]
        assert cell.gain
        return replace(cell, gain=replace(cell.gain, value=value), mark=mark)

    edit_cells(path := own.table("ruler_sweep"), gaining, gain)
    table = load_table(path, "paper")
    repeated = replace(changed(table, other_gain), label="stress_1pct")
    found = collect_gains([repeated, table])
    assert found == collect_gains([table]) and found.tested == 8
    (row,) = [row for row in found.rows if row.length == "4k"]
    assert [gain.mark if gain else None for gain in row.gains] == ["", "above", "below", ""]
    assert (found.marked("above"), found.marked("below")) == (1, 1)
    text = " ".join(section(Page(own.page()).root, "findings").text.split())
    assert "Of 16 paired comparisons" in text and "1 is above and 1 below by more than chance" in text
    assert "+0.200†" in text and "−0.200‡" in text


def other_gain(cell: Cell) -> Cell:
    return replace(cell, gain=replace(cell.gain, value=0.9)) if cell.gain else cell


def test_a_task_at_whose_floor_full_is_names_no_winner(own: Study) -> None:
    edit_cells(
        own.table("ruler_sweep"),
        lambda cell: (cell.place.method, cell.place.length) == ("full", "8k"),
        lambda cell: replace(cell, flags=("floor",)),
    )
    found = section(Page(own.page()).root, "findings")
    told = [row.all("th")[0].text for row in found.all("table")[0].all("tr")[1:]]
    assert told == ["RULER", "RULER §", "BABILong", "BABILong"]
    assert "§ Full is at the floor: this task decides nothing here." in found.text


def test_beside_another_backbone_the_paper_takes_a_sentence(tmp_path: Path) -> None:
    page = Page(sample_study(tmp_path, model_id="org/Other-LM").page()).root
    assert [each.text for each in page.all("h2")][:2] == ["What this study found", "Beside the paper"]
    beside = section(page, "verdict")
    text = " ".join(beside.text.split())
    assert "None of the 469 values that the paper prints can be compared with one of this study: " in text
    assert "other backbone: 1b (org/Other-LM) (78)" in text and not beside.all("ul") and not beside.all("details")
    assert "of 13 statements on what the tables say as a whole" in text


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_the_verdict_counts_every_published_cell(study: Study, page: Element) -> None:
    assert study.files.comparison and study.files.picture
    facts = read(study.files.comparison)
    counted = Counter(re.sub(r" by .*", "", fact["verdict"]) for fact in facts)
    (tiles,) = page.all("ul", "tiles")
    words = {"agrees": "agree", "differs": "differ", "not comparable": "not comparable", "not run": "not run"}
    assert [tile.text.split(" ", 1) for tile in tiles.all("li")] == [
        [str(counted[verdict]), text] for verdict, text in words.items()
    ]
    assert min(counted.values()) > 0 and f"prints {len(facts)} values that can be compared" in page.text
    statements = read(study.files.picture)
    same = Counter(row["same_direction"] for row in statements)
    text = " ".join(page.text.split())
    assert f"of {same['yes'] + same['no']} statements" in text and f"{same['yes']} have the same sign" in text
    of_heads_and_scores = "of 2 readings of statements that the paper makes of attention heads and of scores"
    assert f"{of_heads_and_scores}, 1 holds here, 1 is undecided" in text


def test_one_dot_stands_for_every_change(study: Study, page: Element) -> None:
    rows = study.lines("ruler_sweep")
    values = {(r["length"], r["method"], r["budget_percent"]): float(r["text"]) for r in rows}
    expected = sorted(values[key] - values[key[0], "topk", key[2]] for key in values if key[1] == "topk_phi")
    ours = next(strip for strip in page.all("svg", "ours") if strip.attributes["aria-label"].startswith("8 cells"))
    places = [float(circle.attributes["cx"].rstrip("%")) for circle in ours.all("circle")]
    limit = float(re.search(r"\+(0\.\d{3})", page.all("span", "axis")[0].text)[1])  # type: ignore[index]
    assert places == pytest.approx([50 + 47 * each / limit for each in expected], abs=0.01)
    published = [len(strip.all("circle")) for strip in page.all("svg", "published")]
    assert published == [16, 16, 32, 32]
    for strip in [*page.all("svg", "published"), *page.all("svg", "ours")]:
        count, label = len(strip.all("circle")), strip.attributes["aria-label"]
        assert label.startswith(f"{count} cells, changes ") if count > 1 else label == "no cells" and not count


# ---- the page itself -------------------------------------------------------------------------------------------------


def test_the_page_is_complete_in_itself_and_well_formed(study: Study, page: Element) -> None:
    html = (study.folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import|src=\"(?!data:)|<link(?! rel=\"icon\" href=\"data:,\")", html)
    assert len(page.all("h1")) == 1 and page.all("html")[0].attributes["lang"]
    names = re.findall(r'\bid="([^"]+)"', html)
    assert len(names) == len(set(names))
    for pattern in (r'href="#([^"]+)"', r'aria-labelledby="([^"]+)"', r'aria-describedby="([^"]+)"'):
        assert (targets := set(re.findall(pattern, html))) and targets <= set(names)
    for table in page.all("table"):
        assert len(table.all("caption")) == 1 and table.all("caption")[0].text
        assert all(cell.attributes.get("scope") in ("col", "colgroup", "row", "rowgroup") for cell in table.all("th"))
        assert table.all("thead") and table.all("th")
    assert all(image.attributes["alt"] and int(image.attributes["width"]) > 0 for image in page.all("img"))
    body = page.all("main")[0].text
    assert not re.search(r"\\[a-zA-Z]+|\$[^ ]|\{\{|None", body)


def test_the_same_inputs_make_the_same_bytes(study: Study) -> None:
    assert study.page() == study.page()


def test_a_figure_is_embedded_as_it_is(study: Study, page: Element) -> None:
    (image,) = page.all("img")
    kind, _, data = image.attributes["src"].partition(";base64,")
    assert kind == "data:image/png" and base64.b64decode(data) == study.files.figures[0].read_bytes()
    assert "Llama, wiki." in page.all("figcaption")[-1].text


def test_provenance_names_every_file_and_what_its_record_says(study: Study, page: Element) -> None:
    (section,) = [each for each in page.all("section") if each.attributes["aria-labelledby"] == "provenance"]
    rows = {row.all("th")[0].text: [cell.text for cell in row.all("td")] for row in section.all("tr")[1:]}
    files = study.files.recorded()
    assert set(rows) == {str(path) for path in files}
    for path in files:
        assert path and rows[str(path)][0] == hashlib.sha256(path.read_bytes()).hexdigest()
    by_name = {Path(path).name: cells[2:] for path, cells in rows.items()}
    assert by_name["ruler_1b_4k.csv"] == ["", "", "7", "3"] and by_name["ruler_1b_8k.csv"] == [""] * 4
    assert by_name["1b_8k.safetensors"] == ["NVIDIA H200", "1,234", "0", "3"]
    assert by_name["all.jsonl"] == ["cuda", "56", "", "5"]
    assert by_name["measured_runtime_1b.csv"] == ["NVIDIA H200", "7", "0", "1"]
    assert "9.8.7" in section.text and "Linux-x, 12 CPUs" in section.text
    shown = dict(zip([each.text for each in page.all("dt")], [each.text for each in page.all("dd")], strict=True))
    assert shown["device"] == shown["Device"] == "NVIDIA H200" and shown["processes"] == "8"


@pytest.mark.parametrize(
    ("recorded", "named"),
    [
        (["cuda:0", "cuda", "NVIDIA H200"], ["NVIDIA H200"]),
        (["cpu", "CPU, 2 threads", "cuda"], ["CPU, 2 threads", "cuda"]),
        (["cpu", "NVIDIA H200"], ["NVIDIA H200", "cpu"]),
        (["cpu", "cuda:1"], ["cpu", "cuda:1"]),
    ],
)
def test_a_device_that_is_named_in_full_is_told_once(recorded: list[str], named: list[str], tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(len(recorded))]
    for path, device in zip(paths, recorded, strict=True):
        path.write_text("x")
        path.with_name(f"{path.name}.meta.json").write_text(json.dumps({"device": device}))
    found = provenance(paths)
    assert list(found.facts["device"]) == named and [each.device for each in found.sources] == recorded


def test_nothing_is_read_that_is_not_an_input(own: Study) -> None:
    before = own.page()
    (own.folder / "other.csv").write_text("\0")
    (own.folder / "other.csv.meta.json").write_text("\0")
    assert own.page() == before


def test_a_study_of_one_half_has_a_page(own: Study) -> None:
    without = own.with_files(tables=[], comparison=None, picture=None, claims=[], sources=[])
    text = " ".join(Page(without.page()).root.all("main")[0].text.split())
    assert "No table of this study has values that the paper prints as well." in text and "Directions:" not in text
    assert "<img" not in own.with_files(figures=[]).page()


def test_hostile_names_are_text(tmp_path: Path) -> None:
    study = sample_study(tmp_path, title=HOSTILE, model_id=HOSTILE)
    edit_lines(study.files.claims[0], {"primary": "1"}, statement=HOSTILE)
    edit_cells(
        study.table("ruler_sweep"),
        lambda cell: cell.place.method == "topk",
        lambda cell: replace(cell, notes=(f"from {HOSTILE}",)),
    )
    html = study.page()
    page = Page(html).root
    assert len(page.all("script")) == 1 and page.all("title")[0].text.startswith("Study paper")
    assert page.text.count(HOSTILE) >= 6
    (button, *_) = [
        each for each in article(page, "ruler_sweep").all("button") if HOSTILE in each.attributes["aria-label"]
    ]
    assert f"from {HOSTILE}" in button.attributes["data-notes"]
    assert HOSTILE in page.all("img")[0].attributes["alt"]
    assert 'alert("x")' not in html


# ---- deviations ------------------------------------------------------------------------------------------------------


def test_deviations_are_the_rows_of_the_document() -> None:
    found = load_deviations(DEVIATIONS, "mini", [3, 1, 3])
    assert list(found.open_points) == [1, 3]
    what, done, key = found.open_points[1]
    assert "|A|" in what and "<code>benchmarks.&lt;name&gt;.budget_length</code>" in key and done
    assert len(found.of_study) > 15 and {len(row) for row in found.of_study} == {4}
    assert not load_deviations(DEVIATIONS, "paper", []).of_study


def test_an_open_point_without_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no open point 99, which its tables name"):
        load_deviations(DEVIATIONS, "mini", [99])
    with pytest.raises(ValueError, match="no such file"):
        load_deviations(tmp_path / "x.md", "mini", [])


# ---- refusals --------------------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


REFUSALS: dict[str, tuple[Callable[[Study], Study | None], str]] = {
    "table": (lambda s: s.files.tables[0].unlink(), "ruler_sweep.json: no such file; rerun the rule that makes it"),
    "cut figure": (lambda s: damage(s.files.figures[0]), "mass_curves.png: is not what mass_curves.png.meta.json"),
    "cut claims": (lambda s: damage(s.files.claims[0]), "claims_1b.csv: is not what claims_1b.csv.meta.json recorded"),
    "cut source": (lambda s: damage(s.files.sources[0]), "ruler_1b_4k.csv: is not what ruler_1b_4k.csv.meta.json"),
    "cut comparison": (lambda s: damage(s.folder / "comparison.csv"), "is not what comparison.csv.meta.json recorded"),
    "another study": (
        lambda s: Study(s.folder, replace(s.spec, study="mini"), s.files), "is of study 'paper', not of 'mini'"
    ),
    "nothing": (lambda s: s.with_files(tables=[], figures=[]), "study paper: no table and no figure"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSALS)
def test_what_is_missing_or_damaged_is_refused_in_one_line(fault: str, own: Study) -> None:
    spoil, message = REFUSALS[fault]
    changed = spoil(own)
    with pytest.raises(ValueError) as caught:
        (changed if isinstance(changed, Study) else own).page()
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (own.folder / "report.html").exists()


def test_figures_have_a_limit(own: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    size = own.files.figures[0].stat().st_size
    monkeypatch.setattr(report, "LARGEST", size)
    own.page()
    monkeypatch.setattr(report, "LARGEST", size - 1)
    with pytest.raises(ValueError, match="mass_curves.png: the figures up to this one have"):
        own.page()


def test_the_command_line_makes_the_same_page(own: Study, capsys: pytest.CaptureFixture[str]) -> None:
    wanted, out = own.page(), own.folder / "again.html"
    arguments = ["report", "--spec", to_json(own.spec), "--template", str(TEMPLATE), "--out", str(out)]
    for name in ("tables", "figures", "claims", "sources"):
        arguments += [f"--{name}", *map(str, getattr(own.files, name))]
    for name in ("comparison", "picture", "deviations"):
        arguments += [f"--{name}", str(getattr(own.files, name))]
    main(arguments)
    assert out.read_text(encoding="utf-8") == wanted
    own.files.claims[0].unlink()
    with pytest.raises(SystemExit):
        main(arguments)
    assert capsys.readouterr().err == (
        f"residual_mass report: error: {own.files.claims[0]}: no such file; rerun the rule that makes it\n"
    )
    assert json.loads(to_json(own.spec))["study"] == "paper"
