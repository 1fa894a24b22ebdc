"""Computes logprobs of edges and entropies of rows from hidden states, one chunk of logits at a time.

A row (a token of the stream) has one distribution over the vocabulary, and one *edge* to each of its children: at a
branch point, several targets read the same row of logits. The logits of all rows would be the largest tensor of a step
(vocabulary 151,936: 0.6 MB a token in float32). Both passes therefore process chunks of rows, and the backward pass
recomputes the logits.

Legend: R rows, E edges, V vocabulary, C hidden size, B rows of one chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dta_kernels.layers.weight_gradients import add_weight_gradient, gradient_placeholder
from dta_kernels.logprobs.logit_chunks import fused_gradient, fused_statistics, uses_fused_kernels
from dta_kernels.tree_attention.reference import accumulation_dtype


class RowChunk(NamedTuple):
    """Rows ``[row_begin, row_end)`` and the edges that leave them, ``[edge_begin, edge_end)`` (edges are sorted by
    row).
    """

    row_begin: int
    row_end: int
    edge_begin: int
    edge_end: int


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden_RC: Tensor,
        weight_VC: Tensor,
        edge_row_E: Tensor,
        target_E: Tensor,
        chunks: list[RowChunk],
        temperature: float,
        fused: bool,
        weight_grad_VC: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(hidden_RC.dtype)
        logprobs_E = hidden_RC.new_empty(target_E.shape, dtype=dtype)
        entropy_R = hidden_RC.new_empty(hidden_RC.shape[:1], dtype=dtype)
        # The log-sum-exp of a row is largest + log_mass; the path without kernels stores all of it in log_mass.
        largest_R, log_mass_R = torch.zeros_like(entropy_R), torch.empty_like(entropy_R)
        for chunk in chunks:
            rows, edges = slice(chunk.row_begin, chunk.row_end), slice(chunk.edge_begin, chunk.edge_end)
            edge_row = edge_row_E[edges] - chunk.row_begin
            if fused:
                largest, mass, moment, chosen = fused_statistics(
                    hidden_RC[rows], weight_VC, edge_row, target_E[edges], temperature
                )
                log_mass = mass.log()
                logprobs_E[edges] = chosen - largest[edge_row] - log_mass[edge_row]
                entropy_R[rows] = log_mass - moment / mass
                largest_R[rows], log_mass_R[rows] = largest, log_mass
                continue
            logprobs_BV = chunk_logits(hidden_RC[rows], weight_VC, temperature, dtype)
            lse_B = torch.logsumexp(logprobs_BV, dim=-1)
            logprobs_BV -= lse_B[:, None]
            logprobs_E[edges] = logprobs_BV[edge_row, target_E[edges]]
            entropy_R[rows] = -torch.exp(logprobs_BV).mul_(logprobs_BV).sum(-1)
            log_mass_R[rows] = lse_B
        ctx.save_for_backward(hidden_RC, weight_VC, edge_row_E, target_E, largest_R, log_mass_R, entropy_R)
        ctx.chunks, ctx.temperature, ctx.fused, ctx.weight_grad_VC = chunks, temperature, fused, weight_grad_VC
        ctx.set_materialize_grads(False)
        return logprobs_E, entropy_R

    @staticmethod
    def backward(ctx, grad_logprobs_E: Tensor | None, grad_entropy_R: Tensor | None):
        hidden_RC, weight_VC, edge_row_E, target_E, largest_R, log_mass_R, entropy_R = ctx.saved_tensors
        dtype = entropy_R.dtype
        grad_hidden_RC = torch.empty_like(hidden_RC)
        sum_VC = weight_gradient_sum(weight_VC, ctx.weight_grad_VC, ctx.needs_input_grad[1], dtype)
        for chunk in ctx.chunks:
            rows, edges = slice(chunk.row_begin, chunk.row_end), slice(chunk.edge_begin, chunk.edge_end)
            grad_edges = None if grad_logprobs_E is None else grad_logprobs_E[edges].to(dtype)
            grad_entropy = None if grad_entropy_R is None else grad_entropy_R[rows].to(dtype)
            edge_row, target = edge_row_E[edges] - chunk.row_begin, target_E[edges]
            if ctx.fused:
                statistics = (largest_R[rows], log_mass_R[rows], entropy_R[rows])
                grad_logits_BV = fused_gradient(
                    hidden_RC[rows], weight_VC, edge_row, target, None, grad_edges, grad_entropy, *statistics,
                    ctx.temperature,
                )  # fmt: skip
            else:
                logprobs_BV = chunk_logits(hidden_RC[rows], weight_VC, ctx.temperature, dtype)
                logprobs_BV -= log_mass_R[rows, None]
                grad_logits_BV = grad_chunk_logits(
                    logprobs_BV, grad_edges, edge_row, target, grad_entropy, entropy_R[rows]
                )
                grad_logits_BV = grad_logits_BV.div_(ctx.temperature).to(hidden_RC.dtype)
            grad_hidden_RC[rows] = grad_logits_BV @ weight_VC
            if sum_VC is not None:
                add_weight_gradient(sum_VC, grad_logits_BV, hidden_RC[rows])
            del grad_logits_BV  # before the next chunk's tensor is allocated
        grad_weight_VC = weight_gradient(weight_VC, sum_VC, ctx.weight_grad_VC, ctx.needs_input_grad[1])
        return grad_hidden_RC, grad_weight_VC, None, None, None, None, None, None


def linear_logprobs(
    hidden_RC: Tensor,
    weight_VC: Tensor,
    edge_row_E: Tensor,
    target_E: Tensor,
    chunks: list[RowChunk],
    temperature: float = 1.0,
    fused: bool | None = None,
    weight_grad_VC: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprob of every edge and entropy of every row of ``softmax(hidden @ weight.T / temperature)``.

    Args:
        hidden_RC: hidden states of the rows.
        weight_VC: output weight.
        edge_row_E: int64, row of each edge, ascending; a row may have several edges, each with a different target.
        target_E: int64, token id of each edge.
        chunks: row ranges that cover all rows and edges in order; one chunk's logits are alive at a time.
        temperature: divides the logits; the logprobs are those of the sampling distribution.
        fused: whether Triton's kernels (``fused_logits``) process the logits; None: on a GPU, except for float64.
        weight_grad_VC: buffer to which the backward pass adds the weight's gradient, chunk by chunk. If the weight
            needs a gradient, autograd then gets a ``gradient_placeholder`` for it. Without a buffer the pass allocates
            one in the accumulation precision.

    Returns:
        ``(logprobs_E, entropy_R)`` in float32 (float64 for float64 inputs), differentiable in ``hidden`` and
        ``weight``.
    """
    fused = uses_fused_kernels(hidden_RC) if fused is None else fused
    return _LinearLogprobs.apply(hidden_RC, weight_VC, edge_row_E, target_E, chunks, temperature, fused, weight_grad_VC)


