"""Drafts by partial attention, verified by full attention: the text, or its distribution, is full attention's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.needs import KERNELS, needs
from tests.unit.model.families import FAMILIES, Family, cases
from tests.unit.model.test_families import AS_OTHERS, FEW, WORKING, ids_of
from tests.unit.model.test_packed import model as wide_model  # noqa: F401  # a fixture: heads that the kernels serve
from tests.unit.model.test_packed import prompt
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from residual_mass import PackedCache, PhiMaps, partial_decoding, partial_generate
from residual_mass.core.accounting import Terms, exact_terms
from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.decode.session import make_arm
from residual_mass.decode.text import TextBatch
from residual_mass.decode.verify import Pass, accept_or_sample
from residual_mass.methods import METHODS, Method, Residual, Seen, Step, method_named
from residual_mass.model.phi_maps import HeadShape
from residual_mass.spec.settings import AnchorSpec, MapSpec

BUDGET, NEW = 0.3, 24
built = needs(KERNELS)
DRAFTING = [method for method in METHODS if not method.whole_prefix]


@dataclass(frozen=True)
class Share(Residual):
    """The unread tokens' exact terms with their values multiplied: with 1 drafts are full attention's own."""

    of: float

    def terms(self, seen: Seen, state: tuple[()]) -> Terms:
        numerator, *rest = exact_terms(seen.scores, seen.values, seen.unread)
        return numerator * self.of, *rest

    def summary_bytes(self, step: Step) -> float:
        return 0


RIGHT, WRONG = Method("right", "right", residual=Share(1)), Method("wrong", "wrong", residual=Share(-30))
MOMENTS = method_named("topk_moments")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return next(family for family in FAMILIES if family.name == "Llama").build()


def maps_of(model: PreTrainedModel, method: Method) -> PhiMaps | None:
    torch.manual_seed(0)
    maps = PhiMaps(HeadShape.of(model.config), MapSpec(d_emb=12, d_phi=4)).requires_grad_(False)
    return maps if method.needs_maps else None


def verified(
    model: PreTrainedModel, ids: Tensor, method: str | Method, verify: Any, passes: list[Pass] | None = None,
    phi: PhiMaps | None = None, **options: Any,
) -> Any:  # fmt: skip
    decoding = partial_decoding(method, BUDGET, phi, **FEW, verify=verify, passes=passes)
    return plain(model, ids, custom_generate=decoding, **options)


def plain(model: PreTrainedModel, ids: Tensor, **options: Any) -> Any:
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, **settings | options)


@pytest.mark.parametrize(
    ("method", "verify"),
    [(method, 3) for method in DRAFTING]
    + [(method, verify) for method in (MOMENTS, RIGHT, WRONG) for verify in (1, 2, 22, 23, 63)],
    ids=lambda one: getattr(one, "name", None),
)
def test_the_text_is_full_attentions(model: PreTrainedModel, method: Method, verify: Any) -> None:
    passes: list[Pass] = []
    ours = verified(model, ids_of(60), method, verify, passes, maps_of(model, method))
    assert torch.equal(ours, plain(model, ids_of(60)))
    assert 1 + sum(each.accepted + 1 for each in passes) == NEW
    assert all(each.drafted <= verify for each in passes) and passes[0].drafted == min(verify, NEW - 2)
    if method is RIGHT:
        assert all(each.accepted == each.drafted for each in passes)
    if method is WRONG:
        assert sum(each.accepted for each in passes) <= 2, "but by chance"


@cases(WORKING, slow=AS_OTHERS)
def test_families(family: Family) -> None:
    """Those with windows keep whole caches, and those with recurrent states are refused."""
    model = family.build()
    if family.arms is not None and "states" in family.arms:
        with pytest.raises(
            ValueError, match="verify runs our own loop, and .* has layers with states other than keys and values"
        ):
            verified(model, ids_of(40), "topk_moments", 4)
        return
    options = {"output_logits": True, "return_dict_in_generate": True}
    expected, passes = plain(model, ids_of(40), **options), []
    for method in ("topk_moments", WRONG):
        found = verified(model, ids_of(40), method, 4, passes, **options)
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=2e-4)
    assert any(each.accepted for each in passes) and any(each.accepted < each.drafted for each in passes)


class AfterSum(StoppingCriteria):
    """Stops once the sum of the new tokens passes a number."""

    def __init__(self, start: int, limit: int) -> None:
        self.start, self.limit = start, limit

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return ids[:, self.start :].sum(-1) > self.limit


@pytest.mark.parametrize("method", [MOMENTS, RIGHT], ids=lambda method: method.name)
def test_it_stops_where_generate_stops(model: PreTrainedModel, method: Method) -> None:
    """At every place of the first two passes."""
    ids, expected = ids_of(60), plain(model, ids_of(60))
    for at in range(60, 60 + 12):
        after = StoppingCriteriaList([AfterSum(60, int(expected[0, 60:at].sum()))])
        for options in ({"eos_token_id": [int(expected[0, at]), 98]}, {"stopping_criteria": after}):
            assert torch.equal(verified(model, ids, method, 5, **options), plain(model, ids, **options))
    for count in (1, 2, 3, 7):
        assert torch.equal(verified(model, ids, method, 5, max_new_tokens=count), expected[:, : 60 + count])


def test_options_of_generate(model: PreTrainedModel) -> None:
    ids = ids_of(60)
    for options in ({"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"prefill_chunk_size": 7}):
        passes: list[Pass] = []
        ours = verified(model, ids, "topk_moments", 3, passes, **options)
        assert torch.equal(ours, plain(model, ids, **options)), options
        assert any(each.accepted for each in passes), options


class Heard(BaseStreamer):
    """Keeps what it is given: the prompt, tokens, and an end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


