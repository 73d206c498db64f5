"""Tables of exact accounting, and of what feature maps, training and decoding cost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import pandas as pd

from residual_mass.paper import published
from residual_mass.paper.cells import FORMS, LEFT_OUT, best, cross, looked_up, numbers, part, with_values
from residual_mass.paper.tables.layout import RUNTIME, Rows, lengths, middle_budget, table
from residual_mass.paper.titles import METHOD_TITLES, OWN_ROW, method_title, text_title
from residual_mass.spec.labels import METHODS, PUBLISHED
from residual_mass.spec.specs import TableSpec

ACCOUNTING = {
    "e_topk": METHOD_TITLES["topk"], "e_nosub": METHOD_TITLES["topk_phi_nosub"], "e_sub": METHOD_TITLES["topk_phi"],
    "e_exact_nosub": "ExactNoSub", "log_z_error": "Log-$Z$ error",
}  # fmt: skip
"""Titles of the printed columns, by column of the file; the first three compete for bold type."""
PARAMETERS = {
    "params_per_head": "Per head", "q_heads": "Query heads", "kv_heads": "KV heads",
    "phi_q_total": r"$\phi_{\mathrm{q}}$ total", "phi_k_total": r"$\phi_{\mathrm{k}}$ total", "total": "Total",
}  # fmt: skip
TRAINING = {
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
)
def exact_accounting(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Errors of attention outputs with and without completion and subtraction, by corpus and length."""
    findings = rows["findings"]
    titles = [show.backbone_titles[name] * (len(show.backbones) > 1) for name in show.backbones]
    lines = cross(part("length", show.lengths), part("corpus", dict.fromkeys(findings["corpus"])))
    columns = part("column", ACCOUNTING.values(), quantity=ACCOUNTING)
    cells = cross(part("block", titles, backbone=show.backbones), lines, columns)
    cells = with_values(looked_up(cells.assign(budget_percent=middle_budget(show)), findings))
    cells["row"] = cells["corpus"].map(text_title) + " | " + cells["length"] + " | " + cells["k"]
    signed = (cells["quantity"] == "log_z_error") & (cells["text"] != LEFT_OUT)
    cells["printed"] = cells["text"].mask(signed, "$" + cells["text"] + "$")
    if show.study != PUBLISHED:
        clamped = cells["clamped_share"].where(cells["quantity"].isin(["e_sub", "log_z_error"]), "")
        cells = cells.assign(n=cells["packs"], counted="packs", clamped_share=clamped)
    competing = cells["quantity"].isin(list(ACCOUNTING)[:3])
    return cells.assign(bold=best(cells, competing, ["backbone", "corpus", "length"], False))


