"""Reads `config.yaml` and the studies, and checks each of them and that they agree."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from residual_mass import methods
from residual_mass.paper.tables import find
from residual_mass.spec import sections
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.figures import FIGURES, kind_of
from residual_mass.spec.labels import PAPER_METHODS, PUBLISHED, TOPK
from residual_mass.spec.parsing import parsed
from residual_mass.spec.sections import (
    Count,
    Distinct,
    Field,
    Label,
    Length,
    Line,
    Name,
    OneOrMore,
    Percent,
    ShortName,
)
from residual_mass.spec.settings import AnchorSpec, Settings, maps_label, tokens_of
from residual_mass.spec.tasks import tasks_of


@dataclass(frozen=True, kw_only=True)
class Study(Settings):
    """Protocol of one study."""

    lengths: OneOrMore[Length]
    """Context lengths that are evaluated."""
    maps: sections.Maps
    budgets: OneOrMore[Percent]
    """Exact-support budgets in percent of the prefix, anchors included."""
    methods: OneOrMore[Name]
    """Evaluated methods: `full`, `topk`, `topk_phi`, `topk_phi_nosub`, and others, including your own
    (docs/extending.md). Every method but `full` is run at every budget."""
    anchors: AnchorSpec
    truncate_to: Length
    """Prompts that leave no room for the answer within this length are cut on the left, after the BOS token; results
    say how many."""
    benchmarks: dict[Name, sections.Benchmark]
    """Benchmarks by name: `ruler`, `babilong`, `longbench`; `{}` leaves scores out."""
    fidelity: sections.Fidelity
    mismatch: sections.Mismatch
    ablations: sections.Ablations
    phi: sections.Phi
    diagnostics: sections.Diagnostics
    residuals: sections.Residuals
    runtime: sections.Latencies
    score: sections.Resampling
    tables: Distinct[Annotated[str, Field(pattern=r"^(runtime_[a-z0-9.-]+|[a-z0-9_]+)$")]]
    """Tables that `all` makes; each has a template in `paper_tables/templates`, and the latencies `runtime_<backbone>`
    share one."""
    figures: dict[str, sections.Figure]
    """Figures that `all` makes, each with the keys that say what it shows."""

    def __post_init__(self) -> None:
        for label in self.tables:
            find(label)
        for label, figure in self.figures.items():
            keys = FIGURES[kind_of(label)].keys
            for key in vars(figure):
                if bool(figure.of(key)) != (key in keys):
                    raise ValueError(f"figures.{label}.{key}: {'missing' if key in keys else 'unknown'} key")

    def lengths_of(self, benchmark: str) -> tuple[str, ...]:
        """Lengths at which a benchmark is evaluated."""
        if benchmark not in self.benchmarks:
            return ()
        return self.benchmarks[benchmark].lengths or self.lengths

    def answered_lengths(self, benchmark: str) -> tuple[str, ...]:
        """Lengths at which the prompts of a benchmark are continued by given answers."""
        if benchmark not in self.fidelity.benchmarks:
            return ()
        return tuple(length for length in self.lengths_of(benchmark) if length in self.fidelity.prompts_at)

    @property
    def evaluated_lengths(self) -> set[str]:
        """Every length at which something is evaluated with the main maps."""
        lengths = {self.truncate_to, *self.lengths}
        for benchmark in self.benchmarks:
            lengths.update(self.lengths_of(benchmark))
        return lengths.union(self.fidelity.lengths, self.diagnostics.lengths)

    @property
    def arms(self) -> tuple[ArmSpec, ...]:
        """Every method at every budget."""
        arms = []
        for name in self.methods:
            method = methods.method_named(name)
            maps = self.maps.main if method.needs_maps else None
            if method.whole_prefix:
                arms.append(ArmSpec(name, None, maps))
            else:
                arms += [ArmSpec(name, budget, maps) for budget in self.budgets]
        return tuple(arms)

    @property
    def recommended(self) -> str:
        """The method that results show first: the last one that is no oracle, if there is one."""
        others = (name for name in reversed(self.methods) if not methods.method_named(name).oracle)
        return next(others, self.methods[-1])

    def own_methods(self, budget: float | None = None) -> tuple[str, ...]:
        """Methods that the paper lacks. With a budget, only those that are decoded at it and need no maps."""
        own = [name for name in self.methods if name not in PAPER_METHODS]
        if budget is None:
            return tuple(own)
        if budget not in self.budgets:
            return ()
        return tuple(name for name in own if not methods.method_named(name).needs_maps)

    def comparison(self, name: str) -> sections.Mismatch | sections.Ablations:
        """Returns the section of a comparison of maps."""
        return self.mismatch if name == "mismatch" else self.ablations

    def forced_maps(self, backbones: Iterable[str]) -> list[str]:
        """Returns labels of the main maps, and of the maps of `mismatch` if one of these backbones has them; none if no
        method needs maps.
        """
        labels = self.maps_for((*self.methods, *self.fidelity.methods))
        if labels and set(backbones) & set(self.mismatch.backbones):
            labels += self.mismatch.maps
        return list(dict.fromkeys(labels))

    def maps_for(self, names: Iterable[str]) -> list[str]:
        """Returns the label of the main maps in a list, which is empty if none of these methods needs maps."""
        if any(methods.method_named(name).needs_maps for name in names):
            return [self.maps.main]
        return []

    def task_files(self, benchmark: str, length: str) -> tuple[str, ...]:
        """Returns the name of each generate job of a benchmark: `all`, or the tasks."""
        whole = self.benchmarks[benchmark].tasks_per_job == "all"
        return ("all",) if whole else tasks_of(benchmark, tokens_of(length))


@dataclass(frozen=True)
class AblationRows(Settings):
    """Rows of the ablation tables, in order; `ours` is the study's own recipe."""

    dphi: OneOrMore[Name]
    """Rows of `results/ablation_dphi_*.csv`."""
    loss: OneOrMore[Name]
    """Rows of `results/ablation_loss_*.csv`."""


