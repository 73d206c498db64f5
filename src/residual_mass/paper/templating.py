"""Templates filled in, for LaTeX and HTML alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2


def fill(environment: jinja2.Environment, template: Path, context: Mapping[str, Any]) -> str:
    """Raises ValueError naming the template when it is missing, wrong, or asks for something that is not there."""
    try:
        return environment.get_template(template.name).render(context)
    except jinja2.TemplateNotFound:
        raise ValueError(f"{template}: no such template") from None
    except jinja2.TemplateError as error:
        raise ValueError(f"{template}: {error}") from None
