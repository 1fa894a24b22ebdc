"""Detects degenerate samples: endless repetition or noise.

Two criteria use the generated tokens alone:

- **loop**: the last tokens repeat one block of up to ``_LONGEST_BLOCK`` tokens, at least four times and for at least
  ``_LOOP_TOKENS`` tokens;
- **noise**: at least 95% of the last ``_NOISE_TOKENS`` tokens are distinct. Normal text repeats its common words: in
  3000 recorded samples of reasoning, code and agents no normal sample exceeded 0.88, and degenerate ones reached 1.0.

Degenerate samples run to the length cap and noise cannot be drafted, so they determine how long a rollout takes.
Stopping them changes the samples, as a length cap does, so it is off by default.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LONGEST_BLOCK = 64
_LOOP_TOKENS = 256
_LOOP_BLOCKS = 4
_NOISE_TOKENS = 128
_NOISE_SHARE = 0.95


class DegenerateDetector:
    """Detects degeneration in one sample, token by token, with a state of a few hundred numbers."""

    def __init__(self) -> None:
        self._periods = np.arange(1, _LONGEST_BLOCK + 1)
        self._needed = np.maximum(_LOOP_TOKENS, _LOOP_BLOCKS * self._periods) - self._periods
        self._same = np.zeros(_LONGEST_BLOCK, np.int64)  # run length of tokens equal to the one a period before
        self._recent = np.full(_NOISE_TOKENS, -1, np.int64)  # ring of the last tokens
        self._counts: dict[int, int] = {}
        self._length = 0

    def feed(self, tokens: Sequence[int] | np.ndarray) -> int | None:
        """Add tokens. Returns how many it took for the sample to become degenerate, or None."""
        for i, token in enumerate(np.asarray(tokens).tolist()):
            if self._add(token):
                return i + 1
        return None

    def _add(self, token: int) -> bool:
        at = self._length % _NOISE_TOKENS
        equal = self._recent[(at - self._periods) % _NOISE_TOKENS] == token
        self._same = np.where(equal, self._same + 1, 0)
        old = int(self._recent[at])
        if old >= 0:
            self._counts[old] -= 1
            if not self._counts[old]:
                del self._counts[old]
        self._counts[token] = self._counts.get(token, 0) + 1
        self._recent[at] = token
        self._length += 1
        noise = self._length >= _NOISE_TOKENS and len(self._counts) >= _NOISE_SHARE * _NOISE_TOKENS
        return noise or bool((self._same >= self._needed).any())
