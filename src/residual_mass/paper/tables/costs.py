"""Tables of exact accounting, and of what feature maps, training and decoding cost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import pandas as pd

from residual_mass.paper import published
from residual_mass.paper.cells import LEFT_OUT, best, cross, looked_up, of_quantity, part, texts
from residual_mass.paper.tables.layout import RUNTIME, Rows, lengths, table
from residual_mass.paper.titles import METHOD_TITLES, OWN_ROW, corpus_title, method_title
from residual_mass.study.labels import METHODS, PUBLISHED
from residual_mass.study.specs import TableSpec

ACCOUNTING = {
    "e_topk": METHOD_TITLES["topk"], "e_nosub": METHOD_TITLES["topk_phi_nosub"], "e_sub": METHOD_TITLES["topk_phi"],
    "e_exact_nosub": "ExactNoSub", "log_z_error": "Log-$Z$ error",
}  # fmt: skip
"""What a row prints, by the column of the file; the first three compete."""
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
    """What completion and the double counting of retrieved tokens do to attention outputs, corpus by corpus."""
    found = rows["accounting"]
    titles = show.backbone_titles if len(show.backbones) > 1 else dict.fromkeys(show.backbones, "")
    blocks = part("block", (titles[name] for name in show.backbones), backbone=show.backbones)
    lines = cross(part("length", show.lengths), part("corpus", dict.fromkeys(found["corpus"])))
    columns = part("column", ACCOUNTING.values(), quantity=ACCOUNTING)
    cells = cross(blocks, lines, columns).assign(budget_percent=f"{show.budgets[0]:g}", grid="", group="")
    cells = of_quantity(looked_up(cells, found)).assign(n=lambda of: of.get("packs", ""), counted="packs")
    cells["row"] = cells["corpus"].map(corpus_title) + " | " + cells["length"] + " | " + cells["k"]
    cells["text"] = texts(cells)
    signed = (cells["quantity"] == "log_z_error") & (cells["text"] != LEFT_OUT)
    cells["printed"] = cells["text"].mask(signed, "$" + cells["text"] + "$")
    if "clamped_share" in cells:
        cells["clamped_share"] = cells["clamped_share"].where(cells["quantity"].isin(["e_sub", "log_z_error"]), "")
    competing = cells["quantity"].isin(list(ACCOUNTING)[:3])
    return cells.assign(bold=best(cells, competing, ["backbone", "corpus", "length"], False))


@table("phi_param_count", of="maps", heads=(r"Backbone / $d_\phi$",), keys="backbone maps kind d_emb d_phi quantity")
def phi_param_count(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """How large the feature maps of a backbone are, per head and in all."""
    maps = rows["maps"].rename(columns={"query_heads": "q_heads"})
    order = pd.DataFrame({"backbone": maps["backbone"].map(show.backbones.index), "width": maps["d_phi"].astype(int)})
    maps = maps.loc[order.sort_values(["backbone", "width"], kind="stable").index]
    per_head = maps["params_per_head"].astype(int)
    maps["phi_q_total"], maps["phi_k_total"] = (per_head * maps[f"{name}_heads"].astype(int) for name in ("q", "kv"))
    maps["total"] = maps["phi_q_total"] + maps["phi_k_total"]
    maps["d_emb"] = maps["d_emb"].where(maps["kind"] == "rezero", "")
    maps["row"] = maps["backbone"].map(show.backbone_titles) + " / " + maps["d_phi"]
    columns = part("column", PARAMETERS.values(), quantity=PARAMETERS)
    cells = of_quantity(cross(maps, columns).assign(grid="", group="", block=""))
    counts = [
        (int(value), name.endswith("total")) for value, name in zip(cells["value"], cells["quantity"], strict=True)
    ]
    return cells.assign(text=[f"{count / 1e6:.1f}M" if total else f"{count:,}" for count, total in counts])


# ---- training --------------------------------------------------------------------------------------------------------


@table(
    "training_cost_64k",
    of="training",
    heads=("Backbone",),
    keys="backbone length maps quantity",
    extra="steps hardware processes",
)
def training_cost_64k(rows: Rows, show: TableSpec) -> pd.DataFrame:
    """What training takes, a row per backbone, with the paper's below it where it trained maps of that model."""
    theirs = published.rows("training_cost_64k").assign(row="in the paper", sequences="", teacher_passes="", beside="1")
    theirs[["processes", "hardware"]] = theirs["hardware"].str.split("x", n=1, expand=True).to_numpy()
    shown, lines = TRAINING, [theirs]
    if show.study == PUBLISHED:
        shown = {name: TRAINING[name] for name in ("steps", "wall_clock_h")}
        titles = theirs["backbone"].map(show.backbone_titles)
        lines = [theirs.assign(length=published.MAIN_MAPS, row=titles, beside="")]
    else:
        logs = _efforts_of(rows["train"], show)
        lines = []
        for backbone, model in zip(logs["backbone"], logs["model_id"], strict=True):
            paper = theirs[theirs["backbone"].map(published.MODELS) == model].assign(backbone=backbone)
            lines += [logs[logs["backbone"] == backbone], paper]
    cells = cross(pd.concat(lines, ignore_index=True).fillna(""), part("column", shown.values(), quantity=shown))
    cells = of_quantity(cells).assign(grid="", group="", block="", maps=cells["length"])
    records = cells.to_dict("records")
    cells["text"] = [_effort_text(cell) for cell in records]
    cells["printed"] = [_effort(cell) if cell["quantity"] == "steps" else _effort_text(cell) for cell in records]
    return cells.assign(value=cells["value"].where(cells["beside"] != "1", ""))


