"""Sums the partial weight gradients of a kernel's programs directly into the buffers that accumulate them.

PyTorch would need a sum, a conversion and an addition for each weight, and would round the sum to the weight's dtype.

Legend: P programs, C columns.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div

_ROWS, _COLUMNS = 64, 32


@triton.jit
def _add_columns(partial_in, sum_out, column, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    exists = column < num_columns
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, num_rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        offset = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        total += tl.load(partial_in + offset, mask=(row < num_rows)[:, None] & exists[None, :], other=0.0)
    kept = tl.load(sum_out + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(sum_out + column, (kept + tl.sum(total, 0)).to(sum_out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def _add_pair_kernel(
    first_in, second_in, first_out, second_out, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(1) == 0:
        _add_columns(first_in, first_out, column, num_rows, num_columns, ROWS, COLUMNS)
    else:
        _add_columns(second_in, second_out, column, num_rows, num_columns, ROWS, COLUMNS)


@lru_cache
def _add_pair() -> Launcher:
    return Launcher(_add_pair_kernel, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4)


def add_partial_sums(sums_C: tuple[Tensor, Tensor], partials_PC: tuple[Tensor, Tensor]) -> None:
    """``sum += partial.sum(0)`` for both pairs, accumulated in float32 and in a fixed order.

    Args:
        sums_C: any floating-point dtype, contiguous.
        partials_PC: float32, contiguous; both of one shape.
    """
    P, C = partials_PC[0].shape
    if partials_PC[1].shape != (P, C) or any(sums.shape != (C,) for sums in sums_C):
        raise ValueError("both sums must be vectors with a column's entry for each column of the partial sums")
    if P:
        _add_pair()((ceil_div(C, _COLUMNS), 2), *partials_PC, *sums_C, P, C)
