"""Bold is decided on what is printed."""

from __future__ import annotations

from sample_results import place

from residual_mass.paper.table import Place, format_score
from residual_mass.paper.tables.score_table import best_of_columns


def of(method: str, budget: float | None = 1.0, backbone: str = "1b", length: str = "4k", **more: str) -> Place:
    return place("ruler", length, backbone, method, budget, **more)


def best(values: dict[Place, float]) -> set[Place]:
    return best_of_columns({each: format_score(value) for each, value in values.items()})


def test_values_that_print_alike_tie() -> None:
    values = {of("topk"): 0.5479, of("topk_phi"): 0.5480, of("topk_phi_nosub"): 0.5474}
    assert best(values) == {of("topk"), of("topk_phi")}


def test_what_rounds_to_zero_has_no_minus() -> None:
    assert [format_score(value) for value in (-0.0004, -0.0, 0.0004, -0.0006)] == ["0.000", "0.000", "0.000", "-0.001"]


def test_values_that_print_differently_do_not_tie() -> None:
    assert best({of("topk"): 0.5484, of("topk_phi"): 0.5486}) == {of("topk_phi")}


def test_full_is_never_best_and_never_beats() -> None:
    values = {of("full", None): 0.9, of("topk"): 0.2, of("topk_phi"): 0.3}
    assert best(values) == {of("topk_phi")}


def test_columns_compete_apart() -> None:
    others = [{"budget": 2.0}, {"backbone": "3b"}, {"length": "8k"}, {"task": "ruler_vt"}]
    values = {of("topk"): 0.9, of("topk_phi"): 0.8}
    values |= {of("topk", **other): 0.1 for other in others} | {of("topk_phi", **other): 0.2 for other in others}
    assert best(values) == {of("topk"), *(of("topk_phi", **other) for other in others)}


def test_feature_maps_compete_with_each_other_and_with_top_k() -> None:
    values = {of("topk"): 0.4, of("topk_phi", maps="4k"): 0.5, of("topk_phi", maps="4k-kl_only"): 0.3}
    assert best(values) == {of("topk_phi", maps="4k")}


def test_all_zero_is_a_tie() -> None:
    assert len(best({of("topk"): 0.0, of("topk_phi"): 0.0004})) == 2
