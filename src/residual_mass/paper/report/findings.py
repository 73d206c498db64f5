"""What a study itself found, which its page opens with: gains of completion over TopK, errors of attention outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from residual_mass.paper.cells import format_score
from residual_mass.paper.readers.accounting_file import METHODS
from residual_mass.paper.report.verdicts import SWEEPS, sweep_texts
from residual_mass.paper.tables import accounting_table
from residual_mass.paper.tables.content import ALPHA
from residual_mass.paper.tables.tally import Tally, tally_by_family
from residual_mass.paper.titles import task_title

Row = Mapping[str, str]


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % interval, as printed; `mark`: on which side of 0 it is by more than chance."""

    text: str
    low: str
    high: str
    mark: Literal["", "above", "below"] = ""


@dataclass(frozen=True)
class GainRow:
    """Gains of a benchmark or task at a length, by budget; `undecided` where full attention itself is at the floor."""

    backbone: str
    task: str
    length: str
    undecided: bool
    gains: tuple[Interval | None, ...]


@dataclass(frozen=True)
class Gains:
    """Of completion over TopK at the same budget, and the count of printed values by family."""

    budgets: tuple[str, ...]
    rows: tuple[GainRow, ...]
    families: dict[str, Tally]

    @property
    def tested(self) -> int:
        return sum(gain is not None for row in self.rows for gain in row.gains)

    def marked(self, mark: str) -> int:
        return sum(gain.mark == mark for row in self.rows for gain in row.gains if gain)


@dataclass(frozen=True)
class ErrorRow:
    """Mean errors of attention outputs on a text, by method, and what completion changes of TopK's, in percent."""

    backbone: str
    corpus: str
    length: str
    k: str
    errors: tuple[Interval, ...]
    change: str


def gains_of(lines: Iterable[Row]) -> Gains:
    """Of the lines of the tables' CSVs; a cell that two tables show counts once."""
    lines = sorted((line for line in lines if line["table"] in SWEEPS), key=lambda line: SWEEPS.index(line["table"]))
    low = {_place(line) for line in lines if line["method"] == "full" and "floor" in line["flags"].split()}
    found: dict[tuple[str, ...], dict[str, Interval]] = {}
    for line in lines:
        if line["method"] == "topk_phi" and line["gain"]:
            found.setdefault(_place(line), {}).setdefault(line["budget_percent"], _gain(line))
    budgets = sorted({budget for gains in found.values() for budget in gains}, key=float)
    rows = tuple(
        GainRow(backbone, task_title(benchmark, task), length, place in low, tuple(map(gains.get, budgets)))
        for place, gains in found.items()
        for backbone, benchmark, task, length in [place]
    )
    return Gains(tuple(budgets), rows, tally_by_family(sweep_texts(lines, "text")) if rows else {})


def errors_of(lines: Iterable[Row]) -> list[ErrorRow]:
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for line in lines:
        if line["table"] == accounting_table.LABEL:
            place = tuple(line[name] for name in ("backbone", "corpus", "length", "k"))
            found.setdefault(place, {})[line["quantity"]] = line
    return [_errors(place, [quantities[name] for name in METHODS]) for place, quantities in found.items()]


def _errors(place: Sequence[str], methods: Sequence[Row]) -> ErrorRow:
    backbone, corpus, length, k = place
    topk, completed = (float(line["value"]) for line in (methods[0], methods[-1]))
    title = accounting_table.CORPUS_TITLES.get(corpus, corpus)
    errors = tuple(
        Interval(line["text"], *(format_score(float(line[end])) for end in ("ci_low", "ci_high"))) for line in methods
    )
    return ErrorRow(backbone, title, length, k, errors, _percent(completed / topk - 1) if topk else "")


def _percent(share: float) -> str:
    return f"{100 * share:+z.0f}".replace("-", "−")


def _gain(line: Row) -> Interval:
    value, low, high = (float(line[name]) for name in ("gain", "gain_ci_low", "gain_ci_high"))
    chance = not line["gain_p_holm"] or float(line["gain_p_holm"]) >= ALPHA or value == 0
    mark: Literal["", "above", "below"] = "" if chance else "above" if value > 0 else "below"
    return Interval(f"{value:+z.3f}", f"{low:+z.3f}", f"{high:+z.3f}", mark)


def _place(line: Row) -> tuple[str, str, str, str]:
    return line["backbone"], line["benchmark"], line["task"], line["length"]
