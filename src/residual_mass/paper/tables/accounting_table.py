"""The table of accounting errors: what TopK, its completion and the double counting of retrieved tokens do to attention
outputs, corpus by corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

from residual_mass.core.settings import tokens_of
from residual_mass.files import csv_text, write_text
from residual_mass.paper import published
from residual_mass.paper.cells import LEFT_OUT, Cell, format_score
from residual_mass.paper.latex import Latex, escape, render
from residual_mass.paper.readers.accounting_file import (
    INTERVALS,
    LOG_Z,
    METHODS,
    REMEDY,
    Accounting,
    Row,
    load_accounting,
    name_of,
)
from residual_mass.paper.tables.captions import OF_THE_PAPER, header_of_published, header_of_study, model_warnings
from residual_mass.paper.titles import METHOD_TITLES, backbone_title
from residual_mass.study.specs import TableSpec

LABEL = "exact_accounting"
QUANTITIES = (*METHODS, "e_exact_nosub", LOG_Z)
"""What a row prints, from left to right."""
OF_THE_REST = ("e_sub", LOG_Z)
"""Those that rest on what the subtraction leaves, and so on how often it leaves nothing."""
CELL_COLUMNS = (
    "table backbone corpus length k budget_percent maps quantity text bold value ci_low ci_high clamped_share source "
    "study model_id revision weights phi_sha packs rows"
).split()
CORPUS_TITLES = {"wiki": "Wikipedia", "wikitext": "WikiText", "cwe": "CWE"}
PUBLISHED_QUANTITIES = {
    "topk": "e_topk", "topk_phi_nosub": "e_nosub", "topk_phi": "e_sub", "exact_nosub": "e_exact_nosub",
    "mean_log_z_error": LOG_Z,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One printed row: a corpus at a length, and a cell for each of QUANTITIES."""

    corpus: str
    length: str
    k: str
    cells: dict[str, Cell]

    @property
    def printed(self) -> tuple[Cell, ...]:
        """The cells as LaTeX: log-Z errors have a sign, which is a minus in mathematics alone."""
        log_z = self.cells[LOG_Z]
        signed = log_z if log_z == LEFT_OUT else Cell(Latex(f"${log_z.text}$"))
        return tuple(signed if name == LOG_Z else self.cells[name] for name in QUANTITIES)


def run(spec: TableSpec, results: list[Path], template: Path, out: Path, cells: Path) -> None:
    """Writes the table from one accounting file per backbone, and to `cells` one CSV line per printed value with its
    interval and what it comes from.

    Shown are the lengths of the spec, or all of a file where the spec names none, at the one budget of the spec.

    Raises:
        ValueError: a backbone's file or a row is missing, or a file is damaged or of another study; names file and
            line.
    """
    if len(spec.budgets) != 1:
        raise ValueError(f"table {LABEL}: budgets has {len(spec.budgets)} values, but the table shows one; give one")
    files = [_shown(file, spec) for file in _by_backbone(spec, results)]
    table = _render(
        template,
        budget=spec.budgets[0],
        header=_header(spec, files),
        notes=_notes(spec, files),
        blocks=[(_title(spec, file), [_measured_line(row) for row in file.rows.values()]) for file in files],
    )
    write_text(cells, csv_text(CELL_COLUMNS, (cell for file in files for cell in _cell_lines(file))))
    write_text(out, table)


def render_published(template: Path) -> str:
    """The table with the paper's values; bold is decided here, as for results."""
    facts = published.rows_of(LABEL)
    places: dict[tuple[str, str], Row] = {}
    texts: dict[tuple[str, str], dict[str, str]] = {}
    for fact in facts:
        place = fact["corpus"], fact["length"]
        places.setdefault(place, fact)
        texts.setdefault(place, {})[PUBLISHED_QUANTITIES[fact["quantity"]]] = fact["value"]
    model = published.model_title(facts[0]["backbone"])
    return _render(
        template,
        budget=float(facts[0]["budget_percent"]),
        header=[header_of_published(LABEL)],
        notes=[
            OF_THE_PAPER,
            f"Backbone {model}, feature maps {facts[0]['trained_length']}.",
        ],
        blocks=[(model, [_line(row, texts[place]) for place, row in places.items()])],
    )


def _by_backbone(spec: TableSpec, results: Iterable[Path]) -> list[Accounting]:
    """The files of the table's backbones, in its order."""
    loaded: dict[str, Accounting] = {}
    for path in results:
        file = load_accounting(path)
        if file.facts["study"] != spec.study:
            raise ValueError(
                f"{path}: is of study {file.facts['study']!r}, table {LABEL} is of {spec.study!r}; {REMEDY}"
            )
        if (backbone := file.facts["backbone"]) in loaded:
            raise ValueError(f"{path}: a second file for {backbone}, beside {loaded[backbone].path}; give one")
        loaded[backbone] = file
    for backbone in spec.backbones:
        if backbone not in loaded:
            given = ", ".join(file.path.name for file in loaded.values())
            raise ValueError(f"table {LABEL}: backbone {backbone} is in none of {given}; pass its file to --results")
    return [loaded[backbone] for backbone in spec.backbones]


def _shown(file: Accounting, spec: TableSpec) -> Accounting:
    """The rows that the table shows: length by length, corpora in the file's order."""
    (budget,) = spec.budgets
    lengths = spec.lengths or sorted({length for _, length, _ in file.rows}, key=tokens_of)
    corpora = dict.fromkeys(corpus for corpus, _, _ in file.rows)
    rows = {}
    for place in [(corpus, length, budget) for length in lengths for corpus in corpora]:
        if place not in file.rows:
            raise ValueError(f"{file.path}: no row for {name_of(place)}; {REMEDY}")
        rows[place] = file.rows[place]
    return replace(file, rows=rows)


