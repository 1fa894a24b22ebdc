"""Gives each request a slot for its states, if the model has layers with a recurrence.

A state belongs to exactly the tokens that were computed, so a prefix can be reused only where a request has stopped.
A request continues its finished parent, or begins with the context that another one has computed for all requests with
that context. It gets a copy of the state as well as of the pages. Other prefixes are computed again.

A pass does not write the states of rows with drafts. Once it is known how many drafted tokens are kept, their states
are continued by that many tokens (``commit``). A captured burst (``cuda_graphs``) changes the states in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.hybrid.decode_states import DecodeStates, PassStates, SteppedStates
from megatron_dta.core.model.kernel_types import upload
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.sampling.in_process.request import Prefix, Request
from megatron_dta.sampling.in_process.scheduler import Pass, Scheduler

_FIRST_SLOTS = 8


@dataclass
class StatePrefix(Prefix):
    """A prefix after which ``source`` has a state; None if the prefix is empty."""

    source: Request | None = None


class StateScheduler(Scheduler):
    """A scheduler whose requests reuse prefixes after which another request has a state.

    That is the whole computed part of a finished parent, or the context of a running request, all but its last token: a
    request that computes a context for which others wait stops there once.
    """

    def _is_covered(self, request: Request) -> bool:
        return False  # others may copy the state of a request that computes one token

    def _find_prefix(self, request: Request) -> StatePrefix:
        limit, end = request.num_tokens - 1, request.context_length - 1
        prefix, parent = StatePrefix(request.table[:0], 0, False), request.parent
        first = self._pending.get(request.context_digest)
        sources = [(first, end)] if first is not None and first.num_computed_tokens == end else []
        if parent is not None and not parent.is_running:
            sources.append((parent, min(request.common_with_parent, limit)))
        for source, most in sources:
            length = 0 if source.has_lost_state else source.num_computed_tokens
            if prefix.length < length <= most:
                prefix = StatePrefix(source.table[: -(-length // request.page_size)], length, False, source)
        prefix.is_pending = first is not None and max(first.num_computed_tokens, prefix.length) < end
        return prefix

    def finish(self, *requests: Request) -> None:
        super().finish(*requests)
        # There is room for as many states of held requests as of running ones (``cache_size``).
        while self.num_held > self.max_requests and self._evict(with_children=False):
            pass

    def _run_chunk(self, plan: Pass, request: Request, budget: int) -> int:
        missing = request.context_length - 1 - request.num_computed_tokens
        if missing > 0 and self.pool.is_expected(request.context_digest):
            budget = min(budget, missing)
        return super()._run_chunk(plan, request, budget)

    def _admit(self, request: Request, prefix: StatePrefix, plan: Pass) -> bool:
        if not self.running:
            # A request that runs alone must fit, with its whole prefix or without it.
            self._make_room(-(-request.num_tokens // request.page_size))
            prefix = self._find_prefix(request)
        # A source that is admitted in this pass too has no state yet; its own source has the same.
        request.state_source = prefix.source and (prefix.source.state_source or prefix.source)
        return super()._admit(request, prefix, plan)


class _RowState(NamedTuple):
    """A request's slot, and how many tokens its state has seen."""

    slot: int
    num_tokens: int


