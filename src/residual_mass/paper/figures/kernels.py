"""Figures of exact kernels and of their estimates by feature maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from residual_mass.files import read_parquet
from residual_mass.paper.figures.captured import HEAD, TEXT, rows_at_budget
from residual_mass.paper.figures.registry import figure
from residual_mass.paper.figures.style import (
    BLUE,
    GREY,
    TEXT_WIDTH,
    VERMILLION,
    Look,
    finish,
    label_outer,
    make_x_logarithmic,
    panel_axes,
    plain,
    with_minus_sign,
)
from residual_mass.paper.figures.summaries import bulk, quartiles
from residual_mass.paper.titles import OURS, variant_title
from residual_mass.study.specs import FigureSpec

KEYS = [*TEXT, "maps", *HEAD, "query", "position", "retrieved", "log_kernel", "log_phi", "budget_percent", "k"]
SHOWN = 4000
"""Most points of one kind in a panel."""
FEW = 500
"""Up to this number, points are drawn nearly opaque."""
ROWS_SHOWN = 100
"""Most attention rows in the panel of errors."""
MARGIN = 0.03
"""Margin of a panel as a share of its height, so that points on the border are fully visible."""
RANKS = 60
"""Approximate number of bins of ranks."""
REACH = 1.0
"""Most that a panel extends beyond the range of the kernels for far-off scores, in multiples of that range."""

CLOUDS = {"unretrieved": Look(BLUE, "o"), "retrieved": Look(VERMILLION, "^")}
EXACT, SCORE = Look("black"), Look(BLUE, line="--")
BORDER = "+"
OWN, VARIANT = Look(BLUE, "o"), Look(VERMILLION, "x")


def kernel_sanity_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Computes the points of three panels about the kernels of one head under the main maps, by `panel` and `series`.

    scores: a point per key, thinned, with the log of the exact kernel as `x` and of the score as `y`, both minus the
    log of the query's mid-region mass; series retrieved and unretrieved, with `total` points each. Points outside of
    `bottom` and `top`, the limits of both axes, are moved to the border; `left_out` counts them per series.
    ranks: a point per bin of ranks by exact kernel, with median `y` and quartiles `low` and `high` over queries and the
    bin's ranks, series exact and score; `x` is the bin's geometric mean rank.
    errors: a point per (pack, query), thinned, with the same rows for both series, e_topk and e_sub; means: their mean.
    """
    kernels, heads = data
    keys = _keys(kernels, spec.maps[:1])
    mass = _log_mass(keys)
    scores = pd.DataFrame({"x": keys["log_kernel"] - mass, "y": keys["log_phi"] - mass})
    scores = scores.assign(series=keys["retrieved"].map({True: "retrieved", False: "unretrieved"}))
    limits = _limits([scores["y"]], bulk(scores["x"].to_numpy())[0], scores["x"].max())
    ranks = keys["log_kernel"].groupby(keys["query"]).rank(method="first", ascending=False)
    errors = _head_rows(spec, heads, keys)
    parts = {
        "scores": pd.concat([_shown(kind, limits, limits) for _, kind in scores.groupby("series")]),
        "ranks": _by_rank(scores.assign(rank=ranks)),
        "errors": _series(_every(errors, ROWS_SHOWN)),
        "means": _series(errors.mean().to_frame().T),
    }
    points = pd.concat([part.assign(panel=panel) for panel, part in parts.items()], ignore_index=True)
    facts = {name: keys[name].iloc[0] for name in [*HEAD, "k"]}
    return points.assign(**facts, rows=len(errors), bottom=limits[0], top=limits[1])


