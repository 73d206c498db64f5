"""The table of what training the feature maps takes: steps, what the backbone reads for them, hardware and time.

Times are those of the training logs, which add up over interruptions; how a file of maps was trained stands in its
header, and the hardware in the sidecar beside it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residual_mass.core.settings import tokens_of
from residual_mass.files import csv_text, finite_field, is_count, only_value, read_json, sha256_of, write_text
from residual_mass.paper import published
from residual_mass.paper.cells import LEFT_OUT
from residual_mass.paper.latex import Latex, escape, render
from residual_mass.paper.published import MAIN_MAPS, MODELS
from residual_mass.paper.readers.maps_file import OWN_RECIPE, REMEDY, Shapes, load_maps_file
from residual_mass.paper.readers.training_log import read_log
from residual_mass.paper.tables.captions import OF_THE_PAPER, header_of_published, header_of_study, not_evaluated
from residual_mass.paper.titles import backbone_title, model_name
from residual_mass.provenance import beside
from residual_mass.study.specs import TableSpec, TrainSpec, parse_spec

LABEL = "training_cost_64k"
WALL_CLOCK = "wall_clock_h"
QUANTITIES = ("steps", "sequences", "teacher_passes", WALL_CLOCK)
CELL_COLUMNS = (
    "table backbone length maps quantity text bold value steps hardware processes source study model_id revision "
    "weights phi_sha"
).split()
COLUMNS = ("Backbone", "Steps / hardware", "Wall-clock")
OWN_COLUMNS = ("Backbone", "Steps / hardware", "Sequences", "Passes", "Wall-clock")

Row = dict[str, str]


@dataclass(frozen=True)
class Trained:
    """One training.

    Attributes:
        path, log: the file of the maps, and the log of their training.
        seconds: of all steps together.
        hardware: of one process; empty where it is not known.
    """

    path: Path
    log: Path
    spec: TrainSpec
    phi_sha: str
    seconds: float
    hardware: str
    processes: int

    @property
    def values(self) -> dict[str, float]:
        """By QUANTITIES."""
        spec = self.spec
        passes = math.ceil(spec.steps / spec.replay.reuse)
        counts = (spec.steps, spec.steps * spec.sequences_per_step, passes * spec.sequences_per_step)
        return dict(zip(QUANTITIES, (*counts, round(self.seconds / 3600, 6)), strict=True))

    @property
    def title(self) -> str:
        return model_name(self.spec.backbone.model_id)


def run(spec: TableSpec, results: list[Path], template: Path, out: Path, cells: Path) -> None:
    """Writes the table from files of feature maps and the logs of their trainings, one row per backbone in the order of
    the spec, with the paper's below it where it trained maps of that model. To `cells` goes one CSV line per value.

    Raises:
        ValueError: a file is missing, damaged, of another study or without its counterpart, or a training has not
            ended; names the file.
    """
    rows = _in_order(spec, [load_training(path, log) for path, log in _pairs(results)])
    table = render(
        template,
        header=list(_header(spec, rows)),
        notes=list(_notes(spec, rows)),
        lengths=", ".join(dict.fromkeys(row.spec.length for row in rows)),
        columns=OWN_COLUMNS,
        lines=[line for row in rows for line in _lines(spec, row)],
    )
    write_text(cells, csv_text(CELL_COLUMNS, (line for row in rows for line in _cell_lines(row))))
    write_text(out, table)


def render_published(template: Path) -> str:
    """The table with the paper's values."""
    lines = [(published.model_title(row["backbone"]), *_published_fields(row)) for row in published.rows_of(LABEL)]
    return render(
        template,
        header=[header_of_published(LABEL)],
        notes=[OF_THE_PAPER],
        lengths=MAIN_MAPS,
        columns=COLUMNS,
        lines=lines,
    )


def printed(quantity: str, value: float) -> str:
    """A value of QUANTITIES as the table prints it."""
    if quantity != WALL_CLOCK:
        return _thousands(round(value))
    seconds = round(3600 * value)
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{value:.1f} h"


def load_training(path: Path, log: Path) -> Trained:
    """Reads the header of a file of maps, the log of its training and, where there is one, its sidecar.

    Raises:
        ValueError: a file is missing or damaged, they are not of one training, or it has not ended; names the file.
    """
    recipe, spec = load_maps_file(path, "how it was trained", _recipe)
    (variant,) = spec.variants
    if variant.label != OWN_RECIPE:
        raise ValueError(f"{path}: is of the variant {variant.label}, table {LABEL} of own maps; take it out")
    hardware, processes = _hardware(path, recipe)
    return Trained(path, log, spec, sha256_of(path), _seconds(log, path, spec), hardware, processes)