@pytest.mark.parametrize("verify", [None, 4])
def test_a_streamer_hears_every_token(model: PreTrainedModel, verify: int | None) -> None:
    heard = Heard()
    decoding = partial_decoding("topk", BUDGET, **FEW, verify=verify, streamer=heard)
    text = plain(model, ids_of(60), custom_generate=decoding)
    assert heard.tokens == [*text[0].tolist(), -1]


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "gpt-oss", "Llama 4"])
def test_several_turns(name: str) -> None:
    model = next(family for family in FAMILIES if family.name == name).build()
    texts = []
    for verify in (None, 4):
        cache, text = DynamicCache(), ids_of(40)
        for turn in range(3):
            options = {"past_key_values": cache}
            text = verified(model, text, "topk", 4, **options) if verify else plain(model, text, **options)
            assert cache.get_seq_length() == text.shape[1] - 1
            text = torch.cat((text, ids_of(1 + 5 * turn)), 1)
        texts.append(text)
    assert torch.equal(*texts)


def by_packed_cache(model: LlamaForCausalLM, ids: Tensor, method: str, turns: list[Tensor], count: int) -> Tensor:
    """Greedy tokens of a packed cache's own full attention, one at a time; after each text another is appended."""
    texts = TextBatch(model, PackedBackend(model, make_arm(method, 0.2), AnchorSpec(), PackedCache(model, method)))
    text = given = ids
    with torch.no_grad():
        for more in [*turns, None]:
            for _ in range(count):
                given = texts.read(given)[:, -1].argmax(-1, keepdim=True)
                text = torch.cat((text, given), 1)
            if more is not None:
                given = torch.cat((given, more), 1)
                text = torch.cat((text, more), 1)
    return text


@built
@pytest.mark.parametrize("method", ["scan4", "scan4_regression_64"])
@pytest.mark.parametrize("verify", [1, 4, 17])
def test_over_a_packed_cache(wide_model: LlamaForCausalLM, method: str, verify: Any) -> None:  # noqa: F811
    """Full attention of the packed cache, over two turns; and the model's own but where its logits nearly tie."""
    model, first, second, cache = wide_model, prompt(250), prompt(9, seed=2), PackedCache(wide_model, method)
    options, passes = {"past_key_values": cache, "max_new_tokens": 20, "eos_token_id": []}, []
    decoding = partial_decoding(method, 0.2, verify=verify, passes=passes)
    text = plain(model, first, custom_generate=decoding, **options)
    text = plain(model, torch.cat((text, second), 1), custom_generate=decoding, **options)
    assert torch.equal(text, by_packed_cache(model, first, method, [second], 20))
    assert cache.get_seq_length() == text.shape[1] - 1 == cache.layers[0].packed.tokens[0]
    assert any(each.accepted < each.drafted for each in passes)