def ablation_kernel_fidelity_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Computes log kernel `x` and log score `y` of unretrieved keys: one row per (maps in `spec.maps`, key), thinned.

    Kernels far out and scores outside of `bottom` and `top` are moved to the border and marked as `outside`. Constant
    for a set of maps, over all its keys: `rms` of y - x in nats, their number `total`, the number `left_out` of those
    outside, and `spearman`, the rank correlation of x and y within a query, averaged over queries.

    Raises:
        ValueError: every key is retrieved.
    """
    (file,) = data
    keys = _keys(file, spec.maps)
    rest = keys[~keys["retrieved"]].rename(columns={"log_kernel": "x", "log_phi": "y"})
    if rest.empty:
        raise ValueError(f"{file}: every key is retrieved; give kernels of a smaller budget")
    kernels = bulk(rest["x"].to_numpy())
    limits = _limits([scores for _, scores in rest.groupby("maps")["y"]], *kernels)
    parts = []
    for maps in spec.maps:
        rows = rest.loc[rest["maps"] == maps, ["query", "x", "y"]]
        rms = math.sqrt(((rows["y"] - rows["x"]) ** 2).mean())
        shown = _shown(rows[["x", "y"]], kernels, limits)
        parts.append(shown.assign(maps=maps, rms=rms, spearman=_spearman(rows)))
    facts = {name: keys[name].iloc[0] for name in HEAD}
    return pd.concat(parts, ignore_index=True).assign(**facts, bottom=limits[0], top=limits[1])


@figure(
    "kernel_sanity",
    kernel_sanity_points,
    caption=(
        r"One head seen closely: the feature maps' score of a key against its exact kernel (a), both by rank of the "
        r"exact kernel (b), and the errors of its attention rows without and with completion (c)."
    ),
)
def draw_kernel_sanity(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws scores against kernels, both over the rank, and the head's error with and without the residual."""
    figure = Figure(figsize=(TEXT_WIDTH, 2.9), layout="constrained")
    panels = {name: panel for name, panel in points.groupby("panel", sort=False)}
    scores, ranks, errors = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1.2, 1.2, 0.75]})
    _draw_scores(scores, panels["scores"])
    _draw_ranks(ranks, panels["ranks"], points["k"].iloc[0])
    _draw_errors(errors, panels["errors"], panels["means"], points["rows"].iloc[0])
    kinds = [name for name in CLOUDS if name in set(panels["scores"]["series"])]
    handles = [
        *(_points_handle(CLOUDS[name], name) for name in kinds),
        *_border_handles(panels["scores"]),
        Line2D([], [], color="black", linewidth=0.7, label="score = kernel"),
        Line2D([], [], color=EXACT.colour, linestyle=EXACT.line, label="exact kernel"),
        Line2D([], [], color=SCORE.colour, linestyle=SCORE.line, label=r"$\phi$ score"),
        Patch(color=GREY, alpha=0.25, linewidth=0, label="middle half"),
        Line2D([], [], color="black", linestyle=":", linewidth=0.8, label="$K$"),
        Line2D([], [], color=GREY, linewidth=0.4, marker=".", markersize=3, label="attention row"),
        Line2D([], [], color="black", marker="D", markersize=3.5, linewidth=1.2, label="mean"),
    ]
    layer, head = points[HEAD].iloc[0]
    title = f"{plain(spec.title)}, layer {layer}, head {head}, $K = {points['k'].iloc[0]}$"
    finish(figure, handles, f"{title}\n(a) shows {_counted(panels['scores'])}", size=7)
    return figure