@dataclass(frozen=True, kw_only=True)
class Main(Settings):
    """Content of `config/config.yaml`."""

    study: Line
    """Study that `all` makes: a file of `config/studies` without its ending."""
    examples: Count | None
    """Examples per task, in place of every benchmark's own count; `null` keeps the study's. Existing rows are kept."""
    assets: Annotated[str, Field(pattern=r"^[^{}\x00-\x1f\x7f-][^{}\x00-\x1f\x7f]*$")]
    """Folder of the downloaded data and models; one that was made elsewhere is used as it is."""
    offline: Annotated[bool, Field(strict=False)]  # Snakemake passes `offline=true` of the command line as a string
    """Whether to run without network, from the assets folder and the hub's cache, which the target `prefetch` fills."""
    backbones: Annotated[dict[ShortName, sections.RegisteredBackbone], Field(min_length=1)]
    """Language models by the short name that file names carry."""
    variants: dict[Label, dict[Literal["map", "objective"], dict[str, Any]]]
    """Further feature maps that the ablations train, by label: the keys of `phi.map` and `phi.objective` that each of
    them changes."""
    ablations: AblationRows


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

    def titles(self, names: Iterable[str]) -> dict[str, str]:
        return {name: self.main.backbones[name].title for name in names}

    def compared_maps(self, study: Study, comparison: str) -> tuple[str, ...]:
        """Returns the labels of the maps of a comparison, in the order of its table's rows."""
        if comparison == "mismatch":
            return study.mismatch.maps
        length = study.ablations.length
        variants = ["" if row == "ours" else row for row in getattr(self.main.ablations, comparison)]
        return tuple(maps_label(length, variant) for variant in variants)


