"""What a table says beside its cells: where every value comes from, and the notes that close its caption."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from residual_mass.benchmarks.catalogue import CEILING, FLOOR, LEVEL, POWER
from residual_mass.paper.cells import ALL_TASKS, Point
from residual_mass.paper.latex import Latex, escape
from residual_mass.paper.published import MODELS, model_title
from residual_mass.paper.readers.results import Result, Score
from residual_mass.paper.tables.content import ALPHA, Content
from residual_mass.paper.tables.tally import Tally, tally_by_family
from residual_mass.paper.titles import OWN_ROW, PHI, TOPK, backbone_title, benchmark_title, task_title
from residual_mass.study.specs import TableSpec

NAMED_ALARMS = 3
"""A caption names so many cells that beat full attention, and counts the others."""
KIND_NOTES = {
    "simulated": "simulated, which means made here after the benchmark's definition",
    "stand-in": "stand-in, which means other real text in the benchmark's format",
}


OF_THE_PAPER = "All values are the paper's own (Hoshi, Miyashita and Deguchi); none was computed here."


@dataclass(frozen=True)
class Caption:
    """Plain text or LaTeX; plain text is escaped where it is printed."""

    header: tuple[str, ...]
    notes: tuple[str, ...]
    backbone_titles: dict[str, str]


def caption_of_results(spec: TableSpec, results: list[Result], content: Content) -> Caption:
    """Raises ValueError when two files disagree on what a backbone or its feature maps are."""
    models = _models(results)
    notes = [
        f"Study {spec.study}, backbone {', '.join(result.model_id for result in models.values())}.",
        *model_warnings((model.model_id, model.weights) for model in models.values()),
        *_kinds(content),
        f"Examples per value: {'; '.join(_sizes(results, content.scores, len(spec.backbones)))}.",
        *_cuts(content.scores, len(spec.backbones)),
        *_own_rows(content),
        *_uncertainty(content),
        *_tallies(content),
        *_flagged(content.scores),
        *_full_at_floor(results, content, len(spec.backbones)),
        *_left_out(content),
    ]
    titles = {name: backbone_title(spec, name, model.model_id) for name, model in models.items()}
    return Caption(tuple(_header(spec, results)), tuple(notes), titles)


def caption_of_published(spec: TableSpec, content: Content) -> Caption:
    return Caption(
        header=(header_of_published(spec.label),),
        notes=(OF_THE_PAPER, *_tallies(content)),
        backbone_titles={name: model_title(name) for name in spec.backbones},
    )


def header_of_published(label: str) -> str:
    return f"Table {label} with the values that the paper prints; none was computed here."


def header_of_study(spec: TableSpec) -> str:
    return f"Table {spec.label} of study {spec.study}; generated, changes are overwritten."


def _models(results: Iterable[Result]) -> dict[str, Result]:
    """The first file of each backbone, all its others having the same model and the same feature maps."""
    models: dict[str, Result] = {}
    maps: dict[tuple[str, str], tuple[str, Result]] = {}
    for result in results:
        first = models.setdefault(result.backbone, result)
        for name in ("model_id", "revision", "weights"):
            if (ours := getattr(result, name)) != (other := getattr(first, name)):
                raise ValueError(f"{result.path}: {name} is {ours!r}, but {first.path} has {other!r}; rerun the older")
        for label, sha in result.phi_shas.items():
            other, holder = maps.setdefault((result.backbone, label), (sha, result))
            if sha != other:
                raise ValueError(
                    f"{result.path}: phi_sha of maps {label} is {sha!r}, but {holder.path} has {other!r}; "
                    "rerun the older"
                )
    return models


def model_warnings(models: Iterable[tuple[str, str]]) -> Iterator[str]:
    """What a reader must know of these models, given by id and weights, before the values."""
    models = list(models)
    if random := dict.fromkeys(model_id for model_id, weights in models if weights == "random"):
        yield f"Random weights ({', '.join(random)}): such values exercise the code and say nothing of a method."
    yield from not_evaluated(model_id for model_id, _ in models)


def not_evaluated(model_ids: Iterable[str]) -> Iterator[str]:
    """Names the models that are not the paper's."""
    if others := dict.fromkeys(model_id for model_id in model_ids if model_id not in MODELS.values()):
        yield f"The paper does not evaluate {', '.join(others)}; the values are not comparable with the paper's."


def _kinds(content: Content) -> Iterator[str]:
    """Owns up to examples that are not the benchmark's own."""
    for kind, meaning in KIND_NOTES.items():
        points = [point for point, score in content.scores.items() if kind in score.data]
        if points:
            yield f"Examples of {', '.join(dict.fromkeys(map(_name, points)))} are {meaning}."


def _sizes(results: Iterable[Result], scores: Mapping[Point, Score], backbones: int) -> Iterable[str]:
    """Examples behind a value, once per benchmark or task and length."""
    sizes = []
    for result in results:
        for task in dict.fromkeys(point.task for point in scores if place_of(point) == place_of(result)):
            size = f"{task_title(result.benchmark, task)} {result.length}: {result.examples(task)}"
            size += f" from {len(result.tasks)} tasks" if task == ALL_TASKS else ""
            sizes.append((size, result.backbone))
    return _shared(sizes, backbones)


