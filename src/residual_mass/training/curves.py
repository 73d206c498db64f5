"""TensorBoard event files of a training, where the package tensorboard is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class Curves:
    """Writes beside the checkpoints, into `_tensorboard/<name of the checkpoint>`; does nothing without tensorboard."""

    def __init__(self, checkpoint: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.writer = None
            return
        self.writer = SummaryWriter(str(checkpoint.parent.parent / "_tensorboard" / checkpoint.stem))

    def add(self, step: int, loss: float) -> None:
        if self.writer is not None:
            self.writer.add_scalar("loss", loss, step)

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of the log over all layers, one curve per variant, corpus, K and measure."""
        for row in rows:
            if self.writer is not None and row["layer"] == "all":
                for measure in ("e_topk", "e_sub", "e_nosub", "kl", "log_z_error"):
                    tag = f"{row['variant']}/{row['corpus']}/K={row['k']}/{measure}"
                    self.writer.add_scalar(tag, float(row[measure]), row["step"])
