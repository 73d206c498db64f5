"""Titles of corpora, benchmarks, methods and variants of the feature maps: text with mathematics between dollars."""

from __future__ import annotations

import re

from residual_mass.methods import METHODS
from residual_mass.methods.registry import PHI_TITLE
from residual_mass.spec.settings import length_and_variant

TEXT_TITLES = {
    "ruler": "RULER", "babilong": "BABILong", "longbench": "LongBench", "wiki": "Wikipedia", "wikitext": "WikiText",
    "books": "Books", "code": "Code", "cwe": "CWE", "needles": "Needles",
}  # fmt: skip
METHOD_TITLES = {method.name: method.title for method in METHODS}
OURS = "Ours"
"""Title of the feature maps of a study's own recipe."""
OWN_ROW = r"$^{*}$"
"""Marks the title of a row that the paper's table lacks."""
VARIANT_TITLES = {
    "hedgehog_map": "Hedgehog-style map",
    "lolcats_loss": "LoLCATs-style loss",
    "kl_only": "KL only",
    "aux_only": "Auxiliary only",
    "residual_loss": "Residual objective",
}


def method_title(method: str) -> str:
    """Returns a method's title, or its name if it has no title."""
    return METHOD_TITLES.get(method, method)


def title_parts(method: str) -> tuple[str, str]:
    """Returns the parts of a method's title for its selector and residual; the second is empty without a residual."""
    selector, _, residual = method_title(method).replace("{+}", "$+$").partition("+")
    return selector, residual


def text_title(name: str) -> str:
    """Returns the title of a corpus or a benchmark, or its name if it has no title."""
    return TEXT_TITLES.get(name, name)


def trained_at_title(maps: str) -> str:
    """Returns a title of feature maps by the length that they were trained at."""
    _, variant = length_and_variant(maps)
    return f"{PHI_TITLE} ({maps})" if variant else f"{PHI_TITLE} ({maps}-trained)"


def variant_title(maps: str, ours: str = OURS) -> str:
    """Returns a title of feature maps by their variant, or their label where the variant has none."""
    _, variant = length_and_variant(maps)
    width = re.fullmatch(r"dphi_(\d+)", variant)
    if width:
        return rf"$d_\phi{{=}}{width[1]}$"
    return VARIANT_TITLES.get(variant, maps) if variant else ours
