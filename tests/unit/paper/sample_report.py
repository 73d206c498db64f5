"""A small study of one of the paper's backbones with everything that its page shows, made by the stages themselves."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from sample_results import TEMPLATES, Arm, result_rows, table_spec, write_rows
from tests.records import recorded

from residual_mass import statements
from residual_mass.diagnostics.columns import ACCOUNTING
from residual_mass.paper import published
from residual_mass.paper.comparison import by_cell as comparison
from residual_mass.paper.figures.style import TEXT_WIDTH, save
from residual_mass.paper.published.protocol import PROTOCOL, text_of
from residual_mass.paper.readers import accounting_file
from residual_mass.paper.report import page as report
from residual_mass.paper.report.page import ReportFiles
from residual_mass.paper.table import Cell, load_table
from residual_mass.paper.tables import render as tables
from residual_mass.runtime.columns import RUNTIME
from residual_mass.study.labels import METHODS
from residual_mass.study.specs import BackboneSpec, ComparisonSpec, ReportSpec, TableSpec

ROOT = TEMPLATES.parents[1]
TEMPLATE = TEMPLATES / "report.html.j2"
DEVIATIONS = ROOT / "docs" / "deviations.md"
MODEL = published.MODELS["1b"]
FACTS = {"study": "paper", "backbone": "1b", "model_id": MODEL, "revision": "r1", "weights": "pretrained"}
LENGTHS, BUDGETS = ("4k", "8k"), (0.5, 1.0, 2.0, 4.0)
UNDER_THE_PAPERS_PROTOCOL = ComparisonSpec("paper", {key: text_of(value) for key, value in PROTOCOL.items()})
ERRORS = ("e_topk", "e_nosub", "e_sub", "e_exact_sub", "e_exact_nosub")
DECODING = "greedy; budgets of the nominal length; cut to 64k"

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """What the stage is given."""

    folder: Path
    spec: ReportSpec
    files: ReportFiles

    def page(self) -> str:
        out = self.folder / "report.html"
        report.write_page(self.spec, self.files, TEMPLATE, out)
        return out.read_text(encoding="utf-8")

    def with_files(self, **changes: Any) -> Study:
        return replace(self, files=replace(self.files, **changes))

    def table(self, label: str) -> Path:
        return next(path for path in self.files.tables if path.stem == label)

    def lines(self, label: str) -> list[dict[str, str]]:
        """Of the table's CSV."""
        return read(self.table(label).with_suffix(".csv"))


def sample_study(folder: Path, title: str = "Llama", model_id: str = MODEL) -> Study:
    """Tables of scores, of errors and of latencies, one figure, and claims, with their records."""
    facts = FACTS | {"model_id": model_id}
    results = [_scores(folder, "ruler", length, facts) for length in LENGTHS]
    results += [_scores(folder, "babilong", length, facts | {"data": "simulated"}) for length in LENGTHS]
    accounting, runtime = _accounting(folder, facts), _runtime(folder, facts)
    given: dict[str, tuple[list[Path], Row]] = {
        "ruler_sweep": (results[:2], {}),
        "babilong_sweep": (results[2:], {"benchmarks": ("babilong",)}),
        "exact_accounting": ([accounting], {"budgets": (1.0,), "lengths": ()}),
        "runtime_1b": ([runtime], {"lengths": ("4k", "16k"), "budgets": ()}),
    }
    for label, (paths, changes) in given.items():
        _table(folder, label, paths, {"backbone_titles": {"1b": title}} | changes)
    saved = [folder / f"{label}.json" for label in given]
    compared, picture = folder / "comparison.csv", folder / "comparison_picture.csv"
    comparison.run(UNDER_THE_PAPERS_PROTOCOL, saved, compared, picture)
    figure = folder / "mass_curves.png"
    save(Figure(figsize=(TEXT_WIDTH, 1)), figure.with_suffix(".pdf"), figure)
    recorded(figure)
    phi, generated = folder / "1b_8k.safetensors", folder / "all.jsonl"
    for path in (phi, generated):
        path.write_text(path.name)
    _records(results[0], phi, generated, runtime)
    backbone = BackboneSpec("paper", model_id, "r1", "hub", "bfloat16", "llama32", 131072, True, name="1b")
    spec = ReportSpec("paper", (backbone,), LENGTHS, BUDGETS, {"mass_curves": f"{title}, wiki"})
    files = ReportFiles(
        tables=saved,
        figures=[figure],
        comparison=compared,
        picture=picture,
        claims=[_claims(folder)],
        sources=[*results, accounting, runtime, phi, generated],
        deviations=DEVIATIONS,
    )
    return Study(folder, spec, files)


def edit_cells(path: Path, where: Callable[[Cell], bool], change: Callable[[Cell], Cell]) -> None:
    """Changes the cells of a saved table that match, of which there must be some."""
    table = load_table(path, "paper")
    assert any(map(where, table.cells))
    changed(table, lambda cell: change(cell) if where(cell) else cell).save(path)
    recorded(path)


def changed(part: Any, change: Callable[[Cell], Cell]) -> Any:
    """A table, or a part of one, with every cell changed."""
    if isinstance(part, Cell):
        return change(part)
    if isinstance(part, tuple):
        return tuple(changed(each, change) for each in part)
    if not is_dataclass(part):
        return part
    return replace(part, **{field.name: changed(getattr(part, field.name), change) for field in fields(part)})


