"""LongBench: examples fit the length, and the harness's own scorers accept their references."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.small_assets import HAYSTACK

from residual_mass.benchmarks import longbench
from residual_mass.benchmarks.catalogue import Doc, harness_requests
from residual_mass.spec.tasks import BENCHMARKS

TASKS = tuple(task.name for task in BENCHMARKS["longbench"])
QUESTION_TASKS = ("longbench_musique", "longbench_hotpotqa")
GENERATED = {"longbench_gov_report": 512, "longbench_qmsum": 512, "longbench_musique": 32, "longbench_hotpotqa": 32}
ITEMS, ARTICLES = 40, 12


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough invented text to fill a length: forty items of ten paragraphs, twelve articles of sixty."""
    assets, rng = tmp_path_factory.mktemp("library"), random.Random(0)
    items = [_item(number, rng) for number in range(ITEMS)]
    articles = [
        {"title": f"Article {number}", "paragraphs": [{"context": "".join(_sentences(rng))} for _ in range(60)]}
        for number in range(ARTICLES)
    ]
    _write(assets, items, articles)
    return assets


def _write(assets: Path, items: list[Doc], articles: list[Doc]) -> None:
    (assets / "qa").mkdir()
    (assets / "qa" / "hotpotqa.json").write_text(json.dumps(items))
    (assets / "qa" / "squad.json").write_text(json.dumps({"data": articles}))


def _item(number: int, rng: random.Random) -> Doc:
    context = [[f"Title {number}.{place}", _sentences(rng)] for place in range(10)]
    supporting = rng.sample(range(10), 2)
    context[supporting[1]][1].append(f" Its keeper was keeper{number}.")
    return {
        "_id": f"item {number}",
        "type": "comparison" if number % 5 == 0 else "bridge",
        "question": f"Who kept number {number}? ",
        "answer": "yes" if number % 10 == 0 else f"keeper{number}",
        "supporting_facts": [[context[place][0], 0] for place in supporting],
        "context": context,
    }


def _sentences(rng: random.Random) -> list[str]:
    words = HAYSTACK.lower().replace(".", "").split()
    sentences = [" ".join(rng.sample(words, 9)).capitalize() + "." for _ in range(rng.randint(2, 5))]
    return [sentences[0], *(f" {sentence}" for sentence in sentences[1:])]


