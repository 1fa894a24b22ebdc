"""Computes rotated queries and keys from Megatron's mixed QKV in one pass: norms of heads and rotary positions.

Megatron's product leaves the heads of a group side by side: its queries, its key, its value. A program reads the heads
of one group in place, normalizes each (Qwen3's QK-norm) and rotates pairs of channels (i, i + R / 2) by their angle.
Values stay in place, as a view. A head is read as three tiles, the two halves of the rotated channels and the rest, so
that every access is to neighboring channels. The backward takes the gradients of queries, keys and values and writes
that of the mixed rows. Arithmetic is in float32, cosines and sines are float32, and results are rounded once.

Weight gradients are summed in a fixed order, in float32: first by each program over its tokens, then over programs.

Legend: N tokens, G key/value heads (groups), P query heads of a group, D head size, R rotated channels,
W = G (P + 2) D.
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

# Maximum number of programs of the backward pass, over tokens and groups.
_MAX_PROGRAMS = 1024


class QKVLayout(NamedTuple):
    """Shape of the mixed rows on this rank."""

    num_groups: int
    heads_per_group: int
    head_size: int


@triton.jit
def turn_head(
    source, target, weight_in, cos, sin, half_exists, rest_exists, eps, size, TERMS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate a head of some tokens; ``source`` and ``target`` [tokens, 1] point to its first channel. The
    source has ``TERMS`` terms, ``size`` elements apart."""
    h, r = tl.arange(0, BLOCK_HALF), 2 * HALF + tl.arange(0, BLOCK_REST)
    element = target.dtype.element_ty
    if NORM:
        first_weight = tl.load(weight_in + h, mask=h < HALF, other=0.0).to(tl.float32)[None, :]
        second_weight = tl.load(weight_in + HALF + h, mask=h < HALF, other=0.0).to(tl.float32)[None, :]
    first = sum_of_terms(source + h[None, :], half_exists, size, TERMS, element)
    second = sum_of_terms(source + HALF + h[None, :], half_exists, size, TERMS, element)
    if REST:
        rest = sum_of_terms(source + r[None, :], rest_exists, size, TERMS, element)
    if NORM:
        total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST:
            total += tl.sum(rest * rest, 1)
        rstd = (1.0 / tl.sqrt(total / D + eps))[:, None]
        first = first * rstd * first_weight
        second = second * rstd * second_weight
        if REST:
            rest = rest * rstd * tl.load(weight_in + r, mask=r < D, other=0.0).to(tl.float32)[None, :]
    # Explicit fma, so that no compiler chooses which product is rounded: queries are recomputed bit for bit.
    tl.store(target + h[None, :], tl.fma(first, cos, -(second * sin)).to(element), mask=half_exists)
    tl.store(target + HALF + h[None, :], tl.fma(second, cos, first * sin).to(element), mask=half_exists)
    if REST:
        tl.store(target + r[None, :], rest.to(element), mask=rest_exists)


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    mixed_in, cos_in, sin_in, q_weight_in, k_weight_in, q_out, k_out, v_out, num_rows, num_groups, eps,
    HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    h, r = tl.arange(0, BLOCK_HALF), 2 * HALF + tl.arange(0, BLOCK_REST)
    half_exists = (row < num_rows) & (h < HALF)[None, :]
    rest_exists = (row < num_rows) & (r < D)[None, :]
    cos = tl.load(cos_in + row * HALF + h[None, :], mask=half_exists, other=0.0)
    sin = tl.load(sin_in + row * HALF + h[None, :], mask=half_exists, other=0.0)
    of_group = row * num_groups + group
    source = mixed_in + of_group * ((HEADS + 2) * D)
    for head in range(HEADS):
        turn_head(
            source + head * D, q_out + (of_group * HEADS + head) * D, q_weight_in, cos, sin, half_exists, rest_exists,
            eps, 0, 1, D, HALF, REST, BLOCK_HALF, BLOCK_REST, NORM,
        )  # fmt: skip
    if k_out is not None:
        turn_head(
            source + HEADS * D, k_out + of_group * D, k_weight_in, cos, sin, half_exists, rest_exists, eps, 0, 1, D,
            HALF, REST, BLOCK_HALF, BLOCK_REST, NORM,
        )  # fmt: skip
    if v_out is not None:
        _copy_head(source + (HEADS + 1) * D, v_out + of_group * D, half_exists, rest_exists, h, r, HALF, REST)


