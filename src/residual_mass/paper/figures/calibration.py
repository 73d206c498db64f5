"""Figures of the residual's calibration: histograms with one panel per captured file (a corpus at a length)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from residual_mass.paper.figures.points import HEAD, bulk, captured, head_means
from residual_mass.paper.figures.style import BLUE, GREY, PERCENT, VERMILLION, figure, finish, make_asinh, panels
from residual_mass.study.specs import FigureSpec

PANEL, TITLE = ["corpus", "length", "k"], "{}, {}, $K = {}$"
EVEN_BINS, ASINH_BINS = 100, 40
"""The most bins on the even scale, and about how many on the asinh scale."""


@figure
def logz_calibration(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Estimated against true residual mass of attention rows, $\log\hat Z_{\mathcal{R}}-\log Z_{\mathcal{R}}$, for
    every text and length. Below zero the mass of the tokens that are not read is underestimated.
    """
    frames = [captured(path, [*PANEL, "log_z_hat", "log_z_true"], spec.budget_percent) for path in data]
    rows = pd.concat(frames, ignore_index=True)
    rows["value"] = rows["log_z_hat"].astype(float) - rows["log_z_true"].astype(float)
    sizes = rows.groupby(PANEL).size()
    finite = rows[np.isfinite(rows["value"])].groupby(PANEL, sort=False)["value"]
    if not finite.ngroups:
        raise ValueError(f"figure {spec.label}: no row has a finite estimate of the mass; take the figure out")
    lows, highs = zip(*(bulk(values) for _, values in finite), strict=True)
    edges = MaxNLocator(EVEN_BINS, steps=[1, 2, 5, 10]).tick_values(min(0, *lows), max(0, *highs)).round(9)
    label = r"$\log \hat Z_{\mathcal{R}} - \log Z_{\mathcal{R}}$ (nats)"
    figure, axes = panels(1.55, len(finite), 2, label, "share of rows")
    for axis, (name, values) in zip(axes, finite, strict=True):
        _draw_bins(axis, values, edges, ("underestimated", "overestimated"))
        count = sizes[name]
        found = f"mean ${values.mean():+z.2f}$, {(values < 0).mean():.1%} underestimated"
        axis.set_title(
            f"{TITLE.format(*name)}\n{found}\n{count - len(values):,} of {count:,} rows left out", fontsize=7
        )
    axes[0].xaxis.set_major_locator(MaxNLocator(9, integer=True, steps=[1, 2, 5, 10]))
    return finish(figure, spec)


@figure
def fullsub_nosub_delta(spec: FigureSpec, data: Sequence[Path]) -> Figure:
    r"""Effect of subtraction per query head: $\Delta$ is the error of Top-$K{+}\phi$ less that of the same without
    subtracting the retrieved tokens' share. Below zero subtraction helps.
    """
    keys, errors = [*PANEL, *HEAD], ["e_sub", "e_nosub"]
    heads = pd.concat([head_means(path, keys, errors, spec.budget_percent) for path in data], ignore_index=True)
    if (heads["k"] == 0).any():
        problem = f"K is 0 at {spec.budget_percent:g}%, where nothing is subtracted; set a larger diagnostics.budget"
        raise ValueError(f"figure {spec.label}: {problem}")
    heads["value"] = heads["e_sub"] - heads["e_nosub"]
    width = heads["value"].abs().median()  # half of the heads are where the scale is about linear
    low, high = np.arcsinh([min(0, heads["value"].min()) / width, max(0, heads["value"].max()) / width])
    step = (high - low) / ASINH_BINS
    edges = width * np.sinh(step * np.arange(math.floor(low / step), math.ceil(high / step) + 1))
    edges[[0, -1]] = min(edges[0], heads["value"].min()), max(edges[-1], heads["value"].max())  # despite rounding
    label = r"$\Delta = e_{\mathrm{TopK}{+}\phi} - e_{\mathrm{NoSub}}$ (asinh scale)"
    of_panel = heads.groupby(PANEL, sort=False)["value"]
    figure, axes = panels(1.55, len(of_panel), 2, label, "share of heads")
    for axis, (name, values) in zip(axes, of_panel, strict=True):
        _draw_bins(axis, values, edges, ("subtraction better", "NoSub better"))
        axis.axvline(values.median(), color="black", linestyle=":", linewidth=1, label="median")
        means = f"mean ${values.mean():+z.4f}$, median ${values.median():+z.4f}$"
        shares = f"{(values < 0).mean():.1%} favour subtraction, {(values > 0).mean():.1%} NoSub"
        axis.set_title(f"{TITLE.format(*name)}, {len(values):,} heads\n{means}\n{shares}", fontsize=7)
    make_asinh(axes[0].xaxis, width)
    return finish(figure, spec)


def _draw_bins(axis: Axes, values: pd.Series, edges: np.ndarray, names: tuple[str, str]) -> None:
    """Draws the shares of values by bin, coloured by their side of 0, an edge, and the mean. What lies beyond all bins
    is hatched in the outermost ones.
    """
    shares, zero = np.histogram(values, edges)[0] / len(values), np.searchsorted(edges, 0)
    axis.stairs(shares[:zero], edges[: zero + 1], fill=True, color=BLUE, label=names[0])
    axis.stairs(shares[zero:], edges[zero:], fill=True, color=VERMILLION, label=names[1])
    beyond = {"facecolor": "none", "edgecolor": GREY, "linewidth": 0.6, "hatch": "//////"}
    beyond["label"] = "beyond the range, in the outermost bin"
    for low, bin, share in ((shares[0], edges[:2], (values < edges[0]).mean()),
                            (shares[-1], edges[-2:], (values > edges[-1]).mean())):  # fmt: skip
        if share:
            axis.stairs([low + share], bin, baseline=low, fill=True, **beyond)
    axis.axvline(0, color=GREY, linewidth=0.7)
    axis.axvline(values.mean(), color="black", linestyle="--", linewidth=1, label="mean")
    axis.set_xlim(edges[0], edges[-1])
    axis.yaxis.set_major_formatter(PERCENT)
