"""The table of what training the feature maps takes: steps, what the backbone reads for them, hardware and time.

Times are those of the training logs, which add up over interruptions. A file of maps says how it was trained, and its
record on what.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residual_mass.core.settings import tokens_of
from residual_mass.files import read_json, sha256_of
from residual_mass.paper import published
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.published import MAIN_MAPS, MODELS
from residual_mass.paper.readers.maps_file import MapsFile, check_shown, load_maps_file
from residual_mass.paper.readers.training_log import read_log
from residual_mass.paper.table import LEFT_OUT, Block, Cell, Entry, Grid, Place, Row, Table
from residual_mass.paper.tables import notes as note
from residual_mass.paper.tables.captions import OF_THE_PAPER, header_of_published, header_of_study, not_evaluated
from residual_mass.paper.titles import backbone_title, model_name
from residual_mass.provenance import beside
from residual_mass.study.parsing import parsed
from residual_mass.study.specs import BackboneSpec, TableSpec, TrainSpec

LABEL = "training_cost_64k"
WALL_CLOCK = "wall_clock_h"
QUANTITIES = ("steps", "sequences", "teacher_passes", WALL_CLOCK)
COLUMNS = tuple(
    "table backbone length maps quantity text bold value steps hardware processes source study model_id revision "
    "weights phi_sha".split()
)
PUBLISHED_TITLES = ("Steps / hardware", "Wall-clock")
TITLES = ("Steps / hardware", "Sequences", "Passes", "Wall-clock")


@dataclass(frozen=True)
class Training:
    """A training that has ended.

    Attributes:
        seconds: of all steps together.
        hardware: of one process; empty where it is not known.
    """

    maps: MapsFile
    log: Path
    phi_sha: str
    seconds: float
    hardware: str
    processes: int

    @property
    def recipe(self) -> TrainSpec:
        return self.maps.recipe

    @property
    def backbone(self) -> BackboneSpec:
        return self.maps.recipe.backbone

    @property
    def values(self) -> dict[str, float]:
        """By QUANTITIES."""
        recipe = self.recipe
        passes = math.ceil(recipe.steps / recipe.replay.reuse)
        counts = (recipe.steps, recipe.steps * recipe.sequences_per_step, passes * recipe.sequences_per_step)
        return dict(zip(QUANTITIES, (*counts, round(self.seconds / 3600, 6)), strict=True))


def make(spec: TableSpec, results: list[Path]) -> Table:
    """The table from files of feature maps and the logs of their trainings, one row per backbone in the order of the
    spec, with the paper's below it where it trained maps of that model.

    Raises:
        ValueError: a file is of another study or without its counterpart; names it.
    """
    trainings = _trainings(results)
    check_shown(spec, [each.maps for each in trainings])
    trainings.sort(key=lambda each: (spec.backbones.index(each.backbone.name), tokens_of(each.recipe.length)))
    rows = [row for training in trainings for row in _rows(spec, training)]
    return Table(
        label=LABEL,
        study=spec.study,
        grids=(Grid(("Backbone",), TITLES, (Block(tuple(rows)),)),),
        columns=COLUMNS,
        header=tuple(_header(spec, trainings)),
        notes=tuple(_notes(spec, trainings)),
        facts={"lengths": ", ".join(dict.fromkeys(training.recipe.length for training in trainings))},
    )


def make_published(_: str) -> Table:
    """The table with the paper's values."""
    rows = []
    for fact in published.rows_of(LABEL):
        cell = Cell(Place(fact["backbone"], MAIN_MAPS, maps=MAIN_MAPS, quantity=WALL_CLOCK), fact[WALL_CLOCK])
        effort, wall_clock = _published_texts(fact)
        rows.append(Row((published.model_title(fact["backbone"]),), (Entry(effort), Entry(wall_clock, (cell,)))))
    return Table(
        label=LABEL,
        study="published",
        grids=(Grid(("Backbone",), PUBLISHED_TITLES, (Block(tuple(rows)),)),),
        header=(header_of_published(LABEL),),
        notes=(OF_THE_PAPER,),
        facts={"lengths": MAIN_MAPS},
    )


def printed(quantity: str, value: float) -> str:
    """A value of QUANTITIES as the table prints it."""
    if quantity != WALL_CLOCK:
        return _thousands(round(value))
    seconds = round(3600 * value)
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{value:.1f} h"


def _trainings(results: Sequence[Path]) -> list[Training]:
    """Every file of maps with the log whose record has the same spec. Raises ValueError for maps without one."""
    records = {path: read_json(beside(path)) for path in results}
    logs = {
        parsed(TrainSpec, record["spec"]): path
        for path, record in records.items()
        if record["stage"] == "train" and path.suffix == ".csv"
    }
    trainings = []
    for path in (path for path in results if path.suffix != ".csv"):
        maps = load_maps_file(path)
        if maps.recipe not in logs:
            raise ValueError(f"table {LABEL}: no log of the training of {path}; pass it to --results")
        trainings.append(_training(maps, logs[maps.recipe], records[path]))
    return trainings


