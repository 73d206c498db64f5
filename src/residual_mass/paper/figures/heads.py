"""Figures of every head's errors and gains against its entropy, at one K and over several.

All numbers of a head are means over packs and queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from residual_mass.paper.figures.points import BUDGET, HEAD, equal_parts, head_means
from residual_mass.paper.figures.style import BLUE, GREY, VERMILLION, figure, finish, make_asinh, panels, plain
from residual_mass.study.specs import FigureSpec

ERRORS = ["e_topk", "e_sub"]
BIN = 0.1
"""Width in entropy of the bins for medians over heads."""
QUARTILES = 4
LINEAR = 0.1
"""Axes of errors and gains are linear up to about here: a few heads have ten times larger values than most."""

H_MID, E_TOPK, E_SUB = r"$H_{\mathrm{mid}}$", r"$e_{\mathrm{TopK}}$", r"$e_{\mathrm{TopK}{+}\phi}$"
GAIN = r"$e_{\mathrm{TopK}} - e_{\mathrm{TopK}{+}\phi}$"
SHARE = r"$\rho_{\mathrm{res}} = \hat Z_{\mathcal{R}}\,/\,(Z_{\mathcal{E}} + \hat Z_{\mathcal{R}})$"


def _scatter(axis: Axes, heads: pd.DataFrame, y: str) -> None:
    """Draws one mark per head; crosses and circles distinguish heads in print without colour."""
    helps = heads["gain"] > 0
    for chosen, colour, marker, width, label in (
        (helps, BLUE, "o", 0, "completion helps the head"), (~helps, VERMILLION, "x", 0.7, "it does not")
    ):  # fmt: skip
        look = {"s": 9, "c": colour, "alpha": 0.6, "marker": marker, "linewidths": width, "label": label}
        axis.scatter("h_mid", y, data=heads[chosen], **look)
    axis.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))


def _draw_medians(axis: Axes, heads: pd.DataFrame, y: str) -> None:
    """Draws medians over the heads in the same bin of entropy."""
    medians = heads.groupby(heads["h_mid"] // BIN)[["h_mid", y]].median()
    label = f"median per {BIN} of {H_MID}"
    axis.plot("h_mid", y, data=medians, color="black", marker="D", markersize=2.5, linewidth=1, label=label)


def _at(heads: pd.DataFrame) -> str:
    return f"$K = {heads['k'].iloc[0]:g}$ ({heads['budget_percent'].iloc[0]:g}%)"


@figure
def entropy_gain(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Gain of completion per query head, the error of Top-$K$ less that of Top-$K{+}\phi$, against the mid-normalised
    entropy $H_{\mathrm{mid}}$ of the head's attention, for every budget. Above zero, adding the residual estimate helps
    the head.
    """
    keys = ["backbone", *BUDGET]
    frames = [head_means(path, [*keys, *HEAD], [*ERRORS, "h_mid"]) for path in data]
    heads = pd.concat(frames, ignore_index=True)
    heads["gain"] = heads["e_topk"] - heads["e_sub"]
    backbones, columns = heads["backbone"].unique(), heads.groupby(BUDGET).ngroups
    figure, axes = panels(1.8, len(backbones) * columns, columns, H_MID, "")
    for axis, ((backbone, *_), panel) in zip(axes, heads.groupby(keys, sort=False), strict=True):
        _scatter(axis, panel, "gain")
        axis.axhline(0, color=GREY, linewidth=0.7, zorder=0)
        share = f"{(panel['gain'] > 0).mean():.1%} of {len(panel)} heads gain"
        axis.set_title(f"{_at(panel)}\n{share}", fontsize=8 if columns < 4 else 7)
        if axis.get_subplotspec().is_first_col() and len(backbones) > 1:
            axis.set_ylabel(plain(spec.backbone_titles.get(backbone, backbone)))
    make_asinh(axes[0].yaxis, LINEAR)
    figure.supylabel(f"gain {GAIN} (asinh scale)", fontsize=9)
    return finish(figure, spec)


