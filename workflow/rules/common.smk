"""Configuration, its checks, and the functions that give rules their inputs, specs and resources; no rules."""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jsonschema
import referencing
import yaml
from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.core import estimators
from residual_mass.diagnostics import CWE
from residual_mass.estimate import planned
from residual_mass.files import write_text
from residual_mass.inputs.assets import read_pins
from residual_mass.machine import preflight, slurm
from residual_mass.paper import published as of_the_paper
from residual_mass.paper import typesetting
from residual_mass.paper.comparison.by_cell import COMPARED as COMPARED_TABLES
from residual_mass.paper.published.protocol import settings_of
from residual_mass.paper.tables.accounting_table import LABEL as ACCOUNTING_TABLE
from residual_mass.paper.tables.layouts import LAYOUTS
from residual_mass.paper.tables.parameter_table import LABEL as PARAMETER_TABLE
from residual_mass.paper.tables.runtime_table import PREFIX as LATENCIES
from residual_mass.paper.tables.training_cost_table import LABEL as TRAINING_TABLE
from residual_mass.prefetch import missing
from residual_mass.prefetch.needs import hub_needs
from residual_mass.recipes import RECIPES
from residual_mass.spec_json import parse_spec, parsed, to_json
from residual_mass.specs import (
    METHODS,
    AuditSpec,
    BackboneSpec,
    CaptureSpec,
    ComparisonSpec,
    DoctorSpec,
    DocumentSpec,
    EstimateSpec,
    FigureSpec,
    FindingsSpec,
    GenerateSpec,
    KernelsSpec,
    MapErrorsSpec,
    MapSpec,
    NumbersSpec,
    ObjectiveSpec,
    PromptsSpec,
    ReplaySpec,
    ReportSpec,
    RuntimeSpec,
    ScoreSpec,
    TableSpec,
    TrainSpec,
    decoding_words,
    length_and_variant,
    maps_label,
    tokens_of,
)

# ---- configuration ---------------------------------------------------------------------------------------------------


SCHEMAS = {
    path.name: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in (ROOT / "workflow/schemas").glob("*.schema.yaml")
}
REGISTRY = referencing.Registry().with_contents(SCHEMAS.items())


def checked(data: Any, schema: str, where: str) -> Any:
    """`data` if it fits the schema, else the end of the run in one line."""
    for text in texts_in(data):
        if re.search(r"[\x00-\x1f\x7f]", text):  # a pattern of a schema lets a line break at the end pass
            sys.exit(f"{where}: {text!r} has a line break or another control character; write it without")
    validator = jsonschema.Draft202012Validator(SCHEMAS[f"{schema}.schema.yaml"], registry=REGISTRY)
    error = jsonschema.exceptions.best_match(validator.iter_errors(data))
    if error is not None:
        key = ".".join(map(str, error.absolute_path))
        sys.exit(f"{where}: {key}{': ' * bool(key)}{error.message}; config/README.md explains the keys")
    return data


