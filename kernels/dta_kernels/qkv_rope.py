"""From Megatron's mixed QKV to rotated queries and keys in one pass: the heads' norms and the rotary positions.

Megatron's product leaves the heads of a group side by side: its queries, its key, its value. A program reads the heads
of one group where they are, normalizes each (Qwen3's QK-norm) and turns pairs of channels (i, i + R / 2) by their
angle; values stay where they are, as a view. The backward takes the gradients of all three and writes that of the
mixed rows. Arithmetic is float32 throughout, with cosines and sines of float32, and results are rounded once.

Weight gradients are added up in a fixed order, in float32: each program over its tokens, then the programs' sums.

Legend: N tokens, G key/value heads (groups), P query heads of a group, D head size, R rotated channels,
W = G (P + 2) D.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs of the backward pass, over tokens and groups.
_MAX_PROGRAMS = 1024


class QKVLayout(NamedTuple):
    """Shape of the mixed rows on this rank."""

    num_groups: int
    heads_per_group: int
    head_size: int


@triton.jit
def _channels(HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of every channel: the other one of its pair, the sign of that one's share, and the pair."""
    d = tl.arange(0, BLOCK_D)
    is_first = d < HALF
    is_rotated = d < 2 * HALF
    other = tl.where(is_first, d + HALF, tl.where(is_rotated, d - HALF, d))
    sign = tl.where(is_first, -1.0, tl.where(is_rotated, 1.0, 0.0))
    pair = tl.where(is_first, d, d - HALF)
    return other, sign, pair


