"""Products whose rows have the same bits in a product of any number of rows: the switch of the mode, and ``product``.

In 16 bits on a GPU a library's product adds along K in one order as long as it does not divide K among programs
(split-K), which PyTorch can forbid. On an H100 products of cuBLAS and Triton without it agree bit for bit, for tensor
core instructions of 16 and of 64 rows. So the library's products of many rows stay, after a test of every shape at its
first use (``_library_agrees``). Few rows, which the library is slow with if it must not divide K, other shapes and
float32 are multiplied by ``product_kernel``. On a CPU the rows are multiplied in blocks of one size, the last one
padded. Rows are padded as well: libraries add rows that begin within a cache line in another order.

The switch is one for the process, because that of split-K is.

Legend: n rows, N outputs, K inputs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_CPU_ROWS, _CPU_INPUTS, _SUMMED = 32, 32, 1024
_FEW_ROWS = 128
# Numbers of rows for which the library must agree with the kernel.
_TRIED_ROWS = (129, 160, 192, 200, 256, 320, 384, 512, 777, 1024, 1500, 2048)
_TRIED_OUTPUTS = 2**27

_is_on = False
_may_split = False


def set_batch_invariant(on: bool) -> None:
    """Switch the mode for this process; a change forbids split-K in 16 bits, or allows it again."""
    global _is_on, _may_split
    if torch.cuda.is_available() and on != _is_on:
        # Only cuBLASLt can be asked for products without split-K.
        torch.backends.cuda.preferred_blas_library("cublaslt" if on else "default")
        settings = torch.backends.cuda.matmul
        try:
            settings.allow_bf16_reduced_precision_reduction = (False, False) if on else True
        except (RuntimeError, TypeError):  # PyTorch before 2.10 knows no second value
            _may_split = True
    _is_on = on


def is_batch_invariant() -> bool:
    """Whether the mode is on."""
    return _is_on


def product(x: Tensor, weight_NK: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``x @ weight.T`` [..., N] of ``x`` [..., K], without autograd where the mode is on.

    Args:
        dtype: of the result; None for that of ``x``.
    """
    if not _is_on:
        return _library(x, weight_NK, dtype)
    rows_nK = x.reshape(-1, x.shape[-1])
    suits_library = x.element_size() == 2 and len(rows_nK) > _FEW_ROWS
    if not x.is_cuda:
        out_nN = _in_blocks(rows_nK, weight_NK, dtype)
    elif suits_library and _library_agrees(*weight_NK.shape, x.dtype, dtype, x.device):
        out_nN = _library(rows_nK, weight_NK, dtype)
    else:
        from dta_kernels.invariant.product_kernel import multiply

        out_nN = multiply(rows_nK, weight_NK, dtype)
    return out_nN.view(*x.shape[:-1], len(weight_NK))


def row_sums(x_nK: Tensor) -> Tensor:
    """Sum of each row [n]; PyTorch divides a single long row among the threads of a CPU."""
    if not _is_on:
        return x_nK.sum(-1)
    return F.pad(x_nK, (0, -x_nK.shape[1] % _SUMMED)).unflatten(-1, (-1, _SUMMED)).sum(-1).sum(-1)


class InvariantProduct(torch.autograd.Function):
    """``product`` with autograd."""

    @staticmethod
    def forward(ctx, x: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return product(x, weight_NK)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight_NK = ctx.saved_tensors
        return grad @ weight_NK, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _library(x: Tensor, weight_NK: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype in (None, x.dtype):
        return F.linear(x, weight_NK)
    return torch.mm(x, weight_NK.t(), out_dtype=dtype) if x.is_cuda else x.to(dtype) @ weight_NK.t().to(dtype)


def _in_blocks(rows_nK: Tensor, weight_NK: Tensor, dtype: torch.dtype | None) -> Tensor:
    n, missing = len(rows_nK), -rows_nK.shape[1] % _CPU_INPUTS
    if n == 0:
        return _library(rows_nK, weight_NK, dtype)
    weight_NK = F.pad(weight_NK, (0, missing)) if missing else weight_NK
    blocks = F.pad(rows_nK, (0, missing, 0, -n % _CPU_ROWS)).split(_CPU_ROWS)
    return torch.cat([_library(block, weight_NK, dtype) for block in blocks])[:n]


@lru_cache
def _library_agrees(N: int, K: int, dtype: torch.dtype, out_dtype: torch.dtype | None, device: torch.device) -> bool:
    """Whether products of the library have the bits of the kernel, on random numbers."""
    from dta_kernels.invariant.product_kernel import multiply

    tried = [n for n in _TRIED_ROWS if n * N <= _TRIED_OUTPUTS or n <= 256]
    generator = torch.Generator(device).manual_seed(N + K)
    rows_nK, weight_NK = (torch.randn(size, K, generator=generator, device=device).to(dtype) for size in (tried[-1], N))
    all_nN = multiply(rows_nK, weight_NK, out_dtype)
    return not _may_split and all(torch.equal(_library(rows_nK[:n], weight_NK, out_dtype), all_nN[:n]) for n in tried)
