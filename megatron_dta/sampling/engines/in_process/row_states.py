"""Gives each request a slot for its states, if the model has layers with a recurrence.

A state belongs to exactly the tokens that were computed, so a prefix can be reused only where a request has stopped: a
request continues its finished parent's state, of which it gets a copy beside the parent's pages. Other prefixes are
computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_dta.model import AttentionContext, Model
from megatron_dta.model.recurrent.decode_states import DecodeStates
from megatron_dta.sampling.engines.in_process.scheduler import Pass, Prefix, Request, Scheduler

_FIRST_SLOTS = 8


class StateScheduler(Scheduler):
    """A scheduler whose requests reuse the whole computed part of their finished parents, or nothing."""

    def _find_prefix(self, request: Request) -> Prefix:
        parent = request.parent
        length = 0 if parent is None or parent.is_running else parent.num_computed_tokens
        if parent is None or not 0 < length <= min(request.common_with_parent, request.num_tokens - 1):
            return Prefix([], None, 0, False)
        full, rest = divmod(length, request.page_size)
        return Prefix(parent.pages[:full], int(parent.table[full]) if rest else None, length, False)

    def _admit(self, request: Request, prefix: Prefix, plan: Pass) -> bool:
        if not self.running:
            # Alone, a request must fit with all its prefix or with none of it.
            self._make_room(-(-request.num_tokens // request.page_size))
            prefix = self._find_prefix(request)
        return super()._admit(request, prefix, plan)


class _Place(NamedTuple):
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
        self.is_used = model.config.experimental_attention_variant is not None
        self.scheduler = StateScheduler if self.is_used else Scheduler
        self.clear()

    def clear(self) -> None:
        """Drop all states."""
        self._places: dict[Request, _Place] = {}
        self._free: list[int] = []
        self._states: DecodeStates | None = None

    def attach(
        self, context: AttentionContext, rows: Sequence[Request], starts: np.ndarray, counts: np.ndarray
    ) -> None:
        """Let ``context`` read and write the states of the pass's ``rows``, in the order of its tokens."""
        if not self.is_used:
            return
        if self._states is None:
            parameter = next(self._model.parameters())
            self._states = DecodeStates(self._layers, parameter.dtype, parameter.device)
        self._make_room(sum(row not in self._places for row in rows))
        places = [self._place(row, start) for row, start in zip(rows, starts.tolist(), strict=True)]
        self._places |= {
            row: _Place(place.slot, place.num_tokens + count)
            for row, place, count in zip(rows, places, counts.tolist(), strict=True)
        }
        # Of requests that have lost their pages nothing can be continued.
        for row in [row for row in self._places if not (row.is_running or row.num_pages)]:
            self._free.append(self._places.pop(row).slot)
        uses_kernels = self._model.model_chunks[0].has_fused_layers
        context.path_states = self._states.of_pass([place.slot for place in places], starts, counts, uses_kernels)

    def _make_room(self, count: int) -> None:
        if count > len(self._free):
            total = max(_FIRST_SLOTS, 2 * self._states.num_slots, self._states.num_slots + count)
            self._free += range(self._states.num_slots, total)
            self._states.grow(total)

    def _place(self, row: Request, start: int) -> _Place:
        """The place of a request that continues behind ``start`` tokens; its parent's state is copied if it is new."""
        place = self._places.get(row)
        if place is not None and place.num_tokens == start:
            return place
        place = _Place(self._free.pop() if place is None else place.slot, start)
        if start:
            parent = self._places[row.parent]
            if parent.num_tokens != start:
                raise AssertionError(f"a state of {parent.num_tokens} tokens cannot be continued behind {start}")
            self._states.copy(parent.slot, place.slot)
        return place
