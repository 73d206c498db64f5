"""Tables of exact accounting, and of what feature maps, training and decoding cost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from residual_mass.metrics import budget_text
from residual_mass.paper import published
from residual_mass.paper.cells import best, cross_join, join_results, layout_part, with_empty_texts, with_values
from residual_mass.paper.digits import DASH, format_steps
from residual_mass.paper.tables.layout import RUNTIME_PREFIX, Rows, lengths, middle_budget, table
from residual_mass.paper.titles import METHOD_TITLES, OWN_ROW, method_title, text_title
from residual_mass.spec.labels import PAPER_METHODS, PUBLISHED
from residual_mass.spec.specs import TableSpec

ACCOUNTING_TITLES = {
    "e_topk": METHOD_TITLES["topk"], "e_nosub": METHOD_TITLES["topk_phi_nosub"], "e_sub": METHOD_TITLES["topk_phi"],
    "e_exact_nosub": "ExactNoSub", "log_z_error": "Log-$Z$ error",
}  # fmt: skip
"""Titles of the printed columns, by column of the file; the first three compete for bold type."""
PARAMETER_TITLES = {
    "params_per_head": "Per head", "q_heads": "Query heads", "kv_heads": "KV heads",
    "phi_q_total": r"$\phi_{\mathrm{q}}$ total", "phi_k_total": r"$\phi_{\mathrm{k}}$ total", "total": "Total",
}  # fmt: skip
TRAINING_TITLES = {
    "steps": "Steps / hardware",
    "sequences": "Sequences",
    "teacher_passes": "Passes",
    "wall_clock_h": "Wall-clock",
}


@table(
    "exact_accounting",
    of="diagnostics",
    heads=("Corpus", "Length", "$K$"),
    keys="backbone corpus length k budget_percent maps quantity",
    extra="clamped_share",
    digits=".6f",
)
def exact_accounting(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Errors of attention outputs with and without completion and subtraction, by corpus and length."""
    findings = rows["findings"]
    several = len(show.backbones) > 1
    titles = [show.backbone_titles[name] if several else "" for name in show.backbones]
    corpora = dict.fromkeys(findings["corpus"])
    cells = cross_join(
        layout_part("block", titles, backbone=show.backbones),
        layout_part("length", show.lengths),
        layout_part("corpus", corpora),
        layout_part("column", ACCOUNTING_TITLES.values(), quantity=ACCOUNTING_TITLES),
    )
    cells = cells.assign(budget_percent=middle_budget(show))
    cells = with_values(join_results(cells, findings))
    texts = cells["corpus"].map(text_title) + " | " + cells["length"]
    cells["row"] = texts + " | " + cells["k"].astype(str)
    signed = (cells["quantity"] == "log_z_error") & (cells["text"] != DASH)
    cells["printed"] = cells["text"].mask(signed, "$" + cells["text"] + "$")
    if show.study != PUBLISHED:
        completed = cells["quantity"].isin(["e_sub", "log_z_error"])
        clamped = cells["clamped_share"].where(completed)
        cells = cells.assign(n=cells["packs"], counted="packs", clamped_share=clamped)
    competing = cells["quantity"].isin(list(ACCOUNTING_TITLES)[:3])
    return cells.assign(bold=best(cells, competing, ["backbone", "corpus", "length"], False))


