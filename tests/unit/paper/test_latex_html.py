"""LaTeX of captions and cells as HTML: what it shows, and that text stays text."""

from __future__ import annotations

import random
import string
from html import unescape

import pytest
from markupsafe import Markup

from residual_mass.paper.document import CAPTIONS
from residual_mass.paper.latex import escape
from residual_mass.paper.report.latex_html import argument, plain, to_html
from residual_mass.paper.titles import METHOD_TITLES, VARIANT_TITLES


@pytest.mark.parametrize(
    ("latex", "html"),
    [
        (r"Top-$K{+}\phi$", "Top-<span class=math><i>K</i>+φ</span>"),
        (r"$\log\hat Z_{\mathcal{R}}-\log Z$",
         "<span class=math>log\u2009<i>Z</i>\u0302<sub>ℛ</sub>\u2009−\u2009log\u2009<i>Z</i></span>"),
        (r"$d_{\mathrm{emb}}{=}64$", "<span class=math><i>d</i><sub>emb</sub>=64</span>"),
        (r"$p < 0.05$", "<span class=math><i>p</i>\u2009&lt;\u20090.05</span>"),
        (r"$-0.574$", "<span class=math>−0.574</span>"),
        (r"$2\times10^{-7}$", "<span class=math>2×10<sup>−7</sup></span>"),
        (r"\shortstack[l]{GovReport\\(stand-in)}", "GovReport<br>(stand-in)"),
        (r"\textbf{0.614}\rlap{$^\dagger$}", "<strong>0.614</strong><span class=math><sup>†</sup></span>"),
        (r"a {''}b{''} c", "a &#34;b&#34; c"),
        ("two\n    lines", "two lines"),
    ],
)  # fmt: skip
def test_what_is_shown(latex: str, html: str) -> None:
    assert to_html(latex) == html


def test_escaped_text_comes_back_as_it_was() -> None:
    generator = random.Random(0)
    alphabet = string.printable + "\\{}$&#%_^~<>\"'|" * 5 + "é–’"
    for _ in range(500):
        text = "".join(generator.choice(alphabet) for _ in range(30))
        wanted = " ".join("".join(" " if ord(each) < 32 else each for each in text).split())
        html = to_html(escape(text))
        assert unescape(str(html)) == wanted and "<" not in html


def test_every_title_and_caption_of_a_figure_can_be_shown() -> None:
    for latex in (*CAPTIONS.values(), *METHOD_TITLES.values(), *VARIANT_TITLES.values()):
        text = to_html(latex).striptags()
        assert text and not set(text) & set("\\${}")


@pytest.mark.parametrize(
    "latex", [r"\input{x}", r"$\frac{1}{2}$", "a & b", "x_1", r"\textbf{a", "$x", "a}", r"\textbf a"]
)
def test_what_cannot_be_shown_is_refused(latex: str) -> None:
    with pytest.raises(ValueError) as caught:
        to_html(latex)
    assert "\n" not in str(caught.value)


def test_the_text_of_a_cell_has_neither_markup_nor_marks() -> None:
    assert plain(r"\textbf{0.100}\rlap{$^\ddagger$}") == "0.100"
    assert plain("$-1.627$") == "-1.627"
    assert isinstance(to_html("a"), Markup)


def test_an_argument_ends_at_its_own_brace() -> None:
    assert argument(r"\caption{a {b} \} c} d}", 8) == r"a {b} \} c"
    with pytest.raises(ValueError, match="not closed"):
        argument("{a {b}", 0)