class RowStates:
    """The states of the requests of an engine.

    Attributes:
        is_used: whether the model has states; without them nothing is done.
        scheduler: class of the scheduler for such requests.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._layers = {number: shape for part in model.model_chunks for number, shape in part.recurrent_layers.items()}
        # Ranks of a pipeline without such layers schedule like the others.
        self.is_used = model.config.mixer is not None and model.config.mixer.is_recurrent
        self.scheduler = StateScheduler if self.is_used else Scheduler
        self.clear()

    def clear(self) -> None:
        """Drop all states."""
        self._by_row: dict[Request, _RowState] = {}
        self._free: list[int] = []
        self._states: DecodeStates | None = None
        self._tentative: tuple[PassStates, list[Request]] | None = None
        # Rows of the last burst.
        self._advanced: list[Request] = []

    def attach(
        self,
        context: AttentionContext,
        rows: Sequence[Request],
        starts: np.ndarray,
        counts: np.ndarray,
        drafted: np.ndarray,
    ) -> None:
        """Let ``context`` read and write the states of the pass's ``rows``, in the order of its tokens.

        Args:
            starts, counts, drafted: for each row, the number of its computed tokens, that of its tokens in the pass,
                and how many of these are drafted.
        """
        if not self.is_used:
            return
        slots, tentative = self._slots(rows, starts, np.where(drafted, 0, counts)), np.flatnonzero(drafted)
        uses_kernels, states = self._model.model_chunks[0].has_fused_layers, self._states
        if uses_kernels and counts.max() == 1 and not len(tentative):
            on_device = upload([slots, starts], states.device)
            context.path_states = SteppedStates(states.addresses, states.layer_rows, *on_device)
            return
        context.path_states = PassStates(states, slots, starts, counts, uses_kernels, tentative.tolist())
        self._tentative = (context.path_states, [rows[i] for i in tentative]) if len(tentative) else None

    def for_burst(
        self, rows: Sequence[Request], starts: np.ndarray, steps: np.ndarray
    ) -> tuple[DecodeStates, np.ndarray] | None:
        """The states and each row's slot for a burst in which row i appends ``steps[i]`` tokens, one in each pass."""
        if not self.is_used:
            return None
        slots, self._advanced = self._slots(rows, starts, steps), list(rows)
        return self._states, slots

    def _slots(self, rows: Sequence[Request], starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Slots of ``rows``, whose states have seen ``starts[i]`` tokens and then see ``counts[i]`` more."""
        if self._states is None:
            parameter = next(self._model.parameters())
            self._states = DecodeStates(self._layers, parameter.dtype, parameter.device)
        self._make_room(sum(row not in self._by_row for row in rows))
        states = [self._state_of(row, start) for row, start in zip(rows, starts.tolist(), strict=True)]
        self._by_row |= {
            row: _RowState(state.slot, state.num_tokens + count)
            for row, state, count in zip(rows, states, counts.tolist(), strict=True)
        }
        # Of requests that have lost their pages nothing can be continued.
        self._drop([row for row in self._by_row if not (row.is_running or row.num_pages)])
        return np.array([state.slot for state in states])

    def _drop(self, rows: Sequence[Request]) -> None:
        self._free += [self._by_row.pop(row).slot for row in rows]

    def commit(self) -> None:
        """Continue the states of the last pass's rows with drafts to the tokens that the scheduler has kept.

        A row that has ended before its burst did has a state past its end, which nothing can continue.
        """
        lost = [row for row in self._advanced if row.num_computed_tokens != self._by_row[row].num_tokens]
        self._advanced = []
        for row in lost:
            row.has_lost_state = True
        self._drop(lost)
        if self._tentative is None:
            return
        (states, rows), self._tentative = self._tentative, None
        seen = [max(0, row.num_computed_tokens - self._by_row[row].num_tokens) for row in rows]
        states.commit(seen)
        for row, count in zip(rows, seen, strict=True):
            self._by_row[row] = _RowState(self._by_row[row].slot, self._by_row[row].num_tokens + count)

    def _make_room(self, count: int) -> None:
        if count > len(self._free):
            total = max(_FIRST_SLOTS, 2 * self._states.num_slots, self._states.num_slots + count)
            self._free += range(self._states.num_slots, total)
            self._states.grow(total)

    def _state_of(self, row: Request, start: int) -> _RowState:
        """The state of a request that continues after ``start`` tokens; its source's state is copied if it is new."""
        state, (source, row.state_source) = self._by_row.get(row), (row.state_source, None)
        if state is not None and state.num_tokens == start:
            return state
        state = _RowState(self._free.pop() if state is None else state.slot, start)
        if start:
            origin = self._by_row[source]
            if origin.num_tokens != start:
                raise AssertionError(f"a state of {origin.num_tokens} tokens cannot be continued after {start}")
            self._states.copy(origin.slot, state.slot)
        return state
