"""Generated tokens that are folded into the prompt, in `partial_kv`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import tiny_llama
from tests.needs import KERNELS, needs
from torch import Tensor
from transformers import Cache, DynamicCache

from residual_mass.core.selection import partition
from residual_mass.decode.packed_backend import PackedCache
from residual_mass.decode.session import Session, partial_kv
from residual_mass.methods import (
    METHODS,
    Method,
    QuantisedScan,
    ScanRegression,
)
from residual_mass.model.loading import Backbone
from residual_mass.spec.settings import AnchorSpec

ANCHORS = AnchorSpec(2, 5)
PROMPT, STEPS, FOLD = 60, 28, 8
IN_ORDER = (
    "topk_moments_8", "topk_moments_shared", "topk_centroids", "topk_importance", "scan4_regression_64",
    "scan3_regression_32", "group4_regression_64", "channels_regression_64",
)  # fmt: skip
"""Their parts depend on the order in which tokens came."""
OWN = [*(one for one in METHODS if one.own is not None), Method("regression", "", QuantisedScan(4), ScanRegression())]


def generated(
    backbone: Backbone, fold: int | None, method: str | Method = "topk", budget: float = 0.3, cache: Cache | None = None
) -> tuple[Session, Tensor]:
    """The session and the tokens of a left-padded batch: rows of 60 and of 41 tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 258, (2, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :19] = 0
    with partial_kv(backbone.model, method, budget, num_sink=2, num_tail=5, fold=fold) as session:
        made = backbone.model.generate(
            ids, attention_mask=mask, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, pad_token_id=0,
            past_key_values=cache,
        )  # fmt: skip
    return session, made


def test_without_folding_the_prefix_stays_the_prompt(tiny_backbone: Backbone) -> None:
    cache = DynamicCache()
    session, _ = generated(tiny_backbone, None, cache=cache)
    assert session.backend_of(cache).prefixes[0][0].partition.mid.shape[-1] == PROMPT


def test_reading_everything_is_full_attention_however_much_is_folded(tiny_backbone: Backbone) -> None:
    _, full = generated(tiny_backbone, None, "full")
    for fold in (1, FOLD):
        assert torch.equal(generated(tiny_backbone, fold, "topk", 1.0)[1], full)


@pytest.mark.parametrize("method", OWN, ids=lambda one: one.name)
def test_states_are_those_of_prompt_and_folded_tokens(method: Method, tiny_backbone: Backbone) -> None:
    """Older tokens and the anchors that they push on are in the mid-region; where a state depends on the order in which
    tokens came, it has as many of them.
    """
    cache = DynamicCache()
    session, _ = generated(tiny_backbone, FOLD, method, cache=cache)
    layer = session.backend_of(cache).prefixes[1][0]
    length = layer.partition.mid.shape[-1]
    new = STEPS - 1  # the last token is never read
    assert length == PROMPT + FOLD * ((new - FOLD - 1) // FOLD) and new - (length - PROMPT) <= 2 * FOLD
    real = torch.ones(2, length, dtype=torch.bool)
    real[1, :19] = False
    mid = partition(real, ANCHORS.sink, ANCHORS.tail).mid
    assert torch.equal(layer.partition.mid[:, 0, 0], mid)
    ((residual, state),) = layer.states.items()
    keys, values = (x[:, :, :length] for x in (cache.layers[1].keys, cache.layers[1].values))
    at_once = residual.prepare(keys, values, mid[:, None])
    if method.name in IN_ORDER:
        count = state[2] if method.name == "topk_importance" else state.count  # after its places: those of clusters
        assert torch.equal(count.sum(-1), mid.sum(-1, keepdim=True).expand(2, 2).float())
        return
    loose = 2e-2 if method.name == "regression" else 1e-4
    for ours, theirs in zip(state, at_once, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=loose, atol=loose)


ROWS = (
    "topk_moments", "topk_moments_8", "topk_centroids", "topk_importance", "scan4_regression_64",
    "channels_regression_64", "pages", "clusters_sums", "cache8",
)  # fmt: skip


@pytest.mark.parametrize("method", ROWS)
@torch.no_grad()
def test_a_short_row_of_a_padded_batch_is_summarised_as_alone(method: str) -> None:
    """Its mid-region doubles twice, and that of the long row does not. Padding of 192 columns keeps blocks aligned."""
    model = tiny_llama(layers=2).double()
    short, long, given = (
        torch.randint(2, 258, (1, n), generator=torch.Generator().manual_seed(n)) for n in (36, 228, 60)
    )
    padded = torch.cat((torch.ones(1, 192, dtype=torch.long), short), 1)
    batch, mask = torch.cat((padded, long)), torch.ones(2, 228, dtype=torch.long)
    mask[0, :192] = 0

    def logits(ids: Tensor, mask: Tensor) -> Tensor:
        """[T, V] of the first row after each given token."""
        cache, found = DynamicCache(), []
        with partial_kv(model, method, 0.3, num_sink=2, num_tail=5, fold=FOLD):
            for tokens in (ids, *given.split(1, 1)):
                at = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
                tokens = tokens.expand(len(ids), -1)
                output = model(tokens, attention_mask=mask, position_ids=at, past_key_values=cache, logits_to_keep=1)
                mask = torch.cat((mask, mask[:, -1:]), 1)
                found.append(output.logits[0, -1])
        return torch.stack(found)

    alone = logits(short, torch.ones_like(short))
    torch.testing.assert_close(logits(batch, mask), alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "do_sample": True}], ids=["beams", "sampled"])
