"""Where what a page shows comes from: hashes of its files, and what the sidecars beside them say of how they came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residual_mass.files import read_json, sha256_of

PACKAGE = "residual-mass"
"""This project, as the sidecars call it."""


@dataclass(frozen=True)
class Source:
    """One file: its hash, and what its sidecar records; empty where there is none or it does not say."""

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
    facts: dict[str, dict[str, None]] = {}
    sources = []
    for path in dict.fromkeys(paths):
        meta = _sidecar(path)
        for name, value in _facts(meta):
            facts.setdefault(name, {})[value] = None
        sources.append(_source(path, meta))
    return Provenance(tuple(sources), {name: tuple(sorted(facts[name])) for name in _ordered(facts)})


def _sidecar(path: Path) -> dict[str, Any]:
    sidecar = path.with_name(f"{path.name}.meta.json")
    if not sidecar.exists():
        return {}
    meta = read_json(sidecar)
    parts = [meta.get(name, {}) for name in ("spec", "packages", "machine")] if isinstance(meta, dict) else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{sidecar}: is not a record of a job; delete it")
    return meta


def _source(path: Path, meta: dict[str, Any]) -> Source:
    try:
        size, sha = path.stat().st_size, sha256_of(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; run the stage that makes it") from None
    spec = meta.get("spec", {})
    seconds = meta.get("seconds")
    return Source(
        path=str(path),
        size=size,
        sha256=sha,
        device=str(meta.get("device", "")),
        seed=str(spec.get("seed", "")),
        recipe=str(spec.get("recipe", "")),
        seconds=f"{seconds:,.0f}" if isinstance(seconds, int | float) else "",
    )


def _facts(meta: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, version in meta.get("packages", {}).items():
        yield name, str(version)
    machine = meta.get("machine", {})
    if machine:
        yield "machine", f"{machine.get('platform', 'unknown')}, {machine.get('cpus', 'unknown')} CPUs"
        yield "Python", str(machine.get("python", "unknown"))
    for name in ("device", "processes"):
        if name in meta:
            yield name, str(meta[name])


def _ordered(names: Iterable[str]) -> list[str]:
    """This project and the hardware first, then the packages."""
    first = [PACKAGE, "device", "processes", "machine", "Python"]
    return sorted(names, key=lambda name: (first.index(name) if name in first else len(first), name.lower()))
