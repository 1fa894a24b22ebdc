"""The Triton kernels in the interpreter against the plain reference; on a GPU see ``test_gpu_tree_attention.py``.

The interpreter is slow, so tiles and inputs are small; tiles small against the input give every kind of block.
"""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import pytest

from conftest import seed_all
from dta_kernels.tree_attention.blocks import (
    BLOCK,
    LIST_BEGIN,
    LIST_END,
    LIST_MIDDLE,
    RUN_BEGIN,
    RUN_END,
    SHARE,
    TILE_BEGIN,
    BlockTable,
    block_matrix,
)
from tree_attention_cases import (
    AttentionShape,
    Case,
    check_accumulation,
    check_sibling_changes_no_bit,
    random_parents,
    random_segment,
    relative_errors,
    segment_of,
    tiny_config,
)
from triton_device import DEVICE, interpreter

pytest.importorskip("triton")
import dta_kernels.tree_attention.reference as reference
from dta_kernels.tree_attention.reference import tree_attention_backward, tree_attention_forward

FLOAT32 = 1e-6


def visible_pairs(key_end: np.ndarray, num_queries: int) -> np.ndarray:
    key, query = np.arange(len(key_end)), len(key_end) - num_queries + np.arange(num_queries)
    return (key <= query[:, None]) & (query[:, None] < key_end)