@built
def test_blocks_take_in_verified_tokens_alone(wide_model: LlamaForCausalLM) -> None:  # noqa: F811
    """150 tokens, some of which join the blocks: each is full attention's choice or next to it.

    Rounding to 8 bits puts up to 8 % of the tokens up to .08 behind; rejected drafts in the blocks put 23 % or more at
    least .7 behind.
    """
    ids, passes = prompt(250), []
    text = partial_generate(
        wide_model, ids, max_new_tokens=150, method="scan4_regression_64", budget=0.2, eos_token_id=[], verify=40,
        passes=passes,
    )  # fmt: skip
    with torch.no_grad():
        logits = wide_model(text[:, :-1]).logits[0, 249:]
    behind = logits.amax(-1) - logits.gather(-1, text[0, 250:, None])[:, 0]
    assert text.shape[1] == 400
    assert float(behind.max()) < 0.25
    assert float((behind > 0).float().mean()) < 0.15
    assert sum(each.drafted - each.accepted for each in passes) > 64


def chi_square(counts: Tensor, p: Tensor) -> float:
    """The probability of counts at least as far from those expected."""
    expected = counts.sum() * p.double()
    assert not bool(counts[expected == 0].any())
    statistic = ((counts - expected).square() / expected)[expected > 0].sum()
    return float(torch.special.gammaincc((expected > 0).sum() / 2 - 0.5, statistic / 2))


