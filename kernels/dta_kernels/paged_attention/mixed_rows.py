"""Attention over pages of one new token a sequence, directly from the rows of the QKV product, for decoding.

A program normalizes and rotates the queries of its tile in registers, and the new key in a row after them. The program
that has the last part of a tile's keys writes the key and the value to their page, and reads them with the others. So
no kernel and no tensor is between the product and the attention. Bits are those of ``qkv_rope_pages`` and the
attention after it, as far as the compiler sums a head's channels in the same order.

No sequence may read what another one writes in the same pass.

Legend: see ``kernels``, and ``layers.qkv_rope`` for the mixed rows; S terms of a product of few rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher
from dta_kernels.layers.few_rows import sum_of_terms
from dta_kernels.layers.qkv_rope import MixedQKV
from dta_kernels.overlap import wait_for_previous
from dta_kernels.paged_attention.kernels import attend_parts, load_tile, part_length
from dta_kernels.paged_attention.launch import PagedConfig, Parts, attention_constants, attention_grid


@triton.jit
def _squares(x, channel, begin, end):
    return tl.sum(tl.where((channel >= begin) & (channel < end), x * x, 0.0), 1)


@triton.jit
def _weights(q_weight_in, k_weight_in, channel, is_query, is_key):
    of_queries = tl.load(q_weight_in + channel, mask=is_query, other=0.0)
    return tl.where(is_query, of_queries, tl.load(k_weight_in + channel, mask=is_key, other=0.0)).to(tl.float32)


@triton.jit
def _turned(
    source, cos_of, sin_of, q_weight_in, k_weight_in, eps, size, element: tl.constexpr, TERMS: tl.constexpr,
    ROWS: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The ``J`` queries of a token's group and its key, [ROWS, BLOCK_D], normalized and rotated as by ``turn_head``."""
    # All tensors have the same shape, so that none of them changes its layout.
    row = tl.broadcast_to(tl.arange(0, ROWS)[:, None], (ROWS, BLOCK_D))
    channel = tl.broadcast_to(tl.arange(0, BLOCK_D)[None, :], (ROWS, BLOCK_D))
    # The compiler knows that remainders of neighbors are neighbors.
    angle, partner = channel % HALF, (channel + HALF) % (2 * HALF)
    stored, turns = (row <= J) & (channel < D), (row <= J) & (channel < 2 * HALF)
    value = sum_of_terms(source + row * D + channel, stored, size, TERMS, element)
    other = sum_of_terms(source + row * D + partner, turns, size, TERMS, element)
    cos = tl.load(cos_of + angle, mask=turns, other=1.0)
    sin = tl.load(sin_of + angle, mask=turns, other=0.0)
    if NORM:
        of_own = _weights(q_weight_in, k_weight_in, channel, stored & (row < J), stored & (row == J))
        of_other = _weights(q_weight_in, k_weight_in, partner, turns & (row < J), turns & (row == J))
        total = _squares(value, channel, 0, HALF) + _squares(value, channel, HALF, 2 * HALF)
        if D > 2 * HALF:
            total += _squares(value, channel, 2 * HALF, D)
        rstd = (1.0 / tl.sqrt(total / D + eps))[:, None]
        value, other = value * rstd * of_own, other * rstd * of_other
    return tl.fma(value, cos, other * tl.where(channel < HALF, -sin, sin)).to(element)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["tiles", "tables", "addresses", "slots"])
def _kernel(
    mixed_in, cos_in, sin_in, q_weight_in, k_weight_in, out_NHD, part_out, part_lse, arrived, addresses, slots, tiles,
    tables, num_tokens, scale, eps, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, MIN_PART: tl.constexpr,
    OVERLAP: tl.constexpr, TERMS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The grid of ``paged_attention_kernel``; a tile has one token or none, and more rows than queries of a group."""
    element: tl.constexpr = out_NHD.dtype.element_ty
    J: tl.constexpr = H // G
    group = tl.program_id(0) % G
    # Inputs of the whole pass, which no kernel of it writes.
    token, count, position, table_begin = load_tile(tiles, tl.program_id(0) // G)
    keys_of = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(element)), 16) + group * D
    values_of = tl.multiple_of(tl.load(addresses + 1).to(tl.pointer_type(element)), 16) + group * D
    slot = tl.load(slots + token)
    wait_for_previous(OVERLAP)
    if count == 0:
        return
    parts = tl.cdiv(position + 1, part_length(position + 1, PARTS, MIN_PART))
    if tl.program_id(1) >= parts:
        return
    source = mixed_in + (token * G + group) * ((J + 2) * D)
    size = num_tokens.to(tl.int64) * (G * (J + 2) * D)
    row, channel = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_D)[None, :]
    writes = (slot >= 0) & (tl.program_id(1) == (parts - 1) % tl.num_programs(1))
    has_value = channel < tl.where(writes, D, 0)
    value = sum_of_terms(source + (J + 1) * D + channel, has_value, size, TERMS, element)
    q = _turned(
        source, cos_in + token * HALF, sin_in + token * HALF, q_weight_in, k_weight_in, eps, size, element, TERMS,
        BLOCK_M, J, D, BLOCK_D, HALF, NORM,
    )  # fmt: skip
    # The row after the queries is the key; as a query it is computed, too, but not stored.
    tl.store(keys_of + slot * (G * D) + row * 0 + channel, q, mask=has_value & (row == J))
    tl.store(values_of + slot * (G * D) + channel, value.to(element), mask=has_value)
    # Other threads of the program read them.
    tl.debug_barrier()
    head = tl.arange(0, BLOCK_M)
    attend_parts(
        q, position + head * 0, head < J, token + head * 0, keys_of, values_of, tables + table_begin, group * J + head,
        position + 1, num_tokens, scale, out_NHD, part_out, part_lse, arrived, H, G, D, BLOCK_D, S, BLOCK_M, BLOCK_N,
        PARTS, MIN_PART,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _launcher(rotated: tuple[int, bool, int], *shape: Any) -> Launcher:
    pairs, norm, terms = rotated
    more = {"TERMS": terms, "HALF": pairs, "NORM": norm}
    return Launcher(_kernel, **attention_constants(*shape), **more)


def attend_mixed(
    rows: MixedQKV, out_NHD: Tensor, addresses: Tensor, slots: Tensor, page_size: int, tiles: Tensor, tables: Tensor,
    scale: float, config: PagedConfig, parts: Parts,
) -> None:  # fmt: skip
    """Write K and V of ``rows`` to their slots, and their attention to ``out_NHD``; rows of no tile are unchanged.

    Args:
        rows: ``mixed`` may be the terms [S, n, W] of a product (``few_rows``).
        out_NHD: contiguous, in the dtype of the pages, to which the sum of terms is rounded.
        slots: int64 [n] (page x positions + offset), negative for none.
        addresses, page_size, tiles, tables, parts: see ``paged_attention``; a tile has one token.
    """
    (n, H, D), G = out_NHD.shape, rows.layout.num_groups
    if tiles.shape[0] == 0:
        return
    config = replace(config, rows=max(config.rows, triton.next_power_of_2(H // G + 1)))
    rotated = rows.cos.shape[1], rows.q_weight is not None, rows.mixed.shape[0] if rows.mixed.dim() == 3 else 1
    grid = attention_grid(tiles, G, config)
    _launcher(rotated, H, G, D, page_size, config)(
        grid, *rows.inputs(), out_NHD, *parts.at_least(config, out_NHD, grid[0]), addresses, slots, tiles, tables, n,
        scale, rows.eps,
    )  # fmt: skip