@pytest.mark.parametrize("seed", range(6))
def test_tables_name_every_live_block_once_and_full_ones_are_full(seed):
    generator = seed_all(seed)
    segment = random_segment(generator, int(generator.integers(1, 150)), turn=float(generator.choice([0.02, 0.1, 0.4])))
    block_q, block_k = (int(generator.choice([1, 2, 4, 8, 16])) for _ in range(2))
    num_queries, key_end = len(segment.query_index), segment.local_key_end()
    visible = visible_pairs(key_end, num_queries)
    matrix = block_matrix(key_end, num_queries, block_q, block_k)
    tables = matrix.tables()
    num_rows, num_columns = -(-num_queries // block_q), -(-len(key_end) // block_k)
    padded = np.zeros((num_rows * block_q, num_columns * block_k), dtype=bool)
    padded[: visible.shape[0], : visible.shape[1]] = visible
    by_block = padded.reshape(num_rows, block_q, num_columns, block_k).transpose(0, 2, 1, 3)
    live, full = by_block.any((2, 3)), by_block.all((2, 3))
    assert tables.num_tiles == live.sum()
    tile_of = {}
    for table, axis in ((tables.rows, 0), (tables.columns, 1)):
        work = []
        seen = np.zeros_like(live if axis == 0 else live.T)
        assert sorted(table.programs[:, BLOCK].tolist()) == list(range(seen.shape[0]))
        for program in table.programs:
            block = program[BLOCK]
            run = list(range(program[RUN_BEGIN], program[RUN_END]))
            others = table.blocks[program[LIST_BEGIN] : program[LIST_MIDDLE]].tolist()
            partial = table.blocks[program[LIST_MIDDLE] : program[LIST_END]].tolist()
            order = run + others + partial
            work.append(len(order))
            tiles = table.tiles[program[TILE_BEGIN] : program[TILE_BEGIN] + len(order)].tolist()
            assert len(set(order)) == len(order)
            for other, tile in zip(order, tiles, strict=True):
                pair = (block, other) if axis == 0 else (other, block)
                seen[block, other] = True
                assert full[pair] == (other not in partial)
                assert tile_of.setdefault(pair, tile) == tile
            if axis == 0:
                assert tiles == list(range(program[TILE_BEGIN], program[TILE_BEGIN] + len(order)))
        assert np.array_equal(seen, live if axis == 0 else live.T)
        assert work == sorted(work, reverse=True)
    assert sorted(tile_of.values()) == list(range(tables.num_tiles))


@pytest.mark.parametrize("seed", range(4))
def test_the_last_rows_are_shared_in_their_order(seed):
    generator = seed_all(seed + 400)
    segment = random_segment(generator, int(generator.integers(60, 300)), turn=float(generator.choice([0.01, 0.1])))
    matrix = block_matrix(segment.local_key_end(), len(segment.query_index), 4, 2)
    unshared, at_once = matrix.rows(), float(generator.uniform(1, 40))
    shared = matrix.rows(at_once)

    def blocks(table: BlockTable, program: np.ndarray) -> tuple[list[int], list[int]]:
        run = [*range(program[RUN_BEGIN], program[RUN_END])]
        full, partial = ((LIST_BEGIN, LIST_MIDDLE), (LIST_MIDDLE, LIST_END))
        full, partial = (table.blocks[program[begin] : program[end]].tolist() for begin, end in (full, partial))
        return run + full, partial

    by_row: dict[int, list[tuple[list[int], list[int]]]] = {}
    unfinished = 0
    for program in shared.programs:
        row = by_row.setdefault(program[BLOCK], [])
        assert program[SHARE] // 2 == len(row)
        assert program[TILE_BEGIN] == unfinished
        unfinished += program[SHARE] % 2 == 0
        row.append(blocks(shared, program))
    assert unfinished == shared.num_unfinished
    counts = []
    for program in unshared.programs:
        shares = by_row[program[BLOCK]]
        assert blocks(unshared, program) == tuple([*itertools.chain(*kind)] for kind in zip(*shares, strict=True))
        assert len(shares) == 1 or min(len(full) + len(partial) for full, partial in shares) >= 6
        counts.append(len(shares))
    # Only rows that would run beside too few others are shared, and so that all of them run at once.
    last = len(counts) % at_once if len(counts) > at_once else len(counts)
    assert max(counts[: len(counts) - int(np.ceil(last))], default=1) == 1
    assert max(counts) <= min(8, max(1, at_once / last))


@interpreter
@pytest.mark.parametrize("seed", range(8))
def test_random_forests_in_float32(seed):
    generator = seed_all(seed)
    segment = random_segment(
        generator, int(generator.integers(40, 110)), turn=float(generator.choice([0.03, 0.1, 0.4]))
    )
    groups, ratio = int(generator.integers(1, 3)), int(generator.choice([1, 2, 3, 4]))
    shape = AttentionShape(groups * ratio, groups, int(generator.choice([8, 16, 20])), torch.float32)
    config = tiny_config(
        rows=int(generator.choice([16, 32])),
        keys=int(generator.choice([16, 32])),
        tma=bool(generator.integers(0, 2)) and shape.head_size == 16,
        stored_scores_bytes=int(generator.choice([1, 6_000, 30_000, 1 << 20])),
        max_pack=int(generator.choice([1, 2, 8])),
        least_tiles=int(generator.choice([1, 2, 16])),
    )
    case = Case.random(segment, shape, DEVICE)
    errors = relative_errors(case.run(config), case.expected())
    assert max(errors) < FLOAT32, (segment.num_ancestors, len(segment.query_index), shape, config, errors)


@interpreter
@pytest.mark.parametrize(("head_size", "ratio"), [(64, 1), (96, 4), (128, 8), (256, 4)])
def test_head_sizes_and_group_sizes_with_the_tables_settings(head_size, ratio):
    generator = seed_all(10 * head_size + ratio)
    parent = random_parents(generator, 77, 0.1)
    case = Case.random(segment_of(parent, 40, 77), AttentionShape(ratio, 1, head_size, torch.float16), DEVICE)
    errors = relative_errors(case.run(), case.expected())
    assert errors[1] < 1e-6
    assert max(errors) < 2e-3, errors


@interpreter
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 4e-6)])
@pytest.mark.parametrize(("ancestors", "queries"), [(0, 1), (0, 33), (37, 1), (31, 18)])
def test_edges_of_the_sizes_and_dtypes(dtype, bound, ancestors, queries):
    seed_all(ancestors * 100 + queries)
    chain = np.arange(-1, ancestors + queries - 1)
    case = Case.random(segment_of(chain, ancestors, len(chain)), AttentionShape(4, 2, 16, dtype), DEVICE)
    actual = case.run(tiny_config())
    assert [tensor.dtype for tensor in actual] == [dtype, torch.float32, dtype, torch.float32, torch.float32]
    # A single visible key has probability 1 and no gradient of query and key: absolute there.
    for got, wanted in zip(actual, case.expected(), strict=True):
        assert float((got.double() - wanted).norm()) <= bound * max(1.0, float(wanted.norm()))


