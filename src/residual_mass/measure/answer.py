"""The answer to what was measured: the cheapest method that meets the target, and what the measurement cannot tell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from residual_mass.files import atomic_write, write_json, write_text
from residual_mass.measure.distances import BASELINE, Measured
from residual_mass.methods import method_named

FEW = 16
"""Documents below which heavy tails go unseen, and intervals are wide."""
ARM = ["method", "budget_percent"]


def choices(measured: Measured) -> pd.DataFrame:
    """All methods at all budgets over all texts, from the fewest bytes to the most.

    `high` is the largest upper end of an interval, infinite for a single document.
    """
    table = measured.table.assign(high=measured.table["ci_high"].fillna(math.inf))
    found = table.groupby(ARM, sort=False).agg(
        read=("read", "mean"), high=("high", "max"), over_topk=("kl_over_topk", "max")
    )
    return found.reset_index().sort_values("read", kind="stable")


def recommended(measured: Measured) -> pd.Series | None:
    """The choice of the fewest bytes whose intervals end at or below the target on every text."""
    found = choices(measured)
    met = found[found["high"] <= measured.args.target_kl]
    return None if met.empty else met.iloc[0]


def verdict(measured: Measured) -> str:
    """The answer in a few sentences."""
    target, choice = measured.args.target_kl, recommended(measured)
    if choice is None:
        nearest = choices(measured).sort_values("high").iloc[0]
        if math.isinf(nearest.high):
            return "Nothing is recommended: a single document has no interval. Give more text."
        return (
            f"None of the methods stays below {target:g} nats. The nearest is {nearest.method} at "
            f"{nearest.budget_percent:g} %, whose interval ends at {nearest.high:.2g}. Try larger --budgets, more "
            "--documents for narrower intervals, or another --target-kl."
        )
    texts = "this text" if len(measured.texts) == 1 else "every text"
    over = "" if choice.method == BASELINE else f", and leaves at most {choice.over_topk:.2g} of topk's KL"
    own, full = measured.seconds[choice.method], measured.seconds["full"]
    slower = ": slower on this machine, where it saves bytes and no time" if own > full else ""
    return (
        f"{choice.method} with {choice.budget_percent:g} % of the prompt read exactly by a query head is the cheapest "
        f"that stays below {target:g} nats on {texts}: a step reads {100 * choice.read:.0f} % of the bytes that full "
        f"attention reads{over}; the interval of its KL ends at {choice.high:.2g}.\n"
        f"partial_kv takes {own:.2g} s a token with it, full attention {full:.2g} s{slower}."
    )


def limits(measured: Measured) -> Iterator[str]:
    """What the measurement cannot tell."""
    args, choice = measured.args, recommended(measured)
    yield (
        f"Prompts had {args.length} tokens. Other lengths need other shares, as a rule smaller ones for longer "
        "prompts: measure at yours with --length."
    )
    for text in measured.texts:
        count = len(text.sequences)
        if count < args.documents:
            yield f"{text.name} has {count} documents and not {args.documents}: it holds no more text."
        if text.sources < count:
            yield (
                f"{text.name}: {count} documents come from {text.sources} files. Parts of one file are alike, so the "
                "interval is about these files and too narrow for others."
            )
    if (fewest := min(len(text.sequences) for text in measured.texts)) < FEW:
        yield (
            f"{fewest} documents are few: one in ten that is far worse may not be among them. Decide on --documents "
            f"{FEW} or more."
        )
    yield "The ratio to topk's KL differs less between texts than the nats do: it is what to expect on another text."
    yield "Running text hardly tests whether a fact is found again: measure on prompts with answers for that."
    yield f"Measured are the first {args.tokens} tokens after a prompt; over hundreds the ratio to topk's KL grows."
    if choice is not None and not method_named(choice.method).fused:
        yield (
            f"Bytes are what a decode step has to read. partial_kv shows what {choice.method} does to the output; this "
            "library has no fast step for it yet."
        )
    yield (
        f"The recommendation is the best of {len(choices(measured))} on the same documents, so a little optimistic: "
        "confirm it on other text."
    )


def printed(measured: Measured) -> str:
    """The tables and the answer for a terminal."""
    args, choice = measured.args, recommended(measured)
    name, full = measured.backbone.model_id.rsplit("/")[-1], measured.seconds["full"]
    parts = [
        f"{name}, prompts of {args.length} tokens, {args.tokens} tokens after each. KL(full attention || method) of "
        "the next\ntoken: over that of topk at the same budget, then in nats with a 95 % interval. "
        f"Full attention takes {full:.2g} s a token."
    ]
    width = max(map(len, args.methods))
    for text in measured.texts:
        parts.append(f"\n{text.name}, {len(text.sequences)} documents")
        parts.append(
            f"  {'method':{width}}  exact   read   kept  KL / topk's  {'KL':25}  {measured.tail:>12}  same top"
            "  s a token"
        )
        for row in measured.table[measured.table["text"] == text.name].sort_values("read").itertuples():
            chosen = choice is not None and (choice.method, choice.budget_percent) == (row.method, row.budget_percent)
            ends = "" if math.isnan(row.ci_low) else f" [{row.ci_low:.2g}, {row.ci_high:.2g}]"
            kl, top = f"{row.kl:.2g}{ends}", f"{100 * row.same_top:.1f} %"
            parts.append(
                f"{'>' if chosen else ' '} {row.method:{width}}  {row.budget_percent:>3g} %  {100 * row.read:>3.0f} %  "
                f"{100 * row.kept:>3.0f} %  {row.kl_over_topk:>11.2g}  {kl:25}  {row.kl_tail:>12.2g}  {top:>8}  "
                f"{measured.seconds[row.method]:>9.2g}"
            )
    parts.append(f"\n{verdict(measured)}")
    if choice is not None:
        use = f'partial_kv(model, method="{choice.method}", budget={choice.budget_percent / 100:g})'
        parts.append(f"\n    with {use}:\n        output = model.generate(**inputs)")
    parts.append("\nWhat this cannot tell:")
    parts += (f"* {each}" for each in limits(measured))
    return "\n".join(parts) + "\n"


def write(measured: Measured, text: str) -> list[Path]:
    """Writes the table, the picture, the printed text and, last, the settings; returns their paths."""
    table, picture, words, settings = (
        measured.folder / name for name in ("measured.csv", "measured.png", "measured.txt", "settings.json")
    )
    best = recommended(measured)
    rows = measured.table.assign(seconds=measured.table["method"].map(measured.seconds))
    rows["seconds_full"] = measured.seconds["full"]
    rows["recommended"] = 0 if best is None else (rows[ARM] == best[ARM]).all(axis=1).astype(int)
    write_text(table, rows.to_csv(index=False, float_format="%.6g"))
    with atomic_write(picture) as temporary:
        draw(measured).savefig(temporary, format="png", dpi=150, metadata={"Software": None})
    write_text(words, text)
    write_json(settings, measured.settings)
    return [table, picture, words, settings]


def draw(measured: Measured) -> Figure:
    """Draws a panel per text: KL with its interval against the bytes of a step, a line per method over its budgets."""
    figure = Figure(figsize=(4.2 * len(measured.texts), 3.6), layout="constrained")
    panels = figure.subplots(1, len(measured.texts), sharex=True, sharey=True, squeeze=False)[0]
    for axis, text in zip(panels, measured.texts, strict=True):
        for method, rows in measured.table[measured.table["text"] == text.name].groupby("method", sort=False):
            rows = rows.sort_values("read")
            (line,) = axis.plot(100 * rows["read"], rows["kl"], marker="o", markersize=4, linewidth=1, label=method)
            axis.vlines(100 * rows["read"], rows["ci_low"], rows["ci_high"], color=line.get_color(), linewidth=0.8)
        axis.axhline(measured.args.target_kl, color="0.4", linewidth=0.8, linestyle="--", label="target")
        axis.set(yscale="log", title=text.name, xlabel="bytes read by a step, % of full attention's")
        axis.grid(which="both", alpha=0.2, linewidth=0.5)
    panels[0].set_ylabel("KL(full || method), nats")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    name = measured.backbone.model_id.rsplit("/")[-1]
    figure.suptitle(f"{name}, prompts of {measured.args.length} tokens", fontsize=9)
    return figure
