"""Lets two pieces of work take turns, so that one computes while the other one's communication travels.

Each piece runs in a thread of its own, but only one of them at a time: it passes its turn on where it would wait for
communication, and continues when the other one has done the same or has ended. The order of all operations thus depends
on the two pieces alone. It is the same on all ranks whose pieces communicate at the same points, and both pieces launch
on one stream, so neither results nor the lifetime of memory depend on timing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


class _PartnerFailedError(Exception):
    """Ends a piece whose partner has failed."""


class Turn:
    """One of the two pieces, number 0 or 1."""

    def __init__(self, number: int, shared: _Shared) -> None:
        self._number, self._shared = number, shared

    def pass_on(self) -> None:
        """Let the other piece run until it passes its turn back or ends."""
        if not self._shared.has_ended[1 - self._number]:
            self._shared.give_to(1 - self._number)
            self.wait()

    def end_in_order(self) -> None:
        """If this piece is to end last, let the other one run to its end."""
        while self._shared.last == self._number and not self._shared.has_ended[1 - self._number]:
            self.pass_on()

    def wait(self) -> None:
        """Wait for this piece's turn."""
        self._shared.wait_for(self._number)


class _Shared:
    def __init__(self, last: int) -> None:
        self.last = last
        self._changed, self._owner = threading.Condition(), 0
        self.has_ended, self.has_failed = [False, False], False

    def give_to(self, number: int) -> None:
        with self._changed:
            self._owner = number
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._owner == number or self.has_failed)
        if self.has_failed:
            raise _PartnerFailedError("the other pass has failed")

    def run(self, number: int, piece: Callable[[Turn], None]) -> None:
        turn = Turn(number, self)
        try:
            turn.wait()
            piece(turn)
        except BaseException:
            self.has_failed = True
            raise
        finally:
            self.has_ended[number] = True
            self.give_to(1 - number)


class TurnRunner:
    """Runs pairs of pieces; holds the second thread.

    Args:
        device: of the pieces; on a GPU both use the caller's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._threads = device, ThreadPoolExecutor(max_workers=1, thread_name_prefix="turns")

    def run(self, first: Callable[[Turn], None], second: Callable[[Turn], None], last: int = 1) -> None:
        """Run both; ``first`` begins, in this thread. The error of a piece is raised once both have ended.

        Args:
            last: number of the piece whose ``end_in_order`` waits for the end of the other one.
        """
        shared = _Shared(last)
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def run_other() -> None:
            if stream is None:
                shared.run(1, second)
                return
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                shared.run(1, second)

        other = self._threads.submit(run_other)
        try:
            shared.run(0, first)
        except _PartnerFailedError:
            other.result()
            raise
        except BaseException:
            other.exception()
            raise
        other.result()

    def close(self) -> None:
        """End the second thread."""
        self._threads.shutdown()