@interpreter
@pytest.mark.parametrize(
    ("stored_scores_bytes", "least_tiles"), [(9_000, 16), (1 << 20, 16), (1 << 20, 1), (16_000, 1)]
)
def test_gradients_are_added_in_place(stored_scores_bytes, least_tiles):
    generator = seed_all(21)
    parent = random_parents(generator, 90, 0.08)
    case = Case.random(segment_of(parent, 47, 86), AttentionShape(4, 2, 16, torch.bfloat16), DEVICE)
    assert case.segment.num_ancestors
    config = tiny_config(stored_scores_bytes=stored_scores_bytes, least_tiles=least_tiles)
    assert case.plan(config)[0].backward().has_shares == (least_tiles < 16)
    check_accumulation(case, config, generator)


@interpreter
@pytest.mark.parametrize("tma", [False, True])
def test_a_sibling_changes_no_bit_and_a_repeat_none_either(tma):
    generator = seed_all(31)
    shape, config = AttentionShape(4, 2, 16, torch.float32), tiny_config(tma=tma, least_tiles=2)
    check_sibling_changes_no_bit(generator, shape, (19, 13, 22, 17), config, DEVICE)
    case = Case.random(random_segment(generator, 80), shape, DEVICE)
    assert all(torch.equal(x, y) for x, y in zip(case.run(config), case.run(config), strict=True))


@interpreter
def test_inputs_that_do_not_fit_the_plan_are_refused():
    seed_all(41)
    chain = np.arange(-1, 9)
    case = Case.random(segment_of(chain, 3, 10), AttentionShape(2, 1, 16, torch.float32), DEVICE)
    case.k = case.k[:-1]
    with pytest.raises(ValueError, match="do not fit a plan"):
        case.run(tiny_config())
    with pytest.raises(ValueError, match="no Triton tree attention for head size 64"):
        AttentionShape(2, 1, 64, torch.float64)


def path_attention(q, k, v, parent, first_query, scale):
    """Query i is stream token first_query + i; keys are the stream's tokens 0 .. M - 1."""
    heads_per_group = q.shape[1] // k.shape[1]
    outputs = []
    for i in range(q.shape[0]):
        path, token = [], first_query + i
        while token >= 0:
            path.append(token)
            token = int(parent[token])
        keys = k[path].repeat_interleave(heads_per_group, dim=1)
        values = v[path].repeat_interleave(heads_per_group, dim=1)
        probabilities = torch.softmax(torch.einsum("hd,mhd->hm", q[i], keys) * scale, dim=-1)
        outputs.append(torch.einsum("hm,mhd->hd", probabilities, values))
    return torch.stack(outputs)


@pytest.mark.parametrize(("seed", "heads", "groups", "head_size"), [(0, 4, 2, 8), (1, 3, 1, 5), (3, 8, 2, 1)])
@pytest.mark.parametrize(("block_elements", "cpu_block"), [(1, 128), (700, 128), (1 << 24, 7)])
def test_forward_and_gradients_equal_attention_over_the_path(
    seed, heads, groups, head_size, block_elements, cpu_block, monkeypatch
):
    monkeypatch.setattr(reference, "SCORE_ELEMENTS", block_elements)
    monkeypatch.setattr(reference, "CPU_BLOCK", cpu_block)
    generator = seed_all(seed)
    size = int(generator.integers(20, 50))
    first_query = int(generator.integers(0, size - 1))
    parent = random_parents(generator, size, turn=0.4)
    end = segment_of(parent, 0, size).key_end
    q = torch.randn(size - first_query, heads, head_size, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(size, groups, head_size, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = path_attention(q, k, v, parent, first_query, 0.37)
    grad_out = torch.randn_like(expected)
    expected.backward(grad_out)

    index = torch.arange(size)
    arguments = (index[first_query:], index, torch.from_numpy(end), 0.37)
    with torch.no_grad():
        out, lse = tree_attention_forward(q, k, v, *arguments)
        dq, dk, dv = tree_attention_backward(grad_out, q, k, v, out, lse, *arguments)
    for actual, wanted in ((out, expected), (dq, q.grad), (dk, k.grad), (dv, v.grad)):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-13)
