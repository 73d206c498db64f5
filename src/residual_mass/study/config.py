"""`config.yaml` and the studies, each checked in itself and against the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from residual_mass import methods
from residual_mass.core.settings import tokens_of
from residual_mass.study.figures import FIGURES, kind_of
from residual_mass.study.labels import METHODS, PUBLISHED, TOPK
from residual_mass.study.sections import Main, Study
from residual_mass.study.values import parsed


@dataclass(frozen=True)
class Configuration:
    """`config.yaml` and all studies, checked against each other."""

    main: Main
    studies: dict[str, Study]

    def backbones_of(self, study: str) -> list[str]:
        return [name for name, backbone in self.main.backbones.items() if backbone.study == study]

    def tokenizer_owner(self, tokenizer: str) -> str:
        """The first backbone with the tokenizer; the prompts that all of them share are built with its settings."""
        return next(name for name, backbone in self.main.backbones.items() if backbone.tokenizer == tokenizer)


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(root: Path, main: Mapping[str, Any]) -> Configuration:
    """The configuration of a checkout.

    Args:
        main: config/config.yaml with what the command line changed.

    Raises:
        ValueError: a file is not YAML, or a key is unknown, missing or wrong, or contradicts another; one line that
            names file, key and remedy.
    """
    studies = {}
    for path in sorted((root / "config/studies").glob("*.yaml")):
        if not re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_-]*", path.stem) or path.stem == PUBLISHED:
            allowed = f"has letters, digits, _ and - only and is not {PUBLISHED}"
            raise ValueError(f"config/studies: '{path.name}': a study's name {allowed}; rename it")
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{file_of(path.stem)}: not valid YAML: {' '.join(str(error).split())}") from None
        studies[path.stem] = parsed(Study, content, f"{file_of(path.stem)}: ")
    configuration = Configuration(parsed(Main, dict(main), "configuration: "), studies)
    for problem in _problems_of_main(configuration):
        raise ValueError(f"config/config.yaml: {problem}")
    for name in studies:
        for problem in _problems_of_study(configuration, name):
            raise ValueError(f"{file_of(name)}: {problem}")
    return configuration


def file_of(study: str) -> str:
    """The file of a study, as messages name it."""
    return f"config/studies/{study}.yaml"


# ---- what no key says alone ------------------------------------------------------------------------------------------
# Only what would end a run after hours, or change numbers in silence: other mistakes end it when the jobs are planned.


def _problems_of_main(configuration: Configuration) -> Iterator[str]:
    main, studies = configuration.main, configuration.studies
    if "ours" in main.variants:
        yield "variants.ours: the name of a study's own recipe; rename the variant"
    for name, backbone in main.backbones.items():
        yield from _unknown(f"backbones.{name}.study", [backbone.study], studies)
        study = studies[backbone.study]
        others = (*study.maps.trained, *study.residuals.lengths, *study.runtime.contexts)
        longest = max([*study.evaluated_lengths, *others], key=tokens_of)
        if tokens_of(longest) > backbone.context:
            yield f"backbones.{name}.context: {backbone.context} tokens, but study {backbone.study} has {longest}"
        if (owner := main.backbones[configuration.tokenizer_owner(backbone.tokenizer)]).study != backbone.study:
            yield f"backbones.{name}.tokenizer: {backbone.tokenizer} is of study {owner.study}; give it another label"
    yield from _unknown("study, of those with a backbone", [main.study], filter(configuration.backbones_of, studies))


def _problems_of_study(configuration: Configuration, name: str) -> Iterator[str]:
    study, backbones = configuration.studies[name], configuration.backbones_of(name)
    longest, length = max(study.evaluated_lengths, key=tokens_of), study.ablations.length
    for key, values, options in _choices(study, backbones):
        yield from _unknown(key, values, options)
    if tokens_of(longest) > tokens_of(study.maps.main):
        yield f"maps.main: trained on {study.maps.main}, but the study evaluates {longest}"
    for benchmark in study.ablations.benchmarks if study.ablations.backbones else ():
        real = benchmark in study.benchmarks and study.benchmarks[benchmark].budget_length == "real"
        if real and tokens_of(study.truncate_to) > tokens_of(length):
            yield f"ablations.benchmarks: {benchmark} has prompts of up to {study.truncate_to}, its maps only {length}"


def _choices(study: Study, backbones: list[str]) -> Iterator[tuple[str, Iterable[Any], Iterable[Any]]]:
    """Keys with their values, and the options that these are among."""
    forced, mismatch, ablations, compared = study.fidelity, study.mismatch, study.ablations, study.residuals
    for section in ("mismatch", "ablations", "diagnostics", "residuals"):
        yield f"{section}.backbones", getattr(study, section).backbones, backbones
    others = [one.name for one in methods.METHODS if not one.of_the_paper and one.name not in study.methods]
    yield "fidelity.methods", forced.methods, others
    yield "fidelity.benchmarks", forced.benchmarks, study.benchmarks
    yield "fidelity.prompts_at", forced.prompts_at, forced.lengths
    yield "diagnostics.budget", [study.diagnostics.budget], study.budgets
    yield "mismatch.budget", [mismatch.budget] if mismatch.backbones else [], study.budgets
    yield "ablations.budget", [ablations.budget] if ablations.backbones else [], study.budgets
    yield "residuals.methods", [TOPK], compared.methods
    if "residual_estimators" in study.tables:
        yield "budgets, of the table residual_estimators", study.budgets, compared.budgets
    if set(study.tables) - {"fidelity", "fidelity_answers", "residual_estimators", "deployable"}:
        yield "methods, of tables of the paper", METHODS, study.methods
    whose = {"ablations": ablations.backbones, "residuals": compared.backbones}
    for label, figure in study.figures.items():
        section = FIGURES[kind_of(label)].section
        texts = compared.corpora if section == "residuals" else (*forced.corpora, *forced.benchmarks)
        yield f"figures.{label}", figure.of("text", "texts"), texts
        yield f"figures.{label}", figure.of("backbone", "backbones"), whose.get(section, backbones)


def _unknown(key: str, values: Iterable[Any], options: Iterable[Any]) -> Iterator[str]:
    """A problem for every value that is not among the options."""
    options = list(options)
    known = ", ".join(f"{option:g}" if isinstance(option, float) else option for option in options) or "none"
    for value in (value for value in values if value not in options):
        yield f"{key}: {f'{value:g}' if isinstance(value, float) else value} is not one of {known}"