def _measured_line(row: Row) -> Line:
    return _line(row, {name: format_score(float(row[name])) if row[name] else LEFT_OUT.text for name in QUANTITIES})


def _line(row: Mapping[str, str], texts: Mapping[str, str]) -> Line:
    """Bold are the lowest printed errors of the methods, all of them where several are as low; an oracle is no
    competitor.
    """
    lowest = min(Decimal(texts[name]) for name in METHODS)
    cells = {name: Cell(texts[name], name in METHODS and Decimal(texts[name]) == lowest) for name in QUANTITIES}
    return Line(_corpus_title(row), row["length"], row["k"], cells)


def _corpus_title(row: Mapping[str, str]) -> str:
    return CORPUS_TITLES.get(row["corpus"], row["corpus"])


def _title(spec: TableSpec, file: Accounting) -> str:
    return backbone_title(spec, file.facts["backbone"], file.facts["model_id"])


def _render(
    template: Path, budget: float, header: Iterable[str], notes: Iterable[str], blocks: list[tuple[str, list[Line]]]
) -> str:
    return render(
        template,
        header=list(header),
        notes=list(notes),
        budget=f"{budget:g}%",
        columns=[METHOD_TITLES[method] for method in METHODS.values()],
        blocks=blocks,
    )


def _header(spec: TableSpec, files: Iterable[Accounting]) -> Iterator[str]:
    yield header_of_study(spec)
    for file in files:
        rows = file.rows.values()
        maps = ", ".join(dict.fromkeys(f"{row['maps']} {row['phi_sha'][:12]}" for row in rows))
        sizes = "; ".join(f"{row['corpus']} {row['length']}: {_size(row)}" for row in rows)
        yield (
            f"{file.path.name}: {file.facts['model_id']} at {file.facts['revision']}, {file.facts['weights']} weights, "
            f"phi maps {maps}, {sizes}"
        )


def _notes(spec: TableSpec, files: Sequence[Accounting]) -> Iterator[str]:
    rows = [row for file in files for row in file.rows.values()]
    models = [(file.facts["model_id"], file.facts["weights"]) for file in files]
    maps = dict.fromkeys(row["maps"] for row in rows)
    yield f"Study {spec.study}, backbone {', '.join(dict(models))}, feature maps {', '.join(maps)}."
    yield from model_warnings(models)
    yield f"Behind a value: {'; '.join(_sizes(rows))}."
    yield from _uncertainty(rows)
    worst = max(float(row["e_exact_sub"]) for row in rows)
    yield Latex(
        "With the true residual in place of its estimate, each token counted once, what remains is rounding: the "
        f"largest mean error of a row of this table is ${_power_of_ten(worst)}$."
    )
    yield from _dropped(rows)


def _sizes(rows: Sequence[Row]) -> Iterator[str]:
    """Once for all rows of the table, or once per size with the rows that have it."""
    holders: dict[str, list[str]] = {}
    for row in rows:
        holders.setdefault(_size(row), []).append(_row_name(row, rows))
    for size, of in holders.items():
        yield size if len(of) == len(rows) else f"{size} ({', '.join(of)})"


def _row_name(row: Row, rows: Sequence[Row]) -> str:
    """A row of the table in words, with its backbone where there are several."""
    backbone = f"{row['backbone']} " if len({each["backbone"] for each in rows}) > 1 else ""
    return f"{backbone}{_corpus_title(row)} {row['length']}"


def _size(row: Row) -> str:
    return f"{row['rows']} attention rows of {row['heads']} heads in {row['packs']} packs"


def _uncertainty(rows: Sequence[Row]) -> Iterator[str]:
    errors = max(_half_width(row, name) for row in rows for name in METHODS)
    text = f"Largest half-width of a 95% bootstrap interval over heads and packs: {errors:.3f} of an error"
    if logs := [_half_width(row, LOG_Z) for row in rows if row[LOG_Z]]:
        yield Latex(f"{escape(text)}, {max(logs):.3f} of a log-$Z$ error.")
    else:
        yield f"{text}."


def _half_width(row: Row, name: str) -> float:
    return (float(row[f"{name}_ci_high"]) - float(row[f"{name}_ci_low"])) / 2


def _dropped(rows: Sequence[Row]) -> Iterator[str]:
    """Owns up to rows without a residual estimate."""
    counts = {_row_name(row, rows): round(float(row["clamped_share"]) * int(row["rows"])) for row in rows}
    if sum(counts.values()):
        named = "; ".join(f"{name} {count}" for name, count in counts.items() if count)
        yield Latex(
            "Where the subtraction leaves nothing but rounding the estimate is dropped, and the row does not count in "
            rf"the log-$Z$ error: {sum(counts.values())} rows ({escape(named)})."
        )
    if not all(row[LOG_Z] for row in rows):
        yield "A dash stands where no row has a residual."


def _power_of_ten(value: float) -> str:
    mantissa, exponent = f"{value:.0e}".split("e")
    return rf"{mantissa}\times10^{{{int(exponent)}}}" if value else "0"


def _cell_lines(file: Accounting) -> Iterator[Row]:
    for row in file.rows.values():
        origin = {column: row[column] for column in CELL_COLUMNS if column in row and column != "clamped_share"}
        origin |= {"table": LABEL, "budget_percent": f"{float(row['budget_percent']):g}", "source": file.path.name}
        for name, cell in _measured_line(row).cells.items():
            interval = {side: row[f"{name}_{side}"] for side in ("ci_low", "ci_high")} if name in INTERVALS else {}
            text = {"text": cell.text, "bold": str(int(cell.bold)), "value": row[name]}
            clamped = {"clamped_share": row["clamped_share"]} if name in OF_THE_REST else {}
            yield origin | {"quantity": name} | text | interval | clamped
