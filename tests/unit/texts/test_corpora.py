"""Corpora: exact lengths, sequences that depend only on seed and index, held-out text that training never sees."""

from __future__ import annotations

import json
import re
from pathlib import Path

import datasets
import pytest
from tests.conftest import byte_tokenizer
from tokenizers.processors import TemplateProcessing

from residual_mass.texts import corpora
from residual_mass.texts.corpora import PackedDocuments, held_out_corpus, is_held_out, training_corpus

TOKENIZER = byte_tokenizer()
PARTS = [f"Part {number} is told here.\n{'It goes on and on. ' * 7}END." for number in range(400)]
BOOKS = ["\n\n".join(PARTS[:200]), "\n\n".join(PARTS[200:])]


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    for folder in ("qa", "corpora/sotu", "corpora/books", "corpora/code"):
        (tmp_path / folder).mkdir(parents=True)
    items = [{"context": [[f"Title {i}", [f"Paragraph number {i}. ", "It ends."]]]} for i in range(200)]
    (tmp_path / "qa" / "hotpotqa.json").write_text(json.dumps(items))
    (tmp_path / "corpora" / "books" / "books.txt").write_text(
        f"{BOOKS[0]}\nThe Project Gutenberg eBook of Emma\n\nThis header belongs to no book.\n\n"
        f"*** START OF THIS PROJECT GUTENBERG EBOOK EMMA ***\n\n\n{BOOKS[1]}\n\n\n"
        "End of Project Gutenberg's Emma\n\n*** END OF THIS PROJECT GUTENBERG EBOOK EMMA ***\n\nUpdated editions\n"
    )
    for number in range(12):
        (tmp_path / "corpora" / "code" / f"module_{number:02d}.py").write_text(f"def f_{number}(x):\n    return x\n")
    for year in range(30):
        (tmp_path / "corpora" / "sotu" / f"{year}.txt").write_text(f"Fellow citizens of {year}. " * 40)
    return tmp_path


@pytest.fixture
def fineweb(monkeypatch: pytest.MonkeyPatch) -> datasets.Dataset:
    """Rows in the place of the corpus on the hub, one of them without text."""
    rows = datasets.Dataset.from_list([{"text": f"<{number}>" * 30 if number != 17 else None} for number in range(40)])
    monkeypatch.setattr(corpora, "hub_rows", lambda part: rows)
    return rows


def test_sequences_have_the_length_and_depend_on_seed_and_index_alone(assets: Path, fineweb: datasets.Dataset) -> None:
    names = ["sotu", "wiki", "pydoc", "fineweb"]
    corpus = training_corpus(names, TOKENIZER, 300, 0, assets)
    first = [corpus.sequence(i) for i in range(8)]
    assert {len(ids) for ids in first} == {300}
    again = training_corpus(names, TOKENIZER, 300, 0, assets)
    assert [again.sequence(i) for i in reversed(range(8))] == first[::-1]
    assert training_corpus(names, TOKENIZER, 300, 1, assets).sequence(0) != first[0]
    texts = [TOKENIZER.decode(ids) for ids in first]
    assert all("citizens" in text for text in texts[::4]) and all("Paragraph" in text for text in texts[1::4])
    assert all(re.search(r"<\d+><\d+>", text) for text in texts[3::4])


def test_the_mini_study_reads_the_sequences_that_it_read_before(assets: Path) -> None:
    """Maps and held-out rows of finished studies are of these draws."""
    corpus = training_corpus(["sotu", "wiki"], TOKENIZER, 60, 0, assets, slot=1, slots=2)
    assert TOKENIZER.decode(corpus.sequence(4)) == "f 12. " + "Fellow citizens of 12. " * 2 + "Fellow c"
    assert TOKENIZER.decode(corpus.sequence(5)) == "Title 92\nParagraph number 92. It ends.\n\nTitle 93\nParagraph n"


def test_training_never_sees_held_out_documents(assets: Path) -> None:
    held_out = held_out_corpus("wiki", TOKENIZER, 200, 0, assets)
    (trained,) = training_corpus(["wiki"], TOKENIZER, 200, 0, assets).corpora
    assert 0 < len(held_out.documents) < 40 and len(held_out.documents) + len(trained.documents) == 200
    assert not set(held_out.documents) & set(trained.documents)
    assert all(is_held_out(document) for document in held_out.documents)


