"""What the tables of residuals share: their files, the cells of an error, a distance and a cost, and notes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from residual_mass.metrics import METRICS, RELATIVE_ERROR
from residual_mass.paper.readers.compared_files import Compared, Training, read_compared
from residual_mass.paper.readers.fidelity_file import FidelityRow
from residual_mass.paper.readers.residuals_file import ResidualRow
from residual_mass.paper.table import LEFT_OUT, Cell, Interval, Place, format_score, format_value
from residual_mass.paper.tables import captions
from residual_mass.paper.tables import notes as note
from residual_mass.paper.tables.layouts import Slice
from residual_mass.paper.titles import backbone_title
from residual_mass.study.specs import TableSpec

ERROR, LOG_Z = RELATIVE_ERROR.name, "log_z_error"
IN_FILE = {ERROR: "error", LOG_Z: LOG_Z}
"""Quantities at a budget, by their columns in the files of the stage."""
STATE, SHARE, STEPS, SECONDS = COSTS = ("state_bytes", "state_share", "training_steps", "training_seconds")
FROM_BOTH = ("study", "model_id", "revision", "weights", "phi_sha")
"""Columns that both kinds of files have, and the tables' CSVs repeat."""
OF_ERRORS = (
    "k", "over_topk", "over_topk_ci_low", "over_topk_ci_high", "heads_below_topk", "heads_below_phi", "packs", "heads",
    "rows",
)  # fmt: skip
"""Further columns of the errors that the CSV of the residual estimators repeats."""


def load(spec: TableSpec, results: Iterable[Path], metrics: Collection[str]) -> Compared:
    """The files of a table, with these metrics of the next token.

    Raises:
        ValueError: a file is of another study, or none is of a backbone; names it.
    """
    compared = read_compared(results, metrics)
    for row in (*compared.rows.values(), *compared.forced.values()):
        if row.row["study"] != spec.study:
            study = row.row["study"]
            raise ValueError(f"{row.path}: is of study {study!r}, table {spec.label} of {spec.study!r}; give its own")
    for name in (name for name in spec.backbones if name not in {place.backbone for place in compared.rows}):
        raise ValueError(f"table {spec.label}: no file shows backbone {name}; pass its files to --results")
    return compared


def backbones(spec: TableSpec, compared: Compared) -> list[Slice]:
    """The backbones of a table with their titles."""
    model_ids = {place.backbone: row.row["model_id"] for place, row in compared.rows.items()}
    return [Slice(backbone_title(spec, name, model_ids[name]), {"backbone": name}) for name in spec.backbones]


# ---- cells -----------------------------------------------------------------------------------------------------------


def error_cell(place: Place, quantity: str, row: ResidualRow) -> Cell:
    """An error of `IN_FILE` at a budget."""
    facts, column = row.row, IN_FILE[quantity]
    value, interval = row.value(column), row.interval(column)
    text = format_value(value, RELATIVE_ERROR) if quantity == ERROR else format_score(value or 0)
    return Cell(
        place=replace(place, quantity=quantity, maps=row.maps),
        text=LEFT_OUT if value is None else text,
        value=value,
        interval=interval,
        n=int(facts["packs"]),
        counted="packs",
        model_id=facts["model_id"],
        weights=facts["weights"],
        source=row.path.name,
        notes=tuple(_notes_on_error(row, quantity)),
        row={name: facts[name] for name in (*OF_ERRORS, *FROM_BOTH)} | _bounds(interval) | {"value": facts[column]},
    )


def _bounds(interval: Interval | None) -> dict[str, str]:
    return {} if interval is None else {"ci_low": f"{interval.low:.6g}", "ci_high": f"{interval.high:.6g}"}


def _notes_on_error(row: ResidualRow, quantity: str) -> Iterator[str]:
    facts = row.row
    if interval := row.interval(IN_FILE[quantity]):
        yield note.within(interval, lambda value: format_value(value, RELATIVE_ERROR))
    yield f"{facts['packs']} packs, {facts['rows']} attention rows"
    if quantity == ERROR and facts["heads_below_topk"]:
        yield f"{facts['over_topk']} of TopK's error, below it on {float(facts['heads_below_topk']):.1%} of heads"
    if row.maps:
        yield note.feature_maps(row.maps, facts["phi_sha"])
    yield f"k {facts['k']}"
    yield from note.exactly(facts[IN_FILE[quantity]], row.path.name)


def distance_cell(place: Place, row: FidelityRow | None) -> Cell:
    """A metric of the next token, which the place has as its quantity; left out where there is no row."""
    if row is None:
        return Cell(place, LEFT_OUT)
    facts = row.row
    sizes = f"{facts['documents']} documents, {facts['tokens']} tokens"
    return Cell(
        place=replace(place, maps=row.maps),
        text=format_value(row.value, METRICS[place.quantity]),
        value=row.value,
        interval=row.interval,
        n=int(facts["documents"]),
        counted="documents",
        model_id=facts["model_id"],
        weights=facts["weights"],
        source=row.path.name,
        notes=(sizes, *note.exactly(facts["value"], row.path.name)),
        row={name: facts[name] for name in FROM_BOTH} | _bounds(row.interval) | {"value": facts["value"]},
    )


def cost_cell(place: Place, quantity: str, row: ResidualRow, training: Training | None) -> Cell:
    """What a method keeps, or what its maps took: one of `COSTS`."""
    facts = row.row
    value = (training.seconds if training else None) if quantity == SECONDS else row.value(quantity)
    return Cell(
        place=replace(place, quantity=quantity, maps=row.maps),
        text=_cost_text(quantity, value) if value is not None else LEFT_OUT if row.maps else "none",
        value=value,
        model_id=facts["model_id"],
        weights=facts["weights"],
        source=training.path.name if training and quantity == SECONDS else row.path.name,
        row={column: facts[column] for column in FROM_BOTH} | {"value": "" if value is None else f"{value:.6g}"},
    )


def _cost_text(quantity: str, value: float) -> str:
    if quantity == SHARE:
        return f"{100 * value:.1f}%"
    if quantity == SECONDS:
        return f"{value:,.0f} s" if value < 7200 else f"{value / 3600:.1f} h"
    return f"{value:,.0f}"


# ---- caption ---------------------------------------------------------------------------------------------------------


def opening_notes(study: str, rows: Iterable[ResidualRow]) -> Iterator[str]:
    """Names the study, the backbones and the feature maps."""
    rows = list(rows)
    models = {row.row["model_id"]: row.row["weights"] for row in rows}
    maps = dict.fromkeys(row.maps for row in rows if row.maps)
    yield f"Study {study}, backbone {', '.join(models)}, feature maps {', '.join(maps) or 'none'}."
    yield from captions.random_weights(models.items())
