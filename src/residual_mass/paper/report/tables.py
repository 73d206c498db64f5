"""Tables of a study for its page: the cells that LaTeX prints, each with the line of the CSV beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from residual_mass.files import finite_field, read_csv
from residual_mass.paper.cells import LEFT_OUT
from residual_mass.paper.comparison.by_cell import AGREES, DIFFERS
from residual_mass.paper.report.latex_html import plain, to_html
from residual_mass.paper.report.notes import NUMBERS, PLACE, notes_on
from residual_mass.paper.report.printed_table import Grid, PrintedCell, load_printed
from residual_mass.paper.report.printed_table import Row as PrintedRow
from residual_mass.paper.tables import runtime_table, training_cost_table
from residual_mass.paper.tables.table_file import SCORE, TABLES, load_table

REMEDY = "delete both and run the table stage again"

Row = dict[str, str]
Value = tuple[Row, ...]
"""Lines of a CSV that one cell prints, a slash between them."""
Record = tuple[Value, ...]
"""Values that stand in one row."""


@dataclass(frozen=True)
class Published:
    """What the paper prints in the place of a cell, and the comparison's verdict on each value of it."""

    text: str
    verdicts: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def words(self) -> str:
        reasons = "; ".join(filter(None, dict.fromkeys(self.reasons)))
        return " / ".join(self.verdicts) + (f" ({reasons})" if reasons else "")

    @property
    def kind(self) -> str:
        """`differs` where one value does, `agrees` where those do that can be compared, `open` where none can."""
        if any(verdict.startswith(DIFFERS) for verdict in self.verdicts):
            return DIFFERS
        return AGREES if AGREES in self.verdicts else "open"


@dataclass(frozen=True)
class PageCell:
    """A cell as HTML.

    Attributes:
        scope: of a head cell; None for one with a value, and for one that neither heads nor holds anything.
        leads: whether it stands in a column before the values.
        notes: what stands behind a value.
    """

    html: Markup
    columns: int
    rows: int
    scope: str | None
    leads: bool = False
    notes: tuple[str, ...] = ()
    published: Published | None = None


Rows = tuple[tuple[PageCell, ...], ...]


@dataclass(frozen=True)
class PageGrid:
    head: Rows
    blocks: tuple[Rows, ...]


@dataclass(frozen=True)
class PageTable:
    """One table of a study; `lines` are those of its CSV."""

    label: str
    caption: Markup
    grids: tuple[PageGrid, ...]
    lines: tuple[Row, ...]

    @property
    def compared(self) -> bool:
        """Whether there are published values beside its own."""
        return any(cell.published for grid in self.grids for block in grid.blocks for row in block for cell in row)


def load_page_table(tex: Path, cells: Path, study: str, compared: Mapping[tuple[str, ...], Row]) -> PageTable:
    """A table from its LaTeX, which says where everything stands, and its CSV, which says what is behind every value.

    Args:
        compared: rows of the comparison by PLACE.

    Raises:
        ValueError: a file is missing, damaged or of another study, or the two are not of one table; names the file.
    """
    printed = load_printed(tex)
    lines = _load_lines(cells, study)
    reader = _Reader(_records(lines), compared)
    try:
        grids = tuple(reader.grid(grid) for grid in printed.grids)
        caption = to_html(printed.caption)
    except ValueError as error:
        raise ValueError(f"{tex}: {error}") from None
    if reader.records:
        text = _text(reader.records[0][0])
        raise ValueError(f"{cells}: {text!r} is not where it should be in {tex}; {REMEDY}")
    return PageTable(lines[0]["table"], caption, grids, tuple(lines))


def place_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """PLACE of a line of a table's or of the comparison's CSV; only score tables have no column for the quantity."""
    return tuple(row.get(name, SCORE if name == "quantity" else "") for name in PLACE)


def _load_lines(path: Path, study: str) -> list[Row]:
    lines = read_csv(path, ["table", "text", "bold"], "table")
    if not lines:
        raise ValueError(f"{path}: has no cells; {REMEDY}")
    if lines[0]["table"] in TABLES or runtime_table.is_label(lines[0]["table"]):
        load_table(path, study)  # refuses what is damaged
    for number, line in enumerate(lines, start=2):
        if line.get("study", "") not in ("", study):  # cells that a study leaves out have none
            raise ValueError(f"{path}:{number}: is of study {line['study']!r}, not of {study!r}; {REMEDY}")
        for name in NUMBERS:
            if line.get(name):
                finite_field(line, name, f"{path}:{number}", REMEDY)
    return lines


