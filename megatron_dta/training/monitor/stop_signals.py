"""Handles signals that end a run after its current step, with its state saved.

Schedulers send SIGTERM or SIGUSR1 before a time limit or a preemption; Ctrl-C sends SIGINT. A second Ctrl-C ends the
process at once if it comes more than a second after the first. (torchrun forwards the first one.) So does any second
signal while the run waits for a function of the user, since the step may never end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dta.common import slow_calls

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Exit status of a program that Ctrl-C ended, by the convention of shells; it also ends the calling script.
INTERRUPTED = 128 + signal.SIGINT


def kept_signals() -> list[int]:
    """The SIGINTs and SIGTERMs that come from now on. Unlike ``Event.set``, their handler may interrupt itself."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    return signals


class StopSignals:
    """Records the stop signal that this process received.

    Attributes:
        name: name of the first signal, such as SIGTERM; None if there was none.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._first_at: dict[int, float] = {}

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
        is_waiting = slow_calls.is_waiting()
        first = min(self._first_at.values(), default=now) if is_waiting else self._first_at.get(signal.SIGINT, now)
        if (is_waiting or number == signal.SIGINT) and now > first + 1:
            raise KeyboardInterrupt
        if number not in self._first_at:
            self._first_at[number] = now
            # os.write is safe in a signal handler; print is not, since the signal may interrupt another print.
            if number == signal.SIGINT:
                os.write(2, b"\nCtrl-C: the run ends after this step and is saved; press it again to end at once\n")
            elif is_waiting:
                line = "the run ends after this step, which waits for a function; a second signal ends it at once"
                os.write(2, f"{name}: {line}\n".encode())
        self.name = self.name or name
