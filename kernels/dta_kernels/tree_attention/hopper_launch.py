"""Launches the Hopper kernels of ``hopper_forward``, ``hopper_backward`` and ``hopper_query_gradients``.

Separate from ``launch``, so that Gluon, which is experimental in Triton, is imported only if it is used.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dta_kernels.launch import Launcher
from dta_kernels.tree_attention import hopper_backward, hopper_forward, hopper_query_gradients
from dta_kernels.tree_attention.config import KernelConfig
from dta_kernels.tree_attention.layer_cache import SharedByLayers
from dta_kernels.tree_attention.plan import AttentionShape, DeviceTable, TreeAttentionPlan


def forward_on_hopper(
    q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, out_NHD: Tensor, lse_HN: Tensor, key_end_M: Tensor,
    plan: TreeAttentionPlan, scale: float, shared: SharedByLayers,
) -> None:  # fmt: skip
    shape, settings = plan.shape, plan.config.forward
    _check(plan, settings, rows=128)
    M, G, D = k_MGD.shape
    pack = settings.pack(shape.group_size)
    describe = partial(_descriptor, shape=[M, G * D], block=[settings.keys, D])
    keys, values = shared.of_tensor("k", k_MGD, describe), shared.of_tensor("v", v_MGD, describe)
    launch = shared.get("forward", lambda: _launcher("forward", shape, pack, BLOCK_K=settings.keys))
    heads = shape.num_heads // pack
    launch(
        (heads, plan.forward.programs.shape[0]), q_NHD, keys, values, out_NHD, lse_HN,
        *_room_for_shares(plan.forward, heads, D, lse_HN, shared), key_end_M, plan.forward.programs,
        plan.forward.blocks, plan.num_queries, plan.num_keys, plan.num_ancestors, scale,
    )  # fmt: skip


def key_gradients_on_hopper(
    plan: TreeAttentionPlan, shared: SharedByLayers, tiles: tuple[Tensor, Tensor], arrays: tuple[Tensor | None, ...],
    num_added: int, first_group: int, groups: int, scale: float,
) -> None:  # fmt: skip
    """One launch for dK, dV and tiles of dS.

    Args:
        tiles: dO and Q in the order of tiles, [H / PACK, N, PACK, D].
        arrays: the arguments of ``key_gradients_kernel`` from k to tiles.
    """
    shape, settings = plan.shape, plan.config.key_gradients
    _check(plan, settings, rows=64)
    if settings.keys != 128 or not settings.tma:
        raise ValueError("the Hopper kernel for dK and dV takes 128 keys and tma")
    D = shape.head_size
    size = [plan.num_queries * shape.num_heads, D]
    k, v, delta, lse_2, dk, dv, grad_keys, grad_values, slots, dscores, key_end, turns, programs, *table = arrays
    descriptors = [
        shared.of_tensor(("descriptor", index), x, make)
        for index, (x, make) in enumerate(
            [(tile, lambda x: _descriptor(x, size, [64, D])) for tile in tiles]
            + [(row, _row_descriptor) for row in (lse_2, delta)]
            + [(dscores, lambda x: _descriptor(x, [x.numel() // 64, 64], [64, 64]))]
        )
    ]
    pack, accumulate = settings.pack(shape.group_size), grad_keys is not None
    launch = shared.get("key gradients", lambda: _launcher("keys", shape, pack, ACCUMULATE=accumulate))
    launch(
        (groups, programs.shape[0]), *descriptors, k, v, dk, dv, grad_keys, grad_values, slots, key_end, turns,
        programs, *table, plan.num_queries, plan.num_keys, plan.num_ancestors, num_added, first_group, scale,
    )  # fmt: skip


def query_gradients_on_hopper(
    plan: TreeAttentionPlan, shared: SharedByLayers, arrays: tuple[Tensor, Tensor, Tensor, Tensor], rows: DeviceTable,
    first_chunk: int, chunks: int, scale: float,
) -> None:  # fmt: skip
    """One launch for dQ of ``chunks`` tiles of heads, from the tiles of dS of these.

    Args:
        arrays: dS, k, dq, and any float32 tensor.
    """
    dscores, k_MGD, dq_NHD, sums = arrays
    shape, settings = plan.shape, plan.config.query_gradients
    _check(plan, settings, rows=128)
    if plan.config.key_gradients.rows != 64 or settings.keys != 128:
        raise ValueError("the Hopper kernel for dQ takes tiles of dS of 64 rows and 128 keys")
    M, G, D = k_MGD.shape
    tiles = shared.of_tensor("dS", dscores, lambda x: _descriptor(x, [x.numel() // 64, 64], [64, 64]))
    keys = shared.of_tensor("k for dQ", k_MGD, lambda x: _descriptor(x, [M, G * D], [64, D]))
    pack = plan.config.key_gradients.pack(shape.group_size)
    launch = shared.get("query gradients", lambda: _launcher("queries", shape, pack))
    launch(
        (chunks, rows.programs.shape[0]), tiles, keys, dq_NHD, *_room_for_shares(rows, chunks, D, sums, shared),
        rows.programs, rows.blocks, rows.tiles, plan.num_queries, first_chunk, scale,
    )  # fmt: skip


def _room_for_shares(
    rows: DeviceTable, heads: int, head_size: int, float32: Tensor, shared: SharedByLayers
) -> tuple[Tensor, Tensor]:
    """Memory for the sums of programs that share rows, and their flags, which every launch leaves at zero."""
    num_slots = rows.num_unfinished * heads * 2
    flags = shared.get(("flags", num_slots), lambda: float32.new_zeros(num_slots, dtype=torch.int32))
    return float32.new_empty(num_slots * (64 * head_size + 128)), flags


_KERNELS = {
    "forward": hopper_forward.forward_kernel,
    "keys": hopper_backward.key_gradients_kernel,
    "queries": hopper_query_gradients.query_gradients_kernel,
}


@lru_cache
def _launcher(name: str, shape: AttentionShape, pack: int, **more: int) -> Launcher:
    constants = dict(H=shape.num_heads, G=shape.num_groups, D=shape.head_size, PACK=pack)
    return Launcher(_KERNELS[name], **constants, **more, num_warps=4)


def _descriptor(x: Tensor, shape: list[int], block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, shape, [shape[1], 1], block, _layout(*block, x.dtype))


def _row_descriptor(x: Tensor) -> TensorDescriptor:
    """Descriptor of a float32 vector of any shape, in blocks of 64."""
    return TensorDescriptor(x, [x.numel()], [1], [64], _ROW_LAYOUT)


# Making a layout takes the host as long as a launch.
_ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@lru_cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def _check(plan: TreeAttentionPlan, settings: KernelConfig, rows: int) -> None:
    if settings.rows != rows or plan.shape.head_size not in (64, 128) or plan.shape.dtype == torch.float32:
        raise ValueError(f"the Hopper kernel takes {rows} rows, head sizes 64 and 128, and 16-bit inputs")
