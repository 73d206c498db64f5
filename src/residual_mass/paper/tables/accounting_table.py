"""The table of accounting errors: what TopK, its completion and the double counting of retrieved tokens do to attention
outputs, corpus by corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from residual_mass.core.settings import tokens_of
from residual_mass.metrics import RELATIVE_ERROR
from residual_mass.paper import published
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.readers.accounting_file import LOG_Z, METHODS, AccountingRow, load_accounting
from residual_mass.paper.table import LEFT_OUT, Block, Cell, Entry, Grid, Place, Row, Table, best_printed, format_score
from residual_mass.paper.tables import notes as note
from residual_mass.paper.tables.captions import OF_THE_PAPER, header_of_published, header_of_study, model_warnings
from residual_mass.paper.titles import METHOD_TITLES, backbone_title, corpus_title
from residual_mass.study.labels import ACCOUNTING_TABLE as LABEL
from residual_mass.study.specs import TableSpec

QUANTITIES = (*METHODS, "e_exact_nosub", LOG_Z)
"""What a row prints, from left to right."""
OF_THE_REST = ("e_sub", LOG_Z)
"""Quantities that rest on what the subtraction leaves, and so on how often it leaves nothing."""
COLUMNS = tuple(
    "table backbone corpus length k budget_percent maps quantity text bold value ci_low ci_high clamped_share source "
    "study model_id revision weights phi_sha packs rows".split()
)
FROM_ROW = ("k", "study", "revision", "phi_sha", "packs", "rows")
PUBLISHED_QUANTITIES = {
    "topk": "e_topk", "topk_phi_nosub": "e_nosub", "topk_phi": "e_sub", "exact_nosub": "e_exact_nosub",
    "mean_log_z_error": LOG_Z,
}  # fmt: skip


@dataclass(frozen=True)
class _Line:
    """One printed row: a corpus at a length, and a cell for each of QUANTITIES."""

    corpus: str
    length: str
    k: str
    cells: tuple[Cell, ...]


def make(spec: TableSpec, results: list[Path]) -> Table:
    """The table from one accounting file per backbone, at the one budget of the spec: of its lengths, or of all in a
    file where it names none.

    Raises:
        ValueError: a backbone's file or a row is missing, or a file is of another study; names it.
    """
    if len(spec.budgets) != 1:
        raise ValueError(f"table {LABEL}: budgets has {len(spec.budgets)} values, but the table shows one; give one")
    files = [_shown(rows, spec) for rows in _by_backbone(spec, results)]
    blocks = [(_title(spec, rows[0]), [_measured_line(row) for row in rows]) for rows in files]
    return _table(spec.study, spec.budgets[0], blocks, header=_header(spec, files), notes=_notes(spec, files))


def make_published(_: str) -> Table:
    """The table with the paper's values; bold is decided here, as for results."""
    facts = published.rows_of(LABEL)
    backbone, budget, maps = facts[0]["backbone"], float(facts[0]["budget_percent"]), facts[0]["trained_length"]
    lines = []
    for corpus, length, k in dict.fromkeys((fact["corpus"], fact["length"], fact["k"]) for fact in facts):
        found = [fact for fact in facts if (fact["corpus"], fact["length"]) == (corpus, length)]
        texts = {PUBLISHED_QUANTITIES[fact["quantity"]]: fact["value"] for fact in found}
        cells = (
            Cell(Place(backbone, length, corpus=corpus, budget_percent=budget, maps=maps, quantity=name), texts[name],
                 bold=name in _best(texts))
            for name in QUANTITIES
        )  # fmt: skip
        lines.append(_Line(corpus, length, k, tuple(cells)))
    model = published.model_title(backbone)
    notes = [OF_THE_PAPER, f"Backbone {model}, feature maps {maps}."]
    return _table("published", budget, [(model, lines)], [header_of_published(LABEL)], notes)


