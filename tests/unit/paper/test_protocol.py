"""The paper's protocol as the package states it, beside the study that is shipped as the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from residual_mass.benchmarks.decoding import decoding_settings, decoding_words
from residual_mass.core.settings import length_and_variant
from residual_mass.paper import published
from residual_mass.paper.published.protocol import DECODING, PROTOCOL, VARIANTS, settings_of, text_of
from residual_mass.study.sections.training import ObjectiveSpec

CONFIG = Path(__file__).parents[3] / "config"


@pytest.fixture(scope="module")
def study() -> dict[str, Any]:
    return yaml.safe_load((CONFIG / "studies" / "paper.yaml").read_text())


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return yaml.safe_load((CONFIG / "config.yaml").read_text())


def test_the_study_of_the_paper_as_shipped_has_the_papers_protocol(
    study: dict[str, Any], config: dict[str, Any]
) -> None:
    assert settings_of(study | {"backbones": config["backbones"]}) == {
        key: text_of(value) for key, value in PROTOCOL.items()
    }
    assert set(study["benchmarks"]) == set(DECODING) == set(published.EXAMPLES)
    for name, settings in study["benchmarks"].items():
        here = settings | {"truncate_to": study["truncate_to"]}
        assert DECODING[name] == {key: here[key] for key in DECODING[name]}


def test_what_training_depends_on_is_in_the_protocol(study: dict[str, Any]) -> None:
    """All of `phi` but the seed and what only watches: whoever adds a key decides here whether it counts."""
    watching = {"held_out", "eval_budgets", "eval_every", "checkpoint_every", "seed", "gpus"}
    phi = {key.split(".")[1] for key in PROTOCOL if key.startswith("phi.")}
    assert phi == set(study["phi"]) - watching
    assert {key.split(".")[2] for key in PROTOCOL if key.startswith("phi.objective.")} == set(study["phi"]["objective"])
    assert {key.split(".")[2] for key in PROTOCOL if key.startswith("phi.map.")} == set(study["phi"]["map"])


def test_an_objective_that_leaves_weights_out_has_the_papers() -> None:
    objective = ObjectiveSpec()
    assert all(
        value == getattr(objective, key.removeprefix("phi.objective."))
        for key, value in PROTOCOL.items()
        if key.startswith("phi.objective.")
    )


def test_the_papers_variants_are_those_of_its_tables_and_of_the_configuration(config: dict[str, Any]) -> None:
    labels = {fact.place.maps for name in ("dphi_ablation", "loss_ablation") for fact in published.load(name)}
    assert {length_and_variant(label)[1] for label in labels if label} - {""} == set(VARIANTS)
    whole = {key: text_of(value) for key, value in PROTOCOL.items()}
    for label, changes in VARIANTS.items():
        theirs = whole | {key: text_of(value) for key, value in changes.items()}
        assert whole | settings_of({"phi": config["variants"][label]}) == theirs, label


def test_settings_are_text_that_does_not_tell_numbers_of_two_types_apart() -> None:
    assert [text_of(value) for value in (1, 1.0, 1e-3, 0.50354, True, None, "64k", ["a", "b"])] == [
        "1", "1", "0.001", "0.50354", "true", "null", "64k", '["a", "b"]',
    ]  # fmt: skip
    assert settings_of({"phi": {"steps": 3, "map": None, "curriculum": None, "gpus": 1}, "anchors": 4}) == {
        "phi.steps": "3", "phi.curriculum": "null",
    }  # fmt: skip


@pytest.mark.parametrize("chat_template", [True, False])
@pytest.mark.parametrize("answer_margin", [None, 0, 16])
@pytest.mark.parametrize("budget_length", ["nominal", "real"])
def test_the_words_on_decoding_say_what_they_were_made_of(
    chat_template: bool, answer_margin: int | None, budget_length: str
) -> None:
    told = {"chat_template": chat_template, "answer_margin": answer_margin, "budget_length": budget_length}
    for stops in (True, False):  # which changes no score
        words = decoding_words(**told, stop_when_saturated=stops, truncate_to="2k")
        assert decoding_settings(words) == told | {"truncate_to": "2k"}
