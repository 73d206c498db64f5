"""Packs: texts to measure on, and the pass of the frozen model over one of them.

Shape letters: Hq / Hkv = query / KV heads, Q = queries per pack, L = prefill tokens, D = head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from residual_mass.core.settings import tokens_of
from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.frozen_prompts import REMEDY, load_manifest, load_prompts
from residual_mass.gold import gold_continuation
from residual_mass.model.hook import attention_hook, exact_attention, model_at_fault, window_of
from residual_mass.model.loading import Backbone
from residual_mass.study.specs import BackboneSpec
from residual_mass.texts.corpora import held_out_corpus, special_prefix

log = logging.getLogger(__name__)

Pack = list[int]
Visit = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""(layer, queries [Hq, Q, D], keys [Hkv, L, D], values [Hkv, L, D], scale), in the model's dtype, rotary-applied."""


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
    """Token ids of each pack: `length` tokens of prefill, then the `queries` tokens that are decoded after it.

    Fewer than `packs` where the text ends, as packs that share text are not independent.

    Args:
        prompts: manifest of RULER's frozen prompts at that length, the source of the corpora in PROMPT_PACKS.

    Raises:
        ValueError: the corpus is unknown, or its files are missing or changed.
    """
    if corpus in PROMPT_PACKS:
        if prompts is None:
            raise ValueError(f"corpus {corpus} is made of RULER's prompts; pass their manifest to --prompts")
        return prompt_packs(prompts, PROMPT_PACKS[corpus], backbone.tokenizer, length, queries, packs)
    texts = held_out_corpus(corpus, backbone.tokenizer, tokens_of(length) + queries, seed, assets)
    made = texts.disjoint(packs)
    if len(made) < packs:
        log.warning("%d packs instead of %d: corpus %s holds no more text", len(made), packs, corpus)
    return made


def prompt_packs(
    manifest: Path, task: str, tokenizer: PreTrainedTokenizerBase, length: str, queries: int, packs: int
) -> list[Pack]:
    """Packs whose prefill ends with a prompt of a task, and whose decoded tokens are its answer. The prefill is filled
    up in front with other prompts and their answers, with unused ones first.

    At most one pack per frozen prompt.

    Raises:
        ValueError: the prompts are missing, changed or of another length, or an answer has fewer tokens than `queries`.
    """
    asked = _frozen_prompts(manifest, task, length)
    if len(asked) < packs:
        log.info("%d packs instead of %d: %s holds no more prompts", len(asked), packs, manifest)
    front = special_prefix(tokenizer)
    wanted = tokens_of(length) - len(front)

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    made: list[Pack] = []
    unused = iter(asked[packs:])
    for last in range(min(packs, len(asked))):
        prefill, before = tokens(asked[last][0]), last
        while len(prefill) < wanted:
            filler = next(unused, None)
            if filler is None:
                before -= 1
                filler = asked[before % len(asked)]
            prefill = tokens("".join(filler) + "\n\n") + prefill
        answer = tokens(asked[last][1])
        if len(answer) < queries:
            raise ValueError(f"diagnostics.queries: an answer of {task} has {len(answer)} tokens; ask for no more")
        made.append(front + prefill[-wanted:] + answer[:queries])
    return made


def _frozen_prompts(manifest: Path, task: str, length: str) -> list[tuple[str, str]]:
    """(prompt, answer) of every example of the task."""
    frozen = load_manifest(manifest)
    if frozen["length"] != length:
        raise ValueError(f"{manifest}: has prompts of length {frozen['length']}, not {length}; {REMEDY}")
    prompts = load_prompts(manifest, task, frozen["examples"])
    return [(each.prompt, gold_continuation(task, each.doc)) for each in prompts]


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
            visit(module.layer_idx, q[0, :, length:], k[0, :, :length], v[0, :, :length], scale)
        return exact_attention(module, q, k, v, mask, scale)

    with attention_hook(backbone.model, handler, hybrid=hybrid):
        inputs = torch.tensor([list(pack)], device=backbone.device)
        backbone.model.get_decoder()(inputs, use_cache=False)


def with_place(frame: pd.DataFrame, backbone: BackboneSpec, corpus: str, length: str, **more: Any) -> pd.DataFrame:
    """The frame with constant columns in front that describe its rows."""
    place = {"backbone": backbone.name, "corpus": corpus, "length": length, **more}
    constant = pd.DataFrame({name: pd.Categorical([value]).repeat(len(frame)) for name, value in place.items()})
    return pd.concat([constant, frame.reset_index(drop=True)], axis="columns")