def _table(
    study: str,
    budget: float,
    blocks: Sequence[tuple[str, Sequence[_Line]]],
    header: Iterable[str],
    notes: Iterable[str],
) -> Table:
    """Blocks have titles where there are several."""
    titles = [METHOD_TITLES[method] for method in METHODS.values()]
    shown = [Block(tuple(map(_row, lines)), title if len(blocks) > 1 else "") for title, lines in blocks]
    grid = Grid(
        heads=("Corpus", "Length", Marked("$K$")),
        columns=(*titles, "ExactNoSub", Marked("Log-$Z$ error")),
        blocks=tuple(shown),
    )
    return Table(
        label=LABEL,
        study=study,
        grids=(grid,),
        columns=COLUMNS,
        header=tuple(header),
        notes=tuple(notes),
        facts={"budget": f"{budget:g}%"},
    )


def _row(line: _Line) -> Row:
    return Row((corpus_title(line.corpus), line.length, line.k), tuple(map(_entry, line.cells)))


def _entry(cell: Cell) -> Entry:
    """A log-Z error has a sign, which is a minus in mathematics alone."""
    signed = cell.place.quantity == LOG_Z and cell.text != LEFT_OUT
    return Entry(Marked(f"${cell.text}$") if signed else cell.text, (cell,))


def _by_backbone(spec: TableSpec, results: Iterable[Path]) -> list[list[AccountingRow]]:
    """The rows of the table's backbones, in its order."""
    loaded: dict[str, list[AccountingRow]] = {}
    for path in results:
        rows = load_accounting(path)
        backbone, study = rows[0].row["backbone"], rows[0].row["study"]
        if study != spec.study:
            raise ValueError(f"{path}: is of study {study!r}, table {LABEL} of {spec.study!r}; give its own")
        if backbone in loaded:
            raise ValueError(f"{path}: a second file of backbone {backbone}; give one")
        loaded[backbone] = rows
    for backbone in spec.backbones:
        if backbone not in loaded:
            raise ValueError(f"table {LABEL}: no file is of backbone {backbone}; pass its file to --results")
    return [loaded[backbone] for backbone in spec.backbones]


def _shown(rows: Sequence[AccountingRow], spec: TableSpec) -> list[AccountingRow]:
    """The rows that the table shows: length by length, corpora in the file's order."""
    (budget,) = spec.budgets
    by_place = {row.place: row for row in rows}
    lengths = spec.lengths or sorted({length for _, length, _ in by_place}, key=tokens_of)
    corpora = dict.fromkeys(corpus for corpus, _, _ in by_place)
    places = [(corpus, length, budget) for length in lengths for corpus in corpora]
    for corpus, length, _ in (place for place in places if place not in by_place):
        raise ValueError(f"{rows[0].path}: no row for {corpus} {length} at {budget:g}%; capture it, or leave it out")
    return [by_place[place] for place in places]


def _best(texts: dict[str, str]) -> set[str]:
    """The methods with the lowest printed error; an oracle is no competitor."""
    return best_printed({name: texts[name] for name in METHODS}, RELATIVE_ERROR)


def _measured_line(row: AccountingRow) -> _Line:
    values = {name: row.value(name) for name in QUANTITIES}
    texts = {name: LEFT_OUT if value is None else format_score(value) for name, value in values.items()}
    cells = (_cell(row, name, texts[name], name in _best(texts)) for name in QUANTITIES)
    return _Line(row.row["corpus"], row.row["length"], row.row["k"], tuple(cells))


def _cell(row: AccountingRow, quantity: str, text: str, bold: bool) -> Cell:
    facts, interval = row.row, row.interval(quantity)
    bounds = {side: facts[f"{quantity}_{side}"] for side in ("ci_low", "ci_high")} if interval else {}
    copied = FROM_ROW + ("clamped_share",) * (quantity in OF_THE_REST)
    return Cell(
        place=Place(
            backbone=facts["backbone"],
            length=facts["length"],
            corpus=facts["corpus"],
            budget_percent=row.budget,
            maps=facts["maps"],
            quantity=quantity,
        ),
        text=text,
        value=row.value(quantity),
        interval=interval,
        n=int(facts["packs"]),
        counted="packs",
        bold=bold,
        model_id=facts["model_id"],
        weights=facts["weights"],
        source=row.path.name,
        notes=tuple(_notes_on(row, quantity)),
        row={name: facts[name] for name in copied} | bounds | {"value": facts[quantity]},
    )


