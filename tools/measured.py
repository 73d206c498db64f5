"""Fills the tables of README.md and docs/ with the numbers of a finished study, `mini` or `methods`, or of benchmarks.

    python tools/measured.py FOLDER [TABLE ...]    # the checkout that has its results/ and logs/; all tables, or some

A table is between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function of this file or of `engine_tables.py`.
Tables whose results the folder lacks stay as they are. The text about the numbers is written by hand, so read it again
afterwards. Tables without such marks are of earlier or other studies.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import engine_tables
import pandas as pd

from residual_mass.core.selection import retrieved_count
from residual_mass.methods import Step, method_named
from residual_mass.methods.step_bytes import full_bytes, most_retrieved, step_bytes
from residual_mass.paper.titles import method_title
from residual_mass.spec.settings import AnchorSpec, tokens_of

ROOT = Path(__file__).parents[1]
BACKBONE, MAIN_MAPS = "smol", "2k"
METHODS_BACKBONE = "smol-methods"
CORPORA = {"wiki": "Wikipedia", "cwe": "common words"}
BYTES_OF = (
    "full", "topk", "topk_moments", "scan4", "scan4_moments", "scan4_regression_64", "scan3_regression_32",
    "group4_regression_64", "clusters_sums",
)  # fmt: skip
MODELS = {"Llama-3.2-1B": (16, 8, 64, 4), "Llama-3.2-3B": (28, 8, 128, 3), "Llama-3.1-8B": (32, 8, 128, 4)}
"""Layers, KV heads, width of a head, and query heads of a KV head."""
TABLES: dict[str, Callable[[Path], str]] = dict(engine_tables.TABLES)


def table(make: Callable[[Path], str]) -> Callable[[Path], str]:
    TABLES[make.__name__] = make
    return make


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def read(folder: Path, pattern: str) -> pd.DataFrame:
    """Returns the rows of the result files of a pattern, in the order of their names."""
    paths = sorted((folder / "results").glob(pattern))
    if not paths:
        raise FileNotFoundError(f"{folder / 'results'} has no {pattern}")
    return pd.concat([pd.read_csv(path, keep_default_na=False, dtype=str) for path in paths], ignore_index=True)


def title(method: str, maps: str = "") -> str:
    """Returns a method's title as plain text, with its maps if they are not the study's own."""
    plain = method_title(method).replace(r"Top-$K{+}\phi$", "TopK+phi").replace("Top-$K$", "TopK")
    return plain + (f", maps of {maps}" if maps not in ("", MAIN_MAPS) else "")


def with_interval(row: pd.Series, digits: str) -> str:
    value, low, high = (format(float(text), digits) if text else "" for text in row[["value", "ci_low", "ci_high"]])
    return f"{value} [{low}, {high}]" if low else value


def by_budget(rows: pd.DataFrame, keys: Sequence[str], cells: pd.Series) -> str:
    """Returns a line for each arm and place of `keys`, a column for each budget; Full has a value only in the first."""
    budgets = sorted({budget for budget in rows.budget_percent if budget}, key=float)
    lines = []
    rows = rows.assign(cell=cells, budget=rows.budget_percent.replace("", budgets[0]))
    for (*place, method, maps), arm in rows.groupby([*keys, "method", "maps"], sort=False):
        of_arm = dict(zip(arm.budget, arm.cell, strict=True))
        lines.append([*place, title(method, maps), *(of_arm.get(budget, "") for budget in budgets)])
    return markdown([*keys, "method", *(f"{budget} %" for budget in budgets)], lines)


def values(folder: Path, pattern: str, query: str, keys: Sequence[str], digits: str) -> str:
    """Returns one metric with its intervals by length, arm and budget; texts in the order of the first length."""
    rows = read(folder, pattern).query(f"task == 'all' and {query}")
    if "text" in keys:
        rows = rows.sort_values("text", key=lambda names: names.map(list(names.unique()).index), kind="stable")
    return by_budget(rows, keys, rows.apply(with_interval, axis=1, digits=digits))


OF_TOKENS = {
    "kl": "metric == 'kl' and state == 'own' and continuation == 'following'",
    "kl_dense": "metric == 'kl' and state == 'dense' and continuation == 'following'",
    "same_top": "metric == 'same_top' and state == 'own' and continuation == 'following'",
    "gold": "metric == 'nll' and continuation == 'gold'",
    "kept": "metric == 'kept' and continuation == 'greedy'",
}
for name, query in OF_TOKENS.items():
    TABLES[name] = partial(
        values, pattern=f"fidelity_{BACKBONE}_*.csv", query=query, keys=["text", "length"], digits=".3g"
    )
for name in ("ruler", "babilong", "longbench"):
    TABLES[name] = partial(values, pattern=f"{name}_{BACKBONE}_*.csv", query="True", keys=["length"], digits=".3f")


@table
def accounting(folder: Path) -> str:
    """Errors with estimated and with true masses, and the error of the estimated mass, by setting and K."""
    rows = read(folder, f"diagnostics/accounting_{BACKBONE}.csv")
    lines = []
    for _, row in rows.iterrows():
        errors = (f"{float(row[name]):.3f}" for name in ("e_topk", "e_nosub", "e_sub", "e_exact_nosub"))
        middle, *ends = (f"{float(row[f'log_z_error{end}']):+.2f}" for end in ("", "_ci_low", "_ci_high"))
        lines.append([CORPORA[row.corpus], row.length, row.k, *errors, f"{middle} [{', '.join(ends)}]"])
    return markdown(["text", "length", "K", "TopK", "NoSub", "TopK+phi", "ExactNoSub", "log-Z error"], lines)


@table
def claims(folder: Path) -> str:
    """The verdict on every statement about single settings, with its number and interval."""
    rows = read(folder, f"diagnostics/claims_{BACKBONE}.csv").query("corpus != 'all'")
    places = [("wiki", "2k"), ("wiki", "1k"), ("cwe", "2k"), ("cwe", "1k")]
    lines = [
        [statement, *("; ".join(map(verdict, _at(group, corpus, length))) for corpus, length in places)]
        for statement, group in rows.groupby("statement", sort=False)
    ]
    return markdown(["statement", *(f"{CORPORA[corpus]} {length}" for corpus, length in places)], lines)


@table
def claims_over_all(folder: Path) -> str:
    """The verdict on every statement about all settings together."""
    rows = read(folder, f"diagnostics/claims_{BACKBONE}.csv").query("corpus == 'all'")
    return markdown(["statement", "verdict"], [[row.statement, verdict(row)] for row in rows.itertuples()])


def _at(rows: pd.DataFrame, corpus: str, length: str) -> Iterable[Any]:
    return rows[(rows.corpus == corpus) & (rows.length == length)].itertuples()


def verdict(row: Any) -> str:
    return f"{row.verdict}: {float(row.estimate):.2g} [{float(row.ci_low):.2g}, {float(row.ci_high):.2g}]"


@table
def methods_kl(folder: Path) -> str:
    """KL of every method over that of TopK at the same budget."""
    rows = read(folder, f"fidelity_{METHODS_BACKBONE}_*.csv").astype({"value": float})
    rows = rows.query(f"{OF_TOKENS['kl']} and task == 'all' and budget_percent != ''").assign(maps="")
    place = ["text", "length", "budget_percent"]
    topk = rows[rows.method == "topk"].set_index(place).value
    over = rows.value / topk.loc[pd.MultiIndex.from_frame(rows[place])].to_numpy()
    return by_budget(rows, ["length", "text"], over.map("{:.3f}".format))


@table
def methods_error(folder: Path) -> str:
    """Attention error of every method over that of TopK at the same budget, mean over texts."""
    rows = _errors_of_methods(folder)
    return by_budget(rows, ["length"], rows.over_topk.map("{:.2f}".format))


@table
def methods_read(folder: Path) -> str:
    """Bytes that a step reads and bytes that are kept, in percent of full attention's cache, mean over texts."""
    rows = _errors_of_methods(folder)
    kept = rows.groupby(["length", "method"], sort=False).kept_share.mean()
    lines = by_budget(rows, ["length"], (100 * rows.step_share).map("{:.1f}".format)).splitlines()
    ends = ["kept |", "--- |", *(f"{100 * share:.0f} |" for share in kept)]
    return "\n".join(f"{line} {end}" for line, end in zip(lines, ends, strict=True))


