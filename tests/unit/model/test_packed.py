"""Decoding from packed caches, against the same methods in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.needs import KERNELS, needs
from tests.unit.model.families import FAMILIES
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from residual_mass import PackedCache, partial_decoding, partial_generate, partial_kv
from residual_mass.kernels import library
from residual_mass.methods import Method, QuantisedScan, ScanRegression

METHODS = ["full", "cache8", "scan4", "scan4_regression_64", Method("few", "few", QuantisedScan(4), ScanRegression(8))]
built = needs(KERNELS)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Heads of the least width that the kernels serve, with attention neither flat nor at one token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=256, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, initializer_range=0.08, bos_token_id=0,
        eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(library.SWITCH, "off")
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def prompt(length: int, seed: int = 1) -> Tensor:
    return torch.randint(2, 258, (1, length), generator=torch.Generator().manual_seed(seed))


def continued(
    model: LlamaForCausalLM, ids: Tensor, method: str | Method, packed: bool, steps: int = 4, mask: Tensor | None = None
) -> Tensor:
    """Log probabilities [B, steps, V] after each of some given tokens."""
    mask = torch.ones_like(ids) if mask is None else mask
    cache = PackedCache(model, method) if packed else DynamicCache(config=model.config)
    logits = []
    with torch.no_grad(), partial_kv(model, method, 0.1, cache=cache if packed else None):
        at = mask.cumsum(1) - 1  # positions decide how keys are rounded
        model(ids, attention_mask=mask, position_ids=at.clamp_min(0), past_key_values=cache)
        for step in range(steps):
            token, at = torch.full((len(ids), 1), 5 + step), at[:, -1:] + 1
            mask = torch.cat((mask, torch.ones_like(at)), 1)
            output = model(token, attention_mask=mask, position_ids=at, past_key_values=cache)
            logits.append(output.logits[:, -1])
    return torch.stack(logits, 1).log_softmax(-1)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.exp() * (one - other)).sum(-1).mean())


@built
@pytest.mark.parametrize("method", METHODS, ids=lambda method: getattr(method, "name", method))
@pytest.mark.parametrize("length", [5, 21, 400])
def test_a_packed_cache_is_as_near_to_full_attention_as_the_method(
    model: LlamaForCausalLM, method: str | Method, length: int
) -> None:
    """Keys and values are rounded, and scales are shared by other tokens, so near and not the same."""
    full = continued(model, prompt(length), "full", packed=False)
    slow, fast = (continued(model, prompt(length), method, packed) for packed in (False, True))
    assert distance(full, fast) < 1.5 * distance(full, slow) + 1e-3
    if method != "full" and length == 400:
        assert distance(slow, fast) < 0.5 * distance(full, continued(model, prompt(length), "topk", packed=False))


@built
def test_rows_of_a_padded_batch_are_as_alone(model: LlamaForCausalLM) -> None:
    short, long = prompt(130), prompt(200, seed=2)
    ids = torch.cat((torch.cat((torch.ones(1, 70, dtype=torch.long), short), 1), long))
    mask = torch.ones_like(ids)
    mask[0, :70] = 0
    together = continued(model, ids, "scan4_regression_64", packed=True, mask=mask)
    for row, alone in enumerate((short, long)):
        assert distance(continued(model, alone, "scan4_regression_64", packed=True)[0], together[row]) < 1e-6


@built
def test_older_generated_tokens_join_the_blocks(model: LlamaForCausalLM) -> None:
    full = continued(model, prompt(150), "full", packed=False, steps=150)
    assert distance(full, continued(model, prompt(150), "cache8", packed=True, steps=150)) < 1e-3


@built
def test_a_cache_takes_little_more_than_half_of_one_in_bfloat16(model: LlamaForCausalLM) -> None:
    cache = PackedCache(model, "scan4_regression_64")
    with torch.no_grad(), partial_kv(model, "scan4_regression_64", 0.1, cache=cache):
        model(prompt(4096), past_key_values=cache, logits_to_keep=1)
        model(prompt(1), past_key_values=cache)
    assert cache.nbytes < 0.59 * (3 * 2 * 2 * 64 * 4096 * 2)  # .58, of which .04 are for tokens to come
    assert all(layer.keys is None for layer in cache.layers)


@built
@pytest.mark.parametrize("method", METHODS[:4], ids=lambda method: getattr(method, "name", method))
def test_generation_takes_steps_over_a_packed_cache(model: LlamaForCausalLM, method: str | Method) -> None:
    ids = given = text = prompt(300)
    cache = PackedCache(model, method)
    with torch.no_grad(), partial_kv(model, method, 0.1, cache=cache):
        for _ in range(20):
            given = model(given, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
            text = torch.cat((text, given), 1)
    ours = partial_generate(model, ids, max_new_tokens=20, method=method, budget=0.1, eos_token_id=[])
    assert torch.equal(ours, text)
    end = int(ours[0, 305])
    assert torch.equal(
        partial_generate(model, ids, max_new_tokens=20, method=method, budget=0.1, eos_token_id=end),
        ours[:, : 301 + ours[0, 300:].tolist().index(end)],
    )


def test_without_kernels_torch_gives_the_tokens_of_partial_kv(model: LlamaForCausalLM, without_kernels: None) -> None:
    ids = prompt(300)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "eos_token_id": []}
    for method in ("scan4_regression_64", "pages"):
        with partial_kv(model, method, 0.1):
            expected = model.generate(ids, **options)
        one = partial_generate(model, ids, max_new_tokens=12, method=method, budget=0.1, eos_token_id=[])
        other = model.generate(ids, **options, custom_generate=partial_decoding(method, 0.1))
        assert torch.equal(one, expected) and torch.equal(other, expected)
    with pytest.raises(ValueError, match="the CPU kernels do not support scan4"):
        PackedCache(model, "scan4")


@built
def test_sampling_stops_and_repeats_as_in_generate(model: LlamaForCausalLM) -> None:
    ids = prompt(200).expand(2, -1)

    def sampled(**options: int) -> Tensor:
        torch.manual_seed(3)
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=12, pad_token_id=1,
            custom_generate=partial_decoding("scan4_regression_64", 0.1), **options,
        )  # fmt: skip

    text = sampled(eos_token_id=[])
    assert torch.equal(text, sampled(eos_token_id=[])) and not torch.equal(text[0], text[1])
    ended = sampled(eos_token_id=int(text[0, 203]))
    stop = text[0, 200:].tolist().index(int(text[0, 203]))
    assert torch.equal(ended[0, : 201 + stop], text[0, : 201 + stop]) and (ended[0, 201 + stop :] == 1).all()


@built
def test_a_further_turn_reads_all_before_it(model: LlamaForCausalLM) -> None:
    first, second = prompt(250), prompt(40, seed=2)
    cache = PackedCache(model, "cache8")
    with torch.no_grad(), partial_kv(model, "cache8", cache=cache):
        model(first, past_key_values=cache)
        turned = [model(second, past_key_values=cache), model(prompt(1), past_key_values=cache)]
    with torch.no_grad():
        whole = model(torch.cat((first, second, prompt(1)), 1), use_cache=False)
    logits = torch.cat([output.logits for output in turned], 1).log_softmax(-1)
    assert distance(whole.logits[:, 250:].log_softmax(-1), logits) < 1e-3


@built
def test_a_cache_serves_another_prompt_once_it_is_reset(model: LlamaForCausalLM) -> None:
    """Within one context, too: K is a share of the new prompt."""
    method, found = "scan4", []
    for before in ([prompt(300)], []):
        cache = PackedCache(model, method)
        with torch.no_grad(), partial_kv(model, method, 0.1, cache=cache):
            for ids in [*before, prompt(200, seed=2)]:
                cache.reset()
                model(ids, past_key_values=cache)
                logits = model(prompt(1), past_key_values=cache).logits
        found.append(logits)
    assert torch.equal(*found)


@built
def test_a_saved_prompt_goes_on_as_if_it_had_been_read(model: LlamaForCausalLM, tmp_path: Path) -> None:
    ids, path = prompt(300), tmp_path / "prompt.safetensors"
    method = "scan4_regression_64"
    cache = PackedCache(model, method)
    with torch.no_grad(), partial_kv(model, method, 0.1, cache=cache):
        model(ids, past_key_values=cache)
        cache.save(path)
        expected = [model(prompt(1, seed), past_key_values=cache).logits for seed in range(80)]
    again = PackedCache(model, method).load(path)
    with torch.no_grad(), partial_kv(model, method, 0.1, cache=again):
        found = [model(prompt(1, seed), past_key_values=again).logits for seed in range(80)]
    assert all(map(torch.equal, expected, found)) and again.nbytes == cache.nbytes
    with pytest.raises(ValueError, match="the state of another model or method"):
        PackedCache(model, "full").load(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="prompt.safetensors: damaged safetensors file"):
        PackedCache(model, method).load(path)
    with pytest.raises(ValueError, match="the cache is empty"):
        PackedCache(model, method).save(path)


def test_latent_attention_is_left_to_torch() -> None:
    """Its caches hold no keys, whatever their width; here it is one that the kernels serve."""
    family = next(family for family in FAMILIES if family.name == "DeepSeek V3")
    model = family.build(qk_rope_head_dim=32, head_dim=32, qk_nope_head_dim=32, v_head_dim=64)
    ids = prompt(40) % 99
    with partial_kv(model, "scan4", 0.3):
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(partial_generate(model, ids, max_new_tokens=4, method="scan4", budget=0.3), expected)


REFUSED: list[tuple[str, Callable[[LlamaForCausalLM, PackedCache], object]]] = [
    ("crop takes a negative number", lambda model, cache: cache.layers[0].crop(3)),
    ("num_beams=1", lambda model, cache: model.generate(
        prompt(20), num_beams=2, custom_generate=partial_decoding("scan4"))),
    ("joins older tokens in blocks by itself", lambda model, cache: within(model, cache, prompt(20), fold=4)),
    ("takes one prompt", lambda model, cache: within(model, cache, prompt(20).expand(2, -1), prompt(2).expand(2, -1))),
    ("padded only on the left", lambda model, cache: within(
        model, cache, prompt(20).expand(2, -1), mask=torch.tensor([[1] * 20, [1] * 9 + [0] + [1] * 10]))),
    ("as past_key_values", lambda model, cache: within(model, None, prompt(20), session=cache)),
    ("the cache holds 1 prompts of 2 KV heads", lambda model, cache: within(
        model, cache, prompt(20), prompt(1).expand(2, -1))),
]  # fmt: skip


def within(
    model: LlamaForCausalLM, cache: PackedCache | None, *turns: Tensor, fold: int | None = None,
    mask: Tensor | None = None, session: PackedCache | None = None,
) -> None:  # fmt: skip
    with torch.no_grad(), partial_kv(model, "scan4", 0.1, fold=fold, cache=session or cache):
        for ids in turns:
            model(ids, past_key_values=cache, attention_mask=mask)


@built
@pytest.mark.parametrize(("words", "call"), REFUSED)
def test_what_a_packed_cache_does_not_serve_is_refused(
    model: LlamaForCausalLM, words: str, call: Callable[[LlamaForCausalLM, PackedCache], object]
) -> None:
    with pytest.raises(ValueError, match=words):
        call(model, PackedCache(model, "scan4"))
