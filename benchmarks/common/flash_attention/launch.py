"""Tree attention by FlashAttention 4, forward and backward, for one segment, on Hopper GPUs.

The contract is that of ``launch``, with a ``FlashAttentionPlan``. dK and dV are added up in float32 and never rounded
before that, but in no fixed order, and neither is dQ: results do not repeat bit for bit.

Legend: N queries, M = A + N keys (A ancestors, then the queries' own), H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.flash_attention.key_gradients import add_key_gradients, empty_sums
from common.flash_attention.plan import FlashAttentionPlan
from dta_kernels.launch import ceil_div
from dta_kernels.tree_attention.launch import KeyGradients, check_accumulators, check_inputs
from dta_kernels.tree_attention.layer_cache import SharedByLayers

__all__ = ["KeyGradients", "tree_attention_backward", "tree_attention_forward"]


def tree_attention_forward(
    q_NHD: Tensor,
    k_MGD: Tensor,
    v_MGD: Tensor,
    key_end_M: Tensor,
    plan: FlashAttentionPlan,
    scale: float,
    shared: SharedByLayers | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every query over the keys it sees, see ``launch.tree_attention_forward``."""
    from common.flash_attention import library

    check_inputs(plan, scale, q_NHD, k_MGD, v_MGD, key_end_M)
    shared = shared or SharedByLayers()
    blocks = shared.get("flash forward", lambda: library.forward_blocks(plan))
    inputs = (tensor.contiguous() for tensor in (q_NHD, k_MGD, v_MGD, key_end_M))
    return library.forward(*inputs, blocks, scale)


def tree_attention_backward(
    grad_out_NHD: Tensor,
    q_NHD: Tensor,
    k_MGD: Tensor,
    v_MGD: Tensor,
    out_NHD: Tensor,
    lse_HN: Tensor,
    key_end_M: Tensor,
    plan: FlashAttentionPlan,
    scale: float,
    into: KeyGradients | None = None,
    shared: SharedByLayers | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``tree_attention_forward``, from its outputs, see ``launch.tree_attention_backward``."""
    from common.flash_attention import library

    check_inputs(plan, scale, q_NHD, k_MGD, v_MGD, key_end_M)
    shared, shape = shared or SharedByLayers(), plan.shape
    blocks = shared.get("flash backward", lambda: library.backward_blocks(plan))
    buffers = shared.get("flash buffers", lambda: _buffers(plan, library, q_NHD.device))
    inputs = tuple(x.contiguous() for x in (grad_out_NHD, q_NHD, k_MGD, v_MGD, out_NHD, lse_HN))
    dq_NHD = library.backward(inputs, key_end_M.contiguous(), blocks, scale, shape, buffers)
    sums = buffers.dk, buffers.dv
    if into is None:
        out = tuple(k_MGD.new_empty(k_MGD.shape, dtype=torch.float32) for _ in range(2))
        add_key_gradients(sums, scale, out, plan.num_keys)
        return dq_NHD, *out
    check_accumulators(plan, into)
    out = tuple(k_MGD.new_empty((plan.num_queries, *k_MGD.shape[1:])) for _ in range(2))
    add_key_gradients(sums, scale, out, plan.num_keys, (into.keys, into.values), into.slots)
    return dq_NHD, *out


def _buffers(plan: FlashAttentionPlan, library: object, device: torch.device) -> object:
    shape, tile = plan.shape, library.query_tile(plan.shape.head_size)
    rows = ceil_div(plan.num_queries, tile) * tile

    def empty(elements: int) -> Tensor:
        return torch.empty(1, shape.num_heads, elements, dtype=torch.float32, device=device)

    dk, dv = (empty_sums(plan.num_keys, shape.num_groups, shape.head_size, device) for _ in range(2))
    return library.BackwardBuffers(empty(rows * shape.head_size), empty(rows), empty(rows), dk, dv)
