"""The table of latencies of one backbone: how long a decoding step takes, and how much memory traffic it cannot do
without.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from residual_mass.files import csv_text, write_text
from residual_mass.paper import published
from residual_mass.paper.cells import LEFT_OUT
from residual_mass.paper.latex import Latex, escape, render
from residual_mass.paper.published import MODELS
from residual_mass.paper.readers.runtime_file import (
    FUSED,
    PROTOTYPE,
    REMEDY,
    Block,
    Row,
    Runtime,
    floor_of,
    is_measured,
    load_runtime,
)
from residual_mass.paper.tables.captions import OF_THE_PAPER, header_of_published, header_of_study, not_evaluated
from residual_mass.paper.titles import METHOD_TITLES, backbone_title
from residual_mass.study.config import METHODS
from residual_mass.study.specs import TableSpec

PREFIX = "runtime_"
"""What labels begin with; the backbone's name follows."""
PUBLISHED = tuple(f"{PREFIX}{backbone}" for backbone in MODELS)
"""Labels of the paper's own tables."""
PAPERS_BATCH, PAPERS_BUDGET = 1, 1.0
STEP, END_TO_END, TRAFFIC, FLOOR, OVER_FLOOR = "per_step_ms", "end_to_end_ms", "step_bytes", "floor_ms", "over_floor"
QUANTITIES = (STEP, END_TO_END, TRAFFIC, FLOOR, OVER_FLOOR)
"""What is printed of a measurement: `step / end to end`, then `traffic / floor / step over floor`."""
CELL_COLUMNS = (
    "table backbone implementation method length batch budget_percent k quantity text bold value low high repeats "
    "source study model_id revision weights phi_weights dtype device bandwidth_gb_s recording_ms peak_memory_mib "
    "tokens_as_prototype not_measured"
).split()
RUNTIME_CONDITIONS = Latex(
    "One H200, bfloat16, greedy decoding, batch size 1, 32 generated tokens, an implementation without fused kernels; "
    "a step is the mean over tokens 2 to 32, end to end is the prefill and 31 steps; $K$ is that of a budget of 1\\%."
)
"""What the paper says of its measurements."""
IMPLEMENTATION_TITLES = {PROTOTYPE: "Prototype", FUSED: "Fused"}
IMPLEMENTATION_NOTES = {
    PROTOTYPE: "Prototype: Full is the decoding of the transformers library, the others follow what the paper says of "
    "its own prototype.",
    FUSED: "Fused: decoding of our own in buffers of fixed size; Full is attention over the same buffers. On a GPU it "
    "has fused kernels, and its steps are CUDA graphs, which are recorded once per prompt length and are not counted.",
}

Line = tuple[str, ...]
"""One printed row: a context, of latencies the K that its budget makes, and a text for each of METHODS."""
Part = tuple[str, list[Line]]
"""Rows with their title; the only ones of a table have none."""


def is_label(label: str) -> bool:
    return re.fullmatch(rf"{PREFIX}[a-z0-9][a-z0-9._-]*", label) is not None


def run(spec: TableSpec, results: list[Path], template: Path, out: Path, cells: Path) -> None:
    """Writes the table from the backbone's one file, and to `cells` one CSV line per printed value.

    Shown are the contexts of the spec, beside them the paper's values where it measured that backbone.

    Raises:
        ValueError: the file is not one alone, of another study or backbone, or damaged, or lacks a context; names file
            and line.
    """
    file = _shown(_only(spec, results), spec)
    blocks = [(_block_title(block), [_latencies(of) for of in block.rows.values()]) for block in file.blocks]
    table = _render(
        spec.label,
        template,
        header=_header(spec, file),
        notes=_notes(spec, file),
        backbone=_title(spec, file),
        blocks=[*blocks, *_published_block(file)],
        traffic=[(_traffic_title(block), [_traffic(of) for of in block.rows.values()]) for block in file.blocks],
    )
    write_text(cells, csv_text(CELL_COLUMNS, (line for row in file.rows for line in _cell_lines(spec, file, row))))
    write_text(out, table)


def render_published(label: str, template: Path) -> str:
    """One of PUBLISHED with the paper's values."""
    rows = published.rows_of(label)
    return _render(
        label,
        template,
        header=[header_of_published(label)],
        notes=[OF_THE_PAPER, RUNTIME_CONDITIONS],
        backbone=published.model_title(rows[0]["backbone"]),
        blocks=[("", _published_lines(rows))],
        traffic=[],
    )