def _errors_of_methods(folder: Path) -> pd.DataFrame:
    numbers = ["over_topk", "step_share", "kept_share"]
    rows = read(folder, f"residual_errors_{METHODS_BACKBONE}_*.csv").astype(dict.fromkeys(numbers, float))
    means = rows.groupby(["length", "method", "budget_percent"], sort=False)[numbers].mean()
    return means.reset_index().query("budget_percent != ''").assign(maps="")


@table
def ablations(folder: Path) -> str:
    rows = read(folder, f"ablation_*_{BACKBONE}.csv").query("task == 'all' and benchmark == 'ruler'")
    lines = [
        [
            row.maps or title(row.method), with_interval(row, ".3f"),
            f"{float(row.gain):+.3f}, {float(row.gain_p):.3f}" if row.gain else "",
        ]
        for _, row in rows.drop_duplicates(["method", "maps"]).iterrows()
    ]  # fmt: skip
    return markdown(["maps", "RULER 1k", "gain, p"], lines)


@table
def bytes_at_scale(_: Path) -> str:
    """Most bytes that a step reads, as a share of the cache and in GiB: if no two heads choose the same token."""
    places = list(itertools.product(MODELS, ("64k", "1024k")))
    lines = [[title(name), *(_at_scale(name, *place) for place in places)] for name in BYTES_OF]
    return markdown(["method", *(f"{model}, {length}" for model, length in places)], lines)


