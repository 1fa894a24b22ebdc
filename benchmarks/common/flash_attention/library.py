"""Calls FlashAttention 4 for one segment; only this module and ``flash.mask`` import the library.

The forward is the library's own. Its backward rounds dK and dV of every call to the inputs' dtype, but a key collects
the gradients of many segments. The backward here therefore runs the library's kernels one by one, in its order and with
its settings, and leaves out the one that rounds dK and dV: the float32 sums stay as they are
(``flash.key_gradients``). These are internal functions, so one version is supported (``flash.plan.VERSION``).

Legend: N queries, M keys, H query heads, G key/value heads, D head size. Tensors that the library reads have a batch
dimension of 1 in front.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
import torch
from flash_attn.cute import interface
from flash_attn.cute.block_sparsity import (
    BlockSparseTensorsTorch,
    normalize_block_sparse_config_bwd,
    to_cute_block_sparse_tensors,
)
from flash_attn.cute.cute_dsl_utils import to_cute_aux_tensor, to_cute_tensor, torch2cute_dtype_map
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.utils import AuxData
from torch import Tensor

from common.flash_attention.mask import tree_mask
from common.flash_attention.plan import BLOCK, BlockLists, FlashAttentionPlan
from dta_kernels.tree_attention.plan import AttentionShape

# Compute capability 9.0, and the multiple of channels to which the library's accumulators are rounded.
_ARCH, _CHANNELS = 90, 32
# The library's backward by properties that it compiles in.
_COMPILED: dict[tuple, object] = {}


class BackwardBuffers(NamedTuple):
    """Temporary tensors of a backward pass in float32; R is N rounded up to whole tiles of the kernels.

    Attributes:
        dq: sums of dQ [1, H, R * D]; delta, lse_2: [1, H, R].
        dk, dv: sums of dK and dV, see ``flash.key_gradients.empty_sums``.
    """

    dq: Tensor
    delta: Tensor
    lse_2: Tensor
    dk: Tensor
    dv: Tensor


def query_tile(head_size: int) -> int:
    """Queries in a tile of the library's backward."""
    return _settings(head_size).m_block_size


def _settings(head_size: int) -> interface.BwdConfig:
    return interface._tile_size_bwd_sm90(head_size, head_size, causal=False, local=False, sparse_block_size_q=BLOCK)


def forward_blocks(plan: FlashAttentionPlan) -> BlockSparseTensorsTorch:
    """The blocks of a plan's forward in the library's form."""
    return _blocks(plan.forward)


def backward_blocks(plan: FlashAttentionPlan) -> BlockSparseTensorsTorch:
    """The blocks of a plan's backward in the library's form, repeated for all heads without a copy."""
    settings = _settings(plan.shape.head_size)
    blocks, _ = normalize_block_sparse_config_bwd(
        _blocks(plan.backward),
        batch_size=1,
        num_head=plan.shape.num_heads,
        seqlen_q=plan.num_queries,
        seqlen_k=plan.num_keys,
        block_size=(settings.m_block_size, settings.n_block_size),
        q_subtile_factor=BLOCK // settings.m_block_size,
    )
    return blocks


def _blocks(lists: BlockLists) -> BlockSparseTensorsTorch:
    return BlockSparseTensorsTorch(
        mask_block_cnt=lists.partial_count,
        mask_block_idx=lists.partial,
        full_block_cnt=lists.full_count,
        full_block_idx=lists.full,
        block_size=(BLOCK, BLOCK),
    )


