"""Describes results as an RO-Crate (https://w3id.org/ro/crate/1.1), for archives that read it: every file with its
hash, and every run of a stage with what it read and wrote, from the records of `provenance`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from residual_mass.files import read_json, write_json
from residual_mass.provenance import sidecar_of
from residual_mass.verify import results_of

CONTEXT = ["https://w3id.org/ro/crate/1.1/context", {"sha256": "https://schema.org/sha256"}]
NAME = "Results of residual-mass"
ABOUT = "Results of the residual-mass pipeline, with the settings, the code and the files that each was made from"
LICENCE = "https://spdx.org/licenses/Apache-2.0"
PAPER = "https://arxiv.org/abs/2604.05438"
Entity = dict[str, Any]


def run(out: Path, results: Sequence[Path] = (Path("results"), Path("paper_tables"))) -> None:
    """Writes the metadata of a crate, whose files are named relative to the working directory; searches folders.

    Raises:
        ValueError: a result is missing, or there is none with a record.
    """
    records = list(_records(results))
    if not records:
        raise ValueError(f"{', '.join(map(str, results))}: no result with a record; run a study first")
    hashes: dict[str, str] = {}
    for record in records:
        hashes |= record["inputs"] | record["outputs"]
    files = [_file(name, sha256) for name, sha256 in sorted(hashes.items())]
    actions = [_action(record) for record in records]
    programs = {program["@id"]: program for record in records for program in [_program(record)]}
    graph = [*_heads(out, files, actions), *files, *programs.values()]
    for action, settings in actions:
        graph += [action, settings]
    write_json(out, {"@context": CONTEXT, "@graph": graph})


def _records(results: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    """Yields the record of every result once: several files may be outputs of one run."""
    known = set()
    for folder in results:
        for path in results_of(folder) if folder.exists() else ():
            if not sidecar_of(path).is_file():
                continue
            record = read_json(sidecar_of(path))
            text = json.dumps(record, sort_keys=True)
            if text not in known:
                yield record
            known.add(text)


def _heads(out: Path, files: Sequence[Entity], actions: Sequence[tuple[Entity, Entity]]) -> list[Entity]:
    """Returns the descriptor of the crate, and the crate. Its date is that of its newest file."""
    here = [Path(file["@id"]) for file in files if Path(file["@id"]).is_file()]
    newest = max((path.stat().st_mtime for path in here), default=0.0)
    date = datetime.datetime.fromtimestamp(newest, datetime.UTC).date()
    descriptor = {"@id": out.name, "@type": "CreativeWork", "about": {"@id": "./"}}
    descriptor["conformsTo"] = {"@id": "https://w3id.org/ro/crate/1.1"}
    crate: Entity = {"@id": "./", "@type": "Dataset", "name": NAME, "description": ABOUT}
    crate |= {"datePublished": date.isoformat(), "license": {"@id": LICENCE}, "isBasedOn": {"@id": PAPER}}
    crate["hasPart"] = [{"@id": path.as_posix()} for path in here]
    crate["mentions"] = [{"@id": action["@id"]} for action, _ in actions]
    licence = {"@id": LICENCE, "@type": "CreativeWork", "name": "Apache License 2.0"}
    paper = {"@id": PAPER, "@type": "ScholarlyArticle"}
    paper["name"] = "Residual-Mass Accounting for Partial-KV Decoding"
    return [descriptor, crate, licence, paper]


def _file(name: str, sha256: str) -> Entity:
    entity: Entity = {"@id": name, "@type": "File", "name": Path(name).name, "sha256": sha256}
    if Path(name).is_file():
        entity["contentSize"] = str(Path(name).stat().st_size)
    return entity


def _program(record: Mapping[str, Any]) -> Entity:
    """Returns the package at the version and the commit that made a result."""
    code = record["code"]
    name = f"residual-mass {code['version']}"
    entity = {"@id": f"#residual-mass-{code['commit'] or code['version']}", "@type": "SoftwareApplication"}
    entity |= {"name": name, "softwareVersion": code["commit"] or code["version"]}
    return entity


def _action(record: Mapping[str, Any]) -> tuple[Entity, Entity]:
    """Returns a run of a stage, and its settings."""
    outputs = sorted(record["outputs"])
    settings = {"@id": f"#settings-of-{outputs[0]}", "@type": "PropertyValue", "name": "spec"}
    settings["value"] = json.dumps(record["spec"], sort_keys=True)
    action: Entity = {"@id": f"#run-for-{outputs[0]}", "@type": "CreateAction", "name": record["stage"]}
    action["instrument"] = {"@id": _program(record)["@id"]}
    action["object"] = [*({"@id": name} for name in sorted(record["inputs"])), {"@id": settings["@id"]}]
    action["result"] = [{"@id": name} for name in outputs]
    return action, settings
