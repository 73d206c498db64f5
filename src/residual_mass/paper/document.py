"""All tables and figures of a study in one LaTeX document."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from residual_mass.files import write_text
from residual_mass.paper.latex import Latex, render
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.tables.captions import model_warnings
from residual_mass.provenance import Record
from residual_mass.study.sections.figures import kind_of
from residual_mass.study.specs import DocumentSpec

CAPTIONS = {
    "fidelity": Marked(
        r"Distance of the next token from that of full attention, on continuations that every method is given: the "
        r"Kullback-Leibler divergence, averaged over tokens and documents, against the budget. Corpora go on as they "
        r"do; the prompts of benchmarks are continued by the right answer. Feature maps are those of the study, unless "
        r"the legend names the length that they were trained at."
    ),
    "fidelity_tokens": Marked(
        r"The distance from full attention token by token at one budget: the share of tokens at least so far off (a), "
        r"and its mean over quarters of the tokens by their probability under full attention (b), over tokens of which "
        r"the prompt has nothing, the token, or the bigram that it ends (c), and over places in the continuation (d). "
        r"Intervals are over documents."
    ),
    "error_by_k": Marked(
        r"Relative $\ell_1$ error of the attention output against full attention, averaged over heads and queries, by "
        r"method and budget; a panel for each length and text. All methods read the same tokens, the samples 32 more."
    ),
    "selection_recall": Marked(
        r"Share of the attention mass of the $K$ tokens with the largest scores that a selector does not choose, "
        r"averaged over heads and queries, against the budget; a panel for each length and text. Top-$K$ by exact "
        r"scores misses nothing, and budgets for anchors alone have no $K$."
    ),
    "fidelity_by_bytes": Marked(
        r"Distance from full attention against the bytes that a decode step reads of a bfloat16 cache and of "
        r"summaries, as a share of all keys and values: the Kullback-Leibler divergence of the next token (left), "
        r"which is measured for fewer methods, and the relative $\ell_1$ error of the attention output (right), by "
        r"length and text. Colours are selectors, marks are what is added for the unread tokens, thin lines join the "
        r"budgets of a method. The black line is the least distance that any method has with at most so many bytes; "
        r"the exact mass, an oracle, is left out of it."
    ),
    "entropy_gain": Marked(
        r"Gain of completion per query head, the error of Top-$K$ less that of Top-$K{+}\phi$, against the "
        r"mid-normalised entropy $H_{\mathrm{mid}}$ of the head's attention, for every budget. Above zero, adding the "
        r"residual estimate helps the head."
    ),
    "entropy_heatmap": Marked(
        r"Mid-normalised entropy $H_{\mathrm{mid}}$ of every query head (a), and against it the share of the "
        r"attention mass that the feature maps estimate for the tokens that are not read (b)."
    ),
    "fixedk_breakdown": Marked(
        r"Errors of every query head at one budget against its mid-normalised entropy $H_{\mathrm{mid}}$: of Top-$K$ "
        r"(a), of Top-$K{+}\phi$ (b), and the first less the second (c)."
    ),
    "quartile_error": Marked(
        r"Errors of Top-$K$ and Top-$K{+}\phi$ at every budget, with the heads in four groups of equal size by their "
        r"mid-normalised entropy $H_{\mathrm{mid}}$, from the most concentrated (a) to the most diffuse (d)."
    ),
    "mass_curves": Marked(
        r"Share $C_{\mathrm{mid}}(K)$ of the mid-region's attention mass that its $K$ largest kernels hold: of single "
        r"heads with low and with high entropy, and the median and the middle half of all heads."
    ),
    "logz_calibration": Marked(
        r"Estimated against true residual mass of attention rows, $\log\hat Z_{\mathcal{R}}-\log Z_{\mathcal{R}}$, "
        r"for every text and length. Below zero the mass of the tokens that are not read is underestimated."
    ),
    "fullsub_nosub_delta": Marked(
        r"Effect of subtraction per query head: $\Delta$ is the error of Top-$K{+}\phi$ less that of the same without "
        r"subtracting the retrieved tokens' share. Below zero subtraction helps."
    ),
    "kernel_sanity": Marked(
        r"One head seen closely: the feature maps' score of a key against its exact kernel (a), both by rank of the "
        r"exact kernel (b), and the errors of its attention rows without and with completion (c)."
    ),
    "ablation_kernel_fidelity": Marked(
        r"Scores of unretrieved keys against their exact kernels, under the study's own feature maps and under those "
        r"of each ablation, for one head. On the line, a score equals the kernel."
    ),
    "training_curves": Marked(
        r"Errors on held-out text while the feature maps train, by trained length and budget, beside those of "
        r"Top-$K$; and the divergence of the estimated from the true attention weights."
    ),
}
"""What a figure shows, by its kind."""


@dataclass(frozen=True)
class Part:
    """A table or figure: its name, the path of its file from the document, and the label that refers to it."""

    name: str
    path: Latex
    label: Latex
    caption: Marked = Marked()
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
        ValueError: there are none of either, a file is not what was recorded or has a name that LaTeX cannot read, or a
            figure is unknown.
    """
    if not tables and not figures:
        raise ValueError(f"study {spec.study}: no table and no figure; give one")
    record = Record("document", spec, [*tables, *figures, numbers], sources=[template])
    text = render(
        template,
        study=spec.study,
        backbones=spec.backbones,
        numbers=_place(numbers, out.parent) if numbers else None,
        warnings=list(model_warnings((backbone.model_id, backbone.weights) for backbone in spec.backbones)),
        tables=[Part(path.stem, _place(path, out.parent), Latex(f"tab:{path.stem}")) for path in tables],
        figures=[_figure(path, out.parent, spec.figure_titles) for path in figures],
    )
    write_text(out, text)
    record.write(out)


def figure_caption(label: str, titles: Mapping[str, str]) -> Marked:
    """What a figure shows and, where `titles` says so, what of. Raises ValueError when the figure is unknown."""
    caption = CAPTIONS[kind_of(label)]
    return Marked(f"{caption} {marked(titles[label])}.") if titles.get(label) else caption


def _figure(path: Path, folder: Path, titles: Mapping[str, str]) -> Part:
    caption = figure_caption(path.stem, titles)
    return Part(path.stem, _place(path, folder), Latex(f"fig:{path.stem}"), caption)


def _place(path: Path, folder: Path) -> Latex:
    """The path as seen from `folder`, where LaTeX runs."""
    place = Path(os.path.relpath(path, folder)).as_posix()
    if not re.fullmatch(r"[A-Za-z0-9._/-]+", place):
        raise ValueError(f"{place!r}: LaTeX cannot read such a name; letters, digits and . _ / - are safe")
    return Latex(place)
