"""The sub-command `measure`: its answer, the cheapest method that meets the target."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from residual_mass.files import atomic_write, write_json, write_text
from residual_mass.measure.arguments import BASELINE, Arguments
from residual_mass.methods import method_named
from residual_mass.methods.served import backends_of

if TYPE_CHECKING:  # the command line, which imports this module, does without torch and pandas
    import pandas as pd
    from matplotlib.figure import Figure

    from residual_mass.measure.distances import Measured

LATE = ("accelerate", "gguf", "matplotlib")
"""Packages of the extra `measure` that are needed only after the measurement or by other libraries; checked first."""
FEW = 16
"""Number of documents below which heavy tails may be missed and intervals are wide."""
SCAN_PAYS = 8_000
"""Tokens from which on a packed scan was faster than a packed 8-bit cache (docs/measured/decode_cpu.md)."""
ARM = ["method", "budget_percent"]


def run(options: argparse.Namespace) -> None:
    """Measures, prints the answer and writes it to a folder in `--out`; interrupted, it resumes."""
    for package in LATE:
        import_module(package)
    args = Arguments.of(options)
    if args.latency:
        from residual_mass.measure import latency

        text, files = latency.measure(args)
    else:
        from residual_mass.measure.distances import measure

        measured = measure(args)
        text = printed(measured)
        files = write(measured, text)
    _print(text)
    for file in files:
        _print(str(file))


def _print(text: str) -> None:
    """Prints a text, with escapes for what the terminal's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


# ---- the answer ------------------------------------------------------------------------------------------------------


def choices(measured: Measured) -> pd.DataFrame:
    """Returns a row per method and budget, over all texts, in ascending order of bytes read.

    `high` is the largest upper end of an interval, infinite for a single document.
    """
    table = measured.table.assign(high=measured.table["ci_high"].fillna(math.inf))
    rows = table.groupby(ARM, sort=False).agg(
        read=("read", "mean"), high=("high", "max"), over_topk=("kl_over_topk", "max")
    )
    return rows.reset_index().sort_values("read", kind="stable")


def recommended(measured: Measured) -> pd.Series | None:
    """Returns the first of `choices` that reads fewer bytes than full attention and whose intervals end at or below the
    target on every text; None if there is none.
    """
    rows = choices(measured)
    met = rows[(rows["high"] <= measured.args.target_kl) & (rows["read"] < 1)]
    return None if met.empty else met.iloc[0]


def verdict(measured: Measured) -> str:
    """Returns the recommendation in a few sentences."""
    target, choice = measured.args.target_kl, recommended(measured)
    if choice is None:
        nearest = choices(measured).sort_values("high").iloc[0]
        if math.isinf(nearest.high):
            return "Nothing is recommended: a single document has no interval. Give more text."
        if nearest.high <= target:
            return (
                f"Nothing is recommended: what stays below {target:g} nats reads no fewer bytes than full attention. "
                "Try smaller --budgets or a longer --length."
            )
        return (
            f"None of the methods stays below {target:g} nats. The nearest is {nearest.method} at "
            f"{nearest.budget_percent:g} %, whose interval ends at {nearest.high:.2g}. Try larger --budgets, more "
            "--documents for narrower intervals, or another --target-kl."
        )
    texts = "this text" if len(measured.texts) == 1 else "every text"
    alone = choice.method == BASELINE or math.isnan(choice.over_topk)
    over = "" if alone else f", and leaves at most {choice.over_topk:.2g} of topk's KL"
    own, full = measured.seconds[choice.method], measured.seconds["full"]
    slower = ": slower on this machine, where it saves bytes and no time" if own > full else ""
    asked = f'method="{choice.method}", budget={choice.budget_percent / 100:g})'
    name, use = "partial_kv", f"with partial_kv(model, {asked}:\n        output = model.generate(**inputs)"
    if choice.method in measured.packed:
        name, use = "partial_decoding", f"output = model.generate(**inputs, custom_generate=partial_decoding({asked})"
    return (
        f"{choice.method} with {choice.budget_percent:g} % of the prompt read exactly by a query head is the cheapest "
        f"that stays below {target:g} nats on {texts}: a step reads {100 * choice.read:.0f} % of the bytes that full "
        f"attention reads{over}; the interval of its KL ends at {choice.high:.2g}.\n"
        f"It takes {own:.2g} s a token here, full attention {full:.2g} s{slower}.\n\n"
        f"    from residual_mass import {name}\n\n    {use}"
    )


