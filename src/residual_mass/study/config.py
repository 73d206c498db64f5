"""A study and `config.yaml`, each checked in itself and against the other."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import yaml
from pydantic import AfterValidator, BaseModel, Field, create_model

from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.core import estimators
from residual_mass.core.settings import AnchorSpec, Settings, tokens_of
from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.study.parsing import Parsed, Slip, parsed
from residual_mass.study.sections import (
    COSTS,
    KERNEL_FIDELITY,
    SECTIONS_OF_PHI,
    Ablations,
    Benchmark,
    Count,
    Diagnostics,
    Distinct,
    Fidelity,
    Label,
    Latencies,
    Length,
    Line,
    Maps,
    Mismatch,
    Name,
    OfOneText,
    OfTexts,
    OneOrMore,
    Percent,
    Phi,
    RecipeRuns,
    RegisteredBackbone,
    Resampling,
    ShortName,
    figures_of,
)  # fmt: skip

METHODS = ("full", "topk", "topk_phi", "topk_phi_nosub")
"""Those of the paper, in the order of its tables; `core.estimators` knows all."""
ABLATION_TABLES = {"dphi_ablation": "dphi", "loss_ablation": "loss"}
"""The ablation that each of these tables shows."""
ACCOUNTING_TABLE = "exact_accounting"
FIDELITY_TABLE, FIDELITY_ANSWERS = FIDELITY_TABLES = "fidelity", "fidelity_answers"
"""Of held-out texts, and of the answers to a benchmark's prompts."""
RUNTIME_TABLES = "runtime_"
"""What the tables of latencies begin with; the backbone follows."""
PUBLISHED = "published"
"""The folder of the tables with the paper's own values, in place of a study's name."""


