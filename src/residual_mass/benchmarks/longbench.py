"""Examples for LongBench's templates (GovReport, QMSum, MuSiQue, HotpotQA) that fill a length with whole paragraphs.

They are built from SQuAD 2.0's Wikipedia articles and HotpotQA's dev set (distractor setting, all questions hard):

* HotpotQA: its own questions and answers. The passages are all paragraphs of the question's item (two supporting ones
  and the distractors), filled up with paragraphs of other items, in random order. LongBench uses the full Wikipedia
  articles around them.
* MuSiQue, a stand-in: HotpotQA's bridge questions, which take two steps where MuSiQue's take two to four, with only the
  two supporting paragraphs among paragraphs of other items. Unlike in MuSiQue, distractors are about other subjects.
  Its questions and those of HotpotQA are disjoint for every seed and length.
* GovReport, a stand-in: the report is a SQuAD article without its first paragraph, which is the reference summary and
  may contain what the report does not.
* QMSum, a stand-in: the query asks what is said about a title. The transcript consists of HotpotQA paragraphs in random
  order, one per line after its title, like turns after their speakers. The reference is the leading sentences of the
  title's paragraph. Unlike in QMSum, it is in the transcript word for word.

An example leaves space for its answer: the harness's limit of generated tokens, or the reference's length plus
`ANSWER_MARGIN` where that is less.
"""

from __future__ import annotations

import hashlib
import html
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from residual_mass.benchmarks.catalogue import Doc, DoesNotFitError, harness_config, seeded
from residual_mass.files import read_json

ANSWER_MARGIN = 32
SUMMARY_SENTENCES = 3
"""Maximum number of sentences of a query's reference, which is at most half of its paragraph."""
SEPARATORS = {"longbench_gov_report": "\n\n", "longbench_qmsum": "\n"}
"""Separators of the parts of a context, if these are not numbered passages."""
FILLER_TOKENS = 32
"""Few paragraphs are this short: length / FILLER_TOKENS of them are more than fit."""


class Passage(NamedTuple):
    """A Wikipedia paragraph of HotpotQA; its sentences include their spaces."""

    title: str
    sentences: list[str]

    @property
    def text(self) -> str:
        return "".join(self.sentences).strip()


class ContextPart(NamedTuple):
    """A piece of a context that is used whole or not at all; parts are ordered by their places."""

    place: float
    text: str


@dataclass(frozen=True)
class Draft:
    """An example before its size is chosen: its first `needed` parts, then as many of the others as fit."""

    key: str
    question: str
    answer: str
    parts: list[ContextPart]
    needed: int


def build_examples(task: str, tokenizer: Any, length: int, count: int, seed: int, assets: Path) -> list[Doc]:
    """Returns the first `count` examples, or all where there are fewer, in the fields of the hub's data set. With their
    answer they take at most `length` tokens.

    Raises:
        DoesNotFitError: not one example fits.
    """
    config = harness_config("longbench", task)

    def tokens(text: str) -> int:
        return len(tokenizer(text).input_ids)

    docs: list[Doc] = []
    for draft in DRAFTS[task](assets, length, Random(seeded(seed, task, length))):
        doc = _longest_that_fits(draft, config, tokens, length)
        docs += [doc] if doc else []
        if len(docs) == count:
            break
    if not docs:
        raise DoesNotFitError(f"none of its examples fits {length} tokens with this tokenizer")
    return docs


def _longest_that_fits(draft: Draft, config: dict[str, Any], tokens: Callable[[str], int], length: int) -> Doc | None:
    """Returns the longest example that fits; None where not even the needed parts do."""
    from lm_eval.utils import apply_template

    answer_tokens = min(config["generation_kwargs"]["max_gen_toks"], tokens(draft.answer) + ANSWER_MARGIN)

    def too_long(parts: int) -> bool:
        return tokens(apply_template(config["doc_to_text"], _doc(draft, config, parts))) + answer_tokens > length

    sizes = range(draft.needed, len(draft.parts) + 1)
    fitting = bisect_left(sizes, True, key=too_long)
    return _doc(draft, config, sizes[fitting - 1]) if fitting else None


