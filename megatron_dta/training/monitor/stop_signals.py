"""Signals that end a run after the step it is in, with its state saved, instead of ending the process.

SIGTERM and SIGUSR1 are what schedulers send before a time limit or a preemption, SIGINT is Ctrl-C. A second Ctrl-C,
more than a second later (torchrun passes the first one on), ends the process at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# What shells give a program that Ctrl-C has ended, so that the script around it ends, too.
INTERRUPTED = 128 + signal.SIGINT


class StopSignals:
    """Which signal this process has got.

    Attributes:
        name: of the first one, such as SIGTERM; None while there is none.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._interrupted_at: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take the signals within the block; the handlers from before come back."""
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
                # Not print: the handler may have come between two halves of one.
                os.write(2, b"\nCtrl-C: the run ends after this step and is saved; once more ends it at once\n")
        self.name = self.name or name
