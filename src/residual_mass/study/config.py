"""`config.yaml` and the studies, each checked in itself and against the others."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import yaml
from pydantic import AfterValidator, BaseModel, Field, create_model

from residual_mass import methods
from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.core.settings import AnchorSpec, Settings, tokens_of
from residual_mass.study.figures import figures_of
from residual_mass.study.labels import KERNEL_FIDELITY, METHODS, PUBLISHED, RESIDUAL_FIGURES
from residual_mass.study.sections import (
    SECTIONS_OF_PHI,
    Ablations,
    Benchmark,
    Diagnostics,
    Fidelity,
    Latencies,
    Maps,
    Mismatch,
    Phi,
    RegisteredBackbone,
    Resampling,
    Residuals,
)
from residual_mass.study.values import (
    ConfigError,
    Count,
    Distinct,
    Label,
    Length,
    Line,
    Name,
    OneOrMore,
    Parsed,
    Percent,
    ShortName,
    adapter,
    parsed,
)


@dataclass(frozen=True, kw_only=True)
class Study(Settings):
    """Protocol of one study."""

    lengths: OneOrMore[Length]
    """Context lengths that are evaluated."""
    maps: Maps
    budgets: OneOrMore[Percent]
    """Exact-support budgets in percent of the prefix, anchors included."""
    methods: OneOrMore[Name]
    """Evaluated methods: `full`, `topk`, `topk_phi`, `topk_phi_nosub`, and others, also your own (docs/extending.md);
    every method but `full` is run at every budget."""
    anchors: AnchorSpec
    truncate_to: Length
    """Prompts that leave no room for the answer within this length are cut on the left, after the BOS token; results
    say how many."""
    benchmarks: dict[Name, Benchmark]
    """Benchmarks by name: `ruler`, `babilong`, `longbench`; none leaves scores out."""
    fidelity: Fidelity
    mismatch: Mismatch
    ablations: Ablations
    phi: Phi
    diagnostics: Diagnostics
    residuals: Residuals
    runtime: Latencies
    score: Resampling
    tables: Distinct[Annotated[str, Field(pattern=r"^(runtime_[a-z0-9.-]+|[a-z0-9_]+)$", title="table")]]
    """Tables that `all` makes; each has a template in `paper_tables/templates`, and the latencies `runtime_<backbone>`
    share one."""
    figures: Annotated[dict[str, Any], AfterValidator(figures_of)]
    """Figures that `all` makes, each with what it shows; one that is not named is not made."""

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
        """Every length at which something is evaluated with the main maps."""
        lengths = [length for benchmark in self.benchmarks for length in self.lengths_of(benchmark)]
        return list(dict.fromkeys([*self.lengths, *self.fidelity.lengths, *lengths, *self.diagnostics.lengths]))

    @property
    def all_lengths(self) -> list[str]:
        """Every length that a backbone of the study meets."""
        others = (*self.maps.trained, *self.residuals.lengths, *self.runtime.contexts)
        return [*self.evaluated_lengths, self.truncate_to, *others]


@dataclass(frozen=True)
class AblationRows(Settings):
    """Rows of the ablation tables, in order; `ours` is the study's own recipe."""

    dphi: OneOrMore[Name]
    """Rows of `results/ablation_dphi_*.csv`."""
    loss: OneOrMore[Name]
    """Rows of `results/ablation_loss_*.csv`."""


@cache
def changes_of(settings: type[Any], *names: str) -> type[BaseModel]:
    """A model with the keys of `settings`, or with `names` of them; each may be left out, also within sections."""
    hints = get_type_hints(settings, include_extras=True)
    described = adapter(settings).json_schema()["properties"]
    fields: dict[str, Any] = {}
    for name in names or [field.name for field in dataclasses.fields(settings)]:
        hint = changes_of(hints[name]) if name in SECTIONS_OF_PHI else hints[name]
        fields[name] = (hint, Field(None, description=described[name].get("description")))
    return create_model(f"Changes of {settings.__name__}", __config__=Settings.__pydantic_config__, **fields)


