"""TensorBoard event files of a training, if the package tensorboard is installed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class Curves:
    """Writes curves to `_tensorboard/<name of the checkpoint>` next to the checkpoints' folder; does nothing without
    tensorboard or after a failed write.
    """

    def __init__(self, checkpoint: Path):
        self.writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        with self._spared():
            self.writer = SummaryWriter(str(checkpoint.parent.parent / "_tensorboard" / checkpoint.stem))

    def add(self, step: int, loss: float) -> None:
        if self.writer is not None:
            with self._spared():
                self.writer.add_scalar("loss", loss, step)

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds the log's rows over all layers, one curve per variant, corpus, K and measure."""
        if self.writer is not None:
            with self._spared():
                for row in (row for row in rows if row["layer"] == "all"):
                    for measure in ("e_topk", "e_sub", "e_nosub", "kl", "log_z_error"):
                        tag = f"{row['variant']}/{row['corpus']}/K={row['k']}/{measure}"
                        self.writer.add_scalar(tag, float(row[measure]), row["step"])

    @contextmanager
    def _spared(self) -> Iterator[None]:
        """Keeps the training alive when curves cannot be written."""
        try:
            yield
        except OSError as error:
            self.writer = None
            log.warning("no more curves for TensorBoard: they cannot be written (%s)", error)