def _supporting(item: Doc) -> list[str]:
    titles = {title for title, _ in item["supporting_facts"]}
    return [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"] if title in titles]


def _passages(doc: Doc) -> list[str]:
    first, *others = doc["context"].split("\n\nPassage ")
    numbered = [passage.partition(":\n") for passage in (first.removeprefix("Passage "), *others)]
    assert [number for number, _, _ in numbered] == [str(n + 1) for n in range(len(numbered))]
    return [text for _, _, text in numbered]


def _with_items(task: str, assets: Path, tokenizer: Any) -> list[tuple[Doc, Doc, list[str], set[str]]]:
    """Examples, each with the item that it was made of, its passages, and those of the item."""
    items = {item["_id"]: item for item in json.loads((assets / "qa" / "hotpotqa.json").read_text())}
    docs = longbench.build_examples(task, tokenizer, 2048, 10, 0, assets)
    own = {key: {f"{title}\n{''.join(text)}" for title, text in item["context"]} for key, item in items.items()}
    return [(doc, items[doc["_id"]], _passages(doc), own[doc["_id"]]) for doc in docs]


@pytest.mark.parametrize("length", [1024, 2048])
@pytest.mark.parametrize("task", TASKS)
def test_prompt_and_answer_fill_the_length(task: str, length: int, library: Path, tokenizer: Any) -> None:
    docs = longbench.build_examples(task, tokenizer, length, 6, 0, library)
    requests = harness_requests("longbench", task, docs)
    assert len(docs) == len(requests) == 6
    for doc, (prompt, settings) in zip(docs, requests, strict=True):
        assert doc["context"] in prompt and doc["question"] in prompt
        assert (settings["max_gen_toks"], settings["until"]) == (GENERATED[task], [])
        answer = min(GENERATED[task], len(tokenizer(doc["answers"][0]).input_ids) + longbench.ANSWER_MARGIN)
        assert 0.85 * length < len(tokenizer(prompt).input_ids) + answer <= length
        assert doc["length"] == len(doc["context"].split())


def test_musique_and_hotpotqa_share_no_question(library: Path, tokenizer: Any) -> None:
    kept: dict[str, set[str]] = {}
    for task in QUESTION_TASKS:
        seeds = [longbench.build_examples(task, tokenizer, 1024, 10, seed, library) for seed in range(3)]
        kept[task] = {doc["_id"] for docs in seeds for doc in docs}
        assert len(kept[task]) > 10
    assert not kept["longbench_musique"] & kept["longbench_hotpotqa"]


def test_hotpotqa_keeps_its_items_whole_and_in_no_fixed_order(library: Path, tokenizer: Any) -> None:
    places, answers = set(), set()
    for doc, item, passages, own in _with_items("longbench_hotpotqa", library, tokenizer):
        assert own < set(passages) and len(set(passages)) == len(passages)
        assert item["answer"] == "yes" or any(item["answer"] in passage for passage in _supporting(item))
        assert (doc["question"], doc["answers"]) == (item["question"].strip(), [item["answer"]])
        places.add(tuple(sorted(passages.index(passage) for passage in own)))
        answers.add(item["answer"])
    assert len(places) > 5 and "yes" in answers


def test_musique_hides_two_supporting_paragraphs_among_other_items(library: Path, tokenizer: Any) -> None:
    for doc, item, passages, own in _with_items("longbench_musique", library, tokenizer):
        assert item["type"] == "bridge"
        assert own & set(passages) == set(_supporting(item)) and len(passages) > 10
        assert sum(doc["answers"][0] in passage for passage in _supporting(item)) == 1


def test_report_is_the_article_after_its_summary(library: Path, tokenizer: Any) -> None:
    articles = json.loads((library / "qa" / "squad.json").read_text())["data"]
    texts = {article["title"]: [paragraph["context"] for paragraph in article["paragraphs"]] for article in articles}
    docs = longbench.build_examples("longbench_gov_report", tokenizer, 1024, ARTICLES + 1, 0, library)
    assert len(docs) == ARTICLES  # there are no more
    for doc in docs:
        summary, *report = texts[doc["_id"]]
        parts = doc["context"].split("\n\n")
        assert doc["answers"] == [summary] and summary not in doc["context"]
        assert parts == report[: len(parts)] and len(parts) > 5


def test_query_asks_for_one_turn_of_the_transcript(library: Path, tokenizer: Any) -> None:
    for doc in longbench.build_examples("longbench_qmsum", tokenizer, 1024, 10, 0, library):
        (turn,) = (line for line in doc["context"].splitlines() if line.startswith(f"{doc['_id']}: "))
        text = turn.removeprefix(f"{doc['_id']}: ")
        assert text.startswith(doc["answers"][0]) and doc["answers"][0].endswith(".")
        assert len(doc["answers"][0]) < 0.7 * len(text)
        assert doc["question"] == f"Summarize what is said about {doc['_id']}."


def test_answers_that_cannot_score_are_left_out_and_entities_resolved(tmp_path: Path, tokenizer: Any) -> None:
    rng = random.Random(1)
    items = [_item(number, rng) for number in range(20)]
    for item in items[10:]:
        item["answer"] = "The !"
    for item in items:
        item["context"] = [[f"The &quot;{title}&quot;", sentences] for title, sentences in item["context"]]
        item["supporting_facts"] = [[f"The &quot;{title}&quot;", place] for title, place in item["supporting_facts"]]
    _write(tmp_path, items, [])
    for task in QUESTION_TASKS:
        docs = longbench.build_examples(task, tokenizer, 1024, 21, 0, tmp_path)
        assert 0 < len(docs) < 10 and "The !" not in [answer for doc in docs for answer in doc["answers"]]
        assert all('The "Title' in doc["context"] and "&quot;" not in doc["context"] for doc in docs)
