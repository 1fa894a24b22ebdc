"""Gathers keys and values of a segment's ancestors and of the segment itself from a pool of slots, in one launch.

The segment's own values may also be given in a separate tensor; the same launch then writes them to the pool, too.

Legend: S slots, M = A + N keys (A ancestors, then N own), G key/value heads, D head size.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div

_ELEMENTS = 4096


@triton.jit(do_not_specialize=["num_ancestors", "num_keys"])
def _gather_kernel(
    keys_in, values_io, slots_in, own_values_in, keys_out, values_out, num_ancestors, num_keys, row_stride,
    group_stride, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_keys)[:, None] & (column < WIDTH)[None, :]
    slot = tl.load(slots_in + row, mask=row < num_keys, other=0)
    source = slot[:, None] * WIDTH + column[None, :]
    target = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(keys_out + target, tl.load(keys_in + source, mask=inside), mask=inside)
    if OWN:
        is_own = inside & (row >= num_ancestors)[:, None]
        offset = (row - num_ancestors).to(tl.int64)[:, None] * row_stride
        own_source = own_values_in + offset + (column // D * group_stride + column % D)[None, :]
        value = tl.load(own_source, mask=is_own)
        tl.store(values_io + source, value, mask=is_own)
        tl.store(values_out + target, value, mask=is_own)
        inside = inside & (row < num_ancestors)[:, None]
    tl.store(values_out + target, tl.load(values_io + source, mask=inside), mask=inside)


@lru_cache
def _gather(num_groups: int, head_size: int, has_segment_values: bool) -> tuple[Launcher, int]:
    """The launcher, and the number of keys that a program handles."""
    block = triton.next_power_of_2(num_groups * head_size)
    sizes = dict(D=head_size, WIDTH=num_groups * head_size, BLOCK=block, ROWS=max(1, _ELEMENTS // block))
    return Launcher(_gather_kernel, **sizes, OWN=has_segment_values, num_warps=4), sizes["ROWS"]


def gather_keys(
    keys_SGD: Tensor, values_SGD: Tensor, slots_M: Tensor, out_MGD: tuple[Tensor, Tensor],
    own_values_NGD: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the keys and values at ``slots`` to ``out``.

    Args:
        keys_SGD, values_SGD: contiguous.
        slots_M: int64, distinct.
        out_MGD: output for keys and values, contiguous.
        own_values_NGD: values of the last N keys, with adjacent channels; they are written to the pool and to ``out``.
            None: they are in the pool already.
    """
    G, D = keys_SGD.shape[1:]
    M = slots_M.shape[0]
    has_segment_values = own_values_NGD is not None
    values = own_values_NGD if has_segment_values else values_SGD
    if M == 0:
        return
    if values.stride(2) != 1:
        raise ValueError("the channels of a head's values must be neighbors")
    num_ancestors = M - values.shape[0] if has_segment_values else M
    launch, rows = _gather(G, D, has_segment_values)
    launch(
        (ceil_div(M, rows),), keys_SGD, values_SGD, slots_M, values, *out_MGD, num_ancestors, M, values.stride(0),
        values.stride(1),
    )  # fmt: skip
