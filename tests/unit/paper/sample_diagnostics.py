"""Captured rows, kernels and tokens with chosen or random values, as the stages write them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pandas as pd

METHODS = ("full", "topk", "topk_phi", "topk_phi_nosub")
VARIANTS = ("1k", "1k-hedgehog_map", "1k-lolcats_loss", "1k-kl_only", "1k-aux_only")
ONE_HEAD = (1, 2)
"""Layer and head of the kernels."""


def heads(layers: int = 4, heads: int = 5, packs: int = 2, queries: int = 3, **facts: Any) -> pd.DataFrame:
    """Shuffled rows at K = 1 and 21, with heavy tails in what calibration shows; `facts` replace columns."""
    rng = np.random.default_rng(7)
    sizes = [range(packs), range(layers), range(heads), range(queries), (1, 21)]
    index = pd.MultiIndex.from_product(sizes, names=["pack", "layer", "head", "query", "k"])
    frame = index.to_frame(index=False).assign(backbone="smol", corpus="wiki", length="1k")
    frame["budget_percent"] = frame["k"].map({1: 2.0, 21: 4.0})
    for name in ("e_topk", "e_sub", "residual_share_hat", "log_z_true"):
        frame[name] = rng.random(len(frame), dtype=np.float32)
    frame["log_z_hat"] = (frame["log_z_true"] + rng.standard_t(1.5, len(frame)) - 0.5).astype("float32")
    frame["e_nosub"] = (frame["e_sub"] + 0.01 * rng.standard_t(1.5, len(frame))).astype("float32")
    row = frame.groupby(["pack", "layer", "head", "query"]).ngroup()
    frame["h_mid"] = rng.random(len(frame), dtype=np.float32)[row]  # the same at every K
    return frame.assign(**facts).sample(frac=1, random_state=1, ignore_index=True)


def mass(layers: int = 4, heads: int = 5, ks: tuple[int, ...] = (1, 3, 10, 30, 70)) -> pd.DataFrame:
    """Mass that the K largest kernels of every head hold, in two packs."""
    index = pd.MultiIndex.from_product(
        [range(2), range(layers), range(heads), ks], names=["pack", "layer", "head", "k"]
    )
    frame = index.to_frame(index=False)
    frame["c_mid"] = np.random.default_rng(9).random(len(frame))
    return frame.sample(frac=1, random_state=2, ignore_index=True)


def kernels(maps: tuple[str, ...] = VARIANTS, queries: int = 3, keys: int = 40, k: int = 21) -> pd.DataFrame:
    """Shuffled rows of kernels that all maps share and of scores that are the further off the later the maps."""
    rng = np.random.default_rng(3)
    index = pd.MultiIndex.from_product([range(queries), range(4, 4 + keys)], names=["query", "position"])
    base = index.to_frame(index=False).assign(log_kernel=rng.normal(2, 1.5, len(index)).astype("float32"))
    order = base.groupby("query")["log_kernel"].rank(ascending=False, method="first")
    base = base.assign(retrieved=order <= k, layer=ONE_HEAD[0], head=ONE_HEAD[1], k=k)
    frames = []
    for number, label in enumerate(maps):
        noise = rng.normal(number**2, 0.7, len(base)).astype("float32")
        frames.append(base.assign(maps=label, log_phi=(0.8 * base["log_kernel"] + noise).astype("float32")))
    return pd.concat(frames).sample(frac=1, random_state=5, ignore_index=True)


def tokens(documents: int = 4, longest: int = 5) -> pd.DataFrame:
    """Forced tokens under all arms, also in states and with maps that figures leave out. Documents are of unequal
    lengths, and the last one alone has a token of which the prompt has nothing.
    """
    rng = np.random.default_rng(5)
    rows = []
    for index, position in product(range(documents), range(longest)):
        if index == 1 and position > 2:
            continue
        about = {"task": "", "index": index, "position": position, "full_nll": rng.exponential()}
        about["seen"] = 0 if index == documents - 1 and position == 0 else int(rng.integers(1, 3))
        arms = product((("wiki", "following"), ("books", "following")), ("own", "dense"), METHODS, (2.0, 4.0))
        for (text, continuation), state, method, budget in arms:
            for maps in ("2k", "512") if "phi" in method else ("",):
                of = {"method": method, "maps": maps, "budget_percent": np.nan if method == "full" else budget}
                of |= {"text": text, "continuation": continuation, "state": state}
                rows.append(of | about | {"kl": 0.0 if method == "full" else rng.lognormal(-4, 2)})
    return pd.DataFrame(rows).sample(frac=1, random_state=1, ignore_index=True)


def distances(length: str) -> list[dict[str, Any]]:
    """Rows of a fidelity file: of a corpus and a benchmark, and of much that the figure does not show."""
    rng = np.random.default_rng(len(length))
    places = [("wiki", "following", "own"), ("wiki", "following", "dense"), ("books", "following", "own")]
    places += [("ruler", "gold", "own"), ("ruler", "greedy", "own")]
    arms = [(method, budget, "2k" * ("phi" in method)) for method in METHODS[1:] for budget in (8, 2)]
    rows = []
    for (text, continuation, state), task, metric in product(places, ("niah", "all"), ("nll", "kl", "kl_max")):
        others = [("topk_phi", budget, maps) for maps in ("512", "1k") for budget in (8, 2) if text == "wiki"]
        for method, budget, maps in [*arms, *others]:
            value = rng.uniform(0.01, 1)
            place = {"text": text, "task": task, "continuation": continuation, "state": state, "length": length}
            arm = {"method": method, "budget_percent": budget, "maps": maps, "metric": metric, "documents": 12}
            rows.append(place | arm | {"value": value, "ci_low": value / 2, "ci_high": 2 * value})
    return rows


def log_rows(ks: tuple[int, ...], scale: float = 1.0) -> list[dict[str, Any]]:
    """A training log of three measurements, of which figures show the rows of all layers on wiki."""
    rows = []
    for number, (step, corpus, k, layer) in enumerate(product((0, 20, 30), ("wiki", "books"), ks, ("all", 0, 1))):
        shown = corpus == "wiki" and layer == "all"
        e_sub = scale * (2 - step / 20) / (1 + k) if shown else 100.0
        rows.append({
            "recipe": "study", "variant": "study", "seed": 0, "step": step, "seconds": f"{step:.1f}",
            "corpus": corpus, "k": k, "layer": layer, "e_topk": 1 / (1 + k), "e_sub": e_sub, "e_nosub": 1.1 * e_sub,
            "heads_below_topk": 0.5, "kl": 1 + (60 - step) / 60 if shown else number, "log_z_error": "nan",
        })  # fmt: skip
    return rows
