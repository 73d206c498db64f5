"""What a table says beside its cells: where every value comes from, and the notes that close its caption."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from residual_mass.benchmarks.catalogue import LEVEL, POWER
from residual_mass.metrics import Flag
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.published import MODELS
from residual_mass.paper.readers.results import Result, Score
from residual_mass.paper.table import ALL_TASKS, Mark, Place
from residual_mass.paper.tables.gains import ALPHA
from residual_mass.paper.tables.tally import Tally, tally_by_family
from residual_mass.paper.titles import OWN_ROW, PHI, TOPK, benchmark_title, task_title
from residual_mass.study.specs import TableSpec

if TYPE_CHECKING:
    from residual_mass.paper.tables.score_table import Content

NAMED_ALARMS = 3
"""A caption names so many cells that beat full attention, and counts the others."""
HALF_WIDTH = f"Largest half-width of a {LEVEL:.0%} bootstrap interval over"
KIND_NOTES = {
    "simulated": "simulated, which means made here after the benchmark's definition",
    "stand-in": "stand-in, which means other real text in the benchmark's format",
}


OF_THE_PAPER = "All values are the paper's own (Hoshi, Miyashita and Deguchi); none was computed here."


class FileRow(Protocol):
    """A row of a result file."""

    path: Path
    row: dict[str, str]


def notes(spec: TableSpec, results: Sequence[Result], content: Content) -> Iterator[str]:
    """The notes of a table of results."""
    models = {result.backbone: result for result in results}
    yield f"Study {spec.study}, backbone {', '.join(result.model_id for result in models.values())}."
    yield from model_warnings((model.model_id, model.weights) for model in models.values())
    yield from _kinds(content)
    yield f"Examples per value: {'; '.join(_sizes(results, content.scores, len(spec.backbones)))}."
    yield from _cuts(content.scores, len(spec.backbones))
    yield from _own_rows(content)
    yield from _uncertainty(content)
    yield from tallies(content.texts)
    yield from _flagged(content.scores)
    yield from _full_at_floor(results, content, len(spec.backbones))
    yield from _left_out(content)


def header(spec: TableSpec, results: Sequence[Result]) -> Iterator[str]:
    """The files of a table. Raises ValueError when two of them disagree on what a backbone or its feature maps are."""
    _check_same_models(results)
    yield header_of_study(spec)
    for result in results:
        maps = ", ".join(f"{label} {sha[:12]}" for label, sha in result.phi_shas.items()) or "none"
        yield (
            f"{result.path.name}: {result.benchmark} {result.length}, {result.model_id} at {result.revision}, "
            f"{result.weights} weights, phi maps {maps}, prompts {result.prompts_sha[:12]}, {len(result.tasks)} tasks, "
            f"n = {result.examples(ALL_TASKS)} over all of them"
        )


def header_of_files(spec: TableSpec, rows: Iterable[FileRow]) -> Iterator[str]:
    """Header lines of a table made of rows that remember their files."""
    yield header_of_study(spec)
    files: dict[Path, list[dict[str, str]]] = {}
    for row in rows:
        files.setdefault(row.path, []).append(row.row)
    for path, of_file in files.items():
        maps = dict.fromkeys(f"{row['maps']} {row['phi_sha'][:12]}" for row in of_file if row["maps"])
        facts = of_file[0]
        yield (
            f"{path.name}: {facts['length']}, {facts['model_id']} at {facts['revision']}, {facts['weights']} weights, "
            f"phi maps {', '.join(maps) or 'none'}"
        )


def header_of_published(label: str) -> str:
    return f"Table {label} with the values that the paper prints; none was computed here."


def header_of_study(spec: TableSpec) -> str:
    return f"Table {spec.label} of study {spec.study}; generated, changes are overwritten."


def _check_same_models(results: Iterable[Result]) -> None:
    """Files of one backbone are of one model, and those with one label of one set of feature maps."""
    known: dict[tuple[str, str], tuple[str, Path]] = {}
    for result in results:
        facts = {name: getattr(result, name) for name in ("model_id", "revision", "weights")}
        facts |= {f"phi_sha of maps {label}": sha for label, sha in result.phi_shas.items()}
        for name, value in facts.items():
            other, path = known.setdefault((result.backbone, name), (value, result.path))
            if value != other:
                raise ValueError(f"{result.path}: {name} is {value!r}, but {path} has {other!r}; rerun the older")


def model_warnings(models: Iterable[tuple[str, str]]) -> Iterator[str]:
    """What a reader must know of these models, given by id and weights, before the values."""
    models = list(models)
    yield from random_weights(models)
    yield from not_evaluated(model_id for model_id, _ in models)


def random_weights(models: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Names the models, given by id and weights, whose values say nothing."""
    if random := dict.fromkeys(model_id for model_id, weights in models if weights == "random"):
        yield f"Random weights ({', '.join(random)}): such values exercise the code and say nothing of a method."


def not_evaluated(model_ids: Iterable[str]) -> Iterator[str]:
    """Names the models that are not the paper's."""
    if others := dict.fromkeys(model_id for model_id in model_ids if model_id not in MODELS.values()):
        yield f"The paper does not evaluate {', '.join(others)}; the values are not comparable with the paper's."


def _kinds(content: Content) -> Iterator[str]:
    """Owns up to examples that are not the benchmark's own."""
    for kind, meaning in KIND_NOTES.items():
        places = [place for place, score in content.scores.items() if kind in score.data]
        if places:
            yield f"Examples of {', '.join(dict.fromkeys(map(_name, places)))} are {meaning}."


