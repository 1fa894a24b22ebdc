"""Launches the Hopper kernels of ``tree_attention_hopper`` and ``tree_attention_hopper_backward``.

Apart from ``tree_attention``, so that Gluon, which is experimental in Triton, is imported only where they are used.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dta_kernels import tree_attention_hopper, tree_attention_hopper_backward
from dta_kernels.tree_attention_config import KernelConfig
from dta_kernels.tree_attention_plan import TreeAttentionPlan


def forward_on_hopper(
    q_NHD: Tensor,
    k_MGD: Tensor,
    v_MGD: Tensor,
    out_NHD: Tensor,
    lse_HN: Tensor,
    key_end_M: Tensor,
    plan: TreeAttentionPlan,
    scale: float,
) -> None:
    """Write ``out_NHD`` and ``lse_HN``."""
    shape, settings = plan.shape, plan.config.forward
    _check(plan, settings, rows=128)
    M, G, D = k_MGD.shape
    pack = settings.pack(shape.group_size)
    keys, values = (_descriptor(x, [M, G * D], [settings.keys, D]) for x in (k_MGD, v_MGD))
    tree_attention_hopper.forward_kernel[(shape.num_heads // pack, plan.forward.programs.shape[0])](
        q_NHD, keys, values, out_NHD, lse_HN, key_end_M, plan.forward.programs, plan.forward.blocks,
        plan.num_queries, plan.num_keys, plan.num_ancestors, scale,
        H=shape.num_heads, G=G, D=D, PACK=pack, BLOCK_K=settings.keys, num_warps=4,
    )  # fmt: skip


def key_gradients_on_hopper(
    plan: TreeAttentionPlan,
    tiles: tuple[Tensor, Tensor],
    arrays: tuple[Tensor | None, ...],
    num_added: int,
    first_group: int,
    groups: int,
    scale: float,
) -> None:
    """One launch for dK, dV and tiles of dS.

    Args:
        tiles: dO and Q in the order of tiles, [H / PACK, N, PACK, D].
        arrays: the arguments of ``key_gradients_kernel`` from k to tiles.
    """
    shape, settings = plan.shape, plan.config.key_gradients
    _check(plan, settings, rows=64)
    if settings.keys != 128 or not settings.tma or not plan.stored_groups:
        raise ValueError("the Hopper kernel for dK and dV takes 128 keys, tma, and stored scores")
    D = shape.head_size
    size = [plan.num_queries * shape.num_heads, D]
    k, v, delta, lse_2, dk, dv, grad_keys, grad_values, slots, dscores, key_end, programs, *table = arrays
    statistics = (_row_descriptor(x, 64) for x in (lse_2, delta))
    scores = _descriptor(dscores, [dscores.numel() // 64, 64], [64, 64])
    tree_attention_hopper_backward.key_gradients_kernel[(groups, programs.shape[0])](
        *(_descriptor(tile, size, [64, D]) for tile in tiles), *statistics, scores, k, v, dk, dv, grad_keys,
        grad_values, slots, key_end, programs, *table, plan.num_queries, plan.num_keys, plan.num_ancestors, num_added,
        first_group, scale, H=shape.num_heads, G=shape.num_groups, D=D, PACK=settings.pack(shape.group_size),
        ACCUMULATE=grad_keys is not None, num_warps=4,
    )  # fmt: skip


def _descriptor(x: Tensor, shape: list[int], block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, shape, [shape[1], 1], block, _layout(*block, x.dtype))


def _row_descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """Of a float32 vector of any shape."""
    return TensorDescriptor(x, [x.numel()], [1], [block], _row_layout())


# Making a layout takes the host as long as a launch.
@lru_cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


@lru_cache
def _row_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def _check(plan: TreeAttentionPlan, settings: KernelConfig, rows: int) -> None:
    if settings.rows != rows or plan.shape.head_size not in (64, 128) or plan.shape.dtype == torch.float32:
        raise ValueError(f"the Hopper kernel takes {rows} rows, head sizes 64 and 128, and 16-bit inputs")
    if plan.prefix[0]:
        raise ValueError("the Hopper kernels do not take a library's prefix")