@table("phi_param_count", of="maps", heads=(r"Backbone / $d_\phi$",), keys="backbone maps kind d_emb d_phi quantity")
def phi_param_count(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Numbers of parameters of a backbone's feature maps, per head and in total."""
    maps = rows["maps"].rename(columns={"query_heads": "q_heads"})
    maps = maps.sort_values("d_phi", kind="stable")
    maps = maps.sort_values("backbone", key=lambda names: names.map(show.backbones.index), kind="stable")
    queries = maps["params_per_head"] * maps["q_heads"]
    keys = maps["params_per_head"] * maps["kv_heads"]
    maps = maps.assign(phi_q_total=queries, phi_k_total=keys, total=queries + keys)
    maps["d_emb"] = maps["d_emb"].where(maps["kind"] == "rezero")
    titles = maps["backbone"].map(show.backbone_titles)
    maps["row"] = titles + " / " + maps["d_phi"].astype(str)
    columns = layout_part("column", PARAMETER_TITLES.values(), quantity=PARAMETER_TITLES)
    return with_values(cross_join(maps, columns))


# ---- training --------------------------------------------------------------------------------------------------------


@table(
    "training_cost_64k",
    of="training",
    heads=("Backbone",),
    keys="backbone length maps quantity",
    extra="steps hardware processes",
    digits=".6f",
)
def training_cost_64k(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Costs of training, a row per backbone, followed by the paper's row for the same model."""
    theirs = _published_efforts()
    titles = TRAINING_TITLES
    if show.study == PUBLISHED:
        titles = {name: TRAINING_TITLES[name] for name in ("steps", "wall_clock_h")}
        of_backbone = theirs["backbone"].map(show.backbone_titles)
        lines = [theirs.assign(length=published.MAIN_MAPS, row=of_backbone)]
    else:
        logs = _efforts_of(rows["train"], show)
        lines = []
        for backbone, model in zip(logs["backbone"], logs["model_id"], strict=True):
            same = theirs["backbone"].map(published.MODELS) == model
            lines.append(logs[logs["backbone"] == backbone])
            lines.append(theirs[same].assign(backbone=backbone))
    efforts = with_empty_texts(pd.concat(lines, ignore_index=True))
    columns = layout_part("column", titles.values(), quantity=titles)
    cells = with_values(cross_join(efforts, columns))
    from_paper = cells["study"] == PUBLISHED
    in_hours = cells["value"].map("{:g} h".format)
    text = cells["text"].mask(from_paper & (cells["quantity"] == "wall_clock_h"), in_hours)
    of_steps = pd.Series([_effort(cell) for cell in cells.to_dict("records")])
    printed = text.mask(cells["quantity"] == "steps", of_steps)
    value = cells["value"].mask(from_paper & (show.study != PUBLISHED))
    return cells.assign(maps=cells["length"], text=text, printed=printed, value=value)


def _published_efforts() -> pd.DataFrame:
    """Returns the paper's costs, with its hardware such as "8xH200" in two columns."""
    theirs = published.rows("training_cost_64k")
    parts = theirs["hardware"].str.split("x", n=1, expand=True)
    return theirs.assign(row="in the paper", processes=parts[0].astype("Int64"), hardware=parts[1])


def _efforts_of(logs: pd.DataFrame, show: TableSpec) -> pd.DataFrame:
    """Returns the last row of every backbone's log, with numbers of sequences and of teacher passes, and hours."""
    last = logs.drop_duplicates("backbone", keep="last").set_index("backbone")
    logs = last.loc[list(show.backbones)].reset_index()
    batches = -(-logs["steps"] // logs["reuse"])  # rounded up
    logs["sequences"] = logs["steps"] * logs["sequences_per_step"]
    logs["teacher_passes"] = batches * logs["sequences_per_step"]
    logs["wall_clock_h"] = (logs["seconds"] / 3600).round(6)
    logs["row"] = logs["backbone"].map(show.backbone_titles)
    return logs.assign(n=1, counted="trainings")


def _effort(cell: Mapping[str, Any]) -> str:
    """Returns `200k steps on 8xH200`. As in the paper, the vendor is left out, and a CPU's name, which the CSV has."""
    hardware = re.sub(r".*, (?=\d+ threads?$)", "CPU, ", cell["hardware"])
    processes = 1 if pd.isna(cell["processes"]) else cell["processes"]
    on_a_cpu = not hardware or hardware.startswith("CPU")
    times = "" if on_a_cpu and processes == 1 else rf"{processes}$\times$"
    name = hardware.removeprefix("NVIDIA ") or "unknown hardware"
    return f"{format_steps(cell['steps'])} steps on {times}{name}"


# ---- latencies -------------------------------------------------------------------------------------------------------

IMPLEMENTATION_TITLES = {"prototype": "Prototype", "fused": "Fused", "kernels": "CPU kernels"}
TIMES = ("per_step_ms", "end_to_end_ms")
TRAFFIC = ("step_bytes", "floor_ms", "over_floor")
"""Quantities that share a field: `step / end to end`, then `traffic / floor / step over floor`."""


@table(
    RUNTIME_PREFIX,
    of="runtime",
    heads=("Context", "$K$"),
    keys="backbone implementation method length batch budget_percent k quantity",
    extra="low high peak_memory_mib not_measured phi_weights dtype device",
    digits=".3f",
)
def runtime(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Latencies of one backbone by implementation, batch, context and method, then the traffic of a step; with the
    paper's values where it measured that model.
    """
    found = rows["runtime"]
    found = found[found["context"].isin(show.lengths)]
    measured = _blocks_of(found)
    columns = _method_columns(found)
    parts = [_latencies(block, columns, show, TIMES) for block in measured]
    if show.study == PUBLISHED:
        return pd.concat(parts, ignore_index=True).assign(block="")
    model = found["model_id"].iloc[0]
    for block in _published_latencies(model, columns):
        parts.append(block.assign(backbone=show.backbones[0]))
    for block in measured:
        block = block.assign(over_floor=_over_floor(block))
        parts.append(_latencies(block, columns, show, TRAFFIC))
    return with_empty_texts(pd.concat(parts, ignore_index=True))


def _blocks_of(found: pd.DataFrame) -> list[pd.DataFrame]:
    """Returns the rows of each implementation and batch."""
    order = found["implementation"].map(list(IMPLEMENTATION_TITLES).index)
    return [block for _, block in found.groupby([order, found["batch"]])]


def _method_columns(found: pd.DataFrame) -> pd.DataFrame:
    """Returns a column for each method of the paper, then of the study; but not of those with kernels only."""
    in_columns = found["implementation"] != "kernels"
    methods = list(dict.fromkeys([*PAPER_METHODS, *found.loc[in_columns, "method"]]))
    titles = [method_title(name) + OWN_ROW * (name not in PAPER_METHODS) for name in methods]
    return layout_part("column", titles, method=methods)


def _published_latencies(model: str, columns: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yields the paper's block of a model, if it measured it; its values are not the study's."""
    for name, published_model in published.MODELS.items():
        if published_model == model:
            results, spec = published.results(f"{RUNTIME_PREFIX}{name}")
            block = _latencies(results["runtime"], columns, spec, TIMES)
            yield block.assign(value=float("nan"), block="The paper, batch 1")


def _over_floor(found: pd.DataFrame) -> pd.Series:
    """Returns a measured step as a multiple of the time that its traffic takes at full bandwidth. The file rounds the
    floor, which is 0 for a tiny model.
    """
    floor_ms = found["step_bytes"] / found["bandwidth_gb_s"] / 1e6
    return (found["per_step_ms"] / floor_ms).astype(float).round(6)


def _latencies(found: pd.DataFrame, columns: pd.DataFrame, show: TableSpec, quantities: Sequence[str]) -> pd.DataFrame:
    """Returns one block: contexts by methods, with the quantities of a measurement in one field."""
    first = found.iloc[0]
    places = cross_join(lengths(show, "row"), columns, layout_part("quantity", quantities))
    places = places.assign(implementation=first["implementation"], batch=first["batch"], backbone=first["backbone"])
    found = found.rename(columns={"context": "length"})
    cells = join_results(places, found, absent=True)
    title = f"{IMPLEMENTATION_TITLES[first['implementation']]}, batch {first['batch']}"
    if quantities == TRAFFIC:
        shared = dict.fromkeys(f"{budget_text(budget)}%" for budget in found["budget_percent"].dropna())
        cells = cells.assign(grid="traffic", block=f"{title}, budget {', '.join(shared)}")
    else:
        partial = found[found["budget_percent"].notna()].drop_duplicates("length")
        k = partial.set_index("length")["k"].map(str)
        rows = cells["row"] + " | " + cells["row"].map(k)
        cells = cells.assign(grid="", block=title, row=rows)
    cells = with_values(cells)
    measured = cells["source"] != "" if "source" in cells else cells["value"].notna()
    fields = cells.groupby(["row", "column"], sort=False)["text"].transform(" / ".join)
    printed = fields.where(measured, DASH)
    cells = cells.assign(printed=printed, n=cells.get("repeats"), counted="repeats")
    return _with_ranges(cells)


def _with_ranges(cells: pd.DataFrame) -> pd.DataFrame:
    """Adds the range of a step over the repeats; a single repeat has none."""
    repeated = (cells["quantity"] == "per_step_ms") & (cells["n"] != 1)
    for name in ("low", "high"):
        column = f"per_step_{name}_ms"
        if column in cells:
            cells[name] = cells[column].where(repeated)
    return cells