VariantChanges = Annotated[
    changes_of(Phi, "map", "objective"),
    AfterValidator(lambda changes: changes.model_dump(mode="json", exclude_unset=True)),
]


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
    """Whether to run without network, from the assets folder and the hub's cache, which the target `prefetch` fills."""
    backbones: Annotated[dict[ShortName, RegisteredBackbone], Field(min_length=1)]
    """Language models by the short name that file names carry."""
    variants: dict[Label, VariantChanges]
    """Feature maps that the ablations train beside the study's own, by label: what each changes of `phi.map` and
    `phi.objective`."""
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


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(root: Path, main: Mapping[str, Any]) -> Configuration:
    """The configuration of a checkout.

    Args:
        main: config/config.yaml with what the command line changed.

    Raises:
        ValueError: a file is not YAML, or a key is unknown, missing or wrong, or contradicts another; one line that
            names file, key and remedy.
    """
    files = {path.stem: path for path in sorted((root / "config/studies").glob("*.yaml"))}
    for name in files:
        if not re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_-]*", name) or name == PUBLISHED:
            allowed = f"has letters, digits, _ and - only and is not {PUBLISHED}"
            raise ValueError(f"config/studies: '{name}.yaml': a study's name {allowed}; rename it")
    checked = _from_file("configuration", Main, dict(main))
    studies = {name: _from_file(file_of(name), Study, _yaml(path)) for name, path in files.items()}
    configuration = Configuration(checked, studies)
    for where, problems in (
        ("config/config.yaml: ", _problems_of_main(configuration)),
        *((f"{file_of(name)}: ", _problems_of_study(configuration, name)) for name in studies),
    ):
        if problem := next(problems, None):
            raise ValueError(f"{where}{problem}")
    return configuration


def file_of(study: str) -> str:
    """The file of a study, as messages name it."""
    return f"config/studies/{study}.yaml"


def _from_file(where: str, settings: type[Parsed], data: Any) -> Parsed:
    try:
        return parsed(settings, data)
    except ConfigError as error:
        raise ValueError(f"{where}: {error}") from None


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file_of(path.stem)}: not valid YAML: {' '.join(str(error).split())}") from None


# ---- what no key says alone ------------------------------------------------------------------------------------------
# Only what would end a run after hours, or not in one line: other mistakes end it when Snakemake looks for its jobs.


def _problems_of_main(configuration: Configuration) -> Iterator[ConfigError]:
    main, studies = configuration.main, configuration.studies
    yield from _unknown("study", [main.study], studies)
    for table in ("dphi", "loss"):
        yield from _unknown(f"ablations.{table}", getattr(main.ablations, table), ["ours", *main.variants])
    if "ours" in main.variants:
        yield ConfigError("variants.ours", "the name of a study's own recipe; rename the variant")
    for name, backbone in main.backbones.items():
        yield from _unknown(f"backbones.{name}.study", [backbone.study], studies)
        longest = max(studies[backbone.study].all_lengths, key=tokens_of)
        if tokens_of(longest) > backbone.context:
            problem = f"{backbone.context} tokens, but study {backbone.study} has the length {longest}"
            yield ConfigError(f"backbones.{name}.context", problem)
        if (owner := main.backbones[configuration.tokenizer_owner(backbone.tokenizer)]).study != backbone.study:
            problem = f"{backbone.tokenizer} is of study {owner.study}; backbones share one within a study"
            yield ConfigError(f"backbones.{name}.tokenizer", problem)
        if backbone.source == "hub" and not re.fullmatch("[0-9a-f]{40}", backbone.revision):
            problem = f"{backbone.revision} may move; write the commit, 40 digits and letters a to f"
            yield ConfigError(f"backbones.{name}.revision", problem)
    if not configuration.backbones_of(main.study):
        yield ConfigError("backbones", f"study {main.study} has none; give one `study: {main.study}`")


def _problems_of_study(configuration: Configuration, name: str) -> Iterator[ConfigError]:
    study, backbones = configuration.studies[name], configuration.backbones_of(name)
    for key, values, options in _choices(configuration.main, study, backbones):
        yield from _unknown(key, values, options)
    for benchmark in study.benchmarks:
        for length in study.lengths_of(benchmark):
            try:
                tasks_of(benchmark, tokens_of(length))
            except ValueError as error:
                yield ConfigError(f"benchmarks.{benchmark}", str(error))
    for length in (*study.evaluated_lengths, study.truncate_to):
        if tokens_of(length) > tokens_of(study.maps.main):
            problem = f"{study.maps.main} is what the maps are trained on, but the study has the length {length}"
            yield ConfigError("maps.main", problem)
    yield from _problems_of_ablations(study)
    yield from _problems_of_tables(study)


