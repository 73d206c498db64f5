"""Caches that are kept for texts that continue them: which is found, which leaves, and that branches go on alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.needs import KERNELS, needs
from tests.unit.model.test_rotary import build as longrope
from torch import Tensor
from transformers import LlamaForCausalLM

from residual_mass import PackedCache, partial_decoding
from residual_mass.model.rotary import frequencies_of
from residual_mass.serve.kept import Kept

pytestmark = needs(KERNELS)
METHOD = "scan4_regression_64"


def text(seed: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 258, (length,), generator=generator)


def read(model: LlamaForCausalLM, ids: Tensor, cache: PackedCache, tokens: int = 8) -> Tensor:
    """Continues a text [L] on a cache; returns the new tokens."""
    decoding = partial_decoding(METHOD, 0.2)
    options = {"past_key_values": cache, "custom_generate": decoding, "do_sample": False, "pad_token_id": 1}
    output = model.generate(ids[None], max_new_tokens=tokens, eos_token_id=[], **options)
    return output[0, len(ids) :]


def kept_for(model: LlamaForCausalLM, limit: int = 2**30, folder: Path | None = None) -> Kept:
    return Kept(lambda: PackedCache(model, METHOD), limit, folder, frequencies_of(model))


def held(kept: Kept) -> list[int]:
    return [len(ids) for ids, _ in kept.entries.values()]


def put(kept: Kept, model: LlamaForCausalLM, ids: Tensor, tokens: int = 8) -> Tensor:
    """Reads and continues a text, keeps its cache, and returns the text."""
    cache = kept.take(ids)
    whole = torch.cat((ids, read(model, ids, cache, tokens)))
    kept.put(whole[: cache.get_seq_length()], cache)
    return whole


def test_branches_go_on_by_themselves(model: LlamaForCausalLM) -> None:
    """Both continuations of one kept text are those of a cache that read the same turns and nothing else."""
    kept = kept_for(model)
    first = put(kept, model, text(0, 200), 70)
    branches = [torch.cat((first, text(seed, 30))) for seed in (1, 2)]
    for branch in (*branches, branches[0]):
        alone = PackedCache(model, METHOD)
        assert torch.equal(read(model, first[:200], alone, 70), first[200:])
        cache = kept.take(branch)
        assert cache.get_seq_length() == len(first) - 1
        assert torch.equal(read(model, branch, cache), read(model, branch, alone))


def test_the_longest_beginning_is_taken_and_one_token_is_left_to_read(model: LlamaForCausalLM) -> None:
    kept = kept_for(model)
    first = put(kept, model, text(0, 100), 66)
    second = put(kept, model, torch.cat((first, text(1, 100))), 66)
    assert held(kept) == [165, 331]
    assert kept.take(torch.cat((second, text(2, 5)))).get_seq_length() == 331
    assert kept.take(torch.cat((first, text(3, 150)))).get_seq_length() == 165
    assert kept.take(second[:331]).get_seq_length() == 330
    assert kept.take(text(4, 300)).get_seq_length() == 0


def test_an_end_that_differs_is_removed(model: LlamaForCausalLM) -> None:
    """The rest is as if these tokens had never been read; what is packed cannot be removed."""
    kept = kept_for(model)
    first = put(kept, model, text(0, 200), 8)
    changed = torch.cat((first[:203], text(5, 12)))
    cache = kept.take(changed)
    assert cache.get_seq_length() == 203
    alone = PackedCache(model, METHOD)
    read(model, first[:200], alone, 4)
    assert alone.get_seq_length() == 203
    assert torch.equal(read(model, changed, cache), read(model, changed, alone))
    within = torch.cat((first[:150], text(6, 100)))
    assert kept.take(within).get_seq_length() == 0


def test_the_least_recently_used_leave(model: LlamaForCausalLM) -> None:
    texts = [text(seed, 200) for seed in range(4)]
    sizes = kept_for(model)
    put(sizes, model, texts[0])
    kept = kept_for(model, limit=int(2.5 * sizes.nbytes))
    wholes = [put(kept, model, one) for one in texts[:2]]
    assert kept.take(torch.cat((wholes[0], text(9, 3)))).get_seq_length() == 207
    wholes += [put(kept, model, texts[2])]
    found = [kept.take(torch.cat((whole, text(9, 3)))).get_seq_length() for whole in wholes]
    assert found == [207, 0, 207] and kept.nbytes <= kept.limit
    none = kept_for(model, limit=100)
    put(none, model, texts[0])
    assert not none.entries


def test_what_leaves_the_memory_is_found_on_disk(model: LlamaForCausalLM, tmp_path: Path) -> None:
    kept = kept_for(model, limit=0, folder=tmp_path / "kept")
    first = put(kept, model, text(0, 200), 70)
    assert not kept.entries and len(list((tmp_path / "kept").iterdir())) == 1
    further = torch.cat((first, text(1, 30)))
    alone = PackedCache(model, METHOD)
    read(model, first[:200], alone, 70)
    later = kept_for(model, folder=tmp_path / "kept")
    cache = later.take(further)
    assert cache.get_seq_length() == 269
    assert torch.equal(read(model, further, cache), read(model, further, alone))
    assert later.take(torch.cat((text(2, 1), further))).get_seq_length() == 0
    later.put(further, cache)
    later.save()
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.parametrize("on_disk", [False, True])
def test_keys_of_other_rotary_frequencies_are_not_continued(on_disk: bool, tmp_path: Path) -> None:
    """A model with LongRoPE that changes its frequencies beyond 64 tokens."""
    model = longrope("Phi-3").float()
    kept = kept_for(model, limit=0 if on_disk else 2**30, folder=tmp_path if on_disk else None)
    short = put(kept, model, text(0, 40))
    long = put(kept, model, text(1, 90))
    assert kept.take(torch.cat((short, text(2, 5)))).get_seq_length() == 47
    assert kept.take(torch.cat((long, text(2, 5)))).get_seq_length() == 97
    beyond = torch.cat((short, text(2, 40)))
    assert kept.take(beyond).get_seq_length() == 0
    assert kept.take(torch.cat((long[:50], text(2, 5)))).get_seq_length() == 0
    assert kept.take(torch.cat((long[:50], text(2, 90)))).get_seq_length() == 0
    assert torch.equal(put(kept, model, beyond)[len(beyond) :], read(model, beyond, PackedCache(model, METHOD)))


def test_a_damaged_file_is_not_used(model: LlamaForCausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = kept_for(model, limit=0, folder=tmp_path)
    first = put(kept, model, text(0, 100))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        assert kept.take(torch.cat((first, text(1, 3)))).get_seq_length() == 0
    assert file.name in caplog.text


def test_a_file_of_another_model_is_not_used(
    model: LlamaForCausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_for(model, limit=0, folder=tmp_path)
    first = put(kept, model, text(0, 100))
    model.model.layers[0].mlp.up_proj.weight.data += 0.01
    with caplog.at_level(logging.WARNING):
        assert kept_for(model, folder=tmp_path).take(torch.cat((first, text(1, 3)))).get_seq_length() == 0
    assert "its weights have other numbers" in caplog.text
