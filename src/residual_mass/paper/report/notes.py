"""What a study's page tells of a single value, in words, from the line of the CSV beside its table."""

from __future__ import annotations

from collections.abc import Iterator

from residual_mass.paper.cells import format_score
from residual_mass.paper.comparison.by_cell import COLUMNS
from residual_mass.paper.tables.runtime_table import END_TO_END, FLOOR, OVER_FLOOR, STEP, TRAFFIC

PLACE = COLUMNS[: COLUMNS.index("published")]
"""What tells the cells of a comparison apart."""
TOLD = """
    value original_value ci_low ci_high low high stderr n packs rows gain gain_ci_low gain_ci_high gain_p gain_p_holm
    mde full_gap full_gap_p flags data maps phi_sha source
""".split()
"""Columns that notes have a wording of their own for."""
UNTOLD = "text bold study backbone model_id revision weights prompts_sha cut_share decoding".split()
"""Columns without a note: what the cell shows itself, and what is the same for every method beside it."""
QUANTITIES = {
    STEP: ("ms", "one decoding step"),
    END_TO_END: ("ms", "the prefill and 31 steps, end to end"),
    TRAFFIC: ("GB", "read and written in a step"),
    FLOOR: ("ms", "that traffic at the measured bandwidth"),
    OVER_FLOOR: ("times", "the measured step over that floor"),
}
"""Unit and title of the quantities that share a cell."""
MEASURED = {
    "bandwidth_gb_s": "bandwidth of copies {} GB/s",
    "clamped_share": "share of rows whose residual was dropped {}",
    "not_measured": "not measured: {}",
    "peak_memory_mib": "peak memory {} MiB",
    "phi_weights": "{} feature maps",
    "recording_ms": "its steps recorded as CUDA graphs in {} ms",
    "repeats": "{} repeats",
    "tokens_as_prototype": "share of tokens that are the prototype's {}",
}
"""What is said of columns whose names do not read as words."""
FLAGS = {
    "floor": "at the floor, where methods cannot be told apart",
    "ceiling": "at the ceiling, where methods cannot be told apart",
    "beats_full": "above Full by more than chance, which is suspicious",
}
NUMBERS = """
    value original_value ci_low ci_high low high stderr gain gain_ci_low gain_ci_high gain_p gain_p_holm mde full_gap
    full_gap_p
""".split()
"""Columns that hold numbers wherever they hold anything."""

Row = dict[str, str]


def notes_on(line: Row, of_several: bool) -> Iterator[str]:
    """What a reader may want to know of a line, in words; its quantity is named where the cell prints several."""
    found = {name: text for name, text in line.items() if text}
    if of_several:
        yield _titled(found)
    if {"ci_low", "ci_high"} <= set(found):
        yield f"95% interval {_number(found['ci_low'])} to {_number(found['ci_high'])}"
    if "stderr" in found:
        yield f"standard error {_number(found['stderr'])}"
    if {"value", "original_value"} <= set(found) and _number(found["value"]) != _number(found["original_value"]):
        yield f"by the authors' scorer {_number(found['original_value'])}"
    yield from _counts(found)
    yield from _tests(found)
    yield from (FLAGS.get(flag, flag) for flag in found.get("flags", "").split())
    if found.get("data", "original") != "original":
        yield f"{found['data'].replace('+', ' and ')} examples"
    if "maps" in found:
        yield " ".join(filter(None, ("feature maps", found["maps"], found.get("phi_sha", "")[:12])))
    for name, text in found.items():
        if name not in (*TOLD, *UNTOLD, *PLACE):
            yield MEASURED[name].format(text) if name in MEASURED else f"{name.replace('_', ' ')} {text}"
    if "value" in found and not of_several:
        yield f"unrounded {found['value']}"
    if "source" in found:
        yield f"from {found['source']}"


def _titled(found: Row) -> str:
    """A quantity with its unit, and the fastest and slowest repeat of one that has them."""
    unit, title = QUANTITIES[found["quantity"]]
    bounds = f", repeats from {found['low']} to {found['high']} {unit}" if {"low", "high"} <= set(found) else ""
    return f"{found['text']} {unit}: {title}{bounds}"


def _counts(found: Row) -> Iterator[str]:
    if "n" in found:
        yield f"{found['n']} examples"
    if "packs" in found:
        yield ", ".join([f"{found['packs']} packs", *([f"{found['rows']} attention rows"] if "rows" in found else [])])


def _tests(found: Row) -> Iterator[str]:
    """Paired differences with their p-values."""
    if {"gain", "gain_ci_low", "gain_ci_high", "gain_p"} <= set(found):
        interval = f" ({_number(found['gain_ci_low'], '+')} to {_number(found['gain_ci_high'], '+')})"
        corrected = f", {_p(found['gain_p_holm'])} after Holm's correction" if "gain_p_holm" in found else ""
        difference = f"difference to Top-K at the same budget {_number(found['gain'], '+')}{interval}"
        yield f"{difference}, p {_p(found['gain_p'])}{corrected}"
    if "mde" in found:
        yield f"smallest gain that so many examples would show {_number(found['mde'])}"
    if {"full_gap", "full_gap_p"} <= set(found):
        yield f"difference to Full {_number(found['full_gap'], '+')}, p {_p(found['full_gap_p'])}"


def _number(text: str, sign: str = "") -> str:
    value = float(text)
    return f"{value:+z.3f}" if sign else format_score(value)


def _p(text: str) -> str:
    return f"{float(text):.3g}"
