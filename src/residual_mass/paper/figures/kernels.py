"""Figures of exact kernels: of their estimates by feature maps, and of the mass that the largest of them hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import logsumexp

from residual_mass.files import read_parquet
from residual_mass.paper.figures.points import HEAD, bulk, head_means, quartiles, rows_at_budget
from residual_mass.paper.figures.style import (
    BLUE,
    GREY,
    TEXT_WIDTH,
    VERMILLION,
    figure,
    finish,
    make_logarithmic,
    panels,
    plain,
    signed,
)  # fmt: skip
from residual_mass.paper.titles import OURS, variant_title
from residual_mass.study.specs import FigureSpec

KEYS = [*HEAD, "maps", "query", "position", "retrieved", "log_kernel", "log_phi", "k"]
SHOWN, ROWS_SHOWN = 4000, 100
"""Most points of one kind, and most attention rows, in a panel."""
RANKS = 60
"""Approximate number of bins of ranks."""
REACH = 1.0
"""Most that a panel extends beyond the range of the kernels for far-off scores, in multiples of that range."""
OUTSIDE = "outside, on the border"


def _keys(path: Path, maps: Sequence[str]) -> pd.DataFrame:
    """Reads the rows of the given maps, ordered by maps, query and position."""
    frame = read_parquet(path, KEYS, "kernels")
    chosen = frame[frame["maps"].isin(maps)].astype({"log_kernel": float, "log_phi": float, "maps": str})
    return chosen.sort_values(["maps", "query", "position"], ignore_index=True)


def _every(frame: pd.DataFrame, count: int) -> pd.DataFrame:
    """Thins to at most `count` evenly spaced rows, including the first and the last."""
    if len(frame) <= count:
        return frame
    return frame.iloc[np.linspace(0, len(frame) - 1, count).round().astype(int)]


def _shown(points: pd.DataFrame, x: tuple[float, float], y: tuple[float, float]) -> pd.DataFrame:
    """Thins points to at most SHOWN, evenly over the ranks of `x`, and moves those outside of the ranges `x` and `y` to
    the border, marked as `outside`. Adds the number of all points, `total`, and of those outside, `left_out`.
    """
    outside = ~(points["x"].between(*x) & points["y"].between(*y))
    placed = points.assign(x=points["x"].clip(*x), y=points["y"].clip(*y), outside=outside)
    order = points.sort_values(["x", "y"]).index
    return _every(placed.loc[order], SHOWN).assign(total=len(points), left_out=outside.sum())


def _limits(scores: Sequence[pd.Series], low: float, high: float) -> tuple[float, float]:
    """Extends the range of kernels, `low` to `high`, to the bulk of all scores, by at most REACH times itself."""
    reach = REACH * max(high - low, 1.0)
    lows, highs = zip(*(bulk(each.to_numpy()) for each in scores), strict=True)
    return min(low, max(min(lows), low - reach)), max(high, min(max(highs), high + reach))


def _cloud(axis: Axes, points: pd.DataFrame, colour: str, marker: str, label: str) -> None:
    """Draws points as pixels, because thousands of vectors make a large PDF; points on the border are crosses."""
    outside = points["outside"].astype(bool)
    for chosen, shape, name in ((~outside, marker, label), (outside, "+", OUTSIDE)):
        look = {"c": colour, "marker": shape, "linewidths": 0 if shape in "o^" else 0.4, "label": name}
        if chosen.any():
            axis.scatter("x", "y", data=points[chosen], s=5, alpha=0.4, rasterized=True, **look)


def _diagonal(axis: Axes, low: float, high: float) -> None:
    margin = 0.03 * (high - low) or 1.0  # points on the border are fully visible
    axis.axline((low, low), slope=1, color="black", linewidth=0.7, zorder=3, label="score = kernel")
    axis.set_ylim(low - margin, high + margin)
    axis.locator_params(nbins=6, steps=[1, 2, 5, 10])


# ---- one head --------------------------------------------------------------------------------------------------------


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
    mass = keys["log_kernel"].groupby(keys["query"]).transform(logsumexp)
    scores = pd.DataFrame({"x": keys["log_kernel"] - mass, "y": keys["log_phi"] - mass})
    scores = scores.assign(series=keys["retrieved"].map({True: "retrieved", False: "unretrieved"}))
    limits = _limits([scores["y"]], bulk(scores["x"].to_numpy())[0], scores["x"].max())
    ranks = keys["log_kernel"].groupby(keys["query"]).rank(method="first", ascending=False)
    rows = rows_at_budget(heads, [*HEAD, "pack", "query", "e_topk", "e_sub"], spec.budget_percent)
    rows = rows.merge(keys[HEAD].head(1)).sort_values(["pack", "query"])[["e_topk", "e_sub"]].astype(float)
    parts = {
        "scores": pd.concat([_shown(kind, limits, limits) for _, kind in scores.groupby("series")]),
        "ranks": _by_rank(scores, ranks),
        "errors": _series(_every(rows, ROWS_SHOWN)),
        "means": _series(rows.mean().to_frame().T),
    }
    points = pd.concat([part.assign(panel=panel) for panel, part in parts.items()], ignore_index=True)
    facts = {name: keys[name].iloc[0] for name in [*HEAD, "k"]}
    return points.assign(**facts, rows=len(rows), bottom=limits[0], top=limits[1])


def _by_rank(scores: pd.DataFrame, ranks: pd.Series) -> pd.DataFrame:
    edges = np.unique(np.geomspace(1, ranks.max() + 1, RANKS + 1).round())
    number = pd.Series(np.searchsorted(edges, ranks, side="right") - 1, scores.index)
    parts = [
        quartiles(scores[column].groupby(number)).assign(series=name)
        for name, column in (("exact", "x"), ("score", "y"))
    ]
    middles = np.sqrt(edges[:-1] * (edges[1:] - 1))
    return pd.concat([part.assign(x=middles[part.index]) for part in parts])


def _series(errors: pd.DataFrame) -> pd.DataFrame:
    """One row per (series, row), with the row's number as `x`."""
    return (
        errors.reset_index(drop=True)
        .rename_axis("x")
        .melt(var_name="series", value_name="y", ignore_index=False)
        .reset_index()
    )


