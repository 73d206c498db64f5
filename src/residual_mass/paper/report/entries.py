"""Entries of tables on the page: values as HTML, notes on them, and the paper's values in the same place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from residual_mass.paper.comparison.by_cell import AGREES, DIFFERS
from residual_mass.paper.marked import to_html
from residual_mass.paper.report.verdicts import Compared
from residual_mass.paper.table import LEFT_OUT, Entry, Place, Table
from residual_mass.paper.tables.training_cost_table import WALL_CLOCK

MARKS = {"": "", "above": "†", "below": "‡"}


@dataclass(frozen=True)
class Published:
    """The paper's values in the place of an entry, with the comparison's verdict on each."""

    values: tuple[Compared, ...]

    @property
    def text(self) -> str:
        return " / ".join(map(_with_unit, self.values))

    @property
    def note(self) -> str:
        verdicts = " / ".join(value.verdict for value in self.values)
        reasons = "; ".join(dict.fromkeys(value.reason for value in self.values if value.reason))
        return f"the paper prints {self.text}: {verdicts}" + (f" ({reasons})" if reasons else "")

    @property
    def kind(self) -> str:
        """`differs` if one value does, `agrees` if all comparable ones do, `open` if none is comparable."""
        kinds = {value.kind for value in self.values}
        return DIFFERS if DIFFERS in kinds else AGREES if AGREES in kinds else "open"


@dataclass(frozen=True)
class PageTable:
    """A table with the paper's values in its places."""

    table: Table
    compared: Mapping[Place, Compared]

    @property
    def caption(self) -> Markup:
        return Markup(" ").join(map(to_html, (self.table.caption, *self.table.notes)))

    @property
    def is_compared(self) -> bool:
        """Whether the paper has values in its places."""
        return any(cell.place in self.compared for cell in self.table.evaluated)

    def html(self, entry: Entry) -> Markup:
        if entry.text == LEFT_OUT:
            return Markup("–")
        html = to_html(entry.text)
        if len(entry.cells) != 1:
            return html
        (cell,) = entry.cells
        html = Markup("<strong>{}</strong>").format(html) if cell.bold else html
        return html + Markup("<sup>{}</sup>").format(MARKS[cell.mark]) if cell.mark else html

    def notes(self, entry: Entry) -> list[str]:
        """Returns notes on an entry's values; empty without values."""
        if all(cell.value is None for cell in entry.cells):
            return []
        published = self.published(entry)
        notes = [note for cell in entry.cells for note in cell.notes]
        return list(dict.fromkeys([published.note, *notes] if published else notes))

    def published(self, entry: Entry) -> Published | None:
        """Returns the paper's values of the same cells, if any."""
        found = (self.compared.get(cell.place) for cell in entry.cells)
        values = tuple(value for value in found if value is not None)
        return Published(values) if values else None


def _with_unit(value: Compared) -> str:
    """Adds the unit of training times, which the comparison has in hours and the table in a fitting unit."""
    return f"{value.published} h" if value.place.quantity == WALL_CLOCK else value.published