def texts_in(data: Any) -> Iterator[str]:
    """Every key and every text."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, list):
        yield from itertools.chain.from_iterable(map(texts_in, data))
    elif isinstance(data, dict):
        yield from itertools.chain.from_iterable(map(texts_in, (*data, *data.values())))


def load_study(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        sys.exit(f"{path.relative_to(ROOT)}: not valid YAML: {' '.join(str(error).split())}")
    return checked(data, "study", str(path.relative_to(ROOT)))


def contradictions() -> Iterator[str]:
    """What the schemas cannot see, one line each."""
    for backbone in BACKBONES.values():
        where = f"config/config.yaml: backbones.{backbone.name}"
        if backbone.study not in STUDIES:
            yield f"{where}.study: {backbone.study!r} is not a study; known are {', '.join(STUDIES)}"
            continue
        study = STUDIES[backbone.study]
        longest = [study["truncate_to"], *study["maps"]["trained"], *study["diagnostics"]["lengths"]]
        longest += study["runtime"]["contexts"]
        for length in (*evaluated_lengths(study), *longest):
            if tokens_of(length) > backbone.context:
                yield f"{where}.context: {backbone.context} tokens, but study {backbone.study} has the length {length}"
        if (other := tokenizer_owner(backbone.tokenizer)).study != backbone.study:
            yield f"{where}.tokenizer: {backbone.tokenizer} is of study {other.study}; backbones share one within a study"
        if backbone.source == "hub" and not re.fullmatch("[0-9a-f]{40}", backbone.revision):
            yield f"{where}.revision: {backbone.revision} may move; write the commit, 40 digits and letters a to f"
    for name in (name for name in STUDIES if not re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_-]*", name)):
        yield f"config/studies: {f'{name}.yaml'!r}: a study's name has letters, digits, _ and - alone; rename the file"
    if PUBLISHED in STUDIES:
        yield f"config/studies/{PUBLISHED}.yaml: that name is for the tables with the paper's own values; rename the study"
    if config["study"] not in STUDIES:
        yield f"study {config['study']!r} is not known; known are {', '.join(STUDIES)} (config/studies)"
    elif not backbones_of(config["study"]):
        yield f"study {config['study']} has no backbone; give one `study: {config['study']}` in config/config.yaml"
    for name, rows in config["ablations"].items():
        if strange := sorted(set(rows) - {"ours", *config["variants"]}):
            yield f"configuration: ablations.{name}: {strange[0]} is not ours and not one of {', '.join(config['variants'])}"
    for label in (label for label, changes in config["recipes"].items() if "seed" in changes):
        yield f"configuration: recipes.{label}.seed: seeds are those of recipes.seeds in config/studies; remove it"
    for name in STUDIES:
        yield from study_contradictions(name)


def study_contradictions(name: str) -> Iterator[str]:
    where, study = f"config/studies/{name}.yaml", STUDIES[name]
    if study["maps"]["main"] not in study["maps"]["trained"]:
        yield f"{where}: maps.main: {study['maps']['main']} is not among maps.trained"
    for benchmark in study["benchmarks"]:
        for length in benchmark_lengths(study, benchmark):
            try:
                tasks_of(benchmark, tokens_of(length))
            except ValueError as error:
                yield f"{where}: benchmarks.{benchmark}: {error}"
    yield from comparison_contradictions(name)
    yield from training_contradictions(name)
    longest = tokens_of(study["maps"]["main"])
    used = [*evaluated_lengths(study), *study["diagnostics"]["lengths"]]
    lengths = [(f"length {length}", length) for length in used]
    for what, length in [*lengths, (f"truncate_to: {study['truncate_to']}", study["truncate_to"])]:
        if tokens_of(length) > longest:
            yield f"{where}: {what} is beyond maps.main ({study['maps']['main']}), which the maps were trained on"
    for method in (method for method in study["methods"] if method not in estimators.NAMES):
        yield f"{where}: methods: {method} is not one of {', '.join(estimators.NAMES)}"
    if study["tables"] and not set(study["methods"]) >= set(METHODS):
        yield f"{where}: tables show every method of the paper; have {', '.join(METHODS)} in methods, or tables empty"
    if "natural_main" in study["tables"] and len(benchmark_lengths(study, "longbench")) != 1:
        yield f"{where}: tables: natural_main shows one length of longbench; give benchmarks.longbench.lengths one"
    for label, key in (
        ("cross_length_mismatch", "mismatch"),
        ("dphi_ablation", "ablations"),
        ("loss_ablation", "ablations"),
        (ACCOUNTING_TABLE, "diagnostics"),
    ):
        if label in study["tables"] and not study[key]["backbones"]:
            yield f"{where}: tables: {label} needs a backbone in {key}.backbones"
    latencies = [f"{LATENCIES}{backbone}" for backbone in backbones_of(name)]
    of_paper = [label for label in of_the_paper.labels() if not label.startswith(LATENCIES)]
    made = list(dict.fromkeys([*of_paper, *LAYOUTS, *latencies]))
    for label in (label for label in study["tables"] if label not in made):
        yield f"{where}: tables: {label} is not one of {', '.join(made)}"
    yield from diagnostics_contradictions(name)


def diagnostics_contradictions(name: str) -> Iterator[str]:
    """Slips in what a study captures, and in what its figures show."""
    where, study = f"config/studies/{name}.yaml", STUDIES[name]
    captured, ablations = study["diagnostics"], study["ablations"]
    for backbone in captured["backbones"]:
        if backbone not in backbones_of(name):
            yield f"{where}: diagnostics.backbones: {backbone} is not one of {', '.join(backbones_of(name))}"
    if captured["budget"] not in study["budgets"]:
        yield f"{where}: diagnostics.budget: {captured['budget']:g} is not one of {', '.join(map(str, study['budgets']))}"
    if captured["corpora"][0] == CWE:
        yield f"{where}: diagnostics.corpora: {CWE} comes first, where the text that all maps are compared on belongs"
    for length in captured["lengths"] if CWE in captured["corpora"] else ():
        if length not in benchmark_lengths(study, "ruler"):
            yield (
                f"{where}: diagnostics.corpora: {CWE} is made of RULER's prompts, which the study does not have at "
                f"{length}; take {CWE} out, or evaluate ruler there"
            )
    if FIDELITY in study["figures"] and ablations["length"] not in captured["lengths"]:
        yield f"{where}: figures.{FIDELITY}: needs ablations.length ({ablations['length']}) in diagnostics.lengths"
    options = {
        "backbone": backbones_of(name),
        "corpus": captured["corpora"],
        "length": captured["lengths"],
        "maps": study["maps"]["trained"],
        "variants": list(config["variants"]),
    }
    options |= {"backbones": options["backbone"], "corpora": options["corpus"], "lengths": options["length"]}
    for label, figure in study["figures"].items():
        if label == COSTS:
            options |= {"backbone": study["recipes"]["backbones"]}
        elif label == FIDELITY:
            options |= {"backbone": ablations["backbones"]}
        else:
            options |= {"backbone": backbones_of(name)}
        for key, shown in figure.items():
            for value in shown if isinstance(shown, list) else [shown]:
                if value not in options[key]:
                    known_ones = ", ".join(options[key]) or "none"
                    yield f"{where}: figures.{label}.{key}: {value!r} is not one of {known_ones}"
        panels = len(figure.get("corpora", ())) * len(figure.get("lengths", ()))
        if panels > MOST_PANELS:
            yield (
                f"{where}: figures.{label}: corpora and lengths make {panels} panels, but it has room for "
                f"{MOST_PANELS}; show fewer of them"
            )


def training_contradictions(name: str) -> Iterator[str]:
    """Slips in how a study trains, its recipes included."""
    where, study = f"config/studies/{name}.yaml", STUDIES[name]
    recipes = study["recipes"]
    for key, options in (
        ("names", config["recipes"]),
        ("backbones", backbones_of(name)),
        ("lengths", study["maps"]["trained"]),
    ):
        for value in (value for value in recipes[key] if value not in options and recipes["backbones"]):
            yield f"{where}: recipes.{key}: {value} is not one of {', '.join(options)}"
    trainings = [("phi", study["phi"], study["maps"]["trained"])]
    for label, changes in config["recipes"].items() if backbones_of(name) else ():
        lengths = recipes["lengths"] if label in recipes["names"] and recipes["backbones"] else []
        trainings.append((f"phi, as recipe {label} changes it", changed_phi(study, changes), lengths))
    for what, phi, lengths in trainings:
        if phi["sequences_per_step"] % phi["gpus"]:
            yield (
                f"{where}: {what}: sequences_per_step ({phi['sequences_per_step']}) is not a multiple of gpus "
                f"({phi['gpus']}), which share them out; change one of the two"
            )
        short = phi["curriculum"] and min(lengths, key=tokens_of, default=None)
        if short and tokens_of(phi["curriculum"]["length"]) > tokens_of(short):
            yield f"{where}: {what}: curriculum.length ({phi['curriculum']['length']}) is beyond the trained length {short}"


def changed_phi(study: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A study's phi with what a recipe changes of it: key by key, one level deeper in map, objective and replay."""
    phi = study["phi"]
    return phi | changes | {key: phi[key] | changes.get(key, {}) for key in ("map", "objective", "replay")}