def _choices(main: Main, study: Study, backbones: list[str]) -> Iterator[tuple[str, Iterable[Any], Iterable[Any]]]:
    """Keys with their values, and the options that these are among."""
    forced, mismatch, ablations, compared = study.fidelity, study.mismatch, study.ablations, study.residuals
    for section in ("mismatch", "ablations", "diagnostics", "residuals"):
        yield f"{section}.backbones", getattr(study, section).backbones, backbones
    yield "methods", study.methods, methods.names()
    others = [one.name for one in methods.METHODS if not one.of_the_paper and one.name not in study.methods]
    yield "fidelity.methods", forced.methods, others
    yield "fidelity.benchmarks", forced.benchmarks, study.benchmarks
    yield "fidelity.prompts_at", forced.prompts_at, forced.lengths
    yield "residuals.methods", compared.methods, [one.name for one in methods.METHODS if not one.whole_prefix]
    yield "diagnostics.budget", [study.diagnostics.budget], study.budgets
    if mismatch.backbones:
        yield "mismatch.maps", mismatch.maps, study.maps.trained
        yield "mismatch.lengths", mismatch.lengths, study.lengths_of("ruler")
        yield "mismatch.budget", [mismatch.budget], study.budgets
    if ablations.backbones:
        yield "ablations.benchmarks", ablations.benchmarks, study.benchmarks
        for lengths in (study.maps.trained, *map(study.lengths_of, ablations.benchmarks)):
            yield "ablations.length", [ablations.length], lengths
        yield "ablations.budget", [ablations.budget], study.budgets
    yield "tables", study.tables, tables_for(backbones)
    if "residual_estimators" in study.tables:
        yield "residuals.budgets, as residual_estimators shows", study.budgets, compared.budgets
    for label, figure in study.figures.items():
        texts = compared.corpora if label in RESIDUAL_FIGURES else (*forced.corpora, *forced.benchmarks)
        whose = {KERNEL_FIDELITY: ablations.backbones} | dict.fromkeys(RESIDUAL_FIGURES, compared.backbones)
        options = {"text": texts, "backbone": whose.get(label, backbones), "variant": main.variants}
        for key in ("text", "texts", "backbone", "backbones", "variants"):
            yield f"figures.{label}.{key}", figure.of(key), options[key.removesuffix("s")]


def _problems_of_ablations(study: Study) -> Iterator[ConfigError]:
    length = study.ablations.length
    for benchmark in study.ablations.benchmarks if study.ablations.backbones else ():
        real = study.benchmarks[benchmark].budget_length == "real"
        if real and tokens_of(study.truncate_to) > tokens_of(length):
            yield ConfigError(
                "ablations.benchmarks",
                f"prompts of {benchmark} are up to truncate_to ({study.truncate_to}) long, beyond ablations.length "
                f"({length}), which the maps are trained on; take {benchmark} out",
            )
    shortest = min(study.maps.trained, key=tokens_of)
    if (start := study.phi.curriculum) and tokens_of(start.length) > tokens_of(shortest):
        yield ConfigError("phi.curriculum.length", f"{start.length} is beyond the trained length {shortest}")


def _problems_of_tables(study: Study) -> Iterator[ConfigError]:
    """In what tables need of other sections."""
    from residual_mass.paper.tables import RUNTIME, TABLES  # only here: tables are told what they show by specs

    forced, compared = study.fidelity, study.residuals
    sections = {"mismatch": "mismatch", "diagnostics": "diagnostics", "residuals": "residuals"}
    sections |= dict.fromkeys(("dphi", "loss"), "ablations")
    shown = {label: TABLES[RUNTIME if label.startswith(RUNTIME) else label].of for label in study.tables}
    for label, of in shown.items():
        if of in sections and not getattr(study, sections[of]).backbones:
            yield ConfigError("tables", f"{label} needs a backbone in {sections[of]}.backbones")
        if of == "fidelity" and not (forced.lengths and forced.corpora):
            yield ConfigError("tables", f"{label} needs a length in fidelity.lengths and a text in fidelity.corpora")
        if of == "answers" and not any(map(study.answered_lengths, forced.benchmarks)):
            yield ConfigError("tables", f"{label} needs one of fidelity.benchmarks at one of fidelity.prompts_at")
    shared = {*compared.lengths} & {*forced.lengths}, {*compared.corpora} & {*forced.corpora}
    if "deployable" in shown and not all(shared):
        yield ConfigError("tables", "deployable needs a length and a text of residuals that fidelity has, too")
    if "natural_main" in shown and len(study.lengths_of("longbench")) != 1:
        yield ConfigError("tables", "natural_main shows one length of longbench; give benchmarks.longbench.lengths one")
    needed = METHODS if set(shown.values()) - {"fidelity", "answers", "residuals"} else ()
    if study.mismatch.backbones or study.ablations.backbones:
        needed = needed or METHODS[:3]
    for method in (method for method in needed if method not in study.methods):
        yield ConfigError("methods", f"{method} is missing, which tables of the paper, mismatch and ablations show")


def _unknown(key: str, values: Iterable[Any], options: Iterable[Any]) -> Iterator[ConfigError]:
    """A problem for every value that is not among the options."""
    options = list(options)
    known = ", ".join(f"{option:g}" if isinstance(option, float) else option for option in options) or "none"
    for value in (value for value in values if value not in options):
        yield ConfigError(key, f"{f'{value:g}' if isinstance(value, float) else value} is not one of {known}")


def tables_for(backbones: Iterable[str]) -> list[str]:
    """Labels of the tables that a study of these backbones may show."""
    from residual_mass.paper.tables import RUNTIME, TABLES  # only here, for tables are told what they show by specs

    return [*(label for label in TABLES if label != RUNTIME), *(f"{RUNTIME}{backbone}" for backbone in backbones)]
