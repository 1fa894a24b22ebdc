"""Appends sampled tokens to requests and finds their ends."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from megatron_dta.sampling.degenerate import DegenerateDetector
from megatron_dta.sampling.in_process.request import Request


class Endings:
    """Ends requests at a token of ``append``'s ``ends``, at their length, and where they degenerate.

    Args:
        stops_degenerate: see ``EngineSettings.stop_degenerate``.

    Attributes:
        stopped: number of requests that ended because they had degenerated.
    """

    def __init__(self, stops_degenerate: bool) -> None:
        self.stopped, self._stops_degenerate = 0, stops_degenerate
        self._detectors: dict[Request, DegenerateDetector] = {}

    def append(
        self, sequence: Request, tokens: np.ndarray, logprobs: np.ndarray, draft: np.ndarray | None, ends: Set[int]
    ) -> bool:
        """Append the sampled tokens up to the first one that differs from the draft (None: no check). Returns whether
        the request has ended."""
        most, values = len(sequence.tokens) - sequence.num_tokens, tokens.tolist()
        guesses = values if draft is None else draft.tolist()
        if draft is None and not self._stops_degenerate and len(values) < most and ends.isdisjoint(values):
            sequence.extend(tokens, logprobs)
            return False
        count, is_end = 0, False
        for token in values:
            count += 1
            is_end = token in ends or count == most or self._degenerates(sequence, token)
            if is_end or (count <= len(guesses) and token != guesses[count - 1]):
                break
        sequence.extend(tokens[:count], logprobs[:count])
        return is_end

    def forget(self, sequence: Request) -> None:
        """``sequence`` has ended."""
        self._detectors.pop(sequence, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._detectors.clear()

    def _degenerates(self, sequence: Request, token: int) -> bool:
        if not self._stops_degenerate:
            return False
        detector = self._detectors.setdefault(sequence, DegenerateDetector())
        stops = detector.feed(np.array([token])) is not None
        self.stopped += stops
        return stops
