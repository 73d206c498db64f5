"""Figure of the share of the mid-region's mass in its largest kernels, over their number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from residual_mass.files import read_parquet
from residual_mass.paper.figures.captured import (
    HEAD,
    TEXT,
)
from residual_mass.paper.figures.registry import figure
from residual_mass.paper.figures.style import GREY, TEXT_WIDTH, make_x_logarithmic, plain
from residual_mass.paper.figures.summaries import head_means, quartiles
from residual_mass.study.specs import FigureSpec

LOW, HIGH = (0.02, 0.10, 0.25), (0.75, 0.90, 0.98)
"""Quantiles of the heads by entropy with a curve."""
SHADES = {"low": ("#0072B2", "#3B97CC", "#7CC0E5"), "high": ("#E8A07A", "#D55E00", "#8F3F00")}
"""Colours of the curves, from the lowest entropy to the highest."""
LINES = {"low": "-", "high": "--"}


def mass_curves_points(spec: FigureSpec, data: Sequence[Path]) -> pd.DataFrame:
    """Computes C_mid against K: one row per (curve, k).

    Curves of `family` low and high are single heads (`layer`, `head`, mean entropy `h_mid`) with their mean `y` over
    packs; `all` is the median over heads with quartiles `low` and `high`; `budgets` has the study's K without y.
    """
    mass_file, heads_file = data
    mass = read_parquet(mass_file, [*TEXT, *HEAD, "k", "c_mid"], "capture")
    heads = read_parquet(heads_file, [*TEXT, *HEAD, "k", "h_mid"], "capture")
    curves = head_means(mass[[*HEAD, "k", "c_mid"]], [*HEAD, "k"]).rename(columns={"c_mid": "y"})
    parts = []
    for family, chosen in _representatives(head_means(heads[[*HEAD, "h_mid"]], HEAD)).items():
        for index in range(len(chosen)):
            parts.append(chosen.iloc[[index]].merge(curves, on=HEAD).assign(family=family))
    parts.append(quartiles(curves.groupby("k")["y"]).reset_index().assign(family="all"))
    budgets = sorted(set(heads["k"]) - {0})  # a logarithmic axis has no place for K = 0
    return pd.concat([*parts, pd.DataFrame({"k": budgets, "family": "budgets"})], ignore_index=True)


@figure(
    "mass_curves",
    mass_curves_points,
    caption=(
        r"Share $C_{\mathrm{mid}}(K)$ of the mid-region's attention mass that its $K$ largest kernels hold: of single "
        r"heads with low and with high entropy, and the median and the middle half of all heads."
    ),
)
def draw_mass_curves(spec: FigureSpec, points: pd.DataFrame) -> Figure:
    """Draws curves of single heads; a darker blue means lower entropy, a darker orange higher entropy."""
    figure = Figure(figsize=(TEXT_WIDTH, 2.7), layout="constrained")
    axis = figure.subplots()
    band = points[points["family"] == "all"]
    axis.fill_between(
        band["k"], band["low"], band["high"], color=GREY, alpha=0.2, linewidth=0, label="middle half of heads"
    )
    axis.plot(band["k"], band["y"], color=GREY, linewidth=0.8, label="median head")
    for family, shades in SHADES.items():
        curves = points[points["family"] == family].groupby([*HEAD, "h_mid"], sort=False)
        for ((layer, head, h_mid), curve), shade in zip(curves, shades, strict=False):
            label = rf"layer {layer:g}, head {head:g}: $H_{{\mathrm{{mid}}}} = {h_mid:z.2f}$"
            axis.plot(curve["k"], curve["y"], color=shade, linestyle=LINES[family], linewidth=1.3, label=label)
    budgets = points.loc[points["family"] == "budgets", "k"]
    for k in budgets:
        axis.axvline(k, color="black", linestyle=":", linewidth=0.8, zorder=0)
    if len(budgets):
        named = ", ".join(f"{k:,.0f}" for k in budgets)
        axis.plot([], [], color="black", linestyle=":", linewidth=0.8, label=f"$K$ of the study: {named}")
    make_x_logarithmic(axis, points["k"].min(), points["k"].max())
    axis.set(ylim=(0, 1.02), xlabel="retrieved keys $K$", ylabel=r"$C_{\mathrm{mid}}(K)$")
    figure.legend(loc="outside right center", fontsize=7, frameon=False)
    figure.suptitle(plain(spec.title), fontsize=9)
    return figure


def _representatives(heads: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns heads at fixed quantiles of the entropy, fewer if there are too few heads."""
    ordered = heads.sort_values(["h_mid", *HEAD], ignore_index=True)
    places = {
        family: dict.fromkeys(round(quantile * (len(ordered) - 1)) for quantile in quantiles)
        for family, quantiles in (("low", LOW), ("high", HIGH))
    }
    high = [place for place in places["high"] if place not in places["low"]]
    return {"low": ordered.iloc[[*places["low"]]], "high": ordered.iloc[high]}
