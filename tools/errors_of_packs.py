"""Errors of methods over TopK's on packs of any length and text, RULER's needles too, and how many heads they harm.

    python tools/errors_of_packs.py ASSETS LENGTH CORPUS PACKS [PROMPTS]  # a manifest of RULER's, for needles and cwe

Packs are those of `capture`, methods read the same tokens of the mini backbone. The residual-errors stage measures
studies; this looks where no study does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import yaml
from torch import Tensor

from residual_mass.core.settings import AnchorSpec, tokens_of
from residual_mass.diagnostics.packs import make_packs, visit_layers
from residual_mass.model.errors import ReadLayer
from residual_mass.model.loading import load_backbone
from residual_mass.study.plan import load

ROOT = Path(__file__).parents[1]
METHODS = (
    "topk", "topk_moments", "topk_moments_8", "topk_moments_shared", "topk_centroids", "scan4_regression_64",
    "scan3_regression_32",
)  # fmt: skip
BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0)
QUERIES = 8


def main(assets: Path, length: str, corpus: str, packs: int, prompts: Path | None) -> None:
    plan = load(ROOT, yaml.safe_load((ROOT / "config" / "config.yaml").read_text()))
    backbone = load_backbone(plan.backbone_spec("smol-methods"), assets)
    errors: dict[str, list[Tensor]] = {method: [] for method in METHODS}

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        read = ReadLayer(queries.float(), keys.float(), values.float(), scale, BUDGETS, AnchorSpec(), None)
        for method in METHODS:
            errors[method].append(read.errors(method)["error"].double().mean(1))  # [Hq, B]

    made = make_packs(corpus, backbone, length, QUERIES, packs, 0, assets, prompts)
    for pack in made:
        visit_layers(backbone, pack, tokens_of(length), visit)
    by_head = {method: torch.stack(found).unflatten(0, (len(made), -1)).mean(0) for method, found in errors.items()}
    topk = by_head["topk"]
    print(f"{corpus} {length}, {len(made)} packs; % read: {', '.join(f'{budget:g}' for budget in BUDGETS)}")
    print(f"{'topk':24}", *(f"{value:12.3f}" for value in topk.mean((0, 1)).tolist()))
    for method in METHODS[1:]:
        over = by_head[method].mean((0, 1)) / topk.mean((0, 1))
        above = (by_head[method] > topk).sum((0, 1))
        print(f"{method:24}", *(f"{o:6.3f} ({a:3d})" for o, a in zip(over.tolist(), above.tolist(), strict=True)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]) if sys.argv[5:] else None)
