"""Figures of many methods: attention errors, recall of selectors, and distances by the bytes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from residual_mass.methods import METHODS, TopK, method_named
from residual_mass.methods.registry import TOPK_TITLE
from residual_mass.metrics import KL, RELATIVE_ERROR
from residual_mass.paper.figures.style import (
    DISTANCE,
    GREY,
    PALETTE,
    against_budget,
    figure,
    finish,
    looks_of,
    make_logarithmic,
    panels,
)
from residual_mass.paper.frames import read_results
from residual_mass.paper.results import load_results
from residual_mass.paper.tables.residuals import ORACLES, method_comparison, on_front
from residual_mass.paper.titles import method_title, text_title, title_parts
from residual_mass.spec.specs import FigureSpec

SELECTOR_COLOURS = (*PALETTE[:-1], "#8C564B", "#7F7F00")
"""Colours of selectors; black, the last colour of the palette, is that of the front."""
RESIDUAL_MARKERS = "os^vDPX<>*hpd8"
"""Markers of residuals."""
NEEDED = ("method", "corpus", "length", "budget_percent", "error", "recall", "packs")


def compared_rows(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns rows of residual errors in the order of the files and of the texts, with the columns of `against_budget`
    except `value`.
    """
    files = [read_results(path, NEEDED, "residual-errors") for path in data]
    of_texts = [file[file["corpus"] == text] for file in files for text in spec.texts]
    rows = pd.concat(of_texts, ignore_index=True)
    packs = rows.groupby(["length", "corpus"])["packs"].transform("first")
    texts = rows["corpus"].map(text_title) + ", " + rows["length"]
    place = texts + ": " + packs.astype(str) + " packs"
    return rows.assign(text=rows["corpus"], place=place, arm=rows["method"])