# ---- a study ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Study(Settings):
    """Protocol of one study."""

    lengths: OneOrMore[Length]
    """Context lengths that are evaluated."""
    maps: Maps
    budgets: OneOrMore[Percent]
    """Exact-support budgets in percent of the prefix, anchors included."""
    methods: OneOrMore[Name]
    """Evaluated methods: `full`, `topk`, `topk_phi`, `topk_phi_nosub`, and estimators of your own (docs/extending.md);
    every method but `full` is run at every budget."""
    anchors: AnchorSpec
    truncate_to: Length
    """Prompts that leave no room for the answer within this length are cut on the left, after the BOS token; results
    say how many."""
    benchmarks: Annotated[dict[Name, Benchmark], Field(min_length=1)]
    """Benchmarks by name: `ruler`, `babilong`, `longbench`."""
    fidelity: Fidelity
    mismatch: Mismatch
    ablations: Ablations
    phi: Phi
    recipes: RecipeRuns
    diagnostics: Diagnostics
    runtime: Latencies
    score: Resampling
    tables: Distinct[Annotated[str, Field(pattern=r"^(runtime_[a-z0-9.-]+|[a-z0-9_]+)$", title="table")]]
    """Tables that `all` makes; each has a template in `paper_tables/templates`, and the latencies `runtime_<backbone>`
    share one."""
    figures: Annotated[dict[str, Any], AfterValidator(figures_of)]
    """Figures that `all` makes, each with what it shows; one that is not named is not made."""

    def __post_init__(self) -> None:
        if (slip := next(self._slips(), None)) is not None:
            raise slip

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
    def evaluated_lengths(self) -> list[str]:
        """Every length at which something is evaluated."""
        lengths = [length for benchmark in self.benchmarks for length in self.lengths_of(benchmark)]
        return list(dict.fromkeys([*self.lengths, *self.fidelity.lengths, *lengths]))

    @property
    def all_lengths(self) -> list[str]:
        """Every length that a backbone of the study meets."""
        return [
            *self.evaluated_lengths, self.truncate_to, *self.maps.trained, *self.diagnostics.lengths,
            *self.runtime.contexts,
        ]  # fmt: skip

    def _slips(self) -> Iterator[Slip]:
        """What no key says alone."""
        yield from self._benchmark_slips()
        yield from _unknown("fidelity.benchmarks", self.fidelity.benchmarks, self.benchmarks)
        yield from _unknown("fidelity.prompts_at", self.fidelity.prompts_at, self.fidelity.lengths)
        others = [one.name for one in estimators.WITHOUT_MAPS if one.name not in self.methods]
        yield from _unknown("fidelity.methods", self.fidelity.methods, others)
        yield from self._comparison_slips()
        yield from self._length_slips()
        yield from _unknown("methods", self.methods, estimators.NAMES)
        if self.tables and not set(self.methods) >= set(METHODS):
            yield Slip("methods", f"tables show every method of the paper; have {', '.join(METHODS)}, or tables empty")
        yield from self._table_slips()
        yield from self._diagnostics_slips()
        if self.phi.curriculum:
            yield from _beyond("phi.curriculum.length", self.phi.curriculum.length, self.maps.trained)

    def _benchmark_slips(self) -> Iterator[Slip]:
        for benchmark in self.benchmarks:
            for length in self.lengths_of(benchmark):
                try:
                    tasks_of(benchmark, tokens_of(length))
                except ValueError as error:
                    yield Slip(f"benchmarks.{benchmark}", str(error))

    def _comparison_slips(self) -> Iterator[Slip]:
        """In what maps are compared on: names and points that the study does not have elsewhere."""
        mismatch, ablations = self.mismatch, self.ablations
        if mismatch.backbones:
            yield from _unknown("mismatch.maps", mismatch.maps, self.maps.trained)
            yield from _unknown("mismatch.lengths", mismatch.lengths, self.lengths_of("ruler"))
            yield from _unknown("mismatch.budget", [mismatch.budget], self.budgets)
        if ablations.backbones:
            yield from _unknown("ablations.benchmarks", ablations.benchmarks, self.benchmarks)
            yield from _unknown("ablations.length", [ablations.length], self.maps.trained)
            yield from _unknown("ablations.budget", [ablations.budget], self.budgets)
            for benchmark in ablations.benchmarks:
                yield from self._ablated_benchmark_slips(benchmark)
        if mismatch.backbones or ablations.backbones:
            needed = ("full", "topk", "topk_phi")
            for method in (method for method in needed if method not in self.methods):
                yield Slip("methods", f"{method} is missing, which mismatch and ablations compare with")

    def _ablated_benchmark_slips(self, benchmark: str) -> Iterator[Slip]:
        length = self.ablations.length
        yield from _unknown("ablations.length", [length], self.lengths_of(benchmark))
        real = self.benchmarks[benchmark].budget_length == "real"
        if real and tokens_of(self.truncate_to) > tokens_of(length):
            yield Slip(
                "ablations.benchmarks",
                f"prompts of {benchmark} are up to truncate_to ({self.truncate_to}) long, beyond ablations.length "
                f"({length}), which the maps are trained on; take {benchmark} out",
            )

    def _length_slips(self) -> Iterator[Slip]:
        """The main maps serve every prompt and every captured text."""
        used = {f"length {length}": length for length in (*self.evaluated_lengths, *self.diagnostics.lengths)}
        for what, length in {**used, f"truncate_to: {self.truncate_to}": self.truncate_to}.items():
            if tokens_of(length) > tokens_of(self.maps.main):
                yield Slip("", f"{what} is beyond maps.main ({self.maps.main}), which the maps were trained on")

    def _table_slips(self) -> Iterator[Slip]:
        if "natural_main" in self.tables and len(self.lengths_of("longbench")) != 1:
            yield Slip("tables", "natural_main shows one length of longbench; give benchmarks.longbench.lengths one")
        needs = {"cross_length_mismatch": "mismatch", ACCOUNTING_TABLE: "diagnostics"}
        for label, section in (needs | dict.fromkeys(ABLATION_TABLES, "ablations")).items():
            if label in self.tables and not getattr(self, section).backbones:
                yield Slip("tables", f"{label} needs a backbone in {section}.backbones")
        if FIDELITY_TABLE in self.tables and not (self.fidelity.lengths and self.fidelity.corpora):
            yield Slip("tables", f"{FIDELITY_TABLE} needs a length in fidelity.lengths and a text in fidelity.corpora")
        if FIDELITY_ANSWERS in self.tables and not any(map(self.answered_lengths, self.fidelity.benchmarks)):
            yield Slip("tables", f"{FIDELITY_ANSWERS} needs one of fidelity.benchmarks at one of fidelity.prompts_at")

    def _diagnostics_slips(self) -> Iterator[Slip]:
        """In what is captured, and in what the figures show of it."""
        captured, ablated = self.diagnostics, self.ablations.length
        yield from _unknown("diagnostics.budget", [captured.budget], self.budgets)
        for corpus, length in product(captured.corpora, captured.lengths):
            if corpus in PROMPT_PACKS and length not in self.lengths_of("ruler"):
                yield Slip(
                    "diagnostics.corpora",
                    f"{corpus} is made of RULER's prompts, which the study does not have at {length}; take {corpus} "
                    "out, or evaluate ruler there",
                )
        if KERNEL_FIDELITY in self.figures and ablated not in captured.lengths:
            yield Slip(f"figures.{KERNEL_FIDELITY}", f"needs ablations.length ({ablated}) in diagnostics.lengths")
        options = {"corpus": captured.corpora, "corpora": captured.corpora, "maps": self.maps.trained}
        for label, figure in self.figures.items():
            if isinstance(figure, OfTexts | OfOneText):
                yield from self._fidelity_figure_slips(f"figures.{label}", figure)
                continue
            for key, values in (options | dict.fromkeys(("length", "lengths"), captured.lengths)).items():
                yield from _unknown(f"figures.{label}.{key}", _listed(getattr(figure, key, ())), values)

    def _fidelity_figure_slips(self, where: str, figure: OfTexts | OfOneText) -> Iterator[Slip]:
        several = isinstance(figure, OfTexts)
        texts, lengths = (figure.texts, figure.lengths) if several else ((figure.text,), (figure.length,))
        text_key, length_key = (f"{where}.{key}{'s' * several}" for key in ("text", "length"))
        yield from _unknown(text_key, texts, (*self.fidelity.corpora, *self.fidelity.benchmarks))
        yield from _unknown(length_key, lengths, self.fidelity.lengths)
        for text, length in product(texts, lengths):
            if text in self.fidelity.benchmarks and length not in self.answered_lengths(text):
                yield Slip(length_key, f"prompts of {text} are not continued at {length}; take one of the two out")