@figure
def entropy_heatmap(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Mid-normalised entropy $H_{\mathrm{mid}}$ of every query head (a), and against it the share of the attention
    mass that the feature maps estimate for the tokens that are not read (b).
    """
    heads = head_means(data[0], [*BUDGET, *HEAD], ["h_mid", "residual_share_hat"], spec.budget_percent)
    figure, (entropies, shares) = panels(1.9, 2, 2, sharex=False, sharey=False)
    grid = heads.pivot(index="layer", columns="head", values="h_mid")
    image = entropies.imshow(grid, cmap="cividis", origin="lower", aspect="auto")
    for side in (entropies.xaxis, entropies.yaxis):
        side.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    entropies.set(xlabel="query head", ylabel="layer (0 next to the input)", title=f"(a) {H_MID} of every head")
    figure.colorbar(image, ax=entropies)
    shares.scatter("h_mid", "residual_share_hat", data=heads, s=9, alpha=0.6, c=BLUE, linewidths=0, label="one head")
    _draw_medians(shares, heads, "residual_share_hat")
    shares.set_ylim(bottom=0)
    shares.set(xlabel=f"mid-normalised entropy {H_MID}", ylabel=f"estimated {SHARE}")
    shares.set_title(f"(b) residual share, {_at(heads)}")
    return finish(figure, spec)


@figure
def fixedk_breakdown(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Errors of every query head at one budget against its mid-normalised entropy $H_{\mathrm{mid}}$: of Top-$K$ (a),
    of Top-$K{+}\phi$ (b), and the first less the second (c).
    """
    heads = head_means(data[0], [*BUDGET, *HEAD], [*ERRORS, "h_mid"], spec.budget_percent)
    heads["gain"] = heads["e_topk"] - heads["e_sub"]
    figure, axes = panels(2.0, 3, 3, H_MID, "relative error (asinh scale)", sharey=False)
    without, completed, gains = axes
    completed.sharey(without)
    gains.axhline(0, color=GREY, linewidth=0.7, zorder=0)
    titles = f"(a) {E_TOPK}", f"(b) {E_SUB}", f"(c) {GAIN}"
    for axis, name, title in zip(axes, [*ERRORS, "gain"], titles, strict=True):
        _scatter(axis, heads, name)
        _draw_medians(axis, heads, name)
        axis.set_title(title)
    without.set_ylim(bottom=0)
    for axis in (without, gains):
        make_asinh(axis.yaxis, LINEAR)
    completed.tick_params(labelleft=False)
    return finish(figure, spec, f", {_at(heads)}")


@figure
def quartile_error(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Errors of Top-$K$ and Top-$K{+}\phi$ at every budget, with the heads in four groups of equal size by their
    mid-normalised entropy $H_{\mathrm{mid}}$, from the most concentrated (a) to the most diffuse (d).
    """
    heads = head_means(data[0], [*BUDGET, *HEAD], [*ERRORS, "h_mid"])
    heads["quartile"] = heads.groupby(BUDGET)["h_mid"].transform(equal_parts, QUARTILES)
    columns = 4 if heads.groupby(BUDGET).ngroups < 5 else 2  # tick labels of more budgets do not fit
    figure, axes = panels(2.0, QUARTILES, columns, "$K$ and budget", "relative error (asinh scale)")
    for letter, axis, (_, part) in zip("abcd", axes, heads.groupby("quartile"), strict=True):
        budgets = part.groupby(BUDGET)
        places = np.arange(len(budgets))  # evenly spaced: K = 0 has a place, and two budgets with the same K have two
        for error, title, look in (
            ("e_topk", E_TOPK, {"color": VERMILLION, "linestyle": "--"}), ("e_sub", E_SUB, {"color": BLUE})
        ):  # fmt: skip
            low, high = budgets[error].quantile(0.25), budgets[error].quantile(0.75)
            label = f"{title}, middle half of the heads"
            axis.fill_between(places, low, high, **look, alpha=0.2, linewidth=0.4, label=label)
            marker = "s" if error == "e_topk" else "o"
            axis.plot(places, budgets[error].mean(), **look, marker=marker, label=f"{title}, mean over heads")
        axis.set_xticks(places, [f"{k:g}\n{budget:g}%" for k, budget in budgets.groups])
        axis.set_title(f"({letter}) {H_MID} {part['h_mid'].min():z.2f} to {part['h_mid'].max():z.2f}")
        axis.margins(x=0.12)
    axes[0].set_ylim(bottom=0)
    make_asinh(axes[0].yaxis, LINEAR)
    return finish(figure, spec)