def _records(lines: Sequence[Row]) -> list[Record]:
    """What tables print of their CSVs, in reading order: most of them one line after the other."""
    label = lines[0]["table"]
    if runtime_table.is_label(label):
        cut = runtime_table.QUANTITIES.index(runtime_table.TRAFFIC)
        measured = _chunks(lines, len(runtime_table.QUANTITIES))
        latencies, traffic = [each[:cut] for each in measured], [each[cut:] for each in measured]
        return [(value,) for value in (*latencies, *traffic)]
    if label == training_cost_table.LABEL:
        trained = _chunks(lines, len(training_cost_table.QUANTITIES))
        return [tuple((line,) for line in each) for each in trained]
    return [((line,),) for line in lines]


def _chunks(lines: Sequence[Row], size: int) -> list[Value]:
    return [tuple(lines[start : start + size]) for start in range(0, len(lines), size)]


@dataclass
class _Reader:
    """Goes through printed cells and CSV lines side by side; `records` are those that are still to come."""

    records: list[Record]
    compared: Mapping[tuple[str, ...], Row]

    def grid(self, grid: Grid) -> PageGrid:
        blocks = [[(row, self._find(row)) for row in block] for block in grid.blocks]
        first = min((column for block in blocks for _, values in block for column in values), default=0)
        body = (tuple(self._body_row(row, values, first) for row, values in block) for block in blocks)
        head = (tuple(_head_cell(cell, first) for cell in row) for row in grid.head)
        return PageGrid(tuple(head), tuple(body))

    def _find(self, row: PrintedRow) -> dict[int, Value]:
        """Values of a row by their column; a record that is not there as a whole is left for a later row."""
        found: dict[int, Value] = {}
        cells = iter(row)
        while self.records:
            record = self.records[0]
            places = [next((cell.column for cell in cells if _prints(cell, value)), None) for value in record]
            if None in places:
                break
            found |= zip(places, record, strict=True)
            self.records.pop(0)
        return found

    def _body_row(self, row: PrintedRow, values: Mapping[int, Value], first: int) -> tuple[PageCell, ...]:
        """`first` is the first column with values; what stands before it is the head of the row."""
        cells = []
        for cell in row:
            if cell.column in values:
                cells.append(self._valued(cell, values[cell.column]))
            else:
                scope = "rowgroup" if cell.rows > 1 or len(row) == 1 else "row" if cell.column < first else None
                cells.append(_cell(cell, scope))
        return tuple(cells)

    def _valued(self, cell: PrintedCell, value: Value) -> PageCell:
        if (value[0]["bold"] == "1") != (r"\textbf{" in cell.latex):
            raise ValueError(f"{_text(value)!r} is bold here or in its CSV, but not in both; {REMEDY}")
        if _text(value) == LEFT_OUT.text:
            return _cell(cell, None)
        published = _published(value, self.compared)
        notes = dict.fromkeys(note for line in value for note in notes_on(line, len(value) > 1))
        told = [f"the paper prints {published.text}: {published.words}"] if published else []
        html = to_html(cell.latex)
        return PageCell(html, cell.columns, cell.rows, None, notes=(*told, *notes), published=published)


def _head_cell(cell: PrintedCell, first: int) -> PageCell:
    return replace(_cell(cell, "colgroup" if cell.columns > 1 else "col"), leads=cell.column < first)


def _cell(cell: PrintedCell, scope: str | None) -> PageCell:
    html = Markup("–") if cell.latex == LEFT_OUT.text else to_html(cell.latex)
    return PageCell(html, cell.columns, cell.rows, scope if cell.latex else None)


def _text(value: Value) -> str:
    return " / ".join(line["text"] for line in value)


def _prints(cell: PrintedCell, value: Value) -> bool:
    """Whether the cell shows the value, or the value and then what it counts: `300 steps on ...`."""
    shown = plain(cell.latex)
    counted = value[0].get("quantity", "").replace("_", " ")
    return shown == _text(value) or bool(counted) and shown.startswith(f"{_text(value)} {counted}")


def _published(value: Value, compared: Mapping[tuple[str, ...], Row]) -> Published | None:
    """The paper's values, where the study has the very same cells."""
    facts = [compared.get(place_of(line)) for line in value]
    there = [(line, fact) for line, fact in zip(value, facts, strict=True) if fact and fact["ours"]]
    if not there:
        return None
    for line, fact in there:
        if fact["ours"] != line["text"] and line.get("quantity") != training_cost_table.WALL_CLOCK:
            raise ValueError(
                f"the comparison has {fact['ours']!r} where {line['text']!r} is printed; "
                "delete it and run the comparison stage again"
            )
    text = " / ".join(_with_unit(fact) for _, fact in there)
    verdicts, reasons = (tuple(fact[name] for _, fact in there) for name in ("verdict", "reason"))
    return Published(text, verdicts, reasons)


def _with_unit(fact: Row) -> str:
    """Times of training stand in hours in the comparison, and in the table with the unit that fits them."""
    return f"{fact['published']} h" if fact["quantity"] == training_cost_table.WALL_CLOCK else fact["published"]
