"""Triton kernels that bring the heads of keys and queries to unit length.

Heads are read in place, also where they are columns of a wider product. Arithmetic is in float32, and nothing is tuned:
flash-linear-attention's own kernels are tuned again for every 65,536 rows that a call has more.

Legend: N tokens, H heads, K size of a head.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div
from dta_kernels.recurrence.reference import NORM_EPS

_ROWS = 16


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(x_in, y_out, num_rows, x_stride, num_heads, size, eps, BR: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.arange(0, BK)[None, :]
    exists = (row < num_rows)[:, None] & (channel < size)
    x_offset = (row // num_heads)[:, None] * x_stride + (row % num_heads)[:, None] * size + channel
    x = tl.load(x_in + x_offset, mask=exists, other=0.0).to(tl.float32)
    y = x / tl.sqrt(tl.sum(x * x, 1) + eps)[:, None]
    tl.store(y_out + row[:, None] * size + channel, y.to(y_out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    grad_in, x_in, grad_out, num_rows, x_stride, num_heads, size, eps, BR: tl.constexpr, BK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.arange(0, BK)[None, :]
    exists = (row < num_rows)[:, None] & (channel < size)
    x_offset = (row // num_heads)[:, None] * x_stride + (row % num_heads)[:, None] * size + channel
    offset = row[:, None] * size + channel
    x = tl.load(x_in + x_offset, mask=exists, other=0.0).to(tl.float32)
    grad = tl.load(grad_in + offset, mask=exists, other=0.0).to(tl.float32)
    inverse = (1.0 / tl.sqrt(tl.sum(x * x, 1) + eps))[:, None]
    y = x * inverse
    grad_x = (grad - y * tl.sum(grad * y, 1)[:, None]) * inverse
    tl.store(grad_out + offset, grad_x.to(grad_out.dtype.element_ty), mask=exists)


_KERNELS = {"forward": _forward_kernel, "backward": _backward_kernel}


@lru_cache
def _launcher(name: str, size: int) -> Launcher:
    """Takes the kernel's name, because hashing the kernel takes as long as a launch."""
    return Launcher(_KERNELS[name], BR=_ROWS, BK=triton.next_power_of_2(size), num_warps=4)


class _UnitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NHK: Tensor) -> Tensor:
        N, H, K = x_NHK.shape
        y = torch.empty((N, H, K), dtype=x_NHK.dtype, device=x_NHK.device)
        if N:
            _launcher("forward", K)((ceil_div(N * H, _ROWS),), x_NHK, y, N * H, x_NHK.stride(0), H, K, NORM_EPS)
        ctx.save_for_backward(x_NHK)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        N, H, K = x.shape
        out = torch.empty((N, H, K), dtype=x.dtype, device=x.device)
        if N:
            _launcher("backward", K)(
                (ceil_div(N * H, _ROWS),), grad.contiguous(), x, out, N * H, x.stride(0), H, K, NORM_EPS
            )
        return out


def unit_heads(x_NHK: Tensor) -> Tensor:
    """``x`` [N, H, K] with each head divided by its length; the heads of a token must be adjacent in memory."""
    return _UnitHeads.apply(x_NHK)
