"""Triton kernel of the forward pass of tree attention; ``launch`` launches it.

A program computes the output of one tile of queries: online softmax in base 2 over the key blocks that the block table
lists for it, first those without a mask, then the partial ones. Legend: see ``common``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dta_kernels.tree_attention.common import load_key_end, load_rows, product, query_row_pointers

_RUNTIME = ["num_queries", "num_keys", "num_ancestors"]
_TABLES = ["key_end", "programs", "blocks"]


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_TABLES)
def forward_kernel(
    q_NHD, k_MGD, v_MGD, out_NHD, lse_HN, key_end, programs, blocks, num_queries, num_keys, num_ancestors, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PACK: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Grid (H / PACK, blocks of queries)."""
    BLOCK_M: tl.constexpr = BLOCK_Q * PACK
    head = tl.program_id(0) * PACK
    program = programs + tl.program_id(1) * 8
    block = tl.load(program)
    column = (head // (H // G)) * D
    offsets, query = query_row_pointers(block, head, BLOCK_Q, PACK, H, D, BLOCK_D)
    exists = query < num_queries
    stored = exists[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    q = tl.load(q_NHD + offsets, mask=stored, other=0.0)
    scale_2 = scale * 1.4426950408889634  # log2(e): all exponentials are powers of two
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    position = num_ancestors + query
    acc, total, largest = _visit(
        acc, total, largest, q, k_MGD, v_MGD, key_end, blocks, tl.load(program + 1), tl.load(program + 2), position,
        num_keys, scale_2, column, G, D, BLOCK_D, BLOCK_K, TMA, False, False,
    )  # fmt: skip
    middle = tl.load(program + 4)
    acc, total, largest = _visit(
        acc, total, largest, q, k_MGD, v_MGD, key_end, blocks, tl.load(program + 3), middle, position,
        num_keys, scale_2, column, G, D, BLOCK_D, BLOCK_K, TMA, True, False,
    )  # fmt: skip
    acc, total, largest = _visit(
        acc, total, largest, q, k_MGD, v_MGD, key_end, blocks, middle, tl.load(program + 5), position,
        num_keys, scale_2, column, G, D, BLOCK_D, BLOCK_K, TMA, True, True,
    )  # fmt: skip
    sees_any = total > 0
    acc = acc / tl.where(sees_any, total, 1.0)[:, None]
    tl.store(out_NHD + offsets, acc.to(out_NHD.dtype.element_ty), mask=stored)
    lse = tl.where(sees_any, (largest + tl.log2(tl.where(sees_any, total, 1.0))) * 0.6931471805599453, float("-inf"))
    head_of_row = head + tl.arange(0, BLOCK_M) % PACK
    tl.store(lse_HN + head_of_row.to(tl.int64) * num_queries + query, lse, mask=exists)


@triton.jit
def _visit(
    acc, total, largest, q, k_MGD, v_MGD, key_end, blocks, begin, end, position, num_keys, scale_2, column,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    LISTED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key blocks ``begin .. end`` (of the list if LISTED)."""
    for index in tl.range(begin, end):
        block = index
        if LISTED:
            block = tl.load(blocks + index)
        first = block * BLOCK_K
        k = load_rows(k_MGD, first, num_keys, G * D, column, D, BLOCK_K, BLOCK_D, PARTIAL, TMA)
        scores = product(q, k.T, None)
        if PARTIAL:
            key, end_of_key = load_key_end(key_end, block, num_keys, BLOCK_K)
            visible = (key[None, :] <= position[:, None]) & (position[:, None] < end_of_key[None, :])
            scores = tl.where(visible, scores * scale_2, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            # A row that has seen no key yet keeps minus infinity, which must not be subtracted from itself.
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            probability = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(largest - shift)
        else:
            new_largest = tl.maximum(largest, tl.max(scores, 1) * scale_2)
            probability = tl.exp2(scores * scale_2 - new_largest[:, None])
            decay = tl.exp2(largest - new_largest)
        total = total * decay + tl.sum(probability, 1)
        acc = acc * decay[:, None]
        v = load_rows(v_MGD, first, num_keys, G * D, column, D, BLOCK_K, BLOCK_D, PARTIAL, TMA)
        acc = product(probability.to(q.dtype), v, acc)
        largest = new_largest
    return acc, total, largest
