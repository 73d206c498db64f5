"""RULER examples: the harness's own generators, templates and requests, with our seed, count, tokenizer and data.

A generator is the function that a task's YAML names as `custom_dataset`. It makes 500 samples of data that it fetches
itself, so during a call a few names in its module are replaced.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from residual_mass.benchmarks.catalogue import Doc, DoesNotFitError, harness_config, seeded, sentence_tables
from residual_mass.files import read_json, sha256_of
from residual_mass.texts.hub import hub_rows
from residual_mass.texts.names import ESSAYS

Scope = dict[str, Any]
Replacements = Callable[[Scope], Scope]
"""Given the names of a generator's module, those to replace so that it reads other data."""

SAMPLERS = {
    "niah_utils": "generate_samples",
    "vt_utils": "sys_vartrack_w_noise_random",
    "cwe_utils": "sys_word_pair_random",
    "fwe_utils": "sys_kwext",
    "qa_utils": "generate_samples",
}
"""The function that draws the samples, by module."""
QUESTIONS = {
    "squad.json": "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    "hotpotqa.json": "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
}
"""The QA sets and the sha256 of the harness's downloads: development sets of SQuAD 2.0 and HotpotQA."""
HARNESS_SAMPLES = 500
MARGIN = 32
"""Tokens by which two draws of the same size may differ."""


def build_examples(task: str, tokenizer: Any, length: int, count: int, seed: int, data: Replacements) -> list[Doc]:
    """Returns the first `count` examples of a task, from `assets_data` or `harness_data`.

    The generators leave out samples that do not fit, so more are drawn until there are enough. Samples are drawn in
    sequence from one generator of random numbers, so examples do not depend on `count`.

    Raises:
        DoesNotFitError: too few samples fit the length.
    """
    generator = harness_config("ruler", task)["custom_dataset"]
    samples = count
    while samples <= 4 * count + 64:
        docs = _draw(generator, tokenizer, length, samples, seeded(seed, task, length), data)
        if len(docs) >= count:
            return docs[:count]
        samples *= 2
    raise DoesNotFitError(f"fewer than {count} of its examples fit {length} tokens with this tokenizer")


def harness_data(assets: Path) -> Replacements:
    """Returns the harness's downloads: its essays on the hub and both QA sets, of which the assets hold exact copies.

    Raises:
        ValueError: offline, and the QA sets of the assets are others.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    _use_sentence_tables(assets)
    copies = {name: assets / "qa" / name for name in QUESTIONS}
    same = {name: path for name, path in copies.items() if path.is_file() and sha256_of(path) == QUESTIONS[name]}
    if HF_HUB_OFFLINE and (other := sorted(set(copies) - set(same))):
        raise ValueError(f"{copies[other[0]]}: not the file that the harness downloads (sha256); run the assets stage")
    return _replacements(same, lambda: " ".join(hub_rows(ESSAYS)["text"]))


def assets_data(assets: Path) -> Replacements:
    """Haystack, QA sets and sentence tables of the assets folder."""
    _use_sentence_tables(assets)
    essays = assets / "haystack" / "PaulGrahamEssays.json"
    return _replacements({name: assets / "qa" / name for name in QUESTIONS}, lambda: read_json(essays)["text"])


def _use_sentence_tables(assets: Path) -> None:
    """Uses the tables of the assets; otherwise the harness downloads them when it is imported."""
    tables = str(sentence_tables(assets / "nltk_data"))
    os.environ["NLTK_DATA"] = tables  # read when the generators import nltk
    import nltk

    if tables not in nltk.data.path:
        nltk.data.path.insert(0, tables)


def _replacements(questions: dict[str, Path], essays: Callable[[], str]) -> Replacements:
    """Returns the names to replace so that a generator reads these QA sets (by the names in QUESTIONS) and essays."""

    def words() -> list[str]:
        return re.sub(r"\s+", " ", essays()).split(" ")

    def replacements(scope: Scope) -> Scope:
        ours: Scope = {}
        for reader, name in (("read_squad", "squad.json"), ("read_hotpotqa", "hotpotqa.json")):
            if reader in scope and name in questions:
                uncached = scope[reader].__wrapped__
                ours["download_json"] = lambda place, fetch=scope["download_json"]: (
                    fetch(place) if place.startswith(("http://", "https://")) else read_json(Path(place))
                )
                ours[reader] = lambda read=uncached, path=questions[name]: read(str(path))
        if "get_haystack" in scope:
            harness_haystack = scope["get_haystack"]
            ours["get_haystack"] = lambda type_haystack: (
                words() if type_haystack == "essay" else harness_haystack(type_haystack)
            )
        return ours

    return replacements


def _draw(generator: Any, tokenizer: Any, length: int, samples: int, seed: int, data: Replacements) -> list[Doc]:
    scope: Scope = generator.__globals__
    sampler = SAMPLERS[generator.__module__.rpartition(".")[2]]
    harness_sampler = scope[sampler]

    def count_replaced(*args: Any, **kwargs: Any) -> list[Doc]:
        if kwargs.get("num_samples", HARNESS_SAMPLES) == HARNESS_SAMPLES:  # not vt's single in-context example
            kwargs["num_samples"] = samples
        try:
            return harness_sampler(*args, **kwargs)
        except (ValueError, IndexError):  # not one sample fits, or the questions ran out
            return []

    with _drawing(scope, {}, seed):
        _refuse_endless(scope, tokenizer, length)
    replaced = {**data(scope), sampler: count_replaced, "get_tokenizer": lambda *_, **__: tokenizer}
    with _drawing(scope, replaced, seed), contextlib.redirect_stdout(None):
        return generator(max_seq_lengths=[length])["test"].to_list()


def _refuse_endless(scope: Scope, tokenizer: Any, length: int) -> None:
    """Raises DoesNotFitError for the two generators that never return if even their smallest example is too long."""

    def size(*texts: str) -> int:
        return sum(len(tokenizer(text).input_ids) for text in texts)

    make = scope.get("generate_input_output")
    if "sys_vartrack_w_noise_random" in scope:
        needed, in_context = 500 + 30 + size(make(10, 1, 4)[0]), 30 + size(make(5, 1, 4, is_icl=True)[0])
        fits = needed + MARGIN <= length and in_context + MARGIN <= 500
    elif "sys_word_pair_random" in scope:
        example, text, answer = make(10, length)
        needed = 120 + size(example, text, " ".join(answer))
        fits = needed + MARGIN <= length
    else:
        return
    if not fits:
        raise DoesNotFitError(f"its smallest example takes about {needed} of {length} tokens with this tokenizer")


@contextlib.contextmanager
def _drawing(scope: Scope, replaced: Scope, seed: int) -> Iterator[None]:
    """Replaces names of a generator's module and seeds its random numbers; restores everything afterwards."""
    import numpy as np

    states = random.getstate(), np.random.get_state()
    before = dict(scope)
    scope.update({name: value for name, value in replaced.items() if name in scope})
    if "RNG" in scope:
        scope["RNG"] = copy.copy(scope["RNG"])  # keeps the state of the module's own
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        scope.update(before)
        random.setstate(states[0])
        np.random.set_state(states[1])
