"""Figures of what selectors find, and of what methods reach with the bytes that a decode step reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from residual_mass.files import read_csv
from residual_mass.methods import METHODS, Method, TopK, method_named
from residual_mass.metrics import KL, RELATIVE_ERROR
from residual_mass.paper.cells import load, numbers
from residual_mass.paper.figures.registry import figure
from residual_mass.paper.figures.style import (
    GREY,
    LOOKS,
    TEXT_WIDTH,
    Look,
    finish,
    label_outer,
    looks_of,
    make_x_logarithmic,
    panel_axes,
    plain,
    tick_logarithmic,
)
from residual_mass.paper.tables import compared, on_front
from residual_mass.paper.titles import RESIDUAL_TITLES, SELECTOR_TITLES, corpus_title, title_parts
from residual_mass.study.labels import ORACLES
from residual_mass.study.specs import FigureSpec

NEEDED = ("method", "corpus", "length", "budget_percent", "recall", "packs")
DISTANCE, ERROR = KL.name, RELATIVE_ERROR.name
AXES = {DISTANCE: (f"{plain(KL.title)}, {KL.unit}", "documents"), ERROR: (RELATIVE_ERROR.title, "packs")}
"""By quantity, the label of the y axis and what is counted behind a value."""
MARKERS = [(shape, filled) for filled in (True, False) for shape in "os^vDPX*<>"]
"""Shapes of marks, of which the second half is open."""
PALE = 0.5
"""Opacity of lines between marks, of which there are many."""
COLOURS = (*(look.colour for look in LOOKS), "#8C564B", "#7F7F00")
"""Of kinds of selectors."""
FRONT: dict[str, Any] = {"color": "black", "linewidth": 1.4}
"""Look of the front, which lies below the marks."""
COLUMNS = 4
"""Entries of a legend side by side."""


class Mark(NamedTuple):
    """Colour of a method's kind of selector, shape of its kind of residual."""

    colour: str
    shape: str
    filled: bool

    def style(self, colour: str | None = None) -> dict[str, Any]:
        """What matplotlib draws marks by, in the selector's colour or another; lines between them are paler."""
        colour = colour or self.colour
        face = colour if self.filled else "white"
        return {
            "marker": self.shape,
            "color": to_rgba(colour, PALE),
            "markeredgecolor": colour,
            "markerfacecolor": face,
            "markeredgewidth": 0.6,
        }


def marks_of(names: Collection[str]) -> dict[str, Mark]:
    """The mark of each method, the same in all figures, in the order of the list of all methods."""
    rules = [rule for rule in METHODS if not rule.whole_prefix]
    colours = dict(zip(_first(rules, _selector_kind), cycle(COLOURS), strict=False))
    shapes = dict(zip(_first(rules, _residual_kind), cycle(MARKERS), strict=False))
    return {
        rule.name: Mark(colours[_selector_kind(rule)], *shapes[_residual_kind(rule)])
        for rule in rules if rule.name in names
    }  # fmt: skip


def _selector_kind(rule: Method) -> str:
    return type(rule.selector).__name__


def _residual_kind(rule: Method) -> str:
    return type(rule.residual).__name__


def _first(rules: Iterable[Method], key: Callable[[Method], Any]) -> dict[Any, Method]:
    """The first method of each key."""
    found: dict[Any, Method] = {}
    for rule in rules:
        found.setdefault(key(rule), rule)
    return found


# ---- recall ----------------------------------------------------------------------------------------------------------