def _efforts_of(logs: pd.DataFrame, show: TableSpec) -> pd.DataFrame:
    """The last row of every backbone's log, with sequences, the teacher's passes over sequences, and hours."""
    logs = logs.iloc[pd.to_numeric(logs["step"]).argsort(kind="stable")].drop_duplicates("backbone", keep="last")
    logs = logs.set_index("backbone").loc[list(show.backbones)].reset_index()
    steps, each = logs["steps"].astype(int), logs["sequences_per_step"].astype(int)
    passes = [math.ceil(count / int(reuse)) for count, reuse in zip(steps, logs["reuse"], strict=True)]
    hours = [f"{float(seconds) / 3600:.6f}" for seconds in logs["seconds"]]
    logs = logs.assign(sequences=steps * each, teacher_passes=passes * each, wall_clock_h=hours)
    return logs.assign(row=logs["backbone"].map(show.backbone_titles), n="1", counted="trainings", beside="")


def _effort_text(cell: Mapping[str, str]) -> str:
    if not cell["value"]:
        return LEFT_OUT
    if cell["quantity"] != "wall_clock_h":
        return _thousands(round(float(cell["value"])))
    hours, seconds = float(cell["value"]), round(3600 * float(cell["value"]))
    if "." not in cell["value"]:
        return f"{cell['value']} h"
    return f"{seconds} s" if seconds < 120 else f"{seconds / 60:.1f} min" if seconds < 7200 else f"{hours:.1f} h"


def _effort(cell: Mapping[str, str]) -> str:
    """`200k steps on 8xH200`, with a proper cross. As in the paper, makers are left out; the CSV has a CPU's."""
    shown = re.sub(r".*, (?=\d+ threads$)", "CPU, ", cell["hardware"])
    counted = (shown and not shown.startswith("CPU")) or int(cell["processes"] or 1) > 1
    times = rf"{cell['processes'] or 1}$\times$" if counted else ""
    return f"{_thousands(int(cell['steps']))} steps on {times}{shown.removeprefix('NVIDIA ') or 'unknown hardware'}"


def _thousands(count: int) -> str:
    return f"{count // 1000}k" if count and count % 1000 == 0 else f"{count:,}"


# ---- latencies -------------------------------------------------------------------------------------------------------

