"""Whatever `--spec` holds is either the spec that it says, or refused in one line."""

from __future__ import annotations

import copy
import dataclasses
import json
import types
import typing
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from residual_mass import specs
from residual_mass.core.estimators import estimator_named
from residual_mass.core.settings import ArmSpec, to_json
from residual_mass.study.config import METHODS
from residual_mass.study.specs import parse_spec

STABLE = settings(
    derandomize=True, database=None, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
QUICK, THOROUGH = settings(STABLE, max_examples=60), settings(STABLE, max_examples=2000)
CLASSES = [cls for name, cls in sorted(vars(specs).items()) if dataclasses.is_dataclass(cls) and name.endswith("Spec")]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**320, 10**330) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def arms(draw: st.DrawFn) -> ArmSpec:
    method = draw(st.sampled_from(METHODS))
    budget = None if method == "full" else draw(st.floats(0.01, 100))
    maps = draw(st.none() | st.text(max_size=5)) if estimator_named(method).adds_residual else None
    return ArmSpec(method, budget, maps)


def valid(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field with that type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is ArmSpec:
        return arms()
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: valid(of) for name, of in typing.get_type_hints(hint).items()})
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if of is type(None) else valid(of) for of in args))
    if origin is tuple:
        return st.lists(valid(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(valid(args[0]), valid(args[1]), max_size=3)
    plain = {int: st.integers(), float: st.floats(allow_nan=False, allow_infinity=False), bool: st.booleans()}
    return plain.get(hint, st.text(max_size=12))


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything within a JSON value."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(deeper for key, value in inside for deeper in places(value, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, data: Any) -> Any:
    """A JSON value with one thing in it taken out, renamed or replaced."""
    data = copy.deepcopy(data)
    *to, last = draw(st.sampled_from([path for path in places(data) if path]))
    holder = data
    for key in to:
        holder = holder[key]
    value = holder.pop(last)
    new = draw(JSON | st.just(value))
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


def check_all(data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from(CLASSES))
    spec = data.draw(valid(cls))
    text = to_json(spec)
    assert parse_spec(cls, text) == spec
    mutant = json.dumps(data.draw(changed(json.loads(text))))
    check(cls, mutant)
    at = data.draw(st.integers(0, len(text) - 1))
    check(cls, text[:at])
    check(cls, text[:at] + data.draw(st.characters()) + text[at + 1 :])
    check(cls, json.dumps(data.draw(JSON)))


@QUICK
@given(st.data())
def test_a_changed_spec_is_refused_in_one_line_or_read_as_it_stands(data: st.DataObject) -> None:
    check_all(data)


@pytest.mark.slow
@THOROUGH
@given(st.data())
def test_thousands_of_changed_specs(data: st.DataObject) -> None:
    check_all(data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"study": "a", "study": "b"}', "--spec is not JSON: the key 'study' stands 2 times in one"),
        ('{"study": NaN}', "--spec is not JSON: NaN is no number of it"),
        ("[" * 100_000, "--spec is nested too deeply"),
        ('{"study": "a\\ud800"}', r"spec.study: 'a\ud800' holds half of a surrogate pair, which no file can"),
        ('{"a\\nb": 1}', r"spec.'a\nb': unknown key; known keys are study"),
        (f'{{"study": [{"1," * 99}1]}}', f"spec.study: [{'1, ' * 25}1... is not of type str"),
        ("1" * 5000, "--spec is not JSON: Exceeds the limit"),
    ],
)
def test_hostile_json_is_told(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_spec(specs.NumbersSpec, text)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("value", ["true", "false", "2.0", '"2"', "null", "[2]"])
def test_what_is_no_integer_is_not_taken_for_one(value: str) -> None:
    with pytest.raises(ValueError, match=r"^spec\.pool: .* is not of type int$"):
        parse_spec(specs.ReplaySpec, f'{{"pool": {value}}}')


@pytest.mark.parametrize("value", ["true", "false", '"2"', "[2]"])
def test_what_is_no_number_is_not_taken_for_one(value: str) -> None:
    with pytest.raises(ValueError, match=r"^spec\.tau: .* is not of type float$"):
        parse_spec(specs.ObjectiveSpec, f'{{"tau": {value}}}')


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
def test_a_number_beyond_floats_is_refused(number: str) -> None:
    arm = f'{{"method": "topk", "budget_percent": {number}}}'
    with pytest.raises(ValueError, match=r"^spec\.budget_percent: .* is not a finite number$"):
        parse_spec(ArmSpec, arm)
