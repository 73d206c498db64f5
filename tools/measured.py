"""Fills the tables of README.md and docs/ with the numbers of a finished mini study.

    python tools/measured.py FOLDER [TABLE ...]    # the checkout that has its results/ and logs/; all tables, or some

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

from residual_mass.core.selection import retrieved_count
from residual_mass.core.settings import AnchorSpec, tokens_of
from residual_mass.methods import Step, method_named
from residual_mass.methods.step_bytes import full_bytes, most_retrieved, step_bytes
from residual_mass.paper.tables.residuals import on_front
from residual_mass.paper.titles import METHOD_TITLES

ROOT = Path(__file__).parents[1]
BACKBONE = "smol"
LENGTHS = ("1k", "2k")
TEXTS = ("wiki", "code")
"""Whose continuations are forced."""
TITLES = {
    name: title.replace(r"Top-$K{+}\phi$", "TopK+phi").replace("Top-$K$", "TopK")
    for name, title in METHOD_TITLES.items()
}
OF_TOPK = (
    "topk", "topk_phi", "topk_phi_nosub", "topk_moments", "topk_moments_8", "topk_moments_shared",
    "topk_centroids",
)  # fmt: skip
"""Methods that read the same tokens."""
BYTES_OF = (
    "full", "topk", "topk_moments", "scan4", "scan4_moments", "scan4_regression_64", "scan3_regression_32",
    "group4_regression_64", "clusters_sums",
)  # fmt: skip
MODELS = {"Llama-3.2-1B": (16, 8, 64, 4), "Llama-3.2-3B": (28, 8, 128, 3), "Llama-3.1-8B": (32, 8, 128, 4)}
"""Layers, KV heads, width of a head, and query heads of a KV head."""
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
    return over_lengths(folder, TEXTS, metric="kl", state="own")


@table
def kl_over_topk(folder: Path) -> str:
    """KL of each method without short maps, as a share of TopK's."""
    lines = []
    for text in TEXTS:
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
    return over_lengths(folder, TEXTS, metric="kl", state="dense")


@table
def same_top(folder: Path) -> str:
    return over_lengths(folder, TEXTS, metric="same_top", state="own")


@table
def gold(folder: Path) -> str:
    return over_lengths(folder, ("ruler", "babilong"), metric="nll", continuation="gold")


@table
def kept(folder: Path) -> str:
    return over_lengths(folder, ("ruler", "babilong"), metric="kept", continuation="greedy")


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
    rows = read(folder, f"diagnostics/accounting_{BACKBONE}.csv")
    rows = rows[(rows.corpus == "wiki") & (rows.length == "1k")]
    return markdown(
        ["K", "TopK", "TopK+phi", "less error", "NoSub"],
        [
            [
                row.k, *(f"{float(row[name]):.3f}" for name in ("e_topk", "e_sub")),
                f"{1 - float(row.e_sub) / float(row.e_topk):.0%}", f"{float(row.e_nosub):.3f}",
            ]
            for _, row in rows.iterrows()
        ],
    )  # fmt: skip


