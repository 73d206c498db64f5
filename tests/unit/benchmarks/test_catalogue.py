from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from residual_mass.benchmarks.catalogue import BENCHMARKS, harness_config, task_named, tasks_of, too_long

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


def test_every_task_is_either_built_or_left_out() -> None:
    for length in (1024, 2047, 2048, 65536):
        listed, out = tasks_of("ruler", length), too_long("ruler", length)
        assert set(listed) | set(out) == {task.name for task in BENCHMARKS["ruler"]}
        assert not set(listed) & set(out)
    assert too_long("ruler", 1024) == {"ruler_qa_hotpot": "needs at least 2048 tokens, the length is 1024"}
    assert too_long("ruler", 2048) == {}


def test_unknown_benchmark_is_refused() -> None:
    with pytest.raises(ValueError, match="'rulr' is unknown; known are babilong, longbench, ruler"):
        tasks_of("rulr", 4096)