def printed(quantity: str, value: float) -> str:
    """A value of QUANTITIES as tables print it; traffic is in gigabytes, and long times have no room for decimals."""
    if quantity == TRAFFIC:
        return f"{value / 1e9:.3f}"
    return f"{value:.2f}" if value < 1e4 else f"{value:.0f}"


def _only(spec: TableSpec, results: Sequence[Path]) -> Runtime:
    if len(results) != 1:
        given = ", ".join(path.name for path in results)
        raise ValueError(f"table {spec.label}: shows one file, --results has {len(results)} ({given}); give one")
    file = load_runtime(results[0])
    wanted = {"study": spec.study, "backbone": spec.label.removeprefix(PREFIX)}
    for name, value in wanted.items():
        if file.facts[name] != value:
            raise ValueError(
                f"{file.path}: is of {name} {file.facts[name]!r}, table {spec.label} is of {value!r}; {REMEDY}"
            )
    return file


def _shown(file: Runtime, spec: TableSpec) -> Runtime:
    """The contexts that the table shows, all of which every block has."""
    for block, context in itertools.product(file.blocks, spec.lengths):
        if context not in block.rows:
            place = f"{block.implementation}, batch {block.batch}, at {context}"
            raise ValueError(f"{file.path}: no row for {place}; {REMEDY}")
    blocks = (
        Block(block.implementation, block.batch, {c: of for c, of in block.rows.items() if c in spec.lengths})
        for block in file.blocks
    )
    return Runtime(file.path, file.facts, tuple(blocks))


def _render(
    label: str,
    template: Path,
    header: Iterable[str],
    notes: Iterable[str],
    backbone: str,
    blocks: list[Part],
    traffic: list[Part],
) -> str:
    return render(
        template,
        label=Latex(f"tab:{label}"),  # an escaped underscore would be another label
        header=list(header),
        notes=list(notes),
        backbone=backbone,
        methods=[METHOD_TITLES[method] for method in METHODS],
        blocks=blocks,
        traffic=traffic,
    )


def _block_title(block: Block) -> str:
    return f"{IMPLEMENTATION_TITLES[block.implementation]}, batch {block.batch}"


def _traffic_title(block: Block) -> str:
    return f"{_block_title(block)}, budget {_budgets(of['topk'] for of in block.rows.values())}"


def _latencies(rows: Mapping[str, Row]) -> Line:
    """Step and end to end of every method at one context."""
    return rows["topk"]["context"], rows["topk"]["k"], *_texts(rows, (STEP, END_TO_END))


def _traffic(rows: Mapping[str, Row]) -> Line:
    """Bytes of a step, what they cost, and the measured step over that."""
    return rows["topk"]["context"], *_texts(rows, (TRAFFIC, FLOOR, OVER_FLOOR))


def _texts(rows: Mapping[str, Row], quantities: Sequence[str]) -> Iterator[str]:
    for method in METHODS:
        yield " / ".join(_text(rows[method], name) for name in quantities)


def _text(row: Row, quantity: str) -> str:
    """As printed; what was not measured has its traffic and floor all the same."""
    return LEFT_OUT.text if _is_lacking(row, quantity) else printed(quantity, _value(row, quantity))


def _is_lacking(row: Row, quantity: str) -> bool:
    return not is_measured(row) and quantity in (STEP, END_TO_END, OVER_FLOOR)


def _value(row: Row, quantity: str) -> float:
    """Rounded where it is computed, so that what is printed is the print of what the CSV has."""
    if quantity == OVER_FLOOR:
        return round(float(row[STEP]) / floor_of(row), 6)
    return float(row[quantity])


def _budgets(rows: Iterable[Row]) -> str:
    """Each once; full attention has none."""
    return _listed(f"{float(row['budget_percent']):g}%" for row in rows if row["budget_percent"])


def _published_block(file: Runtime) -> Iterator[Part]:
    """The paper's values, where it measured this model."""
    for backbone in _papers_name(file):
        yield f"The paper, batch {PAPERS_BATCH}", _published_lines(published.rows_of(f"{PREFIX}{backbone}"))


def _papers_name(file: Runtime) -> list[str]:
    """What the paper's own table calls the model; nothing for one that it did not measure."""
    return [name for name, model_id in MODELS.items() if model_id == file.facts["model_id"]]


