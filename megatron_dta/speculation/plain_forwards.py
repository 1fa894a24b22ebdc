"""Counts the forwards that the same samples would have taken without drafts."""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Before(NamedTuple):
    """The state of a response when one of its samples begins.

    tokens: generated tokens so far. end: the forward in which the previous sample of the response would have ended
    without drafts; None for the first sample.
    """

    tokens: int = 0
    end: int | None = None


NOTHING_BEFORE = Before()


class PlainForwards:
    """Simulates decoding without drafts: one token of each live sample in a forward.

    A sample begins with the phase, in the place of a finished response, or where the sample that it continues ended. If
    it begins with the phase, the forwards that have run without it, while prompts were computed, come first.
    """

    def __init__(self) -> None:
        self.forwards = 0  # forwards of the phase that have run
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