def _sizes(results: Iterable[Result], scores: Mapping[Place, Score], backbones: int) -> Iterable[str]:
    """Examples behind a value, once per benchmark or task and length."""
    sizes = []
    for result in results:
        for task in dict.fromkeys(place.task for place in scores if where(place) == where(result)):
            size = f"{task_title(result.benchmark, task)} {result.length}: {result.examples(task)}"
            size += f" from {len(result.tasks)} tasks" if task == ALL_TASKS else ""
            sizes.append((size, result.backbone))
    return _shared(sizes, backbones)


def _cuts(scores: Mapping[Place, Score], backbones: int) -> Iterator[str]:
    """Share of truncated prompts, once per benchmark or task and length: it is the same for all arms of an example."""
    cuts = dict.fromkeys(
        (f"{_name(place)} {place.length} {score.cut_share:.1%}", place.backbone)
        for place, score in scores.items()
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
    alike = _by_unit(content.scores)
    for (unit, examples), scores in alike.items():
        width = max((score.interval.high - score.interval.low) / 2 for score in scores)
        yield f"{HALF_WIDTH} {examples}: {_measured(width, unit)}."
    tested = [score for score in content.scores.values() if score.gain is not None]
    if not tested:
        return
    marks = [cell.mark for cell in content.cells.values() if cell.gain is not None]
    yield Marked(f"Of {len(marks)} paired comparisons with {TOPK} at the same budget, {survivors(marks)}.")
    for (unit, examples), scores in alike.items():
        if known := [score.mde for score in scores if score.gain is not None and score.mde is not None]:
            yield (
                f"Median smallest gain that so many {examples} would show (one comparison, two-sided {1 - LEVEL:.0%}, "
                f"power {POWER:.0%}): {_measured(statistics.median(known), unit)}."
            )


def survivors(marks: Sequence[Mark], over: str = "this table") -> Marked:
    """What remains of tests that are corrected together."""
    above, below = (marks.count(side) for side in ("above", "below"))
    survive = above + below
    return Marked(
        f"{survive or 'none'} {'remains' if survive == 1 else 'remain'} at $p < {ALPHA:g}$ after Holm's correction "
        f"over {over}" + (rf" ({above} above, $\dagger$; {below} below, $\ddagger$)" if survive else "")
    )


def _by_unit(scores: Mapping[Place, Score]) -> dict[tuple[str, str], list[Score]]:
    """Scores by their unit and what they are means of."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for place, score in scores.items():
        groups.setdefault((place.metric.unit, place.metric.combine), []).append(score)
    return groups


def _measured(number: float, unit: str) -> str:
    return f"{number:.3f} {unit}".rstrip()


def tallies(texts: Mapping[Place, str]) -> Iterator[Marked]:
    """How often completion is better than top-k, family by family."""
    for family, counted in tally_by_family(texts).items():
        yield Marked(f"{marked(family)}: {tallied(counted)}")


def tallied(counted: Tally) -> Marked:
    return Marked(
        f"{PHI} is {counted.metric.better_side} {TOPK} in {counted.wins} of {counted.cells} cells, equal in "
        f"{counted.ties}, mean change ${counted.mean_change:+z.3f}$."
    )


def _flagged(scores: Mapping[Place, Score]) -> Iterator[str]:
    floor, ceiling, alarms = (
        [place for place, score in scores.items() if flag in score.flags] for flag in ("floor", "ceiling", "beats_full")
    )
    if floor or ceiling:
        yield (
            f"Of {len(scores)} values {len(floor)} are at the floor{_bounds(scores, 'floor')} and {len(ceiling)} at "
            f"the ceiling{_bounds(scores, 'ceiling')}, where methods cannot be told apart."
        )
    if alarms:
        sides = " or ".join(dict.fromkeys(place.metric.better_side for place in alarms))
        named = "; ".join(map(str, alarms[:NAMED_ALARMS])) + ("; ..." if len(alarms) > NAMED_ALARMS else "")
        yield (
            f"Alarm, partial-KV values {sides} Full by more than chance: {len(alarms)} ({named}); suspect the "
            "evaluation before the method."
        )


def _bounds(places: Iterable[Place], flag: Flag) -> str:
    """The values of these metrics that get a flag; empty where none does."""
    bounds = dict.fromkeys(bound for place in places if (bound := place.metric.bound(flag)))
    return f" ({' or '.join(bounds)})" if bounds else ""


def _full_at_floor(results: Iterable[Result], content: Content, backbones: int) -> Iterator[str]:
    """Names the tasks that tell nothing of any method, those behind a mean included."""
    found = []
    for result in results:
        shown = {place.task for place in content.scores if where(place) == where(result)}
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
        yield Marked(
            f"Rows with {OWN_ROW} are our additions to the paper's table: they stand apart and are never bold."
        )


def _left_out(content: Content) -> Iterator[str]:
    names = dict.fromkeys(_name(place) for place in content.cells if place not in content.scores)
    if names:
        yield f"A dash stands for what the study does not evaluate ({', '.join(names)})."


def _name(place: Place) -> str:
    return task_title(place.benchmark, place.task)


def where(item: Place | Result) -> tuple[str, str, str]:
    """Benchmark, backbone and length: what one result has and a cell needs."""
    return item.benchmark, item.backbone, item.length
