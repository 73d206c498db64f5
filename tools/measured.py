"""Fills the tables of README.md and docs/ with the numbers of a finished mini study.

    python tools/measured.py FOLDER    # the checkout that has its results/ and logs/

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function of this file. What is said about
the numbers is written by hand, so read it again afterwards.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
BACKBONE = "smol"
LENGTHS = ("1k", "2k")
TITLES = {
    "full": "Full", "topk": "TopK", "topk_phi": "TopK+phi", "topk_phi_nosub": "TopK+phi (NoSub)",
    "topk_phi_moments": "TopK+phi, mass of moments", "topk_moments": "TopK+moments",
    "topk_moments_8": "TopK+moments, 8 clusters", "topk_moments_shared": "TopK+moments, 64 clusters",
    "topk_centroids": "TopK+centroids", "scan4_moments": "4-bit scan+moments", "pages_centroids": "Pages+centroids",
}  # fmt: skip
TABLES: dict[str, Callable[[Path], str]] = {}


def table(make: Callable[[Path], str]) -> Callable[[Path], str]:
    TABLES[make.__name__] = make
    return make


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def read(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / "results" / name, keep_default_na=False, dtype=str)


def with_interval(row: pd.Series, digits: str = ".3g") -> str:
    low, high = (format(float(row[name]), digits) for name in ("ci_low", "ci_high"))
    return f"{float(row.value):{digits}} [{low}, {high}]"


def arm_title(row: pd.Series, main_maps: str) -> str:
    other = row.maps not in ("", main_maps)
    return TITLES[row.method] + (f", maps of {row.maps}" if other else "")


def by_budget(rows: pd.DataFrame, main_maps: str, cell: Callable[[pd.Series], str]) -> list[list[str]]:
    """A line for each arm, a column for each budget; Full has one value."""
    lines = []
    for _, arm in rows.groupby(["method", "maps"], sort=False):
        cells = [cell(row) for _, row in arm.sort_values("budget_percent", key=pd.to_numeric).iterrows()]
        lines.append([arm_title(arm.iloc[0], main_maps), *cells, *[""] * (3 - len(cells))])
    return lines


def fidelity_rows(folder: Path, length: str, **chosen: str) -> pd.DataFrame:
    rows = read(folder, f"fidelity_{BACKBONE}_{length}.csv")
    for name, value in chosen.items():
        rows = rows[rows[name] == value]
    return rows


def over_lengths(folder: Path, texts: Sequence[str], digits: str = ".3g", **chosen: str) -> str:
    """One metric by text, length, arm and budget."""
    lines = [
        [text, length, *line]
        for text in texts
        for length in LENGTHS
        for line in by_budget(
            fidelity_rows(folder, length, text=text, task="all", **chosen), "2k", lambda r: with_interval(r, digits)
        )
    ]
    return markdown(["text", "length", "method", "2 %", "4 %", "8 %"], lines)


@table
def kl(folder: Path) -> str:
    return over_lengths(folder, ("wiki", "books"), metric="kl", state="own")


@table
def kl_wiki(folder: Path) -> str:
    return over_lengths(folder, ("wiki",), metric="kl", state="own")


@table
def kl_over_topk(folder: Path) -> str:
    """KL of each method without short maps, as a share of TopK's."""
    lines = []
    for text in ("wiki", "books"):
        for length in LENGTHS:
            rows = fidelity_rows(folder, length, text=text, task="all", metric="kl", state="own")
            topk = rows[rows.method == "topk"].set_index("budget_percent").value.astype(float)
            rows = rows[rows.maps.isin(["", "2k"]) & (rows.method != "topk")]
            lines += [
                [text, length, *line]
                for line in by_budget(rows, "2k", lambda r, by=topk: f"{float(r.value) / by[r.budget_percent]:.3f}")
            ]
    return markdown(["text", "length", "method", "2 %", "4 %", "8 %"], lines)


@table
def kl_dense(folder: Path) -> str:
    return over_lengths(folder, ("wiki", "books"), metric="kl", state="dense")


@table
def same_top(folder: Path) -> str:
    return over_lengths(folder, ("wiki", "books"), metric="same_top", state="own")


@table
def gold(folder: Path) -> str:
    return over_lengths(folder, ("ruler", "babilong"), metric="nll", continuation="gold")


@table
def kept(folder: Path) -> str:
    return over_lengths(folder, ("ruler", "babilong"), metric="kept", continuation="greedy")


