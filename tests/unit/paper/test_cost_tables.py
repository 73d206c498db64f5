"""The tables of costs, read back from their LaTeX: latencies with their traffic, and training; what is refused."""

from __future__ import annotations

import csv
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from printed import caption_of, open_braces, pdflatex, printed_fields, row_widths, without_comments
from rendered import refusal, table, written_cells
from sample_results import table_spec
from sample_runtime import (
    BLOCKS,
    METHODS,
    REASON,
    SMALL,
    TRAINED,
    not_measured,
    runtime_1b,
    runtime_rows,
    write_runtime,
)
from tests.needs import LATEX, needs
from tests.records import recorded

from residual_mass.backbones.phi_maps import HeadShape
from residual_mass.core.settings import to_json
from residual_mass.files import csv_text, sha256_of
from residual_mass.paper import published
from residual_mass.paper.table import load_table
from residual_mass.paper.tables import runtime_table, training_cost_table
from residual_mass.study.sections.training import CurriculumSpec, ReplaySpec
from residual_mass.study.specs import TableSpec, TrainSpec
from residual_mass.training.learner import Learner

TRAINING = "training_cost_64k"
LLAMA = "meta-llama/Llama-3.2-1B-Instruct"
TITLES = {"prototype": "Prototype", "fused": "Fused"}
HOSTILE = 'a_b & 50% $x$ #1 {y} ~ ^ \\input{z} <|> "q" [r]'

Row = dict[str, str]


def no_results(label: str, **changes: Any) -> TableSpec:
    return table_spec(label, **{"lengths": (), "budgets": (), "benchmarks": ()} | changes)


def of_1b(label: str, **changes: Any) -> TableSpec:
    return no_results(label, **{"study": "paper", "backbones": ("1b",)} | changes)


# ---- latencies -------------------------------------------------------------------------------------------------------


def halves(tex: str) -> tuple[str, str]:
    """The tabular of latencies and that of traffic."""
    latencies, traffic = re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", tex, re.DOTALL)
    return latencies, traffic


SMOL = no_results("runtime_smol", lengths=("1k", "2k"))
OF_1B = of_1b("runtime_1b", lengths=("4k", "16k", "64k"))


@pytest.mark.parametrize("seed", range(3))
def test_latencies_and_traffic_are_those_of_the_file(tmp_path: Path, seed: int) -> None:
    rows = runtime_rows(seed)
    shuffled = random.Random(seed).sample(rows, len(rows))
    tex = table(tmp_path, SMOL, write_runtime(tmp_path / "runtime_smol.csv", shuffled))
    latencies, traffic = [], []
    for implementation, batch in BLOCKS:
        title = f"{TITLES[implementation]}, batch {batch}"
        latencies.append([rf"\multicolumn{{6}}{{l}}{{{title}}}"])
        traffic.append([rf"\multicolumn{{5}}{{l}}{{{title}, budget 4\%}}"])
        for context, k in (("1k", "21"), ("2k", "62")):
            times, moved = [], []
            for method in METHODS:
                (row,) = (
                    row
                    for row in rows
                    if (row["implementation"], row["batch"]) == (implementation, str(batch))
                    and (row["context"], row["method"]) == (context, method)
                )
                step, floor = float(row["per_step_ms"]), int(row["step_bytes"]) / 21.7e9 * 1000
                whole = float(row["end_to_end_ms"])
                times.append(f"{step:.2f} / {whole:.{0 if whole >= 10_000 else 2}f}")
                cost = float(row["floor_ms"])
                moved.append(f"{int(row['step_bytes']) / 1e9:.3f} / {cost:.2f} / {step / floor:.2f}")
            latencies.append([context, k, *times])
            traffic.append([context, *moved])
    assert [printed_fields(half) for half in halves(tex)] == [latencies, traffic]
    assert [row_widths(half.replace("{rr", "{ll").replace("{rc", "{lc")) for half in halves(tex)] == [{6}, {5}]
    assert open_braces(tex) == 0 and r"\textbf" not in tex and r"\label{tab:runtime_smol}" in tex


