"""Figures of many methods: attention errors, what selectors find, and what both reach with how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from residual_mass.files import read_csv
from residual_mass.methods import METHODS, TopK, method_named
from residual_mass.metrics import KL, RELATIVE_ERROR
from residual_mass.paper.cells import load, numbers
from residual_mass.paper.figures.style import (
    GREY,
    PALETTE,
    TEXT_WIDTH,
    figure,
    finish,
    looks_of,
    make_logarithmic,
    panels,
    plain,
)  # fmt: skip
from residual_mass.paper.tables.residuals import compared, on_front
from residual_mass.paper.titles import RESIDUAL_TITLES, SELECTOR_TITLES, TOPK, corpus_title, method_title, title_parts
from residual_mass.study.labels import ORACLES
from residual_mass.study.specs import FigureSpec

NEEDED = ("method", "corpus", "length", "budget_percent", "error", "recall", "packs")
DISTANCE, ERROR = KL.name, RELATIVE_ERROR.name
COUNTED = {DISTANCE: "documents", ERROR: "packs"}
"""By quantity, what is counted behind a value."""


def compared_rows(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Rows of residual errors in the order of the files and of the texts, with numbers as numbers."""
    files = [pd.DataFrame(read_csv(path, NEEDED, "residual-errors")) for path in data]
    rows = pd.concat([file[file["corpus"] == text] for file in files for text in spec.texts], ignore_index=True)
    return rows.assign(**{name: numbers(rows[name]) for name in ("budget_percent", "error", "recall", "packs")})


def error_by_k_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (length, corpus, method, budget) in the order of the files and of `spec.texts`: `error`. Only
    methods that read what exact top-K reads are shown.
    """
    rows = compared_rows(spec, data)
    return rows[[method_named(name).selector == TopK() for name in rows["method"]]].reset_index(drop=True)


def selection_recall_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (length, corpus, selector, budget) in the order of the files and of `spec.texts`: `missed`,
    the share of the top K's mass that the selector's first `method` misses. Exact top-K, which misses nothing, and
    budgets without a K are left out.

    Raises:
        ValueError: no method selects otherwise than by exact scores.
    """
    rows = compared_rows(spec, data)
    first: dict[object, str] = {}
    for name in rows["method"].unique():
        first.setdefault(method_named(name).selector, name)
    points = rows[rows["method"].isin(set(first.values()) - {first.get(TopK())}) & rows["recall"].notna()]
    if points.empty:
        raise ValueError(f"figure {spec.label}: no method selects otherwise than by exact scores; compare one")
    return points.assign(missed=1 - points["recall"]).reset_index(drop=True)


def _draw_lines(points: pd.DataFrame, y: str, label: str, titles: dict[str, str]) -> Figure:
    """A panel per length and corpus, with a line per method against the budget."""
    of_panel, looks = points.groupby(["length", "corpus"], sort=False), looks_of(points["method"])
    figure, axes = panels(1.7, len(of_panel), 2, "budget, % of the prefix", label)
    for axis, ((length, corpus), panel) in zip(axes, of_panel, strict=True):
        for method, line in panel[panel[y] > 0].groupby("method", sort=False):
            line = line.sort_values("budget_percent")
            axis.plot(line["budget_percent"], line[y], **looks[method], label=titles[method])
        axis.set_title(f"{plain(corpus_title(corpus))}, {length}: {panel['packs'].iloc[0]} packs")
        axis.grid(axis="y")
    make_logarithmic(axes[0].xaxis, axes[0].yaxis)
    axes[0].set_xticks(sorted(set(points["budget_percent"])))
    return figure


