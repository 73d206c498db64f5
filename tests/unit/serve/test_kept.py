"""Kept texts: which is found, which leaves, what is on disk, and that none changes an answer."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
import torch
from tests.needs import KERNELS, TRANSFORMERS_5, needs
from tests.unit.model.families import Family
from tests.unit.serve.conftest import Asking, lettered, served
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass.serve.answers import Left
from residual_mass.serve.kept import FAR_STRIDE, NEAR, STRIDE, Kept, common_length
from residual_mass.serve.protocol import CompletionRequest

pytestmark = needs(KERNELS)
WIDE = {
    "vocab_size": 258, "hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 2048, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
WINDOWS = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}


def ids_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 258, (length,), generator=generator).tolist()


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def lengths(kept: Kept) -> list[int]:
    return [len(text.ids) for text in kept.texts.values()]


def asked(asking: Asking, prompt: list[int], tokens: int = 8, **fields: object) -> tuple[str, int]:
    answer = asking.complete(prompt, max_tokens=tokens, **fields)
    return answer["choices"][0]["text"], cached(answer)


FAMILIES = [
    Family("Llama", "LlamaForCausalLM", WIDE),
    pytest.param(Family("Gemma 3", "Gemma3ForCausalLM", WIDE | WINDOWS), marks=needs(TRANSFORMERS_5)),
    Family("Mistral", "MistralForCausalLM", WIDE | {"sliding_window": None}),
    pytest.param(Family("GPT-OSS", "GptOssForCausalLM", WIDE | WINDOWS | {
        "num_local_experts": 2, "num_experts_per_tok": 1}), marks=needs(TRANSFORMERS_5)),
]  # fmt: skip


@pytest.mark.parametrize("method", ["scan4_regression_64", "cache8"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_answer_does_not_depend_on_what_is_kept(family: Family, method: str) -> None:
    """Prompts that share beginnings of all lengths, in two orders, and where nothing is kept: the same logarithms."""
    model = family.build()
    base = ids_of(0, 700)
    parts = ((100, 5), (256, 60), (300, 0), (300, 90), (512, 1), (513, 40), (640, 30), (690, 10), (300, 5))
    prompts = [base[:length] + ids_of(length, extra) for length, extra in parts]
    found = []
    for memory, order in (("1024", 1), ("1024", -1), ("0", 1)):
        asking = Asking(served(model, "--method", method, "--memory", memory))
        answers = {}
        hits = 0
        for number, prompt in list(enumerate(prompts))[::order]:
            answer = asking.complete(prompt, max_tokens=2 + 20 * (number % 2), logprobs=2)
            answers[number] = answer["choices"]
            hits += cached(answer)
        found.append((answers, hits))
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[0][1] > 1000 and found[1][1] > 1000 and found[2][1] == 0


def test_a_prompt_without_its_cache_reads_all(model: PreTrainedModel) -> None:
    asking = Asking(served(model))
    first = asked(asking, ids_of(0, 600), cache_prompt=False)
    assert asked(asking, ids_of(0, 600)) == first  # nothing was kept
    assert asked(asking, ids_of(0, 600)) == (first[0], 512)
    assert asked(asking, ids_of(0, 600), cache_prompt=False) == first


def test_a_further_turn_reads_what_is_new(model: PreTrainedModel) -> None:
    asking = Asking(served(model))
    talk = [{"role": "user", "content": "What is a river? " * 20}]
    for turn in range(3):
        answer = asking.post("chat/completions", {"messages": talk, "max_tokens": 20})[1]
        text = answer["choices"][0]["message"]["content"]
        new = answer["usage"]["prompt_tokens"] - cached(answer)
        assert turn == 0 or new < 60
        talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]


def test_one_token_leaves_the_whole_prompt(model: PreTrainedModel) -> None:
    """A document that is read ahead: questions about it read only themselves."""
    asking = Asking(served(model))
    asked(asking, ids_of(0, 300), 1)
    assert asked(asking, ids_of(0, 300) + ids_of(1, 20))[1] == 300


def test_a_prompt_that_was_not_answered_is_kept_to_its_last_mark(model: PreTrainedModel) -> None:
    """Its client left after it was read."""
    asking = Asking(served(model))
    expected = asked(asking, ids_of(0, 300) + ids_of(1, 20), cache_prompt=False)
    answers = asking.service.answers
    request = CompletionRequest(prompt=ids_of(0, 300))
    (question,) = asking.service.questions(request, [ids_of(0, 300)])
    checks = iter([False, False, False, True])  # before each of three pieces, and before the first token
    with pytest.raises(Left):
        list(answers.pieces(question, lambda: next(checks)))
    assert lengths(answers.kept) == [256]
    assert asked(asking, ids_of(0, 300) + ids_of(1, 20)) == (expected[0], 256)


def test_branches_go_on_by_themselves(model: PreTrainedModel) -> None:
    """Both continuations of one answer are those of a server that saw nothing else."""
    first = ids_of(0, 600)
    branches = [ids_of(seed, 40) for seed in (1, 2)]
    both = Asking(served(model))
    answers = {}
    for number in (0, 1, 0):
        text, _ = asked(both, first, 30)
        prompt = first + both.service.answers.tokenizer(text).input_ids + branches[number]
        answers.setdefault(number, []).append(asked(both, prompt))
    for number, found in answers.items():
        alone = Asking(served(model))
        assert text == asked(alone, first, 30)[0]
        assert all(each == asked(alone, prompt[:-40] + branches[number]) for each in found[:1])
        assert {each for each, _ in found} == {found[0][0]} and found[0][1] == 629


def test_the_same_further_turn_again(model: PreTrainedModel) -> None:
    """As a client sends it that asks for another answer, or tries again: it goes on from where the first one did."""
    asking = Asking(served(model))
    first = ids_of(0, 300)
    text, _ = asked(asking, first, 60)
    turn = first + asking.service.answers.tokenizer(text).input_ids + ids_of(1, 24)
    answers = [asked(asking, turn, length) for length in (40, 40, 1, 40)]
    assert answers[0] == answers[1] == answers[3] and answers[2] == (answers[0][0][:1], 359)
    assert asked(asking, turn + ids_of(2, 1600), 4)[1] == 384  # marks before it get sparse
    assert asked(asking, turn, 40) == answers[0]


def test_what_shares_a_part_of_an_answer_is_read(model: PreTrainedModel) -> None:
    """An answer that was edited: as a server that keeps nothing."""
    asking = Asking(served(model))
    first = ids_of(0, 300)
    text, _ = asked(asking, first, 200)
    for length in (20, 90, 190):
        prompt = first + asking.service.answers.tokenizer(text[:length]).input_ids + ids_of(length, 30)
        assert asked(asking, prompt, 20)[0] == asked(asking, prompt, 20, cache_prompt=False)[0]


def test_a_folder_that_cannot_be_changed(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts serve, and what cannot be removed is left."""
    asking = Asking(served(model, "--method", "cache8", "--keep", str(tmp_path)))
    expected = asked(asking, ids_of(0, 300))
    kept = asking.service.answers.kept
    kept.save()
    kept.texts.clear()
    kept.folder_limit = 0

    def refuse(path: Path, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert asked(asking, ids_of(0, 300)) == (expected[0], 256)
    kept.save()


def test_marks_get_sparse_far_from_the_end(model: PreTrainedModel) -> None:
    model = Family("Llama", "LlamaForCausalLM", WIDE | {"max_position_embeddings": 8192}).build()
    asking = Asking(served(model))
    asked(asking, ids_of(0, 5000), 4)
    (text,) = asking.service.answers.kept.texts.values()
    last = 5000 // STRIDE * STRIDE
    near = set(range(last - NEAR * STRIDE, last + 1, STRIDE))
    assert set(text.marks) == near | set(range(FAR_STRIDE, last, FAR_STRIDE))
    marks = sum(mark.nbytes for mark in text.marks.values())
    assert text.nbytes == text.cache.nbytes + marks and marks < text.cache.nbytes


def test_the_least_recently_used_leave(model: PreTrainedModel) -> None:
    asking = Asking(served(model))
    kept = asking.service.answers.kept
    asked(asking, ids_of(0, 300))
    kept.limit = int(2.5 * next(iter(kept.texts.values())).nbytes)
    asked(asking, ids_of(1, 300))
    assert asked(asking, ids_of(0, 300))[1] == 256
    asked(asking, ids_of(2, 300))
    assert [asked(asking, ids_of(seed, 300))[1] for seed in (0, 1)] == [256, 0]
    assert sum(text.nbytes for text in kept.texts.values()) <= kept.limit
    kept.limit = 100
    asked(asking, ids_of(3, 300))
    assert asked(asking, ids_of(3, 300))[1] == 0


def test_a_text_takes_the_place_of_its_beginnings(model: PreTrainedModel) -> None:
    asking = Asking(served(model))
    text, _ = asked(asking, ids_of(0, 300), 20)
    prompt = ids_of(0, 300) + asking.service.answers.tokenizer(text).input_ids
    asked(asking, prompt, 20)
    assert lengths(asking.service.answers.kept) == [339]


def kept_in(folder: Path, model: PreTrainedModel, *words: str) -> Asking:
    return Asking(served(model, "--keep", str(folder), *words))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_a_restart_finds_what_was_kept(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = ids_of(0, 600)
    first = kept_in(tmp_path, model)
    text, _ = asked(first, prompt, 40)
    further = prompt + first.service.answers.tokenizer(text).input_ids + ids_of(1, 30)
    first.service.answers.kept.save()
    expected = asked(first, further)
    assert sorted(int(file.name.partition("-")[0]) for file in files(tmp_path)) == [512, 639]
    second = kept_in(tmp_path, model)
    assert asked(second, further) == expected and expected[1] == 639
    assert asked(kept_in(tmp_path, model), prompt, 40) == (text, 512)
    assert {file.parent.stat().st_mode & 0o777 for file in files(tmp_path)} == {0o700}


def test_without_memory_all_is_on_disk(model: PreTrainedModel, tmp_path: Path) -> None:
    asking = kept_in(tmp_path, model, "--memory", "0")
    text, _ = asked(asking, ids_of(0, 600))
    assert lengths(asking.service.answers.kept) == [] and files(tmp_path)
    assert asked(asking, ids_of(0, 600)) == (text, 512)


def test_the_folder_is_bounded_over_all_configurations(model: PreTrainedModel, tmp_path: Path) -> None:
    asking = kept_in(tmp_path, model, "--memory", "0")
    asked(asking, ids_of(0, 300))
    size = files(tmp_path)[0].stat().st_size
    other = kept_in(tmp_path, model, "--memory", "0", "--method", "cache8")
    own = tmp_path / "notes" / "model-1.safetensors"
    own.parent.mkdir()
    own.write_bytes(b"a" * 10 * size)
    for seed in range(1, 4):
        other.service.answers.kept.folder_limit = 5 * size
        asked(other, ids_of(seed, 300))
    found = [file for file in files(tmp_path) if file != own]
    assert sum(file.stat().st_size for file in found) <= 5 * size and own.exists()
    assert len({file.parent for file in found}) == 1  # what the first left is the oldest


@pytest.mark.parametrize("damage", ["short", "empty", "zeros", "other"])
def test_a_damaged_file_is_not_used(
    damage: str, model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asking = kept_in(tmp_path, model, "--memory", "0")
    text, _ = asked(asking, ids_of(0, 300))
    for file in files(tmp_path):
        content = file.read_bytes()
        damaged = {"short": content[:-100], "empty": b"", "zeros": bytes(len(content)), "other": b"{" + content[1:]}
        file.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert asked(asking, ids_of(0, 300)) == (text, 0)
    assert "not used" in caplog.text


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    model = lettered()
    asked(kept_in(tmp_path, model, "--memory", "0"), ids_of(0, 300))
    assert asked(kept_in(tmp_path, model, "--memory", "0"), ids_of(0, 300))[1] == 256
    model.model.layers[0].mlp.up_proj.weight.data += 0.01
    assert asked(kept_in(tmp_path, model, "--memory", "0"), ids_of(0, 300))[1] == 0
    assert asked(kept_in(tmp_path, model, "--budget", "8", "--memory", "0"), ids_of(0, 300))[1] == 0


def test_a_folder_that_is_lost_is_told_and_answers_go_on(
    model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asking = kept_in(tmp_path / "kept", model, "--memory", "0")
    (tmp_path / "kept").rmdir()
    (tmp_path / "kept").write_text("a file in its place")
    with caplog.at_level(logging.WARNING):
        asked(asking, ids_of(0, 300))
    assert "is not kept" in caplog.text


def test_what_two_texts_have_in_common() -> None:
    one = Tensor([1, 2, 3])
    assert [common_length(one, Tensor(other)) for other in ([1, 2, 3, 4], [1, 2], [2], [])] == [3, 2, 0, 0]