@triton.jit
def _copy_head(source, target, half_exists, rest_exists, h, r, HALF: tl.constexpr, REST: tl.constexpr):
    value = tl.load(source + h[None, :], mask=half_exists, other=0.0)
    tl.store(target + h[None, :], value, mask=half_exists)
    value = tl.load(source + HALF + h[None, :], mask=half_exists, other=0.0)
    tl.store(target + HALF + h[None, :], value, mask=half_exists)
    if REST:
        value = tl.load(source + r[None, :], mask=rest_exists, other=0.0)
        tl.store(target + r[None, :], value, mask=rest_exists)


@triton.jit
def _turn_head_back(
    grad_source, source, target, weight_in, cos, sin, half_exists, rest_exists, eps, D: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a head of the mixed rows; returns each token's share of the weight's, in three parts."""
    h, r = tl.arange(0, BLOCK_HALF), 2 * HALF + tl.arange(0, BLOCK_REST)
    grad_first = tl.load(grad_source + h[None, :], mask=half_exists, other=0.0).to(tl.float32)
    grad_second = tl.load(grad_source + HALF + h[None, :], mask=half_exists, other=0.0).to(tl.float32)
    # Rotated back by the same angle.
    first = grad_first * cos + grad_second * sin
    second = grad_second * cos - grad_first * sin
    rest = tl.zeros_like(rest_exists).to(tl.float32)
    if REST:
        rest = tl.load(grad_source + r[None, :], mask=rest_exists, other=0.0).to(tl.float32)
    share_first, share_second, share_rest = first, second, rest
    if NORM:
        hat_first = tl.load(source + h[None, :], mask=half_exists, other=0.0).to(tl.float32)
        hat_second = tl.load(source + HALF + h[None, :], mask=half_exists, other=0.0).to(tl.float32)
        total = tl.sum(hat_first * hat_first, 1) + tl.sum(hat_second * hat_second, 1)
        if REST:
            hat_rest = tl.load(source + r[None, :], mask=rest_exists, other=0.0).to(tl.float32)
            total += tl.sum(hat_rest * hat_rest, 1)
        rstd = (1.0 / tl.sqrt(total / D + eps))[:, None]
        hat_first, hat_second = hat_first * rstd, hat_second * rstd
        share_first, share_second = first * hat_first, second * hat_second
        first = first * tl.load(weight_in + h, mask=h < HALF, other=0.0).to(tl.float32)[None, :]
        second = second * tl.load(weight_in + HALF + h, mask=h < HALF, other=0.0).to(tl.float32)[None, :]
        moment = tl.sum(first * hat_first, 1) + tl.sum(second * hat_second, 1)
        if REST:
            hat_rest = hat_rest * rstd
            share_rest = rest * hat_rest
            rest = rest * tl.load(weight_in + r, mask=r < D, other=0.0).to(tl.float32)[None, :]
            moment += tl.sum(rest * hat_rest, 1)
        mean = (moment / D)[:, None]
        first, second = (first - hat_first * mean) * rstd, (second - hat_second * mean) * rstd
        if REST:
            rest = (rest - hat_rest * mean) * rstd
    element = target.dtype.element_ty
    tl.store(target + h[None, :], first.to(element), mask=half_exists)
    tl.store(target + HALF + h[None, :], second.to(element), mask=half_exists)
    if REST:
        tl.store(target + r[None, :], rest.to(element), mask=rest_exists)
    return share_first, share_second, share_rest


@triton.jit
def _store_weight_gradient(
    out, first, second, rest, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr
):  # fmt: skip
    h, r = tl.arange(0, BLOCK_HALF), 2 * HALF + tl.arange(0, BLOCK_REST)
    tl.store(out + h, tl.sum(first, 0), mask=h < HALF)
    tl.store(out + HALF + h, tl.sum(second, 0), mask=h < HALF)
    tl.store(out + r, tl.sum(rest, 0), mask=r < D)


@triton.jit(do_not_specialize=["num_rows", "tiles_per_program"])
def _backward_kernel(
    grad_q_in, grad_k_in, grad_v_in, mixed_in, cos_in, sin_in, q_weight_in, k_weight_in, grad_mixed_out,
    grad_q_weight_out, grad_k_weight_out, num_rows, tiles_per_program, num_groups, eps, HEADS: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    group, program = tl.program_id(0), tl.program_id(1)
    h, r = tl.arange(0, BLOCK_HALF), 2 * HALF + tl.arange(0, BLOCK_REST)
    q_first = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
    q_second = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
    q_rest = tl.zeros([ROWS, BLOCK_REST], dtype=tl.float32)
    k_first = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
    k_second = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
    k_rest = tl.zeros([ROWS, BLOCK_REST], dtype=tl.float32)
    for tile in range(program * tiles_per_program, (program + 1) * tiles_per_program):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        half_exists = (row < num_rows) & (h < HALF)[None, :]
        rest_exists = (row < num_rows) & (r < D)[None, :]
        cos = tl.load(cos_in + row * HALF + h[None, :], mask=half_exists, other=0.0)
        sin = tl.load(sin_in + row * HALF + h[None, :], mask=half_exists, other=0.0)
        of_group = row * num_groups + group
        source = mixed_in + of_group * ((HEADS + 2) * D)
        target = grad_mixed_out + of_group * ((HEADS + 2) * D)
        for head in range(HEADS):
            first, second, rest = _turn_head_back(
                grad_q_in + (of_group * HEADS + head) * D, source + head * D, target + head * D, q_weight_in, cos, sin,
                half_exists, rest_exists, eps, D, HALF, REST, BLOCK_HALF, BLOCK_REST, NORM,
            )  # fmt: skip
            q_first += first
            q_second += second
            q_rest += rest
        k1, k2, k3 = _turn_head_back(
            grad_k_in + of_group * D, source + HEADS * D, target + HEADS * D, k_weight_in, cos, sin, half_exists,
            rest_exists, eps, D, HALF, REST, BLOCK_HALF, BLOCK_REST, NORM,
        )  # fmt: skip
        k_first += k1
        k_second += k2
        k_rest += k3
        grad_v, target = grad_v_in + of_group * D, target + (HEADS + 1) * D
        _copy_head(grad_v, target, half_exists, rest_exists, h, r, HALF, REST)
    if NORM:
        partial = (program * num_groups + group).to(tl.int64) * D
        _store_weight_gradient(grad_q_weight_out + partial, q_first, q_second, q_rest, D, HALF, BLOCK_HALF, BLOCK_REST)
        _store_weight_gradient(grad_k_weight_out + partial, k_first, k_second, k_rest, D, HALF, BLOCK_HALF, BLOCK_REST)


_KERNELS = {"forward": _forward_kernel, "backward": _backward_kernel}


@lru_cache
def _launcher(name: str, layout: QKVLayout, num_pairs: int, norm: bool) -> Launcher:
    return Launcher(_KERNELS[name], **head_blocks(layout, num_pairs), NORM=norm)


@lru_cache
def head_blocks(layout: QKVLayout, num_pairs: int) -> dict[str, int]:
    """Constants and settings of kernels that turn heads; a program handles ``ROWS`` tokens at once."""
    (_, heads, D), block = layout, triton.next_power_of_2(num_pairs)
    rest, rows = D - 2 * num_pairs, max(1, min(16, 1024 // block))
    blocks = {"BLOCK_HALF": block, "BLOCK_REST": triton.next_power_of_2(max(1, rest)), "num_warps": 4}
    return {"HEADS": heads, "ROWS": rows, "D": D, "HALF": num_pairs, "REST": rest, **blocks}


class MixedQKV(NamedTuple):
    """Mixed rows, and how their heads are normalized and rotated; all tensors are contiguous.

    Attributes:
        mixed: [N, W] = [N, G (P + 2) D], for each group its queries, its key and its value.
        cos, sin: float32 [N, R / 2], including any attention factor; channels from R on are not rotated.
        q_weight, k_weight: weights of the heads' RMSNorm; both None without norms.
        eps: of the norms.
    """

    mixed: Tensor
    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    layout: QKVLayout
    eps: float

    def write(self, q_NHD: Tensor, k_NGD: Tensor | None = None, v_NGD: Tensor | None = None) -> None:
        """Write rotated queries and, if given, keys and values, without autograd; a repeat gives the same bits."""
        (N, pairs), norm, groups = self.cos.shape, self.q_weight is not None, self.layout.num_groups
        if N == 0:
            return
        grid = groups, ceil_div(N, head_blocks(self.layout, pairs)["ROWS"])
        launch = _launcher("forward", self.layout, pairs, norm)
        launch(grid, *self.inputs(), q_NHD, k_NGD, v_NGD, N, groups, self.eps)

    def values(self) -> Tensor:
        """The values [N, G, D] as a view of the mixed rows."""
        G, P, D = self.layout
        return self.mixed.view(self.mixed.shape[0], G, P + 2, D)[:, :, P + 1]

    def partial_gradients(
        self, grad_q_NHD: Tensor, grad_k_NGD: Tensor, grad_v_NGD: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Gradient of the mixed rows, and partial sums [programs, D] of the weights' (undefined without norms)."""
        (N, pairs), norm, groups = self.cos.shape, self.q_weight is not None, self.layout.num_groups
        tiles = ceil_div(N, head_blocks(self.layout, pairs)["ROWS"])
        programs = min(tiles, ceil_div(_MAX_PROGRAMS, groups))
        grad_mixed_NW = torch.empty_like(self.mixed)
        size = (programs * groups, self.layout.head_size)
        partial = tuple(self.mixed.new_empty(size, dtype=torch.float32) for _ in range(2))
        if N:
            grads = (grad_q_NHD.contiguous(), grad_k_NGD.contiguous(), grad_v_NGD.contiguous())
            # The last programs may have no tokens; their partial weight gradients are zero.
            _launcher("backward", self.layout, pairs, norm)(
                (groups, programs), *grads, *self.inputs(), grad_mixed_NW, *partial, N, ceil_div(tiles, programs),
                groups, self.eps,
            )  # fmt: skip
        return grad_mixed_NW, partial

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors as kernels take them."""
        if self.q_weight is None:
            return self.mixed, self.cos, self.sin, self.cos, self.cos
        return self[:5]


class _QKVRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *fields: Tensor | QKVLayout | float | None) -> tuple[Tensor, Tensor, Tensor]:
        rows = MixedQKV(fields[0].contiguous(), *fields[1:])
        N, (G, P, D) = rows.mixed.shape[0], rows.layout
        q_NHD, k_NGD = rows.mixed.new_empty((N, G * P, D)), rows.mixed.new_empty((N, G, D))
        rows.write(q_NHD, k_NGD)
        ctx.save_for_backward(*rows[:5])
        ctx.layout, ctx.eps = rows.layout, rows.eps
        return q_NHD, k_NGD, rows.values()

    @staticmethod
    def backward(ctx, grad_q_NHD: Tensor, grad_k_NGD: Tensor, grad_v_NGD: Tensor):
        rows = MixedQKV(*ctx.saved_tensors, ctx.layout, ctx.eps)
        grad_mixed_NW, partial = rows.partial_gradients(grad_q_NHD, grad_k_NGD, grad_v_NGD)
        weight_D = rows.q_weight
        grad_weights = (
            (None, None) if weight_D is None else (partial_sums.sum(0).to(weight_D.dtype) for partial_sums in partial)
        )
        return grad_mixed_NW, None, None, *grad_weights, None, None


def qkv_rope(rows: MixedQKV) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the mixed rows, normalized per head and rotated to their positions.

    Returns:
        ``(q [N, G P, D], k [N, G, D], v [N, G, D])``; v is a view of ``mixed``.
    """
    if (rows.q_weight is None) != (rows.k_weight is None):
        raise ValueError("norms of queries and keys come together: give both weights or none")
    return _QKVRope.apply(*rows)
