from __future__ import annotations

import csv
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from tests.records import record
from tests.unit.test_statistics import signs_p

from residual_mass.benchmarks import fidelity
from residual_mass.benchmarks.force import token_measures
from residual_mass.files import write_parquet
from residual_mass.metrics import QUANTILES
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.columns import FIDELITY_COLUMNS, FORCED_COLUMNS
from residual_mass.spec.specs import BackboneSpec, FidelitySpec
from residual_mass.statistics import resampled

Row = dict[str, Any]
Line = dict[str, str]
BACKBONE = BackboneSpec("test", "tests/Tiny-Llama", "r1", "random", "float32", "tiny", 4096, False, name="tiny")
SPEC = FidelitySpec(study="test", backbone=BACKBONE, length="1k", bootstrap_resamples=300, seed=4, recipe=1)
FULL, TOPK, PHI, NOSUB = (
    ArmSpec("full"), ArmSpec("topk", 3.0), ArmSpec("topk_phi", 3.0, "1k"), ArmSpec("topk_phi_nosub", 3.0, "1k")
)  # fmt: skip
ARMS = (FULL, TOPK, ArmSpec("topk", 7.5), PHI, NOSUB, ArmSpec("topk_phi", 7.5, "1k"))


def rows_of(
    arm: ArmSpec,
    index: int,
    measures: dict[str, Sequence[Any]],
    place: tuple[str, str, str, str] = ("wiki", "", "following", "own"),
    k: int = 11,
) -> list[Row]:
    """The rows of one document under one arm; place: text, task, continuation and state."""
    text, task, continuation, state = place
    about = {
        "text": text, "task": task, "index": index, "continuation": continuation, "state": state, "method": arm.method,
        "budget_percent": arm.budget_percent, "maps": arm.maps or "", "k": k,
        "phi_sha": "f00" if arm.needs_maps else "",
    }  # fmt: skip
    tokens = zip(*measures.values(), strict=True)
    return [
        {**about, "position": position, "token": 5, **dict(zip(measures, token, strict=True))}
        for position, token in enumerate(tokens)
    ]


def result_of(rows: Sequence[Row], folder: Path) -> list[Line]:
    """What the stage makes of them."""
    write_parquet(forced := folder / "forced.parquet", pd.DataFrame(rows, columns=list(FORCED_COLUMNS)))
    record(forced)
    fidelity.run(SPEC, forced, out := folder / "fidelity.csv")
    return list(csv.DictReader(out.read_text().splitlines()))


def line_of(lines: Sequence[Line], **where: str) -> Line:
    (found,) = (line for line in lines if where.items() <= line.items())
    return found


# ---- definitions -----------------------------------------------------------------------------------------------------

PROBABILITIES = [  # of three words under full attention, under the arm, and which word follows
    ((1 / 2, 1 / 4, 1 / 4), (1 / 4, 1 / 2, 1 / 4), 0),
    ((1 / 2, 1 / 4, 1 / 4), (1 / 2, 1 / 4, 1 / 4), 1),
    ((1 / 4, 1 / 2, 1 / 4), (1 / 8, 3 / 4, 1 / 8), 1),
    ((1 / 4, 1 / 4, 1 / 2), (3 / 4, 1 / 8, 1 / 8), 2),
]


def test_measures_of_a_token_are_those_of_llama_cpp() -> None:
    """As `llama-perplexity --kl-divergence` defines them. It also skips words that the base model gives less than
    exp(-16), prints all but the KL in percent, and takes all tokens for independent.
    """
    full, arm = (torch.tensor([row[i] for row in PROBABILITIES]).double().log() for i in (0, 1))
    found = token_measures(full, arm, torch.tensor([word for _, _, word in PROBABILITIES]))
    kls = [log(2) / 4, 0.0, 0.5 * log(2) + 0.5 * log(2 / 3), 0.25 * log(1 / 3) + 0.25 * log(2) + 0.5 * log(4)]
    assert found["kl"] == pytest.approx(kls, abs=1e-9)
    assert found["nll"] == pytest.approx([2 * log(2), 2 * log(2), log(4 / 3), 3 * log(2)], abs=1e-9)
    assert found["full_nll"] == pytest.approx([log(2), 2 * log(2), log(2), log(2)], abs=1e-9)
    assert found["same_top"] == [False, True, True, False] and found["first"] == [False, False, True, False]