@table
def told_apart(folder: Path) -> str:
    """Pairs of arms whose KL differs after Holm's correction, of all pairs."""
    lines = []
    for length in LENGTHS:
        rows = read(folder, f"fidelity_pairs_{BACKBONE}_{length}.csv")
        rows = rows[(rows.metric == "kl") & (rows.continuation == "following") & (rows.state == "own")]
        for (method, maps, other, other_maps), pair in rows.groupby(
            ["method", "maps", "other", "other_maps"], sort=False
        ):
            first, second = (
                arm_title(pd.Series({"method": m, "maps": label}), "2k")
                for m, label in ((method, maps), (other, other_maps))
            )
            cells = []
            for budget in ("2", "4", "8"):
                texts = [_sign(row) for _, row in pair[pair.budget_percent == budget].iterrows()]
                cells.append(" ".join(texts))
            lines.append([length, first, second, *cells])
    return markdown(["length", "method", "against", "2 %", "4 %", "8 %"], lines)


def _sign(row: pd.Series) -> str:
    if float(row.p_holm) >= 0.05:
        return "·"
    return "better" if float(row.difference) < 0 else "worse"


def scores(folder: Path, benchmark: str, lengths: Sequence[str]) -> str:
    lines = []
    for length in lengths:
        rows = read(folder, f"{benchmark}_{BACKBONE}_{length}.csv")
        lines += [
            [length, *line] for line in by_budget(rows[rows.task == "all"], "2k", lambda r: with_interval(r, ".3f"))
        ]
    return markdown(["length", "method", "2 %", "4 %", "8 %"], lines)


@table
def ruler(folder: Path) -> str:
    return scores(folder, "ruler", LENGTHS)


@table
def babilong(folder: Path) -> str:
    return scores(folder, "babilong", LENGTHS)


@table
def longbench(folder: Path) -> str:
    return scores(folder, "longbench", ["2k"])


@table
def attention_error(folder: Path) -> str:
    rows = read(folder, f"diagnostics/map_errors_{BACKBONE}_1k.csv")
    rows = rows[rows.maps == "2k"]
    return markdown(
        ["K", "TopK", "TopK+phi", "less error", "NoSub", "heads that gain"],
        [
            [
                row.k, *(f"{float(row[name]):.3f}" for name in ("e_topk", "e_sub")),
                f"{1 - float(row.e_sub) / float(row.e_topk):.0%}", f"{float(row.e_nosub):.3f}",
                f"{float(row.heads_below_topk):.0%}",
            ]
            for _, row in rows.iterrows()
        ],
    )  # fmt: skip


@table
def map_errors(folder: Path) -> str:
    lines = []
    for length in LENGTHS:
        rows = read(folder, f"diagnostics/map_errors_{BACKBONE}_{length}.csv")
        for maps, arm in rows.groupby("maps", sort=False):
            cells = [
                f"{float(row.e_topk):.3f} -> {float(row.e_sub):.3f} ({float(row.log_z_error):+.2f}, "
                f"{float(row.heads_below_topk):.0%})"
                for _, row in arm.iterrows()
            ]
            lines.append([length, maps, *cells])
    return markdown(["length", "maps trained at", "2 %", "4 %", "8 %"], lines)


@table
def ablations(folder: Path) -> str:
    errors = read(folder, f"diagnostics/map_errors_{BACKBONE}_1k.csv")
    errors = errors[errors.budget_percent == "4"].set_index("maps").e_sub
    rows = pd.concat([read(folder, f"ablation_{name}_{BACKBONE}.csv") for name in ("loss", "dphi")])
    rows = rows[(rows.task == "all") & (rows.benchmark == "ruler")].drop_duplicates(["method", "maps"])
    return markdown(
        ["maps", "RULER 1k", "gain, p", "attention error"],
        [
            [
                row.maps or TITLES[row.method], with_interval(row, ".3f"),
                f"{float(row.gain):+.3f}, {float(row.gain_p):.3f}" if row.gain else "",
                f"{float(errors[row.maps]):.3f}" if row.maps in errors else "",
            ]
            for _, row in rows.iterrows()
        ],
    )  # fmt: skip


@table
def attention_errors(folder: Path) -> str:
    """Errors as shares of TopK's, with intervals by pack."""
    lines = []
    for length in LENGTHS:
        rows = read(folder, f"residual_errors_{BACKBONE}_{length}.csv")
        for (corpus, method), of_method in rows.groupby(["corpus", "method"], sort=False):
            if method in TITLES:
                lines.append([corpus, length, TITLES[method], *(_over_topk(row) for _, row in of_method.iterrows())])
    return markdown(["text", "length", "method", "0.5 %", "1 %", "2 %", "4 %", "8 %", "16 %"], lines)


def _over_topk(row: pd.Series) -> str:
    if row.method == "topk":
        return f"{float(row.error):.3f}"
    low, high = float(row.over_topk_ci_low), float(row.over_topk_ci_high)
    return f"{float(row.over_topk):.2f} [{low:.2f}, {high:.2f}]"