def comparison_contradictions(name: str) -> Iterator[str]:
    """Slips in what a study compares maps on: names and points that it does not have elsewhere."""
    where, study = f"config/studies/{name}.yaml", STUDIES[name]
    mismatch, ablations = study["mismatch"], study["ablations"]
    options = []
    if mismatch["backbones"]:
        options += [
            ("mismatch.backbones", mismatch["backbones"], backbones_of(name)),
            ("mismatch.maps", mismatch["maps"], study["maps"]["trained"]),
            ("mismatch.lengths", mismatch["lengths"], benchmark_lengths(study, "ruler")),
            ("mismatch.budget", [mismatch["budget"]], study["budgets"]),
        ]
    if ablations["backbones"]:
        options += [
            ("ablations.backbones", ablations["backbones"], backbones_of(name)),
            ("ablations.benchmarks", ablations["benchmarks"], study["benchmarks"]),
            ("ablations.length", [ablations["length"]], study["maps"]["trained"]),
            ("ablations.budget", [ablations["budget"]], study["budgets"]),
        ]
        for benchmark in (name for name in ablations["benchmarks"] if name in study["benchmarks"]):
            options.append(("ablations.length", [ablations["length"]], benchmark_lengths(study, benchmark)))
            real = study["benchmarks"][benchmark]["budget_length"] == "real"
            if real and tokens_of(study["truncate_to"]) > tokens_of(ablations["length"]):
                yield (
                    f"{where}: ablations.benchmarks: prompts of {benchmark} are up to truncate_to "
                    f"({study['truncate_to']}) long, beyond ablations.length ({ablations['length']}), which the maps "
                    f"are trained on; take {benchmark} out"
                )
    if options and (lacking := {"full", "topk", "topk_phi"} - set(study["methods"])):
        yield f"{where}: methods: {min(lacking)} is missing, which mismatch and ablations compare with"
    for key, values, known_ones in options:
        for value in (value for value in values if value not in known_ones):
            yield f"{where}: {key}: {value} is not one of {', '.join(map(str, known_ones))}"


