"""The `report` stage: a study on one self-contained HTML page, made of the same cells and pictures as its document."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from residual_mass.files import write_text
from residual_mass.metrics import KL
from residual_mass.paper.cells import read_frame
from residual_mass.paper.document import context, warnings_of
from residual_mass.paper.figures import caption_of
from residual_mass.paper.latex import block, fill
from residual_mass.paper.tables import find
from residual_mass.paper.titles import corpus_title, method_title
from residual_mass.provenance import Record
from residual_mass.study.specs import ReportSpec

LETTERS = {
    r"\phi": "φ", r"\ell": "ℓ", r"\Delta": "Δ", r"\dagger": "†", r"\ddagger": "‡", r"\circ": "°", r"\log": "log ",
    r"\hat": "", r"\mathrm": "", r"\mathcal": "", r"\times": "×", "{+}": "+", "{=}": "=", "-": "−", "<": "&lt;",
}  # fmt: skip
"""What of the mathematics in titles and captions HTML says otherwise."""
MARKS = {"": "", "above": "†", "below": "‡"}
SECTIONS = {"fidelity": "Distance from full attention", "scores": "Scores", "costs": "Attention outputs and costs"}
SECTION_OF = {"fidelity": "fidelity", "answers": "fidelity", "residuals": "fidelity", "scores": "scores",
              "mismatch": "scores", "dphi": "scores", "loss": "scores"}  # fmt: skip
"""By what a table is of; others are costs."""


def run(
    spec: ReportSpec,
    tables: Sequence[Path],
    figures: Sequence[Path],
    comparison: Path | None,
    template: Path,
    out: Path,
) -> None:
    """Writes the page of tables (.csv), figures (.png) and verdicts; templates of captions are beside the page's.

    Raises:
        ValueError: there is neither a table nor a figure, or a file differs from its record; names it.
    """
    if not tables and not figures:
        raise ValueError(f"study {spec.study}: no table and no figure; give one")
    record = Record("report", spec, [*tables, *figures, comparison], sources=[template])
    cells = {path.stem: read_frame(path) for path in tables}
    pictures = [(path.stem, _picture(path), html(caption_of(path.stem, spec.figure_titles))) for path in figures]
    shown: dict[str, list[dict[str, Any]]] = {name: [] for name in SECTIONS}
    for label, of in cells.items():
        shown[SECTION_OF.get(find(label).of, "costs")].append(_table(of, template))
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
        autoescape=True, loader=jinja2.FileSystemLoader(template.parent),
    )  # fmt: skip
    environment.filters |= {"html": html, "field": field, "hover": hover}
    shown_on_page = {
        "spec": spec, "warnings": list(warnings_of(spec.backbones)), "findings": list(findings(spec, cells)),
        "first": [each for each in pictures if each[0] == "fidelity"],
        "figures": [each for each in pictures if each[0] != "fidelity"],
        "sections": [(title, shown[name]) for name, title in SECTIONS.items() if shown[name]],
        "verdicts": _verdicts(comparison) if comparison else [],
    }  # fmt: skip
    write_text(out, fill(environment, template, lambda found: found.render(shown_on_page)))
    record.write(out)


def findings(spec: ReportSpec, cells: dict[str, pd.DataFrame]) -> Iterator[str]:
    """A sentence each on distance, scores and bytes, of the study's last method beside top-K at its middle budget."""
    budget = f"{sorted(spec.budgets)[(len(spec.budgets) - 1) // 2]:g}"
    title, topk = method_title(spec.recommended), method_title("topk")
    if "fidelity" in cells:
        of = cells["fidelity"].query(f"quantity == '{KL.name}' and budget_percent == @budget")
        of = of[(of["backbone"] == of["backbone"].iloc[0]) & (of["corpus"] == of["corpus"].iloc[0])]
        of = of[of["length"] == of["length"].iloc[-1]].drop_duplicates("method").set_index("method")
        if {spec.recommended, "topk"} <= set(of.index):
            own, other = of.loc[spec.recommended], of.loc["topk"]
            yield (
                f"With {budget}% of the prefix read exactly, the next token is {own['text']} nats (KL) from full "
                f"attention under {title} (95% interval {_between(own)}) and {other['text']} ({_between(other)}) under "
                f"{topk}: {corpus_title(own['corpus'])}, {own['length']}, {own['n']} documents."
            )
    sweeps = [cells[label] for label in ("ruler_sweep", "babilong_sweep", "natural_main") if label in cells]
    tested = pd.concat(sweeps).query("method == @spec.recommended and gain_p_holm != ''") if sweeps else pd.DataFrame()
    if len(tested):
        gains, marked = tested["gain"].astype(float), (tested["mark"] != "").sum()
        yield (
            f"Scores of answers: {title} is above {topk} at the same budget in {(gains > 0).sum()} of {len(tested)} "
            f"cells and below in {(gains < 0).sum()}; {marked or 'none'} of these differences remains after "
            "Holm's correction."
        )
    for label in ("deployable",) if "deployable" in cells else ():
        of = cells[label].query("quantity == 'step_share' and budget_percent == @budget")
        reads = of.drop_duplicates("method").set_index("method")["text"]
        where = f"{corpus_title(of['corpus'].iloc[0])}, {of['length'].iloc[0]}" if len(of) else ""
        if {spec.recommended, "topk"} <= set(reads.index):
            yield (
                f"A decode step of {title} at {budget}% reads {reads[spec.recommended]} of full attention's bytes, "
                f"with its selector and summary; {topk}, which scores every key, reads {reads['topk']} ({where})."
            )


