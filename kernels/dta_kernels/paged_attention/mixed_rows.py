"""Attention over pages of one new token a sequence, directly from the rows of the QKV product, for decoding.

A program normalizes and rotates the queries of its tile in registers, and the new key in a row after them. The program
that has the last part of a tile's keys writes the key and the value to their page, and reads them with the others. So
no kernel and no tensor is between the product and the attention. Bits are those of ``qkv_rope_pages`` and the
attention after it, as far as the compiler sums a head's channels in the same order.

Sequences that share their first pages, as the branches of a tree and the answers to one prompt do, are one program's,
which reads these pages once (``launch.shared_keys``).

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
from dta_kernels.paged_attention.kernels import attend_parts, part_length
from dta_kernels.paged_attention.launch import PagedConfig, Parts, attention_constants, shared_grid


@triton.jit
def _squares(x, channel, begin, end):
    return tl.sum(tl.where((channel >= begin) & (channel < end), x * x, 0.0), 1)


@triton.jit
def _weights(q_weight_in, k_weight_in, channel, is_query, is_key):
    of_queries = tl.load(q_weight_in + channel, mask=is_query, other=0.0)
    return tl.where(is_query, of_queries, tl.load(k_weight_in + channel, mask=is_key, other=0.0)).to(tl.float32)


@triton.jit
def _turned(
    source, cos_of, sin_of, q_weight_in, k_weight_in, eps, size, head, exists, element: tl.constexpr,
    TERMS: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The ``J`` queries of each token's group and its key, [ROWS, BLOCK_D], normalized and rotated as by ``turn_head``.
    Where each row begins (``source``, ``cos_of``, ``sin_of``), its ``head`` and ``exists`` are of shape [ROWS, 1]."""
    # All tensors have the same shape, so that none of them changes its layout.
    head = tl.broadcast_to(head, (ROWS, BLOCK_D))
    channel = tl.broadcast_to(tl.arange(0, BLOCK_D)[None, :], (ROWS, BLOCK_D))
    # The compiler knows that remainders of neighbors are neighbors.
    angle, partner = channel % HALF, (channel + HALF) % (2 * HALF)
    stored, turns = exists & (channel < D), exists & (channel < 2 * HALF)
    value = sum_of_terms(source + channel, stored, size, TERMS, element)
    other = sum_of_terms(source + partner, turns, size, TERMS, element)
    cos = tl.load(cos_of + angle, mask=turns, other=1.0)
    sin = tl.load(sin_of + angle, mask=turns, other=0.0)
    if NORM:
        of_own = _weights(q_weight_in, k_weight_in, channel, stored & (head < J), stored & (head == J))
        of_other = _weights(q_weight_in, k_weight_in, partner, turns & (head < J), turns & (head == J))
        total = _squares(value, channel, 0, HALF) + _squares(value, channel, HALF, 2 * HALF)
        if D > 2 * HALF:
            total += _squares(value, channel, 2 * HALF, D)
        rstd = (1.0 / tl.sqrt(total / D + eps))[:, None]
        value, other = value * rstd * of_own, other * rstd * of_other
    return tl.fma(value, cos, other * tl.where(channel < HALF, -sin, sin)).to(element)