@triton.jit
def _turned_head(
    source, weight_in, cos, sin, other, exists, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """A head of some tokens, normalized and turned; ``source`` [tokens, 1] points to its first channel."""
    d = tl.arange(0, BLOCK_D)
    x = tl.load(source + d[None, :], mask=exists, other=0.0).to(tl.float32)
    x_other = tl.load(source + other[None, :], mask=exists, other=0.0).to(tl.float32)
    if NORM:
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
        x = x * rstd[:, None] * tl.load(weight_in + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        x_other = x_other * rstd[:, None] * tl.load(weight_in + other, mask=d < D, other=0.0).to(tl.float32)[None, :]
    return x * cos + x_other * sin


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    mixed_in, cos_in, sin_in, q_weight_in, k_weight_in, q_out, k_out, num_rows, num_groups, eps, HEADS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    other, sign, pair = _channels(HALF, BLOCK_D)
    row_exists = row < num_rows
    exists = row_exists[:, None] & (d < D)[None, :]
    is_rotated = row_exists[:, None] & (d < 2 * HALF)[None, :]
    table = row[:, None] * HALF + pair[None, :]
    cos = tl.load(cos_in + table, mask=is_rotated, other=1.0)
    sin = tl.load(sin_in + table, mask=is_rotated, other=0.0) * sign[None, :]
    source = mixed_in + (row[:, None] * num_groups + group) * ((HEADS + 2) * D)
    for head in range(HEADS):
        q = _turned_head(source + head * D, q_weight_in, cos, sin, other, exists, eps, D, BLOCK_D, NORM)
        target = q_out + ((row[:, None] * num_groups + group) * HEADS + head) * D + d[None, :]
        tl.store(target, q.to(q_out.dtype.element_ty), mask=exists)
    if KEYS:
        k = _turned_head(source + HEADS * D, k_weight_in, cos, sin, other, exists, eps, D, BLOCK_D, NORM)
        target = k_out + (row[:, None] * num_groups + group) * D + d[None, :]
        tl.store(target, k.to(k_out.dtype.element_ty), mask=exists)


@triton.jit
def _head_gradient(
    grad_source, source, weight_in, cos, sin, other, exists, eps, D: tl.constexpr, BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Gradient by a head of the mixed rows, and each token's share of the weight's."""
    d = tl.arange(0, BLOCK_D)
    grad = tl.load(grad_source + d[None, :], mask=exists, other=0.0).to(tl.float32)
    grad_other = tl.load(grad_source + other[None, :], mask=exists, other=0.0).to(tl.float32)
    # Turned back by the same angle.
    grad = grad * cos - grad_other * sin
    grad_weight = grad
    if NORM:
        x = tl.load(source + d[None, :], mask=exists, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
        hat = x * rstd[:, None]
        grad_weight = grad * hat
        grad = grad * tl.load(weight_in + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        grad = (grad - hat * (tl.sum(grad * hat, 1) / D)[:, None]) * rstd[:, None]
    return grad, grad_weight


@triton.jit(do_not_specialize=["num_rows", "tiles_per_program"])
def _backward_kernel(
    grad_q_in, grad_k_in, grad_v_in, mixed_in, cos_in, sin_in, q_weight_in, k_weight_in, grad_mixed_out,
    grad_q_weight_out, grad_k_weight_out, num_rows, tiles_per_program, num_groups, eps, HEADS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    group, program = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    other, sign, pair = _channels(HALF, BLOCK_D)
    grad_q_weight = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    grad_k_weight = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    for tile in range(program * tiles_per_program, (program + 1) * tiles_per_program):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        row_exists = row < num_rows
        exists = row_exists[:, None] & (d < D)[None, :]
        is_rotated = row_exists[:, None] & (d < 2 * HALF)[None, :]
        table = row[:, None] * HALF + pair[None, :]
        cos = tl.load(cos_in + table, mask=is_rotated, other=1.0)
        sin = tl.load(sin_in + table, mask=is_rotated, other=0.0) * sign[None, :]
        of_group = row[:, None] * num_groups + group
        start = of_group * ((HEADS + 2) * D)
        target = grad_mixed_out + start + d[None, :]
        for head in range(HEADS):
            grad_source = grad_q_in + (of_group * HEADS + head) * D
            source = mixed_in + start + head * D
            grad, share = _head_gradient(
                grad_source, source, q_weight_in, cos, sin, other, exists, eps, D, BLOCK_D, NORM
            )
            tl.store(target + head * D, grad.to(grad_mixed_out.dtype.element_ty), mask=exists)
            grad_q_weight += share
        source = mixed_in + start + HEADS * D
        grad, share = _head_gradient(
            grad_k_in + of_group * D, source, k_weight_in, cos, sin, other, exists, eps, D, BLOCK_D, NORM
        )
        tl.store(target + HEADS * D, grad.to(grad_mixed_out.dtype.element_ty), mask=exists)
        grad_k_weight += share
        grad_v = tl.load(grad_v_in + of_group * D + d[None, :], mask=exists, other=0.0)
        tl.store(target + (HEADS + 1) * D, grad_v.to(grad_mixed_out.dtype.element_ty), mask=exists)
    if NORM:
        partial = (program * num_groups + group).to(tl.int64) * D + d
        tl.store(grad_q_weight_out + partial, tl.sum(grad_q_weight, 0), mask=d < D)
        tl.store(grad_k_weight_out + partial, tl.sum(grad_k_weight, 0), mask=d < D)


def _settings(layout: QKVLayout, num_pairs: int, norm: bool) -> dict[str, int | bool]:
    block = triton.next_power_of_2(layout.head_size)
    return {
        "HEADS": layout.heads_per_group,
        "D": layout.head_size,
        "HALF": num_pairs,
        "NORM": norm,
        "ROWS": max(1, min(16, 2048 // block)),
        "BLOCK_D": block,
        "num_warps": 4,
    }


class _QKVRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        mixed_NW: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_weight_D: Tensor | None,
        k_weight_D: Tensor | None,
        layout: QKVLayout,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed_NW = mixed_NW.contiguous()
        N, (G, P, D) = mixed_NW.shape[0], layout
        q_NHD, k_NGD = mixed_NW.new_empty((N, G * P, D)), mixed_NW.new_empty((N, G, D))
        _launch_forward(mixed_NW, cos, sin, q_weight_D, k_weight_D, layout, eps, q_NHD, k_NGD)
        ctx.save_for_backward(mixed_NW, cos, sin, q_weight_D, k_weight_D)
        ctx.layout, ctx.eps = layout, eps
        return q_NHD, k_NGD, mixed_NW.view(N, G, P + 2, D)[:, :, P + 1]

    @staticmethod
    def backward(ctx, grad_q_NHD: Tensor, grad_k_NGD: Tensor, grad_v_NGD: Tensor):
        mixed_NW, cos, sin, q_weight_D, k_weight_D = ctx.saved_tensors
        grad_mixed_NW, *grad_weights = qkv_rope_backward(
            grad_q_NHD, grad_k_NGD, grad_v_NGD, mixed_NW, cos, sin, q_weight_D, k_weight_D, ctx.layout, ctx.eps
        )
        if q_weight_D is not None:
            grad_weights = [grad.to(q_weight_D.dtype) for grad in grad_weights]
        return grad_mixed_NW, None, None, *grad_weights, None, None


def _launch_forward(
    mixed_NW: Tensor, cos: Tensor, sin: Tensor, q_weight_D: Tensor | None, k_weight_D: Tensor | None,
    layout: QKVLayout, eps: float, q_NHD: Tensor, k_NGD: Tensor | None,
) -> None:  # fmt: skip
    N, norm = mixed_NW.shape[0], q_weight_D is not None
    if N == 0:
        return
    settings = _settings(layout, cos.shape[1], norm)
    grid = (layout.num_groups, triton.cdiv(N, settings["ROWS"]))
    _forward_kernel[grid](
        mixed_NW, cos, sin, q_weight_D if norm else cos, k_weight_D if norm else cos, q_NHD,
        q_NHD if k_NGD is None else k_NGD, N, layout.num_groups, eps, KEYS=k_NGD is not None, **settings,
    )  # fmt: skip


def qkv_rope_backward(
    grad_q_NHD: Tensor,
    grad_k_NGD: Tensor,
    grad_v_NGD: Tensor,
    mixed_NW: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    layout: QKVLayout,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients by the mixed rows, and by the two weights in float32 [D] (None without norms)."""
    N, norm = mixed_NW.shape[0], q_weight_D is not None
    settings = _settings(layout, cos.shape[1], norm)
    tiles = triton.cdiv(N, settings["ROWS"])
    programs = min(tiles, triton.cdiv(_MAX_PROGRAMS, layout.num_groups))
    grad_mixed_NW = torch.empty_like(mixed_NW)
    partial = [mixed_NW.new_empty((programs * layout.num_groups, layout.head_size), dtype=torch.float32) for _ in "qk"]
    if N:
        # The last programs may have no tokens; their share of the weights' gradients is zero.
        _backward_kernel[(layout.num_groups, programs)](
            grad_q_NHD.contiguous(), grad_k_NGD.contiguous(), grad_v_NGD.contiguous(), mixed_NW, cos, sin,
            q_weight_D if norm else cos, k_weight_D if norm else cos, grad_mixed_NW, *partial, N,
            triton.cdiv(tiles, programs), layout.num_groups, eps, **settings,
        )  # fmt: skip
    return grad_mixed_NW, *([each.sum(0) for each in partial] if norm else [None, None])


def qkv_rope(
    mixed_NW: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    layout: QKVLayout,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the mixed rows, normalized per head and turned to their positions.

    Args:
        mixed_NW: [N, G (P + 2) D], of each group its queries, its key and its value.
        cos, sin: float32 [N, R / 2] contiguous, with any attention factor; channels from R on are not turned.
        q_weight_D, k_weight_D: weights of the heads' RMSNorm; both None for none.
        eps: of the norms.

    Returns:
        ``(q [N, G P, D], k [N, G, D], v [N, G, D])``; v is a view of ``mixed``.
    """
    if (q_weight_D is None) != (k_weight_D is None):
        raise ValueError("norms of queries and keys come together: give both weights or none")
    return _QKVRope.apply(mixed_NW, cos, sin, q_weight_D, k_weight_D, layout, eps)


def queries_again(
    mixed_NW: Tensor, cos: Tensor, sin: Tensor, q_weight_D: Tensor | None, layout: QKVLayout, eps: float, q_NHD: Tensor
) -> None:
    """Write the queries of an earlier pass into ``q`` [N, G P, D], bit for bit; all tensors contiguous."""
    _launch_forward(mixed_NW, cos, sin, q_weight_D, q_weight_D, layout, eps, q_NHD, None)
