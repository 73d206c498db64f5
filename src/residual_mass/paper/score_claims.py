"""The paper's statements about task scores, each read on the scores and on the likelihood of the right answers.

Scores of few examples decide little; the likelihood of the right answer is read off the same prompts token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from residual_mass.benchmarks.catalogue import BENCHMARKS
from residual_mass.benchmarks.columns import FIDELITY, FOLLOWING, GOLD, OWN, RESULTS
from residual_mass.core.settings import length_and_variant, tokens_of
from residual_mass.files import csv_text, read_csv, write_text
from residual_mass.metrics import KL, METRICS, NLL, Metric
from residual_mass.paper.titles import BENCHMARK_TITLES
from residual_mass.provenance import Record
from residual_mass.statements import COLUMNS, verdict
from residual_mass.study.specs import ScoreClaimsSpec

Line = Mapping[str, str]
SHOWN_IN = {"longbench": "natural_main"}
"""Tables whose text makes the statements; those of the other benchmarks are `<benchmark>_sweep`."""
BEYOND = "Beyond their training length, feature maps fall behind top-K."


def run(
    spec: ScoreClaimsSpec, results: Sequence[Path], mismatch: Path | None, fidelity: Sequence[Path], out: Path
) -> None:
    """The `score-claims` stage: a row per statement, setting and reading, with the columns of the other claims.

    Args:
        results: scores of the main arms.
        mismatch: scores of maps at other lengths than they were trained at.
    """
    record = Record("score_claims", spec, [*results, *([mismatch] if mismatch else []), *fidelity])
    scores = [line for path in results for line in read_csv(path, RESULTS, "score")]
    others = read_csv(mismatch, RESULTS, "join") if mismatch else []
    distances = [line for path in fidelity for line in read_csv(path, FIDELITY, "fidelity")]
    write_text(out, csv_text(COLUMNS, [*_completion(spec, scores, distances), *_beyond(spec, others, distances)]))
    record.write(out)


def _completion(spec: ScoreClaimsSpec, scores: Sequence[Line], distances: Sequence[Line]) -> Iterator[dict[str, str]]:
    """Completion against top-K, benchmark by benchmark, length by length and budget by budget."""
    for benchmark in BENCHMARKS:
        statement = f"Completion is better than top-K on {BENCHMARK_TITLES[benchmark]}."
        readings = [
            *(line for line in scores if line["benchmark"] == benchmark),
            *(line for line in distances if line["text"] == benchmark and line["metric"] == NLL.name),
        ]
        for line in readings:
            if line["method"] == "topk_phi" and line["task"] == "all" and _is_gold_or_score(line):
                place = {"claim": f"completion_helps_{benchmark}", "statement": statement, "corpus": benchmark}
                shown_in = SHOWN_IN.get(benchmark, f"{benchmark}_sweep")
                yield _row(spec, line, place | {"shown_in": shown_in}, better=True)


def _beyond(spec: ScoreClaimsSpec, others: Sequence[Line], distances: Sequence[Line]) -> Iterator[dict[str, str]]:
    """Maps at lengths beyond their own against top-K: scores, and the distance on held-out text."""
    of_text = (line for line in distances if line["metric"] == KL.name and line["state"] == OWN)
    for line in (*others, *(line for line in of_text if line["continuation"] == FOLLOWING)):
        trained, _ = length_and_variant(line["maps"]) if line["maps"] else ("", "")
        if line["task"] == "all" and line["method"] == "topk_phi" and tokens_of(trained) < tokens_of(line["length"]):
            place = {"claim": "maps_beyond_their_length", "statement": BEYOND, "shown_in": "cross_length_mismatch"}
            corpus = {"corpus": line.get("benchmark") or line["text"]}
            yield _row(spec, line, place | corpus, better=False)


def _is_gold_or_score(line: Line) -> bool:
    return line.get("continuation", GOLD) == GOLD


def _row(spec: ScoreClaimsSpec, line: Line, place: Mapping[str, str], better: bool) -> dict[str, str]:
    """One reading: the statement holds where the whole interval of the gain is on the claimed side."""
    metric = METRICS[line["metric"]]
    ends = [_signed(metric, line[name], better) for name in ("gain", "gain_ci_low", "gain_ci_high")]
    estimate, low, high = ends[0], *sorted(ends[1:], key=lambda end: float(end or 0))
    maps = f", maps of {line['maps']}" if not better else ""
    return {
        **{name: line[name] for name in ("study", "backbone", "length", "model_id", "revision", "weights", "phi_sha")},
        **place,
        "k": f"{float(line['k_mean']):.0f}",
        "primary": str(int(line["budget_percent"] == f"{spec.budget_percent:g}")),
        "statistic": f"{metric.title}: {'gain' if better else 'loss'} at {line['budget_percent']} %{maps}",
        "estimate": estimate,
        "ci_low": low,
        "ci_high": high,
        "verdict": verdict(low, high),
    }


def _signed(metric: Metric, number: str, better: bool) -> str:
    """The number as it stands in favour of the statement; empty where it is not known."""
    if not number:
        return ""
    value = metric.goodness(float(number)) * (1 if better else -1)
    return f"{value + 0.0:.6f}"