def evaluated_lengths(study: dict[str, Any]) -> list[str]:
    """Every length at which a study evaluates something."""
    lengths = [length for benchmark in study["benchmarks"] for length in benchmark_lengths(study, benchmark)]
    return list(dict.fromkeys([*study["lengths"], *lengths]))


def benchmark_lengths(study: dict[str, Any], benchmark: str) -> list[str]:
    """Lengths at which a study evaluates a benchmark."""
    if benchmark not in study["benchmarks"]:
        return []
    return study["benchmarks"][benchmark]["lengths"] or study["lengths"]


def backbones_of(study: str) -> list[str]:
    return [backbone.name for backbone in BACKBONES.values() if backbone.study == study]


def tokenizer_owner(tokenizer: str) -> BackboneSpec:
    """The first backbone with the tokenizer; the prompts that all of them share are built with its settings."""
    return next(backbone for backbone in BACKBONES.values() if backbone.tokenizer == tokenizer)


COSTS = "recipe_costs"
"""The figure that shows recipes, which `all` does not train."""
FIDELITY = "ablation_kernel_fidelity"
"""The figure that shows the maps of the ablations, at their length."""
PUBLISHED = "published"
"""The folder of the tables with the paper's own values, where others have their study."""
MOST_PANELS = 6
"""Panels that a figure with one for every corpus and length has room for."""

if str(config.get("offline")).lower() in ("true", "false"):  # on the command line Snakemake takes true for a word
    config["offline"] = str(config["offline"]).lower() == "true"
checked(config, "config", "configuration")
STUDIES = {path.stem: load_study(path) for path in sorted((ROOT / "config/studies").glob("*.yaml"))}
BACKBONES = {
    name: BackboneSpec(name=name, **{key: value for key, value in entry.items() if key != "title"})
    for name, entry in config["backbones"].items()
}
ASSETS = Path(config["assets"], "manifest.json")
if (contradiction := next(contradictions(), None)) is not None:
    sys.exit(contradiction)

# ---- what file names may say -----------------------------------------------------------------------------------------


def known(kind: str, value: str, options: Iterable[str], where: str) -> str:
    """`value` if it is among the options, else the end of the run in one line."""
    if value not in (options := list(options)):
        sys.exit(f"{kind} {value!r} is not in {where}, which has {', '.join(options)}")
    return value


def backbone_of(wildcards: Any) -> BackboneSpec:
    return BACKBONES[known("backbone", wildcards.backbone, BACKBONES, "config/config.yaml")]


def study_of(wildcards: Any) -> dict[str, Any]:
    """The protocol of the wildcards' backbone, after a check of every other wildcard against it."""
    name = backbone_of(wildcards).study
    study, where = STUDIES[name], f"config/studies/{name}.yaml"
    if "benchmark" in wildcards.keys():
        known("benchmark", wildcards.benchmark, study["benchmarks"], where)
        lengths = benchmark_lengths(study, wildcards.benchmark)
    elif "corpus" in wildcards.keys():
        lengths = study["diagnostics"]["lengths"]
    else:
        lengths = list(dict.fromkeys([*study["mismatch"]["lengths"], study["ablations"]["length"], *study["lengths"]]))
    options = {
        "length": lengths,
        "maps": study["maps"]["trained"],
        "corpus": study["diagnostics"]["corpora"],
    }
    for kind in (kind for kind in options if kind in wildcards.keys()):
        known(kind, wildcards[kind], options[kind], where)
    if "comparison" in wildcards.keys():
        known("comparison", wildcards.comparison, ["mismatch", *config["ablations"]], "config/config.yaml")
    if "recipe" in wildcards.keys():
        known("recipe", wildcards.recipe, config["recipes"], "config/config.yaml")
    if "tasks" in wildcards.keys():
        known("task file", wildcards.tasks, task_files(study, wildcards.benchmark, wildcards.length), where)
    return study


def task_files(study: dict[str, Any], benchmark: str, length: str) -> tuple[str, ...]:
    """How the tasks are dealt out to generate jobs."""
    whole = study["benchmarks"][benchmark]["tasks_per_job"] == "all"
    return ("all",) if whole else tasks_of(benchmark, tokens_of(length))