# ---- config.yaml -----------------------------------------------------------------------------------------------------


@cache
def changes_of(settings: type[Any], *names: str) -> type[BaseModel]:
    """A model with the keys of `settings`, or with `names` of them; each may be left out, also within sections."""
    hints = get_type_hints(settings, include_extras=True)
    fields: dict[str, Any] = {
        name: (changes_of(hints[name]) if name in SECTIONS_OF_PHI else hints[name], None)
        for name in names or [field.name for field in dataclasses.fields(settings)]
    }
    name = f"Changes of {'Phi in a variant' if names else settings.__name__}"
    return create_model(name, __config__=Settings.__pydantic_config__, **fields)


def _told(changes: BaseModel) -> dict[str, Any]:
    """What the file says, without the keys that it leaves out."""
    return changes.model_dump(mode="json", exclude_unset=True)


VariantChanges = Annotated[changes_of(Phi, "map", "objective"), AfterValidator(_told)]
RecipeChanges = Annotated[changes_of(Phi), AfterValidator(_told)]


@dataclass(frozen=True)
class AblationRows(Settings):
    """Rows of the ablation tables, in order; `ours` is the study's own recipe."""

    dphi: OneOrMore[Name]
    """Rows of `results/ablation_dphi_*.csv`."""
    loss: OneOrMore[Name]
    """Rows of `results/ablation_loss_*.csv`."""


