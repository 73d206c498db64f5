"""Signals that ask a training to stop: heard at once, followed where nothing is lost."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""What batch systems send before they kill, and Ctrl-C."""


class StopSignals:
    """Puts `SIGNALS` off while it is entered; several are one, for torchrun repeats what a batch system sent to all.

    Attributes:
        asked: whether one has come.
    """

    def __init__(self) -> None:
        self._first: int = signal.SIGTERM  # in effect where only another process was asked
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
        """Does what the first signal would have done without this class."""
        signal.signal(self._first, self._former.get(self._first, signal.SIG_DFL))
        signal.raise_signal(self._first)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._first = True, number
