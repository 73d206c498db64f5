"""Templates filled in, for LaTeX and HTML alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from residual_mass.files import read_text

RESTORE = "restore it from the repository"


def fill(environment: jinja2.Environment, template: Path, context: Mapping[str, Any]) -> str:
    """Raises ValueError naming the template when it is missing, cut short, wrong, or asks for something that is not
    there.
    """
    text = read_text(template, RESTORE)
    marks = (environment.variable_start_string, environment.block_start_string)
    if not any(mark in text for mark in marks):
        raise ValueError(f"{template}: cut short, or no template; {RESTORE}")
    if not text.endswith("\n"):
        raise ValueError(f"{template}: its last line does not end; end it, or where it was cut short {RESTORE}")
    try:
        return environment.get_template(template.name).render(context)
    except jinja2.TemplateError as error:
        raise ValueError(f"{template}: {error}; mend it, or {RESTORE}") from None
