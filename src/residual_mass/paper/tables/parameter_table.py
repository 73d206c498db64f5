"""The table of parameter counts: how large the feature maps of a backbone are, per head and in all.

Counts are read from the headers of the maps' files; the weights stay on disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residual_mass.core.settings import MapSpec, maps_label
from residual_mass.files import csv_text, write_text
from residual_mass.paper import published
from residual_mass.paper.latex import Latex, escape, render
from residual_mass.paper.published import MODELS
from residual_mass.paper.readers.maps_file import OWN_RECIPE, REMEDY, Shapes, load_maps_file
from residual_mass.paper.tables.captions import OF_THE_PAPER, header_of_published, header_of_study
from residual_mass.paper.titles import VARIANT_TITLES, backbone_title
from residual_mass.study.specs import TableSpec, parse_spec

LABEL = "phi_param_count"
QUANTITIES = ("params_per_head", "q_heads", "kv_heads", "phi_q_total_m", "phi_k_total_m", "total_m")
"""What a row prints, from left to right; `_m` is in millions."""
CELL_COLUMNS = "table backbone maps kind d_emb d_phi quantity text bold value source study model_id revision".split()
PAPER_WIDTH = 512
"""Inner width of the paper's maps."""


@dataclass(frozen=True)
class Counted:
    """One file of feature maps: what they are of, and the parameters of one head's map.

    Attributes:
        maps: their label, such as 2k or 1k-dphi_32.
        query_heads, kv_heads: of all layers together.
    """

    path: Path
    study: str
    backbone: str
    model_id: str
    revision: str
    maps: str
    map: MapSpec
    per_head: int
    query_heads: int
    kv_heads: int

    @property
    def values(self) -> dict[str, int]:
        """Parameters and heads, by QUANTITIES."""
        totals = self.per_head * self.query_heads, self.per_head * self.kv_heads
        counts = (self.per_head, self.query_heads, self.kv_heads, *totals, sum(totals))
        return dict(zip(QUANTITIES, counts, strict=True))


@dataclass(frozen=True)
class Line:
    """One printed row: backbone and feature dimension, and a text for each of QUANTITIES."""

    backbone: str
    d_phi: int
    texts: tuple[str, ...]


def run(spec: TableSpec, results: list[Path], template: Path, out: Path, cells: Path) -> None:
    """Writes the table from the files of feature maps, one row each: backbones in the order of the spec, and the widths
    of one backbone in rising order. To `cells` goes one CSV line per printed value.

    Raises:
        ValueError: a backbone's file is missing, or a file is damaged, of another study or shown twice; names the file.
    """
    rows = _in_order(spec, [load_counts(path) for path in results])
    table = render(
        template,
        header=list(_header(spec, rows)),
        notes=list(_notes(spec, rows)),
        lines=[Line(_title(spec, row), row.map.d_phi, tuple(_texts(row.values).values())) for row in rows],
    )
    write_text(cells, csv_text(CELL_COLUMNS, (line for row in rows for line in _cell_lines(row))))
    write_text(out, table)


def render_published(template: Path) -> str:
    """The table with the paper's values."""
    rows = published.rows_of(LABEL)
    note = "Every count per head is larger by one than the weights, biases and gate of the paper's equations add up to."
    return render(
        template,
        header=[header_of_published(LABEL)],
        notes=[OF_THE_PAPER, note],
        lines=[
            Line(published.model_title(row["backbone"]), int(row["d_phi"]), tuple(_published_texts(row)))
            for row in rows
        ],
    )


def load_counts(path: Path) -> Counted:
    """Reads the header of one file of feature maps, and no weights.

    Raises:
        ValueError: the file is missing or damaged, holds something else, or its tensors are not those of its header.
    """

    def counted(facts: Any, shapes: Shapes) -> Counted:
        shape, training = facts["shape"], facts["training"]
        recipe = training["recipe"]
        backbone, (variant,) = recipe["backbone"], recipe["variants"]
        label = variant["label"]
        return Counted(
            path=path,
            study=backbone["study"],
            backbone=backbone["name"],
            model_id=training["model_id"],
            revision=training["revision"],
            maps=maps_label(recipe["length"], "" if label == OWN_RECIPE else label),
            map=parse_spec(MapSpec, json.dumps(facts["map"])),
            per_head=_per_head(shapes, shape),
            query_heads=shape["layers"] * shape["query_heads"],
            kv_heads=shape["layers"] * shape["kv_heads"],
        )

    return load_maps_file(path, "what the maps are", counted)


def _per_head(shapes: Shapes, shape: dict[str, int]) -> int:
    """Parameters of one head's map, which all heads of all layers must agree on."""
    heads = {
        f"{side}.{layer}": shape[f"{name}_heads"]
        for side, name in (("query", "query"), ("key", "kv"))
        for layer in range(shape["layers"])
    }
    counts = dict.fromkeys(heads, 0)
    for name, sizes in shapes.items():
        stack = name.rpartition(".")[0]
        if stack not in heads or not sizes or sizes[0] != heads[stack]:
            raise ValueError(f"tensor {name} of shape {sizes} does not fit {shape}")
        counts[stack] += math.prod(sizes[1:])
    found = set(counts.values())
    if len(found) != 1 or 0 in found:
        raise ValueError(
            f"heads have {' and '.join(map(str, sorted(found))) or 'no'} parameters, not one number of them"
        )
    return found.pop()