def forward(
    q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, key_end_M: Tensor, blocks: BlockSparseTensorsTorch, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [N, H, D] and log-sum-exp [H, N] of attention; all tensors are contiguous."""
    out, lse, *_ = interface._flash_attn_fwd(
        q_NHD[None],
        k_MGD[None],
        v_MGD[None],
        softmax_scale=scale,
        mask_mod=tree_mask,
        block_sparse_tensors=blocks,
        return_lse=True,
        aux_tensors=[key_end_M],
    )
    return out[0], lse[0]


def backward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    key_end_M: Tensor,
    blocks: BlockSparseTensorsTorch,
    scale: float,
    shape: AttentionShape,
    buffers: BackwardBuffers,
) -> Tensor:
    """dQ [N, H, D]; ``buffers`` then hold the sums of dK and dV.

    Args:
        inputs: dO, q, k, v, the output and the log-sum-exp, contiguous.
        blocks: from ``backward_blocks``.
    """
    settings, dtype, D = _settings(shape.head_size), torch2cute_dtype_map[shape.dtype], shape.head_size
    grad_out, q, k, v, out, lse = (tensor[None] for tensor in inputs)
    # The kernels may start before those in front of them have ended, but not before these.
    buffers.dk.zero_()
    buffers.dv.zero_()
    interface._bwd_preprocess(
        out, grad_out, buffers.delta, lse, buffers.lse_2, buffers.dq, None, None, None, dtype, D, D,
        settings.m_block_size, fake_mode=False, hdim_multiple_of=_CHANNELS,
    )  # fmt: skip
    tensors = (q, k, v, grad_out, buffers.lse_2, buffers.delta, buffers.dq, buffers.dk, buffers.dv)
    # As in the library, a single block of queries or keys gets a kernel of its own.
    key = (shape, q.shape[1] <= settings.m_block_size, k.shape[1] <= settings.n_block_size)
    if key not in _COMPILED:
        _COMPILED[key] = _compile(tensors, key_end_M, blocks, scale, shape)
    _COMPILED[key](
        *tensors, scale, *_UNUSED, AuxData([key_end_M], None),
        (
            blocks.mask_block_cnt, blocks.mask_block_idx, blocks.full_block_cnt, blocks.full_block_idx,
            blocks.cu_total_m_blocks, blocks.cu_block_idx_offsets, blocks.dq_write_order, blocks.dq_write_order_full,
        ),
        None,
    )  # fmt: skip
    dq = torch.empty_like(q)
    threads = 128 if settings.dQ_single_wg else settings.num_wg * 128
    interface._bwd_postprocess_convert(
        buffers.dq, dq, scale, None, None, _ARCH, dtype, D, settings.m_block_size, threads, settings.AtomLayoutMdQ,
        settings.dQ_swapAB, fake_mode=False, hdim_multiple_of=_CHANNELS,
    )  # fmt: skip
    return dq[0]


# Lengths of several sequences, windows and semaphores: 4, 2 and 3 arguments.
_UNUSED = (None,) * 9


def _compile(
    tensors: tuple[Tensor, ...],
    key_end_M: Tensor,
    blocks: BlockSparseTensorsTorch,
    scale: float,
    shape: AttentionShape,
) -> object:
    """The library's main kernel of the backward for tensors like these, of any lengths."""
    settings = _settings(shape.head_size)
    kernel = FlashAttentionBackwardSm90(
        torch2cute_dtype_map[shape.dtype],
        shape.head_size,
        shape.head_size,
        shape.group_size,
        False,
        is_local=False,
        deterministic=False,
        tile_m=settings.m_block_size,
        tile_n=settings.n_block_size,
        Q_stage=settings.num_stages_Q,
        dO_stage=settings.num_stages_dO,
        PdS_stage=settings.num_stages_PdS,
        SdP_swapAB=settings.SdP_swapAB,
        dKV_swapAB=settings.dKV_swapAB,
        dQ_swapAB=settings.dQ_swapAB,
        AtomLayoutMSdP=settings.AtomLayoutMSdP,
        AtomLayoutNdKV=settings.AtomLayoutNdKV,
        AtomLayoutMdQ=settings.AtomLayoutMdQ,
        num_threads=(settings.num_wg + 1) * 128,
        V_in_regs=False,
        mask_mod=tree_mask,
        has_aux_tensors=True,
        q_subtile_factor=BLOCK // settings.m_block_size,
        dQ_single_wg=settings.dQ_single_wg,
    )
    return cute.compile(
        kernel,
        *map(to_cute_tensor, tensors),
        scale,
        *_UNUSED,
        AuxData([to_cute_aux_tensor(key_end_M)], None),
        to_cute_block_sparse_tensors(blocks),
        None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
