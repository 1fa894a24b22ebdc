"""Triton kernels for one more token of many sequences: short convolution and recurrence, with states in place.

Each row of a pass appends one token to the sequence of its slot. The kernels read the sequence's state and write the
new one over it. Where the states begin is read from memory, so a captured launch serves every pass, also after the
states have moved. Rows without a slot (-1) change nothing. Arithmetic is in float32.

Legend: n rows, C channels and W width of the convolution, H key heads, J value heads, K and V sizes of their heads.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div
from dta_kernels.recurrence.reference import NORM_EPS

_CHANNELS, _VALUES = 256, 32


@triton.jit
def _convolution_kernel(
    rows_in, weight_in, bias_in, out, address, slots, positions, row_stride, num_channels, WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    exists, slot = channel < num_channels, tl.load(slots + row)
    begun = tl.load(positions + row) > 0
    kept_of = tl.load(address + 1).to(tl.pointer_type(rows_in.dtype.element_ty))
    kept = kept_of + tl.maximum(slot, 0) * ((WIDTH - 1) * num_channels) + channel
    has_slot = exists & (slot >= 0)
    new = tl.load(rows_in + row * row_stride + channel, mask=exists, other=0.0)
    weight = tl.load(weight_in + channel * WIDTH + (WIDTH - 1), mask=exists, other=0.0).to(tl.float32)
    mixed = new.to(tl.float32) * weight
    if HAS_BIAS:
        mixed += tl.load(bias_in + channel, mask=exists, other=0.0).to(tl.float32)
    for w in tl.static_range(WIDTH - 1):
        x = tl.load(kept + w * num_channels, mask=has_slot & begun, other=0.0)
        mixed += x.to(tl.float32) * tl.load(weight_in + channel * WIDTH + w, mask=exists, other=0.0).to(tl.float32)
        if w > 0:
            tl.store(kept + (w - 1) * num_channels, x, mask=has_slot)
    tl.store(kept + (WIDTH - 2) * num_channels, new, mask=has_slot)
    tl.store(out + row * num_channels + channel, (mixed * tl.sigmoid(mixed)).to(out.dtype.element_ty), mask=exists)


@triton.jit
def _recurrence_kernel(
    q_in, k_in, v_in, g_in, beta_in, out, address, slots, positions, q_stride, k_stride, v_stride, scale, eps,
    H: tl.constexpr, J: tl.constexpr, K: tl.constexpr, V: tl.constexpr, IS_DELTA: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, value = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    slot, begun = tl.load(slots + row), tl.load(positions + row) > 0
    states = tl.load(address).to(tl.pointer_type(tl.float32))
    state_address = states + (tl.maximum(slot, 0) * J + head) * (K * V) + key[:, None] * V + value[None, :]
    exists = (key < K)[:, None] & (value < V)[None, :] & (slot >= 0)
    state = tl.load(state_address, mask=exists & begun, other=0.0)
    key_head = head // (J // H)
    q = tl.load(q_in + row * q_stride + key_head * K + key, mask=key < K, other=0.0).to(tl.float32)
    k = tl.load(k_in + row * k_stride + key_head * K + key, mask=key < K, other=0.0).to(tl.float32)
    v = tl.load(v_in + row * v_stride + head * V + value, mask=value < V, other=0.0).to(tl.float32)
    state = state * tl.exp(tl.load(g_in + row * J + head).to(tl.float32))
    if IS_DELTA:
        q = q * scale / tl.sqrt(tl.sum(q * q, 0) + eps)
        k = k / tl.sqrt(tl.sum(k * k, 0) + eps)
        v = tl.load(beta_in + row * J + head).to(tl.float32) * (v - tl.sum(k[:, None] * state, 0))
    state += k[:, None] * v[None, :]
    tl.store(state_address, state, mask=exists)
    y = tl.sum(q[:, None] * state, 0)
    tl.store(out + (row * J + head) * V + value, y.to(out.dtype.element_ty), mask=value < V)


@lru_cache
def _convolution(width: int, has_bias: bool) -> Launcher:
    return Launcher(_convolution_kernel, WIDTH=width, HAS_BIAS=has_bias, BC=_CHANNELS, num_warps=4)


@lru_cache
def _recurrence(H: int, J: int, K: int, V: int, is_delta: bool) -> Launcher:
    sizes = dict(H=H, J=J, K=K, V=V, BK=triton.next_power_of_2(K), BV=min(_VALUES, triton.next_power_of_2(V)))
    return Launcher(_recurrence_kernel, **sizes, IS_DELTA=is_delta, num_warps=4)


def convolution_step(
    rows_nC: Tensor, weight_CW: Tensor, address: Tensor, slots: Tensor, positions: Tensor, bias_C: Tensor | None = None
) -> Tensor:
    """``silu`` of the convolution of each row's new token, [n, C]; its row becomes the last one of its slot.

    Args:
        rows_nC: columns must be adjacent in memory.
        address: int64 [2], where the layer's states [slots, J, K, V] and rows [slots, W - 1, C] begin.
        slots: int64 [n], distinct but for -1.
        positions: int64 [n], tokens before each row's new one; 0 means that nothing is kept yet.
    """
    (n, C), W = rows_nC.shape, weight_CW.shape[1]
    out = torch.empty(n, C, dtype=rows_nC.dtype, device=rows_nC.device)
    weight, has_bias = weight_CW.contiguous(), bias_C is not None
    _convolution(W, has_bias)(
        (n, ceil_div(C, _CHANNELS)), rows_nC, weight, bias_C if has_bias else weight, out, address, slots, positions,
        rows_nC.stride(0), C,
    )  # fmt: skip
    return out


def recurrence_step(inputs: tuple[Tensor, ...], address: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Output [n, J, V] of the recurrence for each row's new token; changes the states of the slots.

    Args:
        inputs: as in ``gated_delta_rule`` or ``state_space``; the heads of a row must be adjacent in memory.
    """
    q, k, v, g, *rest = inputs
    beta = rest[0].contiguous() if rest else g
    (n, H, K), (_, J, V) = k.shape, v.shape
    out = torch.empty(n, J, V, dtype=v.dtype, device=v.device)
    _recurrence(H, J, K, V, bool(rest))(
        (n, J, ceil_div(V, min(_VALUES, triton.next_power_of_2(V)))), q, k, v, g.contiguous(), beta, out,
        address, slots, positions, q.stride(0), k.stride(0), v.stride(0), K**-0.5, NORM_EPS,
    )  # fmt: skip
    return out
