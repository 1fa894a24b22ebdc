"""Gives each running request a slot for its states, if the model has layers with a recurrence.

A request's state belongs to exactly its computed tokens, so prefixes are not shared: every request computes its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.model import AttentionContext, Model
from megatron_dta.model.recurrent.decode_states import DecodeStates
from megatron_dta.sampling.engines.in_process.scheduler import Prefix, Request, Scheduler

_FIRST_SLOTS = 8


class UnsharedScheduler(Scheduler):
    """A scheduler whose requests compute their whole contexts."""

    def _find_prefix(self, request: Request) -> Prefix:
        return Prefix([], None, 0, False)


class RowStates:
    """The states of the running requests of an engine.

    Attributes:
        is_used: whether the model has states; without them nothing is done.
        scheduler: class of the scheduler for such requests.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._layers = {number: shape for part in model.model_chunks for number, shape in part.recurrent_layers.items()}
        # Ranks of a pipeline without such layers schedule like the others.
        self.is_used = model.config.experimental_attention_variant is not None
        self.scheduler = UnsharedScheduler if self.is_used else Scheduler
        self.clear()

    def clear(self) -> None:
        """Drop all states."""
        self._slots: dict[Request, int] = {}
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
        missing = [row for row in rows if row not in self._slots]
        if len(missing) > len(self._free):
            total = max(_FIRST_SLOTS, 2 * self._states.num_slots, self._states.num_slots + len(missing))
            self._free += range(self._states.num_slots, total)
            self._states.grow(total)
        for row in missing:
            self._slots[row] = self._free.pop()
        slots = [self._slots[row] for row in rows]
        uses_kernels = self._model.model_chunks[0].has_fused_layers
        context.path_states = self._states.of_pass(slots, starts, counts, uses_kernels)

    def release(self, row: Request) -> None:
        """Free the slot of a request that has ended."""
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._free.append(slot)
