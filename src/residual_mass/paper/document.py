"""LaTeX of a study: its tables, the numbers in them as macros, and a document with all tables and figures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from residual_mass.files import write_text
from residual_mass.paper import published
from residual_mass.paper.digits import DASH, decimals, interval
from residual_mass.paper.figures import caption_of
from residual_mass.paper.frames import cells_csv, field_texts, read_frame
from residual_mass.paper.latex import Cell, Latex, escape, grids, render
from residual_mass.paper.published import MODELS
from residual_mass.paper.results import load_results
from residual_mass.paper.tables import find
from residual_mass.paper.tables.layout import budget_title
from residual_mass.provenance import Record
from residual_mass.spec.labels import PUBLISHED
from residual_mass.spec.specs import DocumentSpec, NumbersSpec, TableSpec

FRAME = "frame.tex.j2"
"""The template that all templates of tables extend."""
COUNTED_UNITS = ("examples", "documents", "packs")
"""Units of the sample sizes that the numbers for prose include."""
SMALLEST_P = 0.001
"""Smaller p-values are printed as below it, because the resamples are too few for more digits."""


# ---- tables ----------------------------------------------------------------------------------------------------------


def run(spec: TableSpec, results: list[Path], template: Path, out: Path, cells: Path) -> None:
    """The `table` stage: writes table `spec.label` as LaTeX to `out`, and a CSV with one line per cell to `cells`.

    Raises:
        ValueError: the label is unknown, a cell of the study is missing, or a file differs from its record; names it.
    """
    record = Record("table", spec, results, sources=[template, template.with_name(FRAME)])
    table = find(spec.label)
    frame = table.cells(load_results(results), spec)
    write_text(out, latex(frame, template))
    write_text(cells, cells_csv(frame, table.digits))
    for path in (out, cells):
        record.write(path)


def run_published(label: str, template: Path, out: Path) -> None:
    """Writes table `label` with the paper's values. Raises ValueError when the paper has no such table."""
    rows, spec = published.results(label)
    cells = find(label).cells(rows, spec)
    write_text(out, latex(cells, template))


def latex(cells: pd.DataFrame, template: Path) -> str:
    """Renders a table by its template. Raises ValueError as `render` does."""
    variables = table_context(cells)
    return render(template, **variables, warnings=warnings(variables["models"]))


def table_context(cells: pd.DataFrame) -> dict[str, Any]:
    """Returns the variables of a table's template: the cells in grids, and what captions say of all cells."""
    values = cells[cells["value"].notna()]
    return _layout_facts(cells) | _origin_facts(values) | _count_facts(values)


def _layout_facts(cells: pd.DataFrame) -> dict[str, Any]:
    """Returns the cells as they are printed, and what the titles and fields of all of them contain."""
    label = cells["table"].iloc[0]
    titles = cells["row"] + cells["column"]
    is_addition = titles.str.contains("{*}", regex=False)
    is_dash = cells["text"] == DASH
    facts = {"table": label, "label": Latex(f"tab:{label}"), "heads": find(label).heads}
    facts |= {"grids": grids(cells), "grouped": cells["group"].any()}
    facts |= {"additions": is_addition.any(), "dashes": is_dash.any()}
    return facts


def _origin_facts(values: pd.DataFrame) -> dict[str, Any]:
    """Returns what the values were measured on, and by which study, of cells that have a value."""
    studies = _distinct(values["study"])
    backbones = _distinct(values["model_id"]) or _distinct(values["backbone"])
    names = [MODELS.get(name, name).split("/")[-1] for name in backbones]
    budgets = values["budget_percent"].dropna().unique() if "budget_percent" in values else ()
    lengths = _distinct(values["length"]) if "length" in values else []
    devices = _distinct(values["device"]) if "device" in values else []
    models = dict(zip(values["model_id"], values["weights"], strict=True))
    kinds: set[str] = set()
    for data in _distinct(values["data"]):
        kinds.update(data.split("+"))
    facts = {"study": studies[0], "published": PUBLISHED in studies, "sources": _distinct(values["source"])}
    facts |= {"models": models, "backbone": ", ".join(names), "devices": devices, "kinds": kinds}
    facts |= {"budget": ", ".join(map(budget_title, budgets)), "lengths": ", ".join(lengths)}
    return facts


def _count_facts(values: pd.DataFrame) -> dict[str, Any]:
    """Returns sample sizes, and how many of the cells with a value were tested, marked or flagged."""
    is_tested = values["gain_p_holm"].notna()
    is_above = values["mark"] == "above"
    is_below = values["mark"] == "below"
    at_floor = values["flags"].str.contains("floor")
    beats_full = values["flags"].str.contains("beats_full")
    facts = {"values": len(values), "sizes": _sample_sizes(values), "tested": is_tested.sum()}
    facts |= {"above": is_above.sum(), "below": is_below.sum()}
    facts |= {"floor": at_floor.sum(), "alarms": beats_full.sum()}
    return facts


def _distinct(texts: pd.Series) -> list[str]:
    """Returns the texts that are not empty, each once, in their order."""
    return [text for text in dict.fromkeys(texts) if text]


