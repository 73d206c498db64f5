"""Figures of the distance from full attention: against the budget, and token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from residual_mass.benchmarks.columns import FIDELITY, FOLLOWING, GREEDY, OWN
from residual_mass.benchmarks.statistics import MeanScore, resampled
from residual_mass.files import read_csv, read_parquet
from residual_mass.metrics import KL
from residual_mass.paper.cells import ALL_TASKS
from residual_mass.paper.figures.registry import figure
from residual_mass.paper.figures.style import (
    GREY,
    TEXT_WIDTH,
    Look,
    finish,
    label_outer,
    looks_of,
    make_x_logarithmic,
    plain,
    tick_logarithmic,
)
from residual_mass.paper.figures.summaries import equal_parts
from residual_mass.paper.titles import benchmark_title, method_title, trained_at_title
from residual_mass.study.specs import FigureSpec

Arm = tuple[str, str, bool]
"""Method, label of the maps, and whether these are `other` than the main ones."""
ARM = ["method", "maps", "other"]
TOKENS = ["method", "budget_percent", "maps", "task", "index", "position", "full_nll", "kl", "seen"]
DISTANCE = f"{plain(KL.title)}, {KL.unit}"
OTHERS = tuple(Look(GREY, marker, line) for marker, line in (("v", "--"), ("D", ":"), ("P", "-.")))
"""Of maps that were trained on texts of other lengths than the main ones."""
LINE = {"markersize": 3.5, "linewidth": 1.3}
PARTS = 4
"""Groups of equal size by how likely full attention finds the token."""
SEEN = ("nothing", "the token", "its bigram")
PANELS = {
    "likelihood": ("(b) by how likely Full finds the token", "probability under Full (tokens)"),
    "seen": ("(c) by what the prompt has of the token", "seen in the prompt (tokens)"),
    "position": ("(d) by place in the continuation", "place (tokens)"),
}
"""Title and label of the panels with means of groups."""
COLUMNS = 3
"""Most columns of the legend that fit the width."""
LONG = 40
"""Characters of an entry beyond which one fewer fits."""
DODGE = 0.09
"""Distance between the marks of two methods, where that between groups is 1."""
LEFT_OUT = 0.05
"""Share of the tokens, those with the smallest distances, that the distribution need not show."""


def fidelity_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (length, text, arm) in the order of the files, of `spec.texts` and of the rows: `value` of KL
    with its interval, and whether the arm's maps are `other` than the main ones.

    Raises:
        ValueError: a file has no row of a text.
    """
    parts = []
    for path in data:
        frame = pd.DataFrame(read_csv(path, FIDELITY, "fidelity"))
        kept = (frame["metric"] == KL.name) & (frame["task"] == ALL_TASKS) & (frame["state"] == OWN)
        rows = frame[kept & (frame["continuation"] != GREEDY)]
        parts += [_of_text(path, rows, text, "fidelity") for text in spec.texts]
    points = pd.concat(parts, ignore_index=True)
    for name in ("budget_percent", "value", "ci_low", "ci_high", "documents"):
        points[name] = pd.to_numeric(points[name])
    return points.assign(other=_others(spec, points))