@pytest.mark.parametrize("sharpness", [0.5, 2])
def test_the_token_kept_or_drawn_has_full_attentions_distribution(sharpness: float) -> None:
    torch.manual_seed(0)
    p, q = (sharpness * torch.randn(2, 7)).softmax(-1)
    q[2], p[4] = 0, 0  # tokens that only one of them gives
    p, q = p / p.sum(), q / q.sum()
    pairs = [accept_or_sample(p, q, torch.multinomial(q, 1)) for _ in range(8000)]
    counts = torch.stack([token for token, _ in pairs]).flatten().bincount(minlength=7)
    assert chi_square(counts, p) > 1e-3
    kept = torch.tensor([accepted for _, accepted in pairs]).double().mean()
    assert abs(float(kept) - float(torch.minimum(p, q).sum())) < 0.02
    assert chi_square(torch.multinomial(q, 8000, replacement=True).bincount(minlength=7), p.clamp_min(1e-9)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("method", ["topk", WRONG], ids=lambda method: getattr(method, "name", method))
def test_samples_of_a_model_have_full_attentions_distribution(model: PreTrainedModel, method: str | Method) -> None:
    """2,000 texts of 4 tokens of 3 each, against the products of full attention's probabilities."""
    ids = ids_of(30)
    options = {"do_sample": True, "temperature": 1.4, "top_k": 3, "max_new_tokens": 4}
    torch.manual_seed(1)
    passes: list[Pass] = []
    found = torch.cat([verified(model, ids, method, 3, passes, **options)[:, 30:] for _ in range(2000)])
    texts, p = torch.zeros(1, 0, dtype=torch.long), torch.ones(1)
    for _ in range(4):
        with torch.no_grad():
            logits = model(torch.cat((ids.expand(len(texts), -1), texts), 1)).logits[:, -1] / 1.4
        best = logits.topk(3)
        p = (p[:, None] * best.values.softmax(-1)).flatten()
        texts = torch.cat((texts.repeat_interleave(3, 0), best.indices.flatten()[:, None]), 1)
    at = (found[:, None] == texts).all(-1)
    assert bool((at.sum(-1) == 1).all())
    merged = torch.cat((p[p > 0.0025], p[p <= 0.0025].sum()[None]))  # cells of 5 texts or more
    counts = at.sum(0)
    assert chi_square(torch.cat((counts[p > 0.0025], counts[p <= 0.0025].sum()[None])), merged) > 1e-3
    assert any(each.accepted for each in passes) and any(each.accepted < each.drafted for each in passes)


REFUSED: list[tuple[str, Callable[[PreTrainedModel], object]]] = [
    ("verify is 0, not a number of drafts from 1 to 63", lambda _: partial_decoding("topk", verify=0)),
    ("verify is 64, .* does not fit the window of 64 tokens", lambda _: partial_decoding("topk", verify=64)),
    ("verify is True, not", lambda _: partial_decoding("topk", verify=True)),
    ("verify is '3', not", lambda model: partial_generate(
        model, ids_of(40), max_new_tokens=3, method="topk", verify="3")),
    ("method full has no partial step to draft by: leave verify out", lambda model: partial_generate(
        model, ids_of(40), max_new_tokens=3, method="full", verify=3)),
    ("verify takes one prompt, not 2", lambda model: verified(model, ids_of(40).expand(2, -1), "topk", 3)),
    ("verify takes one prompt, not 2", lambda model: verified(
        model, ids_of(40), "topk", 3, num_return_sequences=2, do_sample=True)),
    ("verify runs our own loop, and it takes a prompt without padding", lambda model: verified(
        model, ids_of(40), "topk", 3, attention_mask=torch.tensor([[0] + [1] * 39]))),
    ("support beam search: .* num_beams=1", lambda model: verified(model, ids_of(40), "topk", 3, num_beams=2)),
    ("support contrastive search", lambda model: verified(model, ids_of(40), "topk", 3, penalty_alpha=0.6, top_k=4)),
    ("not drafts of several", lambda model: verified(model, ids_of(40), "topk", None, prompt_lookup_num_tokens=3)),
    ("it counts positions itself: leave out position_ids", lambda model: verified(
        model, ids_of(40), "topk", 3, position_ids=torch.arange(40)[None] + 1)),
    ("input_ids must hold the whole text of all turns", lambda model: again(model, DynamicCache(), ids_of(90))),
    ("computes no attention weights: unset output_attentions", lambda model: verified(
        model, ids_of(40), "topk", 3, output_attentions=True, return_dict_in_generate=True)),
    ("the cache holds 63 tokens, and input_ids 40: pass the whole text", lambda model: again(model, DynamicCache())),
]  # fmt: skip


def again(model: PreTrainedModel, cache: DynamicCache, second: Tensor | None = None) -> None:
    """The prompt twice; or after the first turn new tokens alone, which `generate` tells by the mask."""
    text = verified(model, ids_of(40), "topk", 3, past_key_values=cache)
    more = {} if second is None else {"attention_mask": torch.ones(1, text.shape[1] - 1 + second.shape[1])}
    verified(model, ids_of(40) if second is None else second, "topk", 3, past_key_values=cache, **more)


@pytest.mark.parametrize(("line", "call"), REFUSED)
def test_what_is_not_served_is_refused(
    model: PreTrainedModel, line: str, call: Callable[[PreTrainedModel], object]
) -> None:
    with pytest.raises(ValueError, match=f"^[^\n]*{line}[^\n]*$"):
        call(model)


@built
def test_a_cache_that_cannot_lose_tokens_is_refused(wide_model: LlamaForCausalLM) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="a PackedCache of 8 bits is read whole: there is nothing to verify"):
        verified(wide_model, prompt(30), "cache8", 3, past_key_values=PackedCache(wide_model, "cache8"))
    for verify in (None, 3):
        with pytest.raises(ValueError, match="the PackedCache was made for another method than topk: make one with"):
            verified(wide_model, prompt(30), "topk", verify, past_key_values=PackedCache(wide_model, "scan4"))
    model = next(family for family in FAMILIES if family.name == "Gemma 3").build()
    cache = DynamicCache(config=model.config)
    text = plain(model, ids_of(40), past_key_values=cache)
    with pytest.raises(ValueError, match=r"pass past_key_values=DynamicCache\(\) from the first turn on"):
        verified(model, text, "topk", 3, past_key_values=cache)
