"""Packs, the token sequences to measure on, and the pass of the frozen model over one of them.

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
from torch import Tensor

from residual_mass.core.selection import retrieved_count
from residual_mass.decode.backend import LayerCall
from residual_mass.decode.recording import Recording
from residual_mass.decode.text import Text
from residual_mass.model.finite import model_at_fault
from residual_mass.model.layers import require_plain, window_of
from residual_mass.model.loading import Backbone
from residual_mass.spec.settings import AnchorSpec, tokens_of
from residual_mass.spec.specs import BackboneSpec
from residual_mass.spec.texts import PROMPT_PACKS
from residual_mass.texts.corpora import held_out_corpus, special_prefix
from residual_mass.texts.frozen_prompts import gold_continuation, load_manifest, load_prompts, require_prompts_of

log = logging.getLogger(__name__)

Pack = list[int]
Visit = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""(layer, queries [Hq, Q, D], keys [Hkv, L, D], values [Hkv, L, D], scale), in float32, after rotary embedding."""


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

    Packs share no text. A text that is too short gives fewer than `packs`. For a corpus in PROMPT_PACKS, a frozen
    prompt of the task ends each prefill, and its answer gives the decoded tokens. The front of the prefill is filled
    with other prompts and their answers, unused ones first.

    Args:
        prompts: manifest of RULER's frozen prompts at that length, for the corpora in PROMPT_PACKS.

    Raises:
        ValueError: the corpus is unknown, its files are missing or changed, or an answer is shorter than `queries`.
    """
    if corpus in PROMPT_PACKS:
        if prompts is None:
            raise ValueError(f"corpus {corpus} consists of RULER's prompts; pass their manifest to --prompts")
        return _prompt_packs(prompts, PROMPT_PACKS[corpus], backbone, length, queries, packs)
    texts = held_out_corpus(corpus, backbone.tokenizer, tokens_of(length) + queries, seed, assets)
    sequences = texts.disjoint(packs)
    if len(sequences) < packs:
        log.warning("%d packs instead of %d: corpus %s holds no more text", len(sequences), packs, corpus)
    return sequences


def _prompt_packs(manifest: Path, task: str, backbone: Backbone, length: str, queries: int, packs: int) -> list[Pack]:
    require_prompts_of(manifest, "ruler", length, backbone.spec.tokenizer)
    count = load_manifest(manifest)["examples"]
    prompts = load_prompts(manifest, task, count)
    examples = [(prompt.prompt, gold_continuation(task, prompt.doc)) for prompt in prompts]
    front = special_prefix(backbone.tokenizer)
    wanted = tokens_of(length) - len(front)

    def tokens(text: str) -> list[int]:
        return backbone.tokenizer(text, add_special_tokens=False).input_ids

    sequences: list[Pack] = []
    unused = iter(examples[packs:])
    for last, (prompt, answer) in enumerate(examples[:packs]):
        prefill = tokens(prompt)
        before = last  # once all others are used, those before this prompt come again
        while len(prefill) < wanted:
            filler = next(unused, None)
            if filler is None:
                before -= 1
                filler = examples[before % len(examples)]
            prefill = tokens("".join(filler) + "\n\n") + prefill
        decoded = tokens(answer)
        if len(decoded) < queries:
            raise ValueError(f"diagnostics.queries: an answer of {task} has {len(decoded)} tokens; ask for no more")
        # Cut at the front: the prompt of the task must end the prefill.
        sequences.append(front + prefill[-wanted:] + decoded[:queries])
    return sequences


@torch.no_grad()
def visit_layers(backbone: Backbone, pack: Sequence[int], length: int, visit: Visit, hybrid: bool = False) -> None:
    """Runs the model over a pack and calls `visit` with the attention inputs of each layer that reads the whole text.

    Args:
        hybrid: whether other layers are allowed.

    Raises:
        ValueError: queries, keys or values are not finite; names the layer.
    """

    def observe(call: LayerCall) -> None:
        if not all(x.isfinite().all() for x in (call.query, call.key, call.value)):
            what = f"the queries, keys or values of layer {call.index} are not finite"
            raise ValueError(f"{backbone.spec.name}: {what}; {model_at_fault(backbone.spec)}")
        if window_of(call.module) is None:
            queries = call.query[0, :, length:].float()
            keys = call.key[0, :, :length].float()
            values = call.value[0, :, :length].float()
            visit(call.index, queries, keys, values, call.scale)

    if not hybrid:
        require_plain(backbone.model)
    ids = torch.tensor([list(pack)], device=backbone.device)
    Text(backbone.model, Recording(observe)).read(ids)


def ks_of(budgets: Sequence[float], length: str, anchors: AnchorSpec) -> list[int]:
    """Returns K of every budget; raises ValueError if the mid-region has fewer than two tokens: entropies need two."""
    fixed = anchors.sink + anchors.tail
    if tokens_of(length) <= fixed + 1:
        raise ValueError(f"length {length}: {fixed} anchors leave fewer than two mid-region tokens; take a longer one")
    return [retrieved_count(budget, tokens_of(length), fixed) for budget in budgets]


def tidy(
    measured: Mapping[str, Tensor], names: Sequence[str], last: Mapping[str, Sequence[float]], **constant: object
) -> pd.DataFrame:
    """Returns one row per entry of tensors [*names, any]. Columns: constants, the index in each named dimension, the
    values in `last` at the index in the last dimension, and the entries.
    """
    shape = next(iter(measured.values())).shape
    *indices, slot = np.indices(shape).reshape(len(shape), -1)  # the index of each entry in each dimension
    columns = constant | dict(zip(names, indices, strict=True))
    for name, values in last.items():
        columns[name] = np.asarray(values)[slot]
    for name, value in measured.items():
        columns[name] = value.cpu().numpy().ravel()
    return pd.DataFrame(columns)


def with_place(frame: pd.DataFrame, backbone: BackboneSpec, corpus: str, length: str, **more: Any) -> pd.DataFrame:
    """Returns the frame with constant columns in front that describe its rows."""
    place = {"backbone": backbone.name, "corpus": corpus, "length": length, **more}
    columns = {}
    for name, value in place.items():
        columns[name] = pd.Categorical([value]).repeat(len(frame))
    return pd.concat([pd.DataFrame(columns), frame.reset_index(drop=True)], axis="columns")
