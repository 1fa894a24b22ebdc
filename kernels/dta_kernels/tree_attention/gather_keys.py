"""Gathers keys and values of a segment's ancestors and of the segment itself from a pool of slots, in one launch.

Legend: S slots, M = A + N keys (A ancestors, then N own), G key/value heads, D head size.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div

_ELEMENTS = 4096


@triton.jit(do_not_specialize=["num_keys"])
def _gather_kernel(
    keys_in, values_in, slots_in, keys_out, values_out, num_keys, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_keys)[:, None] & (column < WIDTH)[None, :]
    slot = tl.load(slots_in + row, mask=row < num_keys, other=0)
    source = slot[:, None] * WIDTH + column[None, :]
    target = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(keys_out + target, tl.load(keys_in + source, mask=inside), mask=inside)
    tl.store(values_out + target, tl.load(values_in + source, mask=inside), mask=inside)


@lru_cache
def _gather(width: int) -> tuple[Launcher, int]:
    """The launcher, and the number of keys that a program handles."""
    block = triton.next_power_of_2(width)
    rows = max(1, _ELEMENTS // block)
    return Launcher(_gather_kernel, WIDTH=width, BLOCK=block, ROWS=rows, num_warps=4), rows


def gather_keys(keys_SGD: Tensor, values_SGD: Tensor, slots_M: Tensor, out_MGD: tuple[Tensor, Tensor]) -> None:
    """Write the keys and values at ``slots``, int64 [M], to ``out``, those for keys and values; all are contiguous."""
    (_, G, D), M = keys_SGD.shape, slots_M.shape[0]
    if M:
        launch, rows = _gather(G * D)
        launch((ceil_div(M, rows),), keys_SGD, values_SGD, slots_M, *out_MGD, M)