def edit_lines(path: Path, where: Row, **fields: str) -> None:
    """Sets fields of the lines of a CSV that match, of which there must be some."""
    lines = read(path)
    chosen = [line for line in lines if all(line[name] == value for name, value in where.items())]
    assert chosen, where
    for line in chosen:
        line.update(fields)
    write(path, list(lines[0]), lines)


def read(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def write(path: Path, header: list[str], rows: list[Row]) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, header, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return recorded(path)


def _table(folder: Path, label: str, paths: list[Path], changes: Row) -> None:
    shown: Row = {"study": "paper", "backbones": ("1b",), "lengths": LENGTHS, "budgets": BUDGETS}
    spec: TableSpec = table_spec(label, **shown | changes)
    name = "runtime" if label.startswith("runtime") else label
    out = {ending: folder / f"{label}.{ending}" for ending in ("tex", "csv", "json")}
    tables.run(spec, paths, TEMPLATES / f"{name}.tex.j2", out["tex"], out["csv"], out["json"])


def _scores(folder: Path, benchmark: str, length: str, facts: Row) -> Path:
    arms: list[Arm] = [("full", None, "")]
    arms += [(method, budget, "64k" if "phi" in method else "") for method in METHODS[1:] for budget in BUDGETS]
    tasks = ("babilong_qa1", "babilong_qa2") if benchmark == "babilong" else ("niah", "vt")
    values: dict[tuple[Any, ...], float] = {("topk_phi", 1.0): 0.53, ("topk_phi", 2.0): 0.47}
    rows = result_rows(values, arms, tasks, benchmark=benchmark, length=length, n=6500, decoding=DECODING, **facts)
    return write_rows(folder / f"{benchmark}_1b_{length}.csv", rows)


def _accounting(folder: Path, facts: Row) -> Path:
    rows = []
    for index, (corpus, length) in enumerate([("wikitext", "4k"), ("cwe", "4k")]):
        errors = {name: f"{0.1 + 0.05 * place + 0.01 * index:.6f}" for place, name in enumerate(ERRORS)}
        errors[accounting_file.LOG_Z] = "-0.574000"
        bounds = {
            f"{name}_ci_{side}": f"{float(errors[name]) + step:.6f}"
            for name in accounting_file.INTERVALS
            for side, step in (("low", -0.02), ("high", 0.02))
        }
        rows.append(
            facts | errors | bounds | {
                "corpus": corpus, "length": length, "maps": "64k", "budget_percent": "1", "k": "21", "packs": "8",
                "heads": "512", "rows": "4096", "clamped_share": "0.000000", "phi_sha": "ab" * 32,
            }
        )  # fmt: skip
    return write(folder / "accounting_1b.csv", ACCOUNTING, rows)


def _runtime(folder: Path, facts: Row) -> Path:
    """Made-up times: every number is another one."""
    rows = []
    for size, context in enumerate(("4k", "16k")):
        for place, method in enumerate(METHODS):
            step = 6.5 + 40 * size + 10 * place
            partial = {"budget_percent": "1", "k": str(21 + size)} if place else {}
            maps = {"phi_weights": "random"} if "phi" in method else {}
            rows.append(
                facts | partial | maps | {
                    "implementation": "prototype", "method": method, "context": context, "batch": "1",
                    "per_step_ms": f"{step:.3f}", "per_step_low_ms": f"{step - 0.4:.3f}",
                    "per_step_high_ms": f"{step + 0.5:.3f}", "prefill_ms": "30.000",
                    "end_to_end_ms": f"{30 + 31 * step:.3f}", "peak_memory_mib": "900.000", "repeats": "5",
                    "step_bytes": str((place + 3 + size) * 10**9), "floor_ms": f"{(place + 3 + size) / 4:.3f}",
                    "bandwidth_gb_s": "4000.000", "tokens_as_prototype": "1.000", "dtype": "bfloat16",
                    "device": "NVIDIA H200",
                }
            )  # fmt: skip
    return write(folder / "measured_runtime_1b.csv", RUNTIME, rows)


def _records(scored: Path, phi: Path, generated: Path, runtime: Path) -> None:
    """What the stages record: only trainings and latencies name the hardware, and scores no device at all."""
    common = {
        "packages": {"torch": "9.8.7"},
        "machine": {"platform": "Linux-x", "cpus": 12, "python": "3.11.2"},
    }
    for path, facts in {
        scored: {"generations": ["all.jsonl"], "spec": {"seed": 7, "recipe": 3}},
        phi: {"device": "cuda:0", "hardware": "NVIDIA H200", "processes": 8, "seconds": 1234.5, "steps": 10,
              "spec": {"seed": 0, "recipe": 3}},
        generated: {"device": "cuda", "seconds": 56.0, "spec": {"recipe": 5}},
        runtime: {"device": "NVIDIA H200", "seconds": 7.0, "spec": {"seed": 0, "recipe": 1}},
    }.items():  # fmt: skip
        recorded(path, **facts, **common)


def _claims(folder: Path) -> Path:
    claims = [("1", "holds", "Completion helps."), ("1", "undecided", "Nothing is lost."),
              ("0", "does not hold", "It never hurts.")]  # fmt: skip
    rows = [
        {"study": "paper", "backbone": "1b", "statement": text, "shown_in": "entropy_gain", "corpus": "wiki",
         "length": "4k", "k": "21", "primary": primary, "statistic": "mean gain", "estimate": "0.1", "ci_low": "-0.1",
         "ci_high": "0.3", "verdict": verdict}
        for primary, verdict, text in claims
    ]  # fmt: skip
    return write(folder / "claims_1b.csv", statements.COLUMNS, rows)
