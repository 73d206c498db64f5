"""Figures of feature maps: exact kernels and their estimates, the mass of the largest kernels, and training."""

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
from residual_mass.paper.figures.heads import ERROR_COLUMNS, HEAD, bulk, captured_rows, head_means
from residual_mass.paper.figures.style import (
    BLUE,
    GREY,
    VERMILLION,
    escape_dollars,
    figure,
    finish,
    looks_of,
    make_logarithmic,
    panels,
)
from residual_mass.paper.titles import OURS, text_title, variant_title
from residual_mass.spec.specs import FigureSpec

SHOWN = 20_000
"""Maximum number of keys of one kind in a panel; more would hide each other."""
RANKS = 60
"""Approximate number of bins of ranks."""
COLUMNS_OF_KEYS = [*HEAD, "maps", "query", "retrieved", "log_kernel", "log_phi", "k"]
QUARTER = 0.25
MEDIAN = 0.5
THREE_QUARTERS = 0.75
SHOWN_HEADS = (
    (0.02, "#0072B2", "-"), (0.10, "#3B97CC", "-"), (0.25, "#7CC0E5", "-"),
    (0.75, "#E8A07A", "--"), (0.90, "#D55E00", "--"), (0.98, "#8F3F00", "--"),
)  # fmt: skip
"""Heads of `mass_curves` by their place in the order of entropy, as a share, with colour and line."""


def _keys(path: Path, maps: Sequence[str]) -> pd.DataFrame:
    """Returns the rows of the given maps."""
    frame = read_parquet(path, COLUMNS_OF_KEYS, "kernels")
    frame = frame[frame["maps"].isin(maps)]
    return frame.astype({"log_kernel": float, "log_phi": float, "maps": str})


def _cloud(axis: Axes, keys: pd.DataFrame, colour: str, marker: str, label: str) -> None:
    """Draws keys as pixels, because thousands of vector marks make a large PDF."""
    keys = keys.sample(min(len(keys), SHOWN), random_state=0)
    look = {"c": colour, "marker": marker, "linewidths": 0.3 if marker == "x" else 0}
    axis.scatter(keys["log_kernel"], keys["log_phi"], s=3, alpha=0.3, rasterized=True, **look)
    axis.plot([], [], marker, color=colour, label=label)  # larger and darker, for the legend


def _show_bulk(axis: Axes, keys: pd.DataFrame) -> str:
    """Limits the axes to the kernels and to the bulk of each map's scores, at most the kernels' range beyond them.
    Draws the line where scores equal kernels. Returns how many scores are in view.
    """
    least, _ = bulk(keys["log_kernel"])
    low = least - 0.3
    high = keys["log_kernel"].max() + 0.3
    spans = [bulk(scores) for _, scores in keys.groupby("maps")["log_phi"]]
    lowest = min(low, *(span[0] for span in spans))
    highest = max(high, *(span[1] for span in spans))
    bottom = max(lowest, 2 * low - high)
    top = min(highest, 2 * high - low)
    axis.axline((low, low), slope=1, color="black", linewidth=0.7, zorder=3, label="score = kernel")
    axis.set(xlim=(low, high), ylim=(bottom, top))
    axis.locator_params(nbins=6, steps=[1, 2, 5, 10])
    inside = keys["log_kernel"].between(low, high) & keys["log_phi"].between(bottom, top)
    return f"{inside.sum():,} of {len(keys):,} scores in view, at most {SHOWN:,} of a kind drawn"


