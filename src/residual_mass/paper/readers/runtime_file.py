"""Files of the runtime stage, read with suspicion: one that is cut, damaged or does not add up is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from residual_mass.core.settings import tokens_of
from residual_mass.files import finite_field, is_count, only_value, read_csv
from residual_mass.study.config import METHODS

PROTOTYPE, FUSED = "prototype", "fused"
IMPLEMENTATIONS = (PROTOTYPE, FUSED)
CONSTANT = ("study", "backbone", "model_id", "revision", "weights", "dtype", "device")
"""What a file has one value of."""
TIMES = ("per_step_ms", "per_step_low_ms", "per_step_high_ms", "prefill_ms", "end_to_end_ms")
COUNTS = ("batch", "step_bytes", "repeats")
COLUMNS = [
    *CONSTANT, "implementation", "method", "context", "budget_percent", "k", *TIMES, *COUNTS, "floor_ms",
    "bandwidth_gb_s", "recording_ms", "peak_memory_mib", "tokens_as_prototype", "not_measured", "phi_weights",
]  # fmt: skip
OF_RUNS = (*TIMES, "recording_ms", "peak_memory_mib", "tokens_as_prototype")
"""What a setting that was not measured lacks; the last three also others may lack."""
FLOOR_TOLERANCE = 1e-3
"""In milliseconds and relative: what rounding to three decimals leaves of times and bandwidths."""
REMEDY = "delete it and run the runtime stage again"

Row = dict[str, str]


@dataclass(frozen=True)
class Block:
    """What is printed together: an implementation at one batch size, its rows by context in rising order and method."""

    implementation: str
    batch: int
    rows: dict[str, dict[str, Row]]


@dataclass(frozen=True)
class Runtime:
    """One file of the runtime stage: what all of it is of (CONSTANT), and its rows as they stand."""

    path: Path
    facts: Row
    blocks: tuple[Block, ...]

    @property
    def rows(self) -> list[Row]:
        """All of them, in the order of the blocks."""
        return [row for block in self.blocks for of_context in block.rows.values() for row in of_context.values()]


def load_runtime(path: Path) -> Runtime:
    """Reads one file: blocks by implementation and rising batch size, methods in the order of METHODS.

    Raises:
        ValueError: the file is missing, cut, inconsistent or holds a value that cannot be; names file and line.
    """
    rows = read_csv(path, COLUMNS, "runtime")
    facts = {name: only_value(rows, name, path, REMEDY) for name in CONSTANT}
    by_place: dict[tuple[str, int, str, str], Row] = {}
    for number, row in enumerate(rows, start=2):
        where = f"{path}:{number}"
        _check_names(row, where)
        _check_numbers(row, where)
        place = row["implementation"], int(row["batch"]), row["context"], row["method"]
        if place in by_place:
            raise ValueError(f"{where}: a second row for {_name(*place)}; {REMEDY}")
        by_place[place] = row
    return Runtime(path, facts, tuple(_blocks(by_place, path)))


def is_measured(row: Row) -> bool:
    """Whether a setting was run; of others `not_measured` says why not."""
    return not row["not_measured"]


def floor_of(row: Row) -> float:
    """Milliseconds that the bytes of a step take; not rounded, which would leave nothing of a tiny model's."""
    return int(row["step_bytes"]) / float(row["bandwidth_gb_s"]) / 1e6


def _check_names(row: Row, where: str) -> None:
    options = {
        "implementation": IMPLEMENTATIONS,
        "method": METHODS,
        "weights": ("pretrained", "random"),
        "phi_weights": ("random" if row["method"].startswith("topk_phi") else "",),
    }
    for name, known in options.items():
        if row[name] not in known:
            expected = " or ".join(map(repr, known))
            raise ValueError(f"{where}: {name} of {row['method']} is {row[name]!r}, not {expected}; {REMEDY}")
    try:
        tokens_of(row["context"])
    except ValueError as error:
        raise ValueError(f"{where}: context: {error}; {REMEDY}") from None


