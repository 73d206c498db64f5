"""Ways in which a file of a study comes to harm."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

MISSING, EMPTY, FOLDER, OTHER = "missing", "empty", "a folder", "of another kind"
CERTAIN = (MISSING, EMPTY, FOLDER, OTHER)
"""What no reader may overlook."""
CUT, FLIPPED = "cut", "flipped"
TABLE = b"task,value\nvt,0.5\n"
PICTURE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(range(256))


@dataclass(frozen=True)
class Damage:
    kind: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.seed}" if self.kind in (CUT, FLIPPED) else self.kind

    def of(self, content: bytes, suffix: str) -> bytes:
        """What becomes of the content of a file that stays a file."""
        if self.kind == EMPTY:
            return b""
        if self.kind == OTHER:
            return PICTURE if suffix == ".csv" else TABLE
        rng = Random(f"{self}/{len(content)}")
        if self.kind == CUT:
            return content[: rng.randrange(1, len(content))]
        assert self.kind == FLIPPED
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 4, 64))):
            changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
        return bytes(changed)


@contextmanager
def damaged(path: Path, damage: Damage) -> Iterator[None]:
    """Within the context the file has come to harm; afterwards it is as it was."""
    whole = path.with_name(f"{path.name}.whole")
    path.rename(whole)
    try:
        if damage.kind == FOLDER:
            path.mkdir()
        elif damage.kind != MISSING:
            path.write_bytes(damage.of(whole.read_bytes(), path.suffix))
        yield
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        whole.replace(path)
