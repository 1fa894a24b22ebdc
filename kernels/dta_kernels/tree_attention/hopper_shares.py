"""Adds up, on Hopper GPUs, what several programs computed of one block of queries; ``blocks`` decides which are shared.

All but the last program of a block leave their sums in memory and raise a flag. The last one waits for each of them in
turn, adds its sums in their order, which keeps results reproducible bit for bit, and lowers the flag. The programs of a
block start in their order, so the ones that it waits for have started.

Each group of four warps has 64 rows and a slot of its own: ``64 * D`` sums, then two statistics of each row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def slot_of(programs, WG: gl.constexpr):
    """``(slot, number, is_last)``: the slot of a program's sums, its number within its block, whether it ends it.

    The slot of an earlier program of the block is smaller by ``2 * num_programs(0)`` for each.
    """
    program = programs + gl.program_id(1) * 8
    share = gl.load(program + 7)
    slot = (gl.load(program + 6) * gl.num_programs(0) + gl.program_id(0)) * 2 + WG
    return slot, share // 2, share % 2 == 1


@gluon.jit
def _offsets(slot, D: gl.constexpr, LAYOUT: gl.constexpr):
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    first = slot.to(gl.int64) * (64 * D + 128)
    return first + row[:, None] * D + channel[None, :], first + 64 * D


@gluon.jit
def leave_sums(sums, partial, slot, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Store sums [64, D] in LAYOUT; returns the offset of the row statistics."""
    offsets, statistics = _offsets(slot, D, LAYOUT)
    gl.store(partial + offsets, sums)
    return statistics


@gluon.jit
def set_flag(flags, slot, value):
    """1 announces that everything in this slot is stored; 0 leaves the flag as the next launch expects it."""
    gl.thread_barrier()
    gl.atomic_xchg(flags + slot, value)


@gluon.jit
def take_sums(partial, flags, slot, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Wait for the sums of a slot; returns them and the offset of the row statistics."""
    while gl.atomic_add(flags + slot, 0) == 0:
        pass
    offsets, statistics = _offsets(slot, D, LAYOUT)
    # Another program wrote them: only the L2 cache is the same for all.
    return gl.load(partial + offsets, cache_modifier=".cg"), statistics
