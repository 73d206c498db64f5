"""Wins are counted as a reader of the printed table counts them."""

from __future__ import annotations

from decimal import Decimal

from sample_results import place

from residual_mass.metrics import STRING_MATCH
from residual_mass.paper.table import Place
from residual_mass.paper.tables.tally import Tally, tally, tally_by_family


def pair(
    topk: str, topk_phi: str, budget: float = 1.0, benchmark: str = "ruler", task: str = "all"
) -> dict[Place, str]:
    texts = {"topk": topk, "topk_phi": topk_phi, "topk_phi_nosub": "1.000"}
    return {place(benchmark, "4k", "1b", method, budget, task): text for method, text in texts.items()}


def test_wins_ties_losses_and_the_mean_are_exact() -> None:
    texts = pair("0.100", "0.300", 1) | pair("0.200", "0.200", 2) | pair("0.300", "0.299", 4)
    assert tally(texts) == Tally(1, 1, 1, Decimal("0.199") / 3, STRING_MATCH)


def test_without_a_pair_there_is_nothing_to_count() -> None:
    alone = {place: text for place, text in pair("0.1", "0.2").items() if place.method != "topk"}
    assert tally(alone) is None and tally_by_family(alone) == {} and tally({}) is None


def test_another_method_can_be_counted_against() -> None:
    assert tally(pair("0.1", "0.2"), "topk_phi_nosub") == Tally(0, 0, 1, Decimal("-0.8"), STRING_MATCH)
    assert tally_by_family(pair("0.1", "1.0"), "topk_phi_nosub") == {
        "RULER": Tally(0, 1, 0, Decimal("0"), STRING_MATCH)
    }
    assert tally(pair("0.1", "0.2"), "full") is None


def test_families_are_counted_apart() -> None:
    texts = (
        pair("0.1", "0.2")
        | pair("0.2", "0.1", benchmark="babilong")
        | pair("0.1", "0.1", benchmark="longbench", task="longbench_qmsum")
        | pair("0.1", "0.4", benchmark="longbench", task="longbench_musique")
        | pair("0.1", "0.2", benchmark="longbench", task="longbench_hotpotqa")
    )
    counted = {name: (each.wins, each.ties, each.losses) for name, each in tally_by_family(texts).items()}
    assert counted == {
        "RULER": (1, 0, 0), "BABILong": (0, 0, 1), "Summarisation": (0, 1, 0), "Question answering": (2, 0, 0)
    }  # fmt: skip


def test_variants_of_the_maps_do_not_count_as_the_method() -> None:
    topk = place("ruler", "4k", "1b", "topk", 1.0)
    assert tally({topk: "0.1", place("ruler", "4k", "1b", "topk_phi", 1.0, maps="4k-kl_only"): "0.9"}) is None
