"""What single tokens are in answers: their bytes and places, blanks before words, and those that end an answer."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conftest import byte_tokenizer, tiny_llama
from tests.needs import KERNELS, needs
from tests.unit.serve.conftest import Asking, events, options, served, with_template
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from residual_mass.serve.model import service_of
from residual_mass.serve.sampling import Sampling
from residual_mass.serve.tokens import TokenBytes

pytestmark = needs(KERNELS)


def word_tokenizer() -> PreTrainedTokenizerBase:
    """Words and bytes, as SentencePiece's: the first word of a text loses the blank before it."""
    words = ["▁a", "▁The", "▁river", "▁is", "▁wide", "wide", ".", "▁"]
    single = sorted(set("".join(words)))
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *single]
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            pair = word[: end - 1], word[end - 1]
            if pair not in merges:
                merges.append(pair)
            if word[:end] not in names:
                names.append(word[:end])
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


def writing(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    """Makes the model write these tokens."""
    monkeypatch.setattr(Sampling, "choose", lambda self, text, so_far, logits, generator: ids[len(so_far)])


@pytest.mark.parametrize("text", ["The river is wide.", "wide wide", "é😀 日本", "a  b"])
@pytest.mark.parametrize("make", [byte_tokenizer, word_tokenizer])
def test_the_bytes_of_tokens_are_those_of_the_text(make: Any, text: str) -> None:
    tokenizer = make()
    known = TokenBytes(tokenizer)
    found = b"".join(known[token] for token in tokenizer(text, add_special_tokens=False).input_ids)
    assert found.removeprefix(b" ") == text.encode()


def test_a_completion_goes_on_in_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the blank before its first word, which an answer in a chat does not begin with."""
    tokenizer = with_template(word_tokenizer())
    asking = Asking(service_of(wide_llama(), tokenizer, "tiny", options("--method", "cache8")))
    writing(monkeypatch, [*tokenizer("wide.", add_special_tokens=False).input_ids, 1])
    body = {"prompt": "The river is", "max_tokens": 8}
    assert asking.complete(**body)["choices"][0]["text"] == " wide."
    whole = asking.complete(**body, echo=True, logprobs=0)["choices"][0]
    assert whole["text"] == "The river is wide."
    assert whole["logprobs"]["tokens"] == [" The", " river", " is", " wide", ".", "</s>"]
    chunks = events(asking.post("completions", {**body, "echo": True, "stream": True})[1])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert asking.chat()["choices"][0]["message"]["content"] == "wide."


def wide_llama() -> Any:
    model = tiny_llama(width=64)
    model.resize_token_embeddings(320, mean_resizing=False)
    return model


def test_bytes_of_characters_that_several_tokens_have(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = asking.service.answers.tokenizer
    writing(monkeypatch, [*tokenizer("é😀a").input_ids, 1])
    content = asking.chat(logprobs=True, top_logprobs=5)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for each in content[:-1] for byte in each["bytes"]) == "é😀a".encode()
    assert [each["token"] for each in content[:2]] == ["bytes:\\xc3", "bytes:\\xa9"] and content[6]["token"] == "a"
    logprobs = asking.complete(logprobs=5)["choices"][0]["logprobs"]
    assert all(len(each) in (5, 6) for each in logprobs["top_logprobs"])
    assert [logprobs["text_offset"][place] for place in (0, 2, 6)] == [0, 1, 2]
    chunks = events(asking.post("completions", {"prompt": "a", "logprobs": 0, "max_tokens": 9, "stream": True})[1])
    streamed = [place for chunk in chunks for place in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert streamed == logprobs["text_offset"]


def test_special_tokens_that_end_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's end, whatever the configuration says, and a stop string that is one."""
    model = tiny_llama(width=64)
    model.generation_config.eos_token_id = 70
    asking = Asking(served(model, "--method", "cache8"))
    a, b, end, begin = 80, 81, 1, 0
    text = asking.service.answers.tokenizer.decode([a])
    writing(monkeypatch, [a, end, b, b])
    assert asking.chat()["choices"][0]["message"]["content"] == text
    writing(monkeypatch, [a, begin, b, 70])
    for stop, length in (("<s>", 1), ("<t>", 2)):
        choice = asking.complete(stop=["no", stop])["choices"][0]
        assert len(choice["text"]) == length and choice["finish_reason"] == "stop"