def selection_recall_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (length, corpus, selector, budget) in the order of the files and of `spec.texts`: `missed`,
    the share of the top K's mass that the selector's first `method` misses. Exact top-K, which misses nothing, and
    budgets without a K are left out.

    Raises:
        ValueError: a file has no row of a corpus, or no method selects otherwise than by exact scores.
    """
    parts = []
    for path in data:
        frame = pd.DataFrame(read_csv(path, NEEDED, "residual-errors"))
        for corpus in spec.texts:
            rows = frame[frame["corpus"] == corpus]
            if rows.empty:
                raise ValueError(f"{path}: has no rows of {corpus}; run the residual-errors stage with it")
            parts.append(rows[rows["method"].isin(_first_names(rows["method"])) & (rows["recall"] != "")])
    points = pd.concat(parts, ignore_index=True)
    if points.empty:
        raise ValueError(f"figure {spec.label}: no method selects otherwise than by exact scores; compare one")
    for name in ("budget_percent", "recall", "packs"):
        points[name] = pd.to_numeric(points[name])
    return points.assign(missed=1 - points["recall"])


def _first_names(methods: Iterable[str]) -> list[str]:
    """The first method of each selector but the exact one."""
    found = _first(map(method_named, dict.fromkeys(methods)), lambda rule: rule.selector)
    return [rule.name for selector, rule in found.items() if selector != TopK()]


@figure(
    "selection_recall",
    selection_recall_points,
    caption=(
        r"Share of the attention mass of the $K$ tokens with the largest scores that a selector does not choose, "
        r"averaged over heads and queries, against the budget; a panel for each length and text. Top-$K$ by exact "
        r"scores misses nothing, and budgets for anchors alone have no $K$."
    ),
)
def draw_selection_recall(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws a panel per length and corpus with a line per selector."""
    panels = [panel for _, panel in points.groupby(["length", "corpus"], sort=False)]
    looks = looks_of(points["method"])
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(TEXT_WIDTH, 1.1 + 1.7 * rows), layout="constrained")
    axes = panel_axes(figure, rows, 2, len(panels))
    axes[0].set_yscale("log")
    for axis, panel in zip(axes, panels, strict=True):
        for method, line in panel[panel["missed"] > 0].groupby("method", sort=False):
            line = line.sort_values("budget_percent")
            axis.plot(line["budget_percent"], line["missed"], **_style(looks[method]))
        first = panel.iloc[0]
        axis.set_title(f"{plain(corpus_title(first['corpus']))}, {first['length']}: {first['packs']} packs", fontsize=8)
        axis.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.5)
    tick_logarithmic(axes[0].yaxis, *axes[0].get_ylim())
    budgets = sorted(set(points["budget_percent"]))
    make_x_logarithmic(axes[0], budgets[0], budgets[-1])
    for axis in axes:
        axis.set_xticks(budgets)
        axis.tick_params(labelsize=7)
    label_outer(axes, "budget, % of the prefix", "1 \N{MINUS SIGN} recall of the top K's mass", size=8)
    handles = [
        Line2D([], [], label=title_parts(method)[0], **_style(looks[method]))
        for method in dict.fromkeys(points["method"])
    ]
    title = f"{plain(spec.title)}: attention mass of the top K that selectors miss"
    finish(figure, handles, title, columns=COLUMNS)
    return figure


def _style(look: Look) -> dict[str, Any]:
    return {"color": look.colour, "marker": look.marker, "linestyle": look.line, "markersize": 3, "linewidth": 1.2}


# ---- bytes -----------------------------------------------------------------------------------------------------------