def _training(maps: MapsFile, log: Path, record: Mapping[str, Any]) -> Training:
    clock = {int(row["step"]): float(row["seconds"]) for row in read_log(log)}
    return Training(
        maps=maps,
        log=log,
        phi_sha=sha256_of(maps.path),
        seconds=clock[max(clock)],
        hardware=str(record.get("hardware", "")),
        processes=int(record.get("processes", 1)),
    )


def _rows(spec: TableSpec, training: Training) -> Iterator[Row]:
    """The study's row, and the paper's where it trained maps of this model."""
    title = backbone_title(spec, training.backbone.name, training.backbone.model_id)
    effort = _effort(training.recipe.steps, training.hardware, training.processes)
    steps, *others = _cells(training)
    yield Row((title,), (Entry(effort, (steps,)), *(Entry(cell.text, (cell,)) for cell in others)))
    for fact in _papers_rows(training):
        effort, wall_clock = _published_texts(fact)
        yield Row(("in the paper",), tuple(map(Entry, (effort, LEFT_OUT, LEFT_OUT, wall_clock))))


def _papers_rows(training: Training) -> list[dict[str, str]]:
    return [fact for fact in published.rows_of(LABEL) if MODELS[fact["backbone"]] == training.backbone.model_id]


def _published_texts(fact: dict[str, str]) -> tuple[Marked, str]:
    count, _, device = fact["hardware"].partition("x")
    return _effort(int(fact["steps"]), device, int(count)), f"{fact['wall_clock_h']} h"


def _effort(steps: int, hardware: str, processes: int) -> Marked:
    """`200k steps on 8xH200`, with a proper cross. As in the paper, makers are left out; the CSV has a CPU's."""
    shown = re.sub(r".*, (?=\d+ threads$)", "CPU, ", hardware)
    where = marked(shown.removeprefix("NVIDIA ") or "unknown hardware")
    counted = shown and not shown.startswith("CPU")
    times = rf"{processes}$\times$" if counted or processes > 1 else ""
    return Marked(f"{_thousands(steps)} steps on {times}{where}")


def _thousands(count: int) -> str:
    return f"{count // 1000}k" if count and count % 1000 == 0 else f"{count:,}"


def _header(spec: TableSpec, trainings: Iterable[Training]) -> Iterator[str]:
    yield header_of_study(spec)
    for training in trainings:
        backbone = training.backbone
        yield (
            f"{training.maps.path.name} and {training.log.name}: {backbone.model_id} at {backbone.revision}, "
            f"{backbone.weights} weights, maps {training.phi_sha[:12]}, {training.recipe.steps} steps in "
            f"{training.seconds:.1f} s"
        )


def _notes(spec: TableSpec, trainings: Sequence[Training]) -> Iterator[str]:
    backbones = {training.backbone.model_id: training.backbone for training in trainings}
    yield f"Study {spec.study}, backbone {', '.join(backbones)}."
    yield from not_evaluated(backbones)
    if random := [model_id for model_id, backbone in backbones.items() if backbone.weights == "random"]:
        yield f"Random weights ({', '.join(random)}): time hardly depends on the values."
    yield "Passes are sequences that the backbone reads, as the teacher of the maps."
    yield (
        "The wall clock counts the steps of a training, added up over interruptions, and neither loading nor measuring "
        "on held-out text. Hardware is that of the run that finished the training."
    )
    for training in trainings:
        whose = f" ({model_name(training.backbone.model_id)})" if len(trainings) > 1 else ""
        replay = training.recipe.replay
        if replay.reuse > 1:
            yield (
                f"What a pass leaves is kept: there is a new one every {replay.reuse} steps, and the newest "
                f"{replay.pool} are in use{whose}."
            )
        if early := training.recipe.curriculum:
            yield f"The first {early.share:.0%} of the steps use {early.length} tokens of each sequence{whose}."
    if any(map(_papers_rows, trainings)):
        yield "A dash marks what the paper does not say; nor does it say what its times include."


def _cells(training: Training) -> Iterator[Cell]:
    backbone, length = training.backbone, training.recipe.length
    conditions = {
        "steps": str(training.recipe.steps),
        "hardware": training.hardware,
        "processes": str(training.processes) if training.hardware else "",
    }
    row = conditions | {"study": backbone.study, "revision": backbone.revision, "phi_sha": training.phi_sha}
    for name, value in training.values.items():
        exact = f"{value:.6f}" if name == WALL_CLOCK else f"{value:.0f}"
        yield Cell(
            place=Place(backbone.name, length, maps=length, quantity=name),
            text=printed(name, value),
            value=value,
            n=1,
            counted="trainings",
            conditions=conditions,
            model_id=backbone.model_id,
            weights=backbone.weights,
            source=training.log.name,
            notes=tuple(_notes_on(training, conditions, exact)),
            row=row | {"value": exact},
        )


def _notes_on(training: Training, conditions: dict[str, str], exact: str) -> Iterator[str]:
    yield note.feature_maps(training.recipe.length, training.phi_sha)
    yield from (f"{name} {text}" for name, text in conditions.items() if text)
    yield from note.exactly(exact, training.log.name)