def weight_gradient_sum(
    weight_VC: Tensor, weight_grad_VC: Tensor | None, is_needed: bool, dtype: torch.dtype
) -> Tensor | None:
    """The buffer for the weight's gradient: the caller's or a new one; None if no gradient is needed."""
    if weight_grad_VC is not None:
        return weight_grad_VC
    return torch.zeros_like(weight_VC, dtype=dtype) if is_needed else None


def weight_gradient(
    weight_VC: Tensor, sum_VC: Tensor | None, weight_grad_VC: Tensor | None, is_needed: bool
) -> Tensor | None:
    """The backward pass's return value for the weight's gradient."""
    if not is_needed:
        return None
    return sum_VC.to(weight_VC.dtype) if weight_grad_VC is None else gradient_placeholder(weight_VC)


def chunk_logits(hidden_BC: Tensor, weight_VC: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Logits of a chunk in a new tensor [B, V]; later steps work in place, because allocation is the main cost."""
    return (hidden_BC @ weight_VC.t()).to(dtype).div_(temperature)


def grad_chunk_logits(
    logprobs_BV: Tensor,
    grad_edges: Tensor | None,
    edge_row: Tensor,
    target: Tensor,
    grad_entropy_B: Tensor | None,
    entropy_B: Tensor,
    is_own: Tensor | None = None,
) -> Tensor:
    """Gradient by the (tempered) logits [B, V]; overwrites ``logprobs_BV``.

    If the vocabulary is divided, ``is_own`` says which targets are among these columns; the others name any column.
    d logprob(target) / d logits = onehot(target) - p and d entropy / d logits = -p (logprob + entropy).
    """
    row_sum_B = torch.zeros_like(entropy_B)
    if grad_edges is not None:
        # Edges are sorted by row, so the sum of each row is over a run, in a fixed order.
        bounds = torch.arange(entropy_B.shape[0] + 1, device=edge_row.device)
        lengths = torch.searchsorted(edge_row, bounds).diff()
        row_sum_B = torch.segment_reduce(grad_edges, "sum", lengths=lengths, unsafe=True)
    if grad_entropy_B is None:
        grad_logits_BV = logprobs_BV.exp_().mul_(-row_sum_B[:, None])
    else:
        grad_logits_BV = torch.exp(logprobs_BV)
        factor_BV = logprobs_BV.add_(entropy_B[:, None]).mul_(-grad_entropy_B[:, None]).sub_(row_sum_B[:, None])
        grad_logits_BV.mul_(factor_BV)
    if grad_edges is not None and is_own is not None:
        # Targets of other ranks add zeros, so the order of additions does not matter.
        grad_logits_BV.index_put_((edge_row, target), torch.where(is_own, grad_edges, 0), accumulate=True)
    elif grad_edges is not None:
        # The children of one token are different tokens, so every (row, target) occurs once.
        grad_logits_BV[edge_row, target] += grad_edges
    return grad_logits_BV
