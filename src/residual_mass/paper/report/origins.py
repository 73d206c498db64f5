"""Where what a page shows comes from: hashes of its files, and what the sidecars beside them say of how they came."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residual_mass.files import read_json, sha256_of
from residual_mass.provenance import beside

PACKAGE = "residual-mass"
"""This project, as the sidecars call it."""


@dataclass(frozen=True)
class Source:
    """One file: its hash, and what its sidecar records; empty where there is none or it does not say.

    Attributes:
        seconds: of a file of maps those of its own steps, over all interruptions; of anything else those of its job, of
            generated texts of the last one, which may have found rows that an earlier one left.
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
    """Of all files together; `facts` are what their sidecars agree or differ on, by name."""

    sources: tuple[Source, ...]
    facts: dict[str, tuple[str, ...]]


def provenance(paths: Iterable[Path]) -> Provenance:
    """Hashes every file once, and reads `<file>.meta.json` where there is one.

    Raises:
        ValueError: a file is missing or a sidecar is damaged; names it.
    """
    facts: dict[str, set[str]] = {}
    sources = []
    for path in dict.fromkeys(paths):
        meta = _sidecar(path)
        for name, value in _facts(meta):
            facts.setdefault(name, set()).add(value)
        sources.append(_source(path, meta))
    if "device" in facts:
        facts["device"] = _named(facts["device"])
    return Provenance(tuple(sources), {name: tuple(sorted(facts[name])) for name in _ordered(facts)})


def _sidecar(path: Path) -> dict[str, Any]:
    sidecar = beside(path)
    if not sidecar.exists():
        return {}
    meta = read_json(sidecar)
    parts = (
        [meta.get(name, {}) for name in ("spec", "code", "packages", "machine")] if isinstance(meta, dict) else [None]
    )
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{sidecar}: is not a record of a job; delete it")
    return meta


def _source(path: Path, meta: dict[str, Any]) -> Source:
    try:
        size, sha = path.stat().st_size, sha256_of(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; run the stage that makes it") from None
    spec = meta.get("spec", {})
    seconds = meta.get("seconds", meta.get("wall_seconds"))
    return Source(
        path=str(path),
        size=size,
        sha256=sha,
        device=_device(meta),
        seed=str(spec.get("seed", "")),
        recipe=str(spec.get("recipe", "")),
        seconds=f"{seconds:,.0f}" if isinstance(seconds, int | float) else "",
    )


def _facts(meta: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, version in meta.get("packages", {}).items():
        yield name, str(version)
    code = meta.get("code", {})
    if code.get("commit"):
        yield "commit", f"{code['commit']} with changes" if code.get("changed") else str(code["commit"])
    machine = meta.get("machine", {})
    if machine:
        yield "machine", f"{machine.get('platform', 'unknown')}, {machine.get('cpus', 'unknown')} CPUs"
        yield "Python", str(machine.get("python", "unknown"))
    if device := _device(meta):
        yield "device", device
    if "processes" in meta:
        yield "processes", str(meta["processes"])


def _device(meta: dict[str, Any]) -> str:
    """The name of the hardware where a job records it, otherwise what torch calls the device."""
    return str(meta.get("hardware") or meta.get("device", ""))


def _named(devices: set[str]) -> set[str]:
    """Without those that torch alone names, `cpu` or `cuda:0`, where another job names one of that kind in full."""
    bare = {device for device in devices if re.fullmatch(r"cpu|cuda(:\d+)?", device)}
    processors = {device.endswith(" threads") for device in devices - bare}
    return {device for device in devices if device not in bare or (device == "cpu") not in processors}


def _ordered(names: Iterable[str]) -> list[str]:
    """This project and the hardware first, then the packages."""
    first = [PACKAGE, "commit", "device", "processes", "machine", "Python"]
    return sorted(names, key=lambda name: (first.index(name) if name in first else len(first), name.lower()))
