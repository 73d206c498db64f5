"""The table of latencies of one backbone: how long a decoding step takes, and how much memory traffic it cannot do
without.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from residual_mass.paper import published
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.published import MODELS
from residual_mass.paper.readers.runtime_file import FUSED, PROTOTYPE, Latency, load_latencies
from residual_mass.paper.table import LEFT_OUT, Block, Cell, Entry, Grid, Place, Row, Table
from residual_mass.paper.tables.captions import OF_THE_PAPER, header_of_published, header_of_study, not_evaluated
from residual_mass.paper.titles import METHOD_TITLES, OWN_ROW, backbone_title, method_title
from residual_mass.study.labels import METHODS
from residual_mass.study.labels import RUNTIME_TABLES as PREFIX
from residual_mass.study.specs import TableSpec

PUBLISHED = tuple(f"{PREFIX}{backbone}" for backbone in MODELS)
"""Labels of the paper's own tables."""
PAPERS_BATCH, PAPERS_BUDGET = 1, 1.0
STEP, END_TO_END, TRAFFIC, FLOOR, OVER_FLOOR = "per_step_ms", "end_to_end_ms", "step_bytes", "floor_ms", "over_floor"
TIMES, COSTS = (STEP, END_TO_END), (TRAFFIC, FLOOR, OVER_FLOOR)
"""What is printed of a measurement: `step / end to end`, then `traffic / floor / step over floor`."""
QUANTITIES = (*TIMES, *COSTS)
COLUMNS = tuple(
    "table backbone implementation method length batch budget_percent k quantity text bold value low high repeats "
    "source study model_id revision weights phi_weights dtype device bandwidth_gb_s recording_ms peak_memory_mib "
    "tokens_as_prototype not_measured".split()
)
CONDITIONS = ("implementation", "dtype", "device")
RUNTIME_CONDITIONS = Marked(
    "One H200, bfloat16, greedy decoding, batch size 1, 32 generated tokens, an implementation without fused kernels; "
    "a step is the mean over tokens 2 to 32, end to end is the prefill and 31 steps; $K$ is that of a budget of 1%."
)
"""What the paper says of its measurements."""
IMPLEMENTATION_TITLES = {PROTOTYPE: "Prototype", FUSED: "Fused"}
IMPLEMENTATION_NOTES = {
    PROTOTYPE: "Prototype: Full is the decoding of the transformers library, the others follow what the paper says of "
    "its own prototype.",
    FUSED: "Fused: decoding of our own in buffers of fixed size; Full is attention over the same buffers. On a GPU it "
    "has fused kernels, and its steps are CUDA graphs, which are recorded once per prompt length and are not counted.",
}
IN_WORDS = {
    STEP: ("ms", "one decoding step"),
    END_TO_END: ("ms", "the prefill and 31 steps, end to end"),
    TRAFFIC: ("GB", "read and written in a step"),
    FLOOR: ("ms", "that traffic at the measured bandwidth"),
    OVER_FLOOR: ("times", "the measured step over that floor"),
}
"""Unit and meaning of the quantities."""
NOTES = {
    "k": "k {}",
    "repeats": "{} repeats",
    "phi_weights": "{} feature maps",
    "dtype": "dtype {}",
    "device": "device {}",
    "bandwidth_gb_s": "bandwidth of copies {} GB/s",
    "recording_ms": "its steps recorded as CUDA graphs in {} ms",
    "peak_memory_mib": "peak memory {} MiB",
    "tokens_as_prototype": "share of tokens that are the prototype's {}",
    "not_measured": "not measured: {}",
}
"""What the page says of fields of a measurement that are not empty."""


