"""Answers minimum queries over ranges of an array in constant time, for many ranges at once (a sparse table).

Two sequences in depth-first order share the minimum of the prefixes that neighbours between them share. Range minima
therefore give the shared prefix of any pair of sequences.
"""

from __future__ import annotations

import numpy as np


class RangeMinimum:
    """Minima over ranges of ``values`` [n] of any ordered dtype; O(n log n) to build, O(1) per query."""

    def __init__(self, values: np.ndarray) -> None:
        count = len(values)
        levels = max(1, count.bit_length())
        #: table[w, i] = min(values[i : i + 2**w]), for ranges inside the array
        self._table = np.empty((levels, count), dtype=values.dtype)
        self._table[0] = values
        for level in range(1, levels):
            half = 1 << (level - 1)
            self._table[level] = self._table[level - 1]
            np.minimum(self._table[level - 1, :-half], self._table[level - 1, half:], out=self._table[level, :-half])
        #: _level[k]: the largest w with 2**w <= k
        self._level = np.frexp(np.arange(count + 1))[1] - 1

    def __call__(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """min(values[begin:end]) for arrays of equal shape, each with begin < end."""
        level = self._level[end - begin]
        return np.minimum(self._table[level, begin], self._table[level, end - (1 << level)])
