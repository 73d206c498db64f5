"""Any value of `--spec` is either parsed without loss or refused in one line."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snakemake.iocontainers import Wildcards
from tests.workflow.runs import ROOT, SPECS, plan_of

from residual_mass.spec import specs
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.sections import ObjectiveSpec, ReplaySpec
from residual_mass.spec.settings import to_json
from residual_mass.spec.specs import parse_spec

STABLE = settings(
    derandomize=True, database=None, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**320, 10**330) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PLACE = {
    "study": "mini", "backbone": "smol", "benchmark": "ruler", "length": "1k", "maps": "1k", "corpus": "wiki",
    "group": "main", "tasks": "all", "tokenizer": "smollm2", "label": "ruler_sweep",
}  # fmt: skip


@cache
def told() -> list[tuple[type[Any], str]]:
    """What a study of this checkout tells its jobs, with the class of each spec."""
    plan, stages = plan_of(ROOT), SPECS.keys() - {"figure"}
    return [(SPECS[stage], plan.spec(stage)(Wildcards(fromdict=PLACE))) for stage in sorted(stages)]


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything within a JSON value."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(deeper for key, value in inside for deeper in places(value, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, data: Any, values: st.SearchStrategy[Any] = JSON) -> Any:
    """A JSON value with one thing in it taken out, renamed or replaced."""
    data = copy.deepcopy(data)
    *to, last = draw(st.sampled_from([path for path in places(data) if path]))
    holder = data
    for key in to:
        holder = holder[key]
    value = holder.pop(last)
    new = draw(values | st.just(value))
    if isinstance(holder, list):
        return holder.insert(last, new) or data
    kind = draw(st.sampled_from(["taken out", "renamed", "replaced"]))
    if kind != "taken out":
        holder[draw(st.text(max_size=8)) if kind == "renamed" else last] = new
    return data


def check(cls: type[Any], text: str) -> None:
    try:
        spec = parse_spec(cls, text)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 1200, str(error)
        return
    assert parse_spec(cls, to_json(spec)) == spec


@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_changed_spec_is_refused_in_one_line_or_read_as_it_stands(examples: int) -> None:
    @settings(STABLE, max_examples=examples)
    @given(st.data())
    def check_all(data: st.DataObject) -> None:
        cls, text = data.draw(st.sampled_from(told()))
        assert to_json(parse_spec(cls, text)) == text
        check(cls, json.dumps(data.draw(changed(json.loads(text)))))
        at = data.draw(st.integers(0, len(text) - 1))
        check(cls, text[:at])
        check(cls, text[:at] + data.draw(st.characters()) + text[at + 1 :])
        check(cls, json.dumps(data.draw(JSON)))

    check_all()


ARM = '{"method": "topk", "budget_percent": %s}'
REFUSED: list[tuple[type[Any], str, list[str], str]] = [
    (specs.NumbersSpec, "%s", ["[" * 100_000, '{"study": "a\\ud800"}'], "spec: Invalid JSON: "),
    (specs.NumbersSpec, "%s", ['{"a\\nb": 1}'], "spec.a b: unknown key"),
    (specs.NumbersSpec, "%s", ['{"study": "a", "study": "b"}'], "spec.not a value of JSON (key study comes twice)"),
    (specs.NumbersSpec, "%s", ['{"study": [1, 1]}'], "spec.study: Input should be a valid string, not [1, 1]"),
    (ReplaySpec, '{"pool": %s}', ["true", "2.0", '"2"', "null"], "spec.pool: Input should be a valid"),
    (ObjectiveSpec, '{"tau": %s}', ["true", '"2"'], "spec.tau: Input should be a valid number"),
    (ArmSpec, ARM, ["1e999", "NaN"], "spec.budget_percent: Input should be a "),
]
"""A class, a text with a place for each of some values, and how the message begins."""


CASES = [(cls, text % value, says) for cls, text, values, says in REFUSED for value in values]


@pytest.mark.parametrize(("cls", "text", "says"), CASES)
def test_hostile_json_is_refused_in_one_line(cls: type[Any], text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_spec(cls, text)
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)
