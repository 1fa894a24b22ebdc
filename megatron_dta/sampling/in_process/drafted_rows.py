"""Runs passes with drafts of the same rows one after the other, with little of the host's work between two of them.

The drafts of a pass depend on the tokens of the last one, so the device waits for the host in between. Here the host
makes the drafts, packs the pass and compares what was drawn on arrays of all rows. Everything else (``InProcessEngine``
enters the tokens into the requests and tells the drafting what the pass cost) is done while the next pass runs. When
another request may begin, a page is missing or there is no draft, the engine goes on with the requests.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_dta.sampling.in_process.bursts import Drawn, Launcher
from megatron_dta.sampling.in_process.cuda_graphs import Burst, noise_of
from megatron_dta.sampling.in_process.drafting import NO_DRAFT, Drafting
from megatron_dta.sampling.in_process.request import Request
from megatron_dta.sampling.in_process.scheduler import Pass

# Positions whose noise is computed at once, and tokens for which pages are reserved beyond a draft.
_NOISE_AHEAD, _PAGES_AHEAD = 64, 64


class DraftedRows:
    """The running requests, of which all tokens but the last one are computed.

    Args:
        most_tokens: maximum number of tokens of a pass.
        take: enters what a pass has drawn, given the graphs captured so far and whether the next pass has been
            launched, for which its rows keep pages. Returns those that have ended.

    Attributes:
        rows: those that go on with drafts; none if the next pass is planned from the requests.
    """

    def __init__(
        self, launcher: Launcher, drafting: Drafting, most_tokens: int, take: Callable[..., list[Request]]
    ) -> None:
        self.rows = rows = list(launcher.scheduler.running)
        if any(row.num_tokens - row.num_computed_tokens > 1 for row in rows):
            self.rows = rows = []
        self._launcher, self._drafting, self._take = launcher, drafting, take
        self._most_tokens = min(most_tokens, launcher.steps.most_tokens)
        self._ends, self._drawn, self._captures, self._ended = launcher.params.eos_ids, None, 0, []
        self._num_tokens = np.array([row.num_tokens for row in rows])
        self._limits = np.array([len(row.tokens) for row in rows])
        self._last = np.array([row.tokens[row.num_tokens - 1] for row in rows], np.int32)
        self._noise_begin = self._num_tokens
        self._noise = np.zeros((len(rows), 0))
        self._positions = np.array([row.num_pages * row.page_size for row in rows])
        self._tables = [row.table for row in rows]

    def round(self) -> list[Request] | None:
        """Run a pass. Returns the requests that ended in the one before it, or in this one if none is left; None if no
        pass was run and none has ended."""
        drawn = self._run()
        if drawn is not None:
            self._drawn, self._captures = drawn, self._launcher.steps.captures
        if drawn is None or not self.rows:
            self._enter(False)
            self.rows = []
        ended, self._ended = self._ended, []
        return ended if ended or drawn is not None else None

    def _enter(self, runs_on: bool) -> None:
        """Enter what the last pass has drawn."""
        if self._drawn is not None:
            self._ended += self._take(self._drawn, self._captures, runs_on)
        self._drawn = None

    def _run(self) -> Drawn | None:
        drafting, launcher, n = self._drafting, self._launcher, len(self.rows)
        waits = launcher.scheduler.waiting and not launcher.scheduler.is_full
        if waits or not n or not drafting.asks_next or not drafting.wants(n):
            return None
        drafts, lengths = drafting.propose(self.rows, self._limits - self._num_tokens - 1)
        counts = lengths + 1
        ends = counts.cumsum()
        if ends[-1] == n or ends[-1] > self._most_tokens or not self._has_pages(self._num_tokens + counts - 1):
            return None
        columns = np.arange(int(counts.max()))
        is_run = columns < counts[:, None]
        inputs = np.concatenate([self._last[:, None], drafts[:, : len(columns) - 1]], axis=1)[is_run]
        guesses = np.append(inputs[1:], np.int32(-1))
        guesses[ends - 1] = -1
        noise, starts = self._noise_of(columns)[is_run][None], self._num_tokens - 1
        burst = Burst(inputs, starts, counts, self._tables, np.ones(n, np.int64), noise)
        running = launcher.steps.launch(launcher.cache(Pass()), burst, launcher.params)
        self._enter(True)
        self._fill_noise(3 * len(columns))  # of the next pass, which would wait for it
        (tokens,), (logprobs,) = running.read()
        drawn = Drawn(self.rows, tokens, logprobs, counts, guesses)
        kept, has_ended = drawn.keep(self._limits - self._num_tokens, self._ends)
        drafting.sampled(tokens[(columns < kept[:, None])[is_run]], np.append(0, kept.cumsum()))
        self._num_tokens, self._last = self._num_tokens + kept, tokens[ends - counts + kept - 1]
        if has_ended.any():
            self._keep((~has_ended).nonzero()[0])
        return drawn

    def _keep(self, kept: np.ndarray) -> None:
        """Go on with the rows number ``kept`` alone."""
        self.rows, self._tables = [self.rows[i] for i in kept], [self._tables[i] for i in kept]
        self._num_tokens, self._last, self._limits = self._num_tokens[kept], self._last[kept], self._limits[kept]
        self._noise, self._noise_begin = self._noise[kept], self._noise_begin[kept]
        self._positions = self._positions[kept]

    def _has_pages(self, ends: np.ndarray) -> bool:
        """Whether there are pages for all positions before ``ends``; reserves them."""
        for i in (ends > self._positions).nonzero()[0].tolist():
            row = self.rows[i]
            end = min(int(ends[i]) + _PAGES_AHEAD, len(row.tokens))
            self._positions[i] = self._launcher.scheduler.reserve_pages(row, end)
        return bool((ends <= self._positions).all())

    def _noise_of(self, columns: np.ndarray) -> np.ndarray:
        """Uniform numbers of the positions ``columns`` after each row's tokens, float64 [n, columns]."""
        self._fill_noise(len(columns))
        done = self._num_tokens - self._noise_begin
        return self._noise[np.arange(len(done))[:, None], done[:, None] + columns]

    def _fill_noise(self, most: int) -> None:
        """Compute the noise of at least ``most`` positions after each row's tokens."""
        if int((self._num_tokens - self._noise_begin).max()) + most > self._noise.shape[1]:
            params, steps = self._launcher.params, most + _NOISE_AHEAD
            ahead = self._num_tokens - [row.num_tokens for row in self.rows]  # their last tokens may not be entered yet
            none, self._noise_begin = [NO_DRAFT] * len(self.rows), self._num_tokens
            self._noise = noise_of(self.rows, none, params, self._launcher.iteration, steps, ahead).T
