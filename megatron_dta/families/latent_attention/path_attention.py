"""Latent attention of a segment: its tokens attend to their ancestors, of which the pool holds latents only.

Forward: the segment's latents are written to the pool; keys and values of [ancestors, own] are expanded from latents,
attended to, and dropped. Backward: they are expanded again, and their gradients go through the expansion into its
weight and into the latents: those of the ancestors are added to the accumulators in the pool, the segment's own are
returned to autograd together with what its descendants have added there before.

Legend: N the segment's tokens, M keys (its ancestors', then its own), H query heads, K channels of a query and of a
key (values are padded to it with zeros), L of a latent, R of a key for positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import dta_kernels.tree_attention.reference as reference
from megatron_dta.core.model.attention.segment_context import SegmentContext

# Keys and values [M, H, K] of latents [M, 1, L + R].
Expand = Callable[[Tensor], tuple[Tensor, Tensor]]


def attend_on_path(
    segment: SegmentContext, layer_number: int, query: Tensor, latents: Tensor, expand: Expand, scale: float
) -> Tensor:
    """Output [N, H, K] for ``query`` [N, H, K] and the segment's ``latents`` [N, 1, L + R].

    Args:
        expand: its gradients reach its weight without autograd of the caller.
        scale: factor on the scores.
    """
    if query.shape[0] == 0:
        # An empty segment attends to nothing, but every parameter must still get a gradient of zero.
        keys, values = expand(latents)
        return query + keys.sum() + values.sum()
    return _PathAttention.apply(query, latents, segment, segment.layer_rows[layer_number], expand, scale)


class _PathAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, latents: Tensor, segment: SegmentContext, row: int, expand: Expand, scale: float
    ) -> Tensor:
        segment.pool.layer(row).keys[segment.slots] = latents
        keys, values = expand(segment.keys_and_values(row)[0])
        out, lse = _attend(segment, query, keys, values, scale)
        segment.pool.finish(row, gradients=False)
        ctx.save_for_backward(query, out, lse)
        ctx.segment, ctx.row, ctx.expand, ctx.scale = segment, row, expand, scale
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        query, out, lse = ctx.saved_tensors
        segment, num_ancestors = ctx.segment, ctx.segment.ancestor_slots.shape[0]
        latents = segment.keys_and_values(ctx.row)[0].detach().requires_grad_()
        with torch.enable_grad():
            keys, values = ctx.expand(latents)
        tensors = grad_out, query, keys.detach(), values.detach(), out, lse
        grad_query, *grads = _gradients(segment, tensors, ctx.scale)
        torch.autograd.backward([keys, values], [grad.to(query.dtype) for grad in grads])
        pool = segment.pool.layer(ctx.row)
        grad = latents.grad.to(pool.grad_keys.dtype)
        # Slots are distinct, so the scatter is deterministic on a GPU too.
        pool.grad_keys.index_add_(0, segment.ancestor_slots, grad[:num_ancestors])
        grad_latents = grad[num_ancestors:] + pool.grad_keys[segment.slots]
        segment.pool.finish(ctx.row, gradients=True)
        return grad_query, grad_latents.to(query.dtype), None, None, None, None


def _attend(
    segment: SegmentContext, query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [N, H, K] and log-sum-exp [H, N] over keys and values [M, H, K]."""
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