@figure
def error_by_k(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Relative $\ell_1$ error of the attention output against full attention, averaged over heads, queries and packs
    (sequences of tokens), by method, budget, length and text. All methods read the same tokens; samples read 32 more.
    """
    rows = compared_rows(spec, data)
    rows = rows[[method_named(name).selector == TopK() for name in rows["method"]]]
    titles = [method_title(name).removeprefix(TOPK_TITLE) or TOPK_TITLE for name in rows["method"]]
    rows = rows.assign(value=rows["error"], title=titles)
    figure = against_budget(rows, f"{RELATIVE_ERROR.title} of attention", looks_of(rows["arm"]))
    return finish(figure, spec, f": errors of all heads, with what is added to {TOPK_TITLE}")


@figure
def selection_recall(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Share of the attention mass of the $K$ tokens with the largest scores that a selector does not choose, averaged
    over heads and queries, against the budget; a panel for each length and text. Top-$K$ by exact scores misses
    nothing, quantised caches are read whole, and budgets that only hold the anchors have no $K$.
    """
    rows = compared_rows(spec, data)
    first: dict[object, str] = {}  # name of the first method with each selector
    for name in rows["method"].unique():
        selector = method_named(name).selector
        if selector != TopK() and not selector.replaces_cache:
            first.setdefault(selector, name)
    shown = rows["method"].isin(first.values()) & rows["recall"].notna()
    rows = rows[shown]
    if rows.empty:
        raise ValueError(f"figure {spec.label}: no method selects otherwise than by exact scores; compare one")
    titles = [title_parts(name)[0] for name in rows["method"]]
    rows = rows.assign(value=1 - rows["recall"], title=titles)
    figure = against_budget(rows, "missed attention mass", looks_of(rows["arm"]))
    return finish(figure, spec, ": attention mass of the top K that selectors miss")


def _looks(part: str, looks: Sequence[str]) -> dict[type, str]:
    """Returns a look for each class of the part "selector" or "residual", in the order of METHODS, so that all figures
    have the same looks. Raises ValueError when there are too few looks.
    """
    parts = [getattr(method, part) for method in METHODS if not method.whole_prefix]
    kinds = dict.fromkeys(map(type, parts))
    if len(kinds) > len(looks):
        raise ValueError(f"{len(kinds)} kinds of {part} have {len(looks)} looks; add one in figures/residuals.py")
    return dict(zip(kinds, looks, strict=False))


@figure
def fidelity_by_bytes(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Distance from full attention against the bytes that a decode step reads of a bfloat16 cache and of summaries, as
    a share of all keys and values: the Kullback-Leibler divergence of the next token (left), which is measured for
    fewer methods, and the relative $\ell_1$ error of the attention output (right), by length and text. Colours are
    selectors, marks are what is added for the unread tokens, thin lines join the budgets of a method. The black line is
    the least distance that any method has with at most that many bytes; the exact mass, an oracle, is left out of it.
    """
    errors = method_comparison(load_results(data))
    errors = errors.assign(share=100 * errors["step_share"])
    for part in ("selector", "residual"):
        parts = [getattr(method_named(name), part) for name in errors["method"]]
        errors[part] = list(map(type, parts))
    colours = _looks("selector", SELECTOR_COLOURS)
    markers = _looks("residual", RESIDUAL_MARKERS)
    columns = ((KL, "documents"), (RELATIVE_ERROR, "packs"))
    places = list(product(errors["length"].unique(), spec.texts, columns))
    figure, axes = panels(1.5, len(places), 2, "bytes of a step, %", sharex="col", sharey="col")
    for axis, (length, corpus, (metric, counted)) in zip(axes, places, strict=True):
        of_text = (errors["length"] == length) & (errors["corpus"] == corpus)
        panel = errors[of_text & errors[metric.name].notna()]
        panel = panel.assign(value=panel[metric.name]).sort_values("budget_percent", kind="stable")
        _draw_methods(axis, panel, colours, markers)
        _draw_front(axis, panel)
        count = panel[counted].iloc[0]
        axis.set_title(f"{text_title(corpus)}, {length}: {count} {counted}", fontsize=7)
        axis.set_ylabel(DISTANCE if metric == KL else metric.title)
        axis.grid()
    for axis in axes[:2]:
        make_logarithmic(axis.xaxis, axis.yaxis)
    _add_labels(axes[0], errors, colours, markers)
    return finish(figure, spec, ": distance from full attention and bytes of a step", fontsize=6.5)


def _draw_methods(axis: Axes, panel: pd.DataFrame, colours: dict[type, str], markers: dict[type, str]) -> None:
    """Draws a pale line through the budgets of each method, with marks in full colour."""
    for (_, selector, residual), line in panel.groupby(["method", "selector", "residual"], sort=False):
        colour = colours[selector]
        pale = {"color": to_rgba(colour, 0.5), "linewidth": 0.6}
        marks = {"marker": markers[residual], "markeredgewidth": 0}
        axis.plot(line["share"], line["value"], **pale, **marks, markeredgecolor=colour, markerfacecolor=colour)


def _draw_front(axis: Axes, panel: pd.DataFrame) -> None:
    """Draws the least value of all methods but oracles with at most so many bytes."""
    competing = panel[~panel["method"].isin(ORACLES)]
    points = list(zip(competing["share"], competing["value"], strict=True))
    best = competing.iloc[on_front(points)].sort_values("share")
    look = {"color": "black", "linewidth": 1.4, "drawstyle": "steps-post", "zorder": 1.5}
    axis.plot(best["share"], best["value"], **look, label="front")


def _add_labels(axis: Axes, errors: pd.DataFrame, colours: dict[type, str], markers: dict[type, str]) -> None:
    """Labels the looks of the drawn selectors and residuals for the legend."""
    selectors = set(errors["selector"])
    for kind, colour in colours.items():
        if kind in selectors:
            axis.plot([], [], color=colour, linewidth=2, label=kind.title or kind.__name__)
    residuals = set(errors["residual"])
    for kind, marker in markers.items():
        if kind in residuals:
            label = "nothing added" if kind is type(None) else kind.title or kind.__name__
            axis.plot([], [], color=GREY, linestyle="", marker=marker, label=label)
