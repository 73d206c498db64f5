"""The figures, and what their captions say."""

from __future__ import annotations

from collections.abc import Mapping

from residual_mass.study.sections.figures import kind_of

CAPTIONS = {
    "fidelity": (
        r"Distance of the next token from that of full attention, on continuations that every method is given: the "
        r"Kullback-Leibler divergence, averaged over tokens and documents, against the budget. Corpora go on as they "
        r"do; the prompts of benchmarks are continued by the right answer. Feature maps are those of the study, unless "
        r"the legend names the length that they were trained at."
    ),
    "fidelity_tokens": (
        r"The distance from full attention token by token at one budget: the share of tokens at least so far off (a), "
        r"and its mean over quarters of the tokens by their probability under full attention (b), over tokens of which "
        r"the prompt has nothing, the token, or the bigram that it ends (c), and over places in the continuation (d). "
        r"Intervals are over documents."
    ),
    "error_by_k": (
        r"Relative $\ell_1$ error of the attention output against full attention, averaged over heads and queries, by "
        r"method and budget; a panel for each length and text. All methods read the same tokens, the samples 32 more."
    ),
    "selection_recall": (
        r"Share of the attention mass of the $K$ tokens with the largest scores that a selector does not choose, "
        r"averaged over heads and queries, against the budget; a panel for each length and text. Top-$K$ by exact "
        r"scores misses nothing, and budgets for anchors alone have no $K$."
    ),
    "fidelity_by_bytes": (
        r"Distance from full attention against the bytes that a decode step reads of a bfloat16 cache and of "
        r"summaries, as a share of all keys and values: the Kullback-Leibler divergence of the next token (left), "
        r"which is measured for fewer methods, and the relative $\ell_1$ error of the attention output (right), by "
        r"length and text. Colours are selectors, marks are what is added for the unread tokens, thin lines join the "
        r"budgets of a method. The black line is the least distance that any method has with at most so many bytes; "
        r"the exact mass, an oracle, is left out of it."
    ),
    "entropy_gain": (
        r"Gain of completion per query head, the error of Top-$K$ less that of Top-$K{+}\phi$, against the "
        r"mid-normalised entropy $H_{\mathrm{mid}}$ of the head's attention, for every budget. Above zero, adding the "
        r"residual estimate helps the head."
    ),
    "entropy_heatmap": (
        r"Mid-normalised entropy $H_{\mathrm{mid}}$ of every query head (a), and against it the share of the "
        r"attention mass that the feature maps estimate for the tokens that are not read (b)."
    ),
    "fixedk_breakdown": (
        r"Errors of every query head at one budget against its mid-normalised entropy $H_{\mathrm{mid}}$: of Top-$K$ "
        r"(a), of Top-$K{+}\phi$ (b), and the first less the second (c)."
    ),
    "quartile_error": (
        r"Errors of Top-$K$ and Top-$K{+}\phi$ at every budget, with the heads in four groups of equal size by their "
        r"mid-normalised entropy $H_{\mathrm{mid}}$, from the most concentrated (a) to the most diffuse (d)."
    ),
    "mass_curves": (
        r"Share $C_{\mathrm{mid}}(K)$ of the mid-region's attention mass that its $K$ largest kernels hold: of single "
        r"heads with low and with high entropy, and the median and the middle half of all heads."
    ),
    "logz_calibration": (
        r"Estimated against true residual mass of attention rows, $\log\hat Z_{\mathcal{R}}-\log Z_{\mathcal{R}}$, "
        r"for every text and length. Below zero the mass of the tokens that are not read is underestimated."
    ),
    "fullsub_nosub_delta": (
        r"Effect of subtraction per query head: $\Delta$ is the error of Top-$K{+}\phi$ less that of the same without "
        r"subtracting the retrieved tokens' share. Below zero subtraction helps."
    ),
    "kernel_sanity": (
        r"One head seen closely: the feature maps' score of a key against its exact kernel (a), both by rank of the "
        r"exact kernel (b), and the errors of its attention rows without and with completion (c)."
    ),
    "ablation_kernel_fidelity": (
        r"Scores of unretrieved keys against their exact kernels, under the study's own feature maps and under those "
        r"of each ablation, for one head. On the line, a score equals the kernel."
    ),
    "training_curves": (
        r"Errors on held-out text while the feature maps train, by trained length and budget, beside those of "
        r"Top-$K$; and the divergence of the estimated from the true attention weights."
    ),
}
"""What a figure shows, by its kind."""


def caption_of(label: str, titles: Mapping[str, str]) -> str:
    """What a figure shows and, where `titles` says so, what of. Raises ValueError when the figure is unknown."""
    caption = CAPTIONS[kind_of(label)]
    return f"{caption} {titles[label]}." if titles.get(label) else caption
