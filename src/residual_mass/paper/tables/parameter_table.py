"""The table of parameter counts: how large the feature maps of a backbone are, per head and in all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from residual_mass.paper import published
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.published import MODELS
from residual_mass.paper.readers.maps_file import MapsFile, check_shown, load_maps_file
from residual_mass.paper.table import Block, Cell, Entry, Grid, Place, Row, Table
from residual_mass.paper.tables import notes as note
from residual_mass.paper.tables.captions import OF_THE_PAPER, header_of_published, header_of_study
from residual_mass.paper.titles import VARIANT_TITLES, backbone_title
from residual_mass.study.specs import TableSpec

LABEL = "phi_param_count"
QUANTITIES = ("params_per_head", "q_heads", "kv_heads", "phi_q_total_m", "phi_k_total_m", "total_m")
"""What a row prints, from left to right; `_m` is in millions."""
COLUMNS = tuple("table backbone maps kind d_emb d_phi quantity text bold value source study model_id revision".split())
PAPER_WIDTH = 512
"""Inner width of the paper's maps."""
TITLES = (
    "Per head", "Query heads", "KV heads", Marked(r"$\phi_{\mathrm{q}}$ total"), Marked(r"$\phi_{\mathrm{k}}$ total"),
    "Total",
)  # fmt: skip


def make(spec: TableSpec, results: list[Path]) -> Table:
    """The table from the files of feature maps, one row each: backbones in the order of the spec, and the widths of one
    backbone in rising order.

    Raises:
        ValueError: a backbone's file is missing, or a file is of another study or shown twice; names the file.
    """
    files = [load_maps_file(path) for path in results]
    check_shown(spec, files)
    files.sort(key=lambda file: (spec.backbones.index(file.recipe.backbone.name), file.map.d_phi))
    rows = [_row(_title(spec, file), file.map.d_phi, _cells(file)) for file in files]
    return _table(spec.study, rows, header=_header(spec, files), notes=_notes(spec, files))


def make_published(_: str) -> Table:
    """The table with the paper's values, whose totals are rounded already."""
    rows = []
    for fact in published.rows_of(LABEL):
        texts = [f"{fact[name]}M" if name.endswith("_m") else f"{int(fact[name]):,}" for name in QUANTITIES]
        rows.append(Row((f"{published.model_title(fact['backbone'])} / {fact['d_phi']}",), tuple(map(Entry, texts))))
    note = "Every count per head is larger by one than the weights, biases and gate of the paper's equations add up to."
    return _table("published", rows, [header_of_published(LABEL)], [OF_THE_PAPER, note])


def _table(study: str, rows: Iterable[Row], header: Iterable[str], notes: Iterable[str]) -> Table:
    return Table(
        label=LABEL,
        study=study,
        grids=(Grid((Marked(r"Backbone / $d_\phi$"),), TITLES, (Block(tuple(rows)),)),),
        columns=COLUMNS,
        header=tuple(header),
        notes=tuple(notes),
    )


def _row(title: str, d_phi: object, cells: Iterable[Cell]) -> Row:
    return Row((f"{title} / {d_phi}",), tuple(Entry(cell.text, (cell,)) for cell in cells))


def _values(file: MapsFile) -> dict[str, int]:
    """Parameters and heads, by QUANTITIES."""
    totals = file.per_head * file.query_heads, file.per_head * file.kv_heads
    counts = (file.per_head, file.query_heads, file.kv_heads, *totals, sum(totals))
    return dict(zip(QUANTITIES, counts, strict=True))


def _cells(file: MapsFile) -> Iterator[Cell]:
    backbone = file.recipe.backbone
    row = {"kind": file.map.kind, "d_phi": str(file.map.d_phi), "study": backbone.study, "revision": backbone.revision}
    row["d_emb"] = str(file.map.d_emb) if file.map.kind == "rezero" else ""
    for quantity, value in _values(file).items():
        text = f"{value / 1e6:.1f}M" if quantity.endswith("_m") else f"{value:,}"
        name = quantity.removesuffix("_m")
        yield Cell(
            place=Place(backbone.name, maps=file.label, quantity=name),
            text=text,
            value=value,
            model_id=backbone.model_id,
            weights=backbone.weights,
            source=file.path.name,
            notes=tuple(_notes_on(file, value)),
            row=row | {"value": str(value)},
        )


def _notes_on(file: MapsFile, value: int) -> Iterator[str]:
    yield note.feature_maps(file.label)
    yield f"kind {file.map.kind}"
    if file.map.kind == "rezero":
        yield f"d emb {file.map.d_emb}"
    yield f"d phi {file.map.d_phi}"
    yield from note.exactly(str(value), file.path.name)


def _title(spec: TableSpec, file: MapsFile) -> str:
    return backbone_title(spec, file.recipe.backbone.name, file.recipe.backbone.model_id)


def _header(spec: TableSpec, files: Iterable[MapsFile]) -> Iterator[str]:
    yield header_of_study(spec)
    for file in files:
        backbone = file.recipe.backbone
        width = f", d_emb {file.map.d_emb}" if file.map.kind == "rezero" else ""
        shape = f"{file.map.kind}{width}, d_phi {file.map.d_phi}"
        yield f"{file.path.name}: {backbone.model_id} at {backbone.revision}, {shape}"


def _notes(spec: TableSpec, files: Sequence[MapsFile]) -> Iterator[str]:
    yield f"Study {spec.study}, backbone {', '.join(dict.fromkeys(file.recipe.backbone.model_id for file in files))}."
    for backbone in spec.backbones:
        own = [file for file in files if file.recipe.backbone.name == backbone]
        whose = f" of {_title(spec, own[0])}" if len(spec.backbones) > 1 else ""
        yield f"Feature maps{whose}: {', '.join(file.label for file in own)}."
    yield Marked(f"Architecture: {'; '.join(_architectures(files))}.")
    yield "Per head the paper counts one parameter more than its equations have; the maps here are as in the equations."
    if known := [each for file in files if (each := _beside_the_paper(spec, file))]:
        yield f"Per head in the paper and here: {'; '.join(known)}."


def _architectures(files: Sequence[MapsFile]) -> Iterator[Marked]:
    """Each once, with the maps that have it where there are several."""
    holders: dict[Marked, list[str]] = {}
    for file in files:
        holders.setdefault(_architecture(file), []).append(f"{file.recipe.backbone.name} {file.label}")
    for architecture, names in holders.items():
        yield architecture if len(holders) == 1 else Marked(f"{architecture} ({marked(', '.join(names))})")


def _architecture(file: MapsFile) -> Marked:
    if file.map.kind == "hedgehog":
        return VARIANT_TITLES["hedgehog_map"]
    return Marked(rf"one ReZero block of inner width $d_{{\mathrm{{emb}}}}{{=}}{file.map.d_emb}$")


def _beside_the_paper(spec: TableSpec, file: MapsFile) -> str | None:
    """Both counts, where the paper has maps of this shape."""
    for fact in published.rows_of(LABEL):
        same = _shape_of(fact) == (file.recipe.backbone.model_id, file.map.d_phi, file.query_heads, file.kv_heads)
        if same and (file.map.kind, file.map.d_emb) == ("rezero", PAPER_WIDTH):
            return f"{_title(spec, file)} / {file.map.d_phi} {int(fact['params_per_head']):,} and {file.per_head:,}"
    return None


def _shape_of(fact: Mapping[str, str]) -> tuple[str, int, int, int]:
    return MODELS[fact["backbone"]], int(fact["d_phi"]), int(fact["q_heads"]), int(fact["kv_heads"])