@table("phi_param_count", of="maps", heads=(r"Backbone / $d_\phi$",), keys="backbone maps kind d_emb d_phi quantity")
def phi_param_count(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Numbers of parameters of a backbone's feature maps, per head and in total."""
    maps = rows["maps"].rename(columns={"query_heads": "q_heads"})
    maps = maps.sort_values("d_phi", key=numbers, kind="stable")
    maps = maps.sort_values("backbone", key=lambda names: names.map(show.backbones.index), kind="stable")
    per_head, heads = maps["params_per_head"].astype(int), maps[["q_heads", "kv_heads"]].astype(int)
    totals = {"phi_q_total": per_head * heads["q_heads"], "phi_k_total": per_head * heads["kv_heads"]}
    maps = maps.assign(**totals, total=sum(totals.values()), d_emb=maps["d_emb"].where(maps["kind"] == "rezero", ""))
    maps["row"] = maps["backbone"].map(show.backbone_titles) + " / " + maps["d_phi"]
    return with_values(cross(maps, part("column", PARAMETERS.values(), quantity=PARAMETERS)))


# ---- training --------------------------------------------------------------------------------------------------------


@table(
    "training_cost_64k",
    of="training",
    heads=("Backbone",),
    keys="backbone length maps quantity",
    extra="steps hardware processes",
)
def training_cost_64k(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Costs of training, a row per backbone, followed by the paper's row for the same model."""
    theirs = published.rows("training_cost_64k").assign(row="in the paper", sequences="", teacher_passes="")
    theirs[["processes", "hardware"]] = theirs["hardware"].str.split("x", n=1, expand=True).to_numpy()
    if show.study == PUBLISHED:
        shown = {name: TRAINING[name] for name in ("steps", "wall_clock_h")}
        titles = theirs["backbone"].map(show.backbone_titles)
        lines = [theirs.assign(length=published.MAIN_MAPS, row=titles)]
    else:
        shown, lines, logs = TRAINING, [], _efforts_of(rows["train"], show)
        for backbone, model in zip(logs["backbone"], logs["model_id"], strict=True):
            paper = theirs[theirs["backbone"].map(published.MODELS) == model].assign(backbone=backbone)
            lines += [logs[logs["backbone"] == backbone], paper]
    cells = cross(pd.concat(lines, ignore_index=True).fillna(""), part("column", shown.values(), quantity=shown))
    cells = with_values(cells).assign(maps=cells["length"])
    from_paper = cells["study"] == PUBLISHED
    cells["text"] = cells["text"].mask(from_paper & (cells["quantity"] == "wall_clock_h"), cells["value"] + " h")
    efforts = pd.Series([_effort(cell) for cell in cells.to_dict("records")])
    cells["printed"] = cells["text"].mask(cells["quantity"] == "steps", efforts)
    return cells.assign(value=cells["value"].mask(from_paper & (show.study != PUBLISHED), ""))


def _efforts_of(logs: pd.DataFrame, show: TableSpec) -> pd.DataFrame:
    """Returns the last row of every backbone's log, with numbers of sequences and of teacher passes, and hours."""
    logs = logs.drop_duplicates("backbone", keep="last").set_index("backbone").loc[list(show.backbones)].reset_index()
    steps, per_step, reuse = (logs[name].astype(int) for name in ("steps", "sequences_per_step", "reuse"))
    hours = (numbers(logs["seconds"]) / 3600).map("{:.6f}".format)
    logs = logs.assign(sequences=steps * per_step, teacher_passes=-(-steps // reuse) * per_step, wall_clock_h=hours)
    return logs.assign(row=logs["backbone"].map(show.backbone_titles), n="1", counted="trainings")


def _effort(cell: Mapping[str, str]) -> str:
    """Returns `200k steps on 8xH200`. As in the paper, the vendor is left out, and a CPU's name, which the CSV has."""
    shown = re.sub(r".*, (?=\d+ threads?$)", "CPU, ", cell["hardware"])
    counted = (shown and not shown.startswith("CPU")) or int(cell["processes"] or 1) > 1
    times = rf"{cell['processes'] or 1}$\times$" if counted else ""
    steps = FORMS["steps"](int(cell["steps"]))
    return f"{steps} steps on {times}{shown.removeprefix('NVIDIA ') or 'unknown hardware'}"


# ---- latencies -------------------------------------------------------------------------------------------------------

IMPLEMENTATIONS = {"prototype": "Prototype", "fused": "Fused", "kernels": "CPU kernels"}
TIMES, TRAFFIC = ("per_step_ms", "end_to_end_ms"), ("step_bytes", "floor_ms", "over_floor")
"""Quantities that share a field: `step / end to end`, then `traffic / floor / step over floor`."""


@table(
    RUNTIME,
    of="runtime",
    heads=("Context", "$K$"),
    keys="backbone implementation method length batch budget_percent k quantity",
    extra="low high peak_memory_mib not_measured phi_weights dtype device",
)
def runtime(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """Latencies of one backbone by implementation, batch, context and method, then the traffic of a step; with the
    paper's values where it measured that model.
    """
    found = rows["runtime"][rows["runtime"]["context"].isin(show.lengths)]
    order = [found["implementation"].map(list(IMPLEMENTATIONS).index), pd.to_numeric(found["batch"])]
    measured = [of for _, of in found.groupby(order)]
    in_columns = found.loc[found["implementation"] != "kernels", "method"]  # the file has those with kernels only
    methods = list(dict.fromkeys([*METHODS, *in_columns]))
    titles = [method_title(name) + OWN_ROW * (name not in METHODS) for name in methods]
    columns = part("column", titles, method=methods)
    if show.study == PUBLISHED:
        return pd.concat([_latencies(of, columns, show, TIMES).assign(block="") for of in measured], ignore_index=True)
    parts = [_latencies(of, columns, show, TIMES) for of in measured]
    for name in (name for name, model in published.MODELS.items() if model == found["model_id"].iloc[0]):
        results, spec = published.results(f"{RUNTIME}{name}")
        block = _latencies(results["runtime"], columns, spec, TIMES)
        parts.append(block.assign(value="", block="The paper, batch 1", backbone=show.backbones[0]))
    # The file rounds the floor, which is 0 for a tiny model.
    parts += [_latencies(of.assign(over_floor=_over_floor(of)), columns, show, TRAFFIC) for of in measured]
    return pd.concat(parts, ignore_index=True).fillna("")


def _over_floor(found: pd.DataFrame) -> pd.Series:
    """Returns a measured step as a multiple of the time that its traffic takes at full bandwidth."""
    ratio = numbers(found["per_step_ms"]) / (numbers(found["step_bytes"]) / numbers(found["bandwidth_gb_s"]) / 1e6)
    return ratio.map("{:.6f}".format).where(ratio.notna(), "")


def _latencies(found: pd.DataFrame, columns: pd.DataFrame, show: TableSpec, quantities: Iterable[str]) -> pd.DataFrame:
    """Returns one block: contexts by methods, with the quantities of a measurement in one field."""
    first, traffic = found.iloc[0], quantities == TRAFFIC
    block = f"{IMPLEMENTATIONS[first['implementation']]}, batch {first['batch']}"
    places = cross(lengths(show, "row"), columns, part("quantity", quantities))
    places = places.assign(**first[["implementation", "batch", "backbone"]])
    found = found.rename(columns={"context": "length"})
    cells = looked_up(places, found, absent=True)
    if traffic:
        shared = dict.fromkeys(f"{float(budget):g}%" for budget in found["budget_percent"] if budget)
        block += f", budget {', '.join(shared)}"
    else:
        k = found[found["budget_percent"] != ""].drop_duplicates("length").set_index("length")["k"]
        cells["row"] += " | " + cells["row"].map(k)
    cells = with_values(cells)
    fields = cells.groupby(["row", "column"], sort=False)["text"].transform(" / ".join)
    cells["printed"] = fields.mask(cells.get("source", cells["value"]) == "", LEFT_OUT)
    cells = cells.assign(n=cells.get("repeats", ""), counted="repeats", grid="traffic" if traffic else "")
    ranges = (cells["quantity"] == "per_step_ms") & (cells["n"] != "1")  # one repeat has no range
    for name in ("low", "high"):
        cells[name] = cells.get(f"per_step_{name}_ms", pd.Series("", cells.index)).where(ranges, "")
    return cells.assign(block=block)