@figure("kernel_sanity", kernel_sanity_points)
def kernel_sanity(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""One head seen closely: the feature maps' score of a key against its exact kernel (a), both by rank of the exact
    kernel (b), and the errors of its attention rows without and with completion (c).
    """
    figure = Figure(figsize=(TEXT_WIDTH, 2.5))
    facts, of = points.iloc[0], {name: panel for name, panel in points.groupby("panel", sort=False)}
    scores, ranks, errors = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1.2, 1.2, 0.75]})
    for name, colour, marker in (("unretrieved", BLUE, "o"), ("retrieved", VERMILLION, "^")):
        _cloud(scores, of["scores"][of["scores"]["series"] == name], colour, marker, name)
    _diagonal(scores, facts["bottom"], facts["top"])
    scores.set(xlim=scores.get_ylim(), title="(a) scores and kernels", xlabel=r"log kernel $-\,\log Z_{\mathcal{M}}$")
    scores.set_ylabel(r"log $\phi$ score $-\,\log Z_{\mathcal{M}}$")

    for name, colour, line, label in (("exact", "black", "-", "exact kernel"), ("score", BLUE, "--", r"$\phi$ score")):
        curve = of["ranks"][of["ranks"]["series"] == name]
        ranks.fill_between("x", "low", "high", data=curve, color=colour, alpha=0.2, linewidth=0)
        ranks.plot(curve["x"], curve["y"], color=colour, linestyle=line, label=f"{label}, median and middle half")
    if facts["k"] > 0:
        ranks.axvline(facts["k"], color="black", linestyle=":", linewidth=0.8, label="$K$")
    make_logarithmic(ranks.xaxis)
    ranks.set(
        title="(b) by rank", xlabel="rank by exact kernel", ylabel=r"log kernel or score $-\,\log Z_{\mathcal{M}}$"
    )

    rows = of["errors"].pivot(index="x", columns="series", values="y")[["e_topk", "e_sub"]]
    errors.plot([0, 1], rows.T.iloc[:, :1], color=GREY, linewidth=0.4, alpha=0.5, label="attention row")
    errors.plot([0, 1], rows.T.iloc[:, 1:], color=GREY, linewidth=0.4, alpha=0.5)
    means = of["means"].set_index("series")["y"][["e_topk", "e_sub"]]
    errors.plot([0, 1], means, "D-", color="black", label="mean")
    titles = zip(("Top-$K$", r"Top-$K{+}\phi$"), means, strict=True)
    errors.set_xticks([0, 1], [f"{title}\n{mean:.3f}" for title, mean in titles])
    errors.set(xlim=(-0.35, 1.35), title=f"(c) error, {facts['rows']:,} rows", ylabel="relative error")
    errors.set_ylim(bottom=0)
    title = f"{plain(spec.title)}, layer {facts['layer']}, head {facts['head']}, $K = {facts['k']}$"
    return finish(figure, f"{title}\n(a) shows {_counted(of['scores'])}", fontsize=7)


def _counted(points: pd.DataFrame) -> str:
    """Says how many keys of every kind a panel shows, and how many lie outside of it."""
    kinds = [kind for _, kind in points.groupby("series", sort=False)]
    shown = [f"{len(kind):,} of {kind['total'].iloc[0]:,.0f} {kind['series'].iloc[0]}" for kind in kinds]
    outside = sum(kind["left_out"].iloc[0] for kind in kinds)
    return f"{' and '.join(shown)} keys" + (f"; {outside:,.0f} of all are outside" if outside else "")


# ---- ablations -------------------------------------------------------------------------------------------------------


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
        raise ValueError(f"{file}: every key is retrieved; set a smaller diagnostics.budget")
    kernels = bulk(rest["x"].to_numpy())
    limits = _limits([scores for _, scores in rest.groupby("maps")["y"]], *kernels)
    parts = []
    for maps in spec.maps:
        rows = rest.loc[rest["maps"] == maps, ["query", "x", "y"]]
        # Within queries, so that level differences between them do not count; constant ones have no correlation.
        correlations = [of[["x", "y"]].rank().corr().iloc[0, 1] for _, of in rows.groupby("query")]
        facts = {"rms": math.sqrt(((rows["y"] - rows["x"]) ** 2).mean()), "spearman": pd.Series(correlations).mean()}
        parts.append(_shown(rows[["x", "y"]], kernels, limits).assign(maps=maps, **facts))
    facts = {name: keys[name].iloc[0] for name in HEAD}
    return pd.concat(parts, ignore_index=True).assign(**facts, bottom=limits[0], top=limits[1])


@figure("ablation_kernel_fidelity", ablation_kernel_fidelity_points)
def ablation_kernel_fidelity(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Scores of unretrieved keys against their exact kernels, under the study's own feature maps and under those of
    each ablation, for one head. On the line, a score equals the kernel.
    """
    own, *variants = spec.maps
    score = r"$\log\,\langle \phi_{\mathrm{q}}(q), \phi_{\mathrm{k}}(k_j) \rangle$"
    figure, axes = panels(2.0, len(variants), 2, r"log kernel $s_j$", score)
    facts = points.iloc[0]
    for letter, axis, maps in zip(ascii_lowercase, axes, variants, strict=False):
        title = variant_title(maps)
        lines = [f"({letter}) {plain(maps) if title in (OURS, maps) else title}"]
        named = ((own, BLUE, "o", f"own maps ({plain(own)})"), (maps, VERMILLION, "x", "the panel's variant"))
        for (each, *look), name in zip(named, ("own", "variant"), strict=True):
            cloud = points[points["maps"] == each]
            _cloud(axis, cloud, *look)
            lines.append(f"{name}: {_fidelity(cloud.iloc[0])}")
        _diagonal(axis, facts["bottom"], facts["top"])
        axis.set_title("\n".join(lines), fontsize=7)
    axes[0].set_xlim(points["x"].min() - 0.3, points["x"].max() + 0.3)
    shown = (
        f"{points['maps'].eq(own).sum():,} of {facts['total']:,} unretrieved keys shown; Spearman: mean over queries"
    )
    title = f"{plain(spec.title)}, layer {facts['layer']}, head {facts['head']}\n{shown}"
    return finish(figure, title, fontsize=7)


def _fidelity(facts: pd.Series) -> str:
    correlation = "undefined" if math.isnan(facts["spearman"]) else signed(facts["spearman"], "z.2f")
    text = f"RMS {facts['rms']:.2f} nats, Spearman {correlation}"
    return f"{text}, {facts['left_out']:,} outside" if facts["left_out"] else text


# ---- mass ------------------------------------------------------------------------------------------------------------

QUANTILES = {"low": (0.02, 0.10, 0.25), "high": (0.75, 0.90, 0.98)}
"""Of the heads by entropy, those with a curve."""
SHADES = {"low": ("#0072B2", "#3B97CC", "#7CC0E5"), "high": ("#E8A07A", "#D55E00", "#8F3F00")}
"""Colours of the curves, from the lowest entropy to the highest."""


def mass_curves_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Computes C_mid against K: one row per (curve, k).

    Curves of `family` low and high are single heads (`layer`, `head`, mean entropy `h_mid`) with their mean `y` over
    packs; `all` is the median over heads with quartiles `low` and `high`; `budgets` has the study's K without y.
    """
    mass_file, heads_file = data
    curves = head_means(read_parquet(mass_file, [*HEAD, "k", "c_mid"], "capture"), [*HEAD, "k"])
    curves = curves.rename(columns={"c_mid": "y"})
    rows = read_parquet(heads_file, [*HEAD, "k", "h_mid"], "capture")
    heads = head_means(rows[[*HEAD, "h_mid"]], HEAD).sort_values(["h_mid", *HEAD], ignore_index=True)
    parts, seen = [], set()
    for family, shares in QUANTILES.items():
        for place in dict.fromkeys(round(share * (len(heads) - 1)) for share in shares):
            if place not in seen:  # of few heads
                parts.append(heads.iloc[[place]].merge(curves, on=HEAD).assign(family=family))
            seen.add(place)
    parts.append(quartiles(curves.groupby("k")["y"]).reset_index().assign(family="all"))
    budgets = sorted(set(rows["k"]) - {0})  # a logarithmic axis has no place for K = 0
    return pd.concat([*parts, pd.DataFrame({"k": budgets, "family": "budgets"})], ignore_index=True)


@figure("mass_curves", mass_curves_points)
def mass_curves(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Share $C_{\mathrm{mid}}(K)$ of the mid-region's attention mass that its $K$ largest kernels hold: of single
    heads with low and with high entropy, and the median and the middle half of all heads.
    """
    figure = Figure(figsize=(TEXT_WIDTH, 2.7))
    axis = figure.subplots()
    band = points[points["family"] == "all"]
    axis.fill_between("k", "low", "high", data=band, color=GREY, alpha=0.2, linewidth=0, label="middle half of heads")
    axis.plot(band["k"], band["y"], color=GREY, linewidth=0.8, label="median head")
    for family, shades in SHADES.items():
        curves = points[points["family"] == family].groupby([*HEAD, "h_mid"], sort=False)
        for ((layer, head, h_mid), curve), shade in zip(curves, shades, strict=False):
            label = rf"layer {layer:g}, head {head:g}: $H_{{\mathrm{{mid}}}} = {h_mid:z.2f}$"
            axis.plot(curve["k"], curve["y"], color=shade, linestyle="-" if family == "low" else "--", label=label)
    budgets = points.loc[points["family"] == "budgets", "k"]
    named = f"$K$ of the study: {', '.join(f'{k:,.0f}' for k in budgets)}"
    for k in budgets:
        axis.axvline(k, color="black", linestyle=":", linewidth=0.8, zorder=0, label=named)
    make_logarithmic(axis.xaxis)
    axis.set(ylim=(0, 1.02), xlabel="retrieved keys $K$", ylabel=r"$C_{\mathrm{mid}}(K)$")
    return finish(figure, plain(spec.title), ncols=1, loc="outside right center", fontsize=7)
