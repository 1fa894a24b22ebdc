"""Computes ``linear_logprobs`` with the vocabulary divided among the ranks of a process group.

Every rank has all hidden states and its own rows of the output weight. From chunks of logits, each rank computes for
every row its maximum logit, the sum of exp(logit - maximum) and the sum of (logit - maximum) exp(logit - maximum), and
for every edge the target's logit if the target is its own. Two all-reduces a call, for any number of chunks, combine
them to logprobs and entropies over the whole vocabulary: one for the maxima, and one for the sums after rescaling to
the common maximum. All ranks get the same result, bit for bit.

The backward pass has no communication: a rank returns *its part* of the gradient by the hidden states, and the sum over
the group is the gradient. The caller's mapping sums the parts, for all rows of a pass at once.

Legend: R rows, E edges, V the rank's part of the vocabulary, C hidden size, B rows of one chunk.
"""

from __future__ import annotations

import torch
import torch.distributed as distributed
from torch import Tensor

from dta_kernels.layers.weight_gradients import add_weight_gradient
from dta_kernels.logprobs.linear import (
    RowChunk,
    chunk_logits,
    grad_chunk_logits,
    weight_gradient,
    weight_gradient_sum,
)
from dta_kernels.logprobs.logit_chunks import fused_gradient, fused_statistics, uses_fused_kernels
from dta_kernels.tree_attention.reference import accumulation_dtype


