"""The figure of training: curves over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from residual_mass.paper.figures.style import GREY, figure, finish, looks_of, make_logarithmic, panels
from residual_mass.study.specs import FigureSpec


def _log(path: Path, length: str) -> pd.DataFrame:
    """Returns the means over all layers on the first held-out text, each K once.

    Budgets of different lengths are compared by their `rank`, 0 at the largest K: counted from the top because short
    sequences have several budgets in which nothing but the anchors fits, and their K is 0 alike.
    """
    log = pd.read_csv(path, dtype={"layer": str})
    log = log[(log["layer"] == "all") & (log["corpus"] == log["corpus"].iloc[0])].drop_duplicates(["step", "k"])
    return log.assign(length=length, rank=log["k"].rank(method="dense", ascending=False).astype(int) - 1)


@figure
def training_curves(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Errors on held-out text while the feature maps train, by trained length and budget, beside those of Top-$K$; and
    the divergence of the estimated from the true attention weights.
    """
    logs = pd.concat(map(_log, data, spec.maps), ignore_index=True).sort_values("step", kind="stable")
    looks, ranks = looks_of(spec.maps, first=()), sorted(set(logs["rank"]), reverse=True)
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
    return finish(figure, spec, f", held-out text: {logs['corpus'].iloc[0]}")
