"""Plans and launches the bursts of an engine, one ahead of the tokens that the host has read.

Between two bursts the host appends tokens, frees and reserves pages and packs the inputs of the next passes, while the
device would wait. Everything but the first tokens of the next burst is known before, and these are on the device
already: the next burst is therefore launched before the host reads the tokens of the last one.

The rows of a burst that is launched ahead are those whose length does not end before it, and waiting requests of which
one token is to be computed, such as children of a node: they take the seats of those that end. Another row may turn out
to have ended with an end of sequence; what it draws afterwards is dropped, and what it writes is past its end, in
pages that no later pass reads there before it has written them itself. Nothing is launched ahead in five
cases: a waiting request with more to compute comes next; a page is missing; there are drafts, which depend on the
tokens; the model has states, which a row must not continue beyond its end; or a burst is one pass, and its caller
relies on passes one at a time.

The decisions depend only on the scheduler, so all ranks of a tensor group make the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.sampling.in_process.cuda_graphs import Burst, DecodeSteps, RunningBurst, noise_of
from megatron_dta.sampling.in_process.drafting import NO_DRAFT
from megatron_dta.sampling.in_process.request import Request
from megatron_dta.sampling.in_process.row_states import RowStates
from megatron_dta.sampling.in_process.scheduler import Pass, Scheduler
from megatron_dta.sampling.params import SamplingParams


@dataclass(frozen=True)
class Drawn:
    """The draws of passes.

    Attributes:
        rows: the requests that get tokens.
        tokens, logprobs: int32 and float64 [n], row by row.
        counts: int64 [rows], how many of these each row has.
        guesses: int32 [n], what a draft says of each token, -1 for each row's last one; None if no row has a draft.
    """

    rows: list[Request]
    tokens: np.ndarray
    logprobs: np.ndarray
    counts: np.ndarray
    guesses: np.ndarray | None = None

    def keep(self, limits: np.ndarray, ends: Set[int]) -> tuple[np.ndarray, np.ndarray]:
        """How many tokens each request keeps, int64 [rows], and whether it ends with them: at a token of ``ends``, at
        its limit, or where it degenerates. It keeps none after the first token that differs from its draft."""
        begins = self.counts.cumsum() - self.counts
        is_end = np.zeros(len(self.tokens), bool)
        for end in ends:  # np.isin takes longer for a few
            is_end |= self.tokens == end
        is_last = is_end.copy()
        is_last[begins + self.counts - 1] = True
        if self.guesses is not None:
            is_last |= self.guesses != self.tokens
        last = is_last.nonzero()[0]
        counts = np.minimum(last[last.searchsorted(begins)] - begins + 1, limits)
        has_ended = (counts == limits) | is_end[begins + counts - 1]
        for i, row in enumerate(self.rows):
            if row.detector is not None:
                length = row.detector.feed(self.tokens[begins[i] : begins[i] + counts[i]])
                counts[i], has_ended[i] = length or counts[i], has_ended[i] or length is not None
        return counts, has_ended


@dataclass(frozen=True)
class Flight:
    """A burst that was launched.

    Attributes:
        rows: its requests; those that have ended since then get none of its tokens.
        steps: int64 [rows], see ``Burst``.
        num_passes: number of its passes.
        running: what the device draws.
        columns: tokens of the first pass after which something is drawn; None: all.
    """

    rows: list[Request]
    steps: np.ndarray
    num_passes: int
    running: RunningBurst
    columns: np.ndarray | None = None

    def live(self) -> list[int]:
        """The rows that have not ended."""
        return [i for i, row in enumerate(self.rows) if row.is_running]

    def drawn(self) -> Drawn:
        """What was drawn for the rows that have not ended; waits for the device."""
        live, (tokens, logprobs) = self.live(), self.running.read()
        steps = self.steps[live]
        is_run = np.arange(self.num_passes) < steps[:, None]
        return Drawn([self.rows[i] for i in live], tokens.T[live][is_run], logprobs.T[live][is_run], steps)


@dataclass(frozen=True)
class Launcher:
    """Launches bursts of one phase of sampling.

    Attributes:
        steps: runs them.
        scheduler: reserves their pages.
        states: the states of the rows.
        cache: returns the cache, grown to all pages of the pool, after the page copies of a pass.
        params, iteration: see ``RolloutEngine.start``.
    """

    steps: DecodeSteps
    scheduler: Scheduler
    states: RowStates
    cache: Callable[[Pass], PagedCache]
    params: SamplingParams
    iteration: int

    def first(self, plan: Pass, drafts: list[np.ndarray], most: int) -> Flight:
        """A burst of up to ``most`` passes of rows whose tokens the host knows; one pass if there are drafts or parts
        of prompts. What is drawn within the parts is not used, so their noise is 0."""
        rows, steps = plan.rows, self.scheduler.max_burst_steps(plan.rows, most)
        pieces = []
        for row, draft in zip(rows, drafts, strict=True):
            pieces += [row.tokens[row.num_computed_tokens : row.num_tokens], draft]
        widths = np.array([len(draft) + 1 for draft in drafts])
        counts = widths + plan.counts - 1
        starts = np.array([row.num_computed_tokens for row in rows])
        drawn = noise_of(rows, drafts, self.params, self.iteration, int(steps.max()))
        noise = np.zeros((len(drawn), int(counts.sum())))
        columns = np.repeat(np.cumsum(counts) - np.cumsum(widths), widths) + np.arange(drawn.shape[1])
        noise[:, columns] = drawn
        states = self.states.for_burst(rows, starts, steps)
        burst = Burst(np.concatenate(pieces), starts, counts, [row.table for row in rows], steps, noise, states)
        return Flight(rows, steps, len(noise), self.steps.launch(self.cache(plan), burst, self.params), columns)

    def ahead(self, last: Flight, most: int) -> Flight | None:
        """The burst after ``last``, whose tokens the host does not know; None if it must know them."""
        if not self.steps.runs_ahead or self.states.is_used:
            return None
        passes, scheduler = last.num_passes, self.scheduler
        tokens_left = np.array([len(row.tokens) - row.num_tokens for row in last.rows])
        live = np.array([row.is_running for row in last.rows])
        goes_on = live & (tokens_left > passes)
        if live.sum() < len(scheduler.running) or (last.steps[goes_on] < passes).any():
            return None
        columns = np.flatnonzero(goes_on)
        rows = [last.rows[i] for i in columns]
        steps = scheduler.max_burst_steps(rows, most, passes)
        if (steps < np.minimum(most, tokens_left[columns] - passes)).any():
            return None
        plan = scheduler.admit_ahead(int((live & ~goes_on).sum()), self.steps.most_tokens - len(rows))
        if plan is None or not (rows or plan.rows):
            return None
        steps = np.concatenate([steps, scheduler.max_burst_steps(plan.rows, most)])
        is_known = np.arange(len(steps)) >= len(rows)
        rows += plan.rows
        begins = np.where(is_known, 0, passes)
        starts = np.array([row.num_computed_tokens for row in rows]) + begins
        noise = noise_of(rows, [NO_DRAFT] * len(rows), self.params, self.iteration, int(steps.max()), begins)
        tokens = np.array([row.tokens[row.num_computed_tokens] for row in plan.rows], np.int64)
        tables, counts = [row.table for row in rows], np.ones(len(rows), np.int64)
        burst = Burst(tokens, starts, counts, tables, steps, noise, follows=(last.running, columns))
        return Flight(rows, steps, len(noise), self.steps.launch(self.cache(plan), burst, self.params))
