"""Packs of RULER's common words extraction: what stands where, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from residual_mass.backbones.asset_texts import SEPARATOR
from residual_mass.backbones.hub_stream import HubStream
from residual_mass.backbones.loading import Backbone
from residual_mass.diagnostics.packs import cwe_packs, make_packs
from residual_mass.files import sha256_of
from residual_mass.frozen_prompts import table_sha256

WORDS = [["apple", "pear", "plum"], ["red", "green", "blue"], ["one", "two", "three"]]
ANSWERS = [" 1. apple 2. pear 3. plum", " 1. red 2. green 3. blue", " 1. one 2. two 3. three"]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Three frozen prompts, as the prompts stage writes them."""
    rows = [
        {
            "task": "ruler_cwe", "index": n, "prompt": f"List {n}: {' '.join(words)}\nMost common:",
            "max_generation_tokens": 120, "stop": [], "doc": {"outputs": words},
        }
        for n, words in enumerate(WORDS)
    ]  # fmt: skip
    (tmp_path / "ruler_cwe.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sha256 = sha256_of(tmp_path / "ruler_cwe.jsonl")
    tasks = {"ruler_cwe": {"file": "ruler_cwe.jsonl", "sha256": sha256, "examples": 3, "data": "original"}}
    content = {
        "benchmark": "ruler", "length": "128", "tokenizer": "bytes", "harness": {}, "examples": 3, "tasks": tasks,
        "left_out": {}, "sha256": table_sha256(tasks),
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    return tmp_path / "manifest.json"


def test_the_answer_is_decoded_and_the_prompt_ends_the_prefill(tiny_backbone: Backbone, manifest: Path) -> None:
    tokenizer = tiny_backbone.tokenizer
    packs = cwe_packs(manifest, tokenizer, "128", 5, 3)
    assert [len(pack) for pack in packs] == [128 + 5] * 3
    for n, pack in enumerate(packs):
        prefill, decoded = tokenizer.decode(pack[:128]), tokenizer.decode(pack[128:])
        assert prefill.endswith(f"List {n}: {' '.join(WORDS[n])}\nMost common:")
        assert decoded and ANSWERS[n].startswith(decoded)
        # The prompts before it come with their answers, the nearest one whole.
        assert f"{' '.join(WORDS[n - 1])}\nMost common:{ANSWERS[n - 1]}\n\nList {n}" in prefill


def test_packs_share_no_prompt_as_long_as_there_are_others(tiny_backbone: Backbone, manifest: Path) -> None:
    for n, pack in enumerate(cwe_packs(manifest, tiny_backbone.tokenizer, "128", 5, 1)):
        assert f"{' '.join(WORDS[n + 1])}\nMost common:{ANSWERS[n + 1]}" in tiny_backbone.tokenizer.decode(pack)
    one, other = (tiny_backbone.tokenizer.decode(p) for p in cwe_packs(manifest, tiny_backbone.tokenizer, "128", 5, 2))
    assert "List 2" in one and "List 2" not in other


def test_a_text_that_comes_to_an_end_gives_fewer_packs(
    tiny_backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": f"Row {number}, of many. "} for number in range(40)]
    stream = HubStream("wikitext", tiny_backbone.tokenizer, 133, 0)
    stream.__dict__["_rows"] = datasets.Dataset.from_list(rows).to_iterable_dataset()
    monkeypatch.setattr("residual_mass.diagnostics.packs.held_out_corpus", lambda *_: stream)
    packs = make_packs("wikitext", tiny_backbone, "128", 5, 16, 0, tmp_path, None)
    texts = [row["text"] + SEPARATOR for row in rows]
    tokens = sum(len(tiny_backbone.tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
    assert 1 < len(packs) == tokens // 133 < 16 and f"{len(packs)} packs instead of 16" in caplog.text
    told = "".join(tiny_backbone.tokenizer.decode(pack) for pack in packs)
    assert all(told.count(f"Row {number},") <= 1 for number in range(40)) and told.count("Row 0,") == 1


def test_there_are_no_more_packs_than_prompts(tiny_backbone: Backbone, manifest: Path) -> None:
    assert cwe_packs(manifest, tiny_backbone.tokenizer, "128", 5, 7) == cwe_packs(
        manifest, tiny_backbone.tokenizer, "128", 5, 3
    )


def test_more_queries_than_an_answer_has_tokens_are_refused(tiny_backbone: Backbone, manifest: Path) -> None:
    with pytest.raises(
        ValueError, match=r"diagnostics\.queries: an answer of ruler_cwe has \d+ tokens; ask for no more"
    ):
        cwe_packs(manifest, tiny_backbone.tokenizer, "128", 500, 3)


def test_changed_or_foreign_prompts_are_refused(tiny_backbone: Backbone, manifest: Path) -> None:
    with pytest.raises(ValueError, match=r"manifest\.json: has prompts of length 128, not 64; delete the manifest"):
        cwe_packs(manifest, tiny_backbone.tokenizer, "64", 5, 3)
    file = manifest.with_name("ruler_cwe.jsonl")
    file.write_text(file.read_text().replace("apple", "grape"))
    with pytest.raises(ValueError, match=r"ruler_cwe\.jsonl: missing, or not the file that .*manifest\.json lists"):
        cwe_packs(manifest, tiny_backbone.tokenizer, "128", 5, 3)
