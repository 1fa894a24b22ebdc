"""Triton kernels of RMSNorm on a residual stream, fused with the addition of a branch, forward and backward.

Between two blocks, a layer adds the output of the first one to the stream and normalizes the sum for the next one. Here
that is one pass over memory, and so is its backward: its inputs are the gradients of the normed rows and of the stream,
its outputs their common gradient and that of the weight. Arithmetic is in float32, and results are rounded once.

Liger-Kernel 0.8.5 has such kernels, too, but their sums depend on the GPU's number of processors, the backward with an
addition is compiled again for every number of rows, and statistics for recomputing the normed rows are not kept.

Weight gradients are summed in a fixed order, in float32: first by each program over its rows, then over programs.

Legend: N rows, C columns, P programs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div
from dta_kernels.layers.few_rows import sum_of_terms
from dta_kernels.overlap import overlap_settings, wait_for_previous

# Maximum number of programs of the backward pass: enough to fill any GPU twice, few enough for a small tensor of
# partial sums.
_MAX_PROGRAMS = 512


class RMSNormOutput(NamedTuple):
    """``normed`` and ``residual`` with the input's shape and dtype, ``rstd`` float32 [N] (not differentiable)."""

    normed: Tensor
    residual: Tensor
    rstd: Tensor


@triton.jit
def _forward_kernel(
    x_in, added_in, weight_in, normed_out, residual_out, rstd_out, num_columns, eps, TERMS: tl.constexpr,
    OVERLAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < num_columns
    offset = row * num_columns + column
    weight = tl.load(weight_in + column, mask=exists, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    x = tl.load(x_in + offset, mask=exists, other=0.0).to(tl.float32)
    if TERMS:
        size = tl.num_programs(0).to(tl.int64) * num_columns
        total = x + sum_of_terms(added_in + offset, exists, size, TERMS, residual_out.dtype.element_ty)
        rounded = total.to(residual_out.dtype.element_ty)
        tl.store(residual_out + offset, rounded, mask=exists)
        # Later passes read the rounded sum, so the rounded sum is normalized.
        x = rounded.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / num_columns + eps)
    tl.store(rstd_out + row, rstd)
    tl.store(normed_out + offset, (x * rstd * weight).to(normed_out.dtype.element_ty), mask=exists)


@triton.jit
def _again_kernel(x_in, rstd_in, weight_in, normed_out, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < num_columns
    offset = row * num_columns + column
    x = tl.load(x_in + offset, mask=exists, other=0.0).to(tl.float32)
    weight = tl.load(weight_in + column, mask=exists, other=0.0).to(tl.float32)
    normed = x * tl.load(rstd_in + row) * weight
    tl.store(normed_out + offset, normed.to(normed_out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def _backward_kernel(
    grad_normed_in, grad_residual_in, x_in, rstd_in, weight_in, grad_out, grad_weight_out, num_rows, rows_per_program,
    num_columns, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    exists = column < num_columns
    weight = tl.load(weight_in + column, mask=exists, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], dtype=tl.float32)
    begin = program * rows_per_program
    end = tl.minimum(begin + rows_per_program, num_rows)
    stride = tl.zeros([], dtype=tl.int64) + num_columns
    for row in range(begin, end):
        offset = row * stride + column
        rstd = tl.load(rstd_in + row)
        hat = tl.load(x_in + offset, mask=exists, other=0.0).to(tl.float32) * rstd
        grad_normed = tl.load(grad_normed_in + offset, mask=exists, other=0.0).to(tl.float32)
        grad_hat = grad_normed * weight
        grad = (grad_hat - hat * (tl.sum(grad_hat * hat, 0) / num_columns)) * rstd
        if ADD:
            grad += tl.load(grad_residual_in + offset, mask=exists, other=0.0).to(tl.float32)
        tl.store(grad_out + offset, grad.to(grad_out.dtype.element_ty), mask=exists)
        grad_weight += grad_normed * hat
    tl.store(grad_weight_out + program.to(tl.int64) * num_columns + column, grad_weight, mask=exists)


_KERNELS = {"forward": _forward_kernel, "again": _again_kernel, "backward": _backward_kernel}


@lru_cache
def _launcher(name: str, num_columns: int, **constants: int) -> Launcher:
    block = triton.next_power_of_2(num_columns)
    num_warps = 4 if block <= 1024 else 8 if block <= 4096 else 16
    return Launcher(_KERNELS[name], **constants, BLOCK=block, num_warps=num_warps)


@lru_cache  # by position, which takes half as long
def _forward(num_columns: int, terms: int, overlap: bool) -> Launcher:
    return _launcher("forward", num_columns, TERMS=terms, **overlap_settings(overlap))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight_C: Tensor, eps: float, added: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        normed, residual, rstd_N = rms_norm_forward(x, weight_C, eps, added)
        ctx.save_for_backward(residual, weight_C, rstd_N)
        ctx.adds = added is not None
        ctx.mark_non_differentiable(rstd_N)
        ctx.set_materialize_grads(False)
        return normed, residual.view_as(residual) if added is None else residual, rstd_N

    @staticmethod
    def backward(ctx, grad_normed: Tensor | None, grad_residual: Tensor | None, _: None):
        x, weight_C, rstd_N = ctx.saved_tensors
        if grad_normed is None:
            return grad_residual, None, None, grad_residual if ctx.adds else None
        grad, grad_weight_PC = rms_norm_partial_gradients(grad_normed, grad_residual, x, rstd_N, weight_C)
        return grad, grad_weight_PC.sum(0).to(weight_C.dtype), None, grad if ctx.adds else None


def rms_norm_forward(
    x: Tensor, weight_C: Tensor, eps: float, added: Tensor | None = None, overlap: bool = False
) -> RMSNormOutput:
    """``rms_norm`` without autograd; without ``added`` the residual is ``x`` itself, made contiguous.

    Args:
        added: of the shape of ``x``, or several terms [S, *x.shape] whose sum is added (``few_rows.sum_of_terms``).
        overlap: launch as a kernel of a decoding pass, see ``dta_kernels.overlap``.
    """
    x = x.contiguous()
    C = weight_C.shape[0]
    N = x.numel() // C
    terms = 0 if added is None else added.shape[0] if added.dim() > x.dim() else 1
    normed = torch.empty_like(x)
    residual = torch.empty_like(x) if terms else x
    rstd_N = x.new_empty(N, dtype=torch.float32)
    if N:
        other = added.contiguous() if terms else x
        _forward(C, terms, overlap)((N,), x, other, weight_C, normed, residual, rstd_N, C, eps)
    return RMSNormOutput(normed, residual, rstd_N)


def rms_norm_partial_gradients(
    grad_normed: Tensor, grad_residual: Tensor | None, x: Tensor, rstd_N: Tensor, weight_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x``, the norm's input, and of the weight, as a partial sum of each program, float32 [P, C]."""
    C, N = weight_C.shape[0], rstd_N.shape[0]
    grad = torch.empty_like(x)
    programs = min(N, _MAX_PROGRAMS)
    grad_weight_PC = x.new_empty((programs, C), dtype=torch.float32)
    if N:
        grad_normed = grad_normed.contiguous()
        adds = grad_residual is not None
        # The last programs may have no rows; they write zeros.
        _launcher("backward", C, ADD=adds)(
            (programs,), grad_normed, grad_residual.contiguous() if adds else grad_normed, x, rstd_N, weight_C, grad,
            grad_weight_PC, N, ceil_div(N, programs), C,
        )  # fmt: skip
    return grad, grad_weight_PC


def rms_norm(x: Tensor, weight_C: Tensor, eps: float, added: Tensor | None = None) -> RMSNormOutput:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) of ``x``, or of ``x + added``.

    Args:
        x: [..., C], float32 or 16 bits.
        weight_C: factor of each column.
        eps: added to the mean square.
        added: same shape and dtype as ``x``.

    Returns:
        The normed rows, the residual stream (``x`` or the sum) and the statistics for ``rms_norm_again``. Use the
        residual in place of the input afterwards, so that its gradient is added within the backward pass.
    """
    return RMSNormOutput(*_RMSNorm.apply(x, weight_C, eps, added))


def rms_norm_again(residual: Tensor, rstd_N: Tensor, weight_C: Tensor, normed: Tensor) -> None:
    """Recompute the normed rows of an earlier pass into ``normed``, bit for bit; all tensors are contiguous."""
    C, N = weight_C.shape[0], rstd_N.shape[0]
    if N:
        _launcher("again", C)((N,), residual, rstd_N, weight_C, normed, C)