def _sample_sizes(values: pd.DataFrame) -> list[tuple[str, tuple[int, int]]]:
    """Returns the least and the greatest sample size by its unit."""
    counted = values[values["n"].notna()]
    by_unit = counted.groupby("counted", sort=False)["n"]
    return [(unit, (sizes.min(), sizes.max())) for unit, sizes in by_unit]


def warnings(models: dict[str, str]) -> list[str]:
    """Returns what a reader must know of models before the values. `models` maps ids to kinds of weights."""
    sentences = []
    random = ", ".join(model for model, weights in models.items() if weights == "random")
    if random:
        sentences.append(f"Random weights ({random}): such values exercise the code and say nothing of a method.")
    others = ", ".join(model for model in models if model not in MODELS.values())
    if others:
        sentences.append(f"The paper does not evaluate {others}; the values are not comparable with the paper's.")
    return sentences


# ---- numbers ---------------------------------------------------------------------------------------------------------


def run_numbers(spec: NumbersSpec, tables: Sequence[Path], template: Path, out: Path) -> None:
    """The `numbers` stage: writes macros that look up the values of tables' cells, each by its key.

    Raises:
        ValueError: a file differs from its record; names it.
    """
    record = Record("numbers", spec, tables, sources=[template])
    keyed: list[tuple[str, Cell]] = []
    for path in tables:
        keyed += keyed_cells(read_frame(path))
    entries = []
    for key, cell in keyed:
        entries += [(kind, Latex(key), text) for kind, text in _macros(cell)]
    tested = [key for key, cell in keyed if pd.notna(cell["gain_p_holm"])]
    every = [key for key, _ in keyed]
    example = Latex([*tested, *every][0])
    write_text(out, render(template, study=spec.study, example=example, entries=entries))
    record.write(out)


def keyed_cells(cells: pd.DataFrame) -> list[tuple[str, Cell]]:
    """Returns every cell with a value, and its key: the non-empty fields before `text`, joined by slashes. TeX can look
    keys up, because names only have letters, digits and . _ + -. Quantities of a measurement are next to each other.
    """
    number_of_names = cells.columns.get_loc("text")
    names = list(cells.columns[:number_of_names])
    place = [name for name in names if name != "quantity"]
    measurement = cells.groupby(place, sort=False, dropna=False).ngroup()
    cells = cells.iloc[measurement.argsort(kind="stable")]
    cells = cells[cells["value"].notna()]
    fields = field_texts(cells[names], "g").itertuples(index=False)
    keys = ["/".join(filter(None, texts)) for texts in fields]
    return list(zip(keys, cells.to_dict("records"), strict=True))


def _macros(cell: Cell) -> Iterator[tuple[str, Latex]]:
    """Yields the facts about a cell: the name of a macro, and the text that it prints."""
    text = cell["text"]
    signed = re.fullmatch(r"[+-][0-9.]+", text)  # a hyphen is no minus
    yield "value", Latex(f"${text}$") if signed else escape(text)
    if pd.notna(cell["ci_low"]):
        yield "interval", _interval(cell, "ci")
    if cell["counted"] in COUNTED_UNITS and pd.notna(cell["n"]):
        yield "count", Latex(cell["n"])
    p = cell["gain_p_holm"]
    if pd.notna(p):
        gain = format(cell["gain"], f"+z.{decimals(text)}f")
        yield "gain", Latex(f"${gain}$")
        if pd.notna(cell["gain_ci_low"]):
            yield "gaininterval", _interval(cell, "gain_ci")
        yield "gainp", Latex(rf"$p < {SMALLEST_P}$" if p < SMALLEST_P else f"$p = {p:.3f}$")


def _interval(cell: Cell, name: str) -> Latex:
    lower, upper = interval(cell, f"{name}_low", f"{name}_high")
    return Latex(f"$[{lower}, {upper}]$")


# ---- document --------------------------------------------------------------------------------------------------------


def run_document(
    spec: DocumentSpec, tables: Sequence[Path], figures: Sequence[Path], numbers: Path | None, template: Path, out: Path
) -> None:
    """Writes a document that shows the tables (.tex), then the figures (.pdf), each in the order given.

    Args:
        numbers: macros of the tables' numbers (.tex), for text that is added to a copy; None if there are none.

    Raises:
        ValueError: a file differs from its record; names it.
    """
    record = Record("document", spec, [*tables, *figures, numbers], sources=[template])

    def place(path: Path) -> Latex:
        """Returns the path relative to the document, where LaTeX runs. Its checked names need no escapes."""
        return Latex(os.path.relpath(path, out.parent))

    def entry(path: Path, kind: str, caption: str = "") -> dict[str, str]:
        """Returns name, path, label and caption of a table or figure; tables contain their captions."""
        label = Latex(f"{kind}:{path.stem}")
        return {"name": path.stem, "path": place(path), "label": label, "caption": caption}

    of_figures = [entry(path, "fig", caption_of(path.stem, spec.figure_titles)) for path in figures]
    models = {backbone.model_id: backbone.weights for backbone in spec.backbones}
    text = render(
        template,
        study=spec.study,
        backbones=spec.backbones,
        tables=[entry(path, "tab") for path in tables],
        figures=of_figures,
        numbers=place(numbers) if numbers else None,
        warnings=warnings(models),
    )
    write_text(out, text)
    record.write(out)