@dataclass(frozen=True, kw_only=True)
class Main(Settings):
    """What `config/config.yaml` says."""

    study: Line
    """Study that `all` makes: a file of `config/studies` without its ending."""
    examples: Count | None
    """Examples per task, in place of every benchmark's own count; `null` keeps the study's. Existing rows are kept."""
    assets: Annotated[str, Field(pattern=r"^[^{}\x00-\x1f\x7f-][^{}\x00-\x1f\x7f]*$", title="folder")]
    """Folder of the downloaded data and models; one that was made elsewhere is used as it is."""
    offline: bool
    """Whether to run without network, from the assets folder alone, which the target `prefetch` fills."""
    backbones: Annotated[dict[ShortName, RegisteredBackbone], Field(min_length=1)]
    """Language models by the short name that file names carry."""
    variants: dict[Label, VariantChanges]
    """Feature maps that the ablations train beside the study's own, by label: what each changes of `phi.map` and
    `phi.objective`."""
    ablations: AblationRows
    recipes: dict[Label, RecipeChanges]
    """Ways to train that the target `recipes` compares, by label: what each changes of the study's `phi`, also within
    `map`, `objective` and `replay`; seeds are those of the study's `recipes.seeds`."""

    def __post_init__(self) -> None:
        if "ours" in self.variants:
            raise Slip("variants.ours", "the name of a study's own recipe; rename the variant")
        for name in ("dphi", "loss"):
            for row in getattr(self.ablations, name):
                if row not in ("ours", *self.variants):
                    raise Slip(f"ablations.{name}", f"{row} is not ours and not one of {', '.join(self.variants)}")
        for label, changes in self.recipes.items():
            if "seed" in changes:
                raise Slip(f"recipes.{label}.seed", "seeds are those of recipes.seeds in config/studies; remove it")


@dataclass(frozen=True)
class Configuration:
    """`config.yaml` and all studies, checked against each other."""

    main: Main
    studies: dict[str, Study]

    def __post_init__(self) -> None:
        if (problem := next(self._problems(), None)) is not None:
            raise ValueError(problem)

    def backbones_of(self, study: str) -> list[str]:
        return [name for name, backbone in self.main.backbones.items() if backbone.study == study]

    def tokenizer_owner(self, tokenizer: str) -> str:
        """The first backbone with the tokenizer; the prompts that all of them share are built with its settings."""
        return next(name for name, backbone in self.main.backbones.items() if backbone.tokenizer == tokenizer)

    def _problems(self) -> Iterator[str]:
        """What no file says alone, one line each."""
        for name in self.main.backbones:
            yield from (f"config/config.yaml: backbones.{name}.{slip}" for slip in self._backbone_slips(name))
        for name in self.studies:
            if not re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_-]*", name):
                yield f"config/studies: '{name}.yaml': a study's name has letters, digits, _ and - only; rename it"
            if name == PUBLISHED:
                yield f"{_file_of(name)}: that name is for the tables with the paper's own values; rename the study"
        if self.main.study not in self.studies:
            yield f"study {self.main.study!r} is not known; known are {', '.join(self.studies)} (config/studies)"
        elif not self.backbones_of(self.main.study):
            yield (
                f"study {self.main.study} has no backbone; give one `study: {self.main.study}` in config/config.yaml"
            )
        for name in self.studies:
            yield from (f"{_file_of(name)}: {slip}" for slip in self._study_slips(name))

    def _backbone_slips(self, name: str) -> Iterator[Slip]:
        backbone = self.main.backbones[name]
        if backbone.study not in self.studies:
            yield Slip("study", f"{backbone.study!r} is not a study; known are {', '.join(self.studies)}")
            return
        for length in self.studies[backbone.study].all_lengths:
            if tokens_of(length) > backbone.context:
                problem = f"{backbone.context} tokens, but study {backbone.study} has the length {length}"
                yield Slip("context", problem)
        owner = self.main.backbones[self.tokenizer_owner(backbone.tokenizer)]
        if owner.study != backbone.study:
            problem = f"{backbone.tokenizer} is of study {owner.study}; backbones share one within a study"
            yield Slip("tokenizer", problem)
        if backbone.source == "hub" and not re.fullmatch("[0-9a-f]{40}", backbone.revision):
            problem = f"{backbone.revision} may move; write the commit, 40 digits and letters a to f"
            yield Slip("revision", problem)

    def _study_slips(self, name: str) -> Iterator[Slip]:
        """In what a study says of backbones, variants and recipes."""
        study, backbones = self.studies[name], self.backbones_of(name)
        yield from _unknown("mismatch.backbones", study.mismatch.backbones, backbones)
        yield from _unknown("ablations.backbones", study.ablations.backbones, backbones)
        yield from self._recipe_slips(study, backbones)
        yield from _unknown("diagnostics.backbones", study.diagnostics.backbones, backbones)
        yield from _unknown("tables", study.tables, tables_for(backbones))
        whose = {COSTS: study.recipes.backbones, KERNEL_FIDELITY: study.ablations.backbones}
        for label, figure in study.figures.items():
            options = {"variants": list(self.main.variants)}
            options |= dict.fromkeys(("backbone", "backbones"), whose.get(label, backbones))
            for key, values in options.items():
                yield from _unknown(f"figures.{label}.{key}", _listed(getattr(figure, key, ())), values)

    def _recipe_slips(self, study: Study, backbones: list[str]) -> Iterator[Slip]:
        runs = study.recipes
        if runs.backbones:
            yield from _unknown("recipes.names", runs.names, self.main.recipes)
            yield from _unknown("recipes.backbones", runs.backbones, backbones)
            yield from _unknown("recipes.lengths", runs.lengths, study.maps.trained)
        for label, changes in self.main.recipes.items() if backbones else ():
            where = f"phi, as recipe {label} changes it"
            try:
                phi = study.phi.changed(changes)
            except Slip as slip:
                yield Slip(where, str(slip))
                continue
            if phi.curriculum and label in runs.names and runs.backbones:
                slips = _beyond("curriculum.length", phi.curriculum.length, runs.lengths)
                yield from (Slip(where, str(slip)) for slip in slips)


