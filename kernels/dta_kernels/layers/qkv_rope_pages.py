"""Writes rotated queries of mixed rows, and their keys and values directly to pages, for decoding.

A program has one head of some tokens: a query as ``qkv_rope`` writes it, or a key or value, which goes to the slots of
its tokens. There is nothing between the mixed rows and the pages, and all heads are read at once.

Legend: see ``qkv_rope``; S terms of a product of few rows.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div
from dta_kernels.layers.few_rows import sum_of_terms
from dta_kernels.layers.qkv_rope import MixedQKV, QKVLayout, head_blocks, turn_head
from dta_kernels.overlap import overlap_settings, wait_for_previous


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["addresses", "slots"])
def _kernel(
    mixed_in, cos_in, sin_in, q_weight_in, k_weight_in, q_out, addresses, slots, num_rows, eps, GROUPS: tl.constexpr,
    BLOCK_D: tl.constexpr, TERMS: tl.constexpr, OVERLAP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Grid (groups, queries of a group and its key and value, blocks of tokens); negative slots are skipped."""
    wait_for_previous(OVERLAP)
    group, head = tl.program_id(0), tl.program_id(1)
    row = (tl.program_id(2) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    exists = row < num_rows
    of_group = row * GROUPS + group
    source = mixed_in + (of_group * (HEADS + 2) + head) * D
    size = num_rows.to(tl.int64) * (GROUPS * (HEADS + 2) * D)
    h, r = tl.arange(0, BLOCK_HALF)[None, :], 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    cos = tl.load(cos_in + row * HALF + h, mask=exists & (h < HALF), other=0.0)
    sin = tl.load(sin_in + row * HALF + h, mask=exists & (h < HALF), other=0.0)
    if head < HEADS:
        turn_head(
            source, q_out + (of_group * HEADS + head) * D, q_weight_in, cos, sin, exists & (h < HALF), exists & (r < D),
            eps, size, TERMS, D, HALF, REST, BLOCK_HALF, BLOCK_REST, NORM,
        )  # fmt: skip
        return
    slot = tl.load(slots + row, mask=exists, other=-1)
    exists = slot >= 0
    pages = tl.load(addresses + (head - HEADS)).to(tl.pointer_type(q_out.dtype.element_ty))
    target = tl.multiple_of(pages, 16) + (slot * GROUPS + group) * D
    if head == HEADS:
        turn_head(
            source, target, k_weight_in, cos, sin, exists & (h < HALF), exists & (r < D), eps, size, TERMS, D, HALF,
            REST, BLOCK_HALF, BLOCK_REST, NORM,
        )  # fmt: skip
    else:
        channel = tl.arange(0, BLOCK_D)[None, :]
        stored = exists & (channel < D)
        element = q_out.dtype.element_ty
        tl.store(
            target + channel, sum_of_terms(source + channel, stored, size, TERMS, element).to(element), mask=stored
        )


@lru_cache
def _launcher(layout: QKVLayout, num_pairs: int, norm: bool, terms: int) -> Launcher:
    constants = {"GROUPS": layout.num_groups, "BLOCK_D": triton.next_power_of_2(layout.head_size), "TERMS": terms}
    return Launcher(_kernel, **constants, **overlap_settings(), **head_blocks(layout, num_pairs), NORM=norm)


def write_to_pages(rows: MixedQKV, q_NHD: Tensor, addresses: Tensor, slots: Tensor) -> None:
    """Write ``rows``: their queries to ``q_NHD``, their keys and values to the slots (page x positions + offset, int64
    [N], negative for none) of pages.

    Args:
        rows: ``mixed`` may be the terms [S, N, W] of a product (``few_rows``).
        q_NHD: contiguous, in the dtype of the pages, to which the sum of terms is rounded.
        addresses: int64 [2] on the device: where the pages of K and of V begin.
    """
    N, norm, (G, P, _) = q_NHD.shape[0], rows.q_weight is not None, rows.layout
    if N == 0:
        return
    terms, pairs = rows.mixed.shape[0] if rows.mixed.dim() == 3 else 1, rows.cos.shape[1]
    blocks = head_blocks(rows.layout, pairs)
    _launcher(rows.layout, pairs, norm, terms)(
        (G, P + 2, ceil_div(N, blocks["ROWS"])), *rows.inputs(), q_NHD, addresses, slots, N, rows.eps
    )
