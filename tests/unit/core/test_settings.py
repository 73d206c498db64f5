"""Specs as JSON."""

from __future__ import annotations

import dataclasses
import json

from tests.conftest import TINY

from residual_mass.core.settings import to_json
from residual_mass.study.specs import BackboneSpec, parse_spec


def test_a_key_that_came_later_is_written_only_where_it_says_something() -> None:
    on_a_gpu = dataclasses.replace(TINY, requires_gpu=True)
    assert "requires_gpu" not in json.loads(to_json(TINY)) and json.loads(to_json(on_a_gpu))["requires_gpu"] is True
    assert [parse_spec(BackboneSpec, to_json(spec)) for spec in (TINY, on_a_gpu)] == [TINY, on_a_gpu]