# ---- reading ---------------------------------------------------------------------------------------------------------


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that comes twice; YAML itself takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        names = [key.value for key in keys]
        for number, key in enumerate(keys):
            first = names.index(key.value)
            if first < number:
                lines = f"{keys[first].start_mark.line + 1} and {key.start_mark.line + 1}"
                raise yaml.YAMLError(f"key {key.value} comes twice, in lines {lines}; rename or remove one")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, file: str) -> Any:
    """Returns the content of a YAML file.

    Args:
        file: the file, as messages name it.

    Raises:
        ValueError: the file is not YAML, or has a key twice; one line that names file, line and remedy.
    """
    content = path.read_bytes()
    try:
        return UniqueKeyLoader(content.decode("utf-8")).get_single_data()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"byte 0x{content[error.start]:02x} in line {line} is not UTF-8; save the file as UTF-8"
    except yaml.reader.ReaderError as error:
        line = content.decode("utf-8").count("\n", 0, error.position) + 1
        problem = f"character {error.character:#x} in line {line} is not allowed; remove it"
    except yaml.MarkedYAMLError as error:
        parts = ((error.context, error.context_mark), (error.problem, error.problem_mark))
        said = [f"{words} in line {mark.line + 1}" if mark else words for words, mark in parts if words]
        problem = f"{': '.join(said)}; correct it"
    except (yaml.YAMLError, ValueError) as error:  # a key twice; a date that does not exist
        problem = str(error)
    raise ValueError(f"{file}: not valid YAML: {' '.join(problem.split())}")


def load_configuration(root: Path, main: Mapping[str, Any]) -> Configuration:
    """Returns the configuration of a checkout.

    Args:
        main: config/config.yaml with the changes of the command line.

    Raises:
        ValueError: a file is not YAML, or a key is unknown, missing or wrong, or contradicts another; one line that
            names file, key and remedy.
    """
    studies = {}
    for path in sorted((root / "config/studies").glob("*.yaml")):
        if not re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_-]*", path.stem) or path.stem == PUBLISHED:
            allowed = f"has letters, digits, _ and - only and is not {PUBLISHED}"
            raise ValueError(f"config/studies: '{path.name}': a study's name {allowed}; rename it")
        content = read_yaml(path, file_of(path.stem))
        studies[path.stem] = parsed(Study, content, f"{file_of(path.stem)}: ")
    configuration = Configuration(parsed(Main, dict(main), "configuration: "), studies)
    for problem in _problems_of_main(configuration):
        raise ValueError(f"config/config.yaml: {problem}")
    for name in studies:
        for problem in _problems_of_study(configuration, name):
            raise ValueError(f"{file_of(name)}: {problem}")
    return configuration


def file_of(study: str) -> str:
    """Returns the file of a study, as messages name it."""
    return f"config/studies/{study}.yaml"


# ---- agreement of keys -----------------------------------------------------------------------------------------------
# Only mistakes that would end a run after hours or change numbers silently: others are found when jobs are planned.


def _problems_of_main(configuration: Configuration) -> Iterator[str]:
    main, studies = configuration.main, configuration.studies
    if "ours" in main.variants:
        yield "variants.ours: the name of a study's own recipe; rename the variant"
    if os.path.expanduser(main.assets).startswith("~"):
        yield f"assets: {main.assets} names the home folder of a user unknown here; write the whole path"
    for name, backbone in main.backbones.items():
        yield from _unknown(f"backbones.{name}.study", [backbone.study], studies)
        study = studies[backbone.study]
        others = (*study.maps.trained, *study.residuals.lengths, *study.runtime.contexts)
        longest = max([*study.evaluated_lengths, *others], key=tokens_of)
        if tokens_of(longest) > backbone.context:
            yield f"backbones.{name}.context: {backbone.context} tokens, but study {backbone.study} has {longest}"
        owner = main.backbones[configuration.tokenizer_owner(backbone.tokenizer)]
        if owner.study != backbone.study:
            yield f"backbones.{name}.tokenizer: {backbone.tokenizer} is of study {owner.study}; give it another label"
    yield from _unknown("study, of those with a backbone", [main.study], filter(configuration.backbones_of, studies))


