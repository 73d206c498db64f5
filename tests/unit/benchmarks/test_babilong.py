from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any

import pytest

from residual_mass.benchmarks import babilong
from residual_mass.benchmarks.catalogue import DoesNotFitError, harness_config, harness_requests, tasks_of

TASKS = tasks_of("babilong", 1024)
ANSWER = 16


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Rows of the data set that the harness's loader gets: fill them in."""
    import datasets

    rows: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    return rows


def built(task: str, tokenizer: Any, assets: Path, length: int = 1024, count: int = 4, seed: int = 5) -> list[Any]:
    return babilong.build_examples(task, tokenizer, length, count, seed, assets)


def positions(doc: Any) -> list[int]:
    """Where each fact begins in the input, each sought after the one before."""
    found, at = [], 0
    for fact in doc["facts"]:
        at = doc["input"].index(fact, at)
        found.append(at)
        at += len(fact)
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1024, 2048])
def test_prompt_and_answer_have_exactly_the_length(
    task: str, length: int, tokenizer: Any, benchmark_assets: Path
) -> None:
    requests = harness_requests("babilong", task, built(task, tokenizer, benchmark_assets, length))
    assert {settings["max_gen_toks"] for _, settings in requests} == {ANSWER}
    assert [len(tokenizer(prompt).input_ids) + ANSWER for prompt, _ in requests] == [length] * 4


def test_a_tokenizer_that_cannot_hit_the_length_stays_just_below_it(tokenizer: Any, benchmark_assets: Path) -> None:
    def in_threes(text: str) -> Any:
        return types.SimpleNamespace(input_ids=[0] * (3 * len(text.split())))

    requests = harness_requests("babilong", TASKS[0], built(TASKS[0], in_threes, benchmark_assets))
    assert {len(in_threes(prompt).input_ids) + ANSWER for prompt, _ in requests} == {1024 - (1024 - ANSWER) % 3}

    def in_tens(text: str) -> Any:
        return types.SimpleNamespace(input_ids=[0] * (10 * len(text.split())))

    with pytest.raises(DoesNotFitError, match="no words of the books fill 4087 tokens with this tokenizer, only 4080"):
        built(TASKS[0], in_tens, benchmark_assets, 4087 + ANSWER)


@pytest.mark.parametrize("task", TASKS)
def test_facts_lie_in_order_between_whole_sentences(task: str, tokenizer: Any, benchmark_assets: Path) -> None:
    book = " ".join(babilong.read_paragraphs(benchmark_assets / "corpora" / "books"))
    adjacent = []
    for doc in built(task, tokenizer, benchmark_assets, 2048):
        noise, end = [], 0
        for at, fact in zip(positions(doc), doc["facts"], strict=True):
            noise.append(doc["input"][end:at].strip())
            end = at + len(fact)
        noise.append(doc["input"][end:].strip())
        adjacent += [gap == "" for gap in noise[1:-1]]
        *whole, cut = [gap for gap in noise if gap]
        for gap in whole:
            assert gap in f"{book} {book}"  # read on from the last book into the first
            assert gap[-1] in ".!" and gap[0].isupper()
        assert cut.rstrip(".") in f"{book} {book}" and cut.endswith((".", "!"))
    assert adjacent.count(True) < len(adjacent) / 2


def test_books_lose_what_is_not_prose(benchmark_assets: Path) -> None:
    paragraphs = babilong.read_paragraphs(benchmark_assets / "corpora" / "books")
    split = babilong.sentence_splitter(benchmark_assets / "nltk_data")
    text = " ".join(paragraphs)
    for gone in ("Gutenberg", "belongs to no book", "CHAPTER", "Produced by", "Snow", "THE GATE", "\n"):
        assert gone not in text
    sentences = [sentence for paragraph in paragraphs for sentence in split(paragraph)]
    assert (len(paragraphs), len(sentences), len(set(sentences))) == (100, 600, 300)


@pytest.mark.parametrize("task", TASKS)
def test_requests_are_those_of_the_harness_s_own_task(
    task: str, tokenizer: Any, benchmark_assets: Path, hub: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.task import ConfigurableTask

    monkeypatch.setattr(logging.getLogger("lm_eval.api.task"), "level", logging.ERROR)
    docs = built(task, tokenizer, benchmark_assets, count=3)
    hub += [{key: doc[key] for key in ("input", "question", "target")} for doc in docs]
    theirs = ConfigurableTask(config={**harness_config("babilong", task), "metadata": {"max_seq_lengths": "1k"}})
    theirs.build_all_requests()
    assert harness_requests("babilong", task, docs) == [instance.args for instance in theirs.instances]


@pytest.mark.parametrize("task", TASKS)
def test_what_cannot_fit_is_told(task: str, tokenizer: Any, benchmark_assets: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"facts and template take \d+ of 84 tokens with this tokenizer"):
        built(task, tokenizer, benchmark_assets, 100)