def test_methods_that_the_paper_lacks_are_the_last_columns_and_marked(tmp_path: Path) -> None:
    rows = runtime_1b()
    own = [
        row | {"method": "topk_moments", "phi_weights": "", "tokens_as_prototype": ""}
        for row in rows
        if (row["implementation"], row["method"]) == ("fused", "topk")
    ]
    tex = table(tmp_path, OF_1B, write_runtime(tmp_path / "runtime_1b.csv", own + rows))
    blocks = ["prototype", "fused", "fused", "the paper"]
    for half, width in zip(halves(tex), (7, 6), strict=True):
        assert r"+moments$^{*}$ \\"[:-2] in half
        fields = [row for row in printed_fields(half) if len(row) > 1]
        assert {len(row) for row in fields} == {width}
        shown = blocks[: len(fields) // 3]
        assert [row[-1] == "--" for row in fields] == [name != "fused" for name in shown for _ in range(3)]
    assert "Columns with $^{*}$ are our additions to the paper's table" in caption_of(tex)


def test_contexts_of_the_spec_are_shown_in_rising_order(tmp_path: Path) -> None:
    rows = runtime_rows(contexts=("64k", "2k", "16k"), blocks=(("fused", 1),))
    path = write_runtime(tmp_path / "runtime_smol.csv", rows)
    for lengths, shown in ((("16k", "64k", "2k"), ["2k", "16k", "64k"]), (("64k", "2k"), ["2k", "64k"])):
        for half in halves(table(tmp_path, replace(SMOL, lengths=lengths), path)):
            assert [row[0] for row in printed_fields(half)[1:]] == shown
        assert {line["length"] for line in written_cells(tmp_path)} == set(shown)
    (tmp_path / "out.tex").unlink(), (tmp_path / "cells.csv").unlink()
    message = refusal(tmp_path, replace(SMOL, lengths=("2k", "4k")), path)
    assert message == f"{path}: no row for fused, batch 1, at 4k; measure it, or leave it out"


def test_a_batch_size_that_lacks_a_context_is_refused(tmp_path: Path) -> None:
    rows = [row for row in runtime_rows() if (row["batch"], row["context"]) != ("8", "2k")]
    path = write_runtime(tmp_path / "a.csv", rows)
    assert refusal(tmp_path, SMOL, path) == f"{path}: no row for fused, batch 8, at 2k; measure it, or leave it out"


def test_the_papers_values_stand_beside_those_of_its_model_alone(tmp_path: Path) -> None:
    path = write_runtime(tmp_path / "runtime_1b.csv", runtime_1b())
    tex = table(tmp_path, replace(OF_1B, backbone_titles={"1b": "Llama one"}), path)
    fields = printed_fields(halves(tex)[0])
    assert fields[-4] == [r"\multicolumn{6}{l}{The paper, batch 1}"]
    with open(Path(published.__file__).with_name("runtime_1b.csv"), newline="") as stream:
        facts = list(csv.DictReader(stream))
    texts = [f"{fact['per_step_ms']} / {fact['end_to_end_ms']}" for fact in facts]
    expected = [[facts[i]["context"], facts[i]["k"], *texts[i : i + 4]] for i in range(0, 12, 4)]
    assert fields[-3:] == expected and "The paper" not in halves(tex)[1]
    assert "Latency with Llama one in milliseconds" in caption_of(tex)
    assert "The paper's values are of its own prototype in bfloat16 on one H200" in caption_of(tex)
    write_runtime(path, runtime_1b(model_id="org/Namesake"))
    tex = table(tmp_path, OF_1B, path)
    assert "The paper, batch" not in tex and "The paper's values are" not in tex
    assert "The paper does not evaluate org/Namesake; the values are not comparable" in caption_of(tex)


def test_the_caption_of_latencies_owns_up_to_what_was_measured(tmp_path: Path) -> None:
    rows = runtime_rows(blocks=BLOCKS[:2])
    rows[5] |= {"per_step_ms": "100.000", "per_step_low_ms": "88.000", "per_step_high_ms": "101.000"}
    rows[5]["end_to_end_ms"] = "9000.000"
    rows[-1]["tokens_as_prototype"] = "0.875"
    tex = table(tmp_path, SMOL, write_runtime(tmp_path / "runtime_smol.csv", rows))
    caption = caption_of(tex)
    for words in (
        "Study mini, backbone org/Small-LM, float32, on Some CPU, 2 threads.",
        "The paper does not evaluate org/Small-LM; the values are not comparable with the paper's.",
        "The feature maps are random and in float32, in every implementation; time hardly depends on the values of",
        "Prototype: Full is the decoding of the transformers library",
        "Fused: decoding of our own",
        "CUDA graphs, which are recorded once per prompt length and are not counted.",
        r"medians of 3 repeats, the furthest of which is 12\% from its median.",
        r"$K$ is that of a budget of 4\%.",
        "The bandwidth is that of copies, 21.7 GB/s.",
        r"Fused decoding gives the prototype's tokens in 87.5\% of all places at least.",
    ):
        assert words in caption, words
    assert "% runtime_smol.csv: org/Small-LM at r1, pretrained weights, float32, phi maps random, on Some CPU" in tex
    same = [row | {"tokens_as_prototype": "1.000"} for row in rows]
    caption = caption_of(table(tmp_path, SMOL, write_runtime(tmp_path / "runtime_smol.csv", same)))
    assert "Fused decoding gives the prototype's tokens everywhere." in caption
    assert "weights are random" not in caption


def test_a_file_without_the_prototype_says_nothing_of_its_tokens(tmp_path: Path) -> None:
    rows = [row | {"tokens_as_prototype": ""} for row in runtime_rows(blocks=BLOCKS[1:])]
    caption = caption_of(table(tmp_path, SMOL, write_runtime(tmp_path / "runtime_smol.csv", rows)))
    assert "Fused: decoding" in caption and "prototype's tokens" not in caption and "Prototype: " not in caption
    assert {line["tokens_as_prototype"] for line in written_cells(tmp_path)} == {""}
    rows[3]["tokens_as_prototype"] = "0.500"
    caption = caption_of(table(tmp_path, SMOL, write_runtime(tmp_path / "runtime_smol.csv", rows)))
    assert r"gives the prototype's tokens in 50\% of all places at least" in caption


def test_random_weights_of_the_backbone_are_owned_up_to(tmp_path: Path) -> None:
    path = write_runtime(tmp_path / "runtime_1b.csv", runtime_1b(weights="random"))
    caption = caption_of(table(tmp_path, OF_1B, path))
    assert "The backbone's weights are random. The feature maps are random" in " ".join(caption.split())
    assert "say nothing of a method" not in caption, "that is said of scores"


def test_every_printed_latency_is_a_line_with_its_origin(tmp_path: Path) -> None:
    rows = runtime_rows()
    path = write_runtime(tmp_path / "runtime_smol.csv", rows)
    latencies, traffic = (printed_fields(half) for half in halves(table(tmp_path, SMOL, path)))
    lines = written_cells(tmp_path)
    assert len(lines) == len(rows) * 5 and list(lines[0]) == [*runtime_table.COLUMNS]
    keys = {tuple(line[name] for name in list(line)[: list(line).index("text")]) for line in lines}
    assert len(keys) == len(lines), "what stands before the text tells cells apart"
    texts = [text for fields in latencies if len(fields) > 1 for field in fields[2:] for text in field.split(" / ")]
    texts += [text for fields in traffic if len(fields) > 1 for field in fields[1:] for text in field.split(" / ")]
    first = [line["text"] for line in lines if line["quantity"] in ("per_step_ms", "end_to_end_ms")]
    second = [line["text"] for line in lines if line["quantity"] not in ("per_step_ms", "end_to_end_ms")]
    assert first + second == texts
    for line in lines:
        (row,) = (
            row
            for row in rows
            if all(row[name] == line[name] for name in ("implementation", "method", "batch"))
            and row["context"] == line["length"]
        )
        ratio = float(row["per_step_ms"]) * float(row["bandwidth_gb_s"]) * 1e6 / int(row["step_bytes"])
        exact = f"{ratio:.6f}" if line["quantity"] == "over_floor" else row[line["quantity"]]
        bounds = [row[f"per_step_{side}_ms"] if line["quantity"] == "per_step_ms" else "" for side in ("low", "high")]
        assert (line["value"], [line["low"], line["high"]]) == (exact, bounds)
        for origin in ("backbone", "study", "model_id", "revision", "weights", "dtype", "device", "k", "repeats"):
            assert line[origin] == row[origin]
        assert (line["table"], line["source"], line["bold"]) == ("runtime_smol", path.name, "0")


def test_a_setting_that_does_not_fit_has_its_traffic_and_the_reason(tmp_path: Path) -> None:
    """The larger batch's last context: what caches features, too, does not."""
    rows = [row | {"recording_ms": "1250.000" if row["implementation"] == "fused" else ""} for row in runtime_rows()]
    lacking = [i for i, row in enumerate(rows) if row["batch"] + row["context"] == "82k" and "phi" in row["method"]]
    for i in lacking:
        rows[i] = not_measured(rows[i])
    tex = table(tmp_path, SMOL, write_runtime(tmp_path / "runtime_smol.csv", rows))
    latencies, traffic = (printed_fields(half)[-1] for half in halves(tex))
    assert latencies[-2:] == ["-- / --"] * 2 and "--" not in "".join(latencies[:-2])
    moved = [f"{int(rows[i]['step_bytes']) / 1e9:.3f} / {float(rows[i]['floor_ms']):.2f} / --" for i in lacking]
    assert traffic[-2:] == moved
    caption = caption_of(tex)
    assert "What has no times does not fit into the memory that was free: fused at 2k with batch 8." in caption
    assert "Recording took 1.2 to 1.2 s." in caption
    lines = [line for line in written_cells(tmp_path) if line["not_measured"]]
    assert len(lines) == 10 and {line["not_measured"] for line in lines} == {REASON}
    assert {(line["text"], line["value"]) for line in lines if line["quantity"] == "over_floor"} == {("--", "")}
    values = load_table(tmp_path / "data.json", "mini").evaluated
    assert len(values) == 5 * len(rows) - 3 * len(lacking), "times that are not there are no values"


def test_a_file_in_which_nothing_fits_is_a_table_all_the_same(tmp_path: Path) -> None:
    rows = [not_measured(row) for row in runtime_rows(blocks=BLOCKS[:1])]
    tex = table(tmp_path, SMOL, write_runtime(tmp_path / "runtime_smol.csv", rows))
    assert tex.count("-- / --") == len(rows) and "prototype at 1k with batch 1, prototype at 2k" in caption_of(tex)


def test_the_floor_of_a_tiny_model_may_round_to_nothing(tmp_path: Path) -> None:
    rows = runtime_rows()
    for row in rows:
        row |= {"step_bytes": "4000", "floor_ms": "0.000", "per_step_ms": "1.000", "per_step_low_ms": "1.000"}
        row["per_step_high_ms"] = "1.000"
    table(tmp_path, SMOL, write_runtime(tmp_path / "a.csv", rows))
    assert {line["value"] for line in written_cells(tmp_path) if line["quantity"] == "over_floor"} == {"5425.000000"}


def test_a_ratio_that_rounds_up_twice_is_printed_as_it_is_read_back(tmp_path: Path) -> None:
    """83.75 ms over 10.00000023 ms is 8.3749998, which six decimals make 8.375000."""
    rows = runtime_rows(step_bytes="0", bandwidth_gb_s="21.700")
    for row in rows:
        row |= {"step_bytes": "217000005", "floor_ms": "10.000", "end_to_end_ms": "9000.000"}
        row |= {f"per_step_{name}ms": "83.750" for name in ("", "low_", "high_")}
    table(tmp_path, SMOL, write_runtime(tmp_path / "a.csv", rows))
    ratios = {(line["text"], line["value"]) for line in written_cells(tmp_path) if line["quantity"] == "over_floor"}
    assert ratios == {("8.38", "8.375000")}


def test_latencies_of_other_studies_and_backbones_are_refused(tmp_path: Path) -> None:
    path = write_runtime(tmp_path / "a.csv", runtime_rows())
    for changes, message in (
        ({"study": "paper"}, f"{path}: is of study 'mini', table runtime_smol of 'paper'; give its own"),
        ({"label": "runtime_1b"}, f"{path}: is of backbone 'smol', table runtime_1b of '1b'; give its own"),
    ):
        assert refusal(tmp_path, replace(SMOL, **changes), path) == message
    message = "table runtime_smol: shows one file, --results has 2 (a.csv, a.csv); give one"
    assert refusal(tmp_path, SMOL, path, path) == message
    message = refusal(tmp_path, replace(SMOL, label="runtime_}\\input{x"), path)
    assert message.startswith("table 'runtime_}\\\\input{x' is unknown; known are natural_main, ")
    assert message.endswith(
        "training_cost_64k, residual_estimators, deployable, fidelity, fidelity_answers, runtime_<backbone>"
    )


# ---- training --------------------------------------------------------------------------------------------------------


ONE_B = replace(SMALL, name="1b", study="paper", model_id=LLAMA, source="hub", dtype="bfloat16", context=131072)
PAPERS = replace(TRAINED, backbone=ONE_B, length="64k", steps=200_000, eval_every=100_000)
CPU = {"device": "cpu", "hardware": "CPU, 4 threads", "processes": 1}
GPU = {"device": "cuda:0", "hardware": "NVIDIA H200", "processes": 8}
TRAINING_SMOL = no_results(TRAINING)


def log_rows(spec: TrainSpec, seconds: float) -> list[Row]:
    """Two layers on two budgets at every evaluation, the time in proportion to the steps."""
    steps = [*range(0, spec.steps, spec.eval_every), spec.steps]
    label = spec.variants[0].label
    return [
        {
            "recipe": spec.name, "variant": label, "seed": str(spec.seed), "step": str(step),
            "seconds": f"{2 + (seconds - 2) * step / spec.steps:.1f}", "corpus": "wiki", "k": k, "layer": layer,
            "e_topk": "0.3", "e_sub": "0.2", "e_nosub": "0.25", "kl": "1.0", "log_z_error": "nan",
        }
        for step in steps
        for k in ("1", "21")
        for layer in ("all", "0")
    ]  # fmt: skip


def trained(
    folder: Path,
    spec: TrainSpec = TRAINED,
    seconds: float = 122.1,
    ran_on: dict[str, Any] = CPU,
) -> list[Path]:
    """Maps and log as the train stage leaves them, and a record of what it `ran_on`."""
    stem = f"{spec.backbone.name}_{spec.length}"
    path, log = folder / f"{stem}.safetensors", folder / f"training_{stem}.csv"
    Learner(spec, spec.variants[0], HeadShape(2, 4, 2, 6), torch.device("cpu")).maps.save(path)
    rows = log_rows(spec, seconds)
    log.write_text(csv_text(list(rows[0]), rows))
    told = {"stage": "train", "spec": json.loads(to_json(spec))}
    return [recorded(path, **told, **ran_on), recorded(log, **told)]


def test_a_row_says_what_the_training_took(tmp_path: Path) -> None:
    spec = replace(TRAINED, sequences_per_step=2, replay=ReplaySpec(pool=10, reuse=30))
    files = trained(tmp_path, spec, ran_on=CPU)
    tex = table(tmp_path, replace(TRAINING_SMOL, backbone_titles={"smol": "SmolLM"}), *files)
    assert printed_fields(tex) == [["SmolLM", "300 steps on CPU, 4 threads", "600", "20", "2.0 min"]]
    assert open_braces(tex) == 0 and r"\label{tab:training_cost_64k}" in tex
    caption = caption_of(tex)
    assert "on 2k-token sequences, once and for all prompts" in caption and "64k" not in caption
    assert "Study mini, backbone org/Small-LM." in caption and "A dash" not in caption
    assert "The paper does not evaluate org/Small-LM" in caption
    assert "kept: there is a new one every 30 steps, and the newest 10 are in use." in caption
    assert tex.startswith(f"% Table {TRAINING} of study mini; generated, changes are overwritten.\n")
    assert f"maps {sha256_of(files[0])[:12]}, 300 steps in 122.1 s" in tex


@pytest.mark.parametrize(("steps", "pool", "reuse", "sequences"), [(300, 1, 1, 1), (301, 10, 30, 2), (7, 3, 2, 4)])
def test_teacher_passes_are_those_that_the_steps_want(
    tmp_path: Path, steps: int, pool: int, reuse: int, sequences: int
) -> None:
    wanted = {i for step in range(steps) for i in range(max(0, step // reuse - pool + 1), step // reuse + 1)}
    spec = replace(TRAINED, steps=steps, replay=ReplaySpec(pool, reuse), sequences_per_step=sequences)
    (fields,) = printed_fields(table(tmp_path, TRAINING_SMOL, *trained(tmp_path, spec)))
    assert fields[2:4] == [str(steps * sequences), str(len(wanted) * sequences)]


def test_the_papers_training_stands_below_that_of_its_model(tmp_path: Path) -> None:
    tex = table(tmp_path, of_1b(TRAINING), *trained(tmp_path, PAPERS, 612_345.6, GPU))
    assert printed_fields(tex) == [
        ["Llama-3.2-1B-Instruct", r"200k steps on 8$\times$H200", "200k", "200k", "170.1 h"],
        ["in the paper", r"200k steps on 8$\times$H200", "--", "--", "19 h"],
    ]
    caption = caption_of(tex)
    assert "on 64k-token sequences" in caption and "A dash marks what the paper does not say; nor does" in caption
    assert "does not evaluate" not in caption and row_widths(tex) == {5}


@pytest.mark.parametrize(
    ("ran_on", "words"),
    [
        ({}, "300 steps on unknown hardware"),
        (CPU | {"processes": 2}, r"300 steps on 2$\times$CPU, 4 threads"),
        (CPU | {"hardware": "Some CPU, @ 2 GHz, 4 threads"}, "300 steps on CPU, 4 threads"),
        (GPU | {"processes": 1}, r"300 steps on 1$\times$H200"),
        (GPU | {"hardware": "A & B_1"}, r"300 steps on 8$\times$A \& B\_1"),
    ],
)
def test_hardware_is_that_of_the_record(tmp_path: Path, ran_on: dict[str, Any], words: str) -> None:
    files = trained(tmp_path, ran_on=ran_on)
    (fields,) = printed_fields(table(tmp_path, TRAINING_SMOL, *files))
    assert fields[1] == words
    line = written_cells(tmp_path)[0]
    assert (line["hardware"] == "", line["processes"]) == (not ran_on, str(ran_on["processes"]) if ran_on else "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2, "2 s"), (119.4, "119 s"), (120, "2.0 min"), (7199, "120.0 min"), (7200, "2.0 h"), (68400, "19.0 h")],
)
def test_times_have_a_unit_that_fits(tmp_path: Path, seconds: float, text: str) -> None:
    (fields,) = printed_fields(table(tmp_path, TRAINING_SMOL, *trained(tmp_path, seconds=seconds)))
    assert fields[-1] == text
    (line,) = (line for line in written_cells(tmp_path) if line["quantity"] == "wall_clock_h")
    assert (line["text"], line["value"]) == (text, f"{seconds / 3600:.6f}")


def test_what_a_reader_must_know_of_a_training_is_said(tmp_path: Path) -> None:
    random_weights = replace(SMALL, source="random")
    spec = replace(TRAINED, backbone=random_weights, curriculum=CurriculumSpec("512", 0.25))
    caption = caption_of(table(tmp_path, TRAINING_SMOL, *trained(tmp_path, spec)))
    assert "Random weights (org/Small-LM): time hardly depends on the values." in caption
    assert r"The first 25\% of the steps use 512 tokens of each sequence." in caption
    assert "added up over interruptions, and neither loading nor measuring on held-out text" in caption
    assert "is kept" not in caption


def test_backbones_stand_in_the_order_of_the_spec_whatever_that_of_the_files(tmp_path: Path) -> None:
    big = replace(TRAINED, backbone=replace(SMALL, name="big", model_id="org/Big-LM"), replay=ReplaySpec(2, 3))
    files = [*trained(tmp_path), *trained(tmp_path, big)]
    wanted = replace(TRAINING_SMOL, backbones=("big", "smol"))
    tex = table(tmp_path, wanted, *files)
    assert [row[0] for row in printed_fields(tex)] == ["Big-LM", "Small-LM"]
    assert "the newest 2 are in use (Big-LM)." in caption_of(tex)
    assert tex == table(tmp_path, wanted, *reversed(files))


def test_every_number_of_a_training_is_a_line_with_its_origin(tmp_path: Path) -> None:
    files = trained(tmp_path)
    table(tmp_path, TRAINING_SMOL, *files)
    lines = written_cells(tmp_path)
    assert list(lines[0]) == [*training_cost_table.COLUMNS]
    values = [(line["quantity"], line["text"], line["value"]) for line in lines]
    assert values == [
        ("steps", "300", "300"), ("sequences", "300", "300"), ("teacher_passes", "300", "300"),
        ("wall_clock_h", "2.0 min", "0.033917"),
    ]  # fmt: skip
    common = {
        "table": TRAINING, "backbone": "smol", "length": "2k", "maps": "2k", "bold": "0", "steps": "300",
        "processes": "1", "source": files[1].name, "study": "mini", "model_id": "org/Small-LM", "revision": "r1",
        "weights": "pretrained", "phi_sha": sha256_of(files[0]),
    }  # fmt: skip
    assert all({name: line[name] for name in common} == common for line in lines)


# ---- trainings that are refused --------------------------------------------------------------------------------------


def test_maps_without_their_log_and_those_that_are_not_shown_are_refused(tmp_path: Path) -> None:
    files = trained(tmp_path)
    message = f"table {TRAINING}: no log of the training of {files[0]}; pass it to --results"
    _, other = trained(tmp_path / "other", replace(TRAINED, seed=1))
    latencies = recorded(write_runtime(tmp_path / "a.csv", runtime_rows()), stage="runtime")
    for given in (files[:1], [files[0], other], [files[0], latencies]):
        assert refusal(tmp_path, TRAINING_SMOL, *given) == message
    message = (
        f"{files[0]}: is of backbone smol of study 'mini', table {TRAINING} shows big of 'mini'; "
        "take it out of --results"
    )
    assert refusal(tmp_path, replace(TRAINING_SMOL, backbones=("big",)), *files) == message
    message = f"table {TRAINING}: no file is of backbone big; pass its maps to --results"
    assert refusal(tmp_path, replace(TRAINING_SMOL, backbones=("smol", "big")), *files) == message


# ---- LaTeX -----------------------------------------------------------------------------------------------------------


def hostile_tables(folder: Path) -> list[str]:
    facts = {"model_id": HOSTILE, "revision": HOSTILE, "device": f"{HOSTILE}\n\\end{{table}}", "dtype": HOSTILE}
    path = write_runtime(folder / "hostile.csv", runtime_rows(study=HOSTILE, **facts))
    latencies = table(folder, replace(SMOL, study=HOSTILE), path)
    spec = replace(TRAINED, backbone=replace(SMALL, study=HOSTILE, model_id="org/a_b", revision="r_1"))
    files = trained(folder, spec, ran_on=GPU | {"hardware": HOSTILE})
    titles = {"smol": f"{HOSTILE}\n\\end{{table}}"}
    return [latencies, table(folder, replace(TRAINING_SMOL, study=HOSTILE, backbone_titles=titles), *files)]


def test_hostile_names_print_and_do_not_run(tmp_path: Path) -> None:
    for tex in hostile_tables(tmp_path):
        active = without_comments(tex)
        assert r"\input" not in active and active.count(r"\end{table}") == 1
        assert open_braces(active) == 0 and "<" not in active


@needs(LATEX)
def test_latex_accepts_the_tables_whatever_the_names_and_they_fit_the_page(tmp_path: Path) -> None:
    small = write_runtime(tmp_path / "small.csv", runtime_rows(scale=4))
    rows = [row | {"step_bytes": "36060000000", "floor_ms": "8.386"} for row in runtime_1b(weights="random")]
    large = write_runtime(tmp_path / "large.csv", rows)
    titled = replace(TRAINING_SMOL, backbone_titles={"smol": "SmolLM2-135M-Instruct"})
    sound = [
        table(tmp_path, SMOL, small),
        table(tmp_path, OF_1B, large),
        table(tmp_path, titled, *trained(tmp_path)),
        table(
            tmp_path,
            of_1b(TRAINING),
            *trained(tmp_path, PAPERS, 612_345.6, GPU | {"hardware": "NVIDIA A100-SXM4-80GB"}),
        ),
    ]
    assert "Overfull" not in pdflatex(tmp_path, "\\clearpage\n".join(sound))
    assert "Output written" in pdflatex(tmp_path, "\\clearpage\n".join(hostile_tables(tmp_path)))
