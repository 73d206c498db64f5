from __future__ import annotations

import copy
import json
import random
import shutil
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tests.refusals import refused

from residual_mass.benchmarks import prompts, ruler
from residual_mass.benchmarks.catalogue import DoesNotFitError, harness_config, harness_requests, seeded
from residual_mass.files import sha256_of
from residual_mass.spec.specs import PromptsSpec
from residual_mass.spec.tasks import BENCHMARKS, task_named, tasks_of
from residual_mass.texts import frozen_prompts

pytestmark = pytest.mark.usefixtures("few_words")

TASKS = tasks_of("ruler", 2048)
EVERY_TASK = [(benchmark, task.name) for benchmark, tasks in BENCHMARKS.items() for task in tasks]


def test_tasks_are_those_of_the_harness_in_its_order() -> None:
    import lm_eval

    group = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / "ruler" / "ruler.yaml").read_text())
    assert list(tasks_of("ruler", 4096)) == group["task"]


@pytest.mark.parametrize(("benchmark", "name"), EVERY_TASK)
def test_scorer_and_metric_are_the_harness_s(benchmark: str, name: str) -> None:
    config, task = harness_config(benchmark, name), task_named(benchmark, name)
    # With "_with_score" it files the same and a twin under "score".
    files_score_as = config["process_results"].__name__.replace("_with_score", "_score")
    assert files_score_as == task.process_results
    assert config["generation_kwargs"]["max_gen_toks"] == task.max_new_tokens
    key = "4096" if benchmark == "ruler" else task.metric.name
    (entry,) = [entry for entry in config["metric_list"] if entry["metric"] == key]
    assert entry["higher_is_better"] == task.metric.higher_is_better


def test_unknown_benchmarks_and_tasks_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("'rulr' is unknown; known are babilong, longbench, ruler"):
        tasks_of("rulr", 4096)
    monkeypatch.setitem(BENCHMARKS, "babilong", BENCHMARKS["babilong"] + BENCHMARKS["babilong"][:1])
    with refused("BENCHMARKS['babilong'] has two tasks of one name among babilong_qa1, ", "; rename one"):
        tasks_of("babilong", 4096)