# ---- means, and gains, against a slow reference ----------------------------------------------------------------

MEASURES = ("nll", "full_nll", "kl", "same_top", "first")
PLACES = {
    ("wiki", "", "following", "own"): (4, 4, 4), ("wiki", "", "following", "dense"): (4, 4, 4),
    ("ruler", "vt", "gold", "own"): (2, 5, 3), ("ruler", "cwe", "gold", "own"): (4, 1),
    ("ruler", "vt", "greedy", "own"): (3, 1, 6), ("ruler", "cwe", "greedy", "own"): (7, 2),
}  # fmt: skip
"""Tokens of each document."""


def random_rows(arms: Sequence[ArmSpec] = ARMS) -> Iterator[Row]:
    """An arm's numbers do not depend on the others; Full is at no distance from itself."""
    for place, lengths in PLACES.items():
        for index, length in enumerate(lengths):
            base = np.random.default_rng([index, length]).random(length)
            for arm in (arm for arm in arms if arm != FULL or place[3] == "own"):
                rng = np.random.default_rng([*f"{place}{index}{arm}".encode()])
                same = rng.random(length) < 0.6
                nll = base if arm == FULL else base + rng.normal(0, 0.3, length).clip(-0.2)
                kl = 0 * base if arm == FULL else 0.01 + rng.exponential(0.1, length).round(2)  # with ties
                values = nll, base, kl, same | (arm == FULL), rng.random(length) < 0.5
                measures = dict(zip(MEASURES, values, strict=True))
                yield from rows_of(arm, index, measures, place, k=40 + index if arm == FULL else 7)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    return result_of(list(random_rows()), tmp_path_factory.mktemp("fidelity"))


def kept(tokens: pd.DataFrame) -> float:
    return sum(1 for _ in itertools.takewhile(bool, tokens.same_top)) / len(tokens)


OF_DOCUMENT: dict[str, Callable[[pd.DataFrame], float]] = {
    "kl": lambda tokens: tokens.kl.mean(),
    "same_top": lambda tokens: tokens.same_top.mean(),
    "log_ppl_ratio": lambda tokens: (tokens.nll - tokens.full_nll).mean(),
    "nll": lambda tokens: tokens.nll.mean(),
    "first": lambda tokens: tokens["first"].mean(),
    "kept": kept,
}


PLACE = ["text", "continuation", "state", "method", "budget_percent", "maps"]


@cache
def by_arm() -> dict[tuple[Any, ...], dict[str, list[pd.DataFrame]]]:
    """Tokens of the random rows by place and arm, then by task and document."""
    arms = pd.DataFrame(random_rows()).fillna({"budget_percent": 0}).groupby(PLACE, sort=False)
    return {
        place: {
            task: [tokens for _, tokens in some.groupby("index")] for task, some in of_arm.groupby("task", sort=False)
        }
        for place, of_arm in arms
    }


def documents_of(line: Line, arm: ArmSpec) -> dict[str, list[pd.DataFrame]]:
    """The tokens that a line of the result is of, or those of another arm there: by task and document."""
    place = (line["text"], line["continuation"], line["state"], arm.method, arm.budget_percent or 0, arm.maps or "")
    return {task: some for task, some in by_arm()[place].items() if line["task"] in (task, "all")}


def arm_of(line: Line) -> ArmSpec:
    budget = line["budget_percent"]
    return ArmSpec(line["method"], float(budget) if budget else None, line["maps"] or None)


def draws_of(line: Line, task: str, values: Sequence[Any]) -> list[list[Any]]:
    """Resamples of a task's documents, written out."""
    name = f"{line['text']} {line['continuation']} {task}"
    counts = np.concatenate(list(resampled(len(values), SPEC.bootstrap_resamples, SPEC.seed, name))).astype(int)
    return [[value for value, n in zip(values, times, strict=True) for _ in range(n)] for times in counts]


