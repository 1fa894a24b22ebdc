"""Convolution and recurrence of one tree segment, with states that enter from ancestors and leave for later segments.

As in ``attention.segment_context``, two autograd functions are the only connection between segments. Forward: entry
states and rows are read from the pool, and those at the segment's open forks are written to it. Backward: the gradients
that later segments left at the open forks enter there; those of the entries are added to the ancestors' forks. The
backward of a segment is then an ordinary ``backward`` of its own graph, and a second forward writes the same values.

Between forward and backward only the inputs are kept and, for each run with children, its exit state. The backward
runs each level's recurrence again, from the deepest level up.

Legend: N tokens, E states from earlier segments, S rows (tokens, then W - 1 rows for each of the E states).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dta_kernels.recurrence.contract import Recurrence, Runs
from dta_kernels.recurrence.short_convolution import (
    PathLayout,
    short_convolution,
    short_convolution_gradients,
    sum_rows_by_source,
)
from dta_kernels.upload import upload
from megatron_dta.core.model.hybrid.path_states import NoTokens
from megatron_dta.core.model.hybrid.state_pool import StatePool
from megatron_dta.core.planning.segments.runs import SegmentRuns, SegmentStates


class _Level(NamedTuple):
    """``RunLevel`` on the device; ``tokens`` is None if they are all tokens of the segment in order."""

    tokens: Tensor | None
    runs: Runs
    entry: Tensor
    forks: Tensor
    states: slice


class SegmentTables:
    """``SegmentStates`` on the device."""

    def __init__(self, plan: SegmentStates, device: torch.device, uses_kernels: bool) -> None:
        self.num_entries, num_tokens = len(plan.entry_slots), len(plan.token_row)
        self.slots = slice(plan.slot, plan.slot + len(plan.kept))
        of_layout = (plan.row_source, plan.token_row, plan.head, plan.run_end)
        of_levels = [(level.tokens, level.entry, level.forks) for level in plan.levels]
        arrays = [plan.entry_slots, plan.kept, plan.kept_rows, *of_layout, *chain(*of_levels)]
        uploaded = iter(upload(arrays, device))
        self.entry_slots, self.kept, self.kept_rows = islice(uploaded, 3)
        self.layout = PathLayout(*islice(uploaded, len(of_layout)), uses_kernels)
        self.levels: list[_Level] = []
        self.num_states = self.num_entries + 1
        for level in plan.levels:
            first, self.num_states = self.num_states, self.num_states + len(level.forks)
            in_order = len(level.tokens) == num_tokens and np.array_equal(level.tokens, np.arange(num_tokens))
            tokens, entry, forks = islice(uploaded, 3)
            runs, states = Runs.of_lengths(level.lengths, device), slice(first, self.num_states)
            self.levels.append(_Level(None if in_order else tokens, runs, entry, forks, states))


class StepStates:
    """The tables of a step's segments for one model chunk; each is made and uploaded when it is first requested.

    Args:
        uses_kernels: whether the convolution runs on its kernels.
    """

    def __init__(self, runs: SegmentRuns, slot_start: np.ndarray, pool: StatePool, uses_kernels: bool = False) -> None:
        self.pool, self._uses_kernels = pool, uses_kernels
        self._runs, self._slot_start, self._device = runs, slot_start, pool.states.device
        self._made: dict[int, SegmentTables] = {}

    def open(self, segment: int) -> None:
        """Prepare the slots of a segment's open forks at its first forward."""
        first = int(self._slot_start[segment])
        self.pool.open(slice(first, first + int(self._runs.open_forks[segment])))

    def of_segment(self, segment: int) -> SegmentPathStates | NoTokens:
        if not self._runs.segments.lengths[segment]:
            return NoTokens()
        if segment not in self._made:
            plan = self._runs.states_of(segment, self._slot_start, self.pool.shape.width)
            self._made[segment] = SegmentTables(plan, self._device, self._uses_kernels)
        return SegmentPathStates(self.pool, self._made[segment])