@pytest.fixture
def harness_downloads(benchmark_assets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Serves the small data where the unmodified harness would fetch its own."""
    import datasets
    import requests
    from lm_eval.tasks.ruler import prepare_niah

    essays = json.loads((benchmark_assets / "haystack" / "PaulGrahamEssays.json").read_text())["text"]

    def get(url: str, **_: Any) -> Any:
        file = benchmark_assets / "qa" / ("squad.json" if "SQuAD" in url else "hotpotqa.json")
        return types.SimpleNamespace(raise_for_status=lambda: None, json=lambda: json.loads(file.read_text()))

    datasets.Dataset.from_list([{"text": essays}]).save_to_disk(str(tmp_path / "cache" / "commit"))
    rows = datasets.load_from_disk(str(tmp_path / "cache" / "commit"))
    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    questions = harness_config("ruler", "ruler_qa_squad")["custom_dataset"].__globals__
    for fetched in (prepare_niah.get_haystack, *map(questions.get, ("download_json", "read_squad", "read_hotpotqa"))):
        fetched.cache_clear()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.usefixtures("harness_downloads")
def test_prompts_are_the_strings_the_harness_sends(
    task: str, benchmark_assets: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = harness_config("ruler", task)
    scope = config["custom_dataset"].__globals__
    for name in {*ruler.SAMPLERS.values()} & scope.keys():  # of the 500 asked for, small sets have ten questions
        monkeypatch.setitem(scope, name, _with_samples(scope[name], 10))
    if "RNG" in scope:
        monkeypatch.setitem(scope, "RNG", copy.copy(scope["RNG"]))
    docs = ruler.build_examples(task, tokenizer, 2048, 3, 5, ruler.assets_data(benchmark_assets))
    model = str(benchmark_assets / "models" / "tiny-llama")
    assert harness_requests("ruler", task, docs) == _harness_requests(task, model, 2048, 3, seeded(5, task, 2048))


def _with_samples(sampler: Callable[..., Any], most: int) -> Callable[..., Any]:
    return lambda *args, **kwargs: sampler(*args, **kwargs | {"num_samples": min(most, kwargs.get("num_samples", 500))})


def _harness_requests(task: str, tokenizer: str, length: int, count: int, seed: int) -> list[Any]:
    """What the harness itself sends when its two global generators start from `seed`."""
    from lm_eval.api.task import ConfigurableTask

    random.seed(seed)
    np.random.seed(seed)
    metadata = {"tokenizer": tokenizer, "max_seq_lengths": [length]}
    built = ConfigurableTask(config={**harness_config("ruler", task), "metadata": metadata})
    built.build_all_requests(limit=count)
    return [instance.args for instance in built.instances]


@pytest.mark.parametrize("task", TASKS)
def test_more_examples_append(task: str, benchmark_assets: Path, tokenizer: Any) -> None:
    data = ruler.assets_data(benchmark_assets)
    two = ruler.build_examples(task, tokenizer, 2048, 2, 5, data)
    state = random.getstate()
    random.seed(99)  # what was drawn before does not matter
    assert ruler.build_examples(task, tokenizer, 2048, 3, 5, data)[:2] == two
    random.setstate(state)
    assert ruler.build_examples(task, tokenizer, 2048, 2, 6, data) != two or task.startswith("ruler_qa")


@pytest.mark.usefixtures("harness_downloads")
def test_harness_downloads_of_the_same_data_give_the_same_prompts(
    manifest: Path, prompts_spec: PromptsSpec, benchmark_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reader, (name, _) in ruler.QUESTIONS.items():
        monkeypatch.setitem(ruler.QUESTIONS, reader, (name, sha256_of(benchmark_assets / "qa" / name)))
    prompts.run(replace(prompts_spec, data_source="hub"), benchmark_assets, tmp_path / "manifest.json")
    assert (tmp_path / "manifest.json").read_bytes() == manifest.read_bytes()


def test_manifest_lists_tasks_in_order_and_what_is_left_out(manifest: Path) -> None:
    content = json.loads(manifest.read_text())
    assert tuple(content["tasks"]) == tasks_of("ruler", 1024)
    assert content["left_out"] == {"ruler_qa_hotpot": "needs at least 2048 tokens, the length is 1024"}
    assert (content["benchmark"], content["length"], content["tokenizer"]) == ("ruler", "1k", "tiny")
    assert set(content["harness"]) == {"lm_eval", "nltk", "wonderwords"}
    for index, prompt in enumerate(frozen_prompts.load_prompts(manifest, "ruler_vt", 2)):
        assert (prompt.task, prompt.index, prompt.stop, prompt.doc["max_length"]) == ("ruler_vt", index, [], 1024)
        assert set(prompt.doc) == {"index", "outputs", "length", "max_length", "gen_prefix"}


@pytest.mark.parametrize(
    ("task", "length"), [("ruler_vt", 512), ("ruler_cwe", 512), ("niah_multikey_3", 512), ("ruler_qa_squad", 300)]
)
def test_task_that_cannot_fit_is_told_not_looped_on(task: str, length: int, benchmark_assets: Path) -> None:
    def letters(text: str) -> Any:
        return types.SimpleNamespace(input_ids=list(text.encode()))

    with pytest.raises(DoesNotFitError, match="with this tokenizer"):
        ruler.build_examples(task, letters, length, 1, 0, ruler.assets_data(benchmark_assets))


def test_left_out_task_is_seen_in_manifest_log_and_use(
    benchmark_assets: Path, prompts_spec: PromptsSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "manifest.json"
    prompts.run(replace(prompts_spec, examples=11), benchmark_assets, out)  # the small QA sets have ten questions
    assert "fewer than 11 of its examples fit" in json.loads(out.read_text())["left_out"]["ruler_qa_squad"]
    assert "ruler_qa_squad at 1k is left out" in caplog.text
    with refused("holds no prompts of ruler_qa_squad (fewer than 11 of its"):
        frozen_prompts.load_prompts(out, "ruler_qa_squad", 1)


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes().replace(b". ", b", ", 1))]
)
def test_damaged_task_file_is_named(manifest: Path, damage: Callable[[Path], None], tmp_path: Path) -> None:
    own = shutil.copytree(manifest.parent, tmp_path / "prompts") / manifest.name
    damage(own.with_name("ruler_vt.jsonl"))
    with refused("ruler_vt.jsonl"):
        frozen_prompts.load_prompts(own, "ruler_vt", 1)
    assert frozen_prompts.load_prompts(own, "ruler_cwe", 1)
