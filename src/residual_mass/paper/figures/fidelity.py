"""Figures of the distance from full attention: against the budget, and token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from residual_mass.benchmarks.columns import FIDELITY, FOLLOWING, GREEDY, OWN
from residual_mass.benchmarks.statistics import percentile_interval, resampled
from residual_mass.files import read_csv, read_parquet
from residual_mass.metrics import KL
from residual_mass.paper.cells import ALL_TASKS, numbers
from residual_mass.paper.figures.points import equal_parts
from residual_mass.paper.figures.style import (
    GREY,
    PERCENT,
    TEXT_WIDTH,
    figure,
    finish,
    looks_of,
    make_logarithmic,
    panels,
    plain,
)  # fmt: skip
from residual_mass.paper.titles import benchmark_title, method_title, trained_at_title
from residual_mass.study.specs import FigureSpec

TOKENS = ["text", "continuation", "state", "method", "budget_percent", "maps", "task", "index", "position", "full_nll"]
DISTANCE = f"{plain(KL.title)}, {KL.unit}"
PARTS = 4
"""Groups of equal size by how likely full attention finds the token."""
SEEN = ("nothing", "the token", "its bigram")
PANELS = {
    "likelihood": ("(b) by how likely Full finds the token", "probability under Full (tokens)"),
    "seen": ("(c) by what the prompt has of the token", "seen in the prompt (tokens)"),
    "position": ("(d) by place in the continuation", "place (tokens)"),
}
"""Title and label of the panels with means of groups."""
DODGE = 0.8
"""Room of all methods' marks, where the distance between groups is 1."""
LEFT_OUT = 0.05
"""Share of the tokens, those with the smallest distances, that the distribution need not show."""


# ---- against the budget ----------------------------------------------------------------------------------------------


def fidelity_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (length, text, arm) in the order of the files, of `spec.texts` and of the rows: `value` of KL
    with its interval, and whether the arm's maps are `other` than the main ones.
    """
    parts = []
    for frame in (pd.DataFrame(read_csv(path, FIDELITY, "fidelity")) for path in data):
        kept = (frame["metric"] == KL.name) & (frame["task"] == ALL_TASKS) & (frame["state"] == OWN)
        rows = frame[kept & (frame["continuation"] != GREEDY)]
        parts += [rows[rows["text"] == text] for text in spec.texts]
    points = pd.concat(parts, ignore_index=True)
    for name in ("budget_percent", "value", "ci_low", "ci_high", "documents"):
        points[name] = numbers(points[name])
    return points.assign(other=~points["maps"].isin(["", *spec.maps]))


@figure("fidelity", fidelity_points)
def fidelity(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Distance of the next token from that of full attention, on continuations that every method is given: the
    Kullback-Leibler divergence, averaged over tokens and documents, against the budget. Corpora go on as they do; the
    prompts of benchmarks are continued by the right answer. Feature maps are those of the study, unless the legend
    names the length that they were trained at.
    """
    of_panel, looks = points.groupby(["length", "text"], sort=False), _looks(points)
    figure, axes = panels(1.7, len(of_panel), points["text"].nunique(), "budget, % of the prefix", DISTANCE)
    for axis, ((length, text), panel) in zip(axes, of_panel, strict=True):
        for (method, maps, other), line in panel.groupby(["method", "maps", "other"], sort=False):
            line, look = line.sort_values("budget_percent"), looks[method, maps]
            low, high, label = (
                line["ci_low"],
                line["ci_high"],
                trained_at_title(maps) if other else method_title(method),
            )
            axis.fill_between(line["budget_percent"], low, high, color=look["color"], alpha=0.15, linewidth=0)
            axis.plot(line["budget_percent"], line["value"], **look, label=label)
        counted = "documents" if panel["continuation"].iloc[0] == FOLLOWING else "prompts"
        axis.set_title(f"{plain(benchmark_title(text))}, {length}: {panel['documents'].iloc[0]} {counted}")
        axis.grid(axis="y")
    make_logarithmic(axes[0].xaxis, axes[0].yaxis)
    axes[0].set_xticks(sorted(set(points["budget_percent"])))
    band = Patch(facecolor=GREY, alpha=0.25, linewidth=0, label="95% interval")
    return finish(figure, f"{plain(spec.title)}: distance of the next token from full attention", others=[band])


def _looks(points: pd.DataFrame) -> dict[tuple[str, str], dict[str, Any]]:
    """By method and maps; methods with other maps than the main ones are grey."""
    arms = points[["method", "maps", "other"]].drop_duplicates().itertuples(index=False)
    own = looks_of(points["method"])
    others = cycle(
        {"color": GREY, "marker": marker, "linestyle": line}
        for marker, line in zip("vDP", ("--", ":", "-."), strict=True)
    )
    return {(method, maps): next(others) if other else own[method] for method, maps, other in arms}


# ---- token by token --------------------------------------------------------------------------------------------------


