"""Text with mathematics: what LaTeX and HTML make of it, and that text stays text."""

from __future__ import annotations

import random
import string
from html import unescape

import pytest

from residual_mass.paper.document import CAPTIONS
from residual_mass.paper.latex import escape
from residual_mass.paper.marked import Marked, marked, parts, to_html
from residual_mass.paper.titles import METHOD_TITLES, VARIANT_TITLES, title_parts


@pytest.mark.parametrize(
    ("text", "latex", "html"),
    [
        ("50% & $x$", r"50\% \& \$x\$", "50% &amp; $x$"),
        (Marked("Top-$K$ at 50%"), r"Top-$K$ at 50\%", "Top-<math"),
        (Marked(r"a \$ \\ \% b"), r"a \$ \textbackslash{} \% b", r"a $ \ % b"),
        (Marked("GovReport\n(stand-in)"), "GovReport\n(stand-in)", "GovReport<br>(stand-in)"),
        (Marked("$-0.574$ $0.369$"), "$-0.574$ $0.369$", "−0.574 0.369"),
        ("two\n    lines", "two lines", "two lines"),
    ],
)
def test_one_source_makes_both(text: str, latex: str, html: str) -> None:
    assert escape(text) == latex and str(to_html(text)).startswith(html)


def test_plain_text_comes_back_as_it_was() -> None:
    generator = random.Random(0)
    alphabet = string.printable + "\\{}$&#%_^~<>\"'|" * 5 + "é–’"
    for _ in range(500):
        text = "".join(generator.choice(alphabet) for _ in range(30))
        wanted = " ".join("".join(" " if ord(each) < 32 else each for each in text).split())
        html = to_html(text)
        assert unescape(str(html)) == wanted and "<" not in html
        assert not any(math for _, math in parts(marked(text)))


def test_mathematics_is_mathml() -> None:
    html = to_html(METHOD_TITLES["topk_phi"])
    assert html.startswith("Top-<math") and html.striptags() == "Top-K+ϕ"
    for text in (*CAPTIONS.values(), *METHOD_TITLES.values(), *VARIANT_TITLES.values()):
        assert (shown := to_html(text).striptags()) and not set(shown) & set("\\${}")


@pytest.mark.parametrize("text", [r"\input{x}", "$x", r"\textbf{a}", "a\\"])
def test_other_latex_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="plain text with mathematics between dollars") as caught:
        to_html(Marked(text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "selector", "residual"),
    [
        ("topk", "Top-$K$", ""),
        ("topk_phi_nosub", "Top-$K$", r"$\phi$ (NoSub)"),
        ("topk_moments_shared", "Top-$K$", "moments, 64 clusters"),
        ("mine_own", "mine_own", ""),
    ],
)
def test_a_methods_title_names_its_selector_and_its_residual(method: str, selector: str, residual: str) -> None:
    assert title_parts(method) == (selector, residual)
