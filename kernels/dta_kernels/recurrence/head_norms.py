"""Triton kernels of norms of heads: unit length of keys and queries, and the gated RMSNorm after gated delta net.

Heads are read in place, also where they are columns of a wider product, and so is the gate of the RMSNorm. Only the
inputs are kept for the backward. Arithmetic is in float32, results are rounded once, and weight gradients are summed in
a fixed order. Nothing is tuned: flash-linear-attention's own kernels for unit length are tuned again for every 65,536
rows that a call has more.

Legend: N tokens, H key heads, J value heads, K and V sizes of their heads.
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
def _unit_kernel(x_in, y_out, num_rows, x_stride, num_heads, size, eps, BR: tl.constexpr, BC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.arange(0, BC)[None, :]
    exists = (row < num_rows)[:, None] & (channel < size)
    x_offset = (row // num_heads)[:, None] * x_stride + (row % num_heads)[:, None] * size + channel
    x = tl.load(x_in + x_offset, mask=exists, other=0.0).to(tl.float32)
    y = x / tl.sqrt(tl.sum(x * x, 1) + eps)[:, None]
    tl.store(y_out + row[:, None] * size + channel, y.to(y_out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def _unit_gradient_kernel(
    grad_in, x_in, grad_out, num_rows, x_stride, num_heads, size, eps, BR: tl.constexpr, BC: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.arange(0, BC)[None, :]
    exists = (row < num_rows)[:, None] & (channel < size)
    x_offset = (row // num_heads)[:, None] * x_stride + (row % num_heads)[:, None] * size + channel
    offset = row[:, None] * size + channel
    x = tl.load(x_in + x_offset, mask=exists, other=0.0).to(tl.float32)
    grad = tl.load(grad_in + offset, mask=exists, other=0.0).to(tl.float32)
    inverse = (1.0 / tl.sqrt(tl.sum(x * x, 1) + eps))[:, None]
    y = x * inverse
    grad_x = (grad - y * tl.sum(grad * y, 1)[:, None]) * inverse
    tl.store(grad_out + offset, grad_x.to(grad_out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    x_in, z_in, weight_in, y_out, num_rows, z_stride, num_heads, size, eps, BR: tl.constexpr, BC: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.arange(0, BC)[None, :]
    exists = (row < num_rows)[:, None] & (channel < size)
    x = tl.load(x_in + row[:, None] * size + channel, mask=exists, other=0.0).to(tl.float32)
    z_offset = (row // num_heads)[:, None] * z_stride + (row % num_heads)[:, None] * size + channel
    z = tl.load(z_in + z_offset, mask=exists, other=0.0).to(tl.float32)
    weight = tl.load(weight_in + channel, mask=channel < size, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / size + eps)
    y = x * rstd[:, None] * weight * (z * tl.sigmoid(z))
    tl.store(y_out + row[:, None] * size + channel, y.to(y_out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_gradient_kernel(
    grad_in, x_in, z_in, weight_in, grad_x_out, grad_z_out, grad_weight_out, num_rows, z_stride, num_heads, size, eps,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program * BR + tl.arange(0, BR)
    channel = tl.arange(0, BC)[None, :]
    exists = (row < num_rows)[:, None] & (channel < size)
    offset = row[:, None] * size + channel
    x = tl.load(x_in + offset, mask=exists, other=0.0).to(tl.float32)
    z_offset = (row // num_heads)[:, None] * z_stride + (row % num_heads)[:, None] * size + channel
    z = tl.load(z_in + z_offset, mask=exists, other=0.0).to(tl.float32)
    grad = tl.load(grad_in + offset, mask=exists, other=0.0).to(tl.float32)
    weight = tl.load(weight_in + channel, mask=channel < size, other=0.0).to(tl.float32)
    rstd = (1.0 / tl.sqrt(tl.sum(x * x, 1) / size + eps))[:, None]
    hat, sigmoid = x * rstd, tl.sigmoid(z)
    grad_normed = grad * (z * sigmoid)
    grad_z = grad * hat * weight * (sigmoid * (1 + z * (1 - sigmoid)))
    grad_hat = grad_normed * weight
    grad_x = (grad_hat - hat * (tl.sum(grad_hat * hat, 1) / size)[:, None]) * rstd
    tl.store(grad_x_out + offset, grad_x.to(grad_x_out.dtype.element_ty), mask=exists)
    tl.store(grad_z_out + offset, grad_z.to(grad_z_out.dtype.element_ty), mask=exists)
    total = tl.sum(grad_normed * hat, 0)[None, :]
    tl.store(grad_weight_out + program * size + channel, total, mask=channel < size)


_KERNELS = {
    "unit": _unit_kernel,
    "unit gradient": _unit_gradient_kernel,
    "gated": _gated_kernel,
    "gated gradient": _gated_gradient_kernel,
}


@lru_cache
def _launcher(name: str, size: int) -> Launcher:
    return Launcher(_KERNELS[name], BR=_ROWS, BC=triton.next_power_of_2(size), num_warps=4)


class _UnitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NHK: Tensor) -> Tensor:
        N, H, K = x_NHK.shape
        y = torch.empty((N, H, K), dtype=x_NHK.dtype, device=x_NHK.device)
        if N:
            _launcher("unit", K)((ceil_div(N * H, _ROWS),), x_NHK, y, N * H, x_NHK.stride(0), H, K, NORM_EPS)
        ctx.save_for_backward(x_NHK)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        N, H, K = x.shape
        out = torch.empty((N, H, K), dtype=x.dtype, device=x.device)
        if N:
            _launcher("unit gradient", K)(
                (ceil_div(N * H, _ROWS),), grad.contiguous(), x, out, N * H, x.stride(0), H, K, NORM_EPS
            )
        return out


def unit_heads(x_NHK: Tensor) -> Tensor:
    """``x`` [N, H, K] with each head divided by its length; the heads of a token must be adjacent in memory."""
    return _UnitHeads.apply(x_NHK)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NJV: Tensor, z_NJV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
        N, J, V = x_NJV.shape
        x, y = x_NJV.contiguous(), torch.empty((N, J, V), dtype=x_NJV.dtype, device=x_NJV.device)
        if N:
            _launcher("gated", V)((ceil_div(N * J, _ROWS),), x, z_NJV, weight_V, y, N * J, z_NJV.stride(0), J, V, eps)
        ctx.save_for_backward(x, z_NJV, weight_V)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        x, z, weight = ctx.saved_tensors
        (N, J, V), programs = x.shape, ceil_div(x.shape[0] * x.shape[1], _ROWS)
        grad_x, grad_z = torch.empty_like(x), torch.empty(x.shape, dtype=z.dtype, device=z.device)
        partial = torch.empty(programs, V, dtype=torch.float32, device=x.device)
        if N:
            _launcher("gated gradient", V)(
                (programs,), grad.contiguous(), x, z, weight, grad_x, grad_z, partial, N * J, z.stride(0), J, V, ctx.eps
            )
        return grad_x, grad_z, partial.sum(0).to(weight.dtype), None


def gated_norm(x_NJV: Tensor, z_NJV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """``rms_norm(x) * weight * silu(z)``, [N, J, V]; the heads of a row of ``z`` must be adjacent in memory."""
    return _GatedNorm.apply(x_NJV, z_NJV, weight_V, eps)