def fidelity_tokens_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Computes the points of four panels, by `panel` and `method`, of the tokens of one text under the main maps.

    distribution: a point per token with a distance above 0, `x`, and the share `y` of tokens with at least that.
    likelihood, seen, position: a point per group of tokens, number `x` and name `label`, with the mean `y` over its
    `tokens` and the interval `low` to `high` over documents, which is empty where a resample may lack the group.
    """
    rows = read_parquet(data[0], [*TOKENS, "kl", "seen"], "force")
    kept = (rows["text"] == spec.texts[0]) & (rows["state"] == OWN) & (rows["continuation"] != GREEDY)
    rows = rows[kept & (rows["budget_percent"] == spec.budget_percent) & rows["maps"].isin(["", *spec.maps])]
    parts = []
    for method, of_method in rows.groupby("method", sort=False):
        tokens = of_method.sort_values(["task", "index", "position"], ignore_index=True)
        ascending = tokens["kl"].astype(float).sort_values(ignore_index=True)
        distribution = pd.DataFrame({"x": ascending, "y": 1 - ascending.index / len(ascending)})[ascending > 0]
        parts.append(distribution.assign(panel="distribution", method=method))
        for panel, (group, names) in _groups(tokens).items():
            parts.append(_group_means(spec, tokens, group, names).assign(panel=panel, method=method))
    return pd.concat(parts, ignore_index=True)


def _groups(tokens: pd.DataFrame) -> dict[str, tuple[pd.Series, Sequence[str]]]:
    """By panel the number of each token's group, and the groups' names."""
    part = equal_parts(tokens["full_nll"], min(PARTS, len(tokens)))
    least = [f"\N{GREATER-THAN OR EQUAL TO} {math.exp(-nll):.3g}" for nll in tokens["full_nll"].groupby(part).max()]
    # Positions 1, 2, 3 to 4, 5 to 8 and so on, up to the last.
    octave, last = np.ceil(np.log2(tokens["position"] + 1)).astype(int), tokens["position"].max() + 1
    ends = [(2**number // 2 + 1, min(2**number, last)) for number in range(octave.max() + 1)]
    octaves = [f"{low}\N{EN DASH}{high}" if low < high else f"{high}" for low, high in ends]
    return {"likelihood": (part, [*least[:-1], "less"]), "seen": (tokens["seen"], SEEN), "position": (octave, octaves)}


def _group_means(spec: FigureSpec, tokens: pd.DataFrame, group: pd.Series, names: Sequence[str]) -> pd.DataFrame:
    """The mean of each group over its tokens, with resampled documents."""
    document = tokens.groupby(["task", "index"]).ngroup()
    table = pd.crosstab(document, group, tokens["kl"], aggfunc=["sum", "count"]).fillna(0)
    sums, sizes = table["sum"], table["count"]
    assert spec.score is not None, "the spec of a figure with intervals of its own has `score`"
    counts = np.concatenate(list(resampled(len(table), spec.score.bootstrap_resamples, spec.score.seed, spec.texts[0])))
    with np.errstate(invalid="ignore"):  # a resample may lack a group
        draws = (counts @ sums.to_numpy()) / (counts @ sizes.to_numpy())
    points = []
    for x, number in enumerate(sums):
        size = int(sizes[number].sum())
        low, high = percentile_interval(draws[:, x]) if len(table) > 1 else (np.nan, np.nan)
        mean = sums[number].sum() / size
        points.append({"x": x, "label": names[number], "y": mean, "low": low, "high": high, "tokens": size})
    return pd.DataFrame(points)


@figure("fidelity_tokens", fidelity_tokens_points)
def fidelity_tokens(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""The distance from full attention token by token at one budget: the share of tokens at least so far off (a), and
    its mean over quarters of the tokens by their probability under full attention (b), over tokens of which the prompt
    has nothing, the token, or the bigram that it ends (c), and over places in the continuation (d). Intervals are over
    documents.
    """
    figure = Figure(figsize=(TEXT_WIDTH, 4.0))
    distribution, *means = figure.subplots(2, 2).ravel()
    looks = looks_of(points["method"])
    of_panel = {name: panel for name, panel in points.groupby("panel", sort=False)}
    for method, line in of_panel["distribution"].groupby("method", sort=False):
        look = looks[method]
        distribution.step(line["x"], line["y"], color=look["color"], linestyle=look["linestyle"])
    low = of_panel["distribution"].groupby("method")["x"].quantile(LEFT_OUT).min()
    distribution.set_xlim(low, of_panel["distribution"]["x"].max())
    make_logarithmic(distribution.xaxis, distribution.yaxis)
    distribution.yaxis.set_major_formatter(PERCENT)
    distribution.set(title="(a) tokens at least this far off", xlabel=DISTANCE, ylabel="share of tokens")
    for axis, (name, (title, label)) in zip(means, PANELS.items(), strict=True):
        axis.sharey(means[0])
        _draw_means(axis, of_panel[name], looks)
        axis.set(title=title, xlabel=label, ylabel=f"mean {DISTANCE}")
    make_logarithmic(means[0].yaxis)
    interval = Line2D([], [], color=GREY, linestyle="", marker="|", markersize=8, label="95% interval")
    title = f"{plain(spec.title)}: single tokens at a budget of {spec.budget_percent:g}%"
    return finish(figure, title, others=[interval])


def _draw_means(axis: Axes, points: pd.DataFrame, looks: dict[str, dict[str, Any]]) -> None:
    """Draws a mark per group and method, with the number of the group's tokens below its name."""
    methods = points["method"].unique()
    for number, method in enumerate(methods):
        line, look = points[points["method"] == method], looks[method]
        x = line["x"] + DODGE * ((number + 0.5) / len(methods) - 0.5)
        axis.vlines(x, line["low"], line["high"], color=look["color"], linewidth=1)
        axis.plot(x, line["y"], **look | {"linestyle": "-", "linewidth": 0.6}, label=method_title(method))
    groups = points.drop_duplicates("x")
    counts = zip(groups["label"], groups["tokens"], strict=True)
    axis.set_xticks(groups["x"], [f"{label}\n({tokens:,.0f})" for label, tokens in counts], fontsize=6.5)
    axis.set_xlim(-0.5, len(groups) - 0.5)
