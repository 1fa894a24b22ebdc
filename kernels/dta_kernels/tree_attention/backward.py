"""Triton kernels of the backward pass of tree attention; ``launch`` launches them.

    prepare         delta = rowsum(dO O) and the log-sum-exp in base 2, in the order in which tiles read them
    key_gradients   A program owns one block of keys of one group, loops over the queries that see it and keeps dK and
                    dV in float32 registers. The heads of a group are added in a fixed order. Where many queries see a
                    block, several programs share them and add their sums in turn, in a fixed order too.
                    It also writes every tile of dS = d loss / d (scaled scores).
    query_gradients dQ = dS K from the stored tiles. This takes five matrix products in all, instead of seven if two
                    kernels compute the scores.

Legend: see ``common``; M is the number of keys, of which the first A are ancestors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dta_kernels.tree_attention.common import load_key_end, load_rows, product, query_row_pointers

_RUNTIME = ["num_queries", "num_keys", "num_ancestors", "num_added", "first_group", "first_chunk"]
_TABLES = ["key_end", "turns", "programs", "blocks", "tiles", "slots"]


@triton.jit(do_not_specialize=["num_queries", "chunk_stride"])
def prepare_kernel(
    grad_out_NHD, out_NHD, lse_HN, q_NHD, delta, lse_2, packed_grad_out, packed_q, num_queries, chunk_stride,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of the N * H rows). COPY also writes dO and Q in the order of tiles, [H / PACK, N, PACK, D].

    delta and lse_2 are in that order as well, with ``chunk_stride`` elements for each N * PACK of them.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_queries.to(tl.int64) * H
    query, head = row // H, row % H
    channel = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (channel < D)[None, :]
    offsets = row[:, None] * D + channel[None, :]
    grad_out = tl.load(grad_out_NHD + offsets, mask=inside, other=0.0)
    out = tl.load(out_NHD + offsets, mask=inside, other=0.0)
    offset = (head // PACK) * chunk_stride + query * PACK + head % PACK
    tl.store(delta + offset, tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1), mask=exists)
    lse = tl.load(lse_HN + head * num_queries + query, mask=exists, other=0.0)
    tl.store(lse_2 + offset, lse * 1.4426950408889634, mask=exists)
    if COPY:
        packed_row = ((head // PACK) * num_queries + query) * PACK + head % PACK
        packed_offsets = packed_row[:, None] * D + channel[None, :]
        tl.store(packed_grad_out + packed_offsets, grad_out, mask=inside)
        tl.store(packed_q + packed_offsets, tl.load(q_NHD + offsets, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_TABLES)
def key_gradients_kernel(
    grad_out, q, k_MGD, v_MGD, delta, lse_2, dk, dv, grad_keys, grad_values, slots, dscores, key_end, turns, programs,
    blocks, tiles, num_queries, num_keys, num_ancestors, num_added, first_group, scale, H: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PACK: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, TMA: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Grid (groups of this launch, blocks of keys or shares of them).

    With TMA, ``grad_out`` and ``q`` are descriptors of their copies in the order of tiles, else pointers to [N, H, D].
    With ACCUMULATE, the gradients of the first ``num_added`` keys are added to ``grad_keys[slots]`` and
    ``grad_values[slots]`` [., G, D] float32. Those of the other keys, plus the values at their slots, are written to
    ``dk`` and ``dv`` [M - num_added, G, D] in the queries' dtype (None if all keys are added). Without ACCUMULATE, all
    gradients are written to ``dk`` and ``dv``, float32. Shares of a block need ACCUMULATE; all but the last of them add
    the gradients of all keys at their slots.
    """
    CHUNKS: tl.constexpr = H // G // PACK
    group = first_group + tl.program_id(0)
    program = programs + tl.program_id(1) * 8
    block = tl.load(program)
    run_begin, run_end = tl.load(program + 1), tl.load(program + 2)
    list_begin, list_middle, list_end = tl.load(program + 3), tl.load(program + 4), tl.load(program + 5)
    # Offsets into ``tiles`` at which the tiles of the run and of the list would begin if the first index were zero.
    run_tiles = tl.load(program + 6) - run_begin
    list_tiles = run_tiles + run_end - list_begin
    k = load_rows(k_MGD, block * BLOCK_K, num_keys, G * D, group * D, D, BLOCK_K, BLOCK_D, True, False)
    v = load_rows(v_MGD, block * BLOCK_K, num_keys, G * D, group * D, D, BLOCK_K, BLOCK_D, True, False)
    key, end_of_key = load_key_end(key_end, block, num_keys, BLOCK_K)
    dk_acc = tl.zeros([BLOCK_K, BLOCK_D], dtype=tl.float32)
    dv_acc = tl.zeros([BLOCK_K, BLOCK_D], dtype=tl.float32)
    for chunk in range(CHUNKS):
        head = (group * CHUNKS + chunk) * PACK
        dscores_chunk = dscores + (tl.program_id(0) * CHUNKS + chunk) * (BLOCK_K * BLOCK_Q * PACK)
        for kind in tl.static_range(3):  # the run, the list's full blocks, its partial ones
            begin = run_begin if kind == 0 else list_begin if kind == 1 else list_middle
            end = run_end if kind == 0 else list_middle if kind == 1 else list_end
            first_tile = run_tiles if kind == 0 else list_tiles
            dk_acc, dv_acc = _collect(
                dk_acc, dv_acc, k, v, key, end_of_key, grad_out, q, delta, lse_2, dscores_chunk, blocks, tiles, begin,
                end, first_tile, head, num_queries, num_ancestors, scale, H, G, D, BLOCK_D, PACK, BLOCK_Q, BLOCK_K,
                TMA, kind > 0, kind == 2,
            )  # fmt: skip
    dk_acc = dk_acc * scale
    channel = tl.arange(0, BLOCK_D)
    inside = (key < num_keys)[:, None] & (channel < D)[None, :]
    column = group * D + channel
    if ACCUMULATE:
        share = tl.load(program + 7)
        turn, is_last = share // 2, share % 2
        own_turn = turns + (block * G + group) * 2
        if turn > 0:
            while tl.atomic_add(own_turn, 0) < turn:
                pass
        slot = tl.load(slots + key, mask=key < num_keys, other=0)
        slot_offsets = slot[:, None] * (G * D) + column[None, :]
        # Another program may have written them: only the L2 cache is the same for all.
        dk_acc += tl.load(grad_keys + slot_offsets, mask=inside, other=0.0, cache_modifier=".cg")
        dv_acc += tl.load(grad_values + slot_offsets, mask=inside, other=0.0, cache_modifier=".cg")
        written = tl.where(is_last == 1, num_added, num_keys)
        added = inside & (key < written)[:, None]
        tl.store(grad_keys + slot_offsets, dk_acc, mask=added)
        tl.store(grad_values + slot_offsets, dv_acc, mask=added)
        if share != 1:
            tl.debug_barrier()
            tl.atomic_xchg(own_turn, (turn + 1) * (1 - is_last))
        other = (key - num_added).to(tl.int64)
        offsets = other[:, None] * (G * D) + column[None, :]
        inside = inside & (key >= num_added)[:, None] & (is_last == 1)
    else:
        offsets = key.to(tl.int64)[:, None] * (G * D) + column[None, :]
    if dk is not None:
        tl.store(dk + offsets, dk_acc.to(dk.dtype.element_ty), mask=inside)
        tl.store(dv + offsets, dv_acc.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def _collect(
    dk, dv, k, v, key, end_of_key, grad_out, q_source, delta, lse_2, dscores, blocks, tiles, begin, end, first_tile,
    head, num_queries, num_ancestors, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PACK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, LISTED: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add the gradients from query tiles ``begin .. end`` (of the list if LISTED). Scores are [keys, rows]."""
    BLOCK_M: tl.constexpr = BLOCK_Q * PACK
    row = tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_D)
    within = (row // PACK) * (H * D) + (row % PACK) * D
    statistics = tl.cast(head // PACK, tl.int64) * num_queries * PACK
    scale_2 = scale * 1.4426950408889634
    for index in tl.range(begin, end):
        block = index
        if LISTED:
            block = tl.load(blocks + index)
        first = block * BLOCK_Q
        tile_row = first * PACK + row
        if PARTIAL:
            # Rows past the last query have log-sum-exp infinity, so their probability is zero for any loaded values.
            exists = row < (num_queries - first) * PACK
            lse = tl.load(lse_2 + statistics + tile_row, mask=exists, other=float("inf"))
            delta_row = tl.load(delta + statistics + tile_row, mask=exists, other=0.0)
        else:
            lse = tl.load(lse_2 + statistics + tile_row)
            delta_row = tl.load(delta + statistics + tile_row)
        if TMA:
            first_row = ((head // PACK) * num_queries + first) * PACK
            q = q_source.load([first_row, 0])
            do = grad_out.load([first_row, 0])
        else:
            base = tl.cast(first, tl.int64) * (H * D) + head * D
            q_tile, do_tile = q_source + base, grad_out + base
            offsets = within[:, None] + channel[None, :]
            if PARTIAL:
                inside = exists[:, None] & (channel < D)[None, :]
                q = tl.load(q_tile + offsets, mask=inside, other=0.0)
                do = tl.load(do_tile + offsets, mask=inside, other=0.0)
            elif BLOCK_D == D:
                q = tl.load(q_tile + offsets)
                do = tl.load(do_tile + offsets)
            else:
                q = tl.load(q_tile + offsets, mask=(channel < D)[None, :], other=0.0)
                do = tl.load(do_tile + offsets, mask=(channel < D)[None, :], other=0.0)
        scores = product(k, q.T, None)
        probability = tl.exp2(scores * scale_2 - lse[None, :])
        if PARTIAL:
            position = num_ancestors + first + row // PACK
            visible = (key[:, None] <= position[None, :]) & (position[None, :] < end_of_key[:, None])
            probability = tl.where(visible, probability, 0.0)
        dv = product(probability.to(do.dtype), do, dv)
        dprobability = product(v, do.T, None)
        dscore = (probability * (dprobability - delta_row[None, :])).to(q.dtype)
        dk = product(dscore, q, dk)
        tile = tl.cast(tl.load(tiles + first_tile + index), tl.int64)
        CHUNKS: tl.constexpr = H // G // PACK
        target = dscores + tile * (tl.num_programs(0) * CHUNKS * BLOCK_K * BLOCK_M)
        inner = tl.arange(0, BLOCK_K)[:, None] * BLOCK_M + row[None, :]
        tl.store(target + inner, dscore)
    return dk, dv


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_TABLES)
def query_gradients_kernel(
    dscores, k_MGD, dq_NHD, programs, blocks, num_queries, num_keys, first_chunk, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PACK: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of heads of this launch, blocks of queries); the tiles of a row are consecutive in ``dscores``."""
    BLOCK_M: tl.constexpr = BLOCK_Q * PACK
    head = (first_chunk + tl.program_id(0)) * PACK
    column = (head // (H // G)) * D
    program = programs + tl.program_id(1) * 8
    block = tl.load(program)
    run_begin, run_end = tl.load(program + 1), tl.load(program + 2)
    list_begin, list_end = tl.load(program + 3), tl.load(program + 5)
    run_tile = tl.load(program + 6) - run_begin
    list_tile = run_tile + run_end - list_begin
    stride = tl.num_programs(0) * (BLOCK_K * BLOCK_M)
    inner = tl.arange(0, BLOCK_K)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    source = dscores + tl.program_id(0) * (BLOCK_K * BLOCK_M) + inner
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for index in tl.range(run_begin, run_end):
        dscore = tl.load(source + tl.cast(run_tile + index, tl.int64) * stride)
        k = load_rows(k_MGD, index * BLOCK_K, num_keys, G * D, column, D, BLOCK_K, BLOCK_D, False, TMA)
        acc = product(dscore.T, k, acc)
    for index in tl.range(list_begin, list_end):
        other = tl.load(blocks + index)
        dscore = tl.load(source + tl.cast(list_tile + index, tl.int64) * stride)
        k = load_rows(k_MGD, other * BLOCK_K, num_keys, G * D, column, D, BLOCK_K, BLOCK_D, True, TMA)
        acc = product(dscore.T, k, acc)
    offsets, query = query_row_pointers(block, head, BLOCK_Q, PACK, H, D, BLOCK_D)
    stored = (query < num_queries)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    acc = acc * scale
    tl.store(dq_NHD + offsets, acc.to(dq_NHD.dtype.element_ty), mask=stored)
