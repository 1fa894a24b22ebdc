"""Adds a teacher's reverse KL divergence to the loss of a step, row by row of the plan.

A row is a token whose next token is trained; its divergence is a function of the prefix alone, so sequences that share
the row share it. The loss of the step has the term

    sum over pairs P of a sequence and a trained token:  weight_P * coefficient * KL(row of P)

which is a sum over rows with one constant weight each. It therefore needs nothing of the objective: the divergence is
one more output of a segment's forward, and its gradient in the backward is the row's weight.

In a context group, a rank computes the divergences at the rows of its tokens, and all ranks exchange them.

Legend: U rows that a teacher scores, D its hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dta.core.engine.device_plan import DevicePlan
from megatron_dta.core.engine.loss_pass import LossPass
from megatron_dta.core.model.kernel_types import Head, TeacherRows
from megatron_dta.core.model.parallel.context_group import ContextGroup
from megatron_dta.core.model.tree_model import TreeGPTModel

METRIC = "teacher_kl"


@dataclass(frozen=True)
class TeacherTarget:
    """A teacher at rows of a plan.

    Attributes:
        rows: int64 [U], ascending.
        weights: float64 [U], derivative of the step's loss by the divergence of each row.
        counts: int64 [U], pairs that count at each row, for the mean.
        rows_there: int64 [U], the teacher's own row of each.
        states: [U, D], hidden states of the teacher there, on the host; None on ranks without the last stage.
        head: its output weight there.
    """

    rows: np.ndarray
    weights: np.ndarray
    counts: np.ndarray
    rows_there: np.ndarray
    states: Tensor | None = None
    head: Head | None = None


class TeacherPass:
    """The teachers of one pass.

    Args:
        group: the ranks that divide the tokens of each segment; None if this rank computes all of them.
    """

    def __init__(
        self,
        targets: Sequence[TeacherTarget],
        plan: DevicePlan,
        dtype: torch.dtype,
        device: torch.device,
        group: ContextGroup | None = None,
    ) -> None:
        self._targets, self._plan, self._group = targets, plan, group
        self._weights = [torch.from_numpy(target.weights).to(device, dtype) for target in targets]
        self._counts = [torch.from_numpy(target.counts).to(device, dtype) for target in targets]
        self._rows = [torch.from_numpy(target.rows).to(device) for target in targets]

    def divergences(
        self, part: TreeGPTModel, segment: int, hidden: Tensor, rows_per_chunk: int, temperature: float
    ) -> list[Tensor]:
        """The divergence from each teacher at its rows of the rank's tokens of a segment; ``hidden`` holds all rows of
        these tokens.
        """
        divergences, rows = [], self._plan.own_rows[segment]
        for number, target in enumerate(self._targets):
            span = self._span(number, rows)
            if span.start == span.stop:
                continue
            states = target.states[span].to(hidden.device, non_blocking=True)
            local = self._rows[number][span] - rows.start
            teacher = TeacherRows(states, target.head)
            divergences.append(part.row_reverse_kl(hidden.index_select(0, local), teacher, rows_per_chunk, temperature))
        return divergences

    def gradients(self, segment: int) -> list[Tensor]:
        """The gradient of the step's loss by what ``divergences`` returned."""
        spans = [self._span(number, self._plan.own_rows[segment]) for number in range(len(self._targets))]
        return [weights[span] for weights, span in zip(self._weights, spans, strict=True) if span.start != span.stop]

    def add(self, segment: int, divergences: Sequence[Tensor], loss: LossPass) -> None:
        """Add a segment's divergences to the loss and its metrics."""
        rows, own_rows = slice(*self._plan.segment_rows[segment : segment + 2]), self._plan.own_rows[segment]
        remaining = iter(divergences)
        for number in range(len(self._targets)):
            span, own_span = self._span(number, rows), self._span(number, own_rows)
            if span.start == span.stop:
                continue
            none = loss.loss.new_zeros(0)
            values = next(remaining).detach() if own_span.start != own_span.stop else none
            if self._group is not None:
                begin, length = own_span.start - span.start, span.stop - span.start
                (values,) = self._group.joined([values.to(none.dtype)], [begin], [length])
            loss.loss += (values * self._weights[number][span]).sum()
            total = (values * self._counts[number][span]).sum()
            loss.metric_sums[METRIC] = loss.metric_sums.get(METRIC, 0) + total

    def _span(self, number: int, rows: slice) -> slice:
        """Which of a teacher's rows are among ``rows`` of the plan."""
        begin, end = np.searchsorted(self._targets[number].rows, [rows.start, rows.stop])
        return slice(int(begin), int(end))