def test_parallel_readers_share_out_the_sequences(assets: Path) -> None:
    whole = training_corpus(["sotu", "wiki"], TOKENIZER, 100, 3, assets)
    slots = [training_corpus(["sotu", "wiki"], TOKENIZER, 100, 3, assets, slot, 3) for slot in range(3)]
    for each in range(2):
        for index in range(4):
            given = [slot.sequence(2 * index + each) for slot in slots]
            assert given == [whole.sequence(2 * (3 * index + slot) + each) for slot in range(3)]


def test_disjoint_sequences_share_no_document(assets: Path) -> None:
    found = held_out_corpus("code", TOKENIZER, 60, 0, assets).disjoint(3)
    told = [{int(number) for number in re.findall(r"f_(\d+)\(x\)", TOKENIZER.decode(ids))} for ids in found]
    assert len(found) == 3 and sum(map(len, told)) == len(set.union(*told))
    assert len(held_out_corpus("code", TOKENIZER, 200, 0, assets).disjoint(50)) == 1


@pytest.mark.parametrize(("template", "front"), [("<s> $A", [0]), ("</s> <s> $A </s>", [1, 0]), ("$A </s>", [])])
def test_a_sequence_begins_as_the_tokenizer_begins_a_text(template: str, front: list[int]) -> None:
    """With its BOS, with several tokens, or with none; an EOS at the end of a text is not part of a sequence."""
    tokenizer = byte_tokenizer()
    special = [("<s>", 0), ("</s>", 1)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    ids = PackedDocuments("text", ["abc " * 100], tokenizer, 50, 0).sequence(0)
    assert len(ids) == 50 and ids[: len(front)] == front and not {0, 1} & {*ids[len(front) :]}


def test_books_are_held_out_whole_and_read_on_in_order(assets: Path) -> None:
    corpus = held_out_corpus("books", TOKENIZER, 25_000, 0, assets)
    assert "\n\n".join(corpus.documents) == f"{BOOKS[0]}\n\n{BOOKS[1]}"
    sizes = [len(document) for document in corpus.documents]
    assert len(sizes) == 4 and all(abs(size - corpora.RUN_CHARACTERS) < 200 for size in (sizes[0], sizes[2]))
    text = TOKENIZER.decode(corpus.sequence(0))
    numbers = [int(number) for number in re.findall(r"Part (\d+) ", text)]
    assert len(numbers) > 100 and sum(b != a + 1 for a, b in zip(numbers, numbers[1:], strict=False)) <= 1


def test_what_cannot_be_read_is_one_line(assets: Path, tmp_path: Path, fineweb: datasets.Dataset) -> None:
    nothing = tmp_path / "nothing"
    for name, missing in (("sotu", "corpora/sotu"), ("wiki", "qa/hotpotqa.json"), ("books", "corpora/books")):
        with pytest.raises(ValueError, match=f"^{re.escape(str(nothing / missing))}: no .* run the assets stage$"):
            held_out_corpus(name, TOKENIZER, 100, 0, nothing)
    (assets / "qa" / "hotpotqa.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds no questions of HotpotQA .* run the assets stage$"):
        training_corpus(["wiki"], TOKENIZER, 100, 0, assets)
    with pytest.raises(ValueError, match="'arxiv': data set ccdv/arxiv.* has no column 'article', only text; name the"):
        training_corpus(["arxiv"], TOKENIZER, 100, 0, assets)
    for name in ("fineweb", "poems"):  # all of the first is trained on
        with pytest.raises(ValueError, match=f"'{name}' has no held-out text; choose sotu, "):
            held_out_corpus(name, TOKENIZER, 100, 0, assets)
    for name in ("books", "wikitext"):
        with pytest.raises(ValueError, match=f"'{name}' is not a training corpus; choose sotu, "):
            training_corpus([name], TOKENIZER, 100, 0, assets)
    with pytest.raises(ValueError, match="'text' is empty"):
        PackedDocuments("text", [], TOKENIZER, 100, 0)
    with pytest.raises(ValueError, match="'text' holds 7 tokens, fewer than one sequence of 100; choose a shorter"):
        PackedDocuments("text", ["short"], TOKENIZER, 100, 0).sequence(0)
