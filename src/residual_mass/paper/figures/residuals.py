"""Figures of many methods: attention errors, what selectors find, and what both reach with how many bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from residual_mass.files import read_csv
from residual_mass.methods import TopK, method_named
from residual_mass.methods.residuals import TOPK
from residual_mass.metrics import KL, RELATIVE_ERROR, VERIFIED
from residual_mass.paper.cells import load, numbers
from residual_mass.paper.figures.style import GREY, PALETTE, figure, finish, looks_of, make_logarithmic, panels
from residual_mass.paper.tables.residuals import compared, on_front
from residual_mass.paper.titles import corpus_title, method_title, title_parts
from residual_mass.study.labels import ORACLES
from residual_mass.study.specs import FigureSpec

NEEDED = ("method", "corpus", "length", "budget_percent", "error", "recall", "packs")


def compared_rows(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns rows of residual errors in the order of the files and of the texts, with numbers as numbers."""
    files = [pd.DataFrame(read_csv(path, NEEDED, "residual-errors")) for path in data]
    rows = pd.concat([file[file["corpus"] == text] for file in files for text in spec.texts], ignore_index=True)
    return rows.assign(**{name: numbers(rows[name]) for name in ("budget_percent", "error", "recall", "packs")})


def _draw_lines(rows: pd.DataFrame, y: str, label: str, titles: dict[str, str]) -> Figure:
    """Returns a panel per length and corpus, with a line per method against the budget."""
    of_panel, looks = rows.groupby(["length", "corpus"], sort=False), looks_of(rows["method"])
    figure, axes = panels(1.7, len(of_panel), 2, "budget, % of the prefix", label)
    for axis, ((length, corpus), panel) in zip(axes, of_panel, strict=True):
        for method, line in panel[panel[y] > 0].groupby("method", sort=False):
            line = line.sort_values("budget_percent")
            axis.plot(line["budget_percent"], line[y], **looks[method], label=titles[method])
        axis.set_title(f"{corpus_title(corpus)}, {length}: {panel['packs'].iloc[0]} packs")
        axis.grid(axis="y")
    make_logarithmic(axes[0].xaxis, axes[0].yaxis)
    axes[0].set_xticks(sorted(set(rows["budget_percent"])))
    return figure


