"""The table of parameter counts, read back from its LaTeX: counts against real maps, order, notes, what is refused."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from printed import caption_of, open_braces, pdflatex, printed_fields, row_widths, without_comments
from rendered import refusal, table, written_cells
from safetensors.torch import save_file
from sample_results import TEMPLATES, table_spec
from sample_runtime import TRAINED
from tests.needs import LATEX, needs
from tests.records import recorded

from residual_mass.backbones.phi_maps import HeadShape, PhiMaps
from residual_mass.core.feature_maps import ReZeroMap
from residual_mass.core.settings import MapSpec
from residual_mass.paper import published
from residual_mass.paper.readers.maps_file import load_maps_file
from residual_mass.paper.tables.parameter_table import COLUMNS, QUANTITIES
from residual_mass.paper.tables.render import make_published
from residual_mass.study.sections.training import ObjectiveSpec
from residual_mass.study.specs import BackboneSpec, TableSpec, VariantSpec

LABEL = "phi_param_count"
TEMPLATE = TEMPLATES / f"{LABEL}.tex.j2"
SHAPE = HeadShape(layers=3, query_heads=6, kv_heads=2, head_dim=5)
HEAD_DIMS = {"1b": 64, "3b": 128}


def phi_file(
    folder: Path,
    map_spec: MapSpec | None = None,
    backbone: str = "smol",
    length: str = "2k",
    variant: str = "ours",
    shape: HeadShape = SHAPE,
    model_id: str = "org/Small-LM",
    study: str = "mini",
    name: str = "",
) -> Path:
    """Maps as the train stage writes them."""
    owner = BackboneSpec(study, model_id, "r1", "assets", "float32", "bytes", 8192, False, name=backbone)
    variants = (VariantSpec(variant, map_spec or MapSpec(d_emb=7, d_phi=4), ObjectiveSpec()),)
    recipe = asdict(replace(TRAINED, backbone=owner, length=length, variants=variants))
    facts = {"model_id": model_id, "revision": "r1", "length": 2048, "recipe": recipe}
    suffix = "" if variant == "ours" else f"-{variant}"
    path = folder / (name or f"{backbone}_{length}{suffix}.safetensors")
    PhiMaps(shape, map_spec or MapSpec(d_emb=7, d_phi=4), facts).save(path)
    return recorded(path)


def spec(**changes: Any) -> TableSpec:
    return table_spec(LABEL, **{"lengths": (), "budgets": (), "benchmarks": ()} | changes)


def slow_counts(path: Path) -> dict[str, int]:
    """What the table should say, weight by weight."""
    maps = PhiMaps.load(path)
    totals, sizes = {}, set()
    for side, layers in (("q", maps.query), ("k", maps.key)):
        totals[side] = 0
        for layer in layers:
            one = 0
            for parameter in layer.parameters():
                one += len(parameter[0].flatten().tolist())
                for head in parameter:
                    totals[side] += len(head.flatten().tolist())
            sizes.add(one)
    (per_head,) = sizes
    heads = [maps.shape.layers * maps.shape.query_heads, maps.shape.layers * maps.shape.kv_heads]
    return dict(zip(QUANTITIES, (per_head, *heads, totals["q"], totals["k"], sum(totals.values())), strict=True))


# ---- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "map_spec",
    [
        MapSpec(d_emb=1, d_phi=1), MapSpec(d_emb=7, d_phi=4), MapSpec(d_emb=64, d_phi=32), MapSpec(d_emb=3, d_phi=128),
        MapSpec(kind="hedgehog", d_phi=2), MapSpec(kind="hedgehog", d_phi=64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [SHAPE, HeadShape(1, 1, 1, 8), HeadShape(2, 4, 4, 3)])
def test_counts_are_those_of_the_maps(tmp_path: Path, map_spec: MapSpec, shape: HeadShape) -> None:
    path = phi_file(tmp_path, map_spec, shape=shape)
    counts = slow_counts(path)
    (line,) = printed_fields(table(tmp_path, spec(), path))
    assert line[0] == f"Small-LM / {map_spec.d_phi}"
    texts = [re.sub(r"\B(?=(\d{3})+$)", ",", str(counts[name])) for name in QUANTITIES[:3]]
    texts += [f"{counts[name] / 1_000_000:.1f}M" for name in QUANTITIES[3:]]
    assert line[1:] == texts


@pytest.mark.parametrize("row", published.rows_of(LABEL), ids=lambda row: f"{row['backbone']}-{row['d_phi']}")
def test_the_papers_counts_are_larger_by_one_than_its_equations(row: dict[str, str]) -> None:
    maps = ReZeroMap(heads=1, d_in=HEAD_DIMS[row["backbone"]], d_emb=512, d_phi=int(row["d_phi"]))
    assert sum(parameter.numel() for parameter in maps.parameters()) + 1 == int(row["params_per_head"])


def test_weights_are_not_read(tmp_path: Path) -> None:
    path = phi_file(tmp_path)
    content = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    content[start:] = b"\xff" * (len(content) - start)
    counted = load_maps_file(path)
    path.write_bytes(content)
    assert load_maps_file(path) == counted


# ---- rows, notes and cells -------------------------------------------------------------------------------------------


def of_widths(folder: Path, **facts: Any) -> list[Path]:
    """The files of the mini study: main maps and two other widths."""
    widths = (("2k", "ours", 64), ("1k", "dphi_32", 32), ("1k", "dphi_128", 128))
    return [
        phi_file(folder, MapSpec(d_emb=7, d_phi=d_phi), length=at, variant=name, **facts) for at, name, d_phi in widths
    ]


def test_rows_are_in_the_order_of_the_spec_and_of_the_width_whatever_that_of_the_files(tmp_path: Path) -> None:
    files = [*of_widths(tmp_path), phi_file(tmp_path, MapSpec(d_emb=7, d_phi=64), "big", model_id="org/Big-LM")]
    wanted = spec(backbones=("big", "smol"), backbone_titles={"smol": "SmolLM2"})
    tex = table(tmp_path, wanted, *files)
    rows = [line[0] for line in printed_fields(tex)]
    assert rows == ["Big-LM / 64", "SmolLM2 / 32", "SmolLM2 / 64", "SmolLM2 / 128"]
    assert row_widths(tex) == {7} and open_braces(tex) == 0
    assert tex == table(tmp_path, wanted, *reversed(files))
    caption = caption_of(tex)
    assert "Study mini, backbone org/Big-LM, org/Small-LM." in caption
    assert r"Feature maps of Big-LM: 2k. Feature maps of SmolLM2: 1k-dphi\_32, 2k, 1k-dphi\_128." in caption
    assert "% smol_1k-dphi_32.safetensors: org/Small-LM at r1, rezero, d_emb 7, d_phi 32" in tex.splitlines()


def test_the_caption_says_what_is_counted(tmp_path: Path) -> None:
    caption = caption_of(table(tmp_path, spec(), *of_widths(tmp_path)))
    assert r"Architecture: one ReZero block of inner width $d_{\mathrm{emb}}{=}7$." in caption
    assert "Per head the paper counts one parameter more than its equations have" in caption
    assert "in the paper and here" not in caption
    hedgehog = phi_file(tmp_path, MapSpec(kind="hedgehog", d_phi=8), length="1k", variant="hedgehog_map")
    caption = caption_of(table(tmp_path, spec(), phi_file(tmp_path), hedgehog))
    blocks = (
        r"one ReZero block of inner width $d_{\mathrm{emb}}{=}7$ (smol 2k); Hedgehog-style map (smol 1k-hedgehog\_map)"
    )
    assert f"Architecture: {blocks}." in caption


def header_only(path: Path, shape: HeadShape, map_spec: MapSpec) -> Path:
    """The file of maps too large for a test, of which the weights are a hole."""
    sizes = {"stem": (shape.head_dim, map_spec.d_emb), "stem_bias": (1, map_spec.d_emb)}
    for name in ("up", "down"):
        sizes |= {name: (map_spec.d_emb, map_spec.d_emb), f"{name}_bias": (1, map_spec.d_emb)}
    sizes |= {"out": (map_spec.d_emb, map_spec.d_phi), "out_bias": (1, map_spec.d_phi), "alpha": (1, 1)}
    small = phi_file(path.parent, MapSpec(d_emb=1, d_phi=map_spec.d_phi), "1b", name="small.safetensors")
    content = small.read_bytes()
    metadata = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])["__metadata__"]
    facts = json.loads(metadata["residual_mass_phi"])
    facts["shape"], facts["map"]["d_emb"] = shape.__dict__, map_spec.d_emb
    facts["training"]["recipe"]["backbone"]["model_id"] = "meta-llama/Llama-3.2-1B-Instruct"
    header: dict[str, Any] = {"__metadata__": {"residual_mass_phi": json.dumps(facts)}}
    end = 0
    for side, heads in (("query", shape.query_heads), ("key", shape.kv_heads)):
        for layer in range(shape.layers):
            for name, (rows, columns) in sizes.items():
                start, end = end, end + 4 * heads * rows * columns
                tensor = {"dtype": "F32", "shape": [heads, rows, columns], "data_offsets": [start, end]}
                header[f"{side}.{layer}.{name}"] = tensor
    text = json.dumps(header).encode()
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
    return recorded(path)


@pytest.mark.parametrize(
    ("d_emb", "d_phi", "named"),
    [(512, 64, True), pytest.param(512, 48, False, marks=pytest.mark.slow), (256, 64, False)],
)
def test_where_the_paper_has_the_shape_both_counts_are_named(
    tmp_path: Path, d_emb: int, d_phi: int, named: bool
) -> None:
    path = header_only(tmp_path / "phi.safetensors", HeadShape(16, 32, 8, 64), MapSpec(d_emb=d_emb, d_phi=d_phi))
    tex = table(tmp_path, spec(backbones=("1b",)), path)
    both = "Per head in the paper and here: Llama-3.2-1B-Instruct / 64 591,426 and 591,425."
    assert (both in caption_of(tex)) == ("in the paper and here" in caption_of(tex)) == named
    if named:
        assert printed_fields(tex) == [
            ["Llama-3.2-1B-Instruct / 64", "591,425", "512", "128", "302.8M", "75.7M", "378.5M"]
        ]


def test_every_printed_value_is_a_line_with_its_origin(tmp_path: Path) -> None:
    files = of_widths(tmp_path)
    fields = {line[0]: line[1:] for line in printed_fields(table(tmp_path, spec(), *files))}
    lines = written_cells(tmp_path)
    assert list(lines[0]) == [*COLUMNS] and len(lines) == 3 * 6
    assert len({(line["maps"], line["quantity"]) for line in lines}) == 18
    for line in lines:
        counts, file = slow_counts(tmp_path / line["source"]), load_maps_file(tmp_path / line["source"])
        names = [name.removesuffix("_m") for name in QUANTITIES]
        index = names.index(line["quantity"])
        assert int(line["value"]) == counts[QUANTITIES[index]]
        assert line["text"] == fields[f"Small-LM / {line['d_phi']}"][index]
        origin = {
            "table": LABEL, "backbone": "smol", "maps": file.label, "kind": "rezero", "d_emb": "7",
            "d_phi": str(file.map.d_phi), "bold": "0", "study": "mini", "model_id": "org/Small-LM", "revision": "r1",
        }  # fmt: skip
        assert origin.items() <= line.items()


HOSTILE = 'a_b & 50% $x$ #1 {y} ~ ^ \\input{z} <|> "q" [r]\n\\end{table}'


def hostile_table(folder: Path) -> str:
    study = HOSTILE.replace("\n", " ")  # what a configuration may say
    facts = {"backbone": HOSTILE, "study": study, "model_id": "org/a_b", "shape": SHAPE}
    files = [
        phi_file(folder, variant=HOSTILE, length=HOSTILE, name="a & b_c.safetensors", **facts),
        phi_file(folder, MapSpec(kind="hedgehog", d_phi=2), length="1k", name="b.safetensors", **facts),
    ]
    return table(folder, spec(backbones=(HOSTILE,), study=study), *files)


def test_hostile_names_print_and_do_not_run(tmp_path: Path) -> None:
    tex = hostile_table(tmp_path)
    active = without_comments(tex)
    assert r"\input" not in active and active.count(r"\end{table}") == 1
    assert open_braces(active) == 0 and row_widths(tex) == {7}


@needs(LATEX)
def test_latex_accepts_the_table_whatever_the_names_and_it_fits_the_page(tmp_path: Path) -> None:
    pdflatex(tmp_path, hostile_table(tmp_path))
    titles = {"smol": "SmolLM2-135M-Instruct"}
    tex = table(tmp_path, spec(backbone_titles=titles), *of_widths(tmp_path), phi_file(tmp_path, length="1k"))
    assert "Overfull" not in pdflatex(tmp_path, f"{tex}\n{make_published(LABEL).latex(TEMPLATE)}")


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_file_without_maps_or_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    message = refusal(tmp_path, spec(), recorded(path))
    assert message.startswith(f"{path}: not feature maps of this version (")
    assert message.endswith("; delete it and rerun the rule that makes it")
    maps = PhiMaps.load(path := phi_file(tmp_path))
    maps.training_facts["recipe"].pop("steps")
    maps.save(path)
    message = refusal(tmp_path, spec(), recorded(path))
    assert message.startswith(f"{path}: not feature maps of this version (") and "steps" in message


def test_other_studies_backbones_and_twins_are_refused(tmp_path: Path) -> None:
    path = phi_file(tmp_path, study="paper")
    message = refusal(tmp_path, spec(), path)
    assert (
        message
        == f"{path}: is of backbone smol of study 'paper', table {LABEL} shows smol of 'mini'; take it out of --results"
    )
    path = phi_file(tmp_path)
    message = refusal(tmp_path, spec(backbones=("big",)), path)
    assert (
        message
        == f"{path}: is of backbone smol of study 'mini', table {LABEL} shows big of 'mini'; take it out of --results"
    )
    message = refusal(tmp_path, spec(backbones=("smol", "big")), path)
    assert message == f"table {LABEL}: no file is of backbone big; pass its maps to --results"
    twin = phi_file(tmp_path, name="twin.safetensors")
    assert refusal(tmp_path, spec(), path, twin) == f"{twin}: a second file of smol 2k; give one"