def _cuts(scores: Mapping[Point, Score], backbones: int) -> Iterator[str]:
    """Share of truncated prompts, once per benchmark or task and length: it is the same for all arms of an example."""
    cuts = dict.fromkeys(
        (f"{_name(point)} {point.length} {score.cut_share:.1%}", point.backbone)
        for point, score in scores.items()
        if score.cut_share > 0
    )
    if cuts:
        yield f"Prompts cut to the context: {'; '.join(_shared(cuts, backbones))}."


def _shared(facts: Iterable[tuple[str, str]], backbones: int) -> Iterator[str]:
    """Each (fact, backbone) once for all backbones; names them only where they differ."""
    holders: dict[str, list[str]] = {}
    for fact, backbone in facts:
        holders.setdefault(fact, []).append(backbone)
    for fact, of in holders.items():
        yield fact if len(of) == backbones else f"{fact} ({', '.join(of)})"


def _uncertainty(content: Content) -> Iterator[str]:
    width = max((score.high - score.low) / 2 for score in content.scores.values())
    yield f"Largest half-width of a {LEVEL:.0%} bootstrap interval over examples: {width:.3f}."
    if not content.adjusted:
        return
    above, below = (sum(cell.gain == side for cell in content.cells.values()) for side in ("above", "below"))
    survive = above + below
    yield Latex(
        f"Of {len(content.adjusted)} paired comparisons with {TOPK} at the same budget, {survive or 'none'} "
        f"{'remains' if survive == 1 else 'remain'} at $p < {ALPHA:g}$ after Holm's correction over this table"
        + (rf" ({above} above, $\dagger$; {below} below, $\ddagger$)." if survive else ".")
    )
    detectable = (content.scores[point].mde for point in content.adjusted)
    if known := [each for each in detectable if each is not None]:
        yield (
            f"Median smallest gain that so many examples would show (one comparison, two-sided {1 - LEVEL:.0%}, power "
            f"{POWER:.0%}): {statistics.median(known):.3f}."
        )


def _tallies(content: Content) -> Iterator[str]:
    for family, counted in tally_by_family(content.texts).items():
        yield Latex(f"{escape(family)}: {_tally(counted)}")


def _tally(counted: Tally) -> Latex:
    return Latex(
        f"{PHI} is above {TOPK} in {counted.wins} of {counted.cells} cells, equal in {counted.ties}, "
        f"mean change ${counted.mean_change:+z.3f}$."
    )


def _flagged(scores: Mapping[Point, Score]) -> Iterator[str]:
    floor, ceiling, alarms = (
        [point for point, score in scores.items() if flag in score.flags] for flag in ("floor", "ceiling", "beats_full")
    )
    if floor or ceiling:
        yield (
            f"Of {len(scores)} values {len(floor)} are at the floor (at most {FLOOR:g}) and {len(ceiling)} at the "
            f"ceiling (at least {CEILING:g}), where methods cannot be told apart."
        )
    if alarms:
        named = "; ".join(map(str, alarms[:NAMED_ALARMS])) + ("; ..." if len(alarms) > NAMED_ALARMS else "")
        yield (
            f"Alarm, partial-KV values above Full by more than chance: {len(alarms)} ({named}); suspect the evaluation "
            "before the method."
        )


def _full_at_floor(results: Iterable[Result], content: Content, backbones: int) -> Iterator[str]:
    """Names the tasks that tell nothing of any method, those behind a mean included."""
    found = []
    for result in results:
        shown = {point.task for point in content.scores if place_of(point) == place_of(result)}
        tasks = [task for task in result.tasks if task in shown or ALL_TASKS in shown]
        if low := [task for task in tasks if _is_at_floor(result, task)]:
            titles = ", ".join(task_title(result.benchmark, task) for task in low)
            found.append((f"{benchmark_title(result.benchmark)} {result.length}: {titles}", result.backbone))
    if found:
        listed = "; ".join(_shared(found, backbones))
        yield f"Tasks that decide nothing here, for Full itself is at the floor: {listed}. No method wins there."


def _is_at_floor(result: Result, task: str) -> bool:
    return any(method == "full" and "floor" in score.flags for (method, *_), score in result.scores[task].items())


def _own_rows(content: Content) -> Iterator[str]:
    if any(row.own for row in content.layout.rows):
        yield Latex(f"Rows with {OWN_ROW} are our additions to the paper's table: they stand apart and are never bold.")


def _left_out(content: Content) -> Iterator[str]:
    names = dict.fromkeys(_name(point) for point in content.cells if point not in content.scores)
    if names:
        yield f"A dash stands for what the study does not evaluate ({', '.join(names)})."


def _header(spec: TableSpec, results: Iterable[Result]) -> Iterator[str]:
    yield header_of_study(spec)
    for result in results:
        maps = ", ".join(f"{label} {sha[:12]}" for label, sha in result.phi_shas.items()) or "none"
        yield (
            f"{result.path.name}: {result.benchmark} {result.length}, {result.model_id} at {result.revision}, "
            f"{result.weights} weights, phi maps {maps}, prompts {result.prompts_sha[:12]}, {len(result.tasks)} tasks, "
            f"n = {result.examples(ALL_TASKS)} over all of them"
        )


def _name(point: Point) -> str:
    return task_title(point.benchmark, point.task)


def place_of(item: Point | Result) -> tuple[str, str, str]:
    """Benchmark, backbone and length: what one result has and a point needs."""
    return item.benchmark, item.backbone, item.length
