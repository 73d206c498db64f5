"""What a table says beside its cells: where every value comes from, and the notes that close its caption."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from residual_mass.paper.published import MODELS
from residual_mass.paper.results import Result, Score
from residual_mass.specs import TableSpec

TITLES = {"ruler": "RULER", "babilong": "BABILong"}


@dataclass(frozen=True)
class Caption:
    """Plain text, to be escaped where it is printed."""

    header: tuple[str, ...]
    notes: tuple[str, ...]
    backbone_titles: dict[str, str]


def title_of(benchmark: str) -> str:
    return TITLES.get(benchmark, benchmark)


def caption_of_results(spec: TableSpec, results: list[Result], scores: list[Score], left_out: list[str]) -> Caption:
    """Caption of a table whose benchmarks `left_out` the study does not evaluate.

    Raises:
        ValueError: two files disagree on what a backbone is.
    """
    models = _models(results)
    width = max((score.high - score.low) / 2 for score in scores)
    notes = [
        f"Study {spec.study}, backbone {', '.join(result.model_id for result in models.values())}.",
        *_warnings(models.values()),
        f"Examples per value: {'; '.join(_sizes(results, len(spec.backbones)))}.",
        f"Largest half-width of a 95% bootstrap interval over examples: {width:.3f}.",
    ]
    if left_out:
        notes.append(f"A dash stands for what the study does not evaluate ({', '.join(map(title_of, left_out))}).")
    titles = {name: spec.backbone_titles.get(name, model.model_id.split("/")[-1]) for name, model in models.items()}
    return Caption(tuple(_header(spec, results)), tuple(notes), titles)


def _models(results: Iterable[Result]) -> dict[str, Result]:
    """The first file of each backbone, all its others having the same model."""
    models: dict[str, Result] = {}
    for result in results:
        first = models.setdefault(result.backbone, result)
        for name in ("model_id", "revision", "weights"):
            if (ours := getattr(result, name)) != (other := getattr(first, name)):
                raise ValueError(f"{result.path}: {name} is {ours!r}, but {first.path} has {other!r}; rerun the older")
    return models


def _warnings(models: Iterable[Result]) -> list[str]:
    models = list(models)
    warnings = []
    if random := [model.model_id for model in models if model.weights == "random"]:
        warnings.append(
            f"Random weights ({', '.join(random)}): such values exercise the code and say nothing of a method."
        )
    if others := [model.model_id for model in models if model.model_id not in MODELS.values()]:
        warnings.append(
            f"The paper does not evaluate {', '.join(others)}; the values are not comparable with the paper's."
        )
    return warnings


def _sizes(results: Iterable[Result], backbones: int) -> Iterable[str]:
    """Examples and tasks behind a cell, once per benchmark and length; names the backbone only where they differ."""
    holders: dict[str, list[str]] = {}
    for result in results:
        size = f"{title_of(result.benchmark)} {result.length}: {result.examples} from {result.tasks} tasks"
        holders.setdefault(size, []).append(result.backbone)
    return [size if len(of) == backbones else f"{size} ({', '.join(of)})" for size, of in holders.items()]


def _header(spec: TableSpec, results: Iterable[Result]) -> Iterable[str]:
    yield f"Table {spec.label} of study {spec.study}; generated, changes are overwritten."
    for result in results:
        maps = ", ".join(sha[:12] for sha in result.phi_shas) or "none"
        yield (
            f"{result.path.name}: {result.model_id} at {result.revision}, {result.weights} weights, phi maps {maps}, "
            f"{result.tasks} tasks, n = {result.examples} per cell"
        )


def caption_of_published(spec: TableSpec) -> Caption:
    return Caption(
        header=(f"Table {spec.label} with the values that the paper prints; none was computed here.",),
        notes=("All values are the paper's own (Hoshi, Miyashita and Deguchi); none was computed here.",),
        backbone_titles={name: MODELS[name].split("/")[-1] for name in spec.backbones},
    )
