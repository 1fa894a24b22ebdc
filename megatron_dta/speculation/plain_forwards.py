"""Counts the forwards that samples would have taken without drafts, beside those that are run."""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Before(NamedTuple):
    """Where a response stood when one of its samples began: generated tokens, and the forward that would have been its
    last so far without drafts, where another sample went before."""

    tokens: int = 0
    end: int | None = None


NOTHING_BEFORE = Before()


class PlainForwards:
    """How many forwards the samples of a step would have taken without drafts, one token of each in a forward.

    A sample begins with the phase, or in the place of a response that is over, or where the one that it goes on from
    has ended; in the first case behind the forwards that were run without it, while prompts were computed.
    """

    def __init__(self) -> None:
        self.forwards = 0  # of the phase, as they were run
        self._last = self._before = 0
        self._ends: list[int] = []

    @property
    def total(self) -> int:
        return self._before + self._last

    def begin_phase(self) -> None:
        self._before, self._last, self.forwards = self.total, 0, 0
        self._ends.clear()

    def start(self) -> int:
        return heapq.heappop(self._ends) if self._ends else self.forwards

    def end(self, forward: int) -> None:
        self._last = max(self._last, forward)
        heapq.heappush(self._ends, forward)
