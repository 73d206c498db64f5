"""The answer as files: text for a terminal, a table, a picture, and a page that loads nothing from elsewhere."""

from __future__ import annotations

import math
import textwrap
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from residual_mass.files import atomic_write, write_json, write_parquet, write_text
from residual_mass.measure.answer import Answer, Measured, kl_text, percent
from residual_mass.methods import method_named

LINE_WIDTH = 120
"""Characters of a printed line, but for tables."""
FACT_WIDTH = 17
"""Characters before a fact."""
POINTS = {"marker": "o", "markersize": 4, "linewidth": 1}
RING = {"s": 90, "facecolors": "none", "edgecolors": "black", "linewidths": 1.2, "zorder": 3}
"""Looks of a method's budgets, and of the mark around the recommended one."""
TABLE_HEADS = ("method", "exact", "read", "kept", "KL / topk's", "KL", "", "same top", "ms a token", "by")
"""Heads of the table; the empty one is `Measured.tail`."""


# ---- text ------------------------------------------------------------------------------------------------------------


def terminal_text(measured: Measured, answer: Answer) -> str:
    """Returns the answer as text for a terminal."""
    lines = [answer.question, "", textwrap.fill(answer.lead, LINE_WIDTH), ""]
    for name, text in (*answer.facts, *answer.basis):
        filled = textwrap.fill(text, LINE_WIDTH - FACT_WIDTH)
        lines.append(f"{name:{FACT_WIDTH}}{textwrap.indent(filled, ' ' * FACT_WIDTH).lstrip()}")
    if answer.steps:
        lines += ["", *aligned(answer.steps)]
    if answer.recipe:
        lines += ["", textwrap.indent(answer.recipe, "    ")]
    tokens = measured.request.tokens
    lines += [
        "",
        f"{measured.title} tokens, {tokens} tokens after each. KL(full attention || method) of the next",
        "token: over that of topk at the same budget, then in nats with a 95 % interval. > is recommended.",
    ]
    for text in measured.texts:
        rows = list(rows_of(measured, text.name))
        lines += ["", f"{text.name}, {len(text.sequences)} documents", *aligned(rows)]
    lines += ["", "Limits of this answer:"]
    for limit in answer.limits:
        lines.append(textwrap.fill(f"* {limit}", LINE_WIDTH, subsequent_indent="  "))
    return "\n".join(lines) + "\n"


def rows_of(measured: Measured, text: str) -> Iterator[list[str]]:
    """Yields the head of a text's table, then a row for each method and budget, with `>` before a recommended one."""
    heads = [head or measured.tail for head in TABLE_HEADS]
    yield ["", *heads]
    of_text = measured.table[measured.table["text"] == text]
    for row in of_text.sort_values("read").itertuples():
        has_ratio = not math.isnan(row.kl_over_topk)
        mark = ">" if row.recommended else ""
        budget = f"{row.budget_percent:g} %" if method_named(row.method).chooses else "-"
        cells = [mark, row.method, budget, percent(row.read), percent(row.kept)]
        cells.append(f"{row.kl_over_topk:.2g}" if has_ratio else "-")
        cells += [kl_text(row), f"{row.kl_tail:.2g}", f"{100 * row.same_top:.1f} %"]
        cells += [f"{1000 * row.seconds:.3g}", row.backend]
        yield cells


def aligned(rows: list[list[str]]) -> list[str]:
    """Returns rows of cells as lines: words to the left, numbers to the right of their column."""
    columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        numbers = any(cell[:1].isdigit() for cell in column[1:])
        columns.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


# ---- files -----------------------------------------------------------------------------------------------------------


def write(measured: Measured, answer: Answer, text: str) -> list[Path]:
    """Writes the page, the tables, the picture, the printed text and, last, the settings; returns their paths."""
    html = measured.folder / "measured.html"
    table = measured.folder / "measured.csv"
    tokens = measured.folder / "tokens.parquet"
    picture = measured.folder / "measured.png"
    printed = measured.folder / "measured.txt"
    settings = measured.folder / "settings.json"
    paths = [html, table, tokens, picture, printed, settings]
    rows = measured.table.assign(seconds_full=measured.times.full.seconds)
    write_text(table, rows.to_csv(index=False, float_format="%.6g"))
    write_parquet(tokens, measured.tokens)
    with atomic_write(picture) as temporary:
        draw(measured).savefig(temporary, format="png", dpi=150, metadata={"Software": None})
    write_text(html, page(measured, answer, picture.read_bytes()))
    write_text(printed, text)
    if measured.weights is not None:
        weights = measured.folder / "weights.csv"
        write_text(weights, measured.weights.to_csv(index=False, float_format="%.6g"))
        paths.insert(2, weights)
    write_json(settings, measured.settings)
    return paths


def draw(measured: Measured) -> Figure:
    """Draws a panel per text: KL with its interval against the bytes of a step, a line per method over its budgets."""
    count = len(measured.texts)
    figure = Figure(figsize=(4.2 * count, 3.8), layout="constrained")
    (panels,) = figure.subplots(1, count, sharex=True, sharey=True, squeeze=False)
    for axis, text in zip(panels, measured.texts, strict=True):
        of_text = measured.table[measured.table["text"] == text.name]
        for method, rows in of_text.groupby("method", sort=False):
            rows = rows.sort_values("read")
            read = 100 * rows["read"]
            (line,) = axis.plot(read, rows["kl"], **POINTS, label=method)
            axis.vlines(read, rows["ci_low"], rows["ci_high"], color=line.get_color(), linewidth=0.8)
        chosen = of_text[of_text["recommended"] == 1]
        if len(chosen):
            axis.scatter(100 * chosen["read"], chosen["kl"], label="recommended", **RING)
        axis.axhline(measured.request.target_kl, color="0.4", linewidth=0.8, linestyle="--", label="target")
        axis.set_title(text.name, parse_math=False)  # a name may have dollar signs
        axis.set(yscale="log", xlabel="bytes read by a step, % of full attention's")
        axis.grid(which="both", alpha=0.2, linewidth=0.5)
    panels[0].set_ylabel("KL(full || method), nats")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(f"{measured.title} tokens", fontsize=9, parse_math=False)
    return figure


def page(measured: Measured, answer: Answer, picture: bytes) -> str:
    """Renders the page, with a picture in PNG."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("residual_mass.measure", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html.j2").render(
        title=f"{measured.title} tokens",
        tokens=measured.request.tokens,
        answer=answer,
        tables={text.name: list(rows_of(measured, text.name)) for text in measured.texts},
        picture=b64encode(picture).decode(),
    )
