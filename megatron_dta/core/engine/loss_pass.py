"""Computes the loss of sequences from the logprobs of unique edges, and scatters its gradient back to the edges.

Gather: each (sequence, trained token) pair reads the logprob of its edge and the entropy of its row. The objective is
an ordinary function of one sequence; it is called on rectangles of several sequences. Scatter: the gradient is written
once for each pair, and the backward of a segment sums the pairs of each edge and row. The sums run over sorted runs in
a fixed order, in float32 (float64 for a float64 model), so they are reproducible, also on a GPU.

Example: two sequences share their first trained token and then differ. They have 4 pairs but 3 edges. The gradients of
pairs 0 and 2, which read the shared edge, are summed into its gradient.

In a context group, a rank computes the logprobs of its own tokens. All ranks exchange them, compute the same losses,
and use the gradients at their own edges.

Legend: E edges, R rows, P pairs, B sequences of a loss batch, T their longest number of trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron_dta.core.engine.batch import TreeBatch
from megatron_dta.core.engine.device_plan import DeviceLossBatch, DevicePlan
from megatron_dta.core.model.kernel_types import upload
from megatron_dta.core.model.parallel.context_group import ContextGroup
from megatron_dta.core.objectives.fields import LossFields, SequenceLoss, TokenLosses

Objective = Callable[[Tensor, Tensor, LossFields], TokenLosses] | SequenceLoss


class LossPass:
    """The loss of one step.

    Args:
        group: the ranks that divide the tokens of each segment; None if this rank computes all of them.

    Attributes:
        logprobs_E, entropy_R: filled by the forwards and NaN before, so that a premature read is noticed.
        loss: scalar, the sum so far; ``metric_sums``: for each summed metric, its sum so far over the tokens that
            count; ``maxima``: for each metric that is a maximum, its largest value so far.
    """

    def __init__(
        self,
        batch: TreeBatch,
        plan: DevicePlan,
        objective: Objective | None,
        dtype: torch.dtype,
        device: torch.device,
        group: ContextGroup | None = None,
    ) -> None:
        self.plan, self.objective, self.dtype, self.group = plan, objective, dtype, group
        num_edges, num_rows = len(batch.plan.edge_row), len(batch.plan.row_stream)
        self.logprobs_E = torch.full((num_edges,), torch.nan, dtype=dtype, device=device)
        self.entropy_R = torch.full((num_rows,), torch.nan, dtype=dtype, device=device)
        self.loss = torch.zeros((), dtype=dtype, device=device)
        self.metric_sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        if objective is None:
            return
        self.grad_logprobs_P = torch.full((plan.num_pairs + 1,), torch.nan, dtype=dtype, device=device)
        self.grad_entropy_P: Tensor | None = None  # allocated when the objective first uses entropies
        # Each with a 0 for the pad index.
        named = {"weights": batch.loss_weights} | batch.fields
        arrays = {name: np.append(values, 0.0) for name, values in named.items() if values is not None}
        uploaded = dict(zip(arrays, upload(list(arrays.values()), device, dtype), strict=True))
        self.weights_P = uploaded["weights"]
        self.fields_P = {name: uploaded.get(name) for name in batch.fields}

    def store(self, segment: int, logprobs: Tensor, entropy: Tensor) -> None:
        """Store a segment's logprobs and entropies, given those of the rank's tokens."""
        edges = slice(self.plan.segment_edges[segment], self.plan.segment_edges[segment + 1])
        rows = slice(self.plan.segment_rows[segment], self.plan.segment_rows[segment + 1])
        if self.group is not None and rows.start < rows.stop:
            of_edges, of_rows = edges.stop - edges.start, rows.stop - rows.start
            begins = self.plan.own_edges[segment].start - edges.start, self.plan.own_rows[segment].start - rows.start
            logprobs, entropy = self.group.joined((logprobs, entropy), begins, (of_edges, of_rows))
        self.logprobs_E[edges] = logprobs.detach()
        self.entropy_R[rows] = entropy.detach()

    def pair_outputs(self) -> tuple[Tensor, Tensor]:
        """Logprob of every pair [P] and entropy of the distribution that it is from [P], in sequence order."""
        edge_P = self.plan.pair_edge[:-1]
        return self.logprobs_E[edge_P], self.entropy_R[self.plan.edge_row[edge_P]]

    def complete(self, segment: int) -> None:
        """Compute the loss of the sequences whose last row is in ``segment``, and store its gradient."""
        for loss_batch in self.plan.loss_batches[segment]:
            self._loss(loss_batch)

    def _loss(self, loss_batch: DeviceLossBatch) -> None:
        index_BT = loss_batch.pair_index
        edge_BT = self.plan.pair_edge[index_BT]
        with torch.enable_grad():
            logprobs_BT = self.logprobs_E[edge_BT].requires_grad_()
            entropy_BT = self.entropy_R[self.plan.edge_row[edge_BT]].requires_grad_()
            if isinstance(self.objective, SequenceLoss):
                loss = self.objective(logprobs_BT, entropy_BT, loss_batch.sequences)
            else:
                loss = self._token_losses(logprobs_BT, entropy_BT, loss_batch)
            inputs = (logprobs_BT, entropy_BT)
            # The loss of some groups may be constant, or use no entropies although that of others does.
            unused = None, None
            grad_logprobs_BT, grad_entropy_BT = (
                torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else unused
            )
        self.loss += loss.detach()
        if grad_entropy_BT is not None and self.grad_entropy_P is None:
            # 0 for the groups before this one, and NaN where a gradient is still to come.
            known = self.grad_logprobs_P
            self.grad_entropy_P = torch.zeros_like(known).masked_fill_(known.isnan(), torch.nan)
        # Pad positions write past the last pair; these values are never read.
        rank_BT = self.plan.pair_rank[index_BT]
        self.grad_logprobs_P[rank_BT] = torch.zeros_like(logprobs_BT) if grad_logprobs_BT is None else grad_logprobs_BT
        if self.grad_entropy_P is not None:
            self.grad_entropy_P[rank_BT] = torch.zeros_like(entropy_BT) if grad_entropy_BT is None else grad_entropy_BT

    def _token_losses(self, logprobs_BT: Tensor, entropy_BT: Tensor, loss_batch: DeviceLossBatch) -> Tensor:
        """The weighted sum of the objective's losses; adds its metrics."""
        index_BT, mask_BT = loss_batch.pair_index, loss_batch.loss_mask
        fields = LossFields(
            loss_mask=mask_BT,
            **{name: None if values is None else values[index_BT] for name, values in self.fields_P.items()},
        )
        losses = self.objective(logprobs_BT, entropy_BT, fields)
        for name, values in losses.metrics.items():
            total = torch.where(mask_BT, values, 0).sum()
            self.metric_sums[name] = self.metric_sums.get(name, 0) + total
        for name, values in losses.maxima.items():
            largest = torch.where(mask_BT, values, 0).max()
            self.maxima[name] = torch.maximum(self.maxima.get(name, largest), largest)
        return (losses.loss * self.weights_P[index_BT]).sum()

    def gradients(self, segment: int) -> tuple[Tensor, Tensor | None]:
        """Gradient of the step's loss by the logprobs [E] and entropies [R] of the rank's tokens of a segment; None for
        entropies that the loss does not use.
        """
        plan = self.plan
        pairs, edges, rows = plan.own_pairs[segment], plan.own_edges[segment], plan.own_rows[segment]
        grad_logprobs_E = _sum_runs(self.grad_logprobs_P[pairs], plan.pairs_per_edge[edges])
        if self.grad_entropy_P is None:
            return grad_logprobs_E, None
        return grad_logprobs_E, _sum_runs(self.grad_entropy_P[pairs], plan.pairs_per_row[rows])


def _sum_runs(values: Tensor, lengths: Tensor) -> Tensor:
    # unsafe=True skips the check of the lengths, which would wait for the device.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