class SegmentPathStates:
    def __init__(self, pool: StatePool, tables: SegmentTables) -> None:
        self.pool, self.tables = pool, tables

    def convolve(self, layer_number: int, rows_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None) -> Tensor:
        return _Convolution.apply(rows_NC, weight_CW, bias_C, self, self.pool.row_of_layer[layer_number])

    def recur(self, layer_number: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        return _Recurrence.apply(self, self.pool.row_of_layer[layer_number], recurrence, *inputs)

    def entry_rows(self, layer: int) -> Tensor:
        """The rows before the entries, [E (W - 1), C]."""
        return self.pool.rows[layer].index_select(0, self.tables.entry_slots).flatten(0, 1)

    def entry_states(self, layer: int) -> Tensor:
        """States from earlier segments, then zeros: [E + 1, *state]."""
        pool, slots = self.pool, self.tables.entry_slots
        zero = torch.zeros(1, *pool.shape.state, dtype=pool.dtype, device=pool.states.device)
        return torch.cat([pool.states[layer].index_select(0, slots), zero])


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, rows_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, segment: SegmentPathStates, layer: int
    ) -> Tensor:
        tables, pool = segment.tables, segment.pool
        before = segment.entry_rows(layer)
        if len(tables.kept):
            kept = _rows_at(tables.kept_rows, rows_NC, before)
            pool.rows[layer, tables.slots] = kept.view(len(tables.kept), *pool.rows.shape[2:])
        ctx.save_for_backward(rows_NC, weight_CW, bias_C)
        ctx.segment, ctx.layer = segment, layer
        return short_convolution(rows_NC, before, weight_CW, tables.layout, bias_C)

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        rows_NC, weight_CW, bias_C = ctx.saved_tensors
        segment, layer, tables, pool = ctx.segment, ctx.layer, ctx.segment.tables, ctx.segment.pool
        # The entries' forks are alive until the backward of their own segments.
        before = segment.entry_rows(layer)
        grad_rows, grad_before, grad_weight, grad_bias = short_convolution_gradients(
            grad_out, rows_NC, before, weight_CW, tables.layout, bias_C
        )
        if len(tables.kept):
            from_later = pool.grad_rows[layer, tables.slots].flatten(0, 1)
            both = torch.cat([grad_rows, grad_before])
            both = sum_rows_by_source(from_later, tables.kept_rows, both.shape[0] + 1, both)
            grad_rows, grad_before, _ = both.split([rows_NC.shape[0], before.shape[0], 1])
        if tables.num_entries:
            grad_before = grad_before.view(tables.num_entries, *pool.grad_rows.shape[2:])
            # Slots are distinct, so the scatter is deterministic on a GPU too.
            pool.grad_rows[layer].index_add_(0, tables.entry_slots, grad_before)
        return grad_rows.to(rows_NC.dtype), grad_weight, grad_bias, None, None


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, segment: SegmentPathStates, layer: int, recurrence: Recurrence, *inputs: Tensor) -> Tensor:
        tables = segment.tables
        states, output = segment.entry_states(layer), None
        for level in tables.levels:
            of_level = _own(inputs, level)
            out, exits = recurrence(of_level, states.index_select(0, level.entry), level.runs)
            if level.tokens is None:
                output = out
            else:
                output = out.new_empty(inputs[0].shape[0], *out.shape[1:]) if output is None else output
                output[level.tokens] = out
            if len(level.forks):
                states = torch.cat([states, exits.index_select(0, level.forks)])
        if len(tables.kept):
            segment.pool.states[layer, tables.slots] = states.index_select(0, tables.kept)
        ctx.save_for_backward(*inputs, states[tables.num_entries + 1 :])
        ctx.segment, ctx.layer, ctx.recurrence = segment, layer, recurrence
        return output

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        *inputs, forks = ctx.saved_tensors
        segment, layer, tables, pool = ctx.segment, ctx.layer, ctx.segment.tables, ctx.segment.pool
        states = torch.cat([segment.entry_states(layer), forks])
        grad_states = torch.zeros_like(states)
        if len(tables.kept):
            grad_states[tables.kept] = pool.grad_states[layer, tables.slots]
        grads = [torch.empty_like(tokens) for tokens in inputs]
        for level in reversed(tables.levels):
            of_level = [tokens.detach().requires_grad_() for tokens in _own(inputs, level)]
            entry = states.index_select(0, level.entry).requires_grad_()
            with torch.enable_grad():
                out, exits = ctx.recurrence(tuple(of_level), entry, level.runs)
            grad_exits = torch.zeros_like(exits)
            if len(level.forks):
                grad_exits[level.forks] = grad_states[level.states]
            grad_level = grad_out if level.tokens is None else grad_out.index_select(0, level.tokens)
            *changes, grad_entry = torch.autograd.grad([out, exits], [*of_level, entry], [grad_level, grad_exits])
            for grad, value in zip(grads, changes, strict=True):
                grad[slice(None) if level.tokens is None else level.tokens] = value
            grad_states += sum_rows_by_source(grad_entry, level.entry, states.shape[0])
        if tables.num_entries:
            # Slots are distinct, so the scatter is deterministic on a GPU too.
            pool.grad_states[layer].index_add_(0, tables.entry_slots, grad_states[: tables.num_entries])
        return None, None, None, *grads


def _rows_at(index: Tensor, rows_NC: Tensor, before: Tensor) -> Tensor:
    """Rows of ``[rows, before, a row of zeros]``, without joining them."""
    num_rows = rows_NC.shape[0]
    outside = torch.cat([before, rows_NC.new_zeros(1, rows_NC.shape[1])])
    inner = rows_NC.index_select(0, index.clamp_max(num_rows - 1))
    return torch.where((index < num_rows).unsqueeze(1), inner, outside.index_select(0, (index - num_rows).clamp_min(0)))


def _own(inputs: Sequence[Tensor], level: _Level) -> tuple[Tensor, ...]:
    return tuple(inputs) if level.tokens is None else tuple(tokens.index_select(0, level.tokens) for tokens in inputs)