def _at_scale(name: str, model: str, length: str) -> str:
    layers, kv_heads, width, heads = MODELS[model]
    tokens, anchors, method = tokens_of(length), AnchorSpec(), method_named(name)
    step = Step(tokens, width, heads, anchors.sink + anchors.tail, retrieved=0)
    k = retrieved_count(1.0, tokens, step.anchors)
    step = step._replace(retrieved=most_retrieved(method, k, step))
    total = step_bytes(method, step).total
    return f"{100 * total / full_bytes(step):.1f} % ({layers * kv_heads * total / 2**30:.3g} GiB)"


@table
def runtime(folder: Path) -> str:
    """Milliseconds of a decoding step and from end to end."""
    rows = read(folder, f"runtime_{BACKBONE}.csv")
    methods, lines = list(dict.fromkeys(rows.method)), []
    for place, group in rows.groupby(["context", "implementation"], sort=False):
        times = zip(group.method, group.per_step_ms.astype(float), group.end_to_end_ms.astype(float), strict=True)
        cells = {method: f"{step:.0f} / {end:.0f}" for method, step, end in times}
        lines.append([*place, *(cells.get(method, "") for method in methods)])
    return markdown(["context", "implementation", *map(title, methods)], lines)


@table
def seconds(folder: Path) -> str:
    """Wall-clock seconds of the jobs that took five or more, from Snakemake's own benchmark files."""
    seconds_of = {}
    for path in sorted((folder / "logs").rglob("*.tsv")):
        name = path.relative_to(folder / "logs").with_suffix("").as_posix()
        seconds_of[name] = float(pd.read_csv(path, sep="\t").s.iloc[-1])
    long = sorted(((s, name) for name, s in seconds_of.items() if s >= 5), reverse=True)
    rest = sum(s for s in seconds_of.values() if s < 5)
    lines = [[f"`{name}`", f"{s:.0f}"] for s, name in long]
    return markdown(["job", "seconds"], [*lines, [f"{len(seconds_of) - len(long)} others, together", f"{rest:.0f}"]])


def main() -> None:
    folder, wanted = Path(sys.argv[1]), sys.argv[2:] or list(TABLES)

    def filled(mark: re.Match[str]) -> str:
        name = mark[1]
        if name not in wanted:
            return mark[0]
        try:
            return f"<!-- table: {name} -->\n{TABLES[name](folder)}\n<!-- end -->"
        except FileNotFoundError as error:
            print(f"{name} stays as it is: {error}")
            return mark[0]

    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text()
        new = re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", filled, text, flags=re.DOTALL)
        if new != text:
            path.write_text(new)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
