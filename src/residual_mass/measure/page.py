"""The answer as files: a CSV, a picture, and a page for a browser that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from residual_mass import __version__
from residual_mass.files import csv_text, replacing, write_text
from residual_mass.measure import answer
from residual_mass.measure.distances import Measured
from residual_mass.metrics import KL, SAME_TOP
from residual_mass.paper.figures.style import (
    GREY,
    Look,
    finish,
    label_outer,
    looks_of,
    make_x_logarithmic,
    panel_axes,
    paper_style,
    plain,
    tick_logarithmic,
)
from residual_mass.paper.marked import to_html
from residual_mass.paper.templating import fill
from residual_mass.paper.titles import corpus_title, method_title, model_name

TEMPLATE = Path(__file__).with_name("page.html.j2")
COLUMNS = (
    "model_id revision text length method budget_percent step_share recall metric value ci_low ci_high same_top "
    "documents tokens meets_target recommended"
).split()
WIDTH = 6.5
"""Of the picture, in inches."""


def write(measured: Measured, folder: Path) -> list[Path]:
    """Writes `measured.csv`, `.png` and `.html`; returns their paths."""
    table, picture, page = (folder / f"measured.{kind}" for kind in ("csv", "png", "html"))
    write_text(table, csv_text(COLUMNS, _rows(measured)))
    with paper_style(), replacing(picture) as temporary:
        draw(measured).savefig(temporary, format="png", metadata={"Software": None})
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["title"] = lambda method: to_html(method_title(method))
    image = base64.b64encode(picture.read_bytes()).decode()
    context = {
        "measured": measured, "answer": answer, "image": image, "version": __version__, "corpus_title": corpus_title,
        "model": model_name(measured.backbone.model_id), "choice": answer.recommended(measured),
        "settings": json.dumps(settings(measured), indent=1),
    }  # fmt: skip
    write_text(page, fill(environment, TEMPLATE, context))
    return [table, picture, page]


def settings(measured: Measured) -> dict[str, object]:
    """What has to be asked for again to measure the same."""
    asked, backbone = measured.asked, measured.backbone
    return {
        "model": backbone.model_id, "revision": backbone.revision, "dtype": backbone.dtype, "length": asked.length,
        "texts": [text.name for text in measured.texts], "documents": asked.documents, "tokens": asked.tokens,
        "methods": asked.methods, "budgets": asked.budgets, "target_kl": asked.target_kl, "seed": asked.seed,
    }  # fmt: skip


def _rows(measured: Measured) -> Iterator[dict[str, object]]:
    choice, documents = answer.recommended(measured), {text.name: len(text.sequences) for text in measured.texts}
    for line in measured.lines:
        recall = line.reading.recall
        yield {
            "model_id": measured.backbone.model_id,
            "revision": measured.backbone.revision,
            "text": line.text,
            "length": measured.asked.length,
            "method": line.method,
            "budget_percent": f"{line.budget_percent:g}",
            "step_share": f"{line.reading.share:.6g}",
            "recall": "" if math.isnan(recall) else f"{recall:.6g}",
            "metric": KL.name,
            "value": f"{line.kl:.6g}",
            "ci_low": "" if line.low is None else f"{line.low:.6g}",
            "ci_high": "" if line.high is None else f"{line.high:.6g}",
            SAME_TOP.name: f"{line.same_top:.6g}",
            "documents": documents[line.text],
            "tokens": measured.asked.tokens,
            "meets_target": int(line.high is not None and line.high <= measured.asked.target_kl),
            "recommended": int(
                choice is not None and (choice.method, choice.budget_percent) == (line.method, line.budget_percent)
            ),
        }


def draw(measured: Measured) -> Figure:
    """Draws a panel per text: KL against the bytes of a step, a line per method over its budgets, and the target."""
    texts = [text.name for text in measured.texts]
    columns = min(2, len(texts))
    rows = math.ceil(len(texts) / columns)
    figure = Figure(figsize=(WIDTH, 1.1 + 2.4 * rows), layout="constrained")
    axes = panel_axes(figure, rows, columns, len(texts))
    looks = looks_of(measured.asked.methods, first=())
    for axis, text in zip(axes, texts, strict=True):
        lines = [line for line in measured.lines if line.text == text]
        for method in measured.asked.methods:
            _draw_method(axis, [line for line in lines if line.method == method], looks[method])
        axis.axhline(measured.asked.target_kl, color=GREY, linewidth=0.8, linestyle="--")
        axis.set_title(plain(corpus_title(text)), fontsize=8)
        axis.grid(color=GREY, alpha=0.2, linewidth=0.5)
    axes[0].set_yscale("log")
    tick_logarithmic(axes[0].yaxis, *axes[0].get_ylim())
    shares = [100 * line.reading.share for line in measured.lines]
    make_x_logarithmic(axes[0], min(shares), max(shares))
    label_outer(axes, "bytes read by a step, % of full attention's", f"{plain(KL.title)}, {KL.unit}", 8)
    name = plain(model_name(measured.backbone.model_id))
    finish(figure, axes[0].get_legend_handles_labels()[0], f"{name}, prompts of {measured.asked.length} tokens", 7, 2)
    return figure


def _draw_method(axis, lines, look: Look) -> None:
    lines = sorted(lines, key=lambda line: line.reading.share)
    shares, values = [100 * line.reading.share for line in lines], [line.kl for line in lines]
    axis.plot(
        shares, values, color=look.colour, marker=look.marker, linestyle=look.line, markersize=4, linewidth=1,
        label=method_title(lines[0].method),
    )  # fmt: skip
    for share, line in zip(shares, lines, strict=True):
        if line.low is not None:
            axis.plot([share, share], [line.low, line.high], color=look.colour, linewidth=0.8)
