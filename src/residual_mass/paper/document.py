"""LaTeX of a study: its tables, the numbers in them as macros, and a document with all tables and figures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from residual_mass.files import csv_text, write_text
from residual_mass.paper import published
from residual_mass.paper.cells import LEFT_OUT, decimals, interval, load, read_frame
from residual_mass.paper.figures import caption_of
from residual_mass.paper.latex import Latex, escape, grids, render
from residual_mass.paper.published import MODELS
from residual_mass.paper.tables import find
from residual_mass.provenance import Record
from residual_mass.spec.labels import PUBLISHED
from residual_mass.spec.specs import DocumentSpec, NumbersSpec, TableSpec

FRAME = "frame.tex.j2"
"""The template that all templates of tables extend."""
COUNTED = ("examples", "documents", "packs")
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
    frame = find(spec.label).cells(load(results), spec)
    write_text(out, latex(frame, template))
    write_text(cells, csv_text(list(frame), frame.to_dict("records")))
    for path in (out, cells):
        record.write(path)


def run_published(label: str, template: Path, out: Path) -> None:
    """Writes table `label` with the paper's values. Raises ValueError when the paper has no such table."""
    rows, spec = published.results(label)
    write_text(out, latex(find(label).cells(rows, spec), template))


def latex(cells: pd.DataFrame, template: Path) -> str:
    """Renders a table by its template. Raises ValueError as `render` does."""
    shown = context(cells)
    return render(template, **shown, warnings=warnings(shown["models"]))


def context(cells: pd.DataFrame) -> dict[str, Any]:
    """Returns the variables of a table's template: the cells in grids, and what captions say of all cells."""
    label, values = cells["table"].iloc[0], cells[cells["value"] != ""]
    facts = {name: list(dict.fromkeys(filter(None, values[name]))) for name in values}
    models = dict(zip(values["model_id"], values["weights"], strict=True))
    sizes = values[values["n"] != ""].groupby("counted", sort=False)["n"]
    return {
        "table": label, "label": Latex(f"tab:{label}"), "heads": find(label).heads, "grids": grids(cells),
        "grouped": cells["group"].any(), "study": facts["study"][0], "published": PUBLISHED in facts["study"],
        "sources": facts["source"], "models": models,
        "budget": ", ".join(f"{budget}%" for budget in facts.get("budget_percent", ())),
        "lengths": ", ".join(facts.get("length", ())),
        "backbone": ", ".join(MODELS.get(name, name).split("/")[-1] for name in facts["model_id"] or facts["backbone"]),
        "kinds": {kind for data in facts["data"] for kind in data.split("+")},
        "sizes": [(counted, (n.astype(int).min(), n.astype(int).max())) for counted, n in sizes],
        "tested": (values["gain_p_holm"] != "").sum(), "values": len(values),
        "above": (values["mark"] == "above").sum(), "below": (values["mark"] == "below").sum(),
        "floor": values["flags"].str.contains("floor").sum(),
        "alarms": values["flags"].str.contains("beats_full").sum(),
        "additions": (cells["row"] + cells["column"]).str.contains("{*}", regex=False).any(),
        "devices": facts.get("device", []), "dashes": (cells["text"] == LEFT_OUT).any(),
    }  # fmt: skip


def warnings(models: dict[str, str]) -> list[str]:
    """Returns what a reader must know of models before the values. `models` maps ids to kinds of weights."""
    sentences = []
    if random := ", ".join(model for model, weights in models.items() if weights == "random"):
        sentences.append(f"Random weights ({random}): such values exercise the code and say nothing of a method.")
    if others := ", ".join(model for model in models if model not in MODELS.values()):
        sentences.append(f"The paper does not evaluate {others}; the values are not comparable with the paper's.")
    return sentences


# ---- numbers ---------------------------------------------------------------------------------------------------------


def run_numbers(spec: NumbersSpec, tables: Sequence[Path], template: Path, out: Path) -> None:
    """The `numbers` stage: writes macros that look up the values of tables' cells, each by its key.

    Raises:
        ValueError: a file differs from its record; names it.
    """
    record = Record("numbers", spec, tables, sources=[template])
    keyed = [pair for path in tables for pair in keyed_cells(read_frame(path))]
    entries = [(kind, Latex(key), text) for key, cell in keyed for kind, text in _facts(cell)]
    example = next((key for key, cell in keyed if cell["gain_p_holm"]), keyed[0][0])
    write_text(out, render(template, study=spec.study, example=Latex(example), entries=entries))
    record.write(out)


def keyed_cells(cells: pd.DataFrame) -> list[tuple[str, dict[str, str]]]:
    """Returns every cell with a value, and its key: the non-empty fields before `text`, joined by slashes. TeX can look
    keys up, because names only have letters, digits and . _ + -. Quantities of a measurement are next to each other.
    """
    names = list(cells.columns[: cells.columns.get_loc("text")])
    measurement = cells.groupby([name for name in names if name != "quantity"], sort=False).ngroup()
    cells = cells.iloc[measurement.argsort(kind="stable")]
    cells = cells[cells["value"] != ""]
    keys = ["/".join(filter(None, fields)) for fields in cells[names].itertuples(index=False)]
    return list(zip(keys, cells.to_dict("records"), strict=True))


def _facts(cell: dict[str, str]) -> Iterator[tuple[str, Latex]]:
    """Yields the facts about a cell: the name of a macro, and the text that it prints."""
    text, p = cell["text"], cell["gain_p_holm"]
    signed = re.fullmatch(r"[+-][0-9.]+", text)  # a hyphen is no minus
    yield "value", Latex(f"${text}$") if signed else escape(text)
    if cell["ci_low"]:
        yield "interval", _interval(cell, "ci")
    if cell["counted"] in COUNTED and cell["n"]:
        yield "count", Latex(cell["n"])
    if p:
        yield "gain", Latex(f"${float(cell['gain']):+z.{decimals(text)}f}$")
        if cell["gain_ci_low"]:
            yield "gaininterval", _interval(cell, "gain_ci")
        yield "gainp", Latex(rf"$p < {SMALLEST_P}$" if float(p) < SMALLEST_P else f"$p = {float(p):.3f}$")


def _interval(cell: dict[str, str], name: str) -> Latex:
    return Latex("$[{}, {}]$".format(*interval(cell, f"{name}_low", f"{name}_high")))


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

    def shown(path: Path, kind: str, caption: str = "") -> dict[str, str]:
        """Returns name, path, label and caption of a table or figure; tables contain their captions."""
        return {"name": path.stem, "path": place(path), "label": Latex(f"{kind}:{path.stem}"), "caption": caption}

    parts = {
        "tables": [shown(path, "tab") for path in tables],
        "figures": [shown(path, "fig", caption_of(path.stem, spec.figure_titles)) for path in figures],
        "numbers": place(numbers) if numbers else None,
        "warnings": warnings({backbone.model_id: backbone.weights for backbone in spec.backbones}),
    }
    write_text(out, render(template, study=spec.study, backbones=spec.backbones, **parts))
    record.write(out)
