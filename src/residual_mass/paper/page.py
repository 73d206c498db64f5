"""The `report` stage: a study on one self-contained HTML page, made of the same cells and pictures as its document."""

from __future__ import annotations

import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup, escape

from residual_mass.files import write_text
from residual_mass.metrics import KL, budget_text
from residual_mass.paper.comparison import NOT_RUN
from residual_mass.paper.digits import interval
from residual_mass.paper.document import FRAME, table_context, warnings
from residual_mass.paper.figures import caption_of
from residual_mass.paper.frames import number_text, read_frame, value_digits
from residual_mass.paper.headline import headline
from residual_mass.paper.latex import Cell, Field, block, environment, fill, printed_field
from residual_mass.paper.tables import find, middle_budget
from residual_mass.paper.titles import method_title, text_title
from residual_mass.provenance import Record
from residual_mass.spec.specs import ReportSpec

LATEX_LETTERS = {
    r"\phi": "φ", r"\ell": "ℓ", r"\Delta": "Δ", r"\dagger": "†", r"\ddagger": "‡", r"\circ": "°", r"\log": "log ",
    r"\hat Z": "Ẑ", r"\mathrm": "", r"\mathcal": "", r"\times": "×", "{+}": "+", "{=}": "=", "-": " − ", "<": " &lt; ",
}  # fmt: skip
"""HTML of the LaTeX in titles and captions."""
SCRIPTS = (("_", "sub"), ("^", "sup"))
"""Signs of LaTeX before a subscript or superscript, each with its HTML tag."""
BRACES = r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
"""Matches what braces enclose, which may contain further braces."""
HTML_MARKS = {"": "", "above": "†", "below": "‡"}
SECTIONS = {
    "Distance from full attention": ("fidelity", "answers", "residuals"),
    "Scores": ("scores", "mismatch", "dphi", "loss"),
    "Attention outputs and costs": ("diagnostics", "maps", "training", "runtime"),
}
"""Kinds of tables (`Table.of`) by section of the page."""
SCORE_TABLES = ("ruler_sweep", "babilong_sweep", "natural_main")
"""Tables whose scores the top of the page counts."""


def run(
    spec: ReportSpec, tables: list[Path], figures: list[Path], comparison: Path | None, template: Path, out: Path
) -> None:
    """Writes the page of tables (.csv), figures (.png) and verdicts; captions are templates in the same folder.

    Raises:
        ValueError: a file differs from its record; names it.
    """
    record = Record("report", spec, [*tables, *figures, comparison], sources=[template])
    cells = {path.stem: read_frame(path) for path in tables}
    pages = environment(template, autoescape=True)
    pages.filters |= {"html": html, "field": field_html, "hover": hover, "brackets": in_brackets}
    pages.filters |= {"method": method_title, "corpus": text_title}
    models = {backbone.model_id: backbone.weights for backbone in spec.backbones}
    variables = {
        "spec": spec,
        "warnings": warnings(models),
        "pictures": [_picture(path, spec) for path in figures],
        "sections": _sections(cells, template),
        "verdicts": _verdict_counts(comparison) if comparison else {},
    }
    variables |= opening(spec, cells)
    write_text(out, fill(pages, template, lambda page: page.render(variables)))
    record.write(out)


def _picture(path: Path, spec: ReportSpec) -> tuple[str, str, Markup]:
    """Returns the name of a figure, its PNG in Base64, and its caption."""
    picture = b64encode(path.read_bytes()).decode()
    caption = caption_of(path.stem, spec.figure_titles)
    return path.stem, picture, html(caption)