def verified(measured: Measured) -> str:
    """Returns a sentence on the bytes per verified token of the method and budget that need the fewest."""
    means = measured.table.groupby(ARM)[["verified", "verified_high"]].agg({"verified": "mean", "verified_high": "max"})
    (method, budget), costs = min(means.iterrows(), key=lambda arm: arm[1]["verified"])
    high = "" if math.isnan(costs.verified_high) else f" (the intervals end at {100 * costs.verified_high:.0f} %)"
    return (
        f"With verification the text is full attention's own: where {method} with {budget:g} % drafts and a step of "
        f"full attention verifies, a token reads {100 * costs.verified:.0f} % of the bytes{high}, by the first "
        "differences along these texts."
    )


def limits(measured: Measured) -> Iterator[str]:
    """Yields what the measurement cannot show, one sentence or two each."""
    args, choice = measured.args, recommended(measured)
    yield (
        f"Prompts had {args.length} tokens. Other lengths need other shares, as a rule smaller ones for longer "
        "prompts: measure at yours with --length."
    )
    for text in measured.texts:
        count = len(text.sequences)
        if count < args.documents:
            yield f"{text.name} has {count} of {args.documents} documents: it holds no more text."
        if text.sources < count:
            files = "one file" if text.sources == 1 else f"{text.sources} files"
            yield (
                f"{text.name}: {count} documents come from {files}. Parts of a file are alike, so the interval is "
                f"about {files} and too narrow for others."
            )
        if text.read < 1:
            yield (
                f"{text.name}: documents were taken from {100 * text.read:.2g} % of its characters, at places spread "
                "evenly from its beginning to its end."
            )
        if text.special:
            how = "as these tokens" if args.special_tokens else "as text; --special-tokens reads them as these tokens"
            yield f"{text.name}: names of special tokens in it, such as {text.special}, were read {how}."
    if min(len(text.sequences) for text in measured.texts) < FEW:
        yield f"If one document in ten is far worse, so few may not include it: decide on --documents {FEW} or more."
    yield "The ratio to topk's KL differs less between texts than the nats do: it is what to expect on another text."
    yield "Running text hardly tests whether a fact is found again: measure on prompts with answers for that."
    yield f"Measured are the first {args.tokens} tokens after a prompt; over hundreds the ratio to topk's KL grows."
    if choice is not None and backends_of(method_named(choice.method)) == ("torch",):
        yield (
            f"Bytes are what a decode step has to read. partial_kv shows what {choice.method} does to the output; this "
            "library has no fast step for it yet."
        )
    if choice is not None and choice.method in {*measured.packed} - {"cache8"} and args.prompt_tokens < SCAN_PAYS:
        yield (
            f"Below some {SCAN_PAYS:,} tokens cache8, an 8-bit cache that is read whole, takes no longer on a CPU and "
            "stays nearer to full attention; --latency times both here."
        )
    yield (
        f"The recommendation is the best of {len(choices(measured))} on the same documents, so a little optimistic: "
        "confirm it on other text."
    )


