"""What surrounds FlashAttention 4 on a CPU: block lists, mask and gradients of keys, with a stand-in for the library.

On a GPU see ``test_gpu_flash_attention.py``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.tree_attention.flash.key_gradients import add_key_gradients, empty_sums
from dta_kernels.tree_attention.flash.plan import BLOCK, BlockLists, block_lists, plan_flash_attention
from dta_kernels.tree_attention.plan import AttentionShape
from flash_standin import install, register_order
from tree_attention_cases import (
    FlashCase,
    Segment,
    check_accumulation,
    random_segment,
    segment_of,
)
from triton_device import DEVICE, interpreter

CPU = torch.device("cpu")


def visible_pairs(segment: Segment) -> np.ndarray:
    ends, queries = segment.local_key_end(), len(segment.query_index)
    key, query = np.arange(len(ends)), len(ends) - queries + np.arange(queries)
    return (key <= query[:, None]) & (query[:, None] < ends)


def matrix_of(lists: BlockLists, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The partial and the full blocks of the lists as matrices."""
    found = []
    for count, entries in ((lists.partial_count, lists.partial), (lists.full_count, lists.full)):
        assert count.dtype == entries.dtype == torch.int32
        assert count.is_contiguous()
        assert entries.is_contiguous()
        assert entries.data_ptr() % 16 == 0
        matrix = np.zeros((count.shape[2], columns), dtype=bool)
        for row, number in enumerate(count[0, 0].tolist()):
            named = entries[0, 0, row, :number].tolist()
            assert named == sorted(set(named))
            matrix[row, named] = True
        found.append(matrix)
    return found[0], found[1]


@pytest.mark.parametrize("seed", range(12))
def test_lists_name_every_live_block_once_and_full_ones_are_full(seed):
    generator = seed_all(seed)
    size = int(generator.choice([1, 127, 128, 129, 500, 900, 1500]))
    segment = random_segment(generator, size, turn=float(generator.choice([0.002, 0.02, 0.1])))
    visible = visible_pairs(segment)
    queries, keys = visible.shape
    plan = plan_flash_attention(segment.local_key_end(), queries, AttentionShape(4, 2, 64, torch.bfloat16), CPU)
    assert (plan.num_queries, plan.num_keys, plan.num_ancestors) == (queries, keys, keys - queries)
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    padded = np.zeros((rows * BLOCK, columns * BLOCK), dtype=bool)
    padded[:queries, :keys] = visible
    by_block = padded.reshape(rows, BLOCK, columns, BLOCK).transpose(0, 2, 1, 3)
    live, whole = by_block.any((2, 3)), by_block.all((2, 3))
    for lists, transposed in ((plan.forward, False), (plan.backward, True)):
        partial, full = (x.T if transposed else x for x in matrix_of(lists, rows if transposed else columns))
        assert not (partial & full).any()
        assert ((partial | full) == live).all()
        assert (full == whole).all()
    # The library checks the end of the keys only in the last block of each list of its forward.
    if keys % BLOCK:
        assert not full[:, -1].any()


def test_lists_of_no_blocks_and_of_all():
    counts, columns = block_lists(np.zeros((3, 4), dtype=bool))
    assert counts.tolist() == [0, 0, 0]
    assert columns.shape == (3, 1)
    counts, columns = block_lists(np.array([[1, 1, 1], [0, 0, 1]], dtype=bool))
    assert counts.tolist() == [3, 1]
    assert columns.tolist() == [[0, 1, 2], [2, 0, 0]]


@interpreter
@pytest.mark.parametrize("head_size", [16, 64, 96, 128])
def test_sums_are_read_in_the_order_of_registers(head_size):
    generator, num_keys, own, num_groups = seed_all(head_size), 301, 170, 2
    dk, dv = (torch.randn(num_groups, 384, head_size) for _ in range(2))
    place = torch.from_numpy(register_order(head_size)).flatten()
    sums = tuple(empty_sums(num_keys, num_groups, head_size, CPU) for _ in range(2))
    for total, x in zip(sums, (dk, dv), strict=True):
        for block in range(3):
            room = total[0].unflatten(1, (3, -1))[:, block]
            room[:, place] = x[:, block * BLOCK : (block + 1) * BLOCK].flatten(1)
    expected = tuple(x.transpose(0, 1)[:num_keys] for x in (dk * 0.3, dv))
    out = tuple(torch.empty(num_keys, num_groups, head_size) for _ in range(2))
    add_key_gradients(sums, 0.3, out, num_keys)
    for found, wanted in zip(out, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    slots = torch.from_numpy(generator.permutation(num_keys + 20)[:num_keys])
    accumulators = tuple(torch.randn(num_keys + 20, num_groups, head_size) for _ in range(2))
    before = tuple(x.clone() for x in accumulators)
    out = tuple(torch.empty(own, num_groups, head_size, dtype=torch.bfloat16) for _ in range(2))
    add_key_gradients(sums, 0.3, out, num_keys, accumulators, slots)
    for found, old, new, wanted in zip(out, before, accumulators, expected, strict=True):
        total = old[slots] + wanted
        torch.testing.assert_close(new[slots[:-own]], total[:-own], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.float(), total[-own:], rtol=2**-7, atol=1e-6)
        others = torch.ones(num_keys + 20, dtype=torch.bool)
        others[slots[:-own]] = False
        assert torch.equal(new[others], old[others])


@interpreter
@pytest.mark.parametrize("ratio", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 128, 200, 450])
def test_random_forests_on_a_stand_in(ratio, size, monkeypatch):
    install(monkeypatch)
    generator = seed_all(10 * size + ratio)
    segment = random_segment(generator, size, turn=float(generator.choice([0.01, 0.05, 0.2])))
    case = FlashCase.random(segment, AttentionShape(ratio * (1 + ratio % 2), 1 + ratio % 2, 16, torch.float32), DEVICE)
    for found, wanted in zip(case.run(), case.expected(), strict=True):
        assert float((found - wanted).norm()) < 1e-6 * max(1.0, float(wanted.norm()))


@interpreter
def test_gradients_are_added_at_their_slots_on_a_stand_in(monkeypatch):
    install(monkeypatch)
    generator = seed_all(5)
    parent = np.arange(-1, 420)
    parent[300] = 250
    for dtype in (torch.float32, torch.bfloat16):
        for begin in (0, 140):
            shape = AttentionShape(4, 2, 16, dtype)
            check_accumulation(FlashCase.random(segment_of(parent, begin, 421), shape, DEVICE), None, generator)


@interpreter
def test_inputs_must_fit_the_plan_here_too(monkeypatch):
    install(monkeypatch)
    case = FlashCase.random(segment_of(np.arange(-1, 9), 3, 10), AttentionShape(4, 2, 16, torch.float32), DEVICE)
    case.k = case.k[1:]
    with pytest.raises(ValueError, match="do not fit a plan"):
        case.run()