@figure
def kernel_sanity(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""One head in detail: the feature maps' estimate of a key's kernel (the attention weight before normalisation)
    against the exact kernel (a), both by rank of the kernel (b), and errors of attention rows without and with the
    estimate (c).
    """
    kernels, heads = data
    keys = _keys(kernels, spec.maps[:1])
    mass = keys.groupby("query")["log_kernel"].transform(logsumexp)
    measures = ["log_kernel", "log_phi"]
    keys[measures] = keys[measures].sub(mass, axis="index")
    layer, head, k = keys[[*HEAD, "k"]].iloc[0]
    figure, axes = panels(1.9, 3, 3, sharex=False, sharey=False, width_ratios=[1.2, 1.2, 0.75])
    scores, ranks, errors = axes
    _cloud(scores, keys[~keys["retrieved"]], BLUE, "o", "unretrieved")
    _cloud(scores, keys[keys["retrieved"]], VERMILLION, "^", "retrieved")
    shown = _show_bulk(scores, keys)
    scores.set(title="(a) scores and kernels", xlabel=r"log kernel $-\,\log Z_{\mathcal{M}}$")
    scores.set_ylabel(r"log $\phi$ score $-\,\log Z_{\mathcal{M}}$")
    _draw_ranks(ranks, keys)
    if k > 0:
        ranks.axvline(k, color="black", linestyle=":", linewidth=0.8, label="$K$")
    make_logarithmic(ranks.xaxis)
    rows = captured_rows(heads, [*HEAD, *ERROR_COLUMNS], spec.budget_percent).astype(float)
    of_head = (rows["layer"] == layer) & (rows["head"] == head)
    _draw_errors(errors, rows.loc[of_head, ERROR_COLUMNS])
    return finish(figure, spec, f", layer {layer}, head {head}, $K = {k}$\n(a) {shown}", fontsize=7)


def _draw_ranks(axis: Axes, keys: pd.DataFrame) -> None:
    """Draws medians and middle halves of kernels and scores by the rank of the kernel within its query."""
    rank = keys.groupby("query")["log_kernel"].rank(method="first", ascending=False)
    edges = np.unique(np.geomspace(1, rank.max() + 1, RANKS + 1).round())
    last = edges[1:] - 1
    middles = np.sqrt(edges[:-1] * last)
    bins = pd.cut(rank, edges, right=False, labels=middles)
    binned = keys.groupby(bins, observed=True)
    for name, colour, line, label in (
        ("log_kernel", "black", "-", "exact kernel"), ("log_phi", BLUE, "--", r"$\phi$ score")
    ):  # fmt: skip
        low = binned[name].quantile(QUARTER)
        high = binned[name].quantile(THREE_QUARTERS)
        axis.fill_between(middles, low, high, color=colour, alpha=0.2, linewidth=0)
        median = binned[name].quantile(MEDIAN)
        axis.plot(middles, median, color=colour, linestyle=line, label=f"{label}, median and middle half")
    axis.set(title="(b) by rank", xlabel="rank by exact kernel")
    axis.set_ylabel(r"log kernel or score $-\,\log Z_{\mathcal{M}}$")


def _draw_errors(axis: Axes, rows: pd.DataFrame) -> None:
    """Draws a line per attention row from its error without the estimate to that with it, and the means."""
    means = rows.mean()
    axis.plot([0, 1], rows.T, color=GREY, linewidth=0.4, alpha=0.5, label="attention row")
    axis.plot([0, 1], means, "D-", color="black", label="mean")
    without, completed = means
    titles = [f"Top-$K$\n{without:.3f}", f"Top-$K{{+}}\\phi$\n{completed:.3f}"]
    axis.set_xticks([0, 1], titles)
    axis.set(xlim=(-0.35, 1.35), title=f"(c) error, {len(rows):,} rows", ylabel="relative error")
    axis.set_ylim(bottom=0)


@figure
def ablation_kernel_fidelity(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Scores of unretrieved keys against their exact kernels, under the study's own feature maps and under those of
    each ablation, for one head. On the line, a score equals the kernel.
    """
    keys = _keys(data[0], spec.maps)
    rest = keys[~keys["retrieved"]]
    if rest.empty:
        raise ValueError(f"{data[0]}: every key is retrieved; set a smaller diagnostics.budget")
    own, *variants = spec.maps
    score = r"$\log\,\langle \phi_{\mathrm{q}}(q), \phi_{\mathrm{k}}(k_j) \rangle$"
    figure, axes = panels(2.0, len(variants), 2, r"log kernel $s_j$", score)
    for letter, axis, maps in zip(ascii_lowercase, axes, variants, strict=False):
        title = variant_title(maps)
        lines = [f"({letter}) {maps if title == OURS else title}"]
        for name, each, colour, marker, label in (
            ("own", own, BLUE, "o", f"own maps ({own})"), ("variant", maps, VERMILLION, "x", "the panel's variant")
        ):  # fmt: skip
            scores = rest[rest["maps"] == each]
            _cloud(axis, scores, colour, marker, label)
            lines.append(f"{name}: {_agreement(scores)}")
        shown = _show_bulk(axis, rest)
        axis.set_title("\n".join(lines), fontsize=7)
    layer, head = keys[HEAD].iloc[0]
    title = f", layer {layer}, head {head}\n{shown}; Spearman: mean over queries"
    return finish(figure, spec, title, fontsize=7)


def _agreement(scores: pd.DataFrame) -> str:
    """Returns the root mean square difference of scores and kernels, and their rank correlation within queries, so that
    level differences between queries do not count.
    """
    differences = scores["log_phi"] - scores["log_kernel"]
    rms = np.sqrt((differences**2).mean())
    correlations = scores.groupby("query")[["log_kernel", "log_phi"]].corr("spearman")
    spearman = correlations.xs("log_kernel", level=1)["log_phi"].mean()
    return f"RMS {rms:.2f} nats, Spearman ${spearman:z.2f}$"


@figure
def mass_curves(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Share $C_{\mathrm{mid}}(K)$ of the attention mass between the first and the last tokens that the $K$ largest
    weights hold, for single heads with low and with high entropy, and as median and middle half of all heads.
    """
    mass_file, heads_file = data
    curves = head_means(mass_file, [*HEAD, "k"], ["c_mid"])
    at_every_k = head_means(heads_file, [*HEAD, "k"], ["h_mid"])
    entropies = at_every_k.groupby(HEAD, as_index=False)["h_mid"].mean()
    heads = entropies.sort_values("h_mid", kind="stable")
    figure, (axis,) = panels(2.1, 1, 1, "retrieved keys $K$", r"$C_{\mathrm{mid}}(K)$")
    by_k = curves.groupby("k")["c_mid"]
    low = by_k.quantile(QUARTER)
    high = by_k.quantile(THREE_QUARTERS)
    axis.fill_between(low.index, low, high, color=GREY, alpha=0.2, linewidth=0, label="middle half of heads")
    axis.plot(by_k.quantile(MEDIAN), color=GREY, linewidth=0.8, label="median head")
    for share, colour, line in SHOWN_HEADS:
        head = heads.iloc[[round(share * (len(heads) - 1))]]
        label = "layer {layer:g}, head {head:g}: $H_{{\\mathrm{{mid}}}} = {h_mid:z.2f}$".format(**head.iloc[0])
        axis.plot("k", "c_mid", data=head.merge(curves, on=HEAD), color=colour, linestyle=line, label=label)
    budgets = sorted(set(at_every_k["k"]) - {0})  # a logarithmic axis has no place for K = 0
    named = f"$K$ of the study: {', '.join(f'{k:,}' for k in budgets)}"
    axis.vlines(budgets, 0, 1.02, color="black", linestyle=":", linewidth=0.8, zorder=0, label=named)
    make_logarithmic(axis.xaxis)
    axis.set_ylim(0, 1.02)
    figure.legend(loc="outside right center", fontsize=7)
    figure.suptitle(escape_dollars(spec.title))
    return figure


# ---- training ------------------------------------------------------------------------------------------------------


def _log(path: Path, length: str) -> pd.DataFrame:
    """Returns the means over all layers on the first held-out text, each K once.

    Budgets of different lengths are compared by their `rank`, 0 at the largest K. Ranks are counted from the top,
    because several budgets of a short sequence may only hold the anchors, so that K is 0 for all of them.
    """
    log = pd.read_csv(path, dtype={"layer": str})
    first_text = log["corpus"].iloc[0]
    log = log[(log["layer"] == "all") & (log["corpus"] == first_text)]
    log = log.drop_duplicates(["step", "k"])
    rank = log["k"].rank(method="dense", ascending=False).astype(int) - 1
    return log.assign(length=length, rank=rank)


@figure
def training_curves(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Errors on held-out text during training of the feature maps, by training length, with those of Top-$K$: a panel
    for each budget, with its $K$ at each length. The last panel has the divergence of the estimated attention weights
    from the true ones.
    """
    logs = pd.concat(map(_log, data, spec.maps), ignore_index=True)
    logs = logs.sort_values("step", kind="stable")
    looks = looks_of(spec.maps, first=())
    ranks = sorted(set(logs["rank"]), reverse=True)
    count = len(ranks) + 1
    figure, axes = panels(1.55, count, math.ceil(count / 2), "training steps", "", sharey=False)
    for axis, rank in zip(axes, ranks, strict=False):
        panel = logs[logs["rank"] == rank]
        for length, rows in panel.groupby("length", sort=False):
            look = looks[length] | {"markevery": 0.1}  # of the panel's diagonal
            axis.plot(rows["step"], rows["e_sub"], **look, label=rf"{length}, Top-$K{{+}}\phi$")
            axis.plot(rows["step"], rows["e_nosub"], color=look["color"], linewidth=0.5)
            axis.axhline(rows["e_topk"].mean(), color=look["color"], linestyle="--", linewidth=0.8)
            if rank == 0:  # the divergence is over the whole prefix and the same at every K
                axes[-1].plot(rows["step"], rows["kl"], **look)
        shown = ", ".join(f"{k:g}" for k in sorted(set(panel["k"])))
        axis.set(title=f"$K$ = {shown}", ylabel="relative error")
    axes[-1].set(title="divergence from the teacher", ylabel="nats")
    for axis in axes:
        make_logarithmic(axis.yaxis)
        axis.locator_params(axis="x", nbins=4)
        axis.xaxis.set_major_formatter("{x:,.0f}")
    axes[0].plot([], [], color=GREY, linewidth=0.5, label="without subtraction")
    axes[0].plot([], [], color=GREY, linewidth=0.8, linestyle="--", label="Top-$K$")
    return finish(figure, spec, f", held-out text: {text_title(logs['corpus'].iloc[0])}")