def _notes_on(row: AccountingRow, quantity: str) -> Iterator[str]:
    facts = row.row
    if interval := row.interval(quantity):
        yield note.within(interval)
    yield f"{facts['packs']} packs, {facts['rows']} attention rows"
    yield note.feature_maps(facts["maps"], facts["phi_sha"])
    yield f"k {facts['k']}"
    if quantity in OF_THE_REST:
        yield f"share of rows whose residual was dropped {facts['clamped_share']}"
    yield from note.exactly(facts[quantity], row.path.name)


def _title(spec: TableSpec, row: AccountingRow) -> str:
    return backbone_title(spec, row.row["backbone"], row.row["model_id"])


def _header(spec: TableSpec, files: Iterable[Sequence[AccountingRow]]) -> Iterator[str]:
    yield header_of_study(spec)
    for rows in files:
        facts = rows[0].row
        maps = ", ".join(dict.fromkeys(f"{row.row['maps']} {row.row['phi_sha'][:12]}" for row in rows))
        sizes = "; ".join(f"{row.row['corpus']} {row.row['length']}: {_size(row)}" for row in rows)
        yield (
            f"{rows[0].path.name}: {facts['model_id']} at {facts['revision']}, {facts['weights']} weights, "
            f"phi maps {maps}, {sizes}"
        )


def _notes(spec: TableSpec, files: Sequence[Sequence[AccountingRow]]) -> Iterator[str]:
    rows = [row for file in files for row in file]
    models = [(file[0].row["model_id"], file[0].row["weights"]) for file in files]
    maps = dict.fromkeys(row.row["maps"] for row in rows)
    yield f"Study {spec.study}, backbone {', '.join(dict(models))}, feature maps {', '.join(maps)}."
    yield from model_warnings(models)
    yield f"Behind a value: {'; '.join(_sizes(rows))}."
    yield _uncertainty(rows)
    worst = max(float(row.row["e_exact_sub"]) for row in rows)
    yield Marked(
        "With the true residual in place of its estimate, each token counted once, what remains is rounding: the "
        f"largest mean error of a row of this table is ${_power_of_ten(worst)}$."
    )
    yield from _dropped(rows)


def _sizes(rows: Sequence[AccountingRow]) -> Iterator[str]:
    """Once for all rows of the table, or once per size with the rows that have it."""
    holders: dict[str, list[str]] = {}
    for row in rows:
        holders.setdefault(_size(row), []).append(_row_name(row, rows))
    for size, names in holders.items():
        yield size if len(names) == len(rows) else f"{size} ({', '.join(names)})"


def _row_name(row: AccountingRow, rows: Sequence[AccountingRow]) -> str:
    """A row of the table in words, with its backbone where there are several."""
    several = len({each.row["backbone"] for each in rows}) > 1
    backbone = f"{row.row['backbone']} " if several else ""
    return f"{backbone}{corpus_title(row.row['corpus'])} {row.row['length']}"


def _size(row: AccountingRow) -> str:
    return f"{row.row['rows']} attention rows of {row.row['heads']} heads in {row.row['packs']} packs"


def _uncertainty(rows: Sequence[AccountingRow]) -> Marked:
    errors = max(width for name in METHODS for width in _half_widths(rows, name))
    text = f"Largest half-width of a 95% bootstrap interval over heads and packs: {errors:.3f} of an error"
    logs = _half_widths(rows, LOG_Z)
    return Marked(f"{text}, {max(logs):.3f} of a log-$Z$ error." if logs else f"{text}.")


def _half_widths(rows: Sequence[AccountingRow], quantity: str) -> list[float]:
    return [(interval.high - interval.low) / 2 for row in rows if (interval := row.interval(quantity))]


def _dropped(rows: Sequence[AccountingRow]) -> Iterator[str]:
    """Names the rows without a residual estimate."""
    counts = {_row_name(row, rows): row.dropped for row in rows}
    if sum(counts.values()):
        named = "; ".join(f"{name} {count}" for name, count in counts.items() if count)
        yield Marked(
            "Where the subtraction leaves nothing but rounding the estimate is dropped, and the row does not count in "
            f"the log-$Z$ error: {sum(counts.values())} rows ({marked(named)})."
        )
    if any(row.value(LOG_Z) is None for row in rows):
        yield "A dash stands where no row has a residual."


def _power_of_ten(value: float) -> str:
    mantissa, exponent = f"{value:.0e}".split("e")
    return rf"{mantissa}\times10^{{{int(exponent)}}}" if value else "0"