@table
def ablations(folder: Path) -> str:
    rows = pd.concat([read(folder, f"ablation_{name}_{BACKBONE}.csv") for name in ("loss", "dphi")])
    rows = rows[(rows.task == "all") & (rows.benchmark == "ruler")].drop_duplicates(["method", "maps"])
    return markdown(
        ["maps", "RULER 1k", "gain, p"],
        [
            [
                row.maps or TITLES[row.method], with_interval(row, ".3f"),
                f"{float(row.gain):+.3f}, {float(row.gain_p):.3f}" if row.gain else "",
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
            if method in OF_TOPK:
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


def distances(folder: Path, length: str) -> pd.DataFrame:
    """A row per text, method and budget with both a distance and an error: bytes, KL, and KL over TopK's."""
    rows = fidelity_rows(folder, length, task="all", metric="kl", state="own", continuation="following")
    rows = rows[rows.maps.isin(["", "2k"])].astype({"value": float})
    topk = rows[rows.method == "topk"].set_index(["text", "budget_percent"]).value
    over = [row.value / topk[row.text, row.budget_percent] for row in rows.itertuples()]
    read_ = read(folder, f"residual_errors_{BACKBONE}_{length}.csv").rename(columns={"corpus": "text"})
    place = ["text", "method", "budget_percent"]
    found = rows.assign(over=over).merge(read_[[*place, "step_share", "over_topk", "recall"]], on=place)
    return found.astype({"step_share": float})


@table
def by_bytes(folder: Path) -> str:
    """KL over TopK's at the same budget, and the bytes read; the front of each text and length in bold type."""
    lines = []
    for length in LENGTHS:
        rows = distances(folder, length)
        for _, of_text in rows.groupby("text"):
            rows.loc[of_text.index, "front"] = on_front(list(zip(of_text.step_share, of_text.value, strict=True)))
        for method, arm in rows.groupby("method", sort=False):
            cells = []
            for budget in ("2", "4", "8"):
                at = arm[arm.budget_percent == budget].set_index("text")
                if at.empty:
                    cells += [""] * (1 + len(TEXTS))
                    continue
                cells.append(f"{100 * at.step_share.mean():.1f} %")
                cells += [f"**{at.over[text]:.3f}**" if at.front[text] else f"{at.over[text]:.3f}" for text in TEXTS]
            lines.append([length, TITLES[method], *cells])
    of_budget = [f"{budget} %: {name}" for budget in (2, 4, 8) for name in ("read", *TEXTS)]
    return markdown(["length", "method", *of_budget], lines)


@table
def front_kl(folder: Path) -> str:
    """KL at 2k, and the bytes read."""
    shown = ("topk", "topk_phi", "topk_moments", "topk_moments_shared", "scan4_regression_64", "scan3_regression_32",
             "clusters_sums")  # fmt: skip
    rows = distances(folder, "2k")
    lines = []
    for method in shown:
        cells = []
        for text, budget in itertools.product(("wiki", "code"), ("2", "4")):
            ((_, row),) = rows[
                (rows.method == method) & (rows.text == text) & (rows.budget_percent == budget)
            ].iterrows()
            cells.append(with_interval(row, ".2g"))
        read_ = [rows[(rows.method == method) & (rows.budget_percent == b)].step_share.mean() for b in ("2", "4")]
        lines.append([TITLES[method], *(f"{100 * share:.0f} %" for share in read_), *cells])
    header = ["method", "read at 2 %", "at 4 %", "wiki, 2 %", "wiki, 4 %", "code, 2 %", "code, 4 %"]
    return markdown(header, lines)


@table
def selectors(folder: Path) -> str:
    """Attention errors over TopK's at 2k, by what is read, on the mean of all texts."""
    rows = read(folder, f"residual_errors_{BACKBONE}_2k.csv")
    rows = rows[~rows.method.isin(["topk_phi", "topk_phi_nosub"])]
    numbers = rows.assign(**{name: pd.to_numeric(rows[name]) for name in ("step_share", "error", "recall")})
    means = numbers.groupby(["method", "budget_percent"], sort=False)[["step_share", "error", "recall"]].mean()
    lines = []
    for method in dict.fromkeys(rows.method):
        if method.startswith("topk") and method not in OF_TOPK:
            continue
        cells = []
        for budget in ("1", "2", "4", "8"):
            at, topk = means.loc[method, budget], means.loc["topk", budget]
            cells.append(f"{100 * at.step_share:.1f} %, {at.error / topk.error:.2f}, {at.recall:.2f}")
        lines.append([TITLES[method], *cells])
    return markdown(["method", "1 %", "2 %", "4 %", "8 %"], lines)


@table
def bytes_at_scale(_: Path) -> str:
    """What a step reads of a prompt, as a share of its cache and in GiB: at most, where no two heads take one token."""
    places = list(itertools.product(MODELS, ("64k", "1024k")))
    lines = [[TITLES[name], *(_at_scale(name, *place) for place in places)] for name in BYTES_OF]
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
    methods = list(dict.fromkeys(rows.method))
    lines = []
    for place, group in rows.groupby(["context", "implementation"], sort=False):
        times = zip(group.method, group.per_step_ms.astype(float), group.end_to_end_ms.astype(float), strict=True)
        cells = {method: f"{step:.0f} / {end:.0f}" for method, step, end in times}
        lines.append([*place, *(cells.get(method, "") for method in methods)])
    return markdown(["context", "implementation", *(TITLES[method] for method in methods)], lines)


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
    folder, wanted = Path(sys.argv[1]), sys.argv[2:] or list(TABLES)

    def filled(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- table: {name} -->\n{TABLES[name](folder)}\n<!-- end -->" if name in wanted else found[0]

    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text()
        new = re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", filled, text, flags=re.DOTALL)
        if new != text:
            path.write_text(new)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