@figure
def error_by_k(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Relative $\ell_1$ error of the attention output against full attention, averaged over heads and queries, by
    method and budget; a panel for each length and text. All methods read the same tokens, the samples 32 more.
    """
    rows = compared_rows(spec, data)
    rows = rows[[method_named(name).selector == TopK() for name in rows["method"]]]
    titles = {name: method_title(name).removeprefix(TOPK) or TOPK for name in rows["method"]}
    figure = _draw_lines(rows, "error", f"{RELATIVE_ERROR.title} of attention", titles)
    return finish(figure, spec, f": errors of all heads, with what is added to {TOPK}")


@figure
def selection_recall(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Share of the attention mass of the $K$ tokens with the largest scores that a selector does not choose, averaged
    over heads and queries, against the budget; a panel for each length and text. Top-$K$ by exact scores misses
    nothing, and budgets for anchors alone have no $K$.
    """
    rows = compared_rows(spec, data)
    first: dict[object, str] = {}  # of the methods with the same selector
    for name in rows["method"].unique():
        first.setdefault(method_named(name).selector, name)
    first.pop(TopK(), None)
    rows = rows[rows["method"].isin(first.values()) & rows["recall"].notna()]
    if rows.empty:
        raise ValueError(f"figure {spec.label}: no method selects otherwise than by exact scores; compare one")
    titles = {name: title_parts(name)[0] for name in first.values()}
    label = "1 \N{MINUS SIGN} recall of the top K's mass"
    figure = _draw_lines(rows.assign(missed=1 - rows["recall"]), "missed", label, titles)
    return finish(figure, spec, ": attention mass of the top K that selectors miss")


SELECTORS = "TopK QuantisedScan Pages PerGroup CacheOnly Channels WholeClusters".split()
RESIDUALS = (
    "NoneType Phi Moments Centroids Mean ImportanceSample ExactMass ScanRegression QuantisedValues GroupSums"
).split()
"""Classes in the order of their colours and marks, the same in all figures; others follow as they come."""


def kinds_of(method: str) -> tuple[type, type]:
    """Returns the classes of a method's selector and residual."""
    found = method_named(method)
    return type(found.selector), type(found.residual)


def kind_title(kind: type) -> str:
    return "nothing added" if kind is type(None) else kind.title or kind.__name__


def _looks(known: Sequence[str], kinds: Iterable[type], looks: Sequence[str]) -> dict[type, str]:
    """Returns a colour or mark for each class."""
    by_name = {kind.__name__: kind for kind in kinds}
    all_looks = zip(dict.fromkeys([*known, *by_name]), cycle(looks), strict=False)
    return {by_name[name]: look for name, look in all_looks if name in by_name}


@figure
def fidelity_by_bytes(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Distance from full attention against the bytes that a decode step reads of a bfloat16 cache and of summaries, as
    a share of all keys and values: the Kullback-Leibler divergence of the next token (left), which is measured for
    fewer methods, the relative $\ell_1$ error of the attention output (middle), and, where drafts were measured, the
    bytes for a token where the method drafts and full attention verifies (right), by length and text. Colours are
    selectors, marks are what is added for the unread tokens, thin lines join the budgets of a method. The black line is
    the least distance that any method has with at most so many bytes; the exact mass, an oracle, is left out of it.
    """
    errors = compared(load(data))
    errors = errors.assign(share=100 * numbers(errors["step_share"]), budget=numbers(errors["budget_percent"]))
    selectors, residuals = zip(*map(kinds_of, errors["method"].unique()), strict=True)
    colours = _looks(SELECTORS, selectors, (*PALETTE, "#8C564B", "#7F7F00"))
    marks = _looks(RESIDUALS, residuals, "os^vDPX<>*")
    columns = [(KL, "documents"), (RELATIVE_ERROR, "packs"), (VERIFIED, "documents")]
    columns = columns[: 3 if errors[VERIFIED.name].any() else 2]
    places = list(product(errors["length"].unique(), spec.texts, columns))
    figure, axes = panels(1.5, len(places), len(columns), "bytes of a step, %", sharex="col", sharey="col")
    for axis, (length, corpus, (metric, counted)) in zip(axes, places, strict=True):
        shown = (errors["length"] == length) & (errors["corpus"] == corpus) & (errors[metric.name] != "")
        panel = errors[shown].sort_values("budget", kind="stable")
        panel = panel.assign(value=numbers(panel[metric.name]))
        for method, line in panel.groupby("method", sort=False):
            selector, residual = kinds_of(method)
            pale = {"color": to_rgba(colours[selector], 0.5), "linewidth": 0.6, "marker": marks[residual]}
            edge = {"markeredgecolor": colours[selector], "markerfacecolor": colours[selector]}
            axis.plot(line["share"], line["value"], **pale, **edge, markeredgewidth=0)
        best = panel[~panel["method"].isin(ORACLES)]
        best = best.iloc[on_front(list(zip(best["share"], best["value"], strict=True)))].sort_values("share")
        front: dict[str, Any] = {"color": "black", "linewidth": 1.4, "label": "front"}
        axis.plot(best["share"], best["value"], **front, drawstyle="steps-post", zorder=1.5)
        axis.set_title(f"{corpus_title(corpus)}, {length}: {panel[counted].iloc[0]} {counted}", fontsize=7)
        axis.set_ylabel(f"{metric.title}, {metric.unit}".removesuffix(", "))
        axis.grid()
    for axis in axes[: len(columns)]:
        make_logarithmic(axis.xaxis, axis.yaxis)
    for kind in colours:
        axes[0].plot([], [], color=colours[kind], linewidth=2, label=kind_title(kind))
    for kind in marks:
        look = {"color": GREY, "linestyle": "", "marker": marks[kind]}
        axes[0].plot([], [], **look, label=kind_title(kind))
    return finish(figure, spec, ": distance from full attention and bytes of a step", fontsize=6.5)
