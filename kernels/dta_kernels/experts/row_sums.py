"""Triton kernel that sums a few rows each in a fixed order: the experts' outputs of a token, or its gradients.

PyTorch's ops either add with atomic operations, in varying order and with a rounding after each addition, or write all
rows once more before the sum. This kernel reads each row once, adds in float32 and rounds once.

Legend: R rows, N sums of up to K rows each, C columns.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher

_BLOCK = 2048


@triton.jit
def _kernel(rows_in, places_in, sums_out, EACH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        exists = column < WIDTH
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for k in tl.static_range(EACH):
            row = tl.load(places_in + token * EACH + k).to(tl.int64)
            is_read = column < tl.where(row >= 0, WIDTH, 0)
            total += tl.load(rows_in + row * WIDTH + column, mask=is_read, other=0.0).to(tl.float32)
        tl.store(sums_out + token * WIDTH + column, total.to(sums_out.dtype.element_ty), mask=exists)


@lru_cache
def _launcher(rows_per_token: int, width: int) -> Launcher:
    block = min(_BLOCK, triton.next_power_of_2(width))
    return Launcher(_kernel, EACH=rows_per_token, WIDTH=width, BLOCK=block, num_warps=max(1, min(8, block // 256)))


def sum_rows(rows_RC: Tensor, places_NK: Tensor) -> Tensor:
    """Sums [N, C] of the rows at ``places`` (integers; negative ones are skipped), without autograd."""
    rows = rows_RC.contiguous()
    sums = rows.new_empty(places_NK.shape[0], rows.shape[1])
    if sums.numel():
        _launcher(places_NK.shape[1], rows.shape[1])((len(sums),), rows, places_NK.contiguous(), sums)
    return sums