def _published_lines(rows: Iterable[Row]) -> list[Line]:
    texts: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        of_context = texts.setdefault((row["context"], row["k"]), {})
        of_context[row["method"]] = f"{row[STEP]} / {row[END_TO_END]}"
    return [(context, k, *(of[method] for method in METHODS)) for (context, k), of in texts.items()]


def _title(spec: TableSpec, file: Runtime) -> str:
    return backbone_title(spec, file.facts["backbone"], file.facts["model_id"])


def _header(spec: TableSpec, file: Runtime) -> Iterator[str]:
    facts = file.facts
    yield header_of_study(spec)
    yield (
        f"{file.path.name}: {facts['model_id']} at {facts['revision']}, {facts['weights']} weights, {facts['dtype']}, "
        f"phi maps random, on {facts['device']}"
    )


def _notes(spec: TableSpec, file: Runtime) -> Iterator[str]:
    facts, rows = file.facts, file.rows
    yield f"Study {spec.study}, backbone {facts['model_id']}, {facts['dtype']}, on {facts['device']}."
    yield from not_evaluated([facts["model_id"]])
    if facts["weights"] == "random":
        yield "The backbone's weights are random."
    yield (
        "The feature maps are random and in float32, in every implementation; time hardly depends on the values of "
        "weights, and accuracy is not measured here."
    )
    yield from (IMPLEMENTATION_NOTES[name] for name in dict.fromkeys(block.implementation for block in file.blocks))
    if recorded := [float(row["recording_ms"]) / 1e3 for row in rows if row["recording_ms"]]:
        yield f"Recording took {min(recorded):.1f} to {max(recorded):.1f} s."
    repeats = _listed(row["repeats"] for row in rows)
    furthest = max((_spread(row) for row in rows if is_measured(row)), default=0.0)
    yield (
        "Greedy decoding of 32 tokens after random ones; a step is the mean over tokens 2 to 32, end to end is the "
        "prefill, prompt by prompt, and 31 steps. "
        f"Steps are medians of {repeats} {'repeats' if repeats != '1' else 'repeat'}, the furthest of which is "
        f"{furthest:.0%} from its median."
    )
    if lacking := _listed(_place(row) for row in rows if not is_measured(row)):
        yield f"What has no times does not fit into the memory that was free: {lacking}."
    yield Latex(f"$K$ is that of a budget of {escape(_budgets(rows))}.")
    yield (
        "Budgets count positions; the traffic is all that a step has to read and write, the model's weights included. "
        f"The bandwidth is that of copies, {_listed(_rounded(row['bandwidth_gb_s']) for row in rows)} GB/s."
    )
    fused = [row["tokens_as_prototype"] for row in rows if row["implementation"] == FUSED]
    if shares := [float(share) for share in fused if share]:
        places = "everywhere" if min(shares) == 1 else f"in {100 * min(shares):g}% of all places at least"
        yield f"Fused decoding gives the prototype's tokens {places}."
    if _papers_name(file):
        yield "The paper's values are of its own prototype in bfloat16 on one H200, at a budget of 1%."


def _place(row: Row) -> str:
    """Methods of a context mostly fit together or not at all, so they are not told apart here."""
    return f"{IMPLEMENTATION_TITLES[row['implementation']].lower()} at {row['context']} with batch {row['batch']}"


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _rounded(bandwidth: str) -> str:
    value = float(bandwidth)
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _spread(row: Row) -> float:
    step = float(row[STEP])
    return max(float(row["per_step_high_ms"]) - step, step - float(row["per_step_low_ms"])) / step


def _cell_lines(spec: TableSpec, file: Runtime, row: Row) -> Iterator[Row]:
    origin = {column: row[column] for column in CELL_COLUMNS if column in row}
    origin |= {"table": spec.label, "length": row["context"], "bold": "0", "source": file.path.name}
    origin["budget_percent"] = f"{float(row['budget_percent']):g}" if row["budget_percent"] else ""
    for name in QUANTITIES:
        value = "" if _is_lacking(row, name) else f"{_value(row, name):.6f}" if name == OVER_FLOOR else row[name]
        range_ = {"low": row["per_step_low_ms"], "high": row["per_step_high_ms"]} if name == STEP else {}
        yield origin | {"quantity": name, "text": _text(row, name), "value": value} | range_