def _recipe(facts: Any, _shapes: Shapes) -> tuple[Any, TrainSpec]:
    """As it stands, and parsed; it trained one variant."""
    recipe = facts["training"]["recipe"]
    spec = parse_spec(TrainSpec, json.dumps(recipe))
    (_,) = spec.variants
    return recipe, spec


def _seconds(log: Path, path: Path, spec: TrainSpec) -> float:
    """Of all steps; the log must be that of the maps and reach the last of them."""
    rows = read_log(log)
    for name, value in (("recipe", spec.name), ("variant", spec.variants[0].label), ("seed", str(spec.seed))):
        if (found := only_value(rows, name, log, REMEDY)) != value:
            raise ValueError(f"{log}: {name} is {found!r}, but {path.name} has {value!r}; {REMEDY}")
    clock: dict[int, float] = {}
    for number, row in enumerate(rows, start=2):
        where = f"{log}:{number}"
        if not is_count(row["step"]):
            raise ValueError(f"{where}: step is {row['step']!r}, not a count; {REMEDY}")
        seconds = finite_field(row, "seconds", where, REMEDY)
        if clock.setdefault(int(row["step"]), seconds) != seconds:
            raise ValueError(f"{where}: seconds is {row['seconds']}, elsewhere not at step {row['step']}; {REMEDY}")
    steps = sorted(clock)
    if any(clock[later] < clock[step] or clock[step] < 0 for step, later in zip(steps, steps[1:], strict=False)):
        raise ValueError(f"{log}: seconds go down as steps go up; {REMEDY}")
    if steps[-1] != spec.steps or clock[spec.steps] <= 0:
        raise ValueError(f"{log}: ends at step {steps[-1]}, but {path.name} has {spec.steps} steps; {REMEDY}")
    return clock[spec.steps]


