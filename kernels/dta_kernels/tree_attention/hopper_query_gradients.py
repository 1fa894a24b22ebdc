"""Computes dQ = dS K from the stored tiles of dS on Hopper GPUs in Gluon; ``hopper_forward`` explains Gluon and its
tests.

One producer warp copies halves of blocks of keys, and of two tiles of dS for each, by TMA into six stages. Two groups
of four warps multiply one of the tiles each, those of two adjacent blocks of 64 rows, with the same keys: reading these
for each block of rows alone would take more time than the products. A block of keys that only one of the two sees has
tile -1 for the other; its copy lies outside of the matrix, where TMA fills in zeros. The last programs of a launch may
share a pair of blocks (``hopper_shares``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dta_kernels.tree_attention.hopper_shares import leave_sums, set_flag, slot_of, take_sums

_STAGES = gl.constexpr(6)


@gluon.jit
def _producer(ds_desc, k_desc, ds_smem, k_smem, full, empty, blocks, tiles, list_begin, count, first_row, tile_rows,
              column):  # fmt: skip
    for index in range(count):
        block = gl.load(blocks + list_begin + index)
        first = gl.load(tiles + (list_begin + index) * 2)
        second = gl.load(tiles + (list_begin + index) * 2 + 1)
        first = gl.where(first < 0, -128, first_row + first * tile_rows)
        second = gl.where(second < 0, -128, first_row + second * tile_rows)
        for half in gl.static_range(2):
            t = index * 2 + half
            stage = t % _STAGES
            mbarrier.wait(empty.index(stage), ((t // _STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, k_desc.block_type.nbytes + 2 * ds_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [block * 128 + half * 64, column], ready, k_smem.index(stage))
            tma.async_copy_global_to_shared(ds_desc, [first + half * 64, 0], ready, ds_smem.index(stage * 2))
            tma.async_copy_global_to_shared(ds_desc, [second + half * 64, 0], ready, ds_smem.index(stage * 2 + 1))


@gluon.jit
def _consumer(WG: gl.constexpr, ds_smem, k_smem, full, empty, dq_NHD, partial, flags, programs, steps, first_query,
              head, num_queries, scale, H: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    acc = gl.zeros([64, D], gl.float32, layout=SUMS)
    for t in range(steps):
        stage = t % _STAGES
        mbarrier.wait(full.index(stage), (t // _STAGES) & 1)
        token = warpgroup_mma(ds_smem.index(stage * 2 + WG).permute((1, 0)), k_smem.index(stage), acc, is_async=True)
        # One product stays under way while the buffers of the one before it are given back.
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[token])
        if t > 0:
            mbarrier.arrive(empty.index((t - 1) % _STAGES), count=1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    slot, number, is_last = slot_of(programs, WG)
    if is_last:
        for index in range(number):
            other = slot - (number - index) * 2 * gl.num_programs(0)
            other_acc, _ = take_sums(partial, flags, other, D, SUMS)
            acc += other_acc
            set_flag(flags, other, 0)
        row = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
        query = first_query + row // PACK
        channel = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
        offsets = (query.to(gl.int64) * (H * D) + (head + row % PACK) * D)[:, None] + channel[None, :]
        gl.store(dq_NHD + offsets, (acc * scale).to(dq_NHD.dtype.element_ty), mask=(query < num_queries)[:, None])
    else:
        leave_sums(acc, partial, slot, D, SUMS)
        set_flag(flags, slot, 1)


@gluon.jit(
    do_not_specialize=["num_queries", "first_chunk"],
    do_not_specialize_on_alignment=["flags", "programs", "blocks", "tiles"],
)
def query_gradients_kernel(
    ds_desc, k_desc, dq_NHD, partial, flags, programs, blocks, tiles, num_queries, first_chunk, scale,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """Grid (chunks of heads of this launch, pairs of blocks of 64 rows or shares of them), 4 warps (and 5 more).

    ``ds_desc`` is the matrix of 64 columns that ``hopper_backward`` writes; ``tiles`` holds two numbers for each of
    ``blocks``.
    """
    DTYPE: gl.constexpr = dq_NHD.dtype.element_ty
    head = (first_chunk + gl.program_id(0)) * PACK
    column = (head // (H // G)) * D
    program = programs + gl.program_id(1) * 8
    first_query = gl.load(program) * (128 // PACK)
    list_begin = gl.load(program + 3)
    count = gl.load(program + 5) - list_begin
    tile_rows = gl.num_programs(0) * 128
    first_row = gl.program_id(0) * 128
    ds_smem = gl.allocate_shared_memory(DTYPE, [_STAGES * 2, 64, 64], ds_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [_STAGES, 64, D], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_consumer, (0, ds_smem, k_smem, full, empty, dq_NHD, partial, flags, programs, count * 2, first_query,
                         head, num_queries, scale, H, D, PACK)),
            (_consumer, (1, ds_smem, k_smem, full, empty, dq_NHD, partial, flags, programs, count * 2, first_query,
                         head, num_queries, scale, H, D, PACK)),
            (_producer, (ds_desc, k_desc, ds_smem, k_smem, full, empty, blocks, tiles, list_begin, count, first_row,
                         tile_rows, column)),
        ],
        [4, 1],
        [200, 24],
    )  # fmt: skip
