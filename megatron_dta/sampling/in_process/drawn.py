"""What passes have drawn for the rows of an engine, and how much of it each request keeps."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from megatron_dta.sampling.in_process.request import Request

_NO_GUESS = np.full(1, -1, np.int32)


@dataclass(frozen=True)
class Drawn:
    """The draws of passes.

    Attributes:
        rows: the requests that get tokens.
        tokens, logprobs: int32 and float64 [n], row by row.
        counts: int64 [rows], how many of these each row has.
        drafts: int32, guesses at the tokens of each row but the last one; None if no row has a draft.
    """

    rows: list[Request]
    tokens: np.ndarray
    logprobs: np.ndarray
    counts: np.ndarray
    drafts: list[np.ndarray] | None = None

    def keep(self, ends: Set[int]) -> tuple[np.ndarray, np.ndarray]:
        """How many tokens each request keeps, int64 [rows], and whether it ends with them: at a token of ``ends``, at
        its length, or where it degenerates. It keeps none after the first token that differs from its draft."""
        limits = np.array([len(row.tokens) - row.num_tokens for row in self.rows])
        offsets, begins = np.arange(len(self.tokens)), self.counts.cumsum() - self.counts
        is_end = np.isin(self.tokens, list(ends))
        is_last = is_end.copy()
        is_last[begins + self.counts - 1] = True
        if self.drafts is not None:
            is_last |= np.concatenate([part for draft in self.drafts for part in (draft, _NO_GUESS)]) != self.tokens
        last = np.minimum.reduceat(np.where(is_last, offsets, len(offsets)), begins)
        counts = np.minimum(last - begins + 1, limits)
        has_ended = (counts == limits) | is_end[begins + counts - 1]
        for i, row in enumerate(self.rows):
            if row.detector is not None:
                length = row.detector.feed(self.tokens[begins[i] : begins[i] + counts[i]])
                counts[i], has_ended[i] = length or counts[i], has_ended[i] or length is not None
        return counts, has_ended
