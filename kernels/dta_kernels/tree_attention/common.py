"""Functions that the forward and backward kernels share: loading tiles, products, the visibility of a tile.

Legend (also of the kernels): H query heads, G key/value heads, D head size, N queries, M keys. A tile of queries has
``BLOCK_Q`` tokens times ``PACK`` heads of one key/value group as its rows, token-major, so that the heads of a group
share every load of keys and a short run of tokens still fills a matrix product. ``BLOCK_D`` is D rounded up to a
power of two; the columns past D are zero.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU (environment variable TRITON_INTERPRET)."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "True", "on", "yes")


_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def product(a, b, acc):
    """acc + a b in float32 (acc None for zero). "ieee" keeps float32 exact; the default would round it to 10 bits."""
    if _INTERPRETED:  # it cannot multiply bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def load_rows(source, first, num_rows, STRIDE: tl.constexpr, column, D: tl.constexpr, ROWS: tl.constexpr,
              BLOCK_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Rows ``first .. first + ROWS`` and columns ``column .. column + D`` of a row-major matrix; zero outside of it.

    Without MASKED, all the rows must exist. With TMA, ``source`` is a tensor descriptor, else a pointer to the matrix.
    """
    if TMA:
        tile = source.load([first, column])
    else:
        row = tl.arange(0, ROWS)
        channel = tl.arange(0, BLOCK_D)
        pointers = source + tl.cast(first, tl.int64) * STRIDE + column + row[:, None] * STRIDE + channel[None, :]
        if MASKED and BLOCK_D == D:
            tile = tl.load(pointers, mask=(row < num_rows - first)[:, None], other=0.0)
        elif MASKED:
            tile = tl.load(pointers, mask=(row < num_rows - first)[:, None] & (channel < D)[None, :], other=0.0)
        elif BLOCK_D == D:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(channel < D)[None, :], other=0.0)
    return tile


@triton.jit
def query_row_pointers(block, head, BLOCK_Q: tl.constexpr, PACK: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
                       BLOCK_D: tl.constexpr):  # fmt: skip
    """Offsets [BLOCK_Q * PACK, BLOCK_D] of a query tile into a tensor [N, H, D], and the queries of its rows."""
    row = tl.arange(0, BLOCK_Q * PACK)
    query = block * BLOCK_Q + row // PACK
    base = tl.cast(block * BLOCK_Q, tl.int64) * (H * D) + head * D
    within = (row // PACK) * (H * D) + (row % PACK) * D
    return base + within[:, None] + tl.arange(0, BLOCK_D)[None, :], query


@triton.jit
def load_key_end(key_end, block, num_keys, BLOCK_K: tl.constexpr):
    """Positions of a block's keys and the ends of their visibility; no query sees keys that do not exist."""
    key = block * BLOCK_K + tl.arange(0, BLOCK_K)
    return key, tl.load(key_end + key, mask=key < num_keys, other=0)