def printed(measured: Measured) -> str:
    """Returns the tables and the answer as text for a terminal."""
    args, choice = measured.args, recommended(measured)
    width = max(map(len, args.methods))
    line = f"{{}} {{:{width}}}  {{:>5}}  {{:>5}}  {{:>5}}  {{:>11}}  {{:25}}  {{:>12}}  {{:>8}}  {{:>9}}".format
    lines = [
        f"{measured.title} tokens, {args.tokens} tokens after each. KL(full attention || method) of the next\n"
        "token: over that of topk at the same budget, then in nats with a 95 % interval. "
        f"Full attention takes {measured.seconds['full']:.2g} s a token."
    ]
    for text in measured.texts:
        lines.append(f"\n{text.name}, {len(text.sequences)} documents")
        lines.append(
            line(" ", "method", "exact", "read", "kept", "KL / topk's", "KL", measured.tail, "same top", "s a token")
        )
        for row in measured.table[measured.table["text"] == text.name].sort_values("read").itertuples():
            chosen = choice is not None and (choice.method, choice.budget_percent) == (row.method, row.budget_percent)
            ratio = "-" if math.isnan(row.kl_over_topk) else f"{row.kl_over_topk:.2g}"
            ends = "" if math.isnan(row.ci_low) else f" [{row.ci_low:.2g}, {row.ci_high:.2g}]"
            lines.append(
                line(
                    ">" if chosen else " ", row.method, f"{row.budget_percent:g} %", f"{100 * row.read:.0f} %",
                    f"{100 * row.kept:.0f} %", ratio, f"{row.kl:.2g}{ends}", f"{row.kl_tail:.2g}",
                    f"{100 * row.same_top:.1f} %", f"{measured.seconds[row.method]:.2g}",
                )
            )  # fmt: skip
    lines += [f"\n{verdict(measured)}", f"\n{verified(measured)}"]
    lines += ["\nLimits of this answer:", *(f"* {limit}" for limit in limits(measured))]
    return "\n".join(lines) + "\n"


def write(measured: Measured, text: str) -> list[Path]:
    """Writes the table, the picture, the printed text and, last, the settings; returns their paths."""
    names = ("measured.csv", "measured.png", "measured.txt", "settings.json")
    table, picture, printed, settings = paths = [measured.folder / name for name in names]
    best = recommended(measured)
    rows = measured.table.assign(
        seconds=measured.table["method"].map(measured.seconds), seconds_full=measured.seconds["full"],
        recommended=0 if best is None else (measured.table[ARM] == best[ARM]).all(axis=1).astype(int),
    )  # fmt: skip
    write_text(table, rows.to_csv(index=False, float_format="%.6g"))
    with atomic_write(picture) as temporary:
        draw(measured).savefig(temporary, format="png", dpi=150, metadata={"Software": None})
    write_text(printed, text)
    write_json(settings, measured.settings)
    return paths


def draw(measured: Measured) -> Figure:
    """Draws a panel per text: KL with its interval against the bytes of a step, a line per method over its budgets."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(measured.texts), 3.6), layout="constrained")
    panels = figure.subplots(1, len(measured.texts), sharex=True, sharey=True, squeeze=False)[0]
    for axis, text in zip(panels, measured.texts, strict=True):
        for method, rows in measured.table[measured.table["text"] == text.name].groupby("method", sort=False):
            rows = rows.sort_values("read")
            (line,) = axis.plot(100 * rows["read"], rows["kl"], marker="o", markersize=4, linewidth=1, label=method)
            axis.vlines(100 * rows["read"], rows["ci_low"], rows["ci_high"], color=line.get_color(), linewidth=0.8)
        axis.axhline(measured.args.target_kl, color="0.4", linewidth=0.8, linestyle="--", label="target")
        axis.set_title(text.name, parse_math=False)  # a name may have dollar signs
        axis.set(yscale="log", xlabel="bytes read by a step, % of full attention's")
        axis.grid(which="both", alpha=0.2, linewidth=0.5)
    panels[0].set_ylabel("KL(full || method), nats")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(f"{measured.title} tokens", fontsize=9, parse_math=False)
    return figure
