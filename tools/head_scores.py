"""Draws what one head leaves unread, for docs/methods.md: its scores, the fitted Gaussian, the cut, and their masses.

python tools/head_scores.py ASSETS LAYER HEAD OUT.png    # ASSETS is results/assets of a mini study
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import yaml
from torch import Tensor

from residual_mass.core.moments import moments_of, truncated_terms
from residual_mass.core.selection import full_prefix, partition, retrieved_count
from residual_mass.diagnostics.packs import make_packs, visit_layers
from residual_mass.model.loading import load_backbone
from residual_mass.paper.figures.style import DPI, paper_style
from residual_mass.study.plan import load

ROOT = Path(__file__).parents[1]
LENGTH, BUDGET, SINK, TAIL = 1024, 4, 4, 16
BINS = 60


def head_scores(assets: Path, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query [D], scaled, and the keys and values [|M|, D] of the mid-region that it looks at, float64."""
    plan = load(ROOT, yaml.safe_load((ROOT / "config" / "config.yaml").read_text()))
    backbone = load_backbone(plan.backbone_spec("smol"), assets)
    (pack,) = make_packs("wiki", backbone, "1k", 1, 1, 0, assets, None)
    mid = partition(full_prefix(LENGTH), SINK, TAIL).mid
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def visit(index: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        if index == layer:
            kv = head * len(keys) // len(queries)
            found.append((queries[head, 0].double() * scale, keys[kv, mid].double(), values[kv, mid].double()))

    visit_layers(backbone, pack, LENGTH, visit)
    return found[0]


def draw(query: Tensor, keys: Tensor, values: Tensor, out: Path) -> None:
    """Left: scores and the Gaussian of their mean and variance. Right: the same weighted by e^score, which is mass."""
    scores = keys @ query
    k = retrieved_count(BUDGET, LENGTH, SINK + TAIL)
    tau = scores.topk(k).values[-1:]
    moments = moments_of(keys, values, torch.zeros(len(keys), dtype=torch.int64))
    estimate = float(truncated_terms(query[None], moments, tau).log_mass())
    unread, read = (scores[chosen].numpy() for chosen in (scores < tau, scores >= tau))
    unread_mass = np.exp(unread).sum()

    edges = np.linspace(float(scores.min()), float(scores.max()), BINS + 1)
    grid = np.linspace(edges[0], float(tau), 600)
    mean, deviation = float(scores.mean()), float(scores.std(correction=0))
    density = np.exp(-0.5 * ((grid - mean) / deviation) ** 2) / (deviation * math.sqrt(2 * math.pi))
    tokens = len(scores) * (edges[1] - edges[0]) * density

    def in_shares(x: np.ndarray) -> np.ndarray:
        return np.exp(x) / unread_mass

    with paper_style():
        figure, axes = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
        for axis, weights, curve in ((axes[0], np.ones_like, tokens), (axes[1], in_shares, tokens * in_shares(grid))):
            axis.hist(read, edges, weights=weights(read), color="0.6", label=f"read exactly ({k})")
            axis.hist(unread, edges, weights=weights(unread), color="C0", label="left unread")
            axis.plot(grid, curve, color="C3", linewidth=1.4, label="Gaussian, cut")
            axis.axvline(float(tau), color="black", linewidth=0.8, linestyle="--", label="least score read")
            axis.set_xlabel("score (nats)")
        highest = np.histogram(unread, edges, weights=in_shares(unread))[0].max()
        axes[1].set_ylim(0, 1.15 * highest)  # the bars of what is read are far higher
        axes[0].set_ylabel("tokens")
        axes[1].set_ylabel("mass over that of the unread")
        axes[0].legend(frameon=False, fontsize=7)
        ratio = math.exp(estimate) / unread_mass
        axes[1].set_title(f"unread mass: estimate / truth = {ratio:.2f}", fontsize=8)
        figure.savefig(out, dpi=DPI)


if __name__ == "__main__":
    assets, layer, head, out = sys.argv[1:]
    draw(*head_scores(Path(assets), int(layer), int(head)), Path(out))