def test_beams_are_refused_before_a_step(options: dict[str, Any]) -> None:
    """Given as arguments or by the model's own settings; without `fold` they are those of full attention."""
    model = tiny_llama(layers=2)
    ids = torch.randint(2, 258, (1, 30), generator=torch.Generator().manual_seed(1))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "pad_token_id": 0}
    torch.manual_seed(0)
    plain = model.generate(ids, **settings, **options)
    line = "^fold joins tokens .* but beam (search|sample) moves rows .* leave fold out, or .* num_beams=1$"
    with partial_kv(model, "topk", 1.0) as session:
        torch.manual_seed(0)
        assert torch.equal(model.generate(ids, **settings, **options), plain)
    assert session.partial_calls == {0: 8, 1: 8}
    with partial_kv(model, "cache8", fold=2) as session:
        with pytest.raises(ValueError, match=line):
            model.generate(ids, **settings, **options)
        model.generation_config.update(**options)
        with pytest.raises(ValueError, match=line):
            model.generate(ids, **settings)
        assert not session.partial_calls
        model.generate(ids, **settings, num_beams=1, do_sample=False)


MODES = {
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "group beam search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beam search": {"num_beams": 2, "force_words_ids": [[5]]},
}


@pytest.mark.parametrize("mode", MODES)
def test_other_modes_that_move_rows_are_refused(mode: str) -> None:
    model = tiny_llama(layers=1)
    ids = torch.randint(2, 258, (1, 30), generator=torch.Generator().manual_seed(1))
    options = MODES[mode] | {"trust_remote_code": True}  # transformers 5 would fetch these modes, and is stopped before
    with partial_kv(model, "full", fold=2), pytest.raises(ValueError, match=f"^fold joins .* but {mode} moves rows"):
        model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0, **options)


@needs(KERNELS)
def test_beams_over_a_packed_cache_are_refused_before_a_step() -> None:
    model = tiny_llama(layers=1, width=64)
    cache, ids = PackedCache(model, "cache8"), torch.full((1, 30), 7)
    with partial_kv(model, "cache8", cache=cache), pytest.raises(ValueError, match="does not follow beam search.*=1"):
        model.generate(ids, past_key_values=cache, num_beams=2, max_new_tokens=4, pad_token_id=0)
    assert cache.get_seq_length() == 0


def test_folded_tokens_compete_for_the_budget(tiny_backbone: Backbone) -> None:
    """K grows with the prefix, and attention is that of the tokens chosen, written out."""
    cache = DynamicCache()
    session, _ = generated(tiny_backbone, FOLD, cache=cache)
    layer, _, rows = session.backend_of(cache).prefixes[0]
    length = layer.partition.mid.shape[-1]
    assert rows.k[:, 0, 0].tolist() == [-(-3 * n // 10) - 7 for n in (length, length - 19)]


@pytest.mark.parametrize("fold", [0, -3])
def test_less_than_a_token_is_refused(fold: int, tiny_backbone: Backbone) -> None:
    with pytest.raises(ValueError, match=f"fold is {fold}, not 1 or more tokens"):
        generated(tiny_backbone, fold)
