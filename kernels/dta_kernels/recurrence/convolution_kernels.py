"""Triton kernels of the short convolution along the paths of a tree (``short_convolution``), forward and backward.

Rows are read in place, also where they are columns of a wider product, and by index where a run begins. The gradient by
a row comes from its successors in its run; the few rows that runs begin behind get the rest afterwards. Arithmetic is
in float32, and weight gradients are summed in a fixed order.

Legend: N tokens, C channels, W width, P programs along the tokens, R runs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div

_TOKENS, _CHANNELS = 32, 128


@triton.jit
def _row(rows_in, before_in, source, channel, exists, num_tokens, num_rows, row_stride, num_channels):
    """Rows ``source`` [BT] in float32, [BT, BC]; zeros for number ``num_rows``."""
    is_own = source < num_tokens
    within = tl.load(rows_in + source[:, None] * row_stride + channel, mask=exists & is_own[:, None], other=0.0)
    is_before = (source >= num_tokens) & (source < num_rows)
    offset = (source - num_tokens)[:, None] * num_channels + channel
    before = tl.load(before_in + offset, mask=exists & is_before[:, None], other=0.0)
    return within.to(tl.float32) + before.to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _forward_kernel(
    rows_in, before_in, weight_in, bias_in, taps_in, out, num_tokens, num_rows, row_stride, num_channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channel = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    exists = (token < num_tokens)[:, None] & (channel < num_channels)
    mixed = tl.zeros([BT, BC], dtype=tl.float32)
    if HAS_BIAS:
        mixed += tl.load(bias_in + channel, mask=channel < num_channels, other=0.0).to(tl.float32)
    for w in tl.static_range(WIDTH):
        source = tl.load(taps_in + token * WIDTH + w, mask=token < num_tokens, other=0)
        x = _row(rows_in, before_in, source, channel, exists, num_tokens, num_rows, row_stride, num_channels)
        weight = tl.load(weight_in + channel * WIDTH + w, mask=channel < num_channels, other=0.0).to(tl.float32)
        mixed += x * weight
    y = mixed * tl.sigmoid(mixed)
    tl.store(out + token[:, None] * num_channels + channel, y.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _mixed_gradient_kernel(
    grad_in, rows_in, before_in, weight_in, bias_in, taps_in, grad_out, grad_weight_out, num_tokens, num_rows,
    row_stride, num_channels, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    token = program * BT + tl.arange(0, BT)
    channel = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    exists = (token < num_tokens)[:, None] & (channel < num_channels)
    mixed = tl.zeros([BT, BC], dtype=tl.float32)
    if HAS_BIAS:
        mixed += tl.load(bias_in + channel, mask=channel < num_channels, other=0.0).to(tl.float32)
    for w in tl.static_range(WIDTH):
        source = tl.load(taps_in + token * WIDTH + w, mask=token < num_tokens, other=0)
        x = _row(rows_in, before_in, source, channel, exists, num_tokens, num_rows, row_stride, num_channels)
        weight = tl.load(weight_in + channel * WIDTH + w, mask=channel < num_channels, other=0.0).to(tl.float32)
        mixed += x * weight
    gate = tl.sigmoid(mixed)
    offset = token[:, None] * num_channels + channel
    grad = tl.load(grad_in + offset, mask=exists, other=0.0).to(tl.float32) * gate * (1 + mixed * (1 - gate))
    tl.store(grad_out + offset, grad, mask=exists)
    for w in tl.static_range(WIDTH):
        source = tl.load(taps_in + token * WIDTH + w, mask=token < num_tokens, other=0)
        x = _row(rows_in, before_in, source, channel, exists, num_tokens, num_rows, row_stride, num_channels)
        total = tl.sum(grad * x, 0)[None, :]
        offset = (program * num_channels + channel) * WIDTH + w
        tl.store(grad_weight_out + offset, total, mask=channel < num_channels)


@triton.jit(do_not_specialize=["num_tokens"])
def _row_gradient_kernel(
    grad_in, weight_in, run_end_in, grad_out, num_tokens, num_channels, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channel = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    exists = (token < num_tokens)[:, None] & (channel < num_channels)
    end = tl.load(run_end_in + token, mask=token < num_tokens, other=0)
    total = tl.zeros([BT, BC], dtype=tl.float32)
    for back in tl.static_range(WIDTH):
        later = token + back
        is_in_run = exists & (later < end)[:, None]
        grad = tl.load(grad_in + later[:, None] * num_channels + channel, mask=is_in_run, other=0.0)
        offset = channel * WIDTH + (WIDTH - 1 - back)
        total += grad * tl.load(weight_in + offset, mask=channel < num_channels, other=0.0).to(tl.float32)
    tl.store(grad_out + token[:, None] * num_channels + channel, total, mask=exists)


_KERNELS = {"forward": _forward_kernel, "mixed": _mixed_gradient_kernel, "rows": _row_gradient_kernel}


@lru_cache
def _launcher(name: str, width: int, has_bias: bool) -> Launcher:
    return Launcher(_KERNELS[name], WIDTH=width, HAS_BIAS=has_bias, BT=_TOKENS, BC=_CHANNELS, num_warps=4)


def _grid(num_tokens: int, num_channels: int) -> tuple[int, int]:
    return ceil_div(num_tokens, _TOKENS), ceil_div(num_channels, _CHANNELS)


def convolution_forward(
    rows_NC: Tensor, before: Tensor, weight_CW: Tensor, taps_NW: Tensor, bias_C: Tensor | None
) -> Tensor:
    """``silu`` of the convolution of every token, [N, C].

    Args:
        rows_NC: the tokens' rows; columns must be adjacent in memory.
        before: contiguous rows from outside, numbered from N on.
        taps_NW: int64, the rows that each token sees, itself last; the number after the last row means zeros.
    """
    N, C = rows_NC.shape
    out = torch.empty(N, C, dtype=rows_NC.dtype, device=rows_NC.device)
    if N:
        weight, has_bias = weight_CW.contiguous(), bias_C is not None
        _launcher("forward", weight_CW.shape[1], has_bias)(
            _grid(N, C), rows_NC, before, weight, bias_C if has_bias else weight, taps_NW, out, N,
            N + before.shape[0], rows_NC.stride(0), C,
        )  # fmt: skip
    return out


def convolution_gradients(
    grad_NC: Tensor, rows_NC: Tensor, before: Tensor, weight_CW: Tensor, taps_NW: Tensor, run_end_N: Tensor,
    bias_C: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients in float32: by the convolution before ``silu`` [N, C], by the rows [N, C] as far as they come from
    tokens of the same run, and by the weight [C, W].

    Args:
        run_end_N: int64, one past the last token of each token's run.
    """
    (N, C), W = rows_NC.shape, weight_CW.shape[1]
    device, weight = rows_NC.device, weight_CW.contiguous()
    mixed, rows = (torch.empty(N, C, dtype=torch.float32, device=device) for _ in range(2))
    partial = torch.empty(ceil_div(N, _TOKENS), C, W, dtype=torch.float32, device=device)
    if N:
        has_bias = bias_C is not None
        _launcher("mixed", W, has_bias)(
            _grid(N, C), grad_NC.contiguous(), rows_NC, before, weight, bias_C if has_bias else weight, taps_NW, mixed,
            partial, N, N + before.shape[0], rows_NC.stride(0), C,
        )  # fmt: skip
        _launcher("rows", W, has_bias)(_grid(N, C), mixed, weight, run_end_N, rows, N, C)
    return mixed, rows, partial.sum(0)
