"""Triton kernels for the elementwise passes over a chunk of logits: softmax statistics, and the gradient in place.

The statistics take one read of the logits, the gradient one read and one write in the logits' own dtype. With PyTorch's
ops (the references in ``logit_chunks``), these passes read and write float32 copies of the logits about fifteen times,
which takes longer than the matrix products. All arithmetic is in float32 here, too. Each program processes one row in a
fixed order, so results are reproducible bit for bit. ``num_columns`` is specialized, for loads of 16 bytes.

Legend: B rows, V columns of the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.logprobs.logit_chunks import RowStatistics

_BLOCK = 4096


@triton.jit
def _moments_kernel(
    logits, largest_out, mass_out, moment_out, stride, num_columns, inverse_temperature, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    column = tl.arange(0, BLOCK)
    # Sums per lane over the blocks, relative to the maximum so far; the lanes are summed at the end.
    largest = tl.full([], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    moment = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in tl.range(0, num_columns, BLOCK):
        exists = begin + column < num_columns
        x = tl.load(source + begin + column, mask=exists, other=float("-inf")).to(tl.float32) * inverse_temperature
        new_largest = tl.maximum(largest, tl.max(x, 0))
        # Before the first block the sums are zero, so their shift does not matter.
        shift = tl.where(largest == float("-inf"), 0.0, largest - new_largest)
        decay = tl.exp(shift)
        below = tl.where(exists, x - new_largest, 0.0)
        weight = tl.where(exists, tl.exp(below), 0.0)
        moment = (moment + shift * mass) * decay + below * weight
        mass = mass * decay + weight
        largest = new_largest
    tl.store(largest_out + row, largest)
    tl.store(mass_out + row, tl.sum(mass, 0))
    tl.store(moment_out + row, tl.sum(moment, 0))


@triton.jit
def _gradient_kernel(
    logits, gradient_out, largest_in, log_mass_in, edge_factor_in, entropy_in, entropy_factor_in, stride, out_stride,
    num_columns, inverse_temperature, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    exists = column < num_columns
    x = tl.load(logits + row * stride + column, mask=exists, other=0.0).to(tl.float32) * inverse_temperature
    logprob = (x - tl.load(largest_in + row)) - tl.load(log_mass_in + row)
    factor = tl.load(edge_factor_in + row)
    if WITH_ENTROPY:
        factor = factor + tl.load(entropy_factor_in + row) * (logprob + tl.load(entropy_in + row))
    gradient = -tl.exp(logprob) * factor * inverse_temperature
    target = gradient_out + row * out_stride + column
    tl.store(target, gradient.to(gradient_out.dtype.element_ty), mask=exists)


def row_moments(logits_BV: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of each row of ``x = logits / temperature``, float32 [B] each.

    Returns:
        ``(largest, mass, moment)``: the largest x, the sum of exp(x - largest), the sum of (x - largest) times that.
    """
    B, V = logits_BV.shape
    largest, mass, moment = (logits_BV.new_empty(B, dtype=torch.float32) for _ in range(3))
    if B:
        _moments_kernel[(B,)](
            logits_BV, largest, mass, moment, logits_BV.stride(0), V, 1.0 / temperature, BLOCK=_BLOCK, num_warps=8
        )
    return largest, mass, moment


def logit_gradient(
    logits_BV: Tensor, out_BV: Tensor, temperature: float, statistics: RowStatistics, edge_factor_B: Tensor,
    grad_entropy_B: Tensor | None,
) -> None:  # fmt: skip
    """Write the gradient of the logits, without the one-hot terms of the targets, to ``out``, which may be ``logits``.

    That is ``-p (edge_factor + grad_entropy (logp + entropy)) / temperature``, where ``edge_factor`` is the sum of the
    gradients of the row's edges.
    """
    B, V = logits_BV.shape
    if B == 0:
        return
    _gradient_kernel[(B, triton.cdiv(V, _BLOCK))](
        logits_BV, out_BV, statistics.largest, statistics.log_mass, edge_factor_B, statistics.entropy,
        edge_factor_B if grad_entropy_B is None else grad_entropy_B, logits_BV.stride(0), out_BV.stride(0), V,
        1.0 / temperature, WITH_ENTROPY=grad_entropy_B is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
