"""The figure of training: curves over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from residual_mass.paper.figures.style import GREY, figure, finish, looks_of, make_logarithmic, panels, plain
from residual_mass.study.specs import FigureSpec
from residual_mass.training import RUN

MARKS = 12
"""Most markers of a line."""


def training_curves_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Returns one row per (length, K, step), in the order of the files: errors and `kl` of each file, means over all
    layers on the first held-out text.

    Budgets of different lengths are compared by their `rank`, 0 at the largest K: counted from the top because short
    sequences have several budgets in which nothing but the anchors fits, and their K is 0 alike.
    """
    frames = []
    for path, length in zip(data, spec.maps, strict=True):
        texts = {"recipe": str, "variant": str, "layer": str}
        frame = pd.read_csv(path, dtype=texts, keep_default_na=False, na_values="")
        frame = frame[(frame["layer"] == "all") & (frame["corpus"] == frame["corpus"].iloc[0])]
        rank = frame["k"].rank(method="dense", ascending=False).astype(int) - 1
        # Budgets with the same K say the same twice.
        frames.append(frame.assign(length=length, rank=rank).drop_duplicates([*RUN, "step", "k"]))
    points = pd.concat(frames, ignore_index=True)
    return points[["length", "rank", "k", "step", "e_topk", "e_sub", "e_nosub", "kl", "corpus"]]


@figure("training_curves", training_curves_points)
def training_curves(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    r"""Errors on held-out text while the feature maps train, by trained length and budget, beside those of Top-$K$; and
    the divergence of the estimated from the true attention weights.
    """
    looks, ranks = looks_of(points["length"], first=()), sorted(set(points["rank"]), reverse=True)
    count = len(ranks) + 1
    figure, axes = panels(1.55, count, math.ceil(count / 2), "training steps", "", sharey=False)
    points = points.sort_values("step", kind="stable")
    for (rank, length), rows in points.groupby(["rank", "length"], sort=False):
        axis, look = axes[ranks.index(rank)], looks[length] | {"markevery": math.ceil(len(rows) / MARKS)}
        colour = look["color"]
        axis.plot(rows["step"], rows["e_sub"], **look, label=rf"{plain(length)}, Top-$K{{+}}\phi$")
        axis.plot(rows["step"], rows["e_nosub"], color=colour, linewidth=0.5)
        axis.axhline(rows["e_topk"].mean(), color=colour, linestyle="--", linewidth=0.8)
        if rank == 0:  # the divergence is over the whole prefix and the same at every K
            axes[-1].plot(rows["step"], rows["kl"], **look)
    for axis, rank in zip(axes, ranks, strict=False):
        shown = points.loc[points["rank"] == rank].sort_values("k")["k"].unique()
        axis.set(title=f"$K$ = {', '.join(f'{k:g}' for k in shown)}", ylabel="relative error")
    axes[-1].set(title="divergence from the teacher", ylabel="nats")
    for axis in axes:
        make_logarithmic(axis.yaxis)
        axis.locator_params(axis="x", nbins=4)
        axis.xaxis.set_major_formatter("{x:,.0f}")
    styles = {"without subtraction": {"linewidth": 0.5}, "Top-$K$": {"linestyle": "--", "linewidth": 0.8}}
    lines = [Line2D([], [], color=GREY, label=label, **style) for label, style in styles.items()]
    return finish(figure, f"{plain(spec.title)}, held-out text: {points['corpus'].iloc[0]}", others=lines)
