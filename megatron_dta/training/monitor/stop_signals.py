"""Handles signals that end a run after its current step, with its state saved.

Schedulers send SIGTERM or SIGUSR1 before a time limit or a preemption; Ctrl-C sends SIGINT. A second Ctrl-C ends the
process at once if it comes more than a second after the first. (torchrun forwards the first one.)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Exit status of a program that Ctrl-C ended, by the convention of shells; it also ends the calling script.
INTERRUPTED = 128 + signal.SIGINT


class StopSignals:
    """Records the stop signal that this process received.

    Attributes:
        name: name of the first signal, such as SIGTERM; None if there was none.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._interrupted_at: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle the signals within the block and restore the previous handlers afterwards."""
        before = {number: signal.signal(number, self._take) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: object) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if number == signal.SIGINT:
            if self._interrupted_at is not None and now > self._interrupted_at + 1:
                raise KeyboardInterrupt
            if self._interrupted_at is None:
                self._interrupted_at = now
                # os.write is safe in a signal handler; print is not, since the signal may interrupt another print.
                os.write(2, b"\nCtrl-C: the run ends after this step and is saved; press it again to end at once\n")
        self.name = self.name or name
