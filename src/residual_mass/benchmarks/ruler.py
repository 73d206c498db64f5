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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from residual_mass.benchmarks.catalogue import Doc, DoesNotFitError, harness_config, seeded, sentence_tables
from residual_mass.files import read_json, sha256_of
from residual_mass.spec.texts import ESSAYS
from residual_mass.texts.hub import hub_rows

Scope = dict[str, Any]

SAMPLERS = {
    "niah_utils": "generate_samples",
    "vt_utils": "sys_vartrack_w_noise_random",
    "cwe_utils": "sys_word_pair_random",
    "fwe_utils": "sys_kwext",
    "qa_utils": "generate_samples",
}
"""The function that draws the samples, by module."""
QUESTIONS = {
    "read_squad": ("squad.json", "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8"),
    "read_hotpotqa": ("hotpotqa.json", "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea"),
}
"""The QA sets by the function that reads them, development sets of SQuAD 2.0 and HotpotQA: their file in the assets,
and the sha256 of the harness's download.
"""
HARNESS_SAMPLES = 500
MARGIN = 32
"""Tokens by which two draws of the same size may differ."""


class Sources(NamedTuple):
    """The folder of the QA sets, and a function that returns the essays of the haystack."""

    questions: Path
    essays: Callable[[], str]


def build_examples(task: str, tokenizer: Any, length: int, count: int, seed: int, data: Sources) -> list[Doc]:
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


def harness_data(assets: Path) -> Sources:
    """Returns the harness's downloads: its essays on the hub, and both QA sets, of which the assets hold exact copies.

    Raises:
        ValueError: a QA set of the assets is not the file that the harness downloads.
    """
    _use_sentence_tables(assets)
    for name, sha256 in QUESTIONS.values():
        path = assets / "qa" / name
        if not path.is_file() or sha256_of(path) != sha256:
            raise ValueError(f"{path}: not the file that the harness downloads (sha256); run the assets stage")
    return Sources(assets / "qa", lambda: " ".join(hub_rows(ESSAYS)["text"]))


def assets_data(assets: Path) -> Sources:
    """Returns haystack and QA sets of the assets folder, and makes nltk use its sentence tables."""
    _use_sentence_tables(assets)
    return Sources(assets / "qa", lambda: read_json(assets / "haystack" / "PaulGrahamEssays.json")["text"])


def _use_sentence_tables(assets: Path) -> None:
    """Makes nltk use the tables of the assets; otherwise the harness downloads them when it is imported."""
    tables = str(sentence_tables(assets / "nltk_data"))
    os.environ["NLTK_DATA"] = tables  # read when the generators import nltk
    import nltk

    if tables not in nltk.data.path:
        nltk.data.path.insert(0, tables)


def _reading(data: Sources, scope: Scope) -> Scope:
    """Returns functions that read this data, by the names in a generator's module that they replace."""
    harness_haystack = scope.get("get_haystack")

    def haystack(type_haystack: str) -> Any:
        if type_haystack == "essay":
            return re.sub(r"\s+", " ", data.essays()).split(" ")
        return harness_haystack(type_haystack)

    readers = {}
    for reader, (name, _) in QUESTIONS.items():
        if reader in scope:
            read = scope[reader].__wrapped__  # without its cache
            readers[reader] = partial(read, str(data.questions / name))
    return {**readers, "download_json": lambda path: read_json(Path(path)), "get_haystack": haystack}


def _draw(generator: Any, tokenizer: Any, length: int, samples: int, seed: int, data: Sources) -> list[Doc]:
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
    replaced = {**_reading(data, scope), sampler: count_replaced, "get_tokenizer": lambda *_, **__: tokenizer}
    with _drawing(scope, replaced, seed), contextlib.redirect_stdout(None):
        return generator(max_seq_lengths=[length])["test"].to_list()


def _refuse_endless(scope: Scope, tokenizer: Any, length: int) -> None:
    """Raises DoesNotFitError for the two generators that never return if even their smallest example is too long."""

    def size(*texts: str) -> int:
        return sum(len(tokenizer(text).input_ids) for text in texts)

    make = scope.get("generate_input_output")
    if "sys_vartrack_w_noise_random" in scope:
        needed = 500 + 30 + size(make(10, 1, 4)[0])
        in_context = 30 + size(make(5, 1, 4, is_icl=True)[0])
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
