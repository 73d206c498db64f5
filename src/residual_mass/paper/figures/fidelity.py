"""Figures of the distance from full attention: against the budget, and token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from residual_mass.files import read_parquet
from residual_mass.metrics import KL
from residual_mass.paper.cells import ALL_TASKS
from residual_mass.paper.figures.style import (
    DISTANCE,
    GREY,
    PERCENT,
    against_budget,
    figure,
    finish,
    looks_of,
    make_logarithmic,
    panels,
)
from residual_mass.paper.frames import read_results
from residual_mass.paper.titles import method_title, text_title, trained_at_title
from residual_mass.spec.columns import FIDELITY_COLUMNS, FOLLOWING, GREEDY, OWN
from residual_mass.spec.specs import FigureSpec
from residual_mass.statistics import equal_parts, percentile_interval, resampled

TOKENS = ["text", "continuation", "state", "method", "budget_percent", "maps", "task", "index", "position", "full_nll"]
PROBABILITY_GROUPS = 4
"""Number of equally large groups of tokens by their probability under full attention."""
SEEN = ("nothing", "the token", "its bigram")
PANELS = (
    ("(b) by how likely Full finds the token", "probability under Full (tokens)"),
    ("(c) by what the prompt has of the token", "seen in the prompt (tokens)"),
    ("(d) by place in the continuation", "place (tokens)"),
)
"""Titles and labels of the panels with means of groups."""
OTHER_MAPS = (("v", "--"), ("D", ":"), ("P", "-."))
"""Markers and lines of maps that are not the study's own."""
DODGE = 0.8
"""Width that the marks of all methods take; groups are at distance 1."""
UNSHOWN_SHARE = 0.05
"""Share of the tokens, those with the smallest distances, that the distribution leaves out."""


