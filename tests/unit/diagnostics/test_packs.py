"""Packs of RULER's prompts: their tokens, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.small_assets import freeze_prompts

from residual_mass.diagnostics.packs import make_packs
from residual_mass.model.loading import Backbone
from residual_mass.texts.corpora import PackedDocuments

WORDS = [["apple", "pear", "plum"], ["red", "green", "blue"], ["one", "two", "three"]]
ANSWERS = {
    "ruler_cwe": [" 1. apple 2. pear 3. plum", " 1. red 2. green 3. blue", " 1. one 2. two 3. three"],
    "niah_multikey_3": [" apple, pear, plum", " red, green, blue", " one, two, three"],
}
CORPORA = [("cwe", "ruler_cwe"), ("needles", "niah_multikey_3")]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Three frozen prompts of each task."""
    texts = [f"list {n}: {' '.join(words)}\nMost common:" for n, words in enumerate(WORDS)]
    docs = {task: [{"outputs": words} for words in WORDS] for task in ANSWERS}
    return freeze_prompts(tmp_path / "manifest.json", "ruler", "128", docs, texts, "bytes")


@pytest.mark.parametrize(("corpus", "task"), CORPORA)
def test_the_answer_is_decoded_and_the_prompt_ends_the_prefill(
    corpus: str, task: str, tiny_backbone: Backbone, manifest: Path, tmp_path: Path
) -> None:
    tokenizer, answers = tiny_backbone.tokenizer, ANSWERS[task]
    packs = make_packs(corpus, tiny_backbone, "128", 5, 3, 0, tmp_path, manifest)
    assert [len(pack) for pack in packs] == [128 + 5] * 3
    for n, pack in enumerate(packs):
        prefill, decoded = tokenizer.decode(pack[:128]), tokenizer.decode(pack[128:])
        assert prefill.endswith(f"{task} list {n}: {' '.join(WORDS[n])}\nMost common:")
        assert decoded and answers[n].startswith(decoded)
        # The prompts before it come with their answers, the nearest one whole.
        assert f"{' '.join(WORDS[n - 1])}\nMost common:{answers[n - 1]}\n\n{task} list {n}" in prefill


def test_packs_share_no_prompt_as_long_as_there_are_others(tiny_backbone: Backbone, manifest: Path) -> None:
    def told(packs: int) -> list[str]:
        made = make_packs("cwe", tiny_backbone, "128", 5, packs, 0, manifest.parent, manifest)
        return [tiny_backbone.tokenizer.decode(pack) for pack in made]

    for n, text in enumerate(told(1)):
        assert f"{' '.join(WORDS[n + 1])}\nMost common:{ANSWERS['ruler_cwe'][n + 1]}" in text
    one, other = told(2)
    assert "list 2" in one and "list 2" not in other


def test_a_text_that_comes_to_an_end_gives_fewer_packs(
    tiny_backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f"Row {number}, of many. " for number in range(40)]
    corpus = PackedDocuments("rows", rows, tiny_backbone.tokenizer, 133, 0)
    monkeypatch.setattr("residual_mass.diagnostics.packs.held_out_corpus", lambda *_: corpus)
    packs = make_packs("wikitext", tiny_backbone, "128", 5, 16, 0, tmp_path, None)
    assert 1 < len(packs) < 16 and f"{len(packs)} packs instead of 16" in caplog.text
    told = "".join(tiny_backbone.tokenizer.decode(pack) for pack in packs)
    assert all(told.count(f"Row {number},") <= 1 for number in range(40))


@pytest.mark.parametrize(
    ("length", "queries", "problem"),
    [
        ("128", 500, r"diagnostics\.queries: an answer of ruler_cwe has \d+ tokens; ask for no more"),
        ("64", 5, r"manifest\.json: length is 128, not 64; give --prompts those of 64"),
    ],
)
def test_more_queries_than_an_answer_has_tokens_and_foreign_prompts_are_refused(
    length: str, queries: int, problem: str, tiny_backbone: Backbone, manifest: Path
) -> None:
    with pytest.raises(ValueError, match=problem):
        make_packs("cwe", tiny_backbone, length, queries, 3, 0, manifest.parent, manifest)
