"""Triton kernels of attention over a paged K/V cache; ``launch`` launches them.

A tile is a run of new tokens of one sequence. A program computes one tile, one group of heads and one part of the keys,
with the online softmax in base 2. The program that finishes the last part of a tile merges all of them in order. The
division of the keys depends only on the tile's own number of keys, so with the same settings the result of a sequence
does not depend on the rest of the batch.

Shapes that change between passes, and the pages' addresses, are read from memory. Nothing is compiled again, and a
captured launch serves every pass, also after the cache has moved.

Legend: H query heads, G key/value heads, D head size, J = H / G, S positions of a page. A tile has ``BLOCK_M`` rows,
tokens times J heads, token-major. ``BLOCK_D`` is D rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dta_kernels.overlap import wait_for_previous
from dta_kernels.tree_attention.common import product

_RUNTIME = ["num_tokens"]


@triton.jit
def part_length(num_keys, PARTS: tl.constexpr, MIN_PART: tl.constexpr):
    """Keys of a part: a multiple of ``MIN_PART``, so that there are at most ``PARTS`` parts."""
    return tl.cdiv(tl.cdiv(num_keys, PARTS), MIN_PART) * MIN_PART


@triton.jit
def load_tile(tiles, tile):
    """First query, number of queries, position of the first one, begin of the page table."""
    entry = tiles + tile * 4
    first = tl.load(entry)
    count = tl.load(entry + 1).to(tl.int32)
    position = tl.load(entry + 2).to(tl.int32)
    return first, count, position, tl.load(entry + 3)


@triton.jit
def attend_part(
    q, position, scale_2, keys_of, values_of, table, begin, stop, STRIDE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention to the keys ``begin .. stop``: the weighted mean of their values, and the log-sum-exp in base 2. A
    position has ``STRIDE`` elements."""
    channel = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    key = begin + tl.arange(0, BLOCK_N)
    page = tl.load(table + key // S, mask=key < stop, other=0)
    for start in tl.range(begin, stop, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < stop
        offset = (page * S + key % S) * STRIDE
        if BLOCK_D == D:
            loaded = inside[:, None]
        else:
            loaded = inside[:, None] & (channel < D)[None, :]
        k = tl.load(keys_of + offset[:, None] + channel[None, :], mask=loaded, other=0.0)
        v = tl.load(values_of + offset[:, None] + channel[None, :], mask=loaded, other=0.0)
        # The pages of the next block are known before its keys are needed.
        page = tl.load(table + (key + BLOCK_N) // S, mask=key + BLOCK_N < stop, other=0)
        scores = product(q, k.T, None)
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(visible, scores * scale_2, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet keeps minus infinity, which must not be subtracted from itself.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        probability = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(largest - shift)
        total = total * decay + tl.sum(probability, 1)
        acc = acc * decay[:, None]
        acc = product(probability.to(q.dtype), v, acc)
        largest = new_largest
    total = tl.where(total > 0, total, 1.0)
    return acc / total[:, None], largest + tl.log2(total)


@triton.jit
def _merged_parts(
    part_out, part_lse, at, size, parts, exists, stored, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """The weighted mean of a tile's parts, in order; ``at`` are the tile's rows in a part of ``size`` rows."""
    channel = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for part in tl.range(0, parts):
        row = at + part * size
        # Not from the processor's own cache, which knows nothing of what other programs have stored.
        lse = tl.load(part_lse + row, mask=exists, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(part_out + row[:, None] * D + channel[None, :], mask=stored, other=0.0, cache_modifier=".cg")
        new_largest = tl.maximum(largest, lse)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay, weight = tl.exp2(largest - shift), tl.exp2(lse - shift)
        total = total * decay + weight
        acc = acc * decay[:, None] + values * weight[:, None]
        largest = new_largest
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def attend_parts(
    q, position, exists, token, keys_of, values_of, table, head, end, num_tokens, scale, out_NHD, part_out, part_lse,
    arrived, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, MIN_PART: tl.constexpr,
):  # fmt: skip
    """Attention of a tile's queries: this program's parts of the ``end`` keys, and the merge, if it is the last one.

    position, exists, token, head: of each row. keys_of, values_of: of the group.
    """
    length = part_length(end, PARTS, MIN_PART)
    parts, programs = tl.cdiv(end, length), tl.num_programs(1)
    channel = tl.arange(0, BLOCK_D)
    stored = exists[:, None] & (channel < D)[None, :]
    scale_2 = scale * 1.4426950408889634  # log2(e): all exponentials are powers of two
    at = (token * H + head).to(tl.int64)
    size = num_tokens.to(tl.int64) * H
    for part in tl.range(tl.program_id(1), parts, programs):
        begin = part * length
        stop = tl.minimum(begin + length, end)
        acc, lse = attend_part(
            q, position, scale_2, keys_of, values_of, table, begin, stop, G * D, D, BLOCK_D, S, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if PARTS == 1 or parts == 1:
            tl.store(out_NHD + at[:, None] * D + channel[None, :], acc.to(out_NHD.dtype.element_ty), mask=stored)
        else:
            target = at + part * size
            tl.store(part_out + target[:, None] * D + channel[None, :], acc, mask=stored)
            tl.store(part_lse + target, lse, mask=exists)
    if PARTS > 1 and parts > 1:
        # All threads have stored before the addition releases it to the program that arrives last.
        tl.debug_barrier()
        arrived += tl.program_id(0)
        before = tl.atomic_add(arrived, 1, sem="acq_rel")
        if before == tl.minimum(programs, parts) - 1:
            tl.store(arrived, 0)
            merged = _merged_parts(part_out, part_lse, at, size, parts, exists, stored, BLOCK_M, BLOCK_D, D)
            tl.store(out_NHD + at[:, None] * D + channel[None, :], merged.to(out_NHD.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=["tiles", "tables", "addresses"])
def paged_attention_kernel(
    query, out_NHD, part_out, part_lse, arrived, addresses, tiles, tables, num_tokens, scale, query_stride, head_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, MIN_PART: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles x G, programs of a tile), among which the tile's parts are dealt out; tiles without queries are
    skipped. ``arrived``, int32 [tiles x G], is zero before and after."""
    wait_for_previous(OVERLAP)
    J: tl.constexpr = H // G
    group = tl.program_id(0) % G
    first, count, first_position, table_begin = load_tile(tiles, tl.program_id(0) // G)
    if count == 0:
        return
    end = first_position + count
    if tl.program_id(1) >= tl.cdiv(end, part_length(end, PARTS, MIN_PART)):
        return
    keys_of = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(query.dtype.element_ty)), 16)
    values_of = tl.multiple_of(tl.load(addresses + 1).to(tl.pointer_type(query.dtype.element_ty)), 16)
    row = tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_D)
    own_query = row // J
    exists = own_query < count
    offsets = (first + own_query) * query_stride + (group * J + row % J) * head_stride
    stored = exists[:, None] & (channel < D)[None, :]
    q = tl.load(query + offsets[:, None] + channel[None, :], mask=stored, other=0.0)
    attend_parts(
        q, first_position + own_query, exists, first + own_query, keys_of + group * D, values_of + group * D,
        tables + table_begin, group * J + row % J, end, num_tokens, scale, out_NHD, part_out, part_lse, arrived, H, G,
        D, BLOCK_D, S, BLOCK_M, BLOCK_N, PARTS, MIN_PART,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots", "addresses"])
def write_pages_kernel(
    key, value, addresses, slots, key_stride, key_group_stride, value_stride, value_group_stride,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Grid (tokens): writes K and V of one token to its slot; negative slots are skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    keys_of = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(key.dtype.element_ty)), 16)
    values_of = tl.multiple_of(tl.load(addresses + 1).to(tl.pointer_type(key.dtype.element_ty)), 16)
    group = tl.arange(0, BLOCK_G)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    exists = (group < G) & (channel < D)
    target = slot * (G * D) + group * D + channel
    k = tl.load(key + token * key_stride + group * key_group_stride + channel, mask=exists)
    tl.store(keys_of + target, k, mask=exists)
    v = tl.load(value + token * value_stride + group * value_group_stride + channel, mask=exists)
    tl.store(values_of + target, v, mask=exists)


@triton.jit(do_not_specialize=["num_pages"], do_not_specialize_on_alignment=["pages", "addresses"])
def move_pages_kernel(
    between, addresses, pages, num_pages, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr
):
    """Grid (pages, tensors, blocks of a page): copies pages of every layer's K and V to or from ``between``."""
    i, tensor = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    exists = element < ELEMENTS
    pool = tl.multiple_of(tl.load(addresses + tensor).to(tl.pointer_type(between.dtype.element_ty)), 16)
    inside = pool + tl.load(pages + i) * ELEMENTS + element
    outside = between + (tensor * num_pages.to(tl.int64) + i) * ELEMENTS + element
    if GATHER:
        tl.store(outside, tl.load(inside, mask=exists), mask=exists)
    else:
        tl.store(inside, tl.load(outside, mask=exists), mask=exists)