def _doc(draft: Draft, config: dict[str, Any], parts: int) -> Doc:
    texts = [part.text for part in sorted(draft.parts[:parts])]
    if config["task"] not in SEPARATORS:
        texts = [f"Passage {number}:\n{text}" for number, text in enumerate(texts, start=1)]
    context = SEPARATORS.get(config["task"], "\n\n").join(texts)
    return {
        "question": draft.question,
        "context": context,
        "answers": [draft.answer],
        "length": len(context.split()),
        "dataset": config["dataset_name"],
        "language": "en",
        "all_classes": None,
        "_id": draft.key,
    }


def _hotpotqa(assets: Path, length: int, rng: Random) -> Iterator[Draft]:
    items = _items(assets)
    chosen = [item for item in items if not _for_musique(item)]
    return _questions(chosen, _passages, _all_passages(items), length, rng)


def _musique(assets: Path, length: int, rng: Random) -> Iterator[Draft]:
    items = _items(assets)
    chosen = [item for item in items if _for_musique(item) and item["type"] == "bridge"]
    return _questions(chosen, _supporting_passages, _all_passages(items), length, rng)


def _questions(
    items: list[Doc], needed: Callable[[Doc], list[Passage]], pool: list[Passage], length: int, rng: Random
) -> Iterator[Draft]:
    for item in filter(_scorable, rng.sample(items, len(items))):
        own = needed(item)
        passages = own + _fillers(pool, _passages(item), length, rng)
        parts = [ContextPart(rng.random(), f"{passage.title}\n{passage.text}") for passage in passages]
        yield Draft(item["_id"], item["question"].strip(), item["answer"], parts, needed=len(own))


def _qmsum(assets: Path, length: int, rng: Random) -> Iterator[Draft]:
    pool = _all_passages(_items(assets))
    subjects = [passage for passage in pool if len(passage.sentences) > 1]
    for subject in rng.sample(subjects, len(subjects)):
        leading = subject.sentences[: min(SUMMARY_SENTENCES, len(subject.sentences) // 2)]
        passages = [subject, *_fillers(pool, [subject], length, rng)]
        parts = [ContextPart(rng.random(), f"{passage.title}: {passage.text}") for passage in passages]
        query = f"Summarize what is said about {subject.title}."
        yield Draft(subject.title, query, "".join(leading).strip(), parts, needed=1)


def _gov_report(assets: Path, _: int, rng: Random) -> Iterator[Draft]:
    articles = read_json(assets / "qa" / "squad.json")["data"]
    for article in rng.sample(articles, len(articles)):
        summary, *report = (paragraph["context"].strip() for paragraph in article["paragraphs"])
        yield Draft(article["title"], "", summary, [ContextPart(*numbered) for numbered in enumerate(report)], needed=1)


DRAFTS: dict[str, Callable[[Path, int, Random], Iterator[Draft]]] = {
    "longbench_gov_report": _gov_report,
    "longbench_qmsum": _qmsum,
    "longbench_musique": _musique,
    "longbench_hotpotqa": _hotpotqa,
}


def _items(assets: Path) -> list[Doc]:
    return read_json(assets / "qa" / "hotpotqa.json")


def _for_musique(item: Doc) -> bool:
    """Whether an item is one of MuSiQue's; decided by the item alone, so that the two tasks share none."""
    return hashlib.sha256(item["_id"].encode()).digest()[0] % 2 == 1


def _scorable(item: Doc) -> bool:
    """Whether the harness's F1 finds a word in the answer; it drops articles and punctuation ("The The", "!!!")."""
    from lm_eval.tasks.longbench.metrics import normalize_answer

    return bool(normalize_answer(item["answer"]))


def _passages(item: Doc) -> list[Passage]:
    return [Passage(html.unescape(title), sentences) for title, sentences in item["context"]]


def _supporting_passages(item: Doc) -> list[Passage]:
    titles = {html.unescape(title) for title, _ in item["supporting_facts"]}
    return [passage for passage in _passages(item) if passage.title in titles]


def _all_passages(items: list[Doc]) -> list[Passage]:
    """Returns one passage per title; a few titles come with two versions of their text."""
    return list({passage.title: passage for item in items for passage in _passages(item)}.values())


def _fillers(pool: list[Passage], own: list[Passage], length: int, rng: Random) -> list[Passage]:
    """Returns passages to fill an example up with, in random order and without its own."""
    titles = {passage.title for passage in own}
    drawn = rng.sample(pool, min(len(pool), length // FILLER_TOKENS))
    return [passage for passage in drawn if passage.title not in titles]
