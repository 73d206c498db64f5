"""The `report` stage: a study on one self-contained HTML page, made of the same cells and pictures as its document."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup, escape

from residual_mass.files import write_text
from residual_mass.metrics import KL
from residual_mass.paper.cells import interval, read_frame
from residual_mass.paper.comparison import NOT_RUN
from residual_mass.paper.document import FRAME, context, warnings
from residual_mass.paper.figures import caption_of
from residual_mass.paper.latex import Field, block, environment, fill, printed
from residual_mass.paper.tables import find, middle_budget
from residual_mass.paper.titles import method_title, text_title
from residual_mass.provenance import Record
from residual_mass.spec.specs import ReportSpec

LETTERS = {
    r"\phi": "φ", r"\ell": "ℓ", r"\Delta": "Δ", r"\dagger": "†", r"\ddagger": "‡", r"\circ": "°", r"\log": "log ",
    r"\hat Z": "Ẑ", r"\mathrm": "", r"\mathcal": "", r"\times": "×", "{+}": "+", "{=}": "=", "-": " − ", "<": " &lt; ",
}  # fmt: skip
"""HTML of the LaTeX in titles and captions."""
MARKS = {"": "", "above": "†", "below": "‡"}
SECTIONS = {
    "Distance from full attention": ("fidelity", "answers", "residuals"),
    "Scores": ("scores", "mismatch", "dphi", "loss"),
    "Attention outputs and costs": ("diagnostics", "maps", "training", "runtime"),
}
"""Kinds of tables (`Table.of`) by section of the page."""


def run(
    spec: ReportSpec, tables: list[Path], figures: list[Path], comparison: Path | None, template: Path, out: Path
) -> None:
    """Writes the page of tables (.csv), figures (.png) and verdicts; captions are templates in the same folder.

    Raises:
        ValueError: a file differs from its record; names it.
    """
    record = Record("report", spec, [*tables, *figures, comparison], sources=[template])
    cells = {path.stem: read_frame(path) for path in tables}
    rows = read_frame(comparison) if comparison else pd.DataFrame(columns=["table", "verdict"], dtype=str)
    verdicts = rows["verdict"].str.split(" by ").str[0].groupby(rows["table"], sort=False)
    pages = environment(template, autoescape=True)
    pages.filters |= {"html": html, "field": field_html, "hover": hover, "between": between}
    pages.filters |= {"method": method_title, "corpus": text_title}
    shown = {
        "spec": spec, "warnings": warnings({each.model_id: each.weights for each in spec.backbones}),
        "pictures": [
            (path.stem, b64encode(path.read_bytes()).decode(), html(caption_of(path.stem, spec.figure_titles)))
            for path in figures
        ],
        "sections": {
            title: [_table(frame, template) for label, frame in cells.items() if find(label).of in kinds]
            for title, kinds in SECTIONS.items()
        },
        "verdicts": {label: group.value_counts().to_dict() for label, group in verdicts if (group != NOT_RUN).any()},
    }  # fmt: skip
    write_text(out, fill(pages, template, lambda page: page.render(shown | opening(spec, cells))))
    record.write(out)


def opening(spec: ReportSpec, cells: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Returns the facts at the top of the page: distance and bytes of the recommended method and top-K at the middle
    budget (None where the study has no such comparison), and the tested differences of their scores.
    """
    budget, names = middle_budget(spec), [spec.recommended, "topk"]
    rows = {label: frame.to_dict("records") for label, frame in cells.items()}

    def both(label: str, quantity: str) -> list[dict[str, str]] | None:
        """Returns the two cells of the first backbone and text at the greatest length."""
        shown = [row for row in rows.get(label, []) if (row["quantity"], row["budget_percent"]) == (quantity, budget)]
        place = [shown[0]["backbone"], shown[0]["corpus"], shown[-1]["length"]] if shown else []
        at = {row["method"]: row for row in shown[::-1] if [row["backbone"], row["corpus"], row["length"]] == place}
        return [at[name] for name in names] if set(names) <= set(at) else None

    scores = [row for label in ("ruler_sweep", "babilong_sweep", "natural_main") for row in rows.get(label, [])]
    tested = [row for row in scores if row["method"] == spec.recommended and row["gain"]]
    gains, marked = [float(row["gain"]) for row in tested], sum(row["mark"] != "" for row in tested)
    distance, reads = both("fidelity", KL.name), both("deployable", "step_share")
    return {"budget": budget, "distance": distance, "reads": reads, "gains": gains, "marked": marked}


def html(text: str) -> Markup:
    """Converts a title or caption: its mathematics becomes letters, subscripts and superscripts."""

    def mathematics(text: str) -> Markup:
        if re.fullmatch(r"-?[0-9.]+", text):
            return Markup(text.replace("-", "−"))
        for latex, letter in LETTERS.items():
            text = text.replace(latex + " ", letter).replace(latex, letter)
        for sign, tag in (("_", "sub"), ("^", "sup")):
            text = re.sub(rf"\{sign}(\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*\}}|.)", rf"<{tag}>\1</{tag}>", text)
        return Markup(f"<i>{text.replace('{', '').replace('}', '')}</i>")

    pieces = re.split(r"\$([^$]*)\$", text)  # every second one is mathematics
    return Markup("").join(mathematics(piece) if odd % 2 else escape(piece) for odd, piece in enumerate(pieces))


def field_html(field: Field) -> Markup:
    text, bold, mark = printed(field)
    return Markup("<b>{}</b>" if bold else "{}").format(html(text)) + Markup("<sup>{}</sup>").format(MARKS[mark])


def hover(field: Field) -> str:
    """Returns the interval, sample size, test and file of the field's values."""
    notes = []
    for cell in (cell for cell in field if cell["value"]):
        notes += [f"95% interval {between(cell)}" if cell["ci_low"] else f"value {cell['value']}"]
        notes += [f"{cell['n']} {cell['counted']}"] if cell["n"] and cell["counted"] else []
        if cell["gain_p_holm"]:
            notes += [f"difference to Top-K {float(cell['gain']):+.3g}, p {float(cell['gain_p_holm']):.3g} (Holm)"]
        notes += [cell["flags"]] * bool(cell["flags"]) + [cell["source"]]
    return " · ".join(dict.fromkeys(notes))


def between(cell: Mapping[str, str]) -> str:
    return " to ".join(interval(cell))


def _table(cells: pd.DataFrame, template: Path) -> dict[str, Any]:
    shown = context(cells) | {"warnings": []}  # the top of the page has them
    name = "runtime" if shown["table"].startswith("runtime_") else shown["table"]
    places = (template.with_name(f"{name}.tex.j2"), "caption"), (template.with_name(FRAME), "notes")
    return shown | {"caption": html(" ".join(block(*place, shown) for place in places)), "label": shown["table"]}