@dataclass(frozen=True)
class _Measurements:
    """What a table shows of a file: latencies of one backbone."""

    path: Path
    latencies: tuple[Latency, ...]

    @property
    def facts(self) -> dict[str, str]:
        """Fields that are constant in a file."""
        return self.latencies[0].row

    @property
    def blocks(self) -> dict[tuple[str, int], dict[str, list[Latency]]]:
        """By implementation and batch size, and by context; in the order of columns."""
        found: dict[tuple[str, int], dict[str, list[Latency]]] = {}
        for each in self.latencies:
            found.setdefault(each.block, {}).setdefault(each.context, []).append(each)
        return found

    @property
    def own_methods(self) -> tuple[str, ...]:
        """Methods that the paper lacks, the last columns."""
        return tuple(dict.fromkeys(each.method for each in self.latencies if each.method not in METHODS))

    def fields(self, name: str) -> list[str]:
        return [latency.row[name] for latency in self.latencies if latency.row[name]]


def is_label(label: str) -> bool:
    return re.fullmatch(rf"{PREFIX}[a-z0-9][a-z0-9._-]*", label) is not None


def make(spec: TableSpec, results: list[Path]) -> Table:
    """The table from the backbone's one file: the contexts of the spec, with the paper's values where it measured that
    backbone.

    Raises:
        ValueError: the file is not one alone, of another study or backbone, or lacks a context; names it.
    """
    file = _shown(spec, results)
    title = backbone_title(spec, file.facts["backbone"], file.facts["model_id"])
    columns = _methods() + tuple(Marked(method_title(method) + OWN_ROW) for method in file.own_methods)
    times, costs = [], []
    for (implementation, batch), contexts in file.blocks.items():
        block = f"{IMPLEMENTATION_TITLES[implementation]}, batch {batch}"
        budget = _budgets(latency for latencies in contexts.values() for latency in latencies)
        rows = [Row((context, _k(each)), _entries(file, each, TIMES)) for context, each in contexts.items()]
        times.append(Block(tuple(rows), block))
        rows = [Row((context,), _entries(file, each, COSTS)) for context, each in contexts.items()]
        costs.append(Block(tuple(rows), f"{block}, budget {budget}"))
    return Table(
        label=spec.label,
        study=spec.study,
        grids=(_grid(columns, [*times, *_published_block(file)]), Grid(("Context",), columns, tuple(costs))),
        columns=COLUMNS,
        header=tuple(_header(spec, file)),
        notes=tuple(_notes(spec, file)),
        facts={"backbone": title},
    )


def make_published(label: str) -> Table:
    """One of PUBLISHED with the paper's values."""
    facts = published.rows_of(label)
    return Table(
        label=label,
        study="published",
        grids=(_grid(_methods(), [Block(_published_rows(facts))]),),
        header=(header_of_published(label),),
        notes=(OF_THE_PAPER, RUNTIME_CONDITIONS),
        facts={"backbone": published.model_title(facts[0]["backbone"])},
    )


def _published_cell(fact: Mapping[str, str], quantity: str) -> Cell:
    place = Place(
        backbone=fact["backbone"],
        length=fact["context"],
        method=fact["method"],
        budget_percent=None if fact["method"] == "full" else PAPERS_BUDGET,
        quantity=quantity,
        implementation=PROTOTYPE,
        batch=PAPERS_BATCH,
    )
    return Cell(place, fact[quantity])


def printed(quantity: str, value: float) -> str:
    """A value of QUANTITIES as tables print it; traffic is in gigabytes, and long times have no room for decimals."""
    if quantity == TRAFFIC:
        return f"{value / 1e9:.3f}"
    return f"{value:.2f}" if value < 1e4 else f"{value:.0f}"


def _grid(columns: tuple[Marked, ...], blocks: Sequence[Block]) -> Grid:
    return Grid(("Context", Marked("$K$")), columns, tuple(blocks))


def _methods() -> tuple[Marked, ...]:
    return tuple(METHOD_TITLES[method] for method in METHODS)