def tables_for(backbones: Iterable[str]) -> list[str]:
    """Labels of the tables that a study of these backbones may show."""
    from residual_mass.paper import published  # only here, for tables are told what they show by specs
    from residual_mass.paper.tables.layouts import LAYOUTS

    of_paper = [label for label in published.labels() if not label.startswith(RUNTIME_TABLES)]
    latencies = (f"{RUNTIME_TABLES}{backbone}" for backbone in backbones)
    return list(dict.fromkeys([*of_paper, *LAYOUTS, *FIDELITY_TABLES, *latencies]))


def _listed(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _unknown(key: str, values: Iterable[Any], options: Iterable[Any]) -> Iterator[Slip]:
    options = list(options)
    known = ", ".join(f"{option:g}" if isinstance(option, float) else option for option in options) or "none"
    for value in (value for value in values if value not in options):
        yield Slip(key, f"{f'{value:g}' if isinstance(value, float) else value} is not one of {known}")


def _beyond(key: str, length: str, trained: Iterable[str]) -> Iterator[Slip]:
    shortest = min(trained, key=tokens_of, default=length)
    if tokens_of(length) > tokens_of(shortest):
        yield Slip(key, f"{length} is beyond the trained length {shortest}")


def _file_of(study: str) -> str:
    return f"config/studies/{study}.yaml"


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(root: Path, main: Mapping[str, Any]) -> Configuration:
    """The configuration of a checkout.

    Args:
        main: config/config.yaml with what the command line changed.

    Raises:
        ValueError: a file is not YAML, or a key is unknown, missing or wrong, or contradicts another; one line that
            names file, key and remedy.
    """
    files = sorted((root / "config/studies").glob("*.yaml"))
    checked = _from_file("configuration", Main, dict(main))
    return Configuration(checked, {path.stem: _from_file(_file_of(path.stem), Study, _yaml(path)) for path in files})


def _from_file(where: str, settings: type[Parsed], data: Any) -> Parsed:
    try:
        return parsed(settings, data)
    except Slip as slip:
        raise ValueError(f"{where}: {slip}") from None


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{_file_of(path.stem)}: not valid YAML: {' '.join(str(error).split())}") from None