def _sections(cells: dict[str, pd.DataFrame], template: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the variables of the tables of each section."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for title, kinds in SECTIONS.items():
        of_section = [frame for label, frame in cells.items() if find(label).of in kinds]
        sections[title] = [_with_caption(frame, template) for frame in of_section]
    return sections


def _with_caption(cells: pd.DataFrame, template: Path) -> dict[str, Any]:
    variables = table_context(cells) | {"warnings": []}  # the top of the page has them
    label = variables["table"]
    name = "runtime" if label.startswith("runtime_") else label
    caption = block(template.with_name(f"{name}.tex.j2"), "caption", variables)
    notes = block(template.with_name(FRAME), "notes", variables)
    return variables | {"caption": html(f"{caption} {notes}"), "label": label}


def _verdict_counts(comparison: Path) -> dict[str, dict[str, int]]:
    """Returns how many values of a table have each verdict, for tables that were run."""
    rows = read_frame(comparison)
    words = rows["verdict"].str.split(" by ").str[0]
    verdicts = words.groupby(rows["table"], sort=False)
    counts = {}
    for label, of_table in verdicts:
        if (of_table != NOT_RUN).any():
            counts[label] = of_table.value_counts().to_dict()
    return counts


def opening(spec: ReportSpec, cells: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Returns the facts at the top of the page: distance and bytes of the recommended method and top-K at the middle
    budget (None where the study has no such comparison), and the tested differences of their scores.
    """
    budget = middle_budget(spec)

    def both(label: str, quantity: str) -> list[Cell] | None:
        found = headline(cells[label], quantity, budget) if label in cells else {}
        names = (spec.recommended, "topk")
        return [found[name] for name in names] if set(names) <= set(found) else None

    gains: list[float] = []
    marked = 0
    for label in SCORE_TABLES:
        if label in cells:
            scores = cells[label]
            ours = scores[scores["method"] == spec.recommended]
            tested = ours[ours["gain"].notna()]
            gains += tested["gain"].tolist()
            marked += int((tested["mark"] != "").sum())
    return {
        "budget": budget_text(budget),
        "distance": both("fidelity", KL.name),
        "reads": both("deployable", "step_share"),
        "gains": gains,
        "marked": marked,
    }


# ---- HTML ------------------------------------------------------------------------------------------------------------


def html(text: str) -> Markup:
    """Converts a title or caption: its mathematics becomes letters, subscripts and superscripts."""
    pieces = []
    for number, piece in enumerate(re.split(r"\$([^$]*)\$", text)):
        is_mathematics = number % 2 == 1
        pieces.append(_mathematics(piece) if is_mathematics else escape(piece))
    return Markup("").join(pieces)


def _mathematics(text: str) -> Markup:
    if re.fullmatch(r"-?[0-9.]+", text):
        return Markup(text.replace("-", "−"))
    for latex, letter in LATEX_LETTERS.items():
        text = text.replace(latex + " ", letter).replace(latex, letter)
    for sign, tag in SCRIPTS:
        text = re.sub(rf"\{sign}({BRACES}|.)", rf"<{tag}>\1</{tag}>", text)
    text = text.replace("{", "").replace("}", "")
    return Markup(f"<i>{text}</i>")


def field_html(field: Field) -> Markup:
    text, bold, mark = printed_field(field)
    shown = html(text)
    if bold:
        shown = Markup("<b>{}</b>").format(shown)
    return shown + Markup("<sup>{}</sup>").format(HTML_MARKS[mark])


def hover(field: Field) -> str:
    """Returns the interval, sample size, test and file of the field's values."""
    notes: list[str] = []
    for cell in field:
        if pd.notna(cell["value"]):
            notes += _notes_on(cell)
    return " · ".join(dict.fromkeys(notes))


def _notes_on(cell: Cell) -> list[str]:
    if pd.notna(cell["ci_low"]):
        notes = [f"95% interval {between(cell)}"]
    else:
        digits = value_digits(cell.get("quantity", ""), find(cell["table"]).digits)
        notes = [f"value {number_text(cell['value'], digits)}"]
    if pd.notna(cell["n"]) and cell["counted"]:
        notes.append(f"{cell['n']} {cell['counted']}")
    if pd.notna(cell["gain_p_holm"]):
        notes.append(f"difference to Top-K {cell['gain']:+.3g}, p {cell['gain_p_holm']:.3g} (Holm)")
    if cell["flags"]:
        notes.append(cell["flags"])
    return [*notes, cell["source"]]


def between(cell: Cell) -> str:
    return " to ".join(interval(cell))


def in_brackets(cell: Cell, words: str = "") -> str:
    """Returns a space and the interval in brackets, after these words; empty where it is unknown, as for a single
    document.
    """
    return "" if pd.isna(cell["ci_low"]) else f" ({words}{between(cell)})"