def _in_order(spec: TableSpec, files: Iterable[Counted]) -> list[Counted]:
    shown: dict[tuple[str, str], Counted] = {}
    for file in files:
        if file.study != spec.study:
            raise ValueError(f"{file.path}: is of study {file.study!r}, table {LABEL} is of {spec.study!r}; {REMEDY}")
        if file.backbone not in spec.backbones:
            raise ValueError(
                f"{file.path}: is of backbone {file.backbone}, table {LABEL} shows {', '.join(spec.backbones)}; "
                "take it out of --results"
            )
        place = file.backbone, file.maps
        if place in shown:
            raise ValueError(f"{file.path}: a second file for {' '.join(place)}, beside {shown[place].path}; give one")
        shown[place] = file
    for backbone in spec.backbones:
        if backbone not in {file.backbone for file in shown.values()}:
            raise ValueError(f"table {LABEL}: no file is of backbone {backbone}; pass its maps to --results")
    return sorted(shown.values(), key=lambda file: (spec.backbones.index(file.backbone), file.map.d_phi))


def _texts(values: dict[str, int]) -> dict[str, str]:
    return {name: _millions(value) if name.endswith("_m") else f"{value:,}" for name, value in values.items()}


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}M"


def _published_texts(row: dict[str, str]) -> Iterator[str]:
    """The values as they are printed: totals are rounded already."""
    for name in QUANTITIES:
        yield f"{row[name]}M" if name.endswith("_m") else f"{int(row[name]):,}"


def _title(spec: TableSpec, row: Counted) -> str:
    return backbone_title(spec, row.backbone, row.model_id)


def _header(spec: TableSpec, rows: Iterable[Counted]) -> Iterator[str]:
    yield header_of_study(spec)
    for row in rows:
        width = f", d_emb {row.map.d_emb}" if row.map.kind == "rezero" else ""
        yield f"{row.path.name}: {row.model_id} at {row.revision}, {row.map.kind}{width}, d_phi {row.map.d_phi}"


def _notes(spec: TableSpec, rows: Sequence[Counted]) -> Iterator[str]:
    yield f"Study {spec.study}, backbone {', '.join(dict.fromkeys(row.model_id for row in rows))}."
    for backbone in spec.backbones:
        own = [row for row in rows if row.backbone == backbone]
        of = f" of {_title(spec, own[0])}" if len(spec.backbones) > 1 else ""
        yield f"Feature maps{of}: {', '.join(row.maps for row in own)}."
    yield Latex(f"Architecture: {'; '.join(_architectures(rows))}.")
    yield "Per head the paper counts one parameter more than its equations have; the maps here are as in the equations."
    if known := [each for row in rows if (each := _beside_the_paper(spec, row))]:
        yield f"Per head in the paper and here: {'; '.join(known)}."


def _architectures(rows: Sequence[Counted]) -> Iterator[Latex]:
    """Each once, with the maps that have it where there are several."""
    holders: dict[Latex, list[str]] = {}
    for row in rows:
        holders.setdefault(_architecture(row), []).append(f"{row.backbone} {row.maps}")
    for architecture, of in holders.items():
        yield architecture if len(holders) == 1 else Latex(f"{architecture} ({escape(', '.join(of))})")


def _architecture(row: Counted) -> Latex:
    if row.map.kind == "hedgehog":
        return VARIANT_TITLES["hedgehog_map"]
    return Latex(rf"one ReZero block of inner width $d_{{\mathrm{{emb}}}}{{=}}{row.map.d_emb}$")


def _beside_the_paper(spec: TableSpec, row: Counted) -> str | None:
    """Both counts, where the paper has maps of this shape."""
    for fact in published.rows_of(LABEL):
        same = (row.model_id, row.map.d_phi, row.query_heads, row.kv_heads) == (
            MODELS[fact["backbone"]], int(fact["d_phi"]), int(fact["q_heads"]), int(fact["kv_heads"]),
        )  # fmt: skip
        if same and (row.map.kind, row.map.d_emb) == ("rezero", PAPER_WIDTH):
            return f"{_title(spec, row)} / {row.map.d_phi} {int(fact['params_per_head']):,} and {row.per_head:,}"
    return None


def _cell_lines(row: Counted) -> Iterator[dict[str, Any]]:
    origin = {
        "table": LABEL, "backbone": row.backbone, "maps": row.maps, "kind": row.map.kind, "d_phi": row.map.d_phi,
        "d_emb": row.map.d_emb if row.map.kind == "rezero" else "", "bold": "0", "source": row.path.name,
        "study": row.study, "model_id": row.model_id, "revision": row.revision,
    }  # fmt: skip
    for name, text in _texts(row.values).items():
        yield origin | {"quantity": name.removesuffix("_m"), "text": text, "value": row.values[name]}