def _hardware(path: Path, recipe: Any) -> tuple[str, int]:
    """What one process of the training ran on, and how many there were: `NVIDIA H200`, 8. Without a sidecar nothing is
    known.
    """
    sidecar = beside(path)
    if not sidecar.exists():
        return "", 1
    meta = read_json(sidecar)
    try:
        if meta["spec"] != recipe:
            raise ValueError(f"{sidecar}: is of another training than {path.name}; delete it, or train again")
        on_a_gpu = meta["device"].startswith("cuda")
        unnamed = "GPU" if on_a_gpu else f"CPU, {int(meta['machine']['cpus'])} cores"
        return str(meta.get("hardware", unnamed)), int(meta["processes"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{sidecar}: does not say what ran ({error!r}); delete it, or train again") from None


def _pairs(results: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Every file of maps with its log, `phi/smol_2k.safetensors` with `training_smol_2k.csv`."""
    logs = {path.name: path for path in results if path.suffix == ".csv"}
    for path in (path for path in results if path.suffix != ".csv"):
        if (name := f"training_{path.stem}.csv") not in logs:
            raise ValueError(f"table {LABEL}: no {name} for {path}; pass it to --results")
        yield path, logs.pop(name)
    for log in logs.values():
        raise ValueError(f"table {LABEL}: {log} is the log of no maps that are given; pass theirs to --results")


def _in_order(spec: TableSpec, trained: Iterable[Trained]) -> list[Trained]:
    shown: dict[str, list[Trained]] = {}
    for row in trained:
        backbone = row.spec.backbone
        if backbone.study != spec.study:
            raise ValueError(
                f"{row.path}: is of study {backbone.study!r}, table {LABEL} is of {spec.study!r}; {REMEDY}"
            )
        if backbone.name not in spec.backbones:
            raise ValueError(
                f"{row.path}: is of backbone {backbone.name}, table {LABEL} shows {', '.join(spec.backbones)}; "
                "take it out of --results"
            )
        of_backbone = shown.setdefault(backbone.name, [])
        for other in of_backbone:
            if other.spec.length == row.spec.length:
                raise ValueError(
                    f"{row.path}: a second file for {backbone.name} {row.spec.length}, beside {other.path}; give one"
                )
        of_backbone.append(row)
    for name in spec.backbones:
        if name not in shown:
            raise ValueError(f"table {LABEL}: no file is of backbone {name}; pass its maps to --results")
    return [row for name in spec.backbones for row in sorted(shown[name], key=lambda row: tokens_of(row.spec.length))]


def _lines(spec: TableSpec, row: Trained) -> Iterator[tuple[str, ...]]:
    """The study's row, and the paper's where it trained maps of this model."""
    title = backbone_title(spec, row.spec.backbone.name, row.spec.backbone.model_id)
    texts = {name: printed(name, value) for name, value in row.values.items()}
    effort = _effort(row.spec.steps, row.hardware, row.processes)
    yield title, effort, texts["sequences"], texts["teacher_passes"], texts[WALL_CLOCK]
    for fact in _papers_rows(row):
        effort, wall_clock = _published_fields(fact)
        yield "in the paper", effort, LEFT_OUT.text, LEFT_OUT.text, wall_clock


def _papers_rows(row: Trained) -> list[Row]:
    return [fact for fact in published.rows_of(LABEL) if MODELS[fact["backbone"]] == row.spec.backbone.model_id]


def _published_fields(row: Row) -> tuple[Latex, str]:
    count, _, device = row["hardware"].partition("x")
    return _effort(int(row["steps"]), device, int(count)), f"{row['wall_clock_h']} h"


def _effort(steps: int, hardware: str, processes: int) -> Latex:
    """`200k steps on 8xH200`, with a proper cross; makers have no place here, as in the paper; the CSV has a CPU's."""
    shown = re.sub(r".*, (?=\d+ threads$)", "CPU, ", hardware)
    where = escape(shown.removeprefix("NVIDIA ") or "unknown hardware")
    counted = shown and not shown.startswith("CPU")
    times = rf"{processes}$\times$" if counted or processes > 1 else ""
    return Latex(f"{_thousands(steps)} steps on {times}{where}")


def _thousands(count: int) -> str:
    return f"{count // 1000}k" if count and count % 1000 == 0 else f"{count:,}"


def _header(spec: TableSpec, rows: Iterable[Trained]) -> Iterator[str]:
    yield header_of_study(spec)
    for row in rows:
        backbone = row.spec.backbone
        yield (
            f"{row.path.name} and {row.log.name}: {backbone.model_id} at {backbone.revision}, {backbone.weights} "
            f"weights, maps {row.phi_sha[:12]}, {row.spec.steps} steps in {row.seconds:.1f} s"
        )


def _notes(spec: TableSpec, rows: Sequence[Trained]) -> Iterator[str]:
    backbones = {row.spec.backbone.model_id: row.spec.backbone for row in rows}
    yield f"Study {spec.study}, backbone {', '.join(backbones)}."
    yield from not_evaluated(backbones)
    if random := [model_id for model_id, backbone in backbones.items() if backbone.weights == "random"]:
        yield f"Random weights ({', '.join(random)}): time hardly depends on the values."
    yield "Passes are sequences that the backbone reads, as the teacher of the maps."
    yield (
        "The wall clock counts the steps of a training, added up over interruptions, and neither loading nor measuring "
        "on held-out text. Hardware is that of the run that finished the training."
    )
    for row in rows:
        of = f" ({row.title})" if len(rows) > 1 else ""
        if (reuse := row.spec.replay.reuse) > 1:
            yield (
                f"What a pass leaves is kept: there is a new one every {reuse} steps, and the newest "
                f"{row.spec.replay.pool} are in use{of}."
            )
        if early := row.spec.curriculum:
            yield f"The first {early.share:.0%} of the steps use {early.length} tokens of each sequence{of}."
    if any(map(_papers_rows, rows)):
        yield "A dash marks what the paper does not say; nor does it say what its times include."


def _cell_lines(row: Trained) -> Iterator[dict[str, Any]]:
    backbone = row.spec.backbone
    origin = {
        "table": LABEL, "backbone": backbone.name, "length": row.spec.length, "maps": row.spec.length, "bold": "0",
        "steps": row.spec.steps, "hardware": row.hardware, "processes": row.processes if row.hardware else "",
        "source": row.log.name, "study": backbone.study, "model_id": backbone.model_id, "revision": backbone.revision,
        "weights": backbone.weights, "phi_sha": row.phi_sha,
    }  # fmt: skip
    for name, value in row.values.items():
        exact = f"{value:.6f}" if name == WALL_CLOCK else f"{value:.0f}"
        yield origin | {"quantity": name, "text": printed(name, value), "value": exact}