def _shown(spec: TableSpec, results: Sequence[Path]) -> _Measurements:
    """The contexts that the table shows, all of which every block has."""
    if len(results) != 1:
        given = ", ".join(path.name for path in results)
        raise ValueError(f"table {spec.label}: shows one file, --results has {len(results)} ({given}); give one")
    (path,) = results
    latencies = load_latencies(path)
    for name, value in {"study": spec.study, "backbone": spec.label.removeprefix(PREFIX)}.items():
        if (found := latencies[0].row[name]) != value:
            raise ValueError(f"{path}: is of {name} {found!r}, table {spec.label} of {value!r}; give its own")
    measured = dict.fromkeys((latency.block, latency.context) for latency in latencies)
    for block, context in itertools.product(dict.fromkeys(latency.block for latency in latencies), spec.lengths):
        if (block, context) not in measured:
            raise ValueError(
                f"{path}: no row for {block[0]}, batch {block[1]}, at {context}; measure it, or leave it out"
            )
    return _Measurements(path, tuple(latency for latency in latencies if latency.context in spec.lengths))


def _entries(file: _Measurements, latencies: Iterable[Latency], quantities: Sequence[str]) -> tuple[Entry, ...]:
    found = {latency.method: _entry([_cell(file, latency, name) for name in quantities]) for latency in latencies}
    return tuple(found.get(method, Entry(LEFT_OUT)) for method in (*METHODS, *file.own_methods))


def _entry(cells: Sequence[Cell]) -> Entry:
    """Several quantities of a measurement."""
    return Entry(" / ".join(cell.text for cell in cells), tuple(cells))


def _k(latencies: Iterable[Latency]) -> str:
    """Of the methods that have a budget, which share it."""
    return next(latency.row["k"] for latency in latencies if latency.budget is not None)


def _budgets(latencies: Iterable[Latency]) -> str:
    """Each once; full attention has none."""
    return _listed(f"{latency.budget:g}%" for latency in latencies if latency.budget is not None)


def _value(latency: Latency, quantity: str) -> float | None:
    """What was not measured has its traffic and floor all the same."""
    if quantity in (STEP, END_TO_END, OVER_FLOOR) and not latency.measured:
        return None
    if quantity == OVER_FLOOR:
        return round(latency.step / latency.floor, 6)
    return float(latency.row[quantity])


def _cell(file: _Measurements, latency: Latency, quantity: str) -> Cell:
    row, value = latency.row, _value(latency, quantity)
    implementation, batch = latency.block
    copied = {name: row[name] for name in COLUMNS if name in row}
    copied["value"] = "" if value is None else f"{value:.6f}" if quantity == OVER_FLOOR else row[quantity]
    if quantity == STEP:
        copied |= {"low": row["per_step_low_ms"], "high": row["per_step_high_ms"]}
    text = LEFT_OUT if value is None else printed(quantity, value)
    return Cell(
        place=Place(
            backbone=row["backbone"],
            length=latency.context,
            method=latency.method,
            budget_percent=latency.budget,
            quantity=quantity,
            implementation=implementation,
            batch=batch,
        ),
        text=text,
        value=value,
        range=latency.repeats if quantity == STEP and latency.measured else None,
        n=int(row["repeats"]),
        counted="repeats",
        conditions={name: row[name] for name in CONDITIONS},
        model_id=row["model_id"],
        weights=row["weights"],
        source=file.path.name,
        notes=(f"{text} {_words(quantity, copied)}", *_notes_on(row), f"from {file.path.name}"),
        row=copied,
    )


def _words(quantity: str, row: Mapping[str, str]) -> str:
    """Unit and meaning of a quantity, with the fastest and the slowest repeat."""
    unit, meaning = IN_WORDS[quantity]
    repeats = f", repeats from {row['low']} to {row['high']} {unit}" if row.get("low") else ""
    return f"{unit}: {meaning}{repeats}"


def _notes_on(row: Mapping[str, str]) -> Iterator[str]:
    yield from (words.format(row[name]) for name, words in NOTES.items() if row[name])


def _published_block(file: _Measurements) -> Iterator[Block]:
    """The paper's values, where it measured this model, as text: they are no cells of the study."""
    for backbone in _papers_name(file):
        rows = _published_rows(published.rows_of(f"{PREFIX}{backbone}"))
        lacking = (Entry(LEFT_OUT),) * len(file.own_methods)
        shown = (replace(row, entries=tuple(Entry(entry.text) for entry in row.entries) + lacking) for row in rows)
        yield Block(tuple(shown), f"The paper, batch {PAPERS_BATCH}")


