"""Lines that are told once for each model."""

from __future__ import annotations

import logging
import weakref

from transformers import PreTrainedModel

_told: weakref.WeakKeyDictionary[PreTrainedModel, set[str]] = weakref.WeakKeyDictionary()


def tell_once(model: PreTrainedModel, log: logging.Logger, line: str) -> None:
    """Logs a line as a warning, unless it was told of this model before."""
    lines = _told.setdefault(model, set())
    if line not in lines:
        lines.add(line)
        log.warning("%s", line)