def close(found: str, expected: float) -> bool:
    """Up to the six digits that are written."""
    return float(found) == pytest.approx(expected, rel=6e-6, abs=1e-9)


def check_mean(found: Sequence[str], line: Line, by_task: dict[str, list[float]]) -> None:
    """Found: a mean over documents and then tasks, and both ends of its interval."""
    draws = np.mean([[np.mean(d) for d in draws_of(line, task, by_task[task])] for task in by_task], axis=0)
    expected = [np.mean([np.mean(values) for values in by_task.values()]), *np.quantile(draws, [0.025, 0.975])]
    assert all(map(close, found, expected)), (found, expected, line)


def ends_of_kl(tasks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Student's t on the logarithm of the mean, by its definition."""
    total, variance, freedom = 0.0, 0.0, 0
    for values in tasks:
        n, mean, spread = len(values), np.mean(values), np.std(np.log(values), ddof=1)
        of_sample = np.std(values, ddof=1) / sqrt(n) / mean
        of_logarithms = sqrt(spread**2 / n + spread**4 / (2 * (n - 1)))
        total += mean
        variance += (mean * max(of_sample, min(of_logarithms, 1))) ** 2
        freedom += n - 1
    half = scipy.stats.t.ppf(0.975, freedom) * sqrt(variance) / total
    return total / len(tasks) * np.exp(-half), total / len(tasks) * np.exp(half)


def means(documents: dict[str, list[pd.DataFrame]], metric: str) -> dict[str, list[float]]:
    return {task: [OF_DOCUMENT[metric](tokens) for tokens in some] for task, some in documents.items()}


def minus(line: Line, arm: ArmSpec, other: ArmSpec) -> dict[str, list[float]]:
    """Paired differences of two arms, by task and document."""
    first, second = (means(documents_of(line, each), line["metric"]) for each in (arm, other))
    return {task: [a - b for a, b in zip(first[task], second[task], strict=True)] for task in first}


def test_there_is_a_line_for_each_task_arm_and_metric(result: list[Line]) -> None:
    lines = result
    assert ",".join(lines[0]) == ",".join(FIDELITY_COLUMNS)
    assert list(dict.fromkeys((x["text"], x["continuation"], x["state"], x["task"]) for x in lines)) == [
        ("wiki", "following", "own", "all"), ("wiki", "following", "dense", "all"),
        *(("ruler", c, "own", task) for c in ("gold", "greedy") for task in ("vt", "cwe", "all")),
    ]  # fmt: skip
    places = itertools.groupby(lines, lambda x: [x["text"], x["continuation"], x["state"], x["task"], arm_of(x)])
    over_tokens = {f"{name}_{end}" for name, ends in QUANTILES.items() for end in ends} | {"delta_p_rms"}
    for (_, continuation, _, task, arm), some in places:
        metrics = [line["metric"] for line in some]
        expected = set(OF_DOCUMENT) - (set() if continuation == "greedy" else {"kept"})
        if arm == FULL:  # whose distance from itself says nothing
            expected = {"nll", "first"}
        elif task == "all":
            expected |= over_tokens
        assert len(metrics) == len(set(metrics)) and set(metrics) == expected
    assert {arm_of(x) for x in lines if x["state"] == "own"} == set(ARMS)
    assert {arm_of(x) for x in lines if x["state"] == "dense"} == set(ARMS) - {FULL}


def test_means_over_documents_and_tasks(result: list[Line]) -> None:
    for line in (line for line in result if line["metric"] in OF_DOCUMENT):
        by_task = means(documents_of(line, arm_of(line)), line["metric"])
        if line["metric"] == "kl":
            expected = [np.mean([np.mean(values) for values in by_task.values()]), *ends_of_kl(list(by_task.values()))]
            assert all(map(close, [line[name] for name in ("value", "ci_low", "ci_high")], expected)), (line, expected)
        else:
            check_mean([line[name] for name in ("value", "ci_low", "ci_high")], line, by_task)
        errors = [np.std(values, ddof=1) / sqrt(len(values)) for values in by_task.values()]
        assert close(line["stderr"], sqrt(sum(e**2 for e in errors)) / len(errors))


def test_quantiles_and_rms_over_tokens(result: list[Line]) -> None:
    lines = [line for line in result if line["metric"] not in OF_DOCUMENT and arm_of(line) == PHI]
    for line in lines:
        measure = "delta_p" if line["metric"].startswith("delta_p") else "kl"
        end = line["metric"].removeprefix(f"{measure}_")
        tasks = {
            task: [(np.exp(-x.nll) - np.exp(-x.full_nll) if measure == "delta_p" else x.kl).to_numpy() for x in some]
            for task, some in documents_of(line, PHI).items()
        }
        draws = zip(*(draws_of(line, task, documents) for task, documents in tasks.items()), strict=True)
        samples = [tuple(tasks.values()), *draws]
        if end == "rms":
            found = [sqrt(np.mean([np.mean([(x**2).mean() for x in some]) for some in each])) for each in samples]
        else:
            pooled = ([value for some in each for x in some for value in x] for each in samples)
            found = [np.quantile(values, QUANTILES[measure][end]) for values in pooled]
        expected = [found[0], *np.quantile(found[1:], [0.025, 0.975])]
        assert all(map(close, [line[name] for name in ("value", "ci_low", "ci_high")], expected)), line
        assert line["stderr"] == line["gain"] == line["gain_p"] == ""
    assert len(lines) == 4 * 12


def test_gains_are_over_topk_at_the_same_budget(result: list[Line]) -> None:
    gained = [line for line in result if line["gain"]]
    assert {arm_of(line) for line in gained} == {arm for arm in ARMS if arm.needs_maps}
    for line in gained:
        differences = minus(line, arm_of(line), ArmSpec("topk", float(line["budget_percent"])))
        check_mean([line[name] for name in ("gain", "gain_ci_low", "gain_ci_high")], line, differences)
        assert close(line["gain_p"], signs_p(list(differences.values())))


def test_what_lines_say_of_their_documents_and_arms(result: list[Line]) -> None:
    def said(**where: str) -> list[str]:
        line = line_of(result, text="ruler", continuation="gold", metric="nll", **where)
        return [line[name] for name in ("documents", "tokens", "k_mean", "budget_percent", "maps", "phi_sha")]

    assert said(task="vt", method="full") == ["3", "10", "41", "", "", ""]  # 40, 41 and 42
    assert said(task="all", method="full") == ["5", "15", "40.75", "", "", ""]  # of means by task
    assert said(task="cwe", method="topk_phi", budget_percent="7.5") == ["2", "5", "7", "7.5", "1k", "f00"]
    about = ("backbone", "length", "study", "model_id", "revision", "weights")
    everywhere = {tuple(line[name] for name in about) for line in result}
    assert everywhere == {("tiny", "1k", "test", BACKBONE.model_id, "r1", "random")}


def test_one_document_has_a_value_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And so have several tasks as soon as one of them has one document."""
    rows = [row for row in random_rows((TOPK, PHI)) if row["index"] == 0 or row["task"] == "vt"]
    with caplog.at_level(logging.WARNING):
        lines = result_of(rows, tmp_path)
    assert [r.getMessage() for r in caplog.records] == [
        f"{name}: one document only, so no interval and no test"
        for name in ("wiki, following", "wiki, following", "ruler, gold", "ruler, greedy")
    ]
    empty = ("stderr", "ci_low", "ci_high", "gain_ci_low", "gain_ci_high", "gain_p")
    for line in lines:
        assert line["value"] and (line["gain"] or line["method"] == "topk" or line["metric"] not in OF_DOCUMENT)
        alone = line["task"] != "vt"
        assert not alone or not any(line[name] for name in empty), line
        assert alone or all(line[name] for name in empty[:3])
