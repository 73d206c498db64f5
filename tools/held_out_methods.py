"""Errors of methods on the held-out packs that a training logs, to set beside its `e_sub`.

    python tools/held_out_methods.py ASSETS LENGTH LOG.csv    # the log of a training of the mini backbone

The tokens, the queries and the means are those of `training/held_out.py`, so TopK's error must equal the log's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import torch
import yaml
from torch import Tensor

from residual_mass.core.settings import tokens_of
from residual_mass.diagnostics.packs import visit_layers
from residual_mass.model.errors import ReadLayer
from residual_mass.model.loading import load_backbone
from residual_mass.study.plan import load
from residual_mass.texts.corpora import held_out_corpus
from residual_mass.training.held_out import PACKS, QUERIES

ROOT = Path(__file__).parents[1]
METHODS = ("topk", "topk_moments", "topk_moments_8", "topk_moments_shared", "topk_centroids")


def main(assets: Path, length: str, log: Path) -> None:
    plan = load(ROOT, yaml.safe_load((ROOT / "config" / "config.yaml").read_text()))
    backbone, study = load_backbone(plan.backbone_spec("smol"), assets), plan.studies["mini"]
    budgets, anchors = study.phi.eval_budgets, study.anchors
    rows = pd.read_csv(log)
    rows = rows[rows.layer == "all"]
    for name in study.phi.held_out:
        corpus = held_out_corpus(name, backbone.tokenizer, tokens_of(length) + QUERIES, study.phi.seed, assets)
        errors: dict[str, list[Tensor]] = {method: [] for method in METHODS}

        def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
            inputs = (queries.float(), keys.float(), values.float(), scale)
            read = ReadLayer(*inputs, budgets, anchors, None)
            for method in METHODS:
                errors[method].append(read.errors(method)["error"].mean((0, 1)))  # noqa: B023

        for pack in range(PACKS):
            visit_layers(backbone, corpus.sequence(pack), tokens_of(length), visit)
        topk = torch.stack(errors["topk"]).mean(0)
        for method in METHODS:
            show(name, method, torch.stack(errors[method]).mean(0) / (1 if method == "topk" else topk))
        for step, logged in rows[rows.corpus == name].groupby("step"):
            by_k = logged.sort_values("k")
            show(name, f"topk_phi, {step} steps", torch.tensor((by_k.e_sub / by_k.e_topk).to_numpy()))


def show(corpus: str, label: str, values: Tensor) -> None:
    """TopK's errors as they are, the others' over TopK's."""
    print(f"{corpus:8s}{label:26s}", *(f"{value:.3f}" for value in values.tolist()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
