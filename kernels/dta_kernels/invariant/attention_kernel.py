"""Launches the kernel of ``attention`` for a segment: that of paged attention, with a table of keys for each run.

Legend: see ``attention``.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.invariant.attention import DeviceTables, invariant_config
from dta_kernels.launch import Launcher
from dta_kernels.paged_attention.kernels import attend_part, load_tile
from dta_kernels.tree_attention.config import padded_head_size


@triton.jit(do_not_specialize=["num_queries"], do_not_specialize_on_alignment=["tiles", "tables"])
def _kernel(
    q_NHD, k_MGD, v_MGD, out_NHD, lse_HN, tiles, tables, num_queries, scale, H: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles x G)."""
    J: tl.constexpr = H // G
    group = tl.program_id(0) % G
    first, count, first_position, table_begin = load_tile(tiles, tl.program_id(0) // G)
    row = tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_D)
    query = row // J
    exists = query < count
    head = group * J + row % J
    offset = ((first + query) * H + head)[:, None] * D + channel[None, :]
    stored = exists[:, None] & (channel < D)[None, :]
    q = tl.load(q_NHD + offset, mask=stored, other=0.0)
    scale_2 = scale * 1.4426950408889634  # log2(e)
    acc, lse = attend_part(
        q, first_position + query, scale_2, k_MGD + group * D, v_MGD + group * D, tables + table_begin, 0,
        first_position + count, G * D, D, BLOCK_D, 1, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    tl.store(out_NHD + offset, acc.to(out_NHD.dtype.element_ty), mask=stored)
    tl.store(lse_HN + head.to(tl.int64) * num_queries + first + query, lse * 0.6931471805599453, mask=exists)


@lru_cache
def _launcher(H: int, G: int, D: int, dtype: torch.dtype) -> Launcher:
    config = invariant_config(H // G, D, dtype)
    constants = {"H": H, "G": G, "D": D, "BLOCK_D": padded_head_size(D), "BLOCK_M": config.rows, "BLOCK_N": config.keys}
    return Launcher(_kernel, **constants, num_warps=config.num_warps, num_stages=config.num_stages)


def path_attention_forward(
    q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, tables: DeviceTables, scale: float
) -> tuple[Tensor, Tensor]:
    """``(out_NHD, lse_HN)`` as of ``tree_attention_forward``; tensors are contiguous and of one dtype."""
    (N, H, D), G = q_NHD.shape, k_MGD.shape[1]
    out_NHD, lse_HN = torch.empty_like(q_NHD), q_NHD.new_empty((H, N), dtype=torch.float32)
    grid = (len(tables.tiles) * G,)
    _launcher(H, G, D, q_NHD.dtype)(grid, q_NHD, k_MGD, v_MGD, out_NHD, lse_HN, *tables, N, scale)
    return out_NHD, lse_HN
