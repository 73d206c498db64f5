"""Templates that are not whole are refused in one line."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from residual_mass.paper.templating import fill


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("plain\n", "cut short, or no template; restore it from the repository"),
        ("{{ a }}", "cut short, or no template; restore it from the repository"),
        ("{{ b }}\n", "'b' is undefined; correct it, or restore it from the repository"),
    ],
)
def test_the_message_says_what_is_wrong(text: str, complaint: str, tmp_path: Path) -> None:
    (template := tmp_path / "page.html").write_text(text)
    with pytest.raises(ValueError) as error:
        fill(
            jinja2.Environment(loader=jinja2.FileSystemLoader(tmp_path), undefined=jinja2.StrictUndefined),
            template,
            {"a": 1},
        )
    assert str(error.value) == f"{template}: {complaint}"