def _papers_name(file: _Measurements) -> list[str]:
    """What the paper's own table calls the model; nothing for one that it did not measure."""
    return [name for name, model_id in MODELS.items() if model_id == file.facts["model_id"]]


def _published_rows(facts: Iterable[Mapping[str, str]]) -> tuple[Row, ...]:
    entries: dict[tuple[str, str], dict[str, Entry]] = {}
    for fact in facts:
        methods = entries.setdefault((fact["context"], fact["k"]), {})
        methods[fact["method"]] = _entry([_published_cell(fact, quantity) for quantity in TIMES])
    return tuple(Row(heads, tuple(found[method] for method in METHODS)) for heads, found in entries.items())


def _header(spec: TableSpec, file: _Measurements) -> Iterator[str]:
    facts = file.facts
    yield header_of_study(spec)
    yield (
        f"{file.path.name}: {facts['model_id']} at {facts['revision']}, {facts['weights']} weights, {facts['dtype']}, "
        f"phi maps random, on {facts['device']}"
    )


def _notes(spec: TableSpec, file: _Measurements) -> Iterator[str]:
    facts = file.facts
    yield f"Study {spec.study}, backbone {facts['model_id']}, {facts['dtype']}, on {facts['device']}."
    yield from not_evaluated([facts["model_id"]])
    if facts["weights"] == "random":
        yield "The backbone's weights are random."
    yield (
        "The feature maps are random and in float32, in every implementation; time hardly depends on the values of "
        "weights, and accuracy is not measured here."
    )
    yield from (IMPLEMENTATION_NOTES[name] for name in dict.fromkeys(name for name, _ in file.blocks))
    if recorded := [float(text) / 1e3 for text in file.fields("recording_ms")]:
        yield f"Recording took {min(recorded):.1f} to {max(recorded):.1f} s."
    yield _timing(file)
    if lacking := _listed(_setting(latency) for latency in file.latencies if not latency.measured):
        yield f"What has no times does not fit into the memory that was free: {lacking}."
    yield Marked(f"$K$ is that of a budget of {marked(_budgets(file.latencies))}.")
    yield (
        "Budgets count positions; the traffic is all that a step has to read and write, the model's weights included. "
        f"The bandwidth is that of copies, {_listed(map(_rounded, file.fields('bandwidth_gb_s')))} GB/s."
    )
    fused = [latency.row["tokens_as_prototype"] for latency in file.latencies if latency.block[0] == FUSED]
    if shares := [float(share) for share in fused if share]:
        places = "everywhere" if min(shares) == 1 else f"in {100 * min(shares):g}% of all places at least"
        yield f"Fused decoding gives the prototype's tokens {places}."
    if file.own_methods:
        yield Marked(f"Columns with {OWN_ROW} are our additions to the paper's table, of the fused decoding alone.")
    if _papers_name(file):
        yield "The paper's values are of its own prototype in bfloat16 on one H200, at a budget of 1%."


def _timing(file: _Measurements) -> str:
    repeats = _listed(file.fields("repeats"))
    furthest = max((_spread(latency) for latency in file.latencies if latency.measured), default=0.0)
    return (
        "Greedy decoding of 32 tokens after random ones; a step is the mean over tokens 2 to 32, end to end is the "
        "prefill, prompt by prompt, and 31 steps. "
        f"Steps are medians of {repeats} {'repeats' if repeats != '1' else 'repeat'}, the furthest of which is "
        f"{furthest:.0%} from its median."
    )


def _setting(latency: Latency) -> str:
    """Methods of a context mostly fit together or not at all, so they are not told apart here."""
    implementation, batch = latency.block
    return f"{IMPLEMENTATION_TITLES[implementation].lower()} at {latency.context} with batch {batch}"


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _rounded(bandwidth: str) -> str:
    value = float(bandwidth)
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _spread(latency: Latency) -> float:
    step, repeats = latency.step, latency.repeats
    return max(repeats.high - step, step - repeats.low) / step