@triton.jit(
    do_not_specialize=["num_tokens", "programs"],
    do_not_specialize_on_alignment=["tiles", "shares", "tables", "addresses", "slots"],
)
def _kernel(
    mixed_in, cos_in, sin_in, q_weight_in, k_weight_in, out_NHD, part_out, part_lse, arrived, addresses, slots, tiles,
    shares, tables, num_tokens, programs, scale, eps, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    MIN_PART: tl.constexpr, OVERLAP: tl.constexpr, TERMS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Grid (tiles x G, programs of a tile); a tile has one token or none. A program has the tokens of as many tiles,
    from its own on, as ``shares`` says, J + 1 rows for each; ``programs`` for each of these share the tile's parts."""
    element: tl.constexpr = out_NHD.dtype.element_ty
    J: tl.constexpr = H // G
    tile, group = tl.program_id(0) // G, tl.program_id(0) % G
    row = tl.arange(0, BLOCK_M)
    member, head = row // (J + 1), row % (J + 1)
    # Inputs of the whole pass, which no kernel of it writes.
    first = tl.load(tiles + tile * 4)
    members, common = tl.load(shares + 2 * tile).to(tl.int32), tl.load(shares + 2 * tile + 1).to(tl.int32)
    exists = member < members
    position = tl.load(tiles + tl.minimum(tile + member, tl.num_programs(0) // G - 1) * 4 + 2).to(tl.int32)
    position = tl.where(exists, position, -1)
    slot = tl.load(slots + first + member, mask=exists, other=-1)
    keys_of = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(element)), 16) + group * D
    values_of = tl.multiple_of(tl.load(addresses + 1).to(tl.pointer_type(element)), 16) + group * D
    wait_for_previous(OVERLAP)
    if members == 0:
        return
    end = tl.max(position) + 1
    length = part_length(end, PARTS, MIN_PART)
    programs = tl.minimum(programs * members, tl.num_programs(1))
    if tl.program_id(1) >= tl.minimum(tl.cdiv(end, length), programs):
        return
    token = first + member
    source = mixed_in + ((token * G + group) * ((J + 2) * D) + head * D)[:, None]
    size = num_tokens.to(tl.int64) * (G * (J + 2) * D)
    is_key = exists & (head == J) & (slot >= 0)
    is_last = tl.program_id(1) == (tl.cdiv(position + 1, length) - 1) % programs
    channel = tl.arange(0, BLOCK_D)[None, :]
    written = (is_key & is_last)[:, None] & (channel < D)
    q = _turned(
        source, cos_in + (token * HALF)[:, None], sin_in + (token * HALF)[:, None], q_weight_in, k_weight_in, eps, size,
        head[:, None], exists[:, None], element, TERMS, BLOCK_M, J, D, BLOCK_D, HALF, NORM,
    )  # fmt: skip
    # The row after the queries is the key; as a query it is computed, too, but not stored.
    target = slot[:, None] * (G * D) + channel
    tl.store(keys_of + target, q, mask=written)
    value = sum_of_terms(source + D + channel, written, size, TERMS, element)
    tl.store(values_of + target, value.to(element), mask=written)
    # Other threads of the program read them.
    tl.debug_barrier()
    attend_parts(
        q, position, exists & (head < J), token, keys_of, values_of, tables, tiles + tile * 4, member, members, common,
        group * J + head, end, programs, num_tokens, scale, out_NHD, part_out, part_lse, arrived, H, G, D, BLOCK_D, S,
        BLOCK_M, BLOCK_N, PARTS, MIN_PART, True,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _launcher(rotated: tuple[int, bool, int], *shape: Any) -> Launcher:
    pairs, norm, terms = rotated
    more = {"TERMS": terms, "HALF": pairs, "NORM": norm}
    return Launcher(_kernel, **attention_constants(*shape), **more)


def attend_mixed(
    rows: MixedQKV, out_NHD: Tensor, addresses: Tensor, slots: Tensor, page_size: int, tiles: Tensor, shares: Tensor,
    tables: Tensor, scale: float, config: PagedConfig, parts: Parts,
) -> None:  # fmt: skip
    """Write K and V of ``rows`` to their slots, and their attention to ``out_NHD``; rows of no tile are unchanged.

    Args:
        rows: ``mixed`` may be the terms [S, n, W] of a product (``few_rows``).
        out_NHD: contiguous, in the dtype of the pages, to which the sum of terms is rounded.
        slots: int64 [n] (page x positions + offset), negative for none.
        addresses, page_size, tiles, tables, parts: see ``paged_attention``; a tile has one token.
        shares: int64 [T, 2], ``shared_keys`` of ``config``.
    """
    (n, H, D), G = out_NHD.shape, rows.layout.num_groups
    if tiles.shape[0] == 0:
        return
    config = replace(config, rows=max(config.rows, triton.next_power_of_2(H // G + 1)))
    rotated = rows.cos.shape[1], rows.q_weight is not None, rows.mixed.shape[0] if rows.mixed.dim() == 3 else 1
    grid, programs = shared_grid(tiles, G, H // G, config)
    _launcher(rotated, H, G, D, page_size, config)(
        grid, *rows.inputs(), out_NHD, *parts.at_least(config, out_NHD, grid[0]), addresses, slots, tiles, shares,
        tables, n, programs, scale, rows.eps,
    )  # fmt: skip
