"""Corpora: exact lengths, reproducible sequences, held-out text that training never sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import byte_tokenizer

from residual_mass.backbones.corpora import (
    Cycle,
    HubStream,
    PackedDocuments,
    held_out_corpus,
    is_held_out,
    training_corpus,
)

TOKENIZER = byte_tokenizer()


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    (tmp_path / "qa").mkdir()
    (tmp_path / "corpora" / "sotu").mkdir(parents=True)
    items = [{"context": [[f"Title {i}", [f"Paragraph number {i}. ", "It ends."]]]} for i in range(200)]
    (tmp_path / "qa" / "hotpotqa.json").write_text(json.dumps(items))
    for year in range(30):
        (tmp_path / "corpora" / "sotu" / f"{year}.txt").write_text(f"Fellow citizens of {year}. " * 40)
    return tmp_path


def test_sequences_have_the_length_and_repeat(assets: Path) -> None:
    corpus = training_corpus(["sotu", "wiki", "pydoc"], TOKENIZER, 300, 0, assets)
    first = [corpus.sequence(i) for i in range(6)]
    assert {len(ids) for ids in first} == {300}
    again = training_corpus(["sotu", "wiki", "pydoc"], TOKENIZER, 300, 0, assets)
    assert [again.sequence(i) for i in reversed(range(6))] == first[::-1]
    assert training_corpus(["sotu"], TOKENIZER, 300, 1, assets).sequence(0) != first[0]
    texts = [TOKENIZER.decode(ids) for ids in first]
    assert "citizens" in texts[0] and "Paragraph" in texts[1] and "citizens" in texts[3] and "Paragraph" in texts[4]


def test_training_never_sees_held_out_documents(assets: Path) -> None:
    held_out = held_out_corpus("wiki", TOKENIZER, 200, 0, assets)
    assert isinstance(held_out, PackedDocuments)
    (trained,) = training_corpus(["wiki"], TOKENIZER, 200, 0, assets).corpora
    assert isinstance(trained, PackedDocuments)
    assert 0 < len(held_out.documents) < 40 and len(held_out.documents) + len(trained.documents) == 200
    assert not set(held_out.documents) & set(trained.documents)
    assert all(is_held_out(d) for d in held_out.documents)


def test_bos_leads_where_the_tokenizer_adds_one() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    ids = PackedDocuments("text", ["abc " * 100], tokenizer, 50, 0).sequence(0)
    assert len(ids) == 50 and ids[0] == 0 and ids.count(0) == 1


def test_bad_corpora_are_named(assets: Path) -> None:
    with pytest.raises(ValueError, match="'poems' is unknown; known are sotu"):
        training_corpus(["poems"], TOKENIZER, 100, 0, assets)
    with pytest.raises(ValueError, match="'wikitext' is held out"):
        training_corpus(["wikitext"], TOKENIZER, 100, 0, assets)
    with pytest.raises(ValueError, match="'fineweb' is unknown; known are sotu"):
        held_out_corpus("fineweb", TOKENIZER, 100, 0, assets)
    with pytest.raises(ValueError, match="'text' is empty"):
        PackedDocuments("text", [], TOKENIZER, 100, 0)
    with pytest.raises(ValueError, match="fewer than one sequence"):
        PackedDocuments("text", ["short"], TOKENIZER, 100, 0).sequence(0)


def test_hub_stream_packs_in_order_and_restarts_for_an_earlier_index(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {i} " + "x" * (i * 13 % 60) for i in range(50)]
    monkeypatch.setattr(HubStream, "_texts", lambda self, epoch: iter(texts if epoch == 0 else texts[::-1]))
    stream = HubStream("fineweb", TOKENIZER, 64, 0)
    everything = TOKENIZER("".join(t + "\n\n" for t in texts), add_special_tokens=False).input_ids
    for index in (0, 1, 4, 2, 2):
        assert stream.sequence(index) == everything[64 * index : 64 * (index + 1)]
    epoch = len(everything) // 64
    again = TOKENIZER("".join(t + "\n\n" for t in texts[::-1]), add_special_tokens=False).input_ids
    assert stream.sequence(epoch) == (everything[64 * epoch :] + again)[:64]
    monkeypatch.setattr(HubStream, "_texts", lambda self, epoch: iter(["short"]))
    with pytest.raises(ValueError, match="'fineweb' holds fewer than one sequence"):
        HubStream("fineweb", TOKENIZER, 64, 0).sequence(0)


def test_cycle_is_one_to_one() -> None:
    a, b = (PackedDocuments(name, [name * 400], TOKENIZER, 10, 0) for name in ("a", "b"))
    assert [TOKENIZER.decode(Cycle([a, b]).sequence(i))[0] for i in range(4)] == ["a", "b", "a", "b"]