def _problems_of_study(configuration: Configuration, name: str) -> Iterator[str]:
    study = configuration.studies[name]
    backbones = configuration.backbones_of(name)
    longest = max(study.evaluated_lengths, key=tokens_of)
    choices = [*_choices(study, backbones), *_choices_of_tables(study), *_choices_of_figures(study, backbones)]
    for key, values, options in choices:
        yield from _unknown(key, values, options)
    if tokens_of(longest) > tokens_of(study.maps.main):
        yield f"maps.main: trained on {study.maps.main}, but the study evaluates {longest}"
    if "natural_main" in study.tables and len(study.lengths_of("longbench")) != 1:
        yield "tables: natural_main shows one length of longbench; give benchmarks.longbench.lengths one"
    corpora = set(study.residuals.corpora) & set(study.fidelity.corpora)
    lengths = set(study.residuals.lengths) & set(study.fidelity.lengths)
    if "deployable" in study.tables and not (corpora and lengths):
        yield "tables: deployable shows texts and lengths that residuals and fidelity share, and they share none"
    if study.ablations.backbones and not study.ablations.benchmarks:
        yield "ablations.benchmarks: empty; name one, or leave ablations.backbones empty"
    longer = tokens_of(study.truncate_to) > tokens_of(study.ablations.length)
    for benchmark in study.ablations.benchmarks if study.ablations.backbones and longer else ():
        if benchmark in study.benchmarks and study.benchmarks[benchmark].budget_length == "real":
            lengths = f"prompts of up to {study.truncate_to}, its maps only {study.ablations.length}"
            yield f"ablations.benchmarks: {benchmark} has {lengths}"


Choices = Iterator[tuple[str, Iterable[Any], Iterable[Any]]]
"""Keys, the values of each, and the options for these values."""


def _choices(study: Study, backbones: list[str]) -> Choices:
    for name in ("mismatch", "ablations", "diagnostics", "residuals"):
        yield f"{name}.backbones", getattr(study, name).backbones, backbones
    others = [method.name for method in methods.METHODS if not method.of_the_paper]
    further = [name for name in others if name not in study.methods]
    yield "fidelity.methods", study.fidelity.methods, further
    yield "fidelity.benchmarks", study.fidelity.benchmarks, study.benchmarks
    yield "fidelity.prompts_at", study.fidelity.prompts_at, study.fidelity.lengths
    yield "diagnostics.budget", [study.diagnostics.budget], study.budgets
    for name in ("mismatch", "ablations"):
        section = study.comparison(name)
        yield f"{name}.budget", [section.budget] if section.backbones else [], study.budgets
    yield "residuals.methods", [TOPK], study.residuals.methods


def _choices_of_tables(study: Study) -> Choices:
    """Yields what tables and comparisons of maps require of the study."""
    if "residual_estimators" in study.tables:
        yield "budgets, of the table residual_estimators", study.budgets, study.residuals.budgets
    needed: tuple[str, ...] = ()
    if study.mismatch.backbones or study.ablations.backbones:
        needed = PAPER_METHODS[:3]
    shown = {find(label).of for label in study.tables}
    if shown - {"fidelity", "answers", "residuals"}:
        needed = PAPER_METHODS
    yield "methods, of the paper's tables and comparisons", needed, study.methods


def _choices_of_figures(study: Study, backbones: list[str]) -> Choices:
    """Yields the texts and backbones of figures, with those of their sections, or else all backbones of the study."""
    of_section = {"ablations": study.ablations.backbones, "residuals": study.residuals.backbones}
    forced = (*study.fidelity.corpora, *study.fidelity.benchmarks)
    texts = {"fidelity": forced, "residuals": study.residuals.corpora}
    for label, figure in study.figures.items():
        section = FIGURES[kind_of(label)].section
        yield f"figures.{label}", figure.of("text", "texts"), texts.get(section, ())
        yield f"figures.{label}", figure.of("backbone", "backbones"), of_section.get(section, backbones)


def _unknown(key: str, values: Iterable[Any], options: Iterable[Any]) -> Iterator[str]:
    """Yields a problem for every value that is not among the options."""
    options = list(options)
    known = ", ".join(map(_written, options)) or "none"
    for value in values:
        if value not in options:
            yield f"{key}: {_written(value)} is not one of {known}"


def _written(value: str | float) -> str:
    return f"{value:g}" if isinstance(value, float) else value
