"""Templates filled in, for LaTeX and HTML alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from residual_mass.files import read_text

RESTORE = "restore it from the repository"


def fill(environment: jinja2.Environment, template: Path, context: Mapping[str, Any]) -> str:
    """Raises ValueError naming the template when it is missing, cut short, malformed or asks for an unknown name."""
    return _filled(environment, template, lambda found: found.render(context))


def block(environment: jinja2.Environment, template: Path, name: str, context: Mapping[str, Any]) -> str:
    """One block of a template; errors as for `fill`."""
    return _filled(environment, template, lambda found: "".join(found.blocks[name](found.new_context(dict(context)))))


def _filled(environment: jinja2.Environment, template: Path, write: Callable[[jinja2.Template], str]) -> str:
    text = read_text(template, RESTORE)
    marks = (environment.variable_start_string, environment.block_start_string)
    if not any(mark in text for mark in marks) or not text.endswith("\n"):
        raise ValueError(f"{template}: cut short, or no template; {RESTORE}")
    try:
        return write(environment.get_template(template.name))
    except KeyError as error:
        raise ValueError(f"{template}: has no block {error}; add it, or {RESTORE}") from None
    except jinja2.TemplateError as error:
        raise ValueError(f"{template}: {error}; correct it, or {RESTORE}") from None
