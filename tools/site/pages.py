"""A hook of mkdocs: adds pages from outside docs/, mends the links of the repository, and keeps numbers whole."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "config/README.md": "configuration.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE.txt",
    "CITATION.cff": "CITATION.cff",
    "tools/site/wide.css": "wide.css",
}
"""Places on the site of files outside docs/."""
MARKUP = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<[^>]*>)", re.DOTALL)
"""Of a page, what is not its text or must be copied as it is."""
UNBROKEN = {
    re.compile(r"(?<=\d)e-(?=\d)"): "e\N{NON-BREAKING HYPHEN}",
    re.compile(r"(?<=\d) (?=%|(ms|s|MiB|GiB|MB|GB)\b)"): "\N{NO-BREAK SPACE}",
}
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Adds the files of OUTSIDE."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the repository into links between their places on the site."""
    place = page.file.src_uri
    source = next((key for key, value in OUTSIDE.items() if value == place), f"docs/{place}")

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if target not in OUTSIDE and not (target.startswith("docs/") and (ROOT / target).is_file()):
            return link[1]  # `mkdocs build --strict` refuses links to anything but pages
        return os.path.relpath(OUTSIDE.get(target, target.removeprefix("docs/")), posixpath.dirname(place) or ".")

    return LINK.sub(moved, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keeps numbers such as 9.2e-4, 4 % and 7.7 ms on one line."""
    parts = MARKUP.split(html)
    for breaking, whole in UNBROKEN.items():
        parts[::2] = [breaking.sub(whole, text) for text in parts[::2]]
    return "".join(parts)
