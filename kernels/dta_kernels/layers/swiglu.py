"""Triton kernels of SwiGLU (Shazeer 2020, arXiv:2002.05202) on a feed-forward layer's first product.

Gate and up projection are read in place, side by side in one row of Megatron's product, so nothing is split or joined.
The backward writes both gradients into one tensor. Arithmetic is in float32, and results are rounded once.
(Liger-Kernel takes the two as separate contiguous tensors and rounds the gate before the product.)

Experts' rows are also multiplied by their router weights in the same pass, where plain operations would take about ten.
The gradient of a row's weight is summed by the row's program, so it is reproducible.

Legend: R rows of experts, F width of the feed-forward layer.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div

_BLOCK, _WEIGHTED_BLOCK = 2048, 1024


@triton.jit
def _forward_kernel(x_in, y_out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    source = x_in + row * 2 * width + column
    gate = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=exists, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_out + row * width + column, y.to(y_out.dtype.element_ty), mask=exists)


@triton.jit
def _backward_kernel(grad_in, x_in, grad_out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    offset = row * 2 * width + column
    gate = tl.load(x_in + offset, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(x_in + offset + width, mask=exists, other=0.0).to(tl.float32)
    grad = tl.load(grad_in + row * width + column, mask=exists, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    grad_up = grad * (gate * sigmoid)
    tl.store(grad_out + offset, grad_gate.to(grad_out.dtype.element_ty), mask=exists)
    tl.store(grad_out + offset + width, grad_up.to(grad_out.dtype.element_ty), mask=exists)


@triton.jit
def _weighted_kernel(x_in, weight_in, y_out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_in + row).to(tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        exists = column < WIDTH
        gate = tl.load(x_in + row * 2 * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
        up = tl.load(x_in + (row * 2 + 1) * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
        y = gate * tl.sigmoid(gate) * up * weight
        tl.store(y_out + row * WIDTH + column, y.to(y_out.dtype.element_ty), mask=exists)


@triton.jit
def _weighted_gradient_kernel(
    grad_in, x_in, weight_in, grad_out, weight_grad_out, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_in + row).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        exists = column < WIDTH
        gate = tl.load(x_in + row * 2 * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
        up = tl.load(x_in + (row * 2 + 1) * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
        grad = tl.load(grad_in + row * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        total += grad * (gate * sigmoid * up)
        grad *= weight
        grad_gate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        grad_up = grad * (gate * sigmoid)
        target = grad_out + row * 2 * WIDTH + column
        tl.store(target, grad_gate.to(grad_out.dtype.element_ty), mask=exists)
        tl.store(target + WIDTH, grad_up.to(grad_out.dtype.element_ty), mask=exists)
    tl.store(weight_grad_out + row, tl.sum(total, 0).to(weight_grad_out.dtype.element_ty))


@lru_cache
def _launcher(backward: bool, width: int) -> Launcher:
    block = min(_BLOCK, triton.next_power_of_2(width))
    return Launcher(_backward_kernel if backward else _forward_kernel, BLOCK=block, num_warps=4)


@lru_cache
def _weighted_launcher(backward: bool, width: int) -> Launcher:
    block = min(_WEIGHTED_BLOCK, triton.next_power_of_2(width))
    return Launcher(_weighted_gradient_kernel if backward else _weighted_kernel, WIDTH=width, BLOCK=block, num_warps=4)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        swiglu_into(x, y)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return swiglu_backward(grad, *ctx.saved_tensors)


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` [..., F] of ``[gate, up]`` [..., 2 F]."""
    return _SwiGLU.apply(x)


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of ``x``, which must be contiguous."""
    width = x.shape[-1] // 2
    grad_x = torch.empty_like(x)
    if x.numel():
        grid = x.numel() // (2 * width), ceil_div(width, _BLOCK)
        _launcher(True, width)(grid, grad.contiguous(), x, grad_x, width)
    return grad_x


def swiglu_into(x: Tensor, y: Tensor) -> None:
    """Write ``swiglu(x)`` into ``y``, without autograd; both must be contiguous."""
    width = y.shape[-1]
    if y.numel():
        _launcher(False, width)((y.numel() // width, ceil_div(width, _BLOCK)), x, y, width)


def weighted_swiglu(x_RF: Tensor, weight_R: Tensor) -> Tensor:
    """``silu(gate) * up * weight`` [R, F] of ``[gate, up]`` [R, 2 F] and a weight for each row, without autograd."""
    rows, width = x_RF.shape[0], x_RF.shape[1] // 2
    y = x_RF.new_empty(rows, width)
    if y.numel():
        _weighted_launcher(False, width)((rows,), x_RF.contiguous(), weight_R.contiguous(), y)
    return y


def weighted_swiglu_backward(grad_RF: Tensor, x_RF: Tensor, weight_R: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and ``weight``."""
    x, weight = x_RF.contiguous(), weight_R.contiguous()
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    if x.numel():
        _weighted_launcher(True, x.shape[1] // 2)((len(x),), grad_RF.contiguous(), x, weight, grad_x, grad_weight)
    return grad_x, grad_weight
