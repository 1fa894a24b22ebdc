"""Adds the sums of dK and dV that FlashAttention 4 leaves in float32 to the accumulators of a K/V pool.

For several query heads per key/value head, the library's backward on Hopper adds up dK and dV in float32 and rounds
them in a kernel of its own. This kernel takes that one's place, so that no gradient is rounded before it is added.

The sums are stored in the order in which registers of the matrix units hold them. Of each block of 128 keys, one warp
group of 128 threads has the first 64 keys and another one the last 64. Its thread t holds channels 8n + 2(t mod 4) and
the next one, for all n, of the keys t div 32 * 16 + t mod 32 div 4 and 8 behind that key. For every n, these 4 numbers
of all 128 threads follow each other.

Legend: S slots, M = A + N keys (A ancestors, then N own), G key/value heads, D head size.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div

# Keys of the library's blocks, and keys that a program handles.
_BLOCK, _ROWS = 128, 32


@triton.jit(do_not_specialize=["num_ancestors", "num_keys", "head_stride"])
def _add_kernel(
    dk_in, dv_in, keys_io, values_io, slots_in, dk_out, dv_out, num_ancestors, num_keys, head_stride, scale,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK_D)
    inside = (row < num_keys)[:, None] & (channel < D)[None, :]
    of_row = row // 64 * (64 * D) + row % 64 // 16 * 128 + row % 8 * 16 + row // 8 % 2 * 2
    of_channel = channel // 8 * 512 + channel % 8 // 2 * 4 + channel % 2
    source = group.to(tl.int64) * head_stride + of_row[:, None] + of_channel[None, :]
    dk = tl.load(dk_in + source, mask=inside, other=0.0) * scale
    dv = tl.load(dv_in + source, mask=inside, other=0.0)
    own_row = row
    is_own = inside
    if INTO:
        slot = tl.load(slots_in + row, mask=row < num_keys, other=0)
        target = (slot * G + group)[:, None] * D + channel[None, :]
        dk += tl.load(keys_io + target, mask=inside, other=0.0)
        dv += tl.load(values_io + target, mask=inside, other=0.0)
        is_ancestor = inside & (row < num_ancestors)[:, None]
        tl.store(keys_io + target, dk, mask=is_ancestor)
        tl.store(values_io + target, dv, mask=is_ancestor)
        own_row = row - num_ancestors
        is_own = inside & (own_row >= 0)[:, None]
    offset = (own_row.to(tl.int64) * G + group)[:, None] * D + channel[None, :]
    tl.store(dk_out + offset, dk.to(dk_out.dtype.element_ty), mask=is_own)
    tl.store(dv_out + offset, dv.to(dv_out.dtype.element_ty), mask=is_own)


@lru_cache
def _launcher(num_groups: int, head_size: int, into: bool) -> Launcher:
    sizes = dict(G=num_groups, D=head_size, BLOCK_D=triton.next_power_of_2(head_size), ROWS=_ROWS)
    return Launcher(_add_kernel, **sizes, INTO=into, num_warps=4)


def empty_sums(num_keys: int, num_groups: int, head_size: int, device: torch.device) -> Tensor:
    """Room for the library's sums of dK or dV of ``num_keys`` keys, float32 [1, G, elements]."""
    elements = ceil_div(num_keys, _BLOCK) * _BLOCK * head_size
    return torch.empty(1, num_groups, elements, dtype=torch.float32, device=device)


def add_key_gradients(
    sums: tuple[Tensor, Tensor],
    scale: float,
    out_NGD: tuple[Tensor, Tensor],
    num_keys: int,
    accumulators_SGD: tuple[Tensor, Tensor] | None = None,
    slots_M: Tensor | None = None,
) -> None:
    """Add dK and dV of the ancestors to their accumulators, and write those of the own keys.

    Args:
        sums: of dK, still to be multiplied by ``scale``, and of dV; see ``empty_sums``.
        out_NGD: for the last N keys, which get what is in their accumulators as well; contiguous, in any dtype.
        accumulators_SGD, slots_M: float32, contiguous, and distinct int64. None if ``out`` is for all keys.
    """
    N, G, D = out_NGD[0].shape
    keys, values = accumulators_SGD or (None, None)
    _launcher(G, D, slots_M is not None)(
        (ceil_div(num_keys, _ROWS), G), *sums, keys, values, slots_M, *out_NGD, num_keys - N, num_keys,
        sums[0].stride(1), scale,
    )  # fmt: skip
