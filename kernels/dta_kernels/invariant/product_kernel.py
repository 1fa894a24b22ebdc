"""Triton kernel of a product that adds along K in one order, for any number of rows.

Legend: n rows, N outputs, K inputs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div
from dta_kernels.tree_attention.common import product

# Rows, outputs and inputs of a tile, warps, stages. 16 bits: of up to _MANY outputs, and of more.
_NARROW, _WIDE, _MANY = (64, 32, 128, 4, 4), (64, 64, 64, 4, 4), 1 << 14
_FLOAT32 = (64, 64, 32, 4, 1)


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_in, weight_in, out, num_rows, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of outputs, blocks of rows)."""
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)[None, :]
    inner = tl.arange(0, INPUTS)
    total = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for begin in range(0, K, INPUTS):
        k = begin + inner
        x = tl.load(x_in + row * K + k[None, :], mask=(row < num_rows) & (k < K)[None, :], other=0.0)
        weight = tl.load(weight_in + output * K + k[:, None], mask=(output < N) & (k < K)[:, None], other=0.0)
        total = product(x, weight, total)
    tl.store(out + row * N + output, total.to(out.dtype.element_ty), mask=(row < num_rows) & (output < N))


def _tiles(N: int, size: int) -> tuple[int, ...]:
    return _FLOAT32 if size == 4 else _NARROW if N <= _MANY else _WIDE


@lru_cache
def _launcher(N: int, K: int, size: int) -> Launcher:
    rows, outputs, inputs, num_warps, num_stages = _tiles(N, size)
    constants = {"N": N, "K": K, "ROWS": rows, "OUTPUTS": outputs, "INPUTS": inputs}
    return Launcher(_kernel, **constants, num_warps=num_warps, num_stages=num_stages)


def multiply(x_nK: Tensor, weight_NK: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``x @ weight.T`` [n, N] in ``dtype``, by default that of ``x``; sums are float32."""
    (n, K), N, size = x_nK.shape, len(weight_NK), x_nK.element_size()
    out_nN = x_nK.new_empty(n, N, dtype=dtype or x_nK.dtype)
    if n:
        rows, outputs, *_ = _tiles(N, size)
        grid = ceil_div(N, outputs), ceil_div(n, rows)
        _launcher(N, K, size)(grid, x_nK.contiguous(), weight_NK.contiguous(), out_nN, n)
    return out_nN
