"""Defers signals that ask a training to stop until nothing is lost."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Sent by batch systems before they kill a job, and by Ctrl-C."""


class StopSignals:
    """Context that defers `SIGNALS`. Several signals count as one, because torchrun repeats those that a batch system
    sends to all processes.

    Attributes:
        asked: whether a signal has arrived.
    """

    def __init__(self) -> None:
        self._first: int = signal.SIGTERM  # used if only another process was asked
        self.asked = False

    def __enter__(self) -> StopSignals:
        self.asked = False
        heeded = (number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)
        self._former = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def take_effect(self) -> None:
        """Delivers the first signal to its original handler."""
        signal.signal(self._first, self._former.get(self._first, signal.SIG_DFL))
        signal.raise_signal(self._first)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._first = True, number