def fidelity_by_bytes_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (length, corpus, quantity, method, budget) in the order of the files and of `spec.texts`:
    `share` of full attention's bytes in percent, `value` of the quantity (`kl` or `relative_error`), the sample
    `size` behind it, and whether it is on the `front`, which oracles are not.

    Raises:
        ValueError: there are no values of a quantity for a length and a corpus.
    """
    errors = compared(load(data))
    parts = []
    for length, corpus, quantity in product(dict.fromkeys(errors["length"]), spec.texts, AXES):
        column = "error" if quantity == ERROR else quantity
        rows = errors[(errors["length"] == length) & (errors["corpus"] == corpus) & (errors[column] != "")]
        if rows.empty:
            stage = "fidelity" if quantity == DISTANCE else "residual-errors"
            raise ValueError(
                f"figure {spec.label}: no {quantity} of {corpus} at {length}; run the {stage} stage with it"
            )
        points = rows[["length", "corpus", "method"]].assign(quantity=quantity, value=numbers(rows[column]))
        points["budget_percent"] = numbers(rows["budget_percent"])
        points["share"], points["size"] = 100 * numbers(rows["step_share"]), rows[AXES[quantity][1]].astype(int)
        competing = points[~points["method"].isin(ORACLES)]
        kept = competing.index[on_front(list(zip(competing["share"], competing["value"], strict=True)))]
        parts.append(points.assign(front=points.index.isin(kept)))
    return pd.concat(parts, ignore_index=True)


@figure(
    "fidelity_by_bytes",
    fidelity_by_bytes_points,
    caption=(
        r"Distance from full attention against the bytes that a decode step reads of a bfloat16 cache and of "
        r"summaries, as a share of all keys and values: the Kullback-Leibler divergence of the next token (left), "
        r"which is measured for fewer methods, and the relative $\ell_1$ error of the attention output (right), by "
        r"length and text. Colours are selectors, marks are what is added for the unread tokens, thin lines join the "
        r"budgets of a method. The black line is the least distance that any method has with at most so many bytes; "
        r"the exact mass, an oracle, is left out of it."
    ),
)
def draw_fidelity_by_bytes(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws a row of two panels per length and corpus, with a mark per method and budget and the front as a line."""
    rows = [row for _, row in points.groupby(["length", "corpus"], sort=False)]
    marks = marks_of(set(points["method"]))
    handles = _handles(marks)
    height = 0.5 + 1.5 * len(rows) + 0.15 * math.ceil(len(handles) / COLUMNS)
    figure = Figure(figsize=(TEXT_WIDTH, height), layout="constrained")
    axes = figure.subplots(len(rows), len(AXES), sharex="col", sharey="col", squeeze=False)
    for of_row, row in zip(axes, rows, strict=True):
        for axis, (quantity, (label, counted)) in zip(of_row, AXES.items(), strict=True):
            panel = row[row["quantity"] == quantity]
            _draw_points(axis, panel, marks)
            first = panel.iloc[0]
            where = f"{plain(corpus_title(first['corpus']))}, {first['length']}"
            axis.set_title(f"{where}: {first['size']} {counted}", fontsize=8)
            axis.set_ylabel(label, fontsize=8)
    for axis in axes[0]:
        axis.set_yscale("log")
        tick_logarithmic(axis.yaxis, *axis.get_ylim())
    for axis, quantity in zip(axes[-1], AXES, strict=True):
        shares = points["share"][points["quantity"] == quantity]
        make_x_logarithmic(axis, shares.min(), shares.max())
        axis.set_xlabel("bytes read by a step, % of full attention's", fontsize=8)
    finish(figure, handles, f"{plain(spec.title)}: distance from full attention and bytes of a step", 6.5, COLUMNS)
    return figure


def _draw_points(axis: Axes, panel: pd.DataFrame, marks: dict[str, Mark]) -> None:
    for method, line in panel.groupby("method", sort=False):
        line = line.sort_values("budget_percent")
        axis.plot(line["share"], line["value"], **marks[method].style(), markersize=3.2, linewidth=0.6)
    front = panel[panel["front"]].sort_values("share")
    axis.plot(front["share"], front["value"], **FRONT, drawstyle="steps-post", zorder=1.5)
    axis.grid(color=GREY, alpha=0.2, linewidth=0.5)
    axis.tick_params(labelsize=7)


def _handles(marks: dict[str, Mark]) -> list[Artist]:
    """Kinds of selectors by their colours, kinds of residuals by their shapes, and the front."""
    rules = [method_named(name) for name in marks]
    return [
        *(Line2D([], [], color=marks[rule.name].colour, linewidth=2, label=SELECTOR_TITLES.get(kind, kind))
          for kind, rule in _first(rules, _selector_kind).items()),
        Line2D([], [], **FRONT, label="front"),
        *(Line2D([], [], linestyle="", label=RESIDUAL_TITLES.get(kind, kind), **marks[rule.name].style(GREY),
                 markersize=4)
          for kind, rule in _first(rules, _residual_kind).items()),
    ]  # fmt: skip
