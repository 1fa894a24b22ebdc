"""Computes the forward pass of tree attention on Hopper GPUs in Gluon, Triton's dialect with explicit layouts.

One producer warp copies blocks of keys and values by TMA into two stages. Two groups of four warps each own 64 rows of
the query tile. A group issues the scores of the next block before it multiplies the previous block's probabilities with
its values, and computes the exponentials while both run. Triton's own pipeliner leaves this time idle.

The tables and the contract are those of ``forward``: 128 rows a tile, head sizes 64 and 128, 16-bit inputs. The last
programs of a launch may share a block of queries (``hopper_shares``).
Triton's interpreter does not run Gluon, so ``tests/gpu/test_gpu_tree_attention.py`` is the only test of this kernel.
Gluon is experimental: the table of settings selects these kernels only with the tested versions of Triton.
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

from dta_kernels.tree_attention.hopper_shares import leave_sums, set_flag, slot_of, take_sums


@gluon.jit
def _block_of(t, run_begin, run_length, list_begin, blocks):
    block = run_begin + t
    if t >= run_length:
        block = gl.load(blocks + list_begin + t - run_length)
    return block


@gluon.jit
def _producer(k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, blocks, run_begin, run_length,
              list_begin, count, column, BLOCK_K: gl.constexpr):  # fmt: skip
    for t in range(count):
        block = _block_of(t, run_begin, run_length, list_begin, blocks)
        stage = t % 2
        phase = ((t // 2) & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [block * BLOCK_K, column], k_full.index(stage), k_smem.index(stage))
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [block * BLOCK_K, column], v_full.index(stage), v_smem.index(stage))


@gluon.jit
def _masked(scores, t, full_count, block, key_end, num_keys, position, BLOCK_K: gl.constexpr, SCORES: gl.constexpr):
    if t >= full_count:
        key = block * BLOCK_K + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, SCORES))
        end = gl.load(key_end + key, mask=key < num_keys, other=0)
        visible = (key[None, :] <= position[:, None]) & (position[:, None] < end[None, :])
        scores = gl.where(visible, scores, float("-inf"))
    return scores


@gluon.jit
def _finish(acc, largest, total, programs, partial, flags, out, lse_HN, first_query, head, num_queries,
            WG: gl.constexpr, H: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr, SCORES: gl.constexpr,
            OUT: gl.constexpr):  # fmt: skip
    """Write the output of a block, with what its other programs have left, or leave the sums for the last of them."""
    RS: gl.constexpr = gl.SliceLayout(1, SCORES)
    RO: gl.constexpr = gl.SliceLayout(1, OUT)
    slot, number, is_last = slot_of(programs, WG)
    row_s = gl.arange(0, 64, layout=RS)
    if is_last:
        for index in range(number):
            other = slot - (number - index) * 2 * gl.num_programs(0)
            other_acc, statistics = take_sums(partial, flags, other, D, OUT)
            other_largest = gl.load(partial + statistics + row_s, cache_modifier=".cg")
            other_total = gl.load(partial + statistics + 64 + row_s, cache_modifier=".cg")
            new_largest = gl.maximum(largest, other_largest)
            shift = gl.where(new_largest == float("-inf"), 0.0, new_largest)
            decay, other_decay = gl.exp2(largest - shift), gl.exp2(other_largest - shift)
            total = total * decay + other_total * other_decay
            acc = acc * gl.convert_layout(decay, RO)[:, None]
            acc += other_acc * gl.convert_layout(other_decay, RO)[:, None]
            largest = new_largest
            set_flag(flags, other, 0)
        sees = total > 0
        safe = gl.where(sees, total, 1.0)
        acc = acc / gl.convert_layout(safe, RO)[:, None]
        lse = gl.where(sees, (largest + gl.log2(safe)) * 0.6931471805599453, float("-inf"))
        row = WG * 64 + row_s
        query = first_query + row // PACK
        gl.store(lse_HN + (head + row % PACK).to(gl.int64) * num_queries + query, lse, mask=query < num_queries)
        row_o = WG * 64 + gl.arange(0, 64, layout=RO)
        channel = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
        query_o = first_query + row_o // PACK
        offsets = (query_o.to(gl.int64) * (H * D) + (head + row_o % PACK) * D)[:, None] + channel[None, :]
        gl.store(out + offsets, acc.to(out.dtype.element_ty), mask=(query_o < num_queries)[:, None])
    else:
        statistics = leave_sums(acc, partial, slot, D, OUT)
        gl.store(partial + statistics + row_s, largest)
        gl.store(partial + statistics + 64 + row_s, total)
        set_flag(flags, slot, 1)


@gluon.jit
def _consumer(WG: gl.constexpr, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, programs, blocks, key_end,
              out, lse_HN, partial, flags, run_begin, run_length, list_begin, full_count, count, first_query, head,
              num_queries, num_keys, num_ancestors, scale_2, H: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr,
              BLOCK_K: gl.constexpr):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    RS: gl.constexpr = gl.SliceLayout(1, SCORES)
    RO: gl.constexpr = gl.SliceLayout(1, OUT)
    row = WG * 64 + gl.arange(0, 64, layout=RS)
    position = num_ancestors + first_query + row // PACK
    q = q_smem.index(WG)
    acc = gl.zeros([64, D], gl.float32, layout=OUT)
    zero = gl.zeros([64, BLOCK_K], gl.float32, layout=SCORES)
    mbarrier.wait(k_full.index(0), 0)
    token = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=[token])
    mbarrier.arrive(k_empty.index(0), count=1)
    block = _block_of(0, run_begin, run_length, list_begin, blocks)
    scores = _masked(scores, 0, full_count, block, key_end, num_keys, position, BLOCK_K, SCORES)
    largest = gl.max(scores, 1) * scale_2
    shift = gl.where(largest == float("-inf"), 0.0, largest)
    p = gl.exp2(scores * scale_2 - shift[:, None])
    total = gl.sum(p, 1)
    p16 = gl.convert_layout(p.to(q.dtype), P)
    for t in range(1, count):
        stage = t % 2
        last = (t - 1) % 2
        mbarrier.wait(k_full.index(stage), (t // 2) & 1)
        s_token = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(last), ((t - 1) // 2) & 1)
        o_token = warpgroup_mma(p16, v_smem.index(last), acc, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=[s_token])
        mbarrier.arrive(k_empty.index(stage), count=1)
        block = _block_of(t, run_begin, run_length, list_begin, blocks)
        scores = _masked(scores, t, full_count, block, key_end, num_keys, position, BLOCK_K, SCORES)
        new_largest = gl.maximum(largest, gl.max(scores, 1) * scale_2)
        shift = gl.where(new_largest == float("-inf"), 0.0, new_largest)
        p = gl.exp2(scores * scale_2 - shift[:, None])
        decay = gl.exp2(largest - shift)
        total = total * decay + gl.sum(p, 1)
        largest = new_largest
        acc, p16 = warpgroup_mma_wait(num_outstanding=0, deps=[o_token, p16])
        mbarrier.arrive(v_empty.index(last), count=1)
        acc = acc * gl.convert_layout(decay, RO)[:, None]
        p16 = gl.convert_layout(p.to(q.dtype), P)
    last = (count - 1) % 2
    mbarrier.wait(v_full.index(last), ((count - 1) // 2) & 1)
    acc = warpgroup_mma(p16, v_smem.index(last), acc, is_async=False)
    _finish(acc, largest, total, programs, partial, flags, out, lse_HN, first_query, head, num_queries, WG, H, D, PACK,
            SCORES, OUT)  # fmt: skip


@gluon.jit(
    do_not_specialize=["num_queries", "num_keys", "num_ancestors"],
    do_not_specialize_on_alignment=["key_end", "flags", "programs", "blocks"],
)
def forward_kernel(
    q_NHD, k_desc, v_desc, out_NHD, lse_HN, partial, flags, key_end, programs, blocks, num_queries, num_keys,
    num_ancestors, scale, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Grid (H / PACK, blocks of 128 / PACK queries or shares of them), 4 warps (and 5 more)."""
    DTYPE: gl.constexpr = q_NHD.dtype.element_ty
    head = gl.program_id(0) * PACK
    program = programs + gl.program_id(1) * 8
    first_query = gl.load(program) * (128 // PACK)
    run_begin = gl.load(program + 1)
    run_length = gl.load(program + 2) - run_begin
    list_begin = gl.load(program + 3)
    full_count = run_length + gl.load(program + 4) - list_begin
    count = run_length + gl.load(program + 5) - list_begin
    column = (head // (H // G)) * D
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], DTYPE)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 64, D], q_layout)
    B: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    for half in gl.static_range(2):
        row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, B))
        query = first_query + row // PACK
        offsets = (query.to(gl.int64) * (H * D) + (head + row % PACK) * D)[:, None] + gl.arange(
            0, D, layout=gl.SliceLayout(0, B)
        )[None, :]
        q_smem.index(half).store(gl.load(q_NHD + offsets, mask=(query < num_queries)[:, None], other=0.0))
    fence_async_shared()
    k_smem = gl.allocate_shared_memory(DTYPE, [2, BLOCK_K, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [2, BLOCK_K, D], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    gl.thread_barrier()
    scale_2 = scale * 1.4426950408889634
    gl.warp_specialize(
        [
            (_consumer, (0, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, programs, blocks, key_end,
                         out_NHD, lse_HN, partial, flags, run_begin, run_length, list_begin, full_count, count,
                         first_query, head, num_queries, num_keys, num_ancestors, scale_2, H, D, PACK, BLOCK_K)),
            (_consumer, (1, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, programs, blocks, key_end,
                         out_NHD, lse_HN, partial, flags, run_begin, run_length, list_begin, full_count, count,
                         first_query, head, num_queries, num_keys, num_ancestors, scale_2, H, D, PACK, BLOCK_K)),
            (_producer, (k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, blocks, run_begin,
                         run_length, list_begin, count, column, BLOCK_K)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