IMPLEMENTATIONS = {"prototype": "Prototype", "fused": "Fused"}
TIMES, TRAFFIC = ("per_step_ms", "end_to_end_ms"), ("step_bytes", "floor_ms", "over_floor")
"""What is printed of a measurement: `step / end to end`, then `traffic / floor / step over floor`."""


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
    found = rows["runtime"].assign(length=rows["runtime"]["context"])
    found = found[found["length"].isin(show.lengths)]
    order = [found["implementation"].map(list(IMPLEMENTATIONS).index), pd.to_numeric(found["batch"])]
    measured = [of for _, of in found.groupby(order)]
    methods = list(dict.fromkeys([*METHODS, *(name for of in measured for name in of["method"])]))
    titles = [method_title(name) + OWN_ROW * (name not in METHODS) for name in methods]
    columns = part("column", titles, method=methods)
    if show.study == PUBLISHED:
        return pd.concat([_latencies(of, columns, show, TIMES).assign(block="") for of in measured], ignore_index=True)
    parts = [_latencies(of, columns, show, TIMES) for of in measured]
    for name in (name for name, model in published.MODELS.items() if model == found["model_id"].iloc[0]):
        results, spec = published.results(f"{RUNTIME}{name}")
        block = _latencies(results["runtime"], columns, spec, TIMES)
        parts.append(block.assign(value="", block="The paper, batch 1", backbone=show.backbones[0]))
    parts += [_latencies(of, columns, show, TRAFFIC) for of in measured]
    return pd.concat(parts, ignore_index=True).fillna("")


def _latencies(found: pd.DataFrame, columns: pd.DataFrame, show: TableSpec, quantities: Iterable[str]) -> pd.DataFrame:
    """One block: contexts by methods, with the quantities of a measurement in one field."""
    first, traffic = found.iloc[0], quantities == TRAFFIC
    facts = {name: first[name] for name in ("implementation", "batch", "backbone")}
    cells = cross(lengths(show, "row").assign(**facts), columns, part("quantity", quantities))
    cells = looked_up(cells, found, pd.Series(True, cells.index))
    block = f"{IMPLEMENTATIONS[first['implementation']]}, batch {first['batch']}"
    if traffic:
        shared = dict.fromkeys(f"{float(budget):g}%" for budget in found["budget_percent"] if budget)
        block += f", budget {', '.join(shared)}"
    else:
        k = found[found["budget_percent"] != ""].drop_duplicates("length").set_index("length")["k"]
        cells["row"] += " | " + cells["row"].map(k)
    records = cells.to_dict("records")
    cells["value"] = [_latency(cell) for cell in records]
    cells["text"] = [_milliseconds(*cell) for cell in zip(cells["quantity"], cells["value"], strict=True)]
    fields = cells.groupby(["row", "column"], sort=False)["text"].transform(" / ".join)
    step = cells["quantity"] == "per_step_ms"
    for name in ("low", "high"):
        cells[name] = cells.get(f"per_step_{name}_ms", pd.Series("", cells.index)).where(step, "")
    lacking = cells.get("source", cells["value"]) == ""
    cells = cells.assign(printed=fields.mask(lacking, LEFT_OUT), block=block, grid="traffic" if traffic else "")
    return cells.assign(group="", n=cells.get("repeats", ""), counted="repeats")


def _latency(cell: Mapping[str, str]) -> str:
    """The step over its floor is not in the file; its floor is not rounded, or a tiny model's would be nothing. What
    was not measured has traffic alone.
    """
    quantity = cell["quantity"]
    if cell.get("not_measured") and quantity not in ("step_bytes", "floor_ms"):
        return ""
    if quantity != "over_floor" or not cell.get("per_step_ms"):
        return str(cell.get(quantity, ""))
    floor = int(cell["step_bytes"]) / float(cell["bandwidth_gb_s"]) / 1e6
    return f"{round(float(cell['per_step_ms']) / floor, 6):.6f}"


def _milliseconds(quantity: str, value: str) -> str:
    """Traffic is in gigabytes, and long times have no room for decimals."""
    if not value:
        return LEFT_OUT
    number = float(value)
    if quantity == "step_bytes":
        return f"{number / 1e9:.3f}"
    return f"{number:.2f}" if number < 1e4 else f"{number:.0f}"