def fidelity_tokens_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Computes the points of four panels, by `panel` and `method`, of the tokens of one text under the main maps.

    distribution: a point per token with a distance above 0, `x`, and the share `y` of tokens with at least that.
    likelihood, seen, position: a point per group of tokens, number `x` and name `label`, with the mean `y` over its
    `tokens` and the interval `low` to `high` over documents, which is empty where a resample may lack the group.

    Raises:
        ValueError: the file lacks the text or the budget.
    """
    (path,) = data
    frame = read_parquet(path, [*TOKENS, "text", "continuation", "state"], "force")
    rows = _of_text(path, frame[(frame["state"] == OWN) & (frame["continuation"] != GREEDY)], spec.texts[0], "force")
    rows = rows[(rows["budget_percent"] == spec.budget_percent) & ~_others(spec, rows)]
    if rows.empty:
        raise ValueError(f"{path}: no tokens at a budget of {spec.budget_percent:g}%; run the force stage with it")
    parts = []
    for method, of_method in rows.groupby("method", sort=False):
        tokens = of_method.sort_values(["task", "index", "position"], ignore_index=True)
        panels = {"distribution": _distribution(tokens["kl"])}
        for panel, (group, names) in _groups(tokens).items():
            panels[panel] = _group_means(spec, tokens, group, names)
        parts += [part.assign(panel=panel, method=method) for panel, part in panels.items()]
    return pd.concat(parts, ignore_index=True)


def _of_text(path: Path, rows: pd.DataFrame, text: str, stage: str) -> pd.DataFrame:
    found = rows[rows["text"] == text]
    if found.empty:
        raise ValueError(f"{path}: has no rows of {text}; run the {stage} stage with it")
    return found


def _others(spec: FigureSpec, rows: pd.DataFrame) -> pd.Series:
    return ~rows["maps"].isin(["", *spec.maps])


def _distribution(kl: pd.Series) -> pd.DataFrame:
    ascending = np.sort(kl.to_numpy(float))
    shares = 1 - np.arange(len(ascending)) / len(ascending)
    return pd.DataFrame({"x": ascending, "y": shares})[ascending > 0]


def _groups(tokens: pd.DataFrame) -> dict[str, tuple[pd.Series, Sequence[str]]]:
    """By panel the number of each token's group, and the groups' names."""
    part = equal_parts(tokens["full_nll"], min(PARTS, len(tokens)))
    least = [f"\N{GREATER-THAN OR EQUAL TO} {math.exp(-nll):.3g}" for nll in tokens["full_nll"].groupby(part).max()]
    octave = np.ceil(np.log2(tokens["position"] + 1)).astype(int)
    octaves = [_octave(number, tokens["position"].max() + 1) for number in range(octave.max() + 1)]
    return {"likelihood": (part, [*least[:-1], "less"]), "seen": (tokens["seen"], SEEN), "position": (octave, octaves)}


def _octave(number: int, last: int) -> str:
    """The tokens of positions 1, 2, 3 to 4, 5 to 8 and so on, up to the last."""
    low, high = 2**number // 2 + 1, min(2**number, last)
    return f"{low}\N{EN DASH}{high}" if low < high else f"{high}"


def _group_means(spec: FigureSpec, tokens: pd.DataFrame, group: pd.Series, names: Sequence[str]) -> pd.DataFrame:
    """The mean of each group over its tokens, with resampled documents."""
    document = tokens.groupby(["task", "index"]).ngroup()
    table = pd.crosstab(document, group, tokens["kl"], aggfunc=["sum", "count"]).fillna(0)
    sums, sizes = table["sum"], table["count"]
    assert spec.score is not None, "the spec of a figure with intervals of its own has `score`"
    resampling = spec.score.bootstrap_resamples, spec.score.seed, spec.texts[0]
    counts = np.concatenate(list(resampled(len(table), *resampling)))
    with np.errstate(invalid="ignore"):  # a resample may lack a group
        draws = (counts @ sums.to_numpy()) / (counts @ sizes.to_numpy())
    points = []
    for x, number in enumerate(sums):
        size = int(sizes[number].sum())
        mean = MeanScore(sums[number].sum() / size, None, draws[:, x])
        low, high = mean.interval if len(table) > 1 else (np.nan, np.nan)
        points.append({"x": x, "label": names[number], "y": mean.value, "low": low, "high": high, "tokens": size})
    return pd.DataFrame(points)


@figure(
    "fidelity",
    fidelity_points,
    caption=(
        r"Distance of the next token from that of full attention, on continuations that every method is given: the "
        r"Kullback-Leibler divergence, averaged over tokens and documents, against the budget. Corpora go on as they "
        r"do; the prompts of benchmarks are continued by the right answer. Feature maps are those of the study, unless "
        r"the legend names the length that they were trained at."
    ),
)
def draw_fidelity(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws a row of panels per length and a column per text, on common axes, with a line per method and maps."""
    lengths, texts = (list(dict.fromkeys(points[name])) for name in ("length", "text"))
    looks = _looks(points)
    figure = Figure(figsize=(TEXT_WIDTH, 1.0 + 1.7 * len(lengths)), layout="constrained")
    axes = figure.subplots(len(lengths), len(texts), sharex=True, sharey=True, squeeze=False)
    for (length, text), panel in points.groupby(["length", "text"], sort=False):
        axis = axes[lengths.index(length), texts.index(text)]
        for arm, line in panel.groupby(ARM, sort=False):
            _draw_line(axis, line.sort_values("budget_percent"), looks[arm])
        of_corpus = panel["continuation"].iloc[0] == FOLLOWING
        counted = f"{panel['documents'].iloc[0]} {'documents' if of_corpus else 'prompts'}"
        axis.set_title(f"{plain(benchmark_title(text))}, {length}: {counted}", fontsize=8)
        axis.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.5)
    first = axes[0, 0]
    first.set_yscale("log")
    tick_logarithmic(first.yaxis, *first.get_ylim())
    budgets = sorted(set(points["budget_percent"]))
    make_x_logarithmic(first, budgets[0], budgets[-1])
    first.set_xticks(budgets)
    label_outer(axes.ravel(), "budget, % of the prefix", DISTANCE, size=8)
    handles = [_handle(arm, look) for arm, look in looks.items()]
    band = Patch(facecolor=GREY, alpha=0.25, linewidth=0, label="95% interval")
    title = f"{plain(spec.title)}: distance of the next token from full attention"
    fitting = COLUMNS if max(len(handle.get_label()) for handle in handles) <= LONG else COLUMNS - 1
    finish(figure, [*handles, band], title, size=7.5, columns=min(fitting, math.ceil((len(handles) + 1) / 2)))
    return figure


