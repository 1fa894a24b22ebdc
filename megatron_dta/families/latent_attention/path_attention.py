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

from collections.abc import Callable

import torch
from torch import Tensor

import dta_kernels.tree_attention.reference as reference
from dta_kernels.layers.weight_gradients import add_weight_gradient
from megatron_dta.core.model.attention.segment_context import SegmentContext
from megatron_dta.families.latent_attention.expansion import Expansion, expanded

Expand = Callable[[], Expansion]
# Numbers of gradients of keys and values that are multiplied at once; 128 MiB in 16 bits.
_BLOCK = 1 << 26


def attend_on_path(
    segment: SegmentContext, layer_number: int, query: Tensor, latents: Tensor, expansion: Expand, scale: float
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
        ctx, query: Tensor, latents: Tensor, segment: SegmentContext, row: int, expand: Expand, scale: float
    ) -> Tensor:
        segment.pool.layer(row).keys[segment.slots] = latents
        expansion = expand()
        rows = expansion.rows(segment.keys_and_values(row)[0])
        outputs = []
        for heads in expansion.groups(len(rows)):
            tensors = query[:, heads], *expanded(rows, expansion.matrices(heads))
            outputs.append(_attend("tree_attention_forward", segment, tensors, scale))
            del tensors
        out, lse = outputs[0] if len(outputs) == 1 else map(torch.cat, zip(*outputs, strict=True), (1, 0))
        segment.pool.finish(row, gradients=False)
        ctx.save_for_backward(query, out, lse)
        ctx.segment, ctx.row, ctx.expand, ctx.scale = segment, row, expand, scale
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        query, out, lse = ctx.saved_tensors
        segment, grad_keys = ctx.segment, ctx.segment.pool.layer(ctx.row).grad_keys
        with torch.enable_grad():
            expansion = ctx.expand()
        rows = expansion.rows(segment.keys_and_values(ctx.row)[0])
        sums, grad_queries = expansion.sums(grad_keys.dtype), []
        for heads in expansion.groups(len(rows)):
            matrices = expansion.matrices(heads)
            tensors = grad_out[:, heads], query[:, heads], *expanded(rows, matrices), out[:, heads], lse[heads]
            grad_query, *grads = _attend("tree_attention_backward", segment, tensors, ctx.scale)
            del tensors
            grad_queries.append(grad_query)
            of_matrices = torch.zeros_like(matrices, dtype=grad_keys.dtype)
            step = max(1, _BLOCK // matrices[..., 0].numel())
            for part in (slice(begin, begin + step) for begin in range(0, len(rows), step)):
                grad = _gradients_of_rows(rows[part], matrices, [of_keys[part] for of_keys in grads], of_matrices)
                # Slots are distinct, so the scatter is deterministic on a GPU too.
                grad_keys.index_add_(0, segment.key_slots[part], expansion.of_latents(grad, rows[part], sums))
                del grad
            expansion.add_matrices(sums, heads, of_matrices)
            del grads
        expansion.backward(sums)
        grad_latents = grad_keys[segment.slots].to(query.dtype, copy=True)
        segment.pool.finish(ctx.row, gradients=True)
        grad_query = grad_queries[0] if len(grad_queries) == 1 else torch.cat(grad_queries, 1)
        return grad_query, grad_latents, None, None, None, None


def _gradients_of_rows(rows: Tensor, matrices: Tensor, grads: list[Tensor], of_matrices: Tensor) -> Tensor:
    """The gradients of some rows, of those of their keys and values [., h, K]; adds to those of the matrices."""
    both = rows.new_empty(len(rows), *matrices.shape[:3])
    for i, grad in enumerate(grads):
        both[:, i] = grad
    both, of_rows = both.flatten(1), torch.zeros_like(rows, dtype=of_matrices.dtype)
    add_weight_gradient(of_rows, both.t(), matrices.flatten(0, 2))
    add_weight_gradient(of_matrices.flatten(0, 2), both, rows)
    return of_rows


def _attend(name: str, segment: SegmentContext, tensors: tuple[Tensor, ...], scale: float) -> tuple[Tensor, ...]:
    """``tree_attention_forward`` or ``tree_attention_backward`` of some heads."""
    if segment.attention_plan is None:
        return getattr(reference, name)(*tensors, segment.query_index, segment.key_index, segment.key_end, scale)
    from dta_kernels.tree_attention import launch

    where = segment.local_key_end, segment.attention_plan, scale
    return getattr(launch, name)(*tensors, *where, shared=segment.shared)