@figure
def fidelity(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Distance of the next token from that of full attention, on continuations that every method is given: the
    Kullback-Leibler divergence, averaged over tokens and documents, against the budget. Corpora are continued by their
    own text, prompts of benchmarks by the right answer. Feature maps are those of the study, unless the legend
    names the length that they were trained at.
    """
    rows = _distances_on(spec.texts, data)
    other = ~rows["maps"].isin(["", *spec.maps])
    looks = looks_of(rows["method"])
    for maps, (marker, line) in zip(rows.loc[other, "maps"].unique(), cycle(OTHER_MAPS), strict=False):
        looks[maps] = {"color": GREY, "marker": marker, "linestyle": line}
    documents = rows.groupby(["length", "text"])["documents"].transform("first")
    unit = np.where(rows["continuation"] == FOLLOWING, " documents", " prompts")
    titles = rows["method"].map(method_title)
    places = rows["text"].map(text_title) + ", " + rows["length"]
    rows["arm"] = rows["method"].mask(other, rows["maps"])
    rows["title"] = titles.mask(other, rows["maps"].map(trained_at_title))
    rows["place"] = places + ": " + documents.astype(str) + unit
    figure = against_budget(rows, DISTANCE, looks)
    figure.axes[-1].fill_between([], [], color=GREY, alpha=0.25, linewidth=0, label="95% interval")
    return finish(figure, spec, ": distance of the next token from full attention")


def _distances_on(texts: Sequence[str], data: Sequence[Path]) -> pd.DataFrame:
    """Returns the KL of all arms in their own state, in the order of the files and of the texts."""
    frames = [read_results(path, FIDELITY_COLUMNS, "fidelity") for path in data]
    of_texts = [frame[frame["text"] == text] for frame in frames for text in texts]
    rows = pd.concat(of_texts, ignore_index=True)
    shown = rows["metric"] == KL.name
    shown &= rows["task"] == ALL_TASKS
    shown &= rows["state"] == OWN
    shown &= rows["continuation"] != GREEDY
    return rows[shown].copy()


@figure
def fidelity_tokens(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Distance of single tokens from full attention at one budget: the share of tokens that are at least that far off
    (a), and the mean distance by quarter of the tokens' probability under full attention (b), by whether the prompt has
    nothing of the token, the token, or the bigram that it ends (c), and by place in the continuation (d). Intervals are
    over documents.
    """
    rows = _tokens_shown(spec, data[0])
    figure, (distribution, *means) = panels(1.7, 4, 2, sharex=False, sharey=False)
    looks = looks_of(rows["method"])
    methods = rows.groupby("method", sort=False)
    for number, (method, tokens) in enumerate(methods):
        tokens = tokens.sort_values(["task", "index", "position"], ignore_index=True)
        look = looks[method]
        _draw_distribution(distribution, tokens["kl"], look)
        shift = DODGE * ((number + 0.5) / len(methods) - 0.5)
        for axis, (group, names) in zip(means, _groups(tokens), strict=True):
            points = _group_means(spec, tokens, group)
            sizes = points["tokens"]
            labels = [f"{names[part]}\n({size:,.0f})" for part, size in sizes.items()]
            _draw_means(axis, points, shift, look, method_title(method))
            axis.set_xticks(np.arange(len(points)), labels, fontsize=6.5)
            axis.set_xlim(-0.5, len(points) - 0.5)
    far = rows.loc[rows["kl"] > 0, "kl"]
    distribution.set_xlim(far.quantile(UNSHOWN_SHARE), far.max())
    make_logarithmic(distribution.xaxis, distribution.yaxis)
    distribution.yaxis.set_major_formatter(PERCENT)
    distribution.set(title="(a) tokens at least this far off", xlabel=DISTANCE, ylabel="share of tokens")
    for axis, (title, label) in zip(means, PANELS, strict=True):
        axis.sharey(means[0])
        axis.set(title=title, xlabel=label, ylabel=f"mean KL, {KL.unit}")
    make_logarithmic(means[0].yaxis)
    means[-1].plot([], [], color=GREY, linestyle="", marker="|", markersize=8, label="95% interval")
    return finish(figure, spec, f": single tokens at a budget of {spec.budget_percent:g}%")


def _tokens_shown(spec: FigureSpec, path: Path) -> pd.DataFrame:
    """Returns the tokens of the figure's text, budget and maps, in the arms' own state."""
    rows = read_parquet(path, [*TOKENS, "kl", "seen"], "force").astype({"kl": float})
    shown = rows["text"] == spec.texts[0]
    shown &= rows["state"] == OWN
    shown &= rows["continuation"] != GREEDY
    shown &= rows["budget_percent"] == spec.budget_percent
    shown &= rows["maps"].isin(["", *spec.maps])
    return rows[shown]


def _draw_distribution(axis: Axes, distances: pd.Series, look: Mapping[str, Any]) -> None:
    """Draws the share of tokens with at least a distance against that distance."""
    ascending = distances.sort_values(ignore_index=True)
    at_least = 1 - ascending.index / len(ascending)
    axis.step(ascending, at_least, color=look["color"], linestyle=look["linestyle"])


def _draw_means(axis: Axes, points: pd.DataFrame, shift: float, look: Mapping[str, Any], label: str) -> None:
    """Draws the means of groups with their intervals, beside those of other methods."""
    x = np.arange(len(points)) + shift
    axis.vlines(x, points["low"], points["high"], color=look["color"], linewidth=1)
    axis.plot(x, points["mean"], **{**look, "linewidth": 0.6}, label=label)


def _groups(tokens: pd.DataFrame) -> list[tuple[pd.Series, Sequence[str]]]:
    """Returns for each panel the number of each token's group, and the groups' names."""
    part = equal_parts(tokens["full_nll"], PROBABILITY_GROUPS)
    largest = tokens["full_nll"].groupby(part).max()
    likely = [f"\N{GREATER-THAN OR EQUAL TO} {math.exp(-nll):.3g}" for nll in largest]
    # Positions 1, 2, 3 to 4, 5 to 8 and so on, up to the last.
    octave = np.ceil(np.log2(tokens["position"] + 1)).astype(int)
    last = tokens["position"].max() + 1
    octaves = []
    for number in range(octave.max() + 1):
        low = 2**number // 2 + 1
        high = min(2**number, last)
        octaves.append(f"{low}\N{EN DASH}{high}" if low < high else f"{high}")
    by_probability = (part, [*likely[:-1], "less"])
    by_what_was_seen = (tokens["seen"], SEEN)
    return [by_probability, by_what_was_seen, (octave, octaves)]


def _group_means(spec: FigureSpec, tokens: pd.DataFrame, group: pd.Series) -> pd.DataFrame:
    """Returns for each group its number of `tokens`, their `mean`, and the interval `low` to `high` over resampled
    documents, which is NaN for a single document and if a resample may lack the group.
    """
    document = tokens.groupby(["task", "index"]).ngroup()
    table = pd.crosstab(document, group, tokens["kl"], aggfunc=["sum", "count"]).fillna(0)
    sums = table["sum"]
    sizes = table["count"]
    assert spec.score is not None, "the spec of a figure with intervals of its own has `score`"
    drawn = resampled(len(table), spec.score.bootstrap_resamples, spec.score.seed, spec.texts[0])
    counts = np.concatenate(list(drawn))
    with np.errstate(invalid="ignore"):  # a resample may lack a group
        draws = (counts @ sums.to_numpy()) / (counts @ sizes.to_numpy())
    low = high = np.nan
    if len(table) > 1:
        low, high = percentile_interval(draws.T)
    mean = sums.sum() / sizes.sum()
    return pd.DataFrame({"tokens": sizes.sum(), "mean": mean, "low": low, "high": high})