def parallel_linear_logprobs(
    hidden_RC: Tensor,
    weight_VC: Tensor,
    edge_row_E: Tensor,
    target_E: Tensor,
    chunks: list[RowChunk],
    temperature: float,
    first_token: int,
    group: distributed.ProcessGroup,
    fused: bool | None = None,
    weight_grad_VC: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprob of every edge and entropy of every row, over the vocabulary of all ranks of ``group``.

    Args:
        weight_VC: the rank's rows of the output weight, possibly none.
        fused, weight_grad_VC: as in ``linear_logprobs``.
        first_token: token id of the first row. The ranks' rows together are the vocabulary, each token once.
        group: all its ranks must call this with the same other arguments.

    The other arguments and the result are those of ``linear_logprobs``, except for the gradient by ``hidden``, which is
    a part of a sum (see the module).
    """
    fused = uses_fused_kernels(hidden_RC) if fused is None else fused
    return _ParallelLinearLogprobs.apply(
        hidden_RC, weight_VC, edge_row_E, target_E, chunks, temperature, first_token, group, fused, weight_grad_VC
    )


class _ParallelLinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden_RC: Tensor,
        weight_VC: Tensor,
        edge_row_E: Tensor,
        target_E: Tensor,
        chunks: list[RowChunk],
        temperature: float,
        first_token: int,
        group: distributed.ProcessGroup,
        fused: bool,
        weight_grad_VC: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(hidden_RC.dtype)
        column_E, is_own_E = _own_columns(target_E, first_token, weight_VC.shape[0])
        # A rank without any token contributes nothing to the sums, and no maximum.
        largest_R = hidden_RC.new_full(hidden_RC.shape[:1], torch.finfo(dtype).min / 2, dtype=dtype)
        num_rows, num_edges = hidden_RC.shape[0], target_E.shape[0]
        sums = hidden_RC.new_zeros(2 * num_rows + num_edges, dtype=dtype)
        mass_R, moment_R, target_logit_E = sums.split([num_rows, num_rows, num_edges])
        for chunk in chunks if weight_VC.shape[0] else ():
            rows, edges = slice(chunk.row_begin, chunk.row_end), slice(chunk.edge_begin, chunk.edge_end)
            if fused:
                edge_row = edge_row_E[edges] - chunk.row_begin
                largest_R[rows], mass_R[rows], moment_R[rows], chosen = fused_statistics(
                    hidden_RC[rows], weight_VC, edge_row, column_E[edges], temperature
                )
                target_logit_E[edges] = torch.where(is_own_E[edges], chosen, 0)
                continue
            logits_BV = chunk_logits(hidden_RC[rows], weight_VC, temperature, dtype)
            chosen = logits_BV[edge_row_E[edges] - chunk.row_begin, column_E[edges]]
            target_logit_E[edges] = torch.where(is_own_E[edges], chosen, 0)
            largest_R[rows] = logits_BV.amax(dim=-1)
            logits_BV -= largest_R[rows, None]
            exp_BV = torch.exp(logits_BV)
            mass_R[rows] = exp_BV.sum(-1)
            moment_R[rows] = exp_BV.mul_(logits_BV).sum(-1)
        if num_rows:  # as many on every rank
            own_largest_R = largest_R.clone()
            distributed.all_reduce(largest_R, distributed.ReduceOp.MAX, group)
            below_R = own_largest_R - largest_R
            moment_R.add_(below_R * mass_R).mul_(below_R.exp())
            mass_R.mul_(below_R.exp())
            distributed.all_reduce(sums, distributed.ReduceOp.SUM, group)
        # The maximum logit is subtracted first, here and in the backward pass: the difference is exact, and small terms
        # keep their digits beside large logits.
        log_mass_R = mass_R.log()
        logprobs_E = target_logit_E - largest_R.index_select(0, edge_row_E) - log_mass_R.index_select(0, edge_row_E)
        entropy_R = log_mass_R - moment_R / mass_R
        ctx.save_for_backward(hidden_RC, weight_VC, edge_row_E, column_E, is_own_E, largest_R, log_mass_R, entropy_R)
        ctx.chunks, ctx.temperature, ctx.fused, ctx.weight_grad_VC = chunks, temperature, fused, weight_grad_VC
        ctx.set_materialize_grads(False)
        return logprobs_E, entropy_R

    @staticmethod
    def backward(ctx, grad_logprobs_E: Tensor | None, grad_entropy_R: Tensor | None):
        hidden_RC, weight_VC, edge_row_E, column_E, is_own_E, largest_R, log_mass_R, entropy_R = ctx.saved_tensors
        dtype = entropy_R.dtype
        grad_hidden_RC = torch.zeros_like(hidden_RC)
        sum_VC = weight_gradient_sum(weight_VC, ctx.weight_grad_VC, ctx.needs_input_grad[1], dtype)
        for chunk in ctx.chunks if weight_VC.shape[0] else ():
            rows, edges = slice(chunk.row_begin, chunk.row_end), slice(chunk.edge_begin, chunk.edge_end)
            grad_edges = None if grad_logprobs_E is None else grad_logprobs_E[edges].to(dtype)
            grad_entropy = None if grad_entropy_R is None else grad_entropy_R[rows].to(dtype)
            edge_row, column, is_own = edge_row_E[edges] - chunk.row_begin, column_E[edges], is_own_E[edges]
            if ctx.fused:
                statistics = (largest_R[rows], log_mass_R[rows], entropy_R[rows])
                grad_logits_BV = fused_gradient(
                    hidden_RC[rows], weight_VC, edge_row, column, is_own, grad_edges, grad_entropy, *statistics,
                    ctx.temperature,
                )  # fmt: skip
            else:
                logprobs_BV = chunk_logits(hidden_RC[rows], weight_VC, ctx.temperature, dtype)
                logprobs_BV -= largest_R[rows, None]
                logprobs_BV -= log_mass_R[rows, None]
                grad_logits_BV = grad_chunk_logits(
                    logprobs_BV, grad_edges, edge_row, column, grad_entropy, entropy_R[rows], is_own
                )
                grad_logits_BV = grad_logits_BV.div_(ctx.temperature).to(hidden_RC.dtype)
            grad_hidden_RC[rows] = grad_logits_BV @ weight_VC
            if sum_VC is not None:
                add_weight_gradient(sum_VC, grad_logits_BV, hidden_RC[rows])
            del grad_logits_BV  # before the next chunk's tensor is allocated
        grad_weight_VC = weight_gradient(weight_VC, sum_VC, ctx.weight_grad_VC, ctx.needs_input_grad[1])
        return grad_hidden_RC, grad_weight_VC, None, None, None, None, None, None, None, None


def _own_columns(target_E: Tensor, first_token: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """The rank's column of each target, and whether the target is the rank's; if not, the column is any valid one."""
    column_E = target_E - first_token
    is_own_E = (column_E >= 0) & (column_E < num_columns)
    return column_E.clamp(0, max(0, num_columns - 1)), is_own_E
