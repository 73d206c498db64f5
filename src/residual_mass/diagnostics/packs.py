"""Packs: texts to measure on, and the pass of the frozen model over one of them.

Shape letters: Hq / Hkv = query / KV heads, Q = queries per pack, L = prefill tokens, D = head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from residual_mass.core.selection import retrieved_count
from residual_mass.core.settings import AnchorSpec, tokens_of
from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.model.hook import attention_hook, exact_attention, model_at_fault, window_of
from residual_mass.model.loading import Backbone
from residual_mass.study.specs import BackboneSpec
from residual_mass.texts.corpora import held_out_corpus, special_prefix
from residual_mass.texts.frozen_prompts import gold_continuation, load_manifest, load_prompts, require_prompts_of

log = logging.getLogger(__name__)

Pack = list[int]
Visit = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""(layer, queries [Hq, Q, D], keys [Hkv, L, D], values [Hkv, L, D], scale), in float32, rotary-applied."""


def make_packs(
    corpus: str,
    backbone: Backbone,
    length: str,
    queries: int,
    packs: int,
    seed: int,
    assets: Path,
    prompts: Path | None,
) -> list[Pack]:
    """Returns token ids of each pack: `length` tokens of prefill, then the `queries` tokens that are decoded after it.

    Packs share no text; there are fewer than `packs` where it ends. A corpus of PROMPT_PACKS is made of a task's frozen
    prompts: each is the end of a prefill, with its answer as the decoded tokens, and the front of the prefill is filled
    with other prompts and their answers, unused ones first.

    Args:
        prompts: manifest of RULER's frozen prompts at that length, for the corpora in PROMPT_PACKS.

    Raises:
        ValueError: the corpus is unknown, its files are missing or changed, or an answer is shorter than `queries`.
    """
    if corpus in PROMPT_PACKS:
        if prompts is None:
            raise ValueError(f"corpus {corpus} is made of RULER's prompts; pass their manifest to --prompts")
        return _prompt_packs(prompts, PROMPT_PACKS[corpus], backbone, length, queries, packs)
    texts = held_out_corpus(corpus, backbone.tokenizer, tokens_of(length) + queries, seed, assets)
    made = texts.disjoint(packs)
    if len(made) < packs:
        log.warning("%d packs instead of %d: corpus %s holds no more text", len(made), packs, corpus)
    return made


def _prompt_packs(manifest: Path, task: str, backbone: Backbone, length: str, queries: int, packs: int) -> list[Pack]:
    require_prompts_of(manifest, "ruler", length, backbone.spec.tokenizer)
    prompts = load_prompts(manifest, task, load_manifest(manifest)["examples"])
    asked = [(each.prompt, gold_continuation(task, each.doc)) for each in prompts]  # with answers
    front = special_prefix(backbone.tokenizer)
    wanted = tokens_of(length) - len(front)

    def tokens(text: str) -> list[int]:
        return backbone.tokenizer(text, add_special_tokens=False).input_ids

    made: list[Pack] = []
    unused = iter(asked[packs:])
    for last, (prompt, answer) in enumerate(asked[:packs]):
        prefill, before = tokens(prompt), last
        while len(prefill) < wanted:
            filler = next(unused, None)
            if filler is None:
                before -= 1
                filler = asked[before % len(asked)]
            prefill = tokens("".join(filler) + "\n\n") + prefill
        decoded = tokens(answer)
        if len(decoded) < queries:
            raise ValueError(f"diagnostics.queries: an answer of {task} has {len(decoded)} tokens; ask for no more")
        made.append(front + prefill[-wanted:] + decoded[:queries])
    return made


@torch.no_grad()
def visit_layers(backbone: Backbone, pack: Sequence[int], length: int, visit: Visit, hybrid: bool = False) -> None:
    """Runs the model over a pack and calls `visit` with the attention inputs of each layer that reads the whole text.

    Args:
        hybrid: whether other layers are allowed.

    Raises:
        ValueError: they are not finite; names the layer.
    """

    def handler(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        if not all(x.isfinite().all() for x in (q, k, v)):
            what = f"the queries, keys or values of layer {module.layer_idx} are not finite"
            raise ValueError(f"{backbone.spec.name}: {what}; {model_at_fault(backbone.spec)}")
        if window_of(module) is None:
            queries, keys, values = q[0, :, length:], k[0, :, :length], v[0, :, :length]
            visit(module.layer_idx, queries.float(), keys.float(), values.float(), scale)
        return exact_attention(module, q, k, v, mask, scale)

    with attention_hook(backbone.model, handler, hybrid=hybrid):
        inputs = torch.tensor([list(pack)], device=backbone.device)
        backbone.model.get_decoder()(inputs, use_cache=False)


def ks_of(budgets: Sequence[float], length: str, anchors: AnchorSpec) -> list[int]:
    """K of every budget; raises ValueError where the mid-region has fewer than the two tokens that entropies need."""
    always = anchors.sink + anchors.tail
    if tokens_of(length) <= always + 1:
        raise ValueError(f"length {length}: {always} anchors leave fewer than two mid-region tokens; take a longer one")
    return [retrieved_count(budget, tokens_of(length), always) for budget in budgets]


def tidy(
    measured: Mapping[str, Tensor], names: Sequence[str], last: Mapping[str, Sequence[float]], **constant: object
) -> pd.DataFrame:
    """One row per entry of tensors [*names, any]: constant columns, the index in each named dimension, what `last` says
    of the place in the last one, and the entries.
    """
    *indices, slot = (index.ravel() for index in np.indices(next(iter(measured.values())).shape))
    columns = constant | dict(zip(names, indices, strict=True))
    columns |= {name: np.asarray(values)[slot] for name, values in last.items()}
    return pd.DataFrame(columns | {name: value.cpu().numpy().ravel() for name, value in measured.items()})


def with_place(frame: pd.DataFrame, backbone: BackboneSpec, corpus: str, length: str, **more: Any) -> pd.DataFrame:
    """Returns the frame with constant columns in front that describe its rows."""
    place = {"backbone": backbone.name, "corpus": corpus, "length": length, **more}
    constant = pd.DataFrame({name: pd.Categorical([value]).repeat(len(frame)) for name, value in place.items()})
    return pd.concat([constant, frame.reset_index(drop=True)], axis="columns")