def html(text: str) -> Markup:
    """Titles and captions: the little mathematics that they have as letters, subscripts and superscripts."""

    def mathematics(match: re.Match[str]) -> str:
        found = match[1]
        if re.fullmatch(r"-?[0-9.]+", found):
            return found.replace("-", "−")
        for latex, letter in LETTERS.items():
            found = found.replace(latex + " ", letter).replace(latex, letter)
        for sign, tag in (("_", "sub"), ("^", "sup")):
            found = re.sub(rf"\{sign}(\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*\}}|.)", rf"<{tag}>\1</{tag}>", found)
        return f"<i>{found.replace('{', '').replace('}', '')}</i>"

    pieces = re.split(r"(\$[^$]*\$)", text)
    return Markup("").join(
        Markup(re.sub(r"\$(.*)\$", mathematics, piece, flags=re.DOTALL)) if piece[:1] == "$" else escape(piece)
        for piece in pieces
    )


def field(shown: dict[str, Any]) -> Markup:
    """A field of a table, in bold and marked as its one cell is."""
    text = html(shown["text"])
    text = Markup("<b>{}</b>").format(text) if shown["bold"] else text
    return text + Markup("<sup>{}</sup>").format(MARKS[shown["mark"]])


def hover(shown: dict[str, Any]) -> str:
    """Interval, sample size, test and file of the field's values."""
    notes = []
    for cell in (cell for cell in shown["cells"] if cell["value"]):
        notes += [f"95% interval {_between(cell)}"] if cell["ci_low"] else [f"value {cell['value']}"]
        notes += [f"{cell['n']} {cell['counted']}"] if cell["n"] and cell["counted"] else []
        if cell["gain_p_holm"]:
            notes += [f"difference to Top-K {float(cell['gain']):+.3g}, p {float(cell['gain_p_holm']):.3g} (Holm)"]
        notes += [cell["flags"]] * bool(cell["flags"]) + [cell["source"]]
    return " · ".join(dict.fromkeys(notes))


def _between(cell: Any) -> str:
    decimals = len(cell["text"].partition(".")[2])
    return f"{float(cell['ci_low']):z.{decimals}f} to {float(cell['ci_high']):z.{decimals}f}"


def _table(cells: pd.DataFrame, template: Path) -> dict[str, Any]:
    of = context(cells)
    label = "runtime" if of["table"].startswith("runtime_") else of["table"]
    caption = block(template.with_name(f"{label}.tex.j2"), "caption", of)
    return of | {"caption": html(" ".join([caption, *of["notes"]])), "label": of["table"]}


def _picture(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _verdicts(path: Path) -> list[tuple[str, dict[str, int]]]:
    """How many published values of a table have which verdict."""
    rows = read_frame(path)
    kinds = rows["verdict"].str.replace(r" by .*", "", regex=True)
    return [(label, counts.value_counts().to_dict()) for label, counts in kinds.groupby(rows["table"], sort=False)]
