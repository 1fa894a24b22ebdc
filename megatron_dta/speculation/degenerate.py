"""When a sample has degenerated: it repeats itself without end, or its tokens are noise.

Two signs, both within the generated tokens alone:

- **a loop**: the last tokens are one block of up to ``_LONGEST_BLOCK`` tokens again and again, at least four times and
  for at least ``_LOOP_TOKENS`` tokens;
- **noise**: of the last ``_NOISE_TOKENS`` tokens, nineteen in twenty are different. Text repeats its common words: of
  3000 recorded samples of reasoning, code and agents none that was sane came above 0.88, and those that had fallen
  apart came to 1.0.

Degenerate samples run to the length cap, cannot be drafted when they are noise, and so decide how long a rollout takes.
Stopping them changes what is sampled (as a length cap does), hence it is off unless asked for.
"""

from __future__ import annotations

import numpy as np

_LONGEST_BLOCK = 64
_LOOP_TOKENS = 256
_LOOP_BLOCKS = 4
_NOISE_TOKENS = 128
_NOISE_SHARE = 0.95


class DegenerateDetector:
    """Follows one sample; state of a few hundred numbers."""

    def __init__(self) -> None:
        self._periods = np.arange(1, _LONGEST_BLOCK + 1)
        self._needed = np.maximum(_LOOP_TOKENS, _LOOP_BLOCKS * self._periods) - self._periods
        self._same = np.zeros(_LONGEST_BLOCK, np.int64)  # how long each token has been the one a period before
        self._recent = np.full(_NOISE_TOKENS, -1, np.int64)  # ring of the last tokens
        self._counts: dict[int, int] = {}
        self._length = 0

    def feed(self, tokens: np.ndarray) -> int | None:
        """Add tokens; the number of them up to and with the one that makes the sample degenerate, or None."""
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


def degenerate_length(tokens: np.ndarray) -> int | None:
    """After how many of a whole sample's tokens (int [T]) ``DegenerateDetector`` stops it; None: never."""
    tokens = np.asarray(tokens)
    ends = []
    for period in range(1, min(_LONGEST_BLOCK, len(tokens) - 1) + 1):
        needed = max(_LOOP_TOKENS, _LOOP_BLOCKS * period) - period
        different = np.flatnonzero(tokens[period:] != tokens[:-period])
        begins = np.append(0, different + 1)
        runs = np.append(different, len(tokens) - period) - begins
        long = np.flatnonzero(runs >= needed)
        if len(long):
            ends.append(int(begins[long[0]]) + period + needed)
    if len(tokens) >= _NOISE_TOKENS:
        order = np.argsort(tokens, kind="stable")
        last = np.full(len(tokens), -1)
        again = np.flatnonzero(tokens[order[1:]] == tokens[order[:-1]]) + 1
        last[order[again]] = order[again - 1]
        # A token is the first of its kind in the windows that begin after its last occurrence and not after itself.
        windows = len(tokens) - _NOISE_TOKENS + 1
        change = np.zeros(len(tokens) + 1, np.int64)
        position = np.arange(len(tokens))
        first = np.maximum(last + 1, position - _NOISE_TOKENS + 1)
        np.add.at(change, np.maximum(first, 0), 1)
        np.add.at(change, position + 1, -1)
        noisy = np.flatnonzero(np.cumsum(change)[:windows] >= _NOISE_SHARE * _NOISE_TOKENS)
        if len(noisy):
            ends.append(int(noisy[0]) + _NOISE_TOKENS)
    return min(ends, default=None)
