"""Provenance section of the page: hashes of the files it shows, and facts from their records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residual_mass.files import read_json, sha256_of
from residual_mass.provenance import beside

PACKAGE = "residual-mass"
"""Name of this project in records."""


@dataclass(frozen=True)
class Source:
    """A file with its hash and facts from its record; empty if unknown.

    Attributes:
        seconds: for feature maps, those of their own training steps over all interruptions; otherwise those of the last
            job, which for generated texts may have continued an earlier one.
    """

    path: str
    size: int
    sha256: str
    device: str
    seed: str
    recipe: str
    seconds: str


@dataclass(frozen=True)
class Provenance:
    """All files; `facts` holds all values found in their records, by name."""

    sources: tuple[Source, ...]
    facts: dict[str, tuple[str, ...]]


def provenance(paths: Iterable[Path]) -> Provenance:
    """Hashes every file, and reads its record if there is one."""
    facts: dict[str, set[str]] = {}
    sources = []
    for path in dict.fromkeys(paths):
        record = _record(path)
        for name, value in _facts(record):
            facts.setdefault(name, set()).add(value)
        sources.append(_source(path, record))
    if "device" in facts:
        facts["device"] = _named(facts["device"])
    return Provenance(tuple(sources), {name: tuple(sorted(facts[name])) for name in _ordered(facts)})


def _record(path: Path) -> dict[str, Any]:
    record = beside(path)
    return read_json(record) if record.exists() else {}


def _source(path: Path, record: dict[str, Any]) -> Source:
    spec = record.get("spec", {})
    seconds = record.get("seconds", record.get("wall_seconds"))
    return Source(
        path=str(path),
        size=path.stat().st_size,
        sha256=sha256_of(path),
        device=_device(record),
        seed=str(spec.get("seed", "")),
        recipe=str(spec.get("recipe", "")),
        seconds=f"{seconds:,.0f}" if isinstance(seconds, int | float) else "",
    )


def _facts(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, version in record.get("packages", {}).items():
        yield name, str(version)
    code = record.get("code", {})
    if code.get("commit"):
        yield "commit", f"{code['commit']} with changes" if code.get("changed") else str(code["commit"])
    machine = record.get("machine", {})
    if machine:
        yield "machine", f"{machine.get('platform', 'unknown')}, {machine.get('cpus', 'unknown')} CPUs"
        yield "Python", str(machine.get("python", "unknown"))
    if device := _device(record):
        yield "device", device
    if "processes" in record:
        yield "processes", str(record["processes"])


def _device(record: dict[str, Any]) -> str:
    """Returns the name of the hardware if recorded, otherwise torch's name of the device."""
    return str(record.get("hardware") or record.get("device", ""))


def _named(devices: set[str]) -> set[str]:
    """Drops torch's names, `cpu` or `cuda:0`, if another job records full names of that kind of device."""
    bare = {device for device in devices if re.fullmatch(r"cpu|cuda(:\d+)?", device)}
    processors = {device.endswith(" threads") for device in devices - bare}
    return {device for device in devices if device not in bare or (device == "cpu") not in processors}


def _ordered(names: Iterable[str]) -> list[str]:
    """Sorts this project and the hardware first, then the packages."""
    first = [PACKAGE, "commit", "device", "processes", "machine", "Python"]
    return sorted(names, key=lambda name: (first.index(name) if name in first else len(first), name.lower()))
