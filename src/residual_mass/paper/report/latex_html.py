"""The LaTeX of titles, captions and cells as HTML: what this project's tables use of it, and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markupsafe import Markup, escape

SYMBOLS = {
    "phi": "φ", "Delta": "Δ", "ell": "ℓ", "times": "×", "cdot": "·", "pm": "±", "approx": "≈", "infty": "∞",
    "dagger": "†", "ddagger": "‡", "dots": "…", "ldots": "…",
}  # fmt: skip
FUNCTIONS = ("log", "exp", "min", "max")
RELATIONS = {"<": "<", ">": ">", "=": "=", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "to": "→"}
SCRIPT = {"R": "ℛ", "M": "ℳ", "A": "𝒜"}
CHARACTERS = {"textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textless": "<", "textgreater": ">",
              "textbar": "|"}  # fmt: skip
ELEMENTS = {"textbf": "strong", "emph": "em", "textit": "em", "texttt": "code", "textsuperscript": "sup"}
TRANSPARENT = ("rlap", "mbox", "text", "mathrm", "mathit")
"""Commands whose argument shows as it is."""
THIN = "\u2009"
TOKEN = re.compile(r"\\(?:[A-Za-z]+ *|.)|[{}$^_~&%]|\s+|[^\\{}$^_~&%\s]", re.DOTALL)


def to_html(latex: str) -> Markup:
    """LaTeX as HTML that may stand within a line, text escaped.

    Raises:
        ValueError: the LaTeX holds a command that is not known here, or a brace or dollar that is not closed.
    """
    return _Reader(TOKEN.findall(latex)).text(end=None).strip()


def plain(latex: str) -> str:
    """The text of a cell: without markup and marks of significance, a minus being a hyphen."""
    without_marks = re.sub(r"\\rlap\{\$[^$]*\$\}", "", latex)
    return to_html(without_marks).striptags().replace("−", "-")


def argument(latex: str, opening: int) -> str:
    """What stands in the braces of which the first is at `opening`. Raises ValueError when they are not closed."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(latex, opening):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return latex[opening + 1 : match.start()]
    raise ValueError("a brace is not closed")


@dataclass
class _Reader:
    """Reads tokens from left to right, by recursive descent."""

    tokens: list[str]
    at: int = 0

    def text(self, end: str | None) -> Markup:
        """Text up to the token `end`, which is used up; None: up to the end."""
        html = Markup()
        while (token := self._next(end)) is not None:
            html += self._text_of(token)
        return Markup(re.sub(r"[ \t\r\n]+", " ", html)) if end is None else html

    def _text_of(self, token: str) -> Markup:
        name = token[1:].strip() if len(token) > 1 and token[0] == "\\" else ""
        if token == "{":
            inner = self.text("}")
            return Markup("&#34;") if inner == Markup("&#39;&#39;") else inner  # how a straight quote is escaped
        if token == "$":
            return Markup("<span class=math>{}</span>").format(self._math("$"))
        if token == "~":
            return Markup("\u00a0")
        if token == "\\\\":
            return Markup("<br>")
        if name in CHARACTERS:
            return escape(CHARACTERS[name])
        if name in ELEMENTS:
            return Markup("<{0}>{1}</{0}>").format(ELEMENTS[name], self._group())
        if name in TRANSPARENT:
            return self._group()
        if name == "shortstack":
            self._skip_option()
            return self._group()
        if name in SYMBOLS:
            return escape(SYMBOLS[name])
        if name and not name.isalpha():
            return escape(" " if name in (",", ";", " ") else name)
        if name or token in "}^_&%":
            raise ValueError(f"{token.strip()!r} is LaTeX that the page cannot show; see paper/report/latex_html.py")
        return escape(token)

    def _math(self, end: str) -> Markup:
        """Mathematics up to the token `end`, which is used up."""
        html = Markup()
        follows_operand = False
        while (token := self._next(end)) is not None:
            name = token[1:].strip() if token[0] == "\\" else token
            if token.isspace():
                continue
            if name in RELATIONS:
                html += f"{THIN}{RELATIONS[name]}{THIN}" if follows_operand else RELATIONS[name]
                follows_operand = False
            elif name in ("+", "-"):
                sign = "−" if name == "-" else "+"
                html += f"{THIN}{sign}{THIN}" if follows_operand else sign
                follows_operand = False
            elif name in FUNCTIONS:
                html += name + THIN
                follows_operand = False
            else:
                html += self._atom(token)
                follows_operand = True
        return html

    def _atom(self, token: str) -> Markup:
        name = token[1:].strip() if token[0] == "\\" else ""
        if token in "^_":
            element = "sup" if token == "^" else "sub"
            return Markup("<{0}>{1}</{0}>").format(element, self._operand())
        if token == "{":
            return self._math("}")
        if name in SYMBOLS:
            return escape(SYMBOLS[name])
        if name in TRANSPARENT:
            return self._group()
        if name == "mathcal":
            letter = str(self._group())
            return escape(SCRIPT.get(letter, letter))
        if name == "hat":
            return self._operand() + "\u0302"
        if name and not name.isalpha():
            return escape("" if name in (",", ";", "!", " ") else name)
        if name or token in "}$&%~":
            raise ValueError(f"{token.strip()!r} is LaTeX that the page cannot show; see paper/report/latex_html.py")
        return Markup("<i>{}</i>").format(token) if token.isalpha() else escape(token)

    def _operand(self) -> Markup:
        """What a hat, an index or an exponent is put to: a group or a single token."""
        token = self._required()
        while token.isspace():
            token = self._required()
        return self._math("}") if token == "{" else self._atom(token)

    def _group(self) -> Markup:
        """The argument of a command, in braces."""
        if self._required() != "{":
            raise ValueError("a command lacks its argument in braces")
        return self.text("}")

    def _skip_option(self) -> None:
        if self.at < len(self.tokens) and self.tokens[self.at] == "[":
            while self._required() != "]":
                pass

    def _next(self, end: str | None) -> str | None:
        """The next token; None at `end`."""
        if end is None and self.at == len(self.tokens):
            return None
        token = self._required()
        return None if token == end else token

    def _required(self) -> str:
        if self.at == len(self.tokens):
            raise ValueError("a brace or a dollar is not closed")
        self.at += 1
        return self.tokens[self.at - 1]
