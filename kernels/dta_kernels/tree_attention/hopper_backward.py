"""Computes dK, dV and the tiles of dS on Hopper GPUs in Gluon; ``hopper_forward`` explains Gluon and its tests.

One producer warp copies tiles of 64 rows of Q and dO (in the order of tiles, as ``prepare_kernel`` writes them), with
their log-sum-exp and delta, by TMA into two stages. Two groups of four warps each own 64 keys of a block of 128, with
dK and dV in registers; each group runs its products while the other computes exponentials. dS is written through shared
memory and TMA, too: the addresses of ordinary stores, and statistics held longer than needed, would not fit into the
registers along with the sums.

The tables and the contract are those of ``key_gradients_kernel`` with TMA; head sizes 64 and 128, 16-bit
inputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dta_kernels.tree_attention.hopper_forward import _block_of


@gluon.jit
def _producer(q_desc, do_desc, lse_desc, delta_desc, q_smem, do_smem, lse_smem, delta_smem, q_full, do_full, empty,
              blocks, run_begin, run_length, list_begin, count, chunks, first_chunk, num_queries, PACK: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    for chunk in range(chunks):
        for index in range(count):
            t = chunk * count + index
            block = _block_of(index, run_begin, run_length, list_begin, blocks)
            row = ((first_chunk + chunk) * num_queries + block * (64 // PACK)) * PACK
            statistic = (first_chunk + chunk) * ((num_queries * PACK + 3) // 4 * 4) + block * 64
            stage = t % STAGES
            mbarrier.wait(empty.index(stage), ((t // STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [row, 0], q_full.index(stage), q_smem.index(stage))
            tma.async_copy_global_to_shared(lse_desc, [statistic], q_full.index(stage), lse_smem.index(stage))
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(do_desc, [row, 0], do_full.index(stage), do_smem.index(stage))
            tma.async_copy_global_to_shared(delta_desc, [statistic], do_full.index(stage), delta_smem.index(stage))


@gluon.jit
def _consumer(WG: gl.constexpr, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, q_full, do_full,
              empty, dscores_desc, dk_out, dv_out, grad_keys, grad_values, slots, key_end, turns, programs, blocks,
              tiles, run_begin, run_length, list_begin, full_count, count, first_tile, tile_rows, first_row, first_key,
              group, num_queries, num_keys, num_ancestors, num_added, scale, CHUNKS: gl.constexpr, G: gl.constexpr,
              D: gl.constexpr, PACK: gl.constexpr, ACCUMULATE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(0, SCORES)
    KEYS: gl.constexpr = gl.SliceLayout(1, SCORES)
    k, v, staged = k_smem.index(WG), v_smem.index(WG), ds_smem.index(WG)
    zero = gl.zeros([64, 64], gl.float32, layout=SCORES)
    dk, dv = gl.zeros([64, D], gl.float32, layout=SUMS), gl.zeros([64, D], gl.float32, layout=SUMS)
    for chunk in range(CHUNKS):
        for index in range(count):
            t = chunk * count + index
            stage, phase = t % STAGES, (t // STAGES) & 1
            tile = gl.load(tiles + first_tile + index)
            q, do = q_smem.index(stage), do_smem.index(stage)
            mbarrier.wait(q_full.index(stage), phase)
            s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(stage), phase)
            p_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            lse = lse_smem.index(stage).load(ROWS)
            scores = warpgroup_mma_wait(num_outstanding=1, deps=[s_token])
            probability = gl.exp2(scores * (scale * 1.4426950408889634) - lse[None, :])
            if index >= full_count:
                key = first_key + WG * 64 + gl.arange(0, 64, layout=KEYS)
                end = gl.load(key_end + key, mask=key < num_keys, other=0)
                row = gl.arange(0, 64, layout=ROWS)
                first_query = _block_of(index, run_begin, run_length, list_begin, blocks) * (64 // PACK)
                position = num_ancestors + first_query + row // PACK
                # Rows past the last query belong to another head or are zeros; they must not contribute.
                exists = row < (num_queries - first_query) * PACK
                visible = (key[:, None] <= position[None, :]) & (position[None, :] < end[:, None]) & exists[None, :]
                probability = gl.where(visible, probability, 0.0)
            p16 = gl.convert_layout(probability.to(q.dtype), LEFT)
            v_token = warpgroup_mma(p16, do, dv, is_async=True)
            dprobability = warpgroup_mma_wait(num_outstanding=1, deps=[p_token])
            delta = delta_smem.index(stage).load(ROWS)
            dscore = (probability * (dprobability - delta[None, :])).to(q.dtype)
            ds16 = gl.convert_layout(dscore, LEFT)
            k_token = warpgroup_mma(ds16, q, dk, is_async=True)
            # dS is written by TMA from shared memory; wait until the previous tile's copy has left it.
            tma.store_wait(0)
            gl.thread_barrier()
            staged.store(dscore)
            fence_async_shared()
            gl.thread_barrier()
            row_out = first_row + tile * tile_rows + chunk * 128 + WG * 64
            tma.async_copy_shared_to_global(dscores_desc, [row_out, 0], staged)
            dv, dk, p16, ds16 = warpgroup_mma_wait(num_outstanding=0, deps=[v_token, k_token, p16, ds16])
            mbarrier.arrive(empty.index(stage), count=1)
    tma.store_wait(0)
    dk = dk * scale
    key_o = first_key + WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
    channel = group * D + gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
    inside = (key_o < num_keys)[:, None]
    if ACCUMULATE:
        share = gl.load(programs + gl.program_id(1) * 8 + 7)
        is_last = share % 2
        own_turn = turns + (first_key // 128 * G + group) * 2 + WG
        if share > 1:
            while gl.atomic_add(own_turn, 0) < share // 2:
                pass
        slot_offsets = gl.load(slots + key_o, mask=key_o < num_keys, other=0)[:, None] * (G * D) + channel[None, :]
        # Another program may have written them: only the L2 cache is the same for all.
        dk += gl.load(grad_keys + slot_offsets, mask=inside, other=0.0, cache_modifier=".cg")
        dv += gl.load(grad_values + slot_offsets, mask=inside, other=0.0, cache_modifier=".cg")
        added = inside & (key_o < num_keys - is_last * (num_keys - num_added))[:, None]
        gl.store(grad_keys + slot_offsets, dk, mask=added)
        gl.store(grad_values + slot_offsets, dv, mask=added)
        if share != 1:
            gl.thread_barrier()
            gl.atomic_xchg(own_turn, (share // 2 + 1) * (1 - is_last))
        inside, key_o = inside & (key_o >= num_added)[:, None] & (is_last == 1), key_o - num_added
    if dk_out is not None:
        offsets = key_o.to(gl.int64)[:, None] * (G * D) + channel[None, :]
        gl.store(dk_out + offsets, dk.to(dk_out.dtype.element_ty), mask=inside)
        gl.store(dv_out + offsets, dv.to(dv_out.dtype.element_ty), mask=inside)


@gluon.jit
def _copy_keys(source, smem, first_key, column, num_keys, STRIDE: gl.constexpr, D: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    for half in gl.static_range(2):
        key = first_key + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        channel = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
        offsets = key.to(gl.int64)[:, None] * STRIDE + column + channel[None, :]
        smem.index(half).store(gl.load(source + offsets, mask=(key < num_keys)[:, None], other=0.0))


@gluon.jit(
    do_not_specialize=["num_queries", "num_keys", "num_ancestors", "num_added", "first_group"],
    do_not_specialize_on_alignment=["key_end", "turns", "programs", "blocks", "tiles", "slots"],
)
def key_gradients_kernel(
    do_desc, q_desc, lse_desc, delta_desc, dscores_desc, k_MGD, v_MGD, dk, dv, grad_keys, grad_values, slots, key_end,
    turns, programs, blocks, tiles, num_queries, num_keys, num_ancestors, num_added, first_group, scale,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """Grid (groups of this launch, blocks of 128 keys or shares of them), 4 warps (and 5 more)."""
    CHUNKS: gl.constexpr = H // G // PACK
    STAGES: gl.constexpr = 2
    DTYPE: gl.constexpr = k_MGD.dtype.element_ty
    group = first_group + gl.program_id(0)
    program = programs + gl.program_id(1) * 8
    first_key = gl.load(program) * 128
    run_begin = gl.load(program + 1)
    run_length = gl.load(program + 2) - run_begin
    list_begin = gl.load(program + 3)
    full_count = run_length + gl.load(program + 4) - list_begin
    count = run_length + gl.load(program + 5) - list_begin
    first_tile = gl.load(program + 6)
    keys_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], DTYPE)
    k_smem = gl.allocate_shared_memory(DTYPE, [2, 64, D], keys_layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [2, 64, D], keys_layout)
    _copy_keys(k_MGD, k_smem, first_key, group * D, num_keys, G * D, D)
    _copy_keys(v_MGD, v_smem, first_key, group * D, num_keys, G * D, D)
    fence_async_shared()
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 64, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 64, D], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 64], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 64], delta_desc.layout)
    ds_smem = gl.allocate_shared_memory(DTYPE, [2, 64, 64], dscores_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.thread_barrier()
    first_chunk = group * CHUNKS
    # The tiles as a matrix of 64 columns: 128 rows for each block, chunk and group.
    tile_rows = gl.num_programs(0) * (CHUNKS * 128)
    first_row = gl.program_id(0) * (CHUNKS * 128)
    gl.warp_specialize(
        [
            (_consumer, (0, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, q_full, do_full, empty,
                         dscores_desc, dk, dv, grad_keys, grad_values, slots, key_end, turns, programs, blocks, tiles,
                         run_begin, run_length, list_begin, full_count, count, first_tile, tile_rows, first_row,
                         first_key, group, num_queries, num_keys, num_ancestors, num_added, scale, CHUNKS, G, D, PACK,
                         ACCUMULATE, STAGES)),
            (_consumer, (1, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, q_full, do_full, empty,
                         dscores_desc, dk, dv, grad_keys, grad_values, slots, key_end, turns, programs, blocks, tiles,
                         run_begin, run_length, list_begin, full_count, count, first_tile, tile_rows, first_row,
                         first_key, group, num_queries, num_keys, num_ancestors, num_added, scale, CHUNKS, G, D, PACK,
                         ACCUMULATE, STAGES)),
            (_producer, (q_desc, do_desc, lse_desc, delta_desc, q_smem, do_smem, lse_smem, delta_smem, q_full, do_full,
                         empty, blocks, run_begin, run_length, list_begin, count, CHUNKS, first_chunk, num_queries,
                         PACK, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
