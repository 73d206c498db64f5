"""The flags of `serve`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServeOptions:
    """The flags: `add_arguments` of the command says what they mean."""

    model: str
    method: str
    percent: float | None
    weights: int | None
    compile: bool
    host: str
    port: int
    names: tuple[str, ...]
    origins: tuple[str, ...]
    api_key: str | None
    queue: int
    memory: int
    keep: Path | None
    keep_size: int

    @property
    def served_by(self) -> str:
        budget = "" if self.percent is None else f", budget {self.percent:g} %"
        weights = "" if self.weights is None else f", weights in {self.weights} bits"
        return f"{self.method}{budget}{weights}"
