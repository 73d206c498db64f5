"""Tables of what the method costs, with the values that the paper prints: training, and the latency of decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from residual_mass.paper import published
from residual_mass.paper.captions import OF_THE_PAPER, header_of_published
from residual_mass.paper.latex import Latex, escape, render
from residual_mass.paper.titles import METHOD_TITLES
from residual_mass.specs import METHODS

TRAINING = "training_cost_64k"
RUNTIMES = ("runtime_1b", "runtime_3b")
LABELS = (TRAINING, *RUNTIMES)
RUNTIME_CONDITIONS = Latex(
    "One H200, bfloat16, greedy decoding, batch size 1, 32 generated tokens, an implementation without fused kernels; "
    "a step is the mean over tokens 2 to 32, end to end is the prefill and 31 steps; $K$ is that of a budget of 1\\%."
)
"""What the paper says of its measurements."""


@dataclass(frozen=True)
class Latencies:
    """One printed row: a context and the K that its budget makes; per method "step / end to end" in milliseconds."""

    context: str
    k: str
    cells: tuple[str, ...]


def render_published(label: str, template: Path) -> str:
    """One of LABELS with the paper's values."""
    return _training(template) if label == TRAINING else _runtime(label, template)


def _training(template: Path) -> str:
    lines = [
        (published.model_title(row["backbone"]), _effort(row), f"{row['wall_clock_h']} h")
        for row in published.rows_of(TRAINING)
    ]
    return render(template, header=[header_of_published(TRAINING)], notes=[OF_THE_PAPER], lines=lines)


def _effort(row: dict[str, str]) -> Latex:
    """`200k steps on 8xH200`, with a proper cross."""
    count, _, device = row["hardware"].partition("x")
    return Latex(rf"{_thousands(int(row['steps']))} steps on {escape(count)}$\times${escape(device)}")


def _thousands(steps: int) -> str:
    return f"{steps // 1000}k" if steps % 1000 == 0 else f"{steps:,}"


def _runtime(label: str, template: Path) -> str:
    rows = published.rows_of(label)
    return render(
        template,
        label=Latex(f"tab:{label}"),  # an escaped underscore would be another label
        header=[header_of_published(label)],
        notes=[OF_THE_PAPER, RUNTIME_CONDITIONS],
        backbone=published.model_title(rows[0]["backbone"]),
        methods=[METHOD_TITLES[method] for method in METHODS],
        lines=list(_latencies(rows)),
    )


def _latencies(rows: list[dict[str, str]]) -> Iterator[Latencies]:
    for context, k in dict.fromkeys((row["context"], row["k"]) for row in rows):
        texts = {
            row["method"]: f"{row['per_step_ms']} / {row['end_to_end_ms']}" for row in rows if row["context"] == context
        }
        yield Latencies(context, k, tuple(texts[method] for method in METHODS))