@table
def lost_heads(folder: Path) -> str:
    """Heads with a higher error than TopK's and phi's, and what goes with the error over TopK's, by rank."""
    lines = []
    for length, method in itertools.product(LENGTHS, ("topk_moments", "topk_moments_shared")):
        heads = by_head(folder, length)
        for (corpus, budget), rows in heads.groupby(["corpus", "budget_percent"]):
            if budget in (1, 2, 4, 16):
                over = rows[method] / rows["topk"]
                related = [over.corr(rows[name], method="spearman") for name in ("h_mid", "skewness", "kurtosis")]
                related.append(over.corr(rows[f"log_z {method}"].abs(), method="spearman"))
                lost = [str((rows[method] > rows[other]).sum()) for other in ("topk", "topk_phi")]
                lines.append([corpus, length, f"{budget:g} %", TITLES[method], *lost, *(f"{r:+.2f}" for r in related)])
    header = ["text", "length", "budget", "method", "above TopK", "above TopK+phi"]
    return markdown([*header, "entropy", "skewness", "kurtosis", "size of the log-Z error"], lines)


@table
def error_by_layer(folder: Path) -> str:
    """Errors over TopK's of groups of layers, and the scores' shape, on both texts at 1k."""
    heads = by_head(folder, "1k")
    heads["layers"] = pd.cut(heads["layer"], [-1, 2, 10, 29], labels=["0 to 2", "3 to 10", "11 to 29"])
    methods = ("topk_phi", "topk_moments", "topk_moments_shared")
    lines = []
    for (budget, layers), rows in heads.groupby(["budget_percent", "layers"], observed=True):
        if budget in (1, 2, 4, 16):
            shape = [f"{rows[name].mean():.2f}" for name in ("h_mid", "skewness", "kurtosis")]
            errors = [f"{rows[method].mean() / rows['topk'].mean():.2f}" for method in methods]
            lines.append([f"{budget:g} %", layers, f"{rows['topk'].mean():.3f}", *errors, *shape])
    header = ["budget", "layers", "TopK's error", *(TITLES[method] for method in methods)]
    return markdown([*header, "entropy", "skewness", "kurtosis"], lines)


def by_head(folder: Path, length: str) -> pd.DataFrame:
    """A row per text, budget and head: means over packs of the scores' shape, of the error by method, and of the log-Z
    error by `log_z <method>`.
    """
    rows = pd.read_parquet(folder / "results" / "diagnostics" / f"residual_heads_{BACKBONE}_{length}.parquet")
    rows = rows.astype({"corpus": str, "method": str})
    rows["log_z"] = rows["log_z_error"].fillna(0) * rows["log_z_rows"]
    place = ["corpus", "budget_percent", "layer", "head"]
    errors = rows.pivot_table("error", place, "method")
    sums = rows.pivot_table(["log_z", "log_z_rows"], place, "method", aggfunc="sum")
    log_z = (sums["log_z"] / sums["log_z_rows"].where(sums["log_z_rows"] > 0)).add_prefix("log_z ")
    shape = rows.groupby(place)[["h_mid", "skewness", "kurtosis"]].mean()
    return pd.concat([errors, log_z, shape], axis=1).reset_index()


@table
def runtime(folder: Path) -> str:
    """Milliseconds of a decoding step and from end to end."""
    rows = read(folder, f"runtime_{BACKBONE}.csv")
    methods = list(dict.fromkeys(rows.method))
    return markdown(
        ["context", "implementation", *(TITLES[method] for method in methods)],
        [
            [
                length, implementation,
                *(f"{float(row.per_step_ms):.0f} / {float(row.end_to_end_ms):.0f}" for _, row in group.iterrows()),
            ]
            for (length, implementation), group in rows.groupby(["context", "implementation"], sort=False)
        ],
    )  # fmt: skip


@table
def seconds(folder: Path) -> str:
    """Wall-clock seconds of the jobs that took five or more, from Snakemake's own benchmark files."""
    found = {}
    for path in sorted((folder / "logs").rglob("*.tsv")):
        name = path.relative_to(folder / "logs").with_suffix("").as_posix()
        found[name] = float(pd.read_csv(path, sep="\t").s.iloc[-1])
    long = sorted(((s, name) for name, s in found.items() if s >= 5), reverse=True)
    rest = sum(s for s in found.values() if s < 5)
    lines = [[f"`{name}`", f"{s:.0f}"] for s, name in long]
    return markdown(["job", "seconds"], [*lines, [f"{len(found) - len(long)} others, together", f"{rest:.0f}"]])


def main() -> None:
    folder = Path(sys.argv[1])
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text()
        filled = re.sub(
            r"<!-- table: (\w+) -->\n.*?<!-- end -->",
            lambda found: f"<!-- table: {found[1]} -->\n{TABLES[found[1]](folder)}\n<!-- end -->",
            text,
            flags=re.DOTALL,
        )
        if filled != text:
            path.write_text(filled)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
