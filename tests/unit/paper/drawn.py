"""Files of every kind of figure, with chosen or random values in the format of the stages, and the data of drawings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from sample_results import Row, distance_row, error_row, write_rows
from tests.records import recorded

from residual_mass.methods import names
from residual_mass.paper.figures import DRAWINGS
from residual_mass.paper.figures.style import paper_style
from residual_mass.spec.columns import FIDELITY_COLUMNS
from residual_mass.spec.figures import kind_of
from residual_mass.spec.sections import Resampling
from residual_mass.spec.specs import FigureSpec

Points = list[tuple[float, float]]
TITLE = "Costs $5 & more_"
METHODS = ("full", "topk", "topk_phi", "topk_phi_nosub")
VARIANTS = ("1k", "1k-hedgehog_map", "1k-lolcats_loss", "1k-kl_only", "1k-aux_only")
COMPARED = [name for name in names()[1:] if name.startswith(("topk", "scan", "pages"))]
"""Methods whose errors are measured, and, of some, next tokens."""
HEADS = {"pack": range(2), "layer": range(4), "head": range(5), "query": range(3), "k": (1, 21)}


def grid(**levels: Any) -> pd.DataFrame:
    """A row for each combination of values."""
    return pd.MultiIndex.from_product(levels.values(), names=levels).to_frame(index=False)


def heads(sizes: dict[str, Any] | None = None, **facts: Any) -> pd.DataFrame:
    """Shuffled rows at K = 1 and 21, with heavy tails in what calibration shows; `facts` replace columns."""
    rng = np.random.default_rng(7)
    frame = grid(**HEADS | (sizes or {})).assign(backbone="smol", corpus="wiki", length="1k")
    frame["budget_percent"] = frame["k"].map({1: 2.0, 21: 4.0})
    for name in ("e_topk", "e_sub", "residual_share_hat", "log_z_true"):
        frame[name] = rng.random(len(frame), dtype=np.float32)
    frame["log_z_hat"] = (frame["log_z_true"] + rng.standard_t(1.5, len(frame)) - 0.5).astype("float32")
    frame["e_nosub"] = (frame["e_sub"] + 0.01 * rng.standard_t(1.5, len(frame))).astype("float32")
    row = frame.groupby(["pack", "layer", "head", "query"]).ngroup()
    frame["h_mid"] = rng.random(len(frame), dtype=np.float32)[row]  # the same at every K
    return frame.assign(**facts).sample(frac=1, random_state=1, ignore_index=True)


def mass() -> pd.DataFrame:
    """Mass that the K largest kernels of every head hold, in two packs."""
    frame = grid(pack=range(2), layer=range(4), head=range(5), k=(1, 3, 10, 30, 70))
    frame["c_mid"] = np.random.default_rng(9).random(len(frame))
    return frame.sample(frac=1, random_state=2, ignore_index=True)


def kernels(queries: int = 3, keys: int = 40, k: int = 21) -> pd.DataFrame:
    """Shuffled rows of layer 1, head 2: kernels that all maps share, and scores that are the further off the later the
    maps.
    """
    rng = np.random.default_rng(3)
    base = grid(query=range(queries), position=range(4, 4 + keys)).assign(layer=1, head=2, k=k)
    base["log_kernel"] = rng.normal(2, 1.5, len(base)).astype("float32")
    base["retrieved"] = base.groupby("query")["log_kernel"].rank(ascending=False, method="first") <= k
    frames = []
    for number, label in enumerate(VARIANTS):
        noise = rng.normal(number**2, 0.7, len(base)).astype("float32")
        frames.append(base.assign(maps=label, log_phi=(0.8 * base["log_kernel"] + noise).astype("float32")))
    return pd.concat(frames).sample(frac=1, random_state=5, ignore_index=True)


def tokens() -> pd.DataFrame:
    """Forced tokens under all arms, also in states and with maps that figures leave out. Documents are of unequal
    lengths, and the last one alone has a token of which the prompt has nothing.
    """
    rng = np.random.default_rng(5)
    arms = {"method": METHODS, "budget_percent": (2.0, 4.0), "maps": ("", "2k", "512")}
    texts = {"text": ("wiki", "books"), "state": ("own", "dense")}
    frame = grid(**texts, **arms, index=range(4), position=range(5)).assign(task="", continuation="following")
    frame = frame[frame["method"].str.contains("phi") == (frame["maps"] != "")]
    frame = frame[(frame["index"] != 1) | (frame["position"] < 3)].reset_index(drop=True)
    frame["full_nll"] = rng.exponential(size=20)[5 * frame["index"] + frame["position"]]
    frame["seen"] = rng.integers(1, 3, 20)[5 * frame["index"] + frame["position"]]
    frame.loc[(frame["index"] == 3) & (frame["position"] == 0), "seen"] = 0
    frame["kl"] = rng.lognormal(-4, 2, len(frame))
    frame.loc[frame["method"] == "full", ["kl", "budget_percent"]] = 0, np.nan
    return frame.sample(frac=1, random_state=1, ignore_index=True)


def distances(length: str) -> pd.DataFrame:
    """Rows of a fidelity file: of a corpus and a benchmark, and of much that the figure does not show."""
    places = {"text": ("wiki", "books", "ruler"), "continuation": ("following", "gold", "greedy")}
    rest = {"state": ("own", "dense"), "task": ("niah", "all"), "metric": ("nll", "kl", "kl_max")}
    arms = {"method": METHODS[1:], "maps": ("", "2k", "512", "1k"), "budget_percent": (8, 2)}
    frame = grid(**places, **rest, **arms).assign(length=length, documents=12)
    frame = frame[(frame["text"] == "ruler") == (frame["continuation"] != "following")]
    frame = frame[frame["method"].str.contains("phi") == (frame["maps"] != "")]
    other = frame["maps"].isin(["512", "1k"])
    frame = frame[~other | (frame["text"] == "wiki") & (frame["method"] == "topk_phi")]
    value = np.random.default_rng(len(length)).uniform(0.01, 1, len(frame))
    return frame.assign(value=value, ci_low=value / 2, ci_high=2 * value)


def log_rows(ks: tuple[int, ...], scale: float = 1.0) -> pd.DataFrame:
    """A training log of three measurements, of which figures show the rows of all layers on wiki."""
    frame = grid(step=(0, 20, 30), corpus=("wiki", "books"), k=ks, layer=("all", "0", "1"))
    hidden = 100 * ((frame["corpus"] != "wiki") | (frame["layer"] != "all"))
    frame["e_sub"] = scale * (2 - frame["step"] / 20) / (1 + frame["k"]) + hidden
    return frame.assign(
        e_topk=1 / (1 + frame["k"]), e_nosub=1.1 * frame["e_sub"], kl=2 - frame["step"] / 60 + hidden, log_z_error="nan"
    )


def errors(length: str) -> list[Row]:
    """Residual errors of methods on three texts. Budgets of 0.5% have no K, and so no recall."""
    rng = np.random.default_rng(len(length))
    rows = []
    for corpus, method, budget in product(("books", "poems", "wiki"), COMPARED, (16, 0.5, 2)):
        error = 0.001 if method == "topk_exact_mass" else rng.uniform(0.01, 1)  # less than the others, but an oracle
        found = {"error": error, "recall": rng.uniform(0.5, 0.9) if budget != 0.5 else ""}
        facts = {"corpus": corpus, "length": length, "step_share": rng.uniform(0.1, 1), "packs": 4}
        rows.append(error_row(method, budget, **found, **facts))
    return rows


def next_tokens(length: str) -> list[Row]:
    """Distances of the next token of some methods, and rows that the figure does not show."""
    rows = []
    for corpus, method, budget in product(("books", "wiki"), COMPARED[::5], (2, 16)):
        row = distance_row(method, budget, text=corpus, length=length, value=0.1 * len(method) / budget)
        rows += [
            row,
            *(row | {"value": 9} | hidden for hidden in ({"state": "dense"}, {"metric": "nll"}, {"task": "x"})),
        ]
    return rows


def spec(label: str, **facts: Any) -> FigureSpec:
    return FigureSpec(**{"label": label, "title": TITLE, "budget_percent": 4.0} | facts)


def written(path: Path, frame: pd.DataFrame) -> Path:
    frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
    return recorded(path)


def files_of(kind: str, folder: Path) -> tuple[FigureSpec, list[Path]]:
    """A spec and files of a kind of figure."""
    frames: list[pd.DataFrame] = [heads()]
    facts: dict[str, Any] = {"maps": VARIANTS}
    match kind:
        case "error_by_k" | "selection_recall" | "fidelity_by_bytes":
            files = [write_rows(folder, "residual_errors", errors(length), length) for length in ("512", "2k")]
            if kind == "fidelity_by_bytes":
                files += [write_rows(folder, "fidelity", next_tokens(length), length) for length in ("512", "2k")]
            return spec(kind, texts=("wiki", "books")), files
        case "fidelity":
            frames = [distances(length).reindex(columns=FIDELITY_COLUMNS) for length in ("512", "2k")]
            facts = {"maps": ("2k",), "texts": ("ruler", "wiki")}
        case "fidelity_tokens":
            resampling = Resampling(bootstrap_resamples=200, seed=3)
            frames, facts = [tokens()], {"maps": ("2k",), "texts": ("wiki",), "score": resampling}
        case "training_curves":
            frames, facts = [log_rows((0, 0, 1)), log_rows((1, 21, 62), 2)], {"maps": ("512", "1k")}
        case "logz_calibration" | "fullsub_nosub_delta":
            places = enumerate(product(("wiki", "cwe"), ("1k", "2k")), 2)
            frames = [heads({"pack": range(n)}, corpus=corpus, length=length) for n, (corpus, length) in places]
        case "mass_curves":
            frames = [mass(), heads()]
        case "kernel_sanity":
            frames = [kernels(), heads()]
        case "ablation_kernel_fidelity":
            frames = [kernels()]
    suffix = "csv" if kind in ("fidelity", "training_curves") else "parquet"
    return spec(kind, **facts), [written(folder / f"{n}.{suffix}", frame) for n, frame in enumerate(frames)]


def draw(show: FigureSpec, files: list[Path]) -> Figure:
    with paper_style():
        return DRAWINGS[kind_of(show.label)](show, files)


def of_frame(kind: str, frame: pd.DataFrame, folder: Path, **facts: Any) -> Figure:
    """A figure of one file with these rows."""
    suffix = "csv" if kind == "selection_recall" else "parquet"
    return draw(spec(kind, **facts), [written(folder / f"data.{suffix}", frame)])


@cache
def figure(kind: str) -> Figure:
    """A figure of the kind; it is only looked at."""
    with TemporaryDirectory() as folder:
        return draw(*files_of(kind, Path(folder)))


def lines(axis: Axes) -> list[np.ndarray]:
    """What lines of more than one point show."""
    return [np.asarray(line.get_xydata(), float) for line in axis.lines if len(line.get_xydata()) > 1]


def assert_drawn(axis: Axes, curve: Any) -> None:
    """A line has these points."""
    curve = np.asarray(curve, float)
    assert any(line.shape == curve.shape and np.allclose(line, curve, rtol=1e-6) for line in lines(axis)), curve


def marks(axis: Axes) -> Points:
    """Points of all scatters."""
    clouds = (each for each in axis.collections if isinstance(each, PathCollection))
    return [(float(x), float(y)) for cloud in clouds for x, y in cloud.get_offsets()]


def corners(band: Any) -> set[tuple[float, float]]:
    """Points on the outline of what `fill_between` drew."""
    return {tuple(corner) for corner in np.round(band.get_paths()[0].vertices, 9)}


def assert_middle_half(band: Any, values: Iterable[tuple[float, Sequence[float]]]) -> None:
    """A band is between the quartiles of the values at each x."""
    ends = [(x, np.quantile(of, end)) for x, of in values for end in (0.25, 0.75)]
    assert_same(corners(band), ends)


def assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(sorted(found), sorted(expected), rtol=1e-6, atol=1e-9)