def _draw_line(axis: Axes, line: pd.DataFrame, look: Look) -> None:
    x = line["budget_percent"]
    axis.fill_between(x, line["ci_low"], line["ci_high"], color=look.colour, alpha=0.15, linewidth=0)
    axis.plot(x, line["value"], color=look.colour, marker=look.marker, linestyle=look.line, **LINE)


@figure(
    "fidelity_tokens",
    fidelity_tokens_points,
    caption=(
        r"The distance from full attention token by token at one budget: the share of tokens at least so far off (a), "
        r"and its mean over quarters of the tokens by their probability under full attention (b), over tokens of which "
        r"the prompt has nothing, the token, or the bigram that it ends (c), and over places in the continuation (d). "
        r"Intervals are over documents."
    ),
)
def draw_fidelity_tokens(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws how many tokens have a large distance, and the mean distance of groups of tokens."""
    figure = Figure(figsize=(TEXT_WIDTH, 4.4), layout="constrained")
    distribution, *means = figure.subplots(2, 2).ravel()
    for axis in figure.axes:
        axis.tick_params(labelsize=7)
    looks = _looks(points.assign(maps="", other=False))
    panels = {name: panel for name, panel in points.groupby("panel", sort=False)}
    _draw_distribution(distribution, panels["distribution"], looks)
    for axis, (name, (title, label)) in zip(means, PANELS.items(), strict=True):
        axis.sharey(means[0])
        _draw_means(axis, panels[name], looks)
        axis.set_title(title, fontsize=8)
        axis.set_xlabel(label, fontsize=7.5)
        axis.set_ylabel(f"mean {DISTANCE}", fontsize=7.5)
    means[0].set_yscale("log")
    tick_logarithmic(means[0].yaxis, *means[0].get_ylim())
    title = f"{plain(spec.title)}: single tokens at a budget of {spec.budget_percent:g}%"
    interval = Line2D([], [], color=GREY, linestyle="", marker="|", markersize=8, label="95% interval")
    finish(figure, [*(_handle(arm, look) for arm, look in looks.items()), interval], title)
    return figure


def _draw_distribution(axis: Axes, points: pd.DataFrame, looks: Mapping[Arm, Look]) -> None:
    for (method, *_), look in looks.items():
        line = points[points["method"] == method]
        axis.step(line["x"], line["y"], color=look.colour, linestyle=look.line, linewidth=1.3)
    low, high = points.groupby("method")["x"].quantile(LEFT_OUT).min(), points["x"].max()
    make_x_logarithmic(axis, low, high)
    axis.set_yscale("log")
    tick_logarithmic(axis.yaxis, points["y"].min(), 1)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.10g}%"))
    axis.set_title("(a) tokens at least this far off", fontsize=8)
    axis.set_xlabel(DISTANCE, fontsize=7.5)
    axis.set_ylabel("share of tokens", fontsize=7.5)


def _draw_means(axis: Axes, points: pd.DataFrame, looks: Mapping[Arm, Look]) -> None:
    """Draws a mark per group and method, with the number of the group's tokens below its name."""
    for number, ((method, *_), look) in enumerate(looks.items()):
        line = points[points["method"] == method]
        x = line["x"] + DODGE * (number - (len(looks) - 1) / 2)
        axis.vlines(x, line["low"], line["high"], color=look.colour, linewidth=1)
        axis.plot(x, line["y"], color=look.colour, marker=look.marker, markersize=3.5, linewidth=0.6)
    groups = points.drop_duplicates("x")
    counts = zip(groups["label"], groups["tokens"], strict=True)
    axis.set_xticks(groups["x"], [f"{label}\n({tokens:,.0f})" for label, tokens in counts], fontsize=6.5)
    axis.set_xlim(-0.5, len(groups) - 0.5)


def _looks(points: pd.DataFrame) -> dict[Arm, Look]:
    """The look of each method with its maps."""
    arms = list(dict.fromkeys(points[ARM].itertuples(index=False, name=None)))
    own, others = looks_of(method for method, *_ in arms), cycle(OTHERS)
    return {arm: next(others) if arm[2] else own[arm[0]] for arm in arms}


def _handle(arm: Arm, look: Look) -> Line2D:
    method, maps, other = arm
    label = trained_at_title(maps) if other else method_title(method)
    return Line2D([], [], color=look.colour, marker=look.marker, linestyle=look.line, label=label, **LINE)
