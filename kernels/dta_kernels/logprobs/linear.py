"""Computes logprobs of edges and entropies of rows from hidden states, one chunk of logits at a time.

A row (a token of the stream) has one distribution over the vocabulary, and one *edge* to each of its children: at a
branch point, several targets read the same row of logits. The logits of all rows would be the largest tensor of a step
(vocabulary 151,936: 0.6 MB a token in float32). Both passes therefore process chunks of rows, and the backward pass
recomputes the logits.

With the vocabulary divided among the ranks of a process group, every rank has all hidden states and its own rows of the
output weight. Two all-reduces a call, for any number of chunks, combine the ranks' statistics: one for the maxima, and
one for the sums after rescaling to the common maximum. All ranks get the same result, bit for bit. The backward pass
has no communication: a rank returns its summand of the gradient of the hidden states. The caller's mapping adds them,
for all rows of a pass at once.

Legend: R rows, E edges, V vocabulary (of the rank, if it is divided), C hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as distributed
from torch import Tensor

from dta_kernels.layers.weight_gradients import add_weight_gradient, gradient_placeholder
from dta_kernels.logprobs import logit_chunks
from dta_kernels.logprobs.logit_chunks import Edges, Head, RowStatistics
from dta_kernels.tree_attention.reference import accumulation_dtype


class RowChunk(NamedTuple):
    """Rows ``[row_begin, row_end)`` and the edges that leave them, ``[edge_begin, edge_end)``, sorted by row."""

    row_begin: int
    row_end: int
    edge_begin: int
    edge_end: int


class VocabularyShard(NamedTuple):
    """A rank's share of a divided vocabulary; the ranks' rows together are the vocabulary, each token once.

    Attributes:
        first_token: token id of the first row of the rank's output weight.
        group: all its ranks must make the same calls.
    """

    first_token: int
    group: distributed.ProcessGroup


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_RC: Tensor, weight_VC: Tensor, edge_row_E: Tensor, target_E: Tensor, chunks: list[RowChunk],
        temperature: float, fused: bool, weight_grad_VC: Tensor | None, shard: VocabularyShard | None, in_float32: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = accumulation_dtype(hidden_RC.dtype)
        moments_of = logit_chunks.fused_moments if fused else logit_chunks.plain_moments
        edges = Edges(edge_row_E, target_E) if shard is None else _own_edges(edge_row_E, target_E, weight_VC, shard)
        # A rank without any token contributes nothing to the sums, and no maximum.
        largest_R = hidden_RC.new_full(hidden_RC.shape[:1], torch.finfo(dtype).min / 2, dtype=dtype)
        num_rows, num_edges = hidden_RC.shape[0], target_E.shape[0]
        sums = hidden_RC.new_zeros(2 * num_rows + num_edges, dtype=dtype)
        mass_R, moment_R, target_logit_E = sums.split([num_rows, num_rows, num_edges])
        for chunk in chunks if weight_VC.shape[0] else ():
            rows, of_chunk = slice(chunk.row_begin, chunk.row_end), edges.of(chunk)
            largest_R[rows], mass_R[rows], moment_R[rows], target_logit_E[chunk.edge_begin : chunk.edge_end] = (
                moments_of(hidden_RC[rows], Head(weight_VC, in_float32), of_chunk, temperature)
            )
        if shard is not None and num_rows:  # as many rows on every rank
            own_largest_R = largest_R.clone()
            distributed.all_reduce(largest_R, distributed.ReduceOp.MAX, shard.group)
            below_R = own_largest_R - largest_R
            moment_R.add_(below_R * mass_R).mul_(below_R.exp())
            mass_R.mul_(below_R.exp())
            distributed.all_reduce(sums, distributed.ReduceOp.SUM, shard.group)
        # The maximum logit is subtracted first, here and in the backward pass: the difference is exact, and small terms
        # keep their digits next to large logits.
        log_mass_R = mass_R.log()
        logprobs_E = target_logit_E - largest_R.index_select(0, edge_row_E) - log_mass_R.index_select(0, edge_row_E)
        statistics = RowStatistics(largest_R, log_mass_R, log_mass_R - moment_R / mass_R)
        ctx.save_for_backward(hidden_RC, weight_VC, *edges, *statistics)
        ctx.chunks, ctx.temperature, ctx.fused, ctx.weight_grad_VC = chunks, temperature, fused, weight_grad_VC
        ctx.in_float32 = in_float32
        ctx.set_materialize_grads(False)
        return logprobs_E, statistics.entropy

    @staticmethod
    def backward(ctx, grad_logprobs_E: Tensor | None, grad_entropy_R: Tensor | None):
        hidden_RC, weight_VC, *saved = ctx.saved_tensors
        edges, statistics, head = Edges(*saved[:3]), RowStatistics(*saved[3:]), Head(weight_VC, ctx.in_float32)
        dtype = statistics.entropy.dtype
        gradient_of = logit_chunks.fused_gradient if ctx.fused else logit_chunks.plain_gradient
        needs_weight, sum_VC, buffer_VC = ctx.needs_input_grad[1], ctx.weight_grad_VC, ctx.weight_grad_VC
        if needs_weight and buffer_VC is None:
            sum_VC = torch.zeros_like(weight_VC, dtype=dtype)
        has_tokens = weight_VC.shape[0] > 0
        grad_hidden_RC = torch.empty_like(hidden_RC) if has_tokens else torch.zeros_like(hidden_RC)
        for chunk in ctx.chunks if has_tokens else ():
            rows, of_chunk = slice(chunk.row_begin, chunk.row_end), slice(chunk.edge_begin, chunk.edge_end)
            grad_e = None if grad_logprobs_E is None else grad_logprobs_E[of_chunk].to(dtype)
            grad_B = None if grad_entropy_R is None else grad_entropy_R[rows].to(dtype)
            of_rows = RowStatistics(*(statistic[rows] for statistic in statistics))
            grad_logits_BV = gradient_of(
                hidden_RC[rows], head, edges.of(chunk), grad_e, grad_B, of_rows, ctx.temperature
            )
            grad_hidden_RC[rows] = grad_logits_BV @ weight_VC
            if sum_VC is not None:
                add_weight_gradient(sum_VC, grad_logits_BV, hidden_RC[rows])
            del grad_logits_BV  # before the next chunk's tensor is allocated
        grad_weight_VC = None
        if needs_weight:
            grad_weight_VC = sum_VC.to(weight_VC.dtype) if buffer_VC is None else gradient_placeholder(weight_VC)
        return grad_hidden_RC, grad_weight_VC, *[None] * 8


def linear_logprobs(
    hidden_RC: Tensor, weight_VC: Tensor, edge_row_E: Tensor, target_E: Tensor, chunks: list[RowChunk],
    temperature: float = 1.0, fused: bool | None = None, weight_grad_VC: Tensor | None = None,
    shard: VocabularyShard | None = None, in_float32: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logprob of every edge and entropy of every row of ``softmax(hidden @ weight.T / temperature)``.

    Args:
        hidden_RC: hidden states of the rows.
        weight_VC: output weight; with ``shard`` the rank's rows of it, possibly none.
        edge_row_E: int64, row of each edge, ascending; a row may have several edges, each with a different target.
        target_E: int64, token id of each edge.
        chunks: row ranges that cover all rows and edges in order; one chunk's logits are alive at a time.
        temperature: divides the logits; the logprobs are those of the sampling distribution.
        fused: whether Triton's kernels (``fused_logits``) process the logits; None: on a GPU, except for float64.
        weight_grad_VC: buffer to which the backward pass adds the weight's gradient, chunk by chunk. If the weight
            needs a gradient, autograd then gets a ``gradient_placeholder`` for it. Without a buffer the pass allocates
            one in the accumulation precision.
        shard: the vocabulary is divided among ranks; the gradient of ``hidden`` is then the rank's summand.
        in_float32: logits of 16-bit inputs are float32 instead of being rounded to 16 bits.

    Returns:
        ``(logprobs_E, entropy_R)`` in float32 (float64 for float64 inputs), differentiable in ``hidden`` and
        ``weight``.
    """
    fused = logit_chunks.uses_fused_kernels(hidden_RC) if fused is None else fused
    return _LinearLogprobs.apply(
        hidden_RC, weight_VC, edge_row_E, target_E, chunks, temperature, fused, weight_grad_VC, shard, in_float32
    )


def _own_edges(edge_row_E: Tensor, target_E: Tensor, weight_VC: Tensor, shard: VocabularyShard) -> Edges:
    column_E, num_columns = target_E - shard.first_token, weight_VC.shape[0]
    is_own_E = (column_E >= 0) & (column_E < num_columns)
    return Edges(edge_row_E, column_E.clamp(0, max(0, num_columns - 1)), is_own_E)
