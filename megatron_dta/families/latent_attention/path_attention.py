"""Latent attention of a segment: its tokens attend to their ancestors, of which the pool holds latents only.

Forward: the segment's latents are written to the pool; keys and values of [ancestors, own] are expanded from latents,
attended to, and dropped. Backward: they are expanded again, and their gradients go through the expansion into its
weight and into the accumulators of the pool. What the segment's own latents have there then, with what its descendants
have added before, is returned to autograd.

Heads are independent, so on a long path a few of them are expanded at a time (``Sizes.heads_at_once``). Their gradients
add to the latents' in the accumulators' dtype, head by head in order, in blocks of tokens.

Legend: N the segment's tokens, M keys (its ancestors', then its own), H query heads, h of them at a time, K channels of
a query and of a key (values are padded to it with zeros), W of an expansion's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import dta_kernels.tree_attention.reference as reference
from dta_kernels.layers.weight_gradients import add_weight_gradient
from dta_kernels.tree_attention.reference import accumulation_dtype
from megatron_dta.core.model.attention.segment_context import SegmentContext
from megatron_dta.families.latent_attention.expansion import Expansion

# Numbers of gradients of keys and values that are multiplied at once; 128 MiB in 16 bits.
_BLOCK = 1 << 26


def attend_on_path(
    segment: SegmentContext,
    layer_number: int,
    query: Tensor,
    latents: Tensor,
    expansion: Callable[[], Expansion],
    scale: float,
) -> Tensor:
    """Output [N, H, K] for ``query`` [N, H, K] and the segment's ``latents`` [N, 1, L + R].

    Args:
        expansion: its gradients reach its parameters without autograd of the caller.
        scale: factor on the scores.
    """
    if query.shape[0] == 0:
        # An empty segment attends to nothing, but every parameter must still get a gradient of zero.
        return query + sum(tensor.sum() for tensor in (latents, *expansion().tensors.values()))
    return _PathAttention.apply(query, latents, segment, segment.layer_rows[layer_number], expansion, scale)


class _PathAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        latents: Tensor,
        segment: SegmentContext,
        row: int,
        expansion: Callable[[], Expansion],
        scale: float,
    ) -> Tensor:
        segment.pool.layer(row).keys[segment.slots] = latents
        expanding = expansion()
        rows = expanding.rows(segment.keys_and_values(row)[0])
        outputs = [
            _attend(segment, query[:, heads], *_expanded(rows, expanding.matrices(heads)), scale)
            for heads in expanding.groups(len(rows))
        ]
        out, lse = outputs[0] if len(outputs) == 1 else map(torch.cat, zip(*outputs, strict=True), (1, 0))
        segment.pool.finish(row, gradients=False)
        ctx.save_for_backward(query, out, lse)
        ctx.segment, ctx.row, ctx.expansion, ctx.scale = segment, row, expansion, scale
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        query, out, lse = ctx.saved_tensors
        segment, pool = ctx.segment, ctx.segment.pool.layer(ctx.row)
        with torch.enable_grad():
            expansion = ctx.expansion()
        rows = expansion.rows(segment.keys_and_values(ctx.row)[0])
        sums = expansion.sums(accumulation_dtype(query.dtype))
        grad_queries = []
        for heads in expansion.groups(len(rows)):
            matrices, of_heads = expansion.matrices(heads), (out[:, heads], lse[heads])
            expanded = _expanded(rows, matrices)
            grad_query, *grads = _gradients(
                segment, (grad_out[:, heads], query[:, heads], *expanded, *of_heads), ctx.scale
            )
            del expanded
            grad_queries.append(grad_query)
            of_matrices = torch.zeros_like(matrices, dtype=pool.grad_keys.dtype) if sums else None
            for part, grad in _add_rows(rows, matrices, grads, of_matrices):
                # Slots are distinct, so the scatter is deterministic on a GPU too.
                of_latents = expansion.of_latents(grad, rows[part], sums).unsqueeze(1)
                pool.grad_keys.index_add_(0, segment.key_slots[part], of_latents)
            if sums:
                expansion.add_matrices(sums, heads, of_matrices)
            del grads
        expansion.backward(sums)
        grad_latents = pool.grad_keys[segment.slots].to(query.dtype, copy=True)
        segment.pool.finish(ctx.row, gradients=True)
        grad_query = grad_queries[0] if len(grad_queries) == 1 else torch.cat(grad_queries, 1)
        return grad_query, grad_latents, None, None, None, None


def _expanded(rows: Tensor, matrices: Tensor) -> list[Tensor]:
    """Keys and values [M, h, K] of ``rows`` [M, W] by ``matrices`` [2, h, K, W]."""
    return [F.linear(rows, matrix.flatten(0, 1)).view(len(rows), *matrix.shape[:2]) for matrix in matrices]


def _add_rows(
    rows: Tensor, matrices: Tensor, grads: list[Tensor], of_matrices: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the rows with their gradients [part of M, W], of which few exist at a time.

    Args:
        grads: of keys and values [M, h, K].
        of_matrices: to which the gradients of ``matrices`` are added; None if they are not needed.
    """
    matrix = matrices.flatten(0, 2)
    step = max(1, _BLOCK // len(matrix))
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        both = rows.new_empty(len(rows[part]), *matrices.shape[:3])
        for i, grad in enumerate(grads):
            both[:, i] = grad[part]
        both = both.flatten(1)
        of_rows = torch.zeros_like(rows[part], dtype=accumulation_dtype(rows.dtype))
        add_weight_gradient(of_rows, both.t(), matrix)
        if of_matrices is not None:
            add_weight_gradient(of_matrices.flatten(0, 2), both, rows[part])
        yield part, of_rows


def _attend(
    segment: SegmentContext, query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [N, h, K] and log-sum-exp [h, N] over keys and values [M, h, K]."""
    if segment.attention_plan is None:
        indices = segment.query_index, segment.key_index, segment.key_end
        return reference.tree_attention_forward(query, keys, values, *indices, scale)
    from dta_kernels.tree_attention.launch import tree_attention_forward

    ends, plan = segment.local_key_end, segment.attention_plan
    return tree_attention_forward(query, keys, values, ends, plan, scale, segment.shared)


def _gradients(segment: SegmentContext, tensors: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, and in at least float32 those of keys and values.

    Args:
        tensors: the output's gradient, queries, keys, values, output and log-sum-exp.
    """
    if segment.attention_plan is None:
        indices = segment.query_index, segment.key_index, segment.key_end
        return reference.tree_attention_backward(*tensors, *indices, scale)
    from dta_kernels.tree_attention.launch import tree_attention_backward

    ends, plan = segment.local_key_end, segment.attention_plan
    return tree_attention_backward(*tensors, ends, plan, scale, None, segment.shared)