@figure(
    "ablation_kernel_fidelity",
    ablation_kernel_fidelity_points,
    caption=(
        r"Scores of unretrieved keys against their exact kernels, under the study's own feature maps and under those "
        r"of each ablation, for one head. On the line, a score equals the kernel."
    ),
)
def draw_ablation_kernel_fidelity(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws one panel per variant, on top of the study's own maps."""
    own, *variants = spec.maps
    rows = math.ceil(len(variants) / 2)
    columns = min(len(variants), 2)
    figure = Figure(figsize=(TEXT_WIDTH, 0.9 + 2.0 * rows), layout="constrained")
    axes = panel_axes(figure, rows, columns, len(variants))
    low, bottom, top = points["x"].min(), points["bottom"].iloc[0], points["top"].iloc[0]
    margin = MARGIN * (top - bottom) or 1.0
    for letter, axis, maps in zip(ascii_lowercase, axes, variants, strict=False):
        lines = [f"({letter}) {_variant(maps)}"]
        axis.axline((low, low), slope=1, color="black", linewidth=0.7, zorder=3)
        for each, look, name in ((own, OWN, "own"), (maps, VARIANT, "variant")):
            cloud = points[points["maps"] == each]
            _draw_cloud(axis, cloud, look)
            lines.append(f"{name}: {_fidelity(cloud.iloc[0])}")
        axis.set_title("\n".join(lines), fontsize=7, linespacing=1.3)
        axis.set_ylim(bottom - margin, top + margin)
        axis.tick_params(labelsize=7)
    score = r"$\log\,\langle \phi_{\mathrm{q}}(q), \phi_{\mathrm{k}}(k_j) \rangle$"
    label_outer(axes, r"log kernel $s_j$", score, size=8)
    handles = [
        _points_handle(OWN, f"own maps ({plain(own)})"),
        _points_handle(VARIANT, "the panel's variant"),
        *_border_handles(points),
        Line2D([], [], color="black", linewidth=0.7, label="score = kernel"),
    ]
    layer, head, total = points[[*HEAD, "total"]].iloc[0]
    shown = f"{points['maps'].eq(own).sum():,} of {total:,} unretrieved keys shown; Spearman: mean over queries"
    finish(figure, handles, f"{plain(spec.title)}, layer {layer}, head {head}\n{shown}", size=7)
    return figure


def _keys(path: Path, maps: Sequence[str]) -> pd.DataFrame:
    """Reads the rows of the given maps, ordered by maps, query and position."""
    frame = read_parquet(path, KEYS, "kernels")
    chosen = frame[frame["maps"].isin(maps)].astype({"log_kernel": float, "log_phi": float, "maps": str})
    return chosen.sort_values(["maps", "query", "position"], ignore_index=True)


def _head_rows(spec: FigureSpec, path: Path, keys: pd.DataFrame) -> pd.DataFrame:
    """Reads `e_topk` and `e_sub` of the kernels' head, one row per (pack, query), in order."""
    rows = rows_at_budget(path, [*HEAD, "pack", "query", "e_topk", "e_sub"], spec.budget_percent)
    layer, head = keys[HEAD].iloc[0]
    chosen = rows[rows["layer"].eq(layer) & rows["head"].eq(head)].sort_values(["pack", "query"])
    return chosen[["e_topk", "e_sub"]].astype(float)


def _log_mass(keys: pd.DataFrame) -> pd.Series:
    """Returns log Z_M of every row's query."""
    logs = keys["log_kernel"]
    largest = logs.groupby(keys["query"]).transform("max")
    return largest + np.log(np.exp(logs - largest).groupby(keys["query"]).transform("sum"))


def _by_rank(scores: pd.DataFrame) -> pd.DataFrame:
    edges = np.unique(np.geomspace(1, scores["rank"].max() + 1, RANKS + 1).round())
    number = pd.Series(np.searchsorted(edges, scores["rank"], side="right") - 1, scores.index)
    parts = []
    for series, column in (("exact", "x"), ("score", "y")):
        part = quartiles(scores[column].groupby(number))
        parts.append(part.assign(series=series, x=np.sqrt(edges[:-1] * (edges[1:] - 1))[part.index]))
    return pd.concat(parts)


def _series(errors: pd.DataFrame) -> pd.DataFrame:
    """Reshapes errors to one row per (series, row), with the row number as `x`."""
    parts = [pd.DataFrame({"series": name, "x": range(len(errors)), "y": errors[name].to_numpy()}) for name in errors]
    return pd.concat(parts)


def _shown(points: pd.DataFrame, x: tuple[float, float], y: tuple[float, float]) -> pd.DataFrame:
    """Thins points to at most SHOWN, evenly over the ranks of `x`, and moves those outside of the ranges `x` and `y` to
    the border, marked as `outside`. Adds the number of all points, `total`, and of those outside, `left_out`.
    """
    outside = ~(points["x"].between(*x) & points["y"].between(*y))
    placed = points.assign(x=points["x"].clip(*x), y=points["y"].clip(*y), outside=outside)
    order = points.sort_values(["x", "y"]).index
    return _every(placed.loc[order], SHOWN).assign(total=len(points), left_out=outside.sum())


def _every(frame: pd.DataFrame, count: int) -> pd.DataFrame:
    """Thins to at most `count` evenly spaced rows, including the first and the last."""
    if len(frame) <= count:
        return frame
    return frame.iloc[np.linspace(0, len(frame) - 1, count).round().astype(int)]


def _limits(scores: Sequence[pd.Series], low: float, high: float) -> tuple[float, float]:
    """Extends the range of kernels, `low` to `high`, to the bulk of all scores, by at most REACH times itself."""
    reach = REACH * max(high - low, 1.0)
    lows, highs = zip(*(bulk(each.to_numpy()) for each in scores), strict=True)
    return min(low, max(min(lows), low - reach)), max(high, min(max(highs), high + reach))


def _spearman(keys: pd.DataFrame) -> float:
    """Averages the rank correlation of `x` and `y` within each query, so that level differences between queries do not
    count. Ignores queries in which `x` or `y` is constant; NaN if none remains.
    """
    correlations = [
        np.corrcoef(rows["x"].rank(), rows["y"].rank())[0, 1]
        for _, rows in keys.groupby("query")
        if rows["x"].nunique() > 1 and rows["y"].nunique() > 1
    ]
    return float(np.mean(correlations)) if correlations else math.nan


def _draw_scores(axis: Axes, points: pd.DataFrame) -> None:
    for name, look in CLOUDS.items():
        _draw_cloud(axis, points[points["series"] == name], look)
    low, high = points["bottom"].iloc[0], points["top"].iloc[0]
    margin = MARGIN * (high - low) or 1.0
    axis.axline((low, low), slope=1, color="black", linewidth=0.7, zorder=3)
    axis.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axis.set_title("(a) scores and kernels", fontsize=8)
    axis.set_xlabel(r"log kernel $-\,\log Z_{\mathcal{M}}$", fontsize=8)
    axis.set_ylabel(r"log $\phi$ score $-\,\log Z_{\mathcal{M}}$", fontsize=8)
    axis.tick_params(labelsize=7)


def _draw_ranks(axis: Axes, points: pd.DataFrame, k: int) -> None:
    for name, look in (("exact", EXACT), ("score", SCORE)):
        curve = points[points["series"] == name]
        marker = "." if len(curve) == 1 else ""  # a line through one point is invisible
        axis.fill_between(curve["x"], curve["low"], curve["high"], color=look.colour, alpha=0.2, linewidth=0)
        axis.plot(curve["x"], curve["y"], color=look.colour, linestyle=look.line, linewidth=1.2, marker=marker)
    if k > 0:
        axis.axvline(k, color="black", linestyle=":", linewidth=0.8)
    make_x_logarithmic(axis, 1, points["x"].max())
    axis.set_title("(b) by rank", fontsize=8)
    axis.set_xlabel("rank by exact kernel", fontsize=8)
    axis.set_ylabel(r"log kernel or score $-\,\log Z_{\mathcal{M}}$", fontsize=8)
    axis.tick_params(labelsize=7)


def _draw_errors(axis: Axes, points: pd.DataFrame, means: pd.DataFrame, rows: int) -> None:
    wide = points.pivot(index="x", columns="series", values="y")
    for _, row in wide.iterrows():
        axis.plot([0, 1], row[["e_topk", "e_sub"]], color=GREY, alpha=0.35, linewidth=0.4, marker=".", markersize=3)
    mean = means.set_index("series")["y"]
    axis.plot([0, 1], mean[["e_topk", "e_sub"]], color="black", marker="D", markersize=3.5, linewidth=1.2)
    axis.set_xticks([0, 1], [f"Top-$K$\n{mean['e_topk']:.3f}", f"Top-$K{{+}}\\phi$\n{mean['e_sub']:.3f}"])
    axis.set_xlim(-0.35, 1.35)
    axis.set_ylim(bottom=0)
    axis.set_title(f"(c) error, {rows:,} rows", fontsize=8)
    axis.set_ylabel("relative error", fontsize=8)
    axis.tick_params(labelsize=7)


def _draw_cloud(axis: Axes, points: pd.DataFrame, look: Look) -> None:
    """Draws points as pixels, because thousands of vectors make a large PDF; points on the border have own markers."""
    alpha = 0.3 if len(points) > FEW else 0.8
    outside = points["outside"].astype(bool)
    for chosen, marker in ((~outside, look.marker), (outside, BORDER)):
        x, y = points["x"][chosen], points["y"][chosen]
        line_width = 0.0 if marker in "o^" else 0.4
        axis.scatter(x, y, s=5, c=look.colour, marker=marker, alpha=alpha, linewidths=line_width, rasterized=True)


def _border_handles(points: pd.DataFrame) -> list[Line2D]:
    """Returns a legend entry if there are points on the border."""
    return [_points_handle(Look(GREY, BORDER), "outside, on the border")] if points["outside"].any() else []


def _points_handle(look: Look, label: str) -> Line2D:
    return Line2D([], [], color=look.colour, marker=look.marker, markersize=3.5, linestyle="", label=label)


def _counted(points: pd.DataFrame) -> str:
    """Says how many keys of every kind a panel shows, and how many lie outside of it."""
    kinds = [kind for _, kind in points.groupby("series", sort=False)]
    shown = [f"{len(kind):,} of {kind['total'].iloc[0]:,.0f} {kind['series'].iloc[0]}" for kind in kinds]
    outside = sum(kind["left_out"].iloc[0] for kind in kinds)
    return f"{' and '.join(shown)} keys" + (f"; {outside:,.0f} of all are outside" if outside else "")


def _fidelity(facts: pd.Series) -> str:
    correlation = "undefined" if math.isnan(facts["spearman"]) else with_minus_sign(f"{facts['spearman']:z.2f}")
    text = f"RMS {facts['rms']:.2f} nats, Spearman {correlation}"
    return f"{text}, {facts['left_out']:,} outside" if facts["left_out"] else text


def _variant(maps: str) -> str:
    """Returns the variant's title, or the label of maps without one."""
    title = variant_title(maps)
    return plain(maps) if title in (OURS, maps) else title
