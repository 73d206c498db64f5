"""All tables and figures of a study in one LaTeX document."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from residual_mass.files import read_text, write_text
from residual_mass.paper.figures.render import kind_of
from residual_mass.paper.latex import Latex, escape, render
from residual_mass.paper.tables.captions import model_warnings
from residual_mass.study.specs import DocumentSpec

CAPTIONS = {
    "entropy_gain": Latex(
        r"Gain of completion per query head, the error of Top-$K$ less that of Top-$K{+}\phi$, against the "
        r"mid-normalised entropy $H_{\mathrm{mid}}$ of the head's attention, for every budget. Above zero, adding the "
        r"residual estimate helps the head."
    ),
    "entropy_heatmap": Latex(
        r"Mid-normalised entropy $H_{\mathrm{mid}}$ of every query head (a), and against it the share of the "
        r"attention mass that the feature maps estimate for the tokens that are not read (b)."
    ),
    "fixedk_breakdown": Latex(
        r"Errors of every query head at one budget against its mid-normalised entropy $H_{\mathrm{mid}}$: of Top-$K$ "
        r"(a), of Top-$K{+}\phi$ (b), and the first less the second (c)."
    ),
    "quartile_error": Latex(
        r"Errors of Top-$K$ and Top-$K{+}\phi$ at every budget, with the heads in four groups of equal size by their "
        r"mid-normalised entropy $H_{\mathrm{mid}}$, from the most concentrated (a) to the most diffuse (d)."
    ),
    "mass_curves": Latex(
        r"Share $C_{\mathrm{mid}}(K)$ of the mid-region's attention mass that its $K$ largest kernels hold: of single "
        r"heads with low and with high entropy, and the median and the middle half of all heads."
    ),
    "logz_calibration": Latex(
        r"Estimated against true residual mass of attention rows, $\log\hat Z_{\mathcal{R}}-\log Z_{\mathcal{R}}$, "
        r"for every text and length. Below zero the mass of the tokens that are not read is underestimated."
    ),
    "fullsub_nosub_delta": Latex(
        r"Effect of subtraction per query head: $\Delta$ is the error of Top-$K{+}\phi$ less that of the same without "
        r"subtracting the retrieved tokens' share. Below zero subtraction helps."
    ),
    "kernel_sanity": Latex(
        r"One head seen closely: the feature maps' score of a key against its exact kernel (a), both by rank of the "
        r"exact kernel (b), and the errors of its attention rows without and with completion (c)."
    ),
    "ablation_kernel_fidelity": Latex(
        r"Scores of unretrieved keys against their exact kernels, under the study's own feature maps and under those "
        r"of each ablation, for one head. On the line, a score equals the kernel."
    ),
    "training_curves": Latex(
        r"Errors on held-out text while the feature maps train, by trained length and budget, beside those of "
        r"Top-$K$; and the divergence of the estimated from the true attention weights."
    ),
    "recipe_costs": Latex(
        r"What training buys: error of Top-$K{+}\phi$ on held-out text, as a ratio to that of Top-$K$, against the "
        r"seconds trained, for every recipe."
    ),
}
"""What a figure shows, by its kind."""

MACRO = r"\rmvalue"
"""The first of the macros that the numbers stage writes."""


@dataclass(frozen=True)
class Part:
    """A table or figure: its name, its file as LaTeX finds it from the document, and what it is referred to by."""

    name: str
    path: Latex
    label: Latex
    caption: Latex = Latex()
    """Of figures; tables bring theirs along."""


def run(
    spec: DocumentSpec,
    tables: Sequence[Path],
    figures: Sequence[Path],
    numbers: Path | None,
    template: Path,
    out: Path,
) -> None:
    """Writes a document that shows the tables (.tex), then the figures (.pdf), each in the order given.

    Args:
        numbers: macros of the tables' numbers (.tex), for whoever writes text into a copy; None where there are none.

    Raises:
        ValueError: there are none of either, a file is missing or its name is none that LaTeX reads as it stands, a
            table has no label, or a figure is unknown.
    """
    if not tables and not figures:
        raise ValueError(f"study {spec.study}: no table and no figure; give one")
    text = render(
        template,
        study=spec.study,
        backbones=spec.backbones,
        numbers=_numbers(numbers, out.parent) if numbers else None,
        warnings=list(model_warnings((backbone.model_id, backbone.weights) for backbone in spec.backbones)),
        tables=[_table(path, out.parent) for path in tables],
        figures=[_figure(path, out.parent, spec.figure_titles) for path in figures],
    )
    write_text(out, text)


def figure_caption(label: str, titles: Mapping[str, str]) -> Latex:
    """What a figure shows and, where `titles` says so, what of. Raises ValueError when the figure is unknown."""
    caption = CAPTIONS[kind_of(label)]
    return Latex(f"{caption} {escape(titles[label])}.") if titles.get(label) else caption


def _table(path: Path, folder: Path) -> Part:
    place = _place(path, folder, "table")
    text = read_text(path, "run the table stage")
    label = re.search(r"^\s*\\label\{([\w:.-]+)\}", text, re.MULTILINE)
    if label is None or not text.endswith("\\end{table}\n"):
        what = "has no \\label" if label is None else "is cut short"
        raise ValueError(f"{path}: {what}; delete it and run the table stage again")
    return Part(path.stem, place, Latex(label[1]))


def _figure(path: Path, folder: Path, titles: Mapping[str, str]) -> Part:
    caption = figure_caption(path.stem, titles)
    place = _place(path, folder, "figure")
    content = path.read_bytes()
    if not content.startswith(b"%PDF-") or not content.endswith(b"%%EOF\n"):
        raise ValueError(f"{path}: not a PDF file, or cut short; delete it and run the figure stage again")
    return Part(path.stem, place, Latex(f"fig:{path.stem}"), caption)


def _numbers(path: Path, folder: Path) -> Latex:
    place = _place(path, folder, "numbers")
    text = read_text(path, "run the numbers stage")
    if MACRO not in text or not text.endswith("\n"):
        raise ValueError(f"{path}: does not define {MACRO}, or is cut short; delete it and run the numbers stage again")
    return place


def _place(path: Path, folder: Path, stage: str) -> Latex:
    """The path as seen from `folder`, where LaTeX runs."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; run the {stage} stage")
    place = Path(os.path.relpath(path, folder)).as_posix()
    if not re.fullmatch(r"[A-Za-z0-9._/-]+", place):
        raise ValueError(f"{place!r}: LaTeX cannot read such a name; letters, digits and . _ / - are safe")
    return Latex(place)
