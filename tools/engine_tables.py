"""Tables of docs/measured/decode_cpu.md, from the file that benchmarks/engines.py writes.

Each function takes the folder that has `results/engines.json`, and returns a table in Markdown. `tools/measured.py`
fills the page. A cell is empty where nothing was measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER = 100
"""Tokens of a whole answer."""
METHODS = {"full": "full", "cache8": "cache8", "scan2": "scan, 2 %", "scan4": "scan, 4 %"}
WEIGHTS = {
    "float32": "float32",
    "int4": "4 bits",
    "int4-compiled": "4 bits, compiled",
    "int8-compiled": "8 bits, compiled",
}
OTHERS = {
    "transformers-float32": "transformers, float32",
    "transformers-bfloat16": "transformers, bfloat16",
    "openvino-f16": "OpenVINO GenAI, f16",
    "openvino-u8": "OpenVINO GenAI, u8",
    "ik_llama-f16": "ik_llama.cpp, f16",
    "ik_llama-f16-flash": "ik_llama.cpp, f16, flash",
    "ik_llama-q8-flash": "ik_llama.cpp, q8_0, flash",
    "llama-f16": "llama.cpp, f16",
    "llama-f16-flash": "llama.cpp, f16, flash",
    "llama-q8-flash": "llama.cpp, q8_0, flash",
}
TITLES = {
    f"ours-{name}-{weights}": f"{method}; {kind}"
    for weights, kind in WEIGHTS.items()
    for name, method in METHODS.items()
} | OTHERS
"""Titles of the sides of benchmarks/engines.py, in the order of the tables; those of this package first."""
BASELINE = "transformers-float32"
"""Its tokens are those of the weights as they are."""


@dataclass(frozen=True)
class Timed:
    """What was measured of one side at one place; seconds and MiB.

    Attributes:
        entry: as it is in the file.
    """

    entry: dict[str, Any]

    @property
    def reads(self) -> list[float]:
        return [read["seconds"][0] for read in self.entry["reads"]]

    @property
    def rounds(self) -> list[list[float]]:
        """Steps of each round, without the first after a prompt, which also summarises it."""
        return [each["seconds"][each["fresh"] :] for each in self.entry["steps"]]

    @property
    def steps(self) -> list[float]:
        return [seconds for each in self.rounds for seconds in each]


Sides = dict[tuple[str, int, int], Timed]
"""By name, threads and length."""


def read(folder: Path) -> dict[str, Any]:
    """Raises FileNotFoundError if the folder has no such results."""
    found: dict[str, Any] = json.loads((folder / "results" / "engines.json").read_text(encoding="utf-8"))
    return found


def timed(folder: Path) -> Sides:
    """Returns what was measured of steps."""
    entries = [entry for entry in read(folder)["sides"] if entry["steps"]]
    return {(entry["side"], entry["threads"], entry["length"]): Timed(entry) for entry in entries}


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def by_length(sides: Sides, cell: Callable[[Timed], str], names: Iterable[str] = TITLES) -> str:
    """Returns a line for each side and number of threads, a column for each length."""
    lengths = sorted({length for _, _, length in sides})
    lines = []
    for threads in sorted({threads for _, threads, _ in sides}):
        for name in names:
            found = [sides.get((name, threads, length)) for length in lengths]
            if any(found):
                lines.append([threads, TITLES[name], *("" if one is None else cell(one) for one in found)])
    return markdown(["threads", "side", *(f"{length:,}" for length in lengths)], lines)


def engines_about(folder: Path) -> str:
    """The machine, the versions, and what else ran on it."""
    found = read(folder)
    machine, entries = found["machine"], found["sides"]
    lines = [["processor", f"{machine['processor']}, {machine['cores']} cores; {', '.join(machine['instructions'])}"]]
    versions = sorted({entry["about"]["version"] for entry in entries})
    lines.append(["versions", "; ".join(versions)])
    lines.append(
        ["commit", ", ".join(sorted({entry["commit"] for entry in entries if entry["side"].startswith("ours")}))]
    )
    lines.append(
        ["measured", f"{min(entry['when'] for entry in entries)} to {max(entry['when'] for entry in entries)}"]
    )
    for (threads, length), timings in rounds_by_place(entries).items():
        loads = [each["load"] for each in timings]
        others = [each["others"] for each in timings]
        text = f"{min(loads):.1f} to {max(loads):.1f}; cores that others took {statistics.median(others):.1f}"
        lines.append([f"load, {length:,} tokens, {threads} threads", f"{text}, at most {max(others):.1f}"])
    return markdown(["", ""], lines)


def rounds_by_place(entries: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Returns all that was timed by threads and length."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for entry in sorted(entries, key=lambda each: (each["threads"], each["length"])):
        found.setdefault((entry["threads"], entry["length"]), []).extend(
            entry["reads"] + entry["steps"] + entry["turns"]
        )
    return found


def engines_start(folder: Path) -> str:
    """Seconds to load the weights, and of a first short text, which compiles; the least of all processes."""
    entries = [one.entry for one in timed(folder).values()]
    lines = []
    for name in TITLES:
        abouts = [entry["about"] for entry in entries if entry["side"] == name]
        if abouts:
            least = (min(about[key] for about in abouts) for key in ("load_seconds", "first_seconds"))
            lines.append([TITLES[name], *(f"{seconds:.1f}" for seconds in least)])
    return markdown(["side", "to load", "first text"], lines)


def engines_prompt(folder: Path) -> str:
    """Seconds to the first token, the least of all rounds."""
    return by_length(timed(folder), lambda one: f"{first_token(one):.3g}")


def engines_step(folder: Path) -> str:
    """Milliseconds of a step, the median and the least."""
    return by_length(
        timed(folder), lambda one: f"{1e3 * statistics.median(one.steps):.1f} ({1e3 * min(one.steps):.1f})"
    )


def engines_memory(folder: Path) -> str:
    """MiB of weights, cache and what is computed, beside libraries, and the most of the process after loading."""
    sides = timed(folder)
    least = {place: one for place, one in sides.items() if place[1] == min(threads for _, threads, _ in sides)}

    return by_length(least, lambda one: f"{memory(one):,.0f} ({one.entry['memory']['peak']:,.0f})")


def engines_answer(folder: Path) -> str:
    """Seconds of the prompt and 100 tokens."""
    return by_length(timed(folder), lambda one: f"{answer(one):.3g}")


def engines_ratios(folder: Path) -> str:
    """What a method takes by the most packed weights that were measured, over the least of others."""
    sides = timed(folder)
    lengths = sorted({length for _, _, length in sides})
    weights = next(
        kind for kind in ("int4-compiled", "int4", "float32") if any(name.endswith(kind) for name, _, _ in sides)
    )
    openvino = [name for name in OTHERS if name.startswith("openvino")]
    compared: list[tuple[str, Callable[[Timed], float], str, Sequence[str]]] = [
        ("step", step, "OpenVINO", openvino),
        ("step", step, "the fastest other engine", list(OTHERS)),
        ("step", step, "cache8", [f"ours-cache8-{weights}"]),
        ("step", step, "cache8, float32", ["ours-cache8-float32"]),
        ("first token", first_token, "OpenVINO", openvino),
        ("first token", first_token, "the fastest other engine", list(OTHERS)),
        ("answer", answer, "OpenVINO", openvino),
        ("answer", answer, "the fastest other engine", list(OTHERS)),
        ("memory", memory, "transformers, bfloat16", ["transformers-bfloat16"]),
        ("memory", memory, "the smallest other engine", list(OTHERS)),
    ]
    lines = []
    for threads in sorted({threads for _, threads, _ in sides}):
        for measure, take, opponent, rivals in compared:
            for name in [f"ours-{method}-{weights}" for method in METHODS]:
                cells = [ratio(sides, name, rivals, (threads, length), take) for length in lengths]
                if any(cells) and name not in rivals:
                    lines.append([threads, measure, opponent, TITLES[name], *cells])
    return markdown(["threads", "of", "over", "side", *(f"{length:,}" for length in lengths)], lines)


def step(one: Timed) -> float:
    return min(one.steps)


def first_token(one: Timed) -> float:
    return min(one.reads)


def answer(one: Timed) -> float:
    """Returns the seconds of the prompt, the first step, and further ones at the mean of the fastest round."""
    first = min(each["seconds"][0] for each in one.entry["steps"] if each["fresh"])
    return first_token(one) + first + (ANSWER - 2) * min(map(statistics.mean, one.rounds))


def memory(one: Timed) -> float:
    """Returns the MiB that are resident after the text, without libraries."""
    resident: float = one.entry["memory"]["resident"]
    return resident - one.entry["about"]["libraries"]


def ratio(
    sides: Sides, name: str, rivals: Iterable[str], place: tuple[int, int], take: Callable[[Timed], float]
) -> str:
    """Returns a number of a side over the least of its rivals, empty if one of both is missing."""
    own = sides.get((name, *place))
    others = [take(sides[rival, *place]) for rival in rivals if (rival, *place) in sides]
    return f"{take(own) / min(others):.2f}" if own is not None and others else ""


def engines_outputs(folder: Path) -> str:
    """Nats a token that the weights of a side have, and how far its greedy tokens are those of the weights as they are.

    A number of tokens before the first other one is followed by the margin: how much higher the logit of the expected
    token was than that of the other, by the weights as they are.
    """
    sides = timed(folder)
    threads = min(threads for _, threads, _ in sides)
    lengths = sorted({length for _, _, length in sides})
    lines = []
    for name in TITLES:
        found = [sides.get((name, threads, length)) for length in lengths]
        if any(found):
            nll = next((f"{one.entry['nll']:.3f}" for one in found if one and "nll" in one.entry), "")
            bases = [sides.get((BASELINE, threads, length)) for length in lengths]
            lines.append([TITLES[name], nll, *map(equal_tokens, found, bases)])
    return markdown(["side", "nats a token", *(f"{length:,}" for length in lengths)], lines)


def equal_tokens(one: Timed | None, base: Timed | None) -> str:
    """Returns how many tokens are equal before the first other one, with its margin."""
    if one is None or base is None:
        return ""
    pairs = list(zip(one.entry["tokens"], base.entry["tokens"], strict=False))
    different = next((place for place, (own, wanted) in enumerate(pairs) if own != wanted), None)
    if different is None:
        return f"all {len(pairs)}"
    top = base.entry["top"][different]
    logits = dict(map(tuple, top))
    other = one.entry["tokens"][different]
    least = min(logits.values())
    margin = top[0][1] - logits.get(other, least)
    return f"{different}, {'' if other in logits else 'over '}{margin:.2f}"


def engines_turns(folder: Path) -> str:
    """Seconds to the first token of the first and of the second turn, and those to save a state."""
    entries = {(each["side"], each["threads"], each["length"]): each for each in read(folder)["sides"] if each["turns"]}
    lines = []
    for (name, threads, length), entry in sorted(
        entries.items(), key=lambda each: (*each[0][1:], list(TITLES).index(each[0][0]))
    ):
        numbers = [
            f"{min(values):.2f}" if (values := [turn[key] for turn in entry["turns"] if key in turn]) else ""
            for key in ("first_token", "kept", "save", "loaded")
        ]
        lines.append([threads, f"{length:,}", TITLES[name], *numbers])
    return markdown(
        ["threads", "tokens", "side", "first turn", "second, kept", "to save", "second, from a file"], lines
    )


TABLES = {
    make.__name__: make
    for make in (
        engines_about, engines_start, engines_prompt, engines_step, engines_memory, engines_answer, engines_ratios,
        engines_outputs, engines_turns,
    )
}  # fmt: skip