@figure("error_by_k", error_by_k_points)
def error_by_k(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Relative $\ell_1$ error of the attention output against full attention, averaged over heads and queries, by
    method and budget; a panel for each length and text. All methods read the same tokens, the samples 32 more.
    """
    titles = {name: method_title(name).removeprefix(TOPK) or TOPK for name in points["method"].unique()}
    figure = _draw_lines(points, "error", f"{RELATIVE_ERROR.title} of attention", titles)
    return finish(figure, f"{plain(spec.title)}: errors of all heads, with what is added to {TOPK}")


@figure("selection_recall", selection_recall_points)
def selection_recall(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Share of the attention mass of the $K$ tokens with the largest scores that a selector does not choose, averaged
    over heads and queries, against the budget; a panel for each length and text. Top-$K$ by exact scores misses
    nothing, and budgets for anchors alone have no $K$.
    """
    titles = {name: title_parts(name)[0] for name in points["method"].unique()}
    figure = _draw_lines(points, "missed", "1 \N{MINUS SIGN} recall of the top K's mass", titles)
    return finish(figure, f"{plain(spec.title)}: attention mass of the top K that selectors miss")


# ---- bytes -----------------------------------------------------------------------------------------------------------


def fidelity_by_bytes_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (length, corpus, quantity, method, budget) in the order of the files and of `spec.texts`:
    `share` of full attention's bytes in percent, `value` of the quantity (`kl` or `relative_error`), the sample
    `size` behind it, and whether it is on the `front`, which oracles are not.
    """
    errors = compared(load(data))
    parts = []
    for length, corpus, (quantity, counted) in product(dict.fromkeys(errors["length"]), spec.texts, COUNTED.items()):
        rows = errors[(errors["length"] == length) & (errors["corpus"] == corpus) & (errors[quantity] != "")]
        points = rows[["length", "corpus", "method"]].assign(quantity=quantity, value=numbers(rows[quantity]))
        points["budget_percent"] = numbers(rows["budget_percent"])
        points["share"], points["size"] = 100 * numbers(rows["step_share"]), rows[counted].astype(int)
        competing = points[~points["method"].isin(ORACLES)]
        kept = competing.index[on_front(list(zip(competing["share"], competing["value"], strict=True)))]
        parts.append(points.assign(front=points.index.isin(kept)))
    return pd.concat(parts, ignore_index=True)


def kinds_of(method: str) -> tuple[str, str]:
    """Classes of a method's selector and residual."""
    found = method_named(method)
    return type(found.selector).__name__, type(found.residual).__name__


def _looks() -> tuple[dict[str, str], dict[str, str]]:
    """Colours of all kinds of selectors and markers of all kinds of residuals, the same in all figures."""
    selectors, residuals = zip(*(kinds_of(one.name) for one in METHODS if not one.whole_prefix), strict=True)
    colours = zip(dict.fromkeys(selectors), cycle((*PALETTE, "#8C564B", "#7F7F00")), strict=False)
    return dict(colours), dict(zip(dict.fromkeys(residuals), cycle("os^vDPX*<>"), strict=False))


@figure("fidelity_by_bytes", fidelity_by_bytes_points)
def fidelity_by_bytes(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Distance from full attention against the bytes that a decode step reads of a bfloat16 cache and of summaries, as
    a share of all keys and values: the Kullback-Leibler divergence of the next token (left), which is measured for
    fewer methods, and the relative $\ell_1$ error of the attention output (right), by length and text. Colours are
    selectors, marks are what is added for the unread tokens, thin lines join the budgets of a method. The black line is
    the least distance that any method has with at most so many bytes; the exact mass, an oracle, is left out of it.
    """
    rows = points.groupby(["length", "corpus"], sort=False)
    colours, shapes = _looks()
    front: dict[str, Any] = {"color": "black", "linewidth": 1.4, "label": "front"}
    figure = Figure(figsize=(TEXT_WIDTH, 0.6 + 1.5 * len(rows)))
    axes = figure.subplots(len(rows), 2, sharex="col", sharey="col", squeeze=False)
    for of_row, ((length, corpus), row) in zip(axes, rows, strict=True):
        for axis, (quantity, panel) in zip(of_row, row.groupby("quantity", sort=False), strict=True):
            for method, line in panel.sort_values("budget_percent", kind="stable").groupby("method", sort=False):
                selector, residual = kinds_of(method)
                pale = {"color": to_rgba(colours[selector], 0.5), "linewidth": 0.6, "marker": shapes[residual]}
                edge = {"markeredgecolor": colours[selector], "markerfacecolor": colours[selector]}
                axis.plot(line["share"], line["value"], **pale, **edge, markeredgewidth=0)
            best = panel[panel["front"]].sort_values("share")
            axis.plot(best["share"], best["value"], **front, drawstyle="steps-post", zorder=1.5)
            axis.set_title(f"{plain(corpus_title(corpus))}, {length}: {panel['size'].iloc[0]} {COUNTED[quantity]}")
            axis.set_ylabel(RELATIVE_ERROR.title if quantity == ERROR else f"{plain(KL.title)}, {KL.unit}")
            axis.grid()
    for axis in axes[-1]:
        axis.set_xlabel("bytes read by a step, % of full attention's")
        make_logarithmic(axis.xaxis, axis.yaxis)
    selectors, residuals = zip(*map(kinds_of, points["method"].unique()), strict=True)
    named = [
        *(Line2D([], [], color=colours[kind], linewidth=2, label=SELECTOR_TITLES.get(kind, kind))
          for kind in colours if kind in selectors),
        *(Line2D([], [], color=GREY, linestyle="", marker=shapes[kind], label=RESIDUAL_TITLES.get(kind, kind))
          for kind in shapes if kind in residuals),
    ]  # fmt: skip
    title = f"{plain(spec.title)}: distance from full attention and bytes of a step"
    return finish(figure, title, others=named, fontsize=6.5)