def _check_numbers(row: Row, where: str) -> None:
    if not is_measured(row):
        for name in OF_RUNS:
            if row[name]:
                raise ValueError(f"{where}: {name} is {row[name]}, but nothing was measured; {REMEDY}")
    optional = [name for name in ("recording_ms", "peak_memory_mib") if row[name]]
    for name in (*(TIMES if is_measured(row) else ()), "bandwidth_gb_s", *optional):
        if finite_field(row, name, where, REMEDY) <= 0:
            raise ValueError(f"{where}: {name} is {row[name]}, not above 0; {REMEDY}")
    for name in COUNTS:
        if not is_count(row[name]) or int(row[name]) == 0:
            raise ValueError(f"{where}: {name} is {row[name]!r}, not a count; {REMEDY}")
    _check_budget(row, where)
    if is_measured(row):
        _check_order(row, where)
    if row["tokens_as_prototype"] and not 0 <= finite_field(row, "tokens_as_prototype", where, REMEDY) <= 1:
        raise ValueError(f"{where}: tokens_as_prototype is {row['tokens_as_prototype']}, outside [0, 1]; {REMEDY}")
    floor, expected = finite_field(row, "floor_ms", where, REMEDY), floor_of(row)
    if abs(floor - expected) > FLOOR_TOLERANCE * (1 + expected):
        raise ValueError(
            f"{where}: floor_ms is {row['floor_ms']}, but step_bytes at bandwidth_gb_s take {expected:.3f} ms; {REMEDY}"
        )


def _check_order(row: Row, where: str) -> None:
    for low, high in (
        ("per_step_low_ms", "per_step_ms"),
        ("per_step_ms", "per_step_high_ms"),
        ("prefill_ms", "end_to_end_ms"),
    ):
        if float(row[low]) > float(row[high]):
            raise ValueError(f"{where}: {low} is {row[low]}, above {high}, {row[high]}; {REMEDY}")


def _check_budget(row: Row, where: str) -> None:
    """Full attention has neither a budget nor a K, every other method both."""
    if row["method"] == "full":
        for name in ("budget_percent", "k"):
            if row[name]:
                raise ValueError(f"{where}: {name} is {row[name]!r}, but full attention has none; {REMEDY}")
        return
    if not 0 < finite_field(row, "budget_percent", where, REMEDY) <= 100:
        raise ValueError(f"{where}: budget_percent is {row['budget_percent']}, outside (0, 100]; {REMEDY}")
    if not is_count(row["k"]):
        raise ValueError(f"{where}: k is {row['k']!r}, not a count; {REMEDY}")


def _blocks(by_place: dict[tuple[str, int, str, str], Row], path: Path) -> Iterable[Block]:
    """Every context must have every method, and the three that share K the same budget."""
    sizes = sorted({(IMPLEMENTATIONS.index(name), batch) for name, batch, _, _ in by_place})
    for index, batch in sizes:
        implementation = IMPLEMENTATIONS[index]
        contexts = {context for *block, context, _ in by_place if block == [implementation, batch]}
        rows: dict[str, dict[str, Row]] = {}
        for context in sorted(contexts, key=tokens_of):
            for method in METHODS:
                place = implementation, batch, context, method
                if place not in by_place:
                    raise ValueError(f"{path}: cut short, no row for {_name(*place)}; {REMEDY}")
                rows.setdefault(context, {})[method] = by_place[place]
            _check_one_budget(list(rows[context].values()), path)
        yield Block(implementation, batch, rows)


def _check_one_budget(rows: Sequence[Row], path: Path) -> None:
    first, *others = (row for row in rows if row["method"] != "full")
    for row in others:
        for name in ("budget_percent", "k"):
            if row[name] != first[name]:
                place = f"{row['implementation']}, batch {row['batch']}, {row['context']}"
                raise ValueError(
                    f"{path}: {name} at {place} is {first[name]} for {first['method']}, but {row[name]} for "
                    f"{row['method']}; {REMEDY}"
                )


def _name(implementation: str, batch: int, context: str, method: str) -> str:
    return f"{method} at {context} ({implementation}, batch {batch})"
