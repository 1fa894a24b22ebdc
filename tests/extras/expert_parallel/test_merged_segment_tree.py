"""The merged segment tree of random forests holds every rank's tree, respects the budget and is small."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.planning.segments.plan import Op, depth_first_schedule
from megatron_dta.core.planning.segments.slots import allocate_slots
from megatron_dta.extras.expert_parallel.planning.merged_segment_tree import (
    MergedSegmentTree,
    SegmentForest,
    build_merged_segment_tree,
)
from merged_segment_tree_cases import path_of, peak_of, random_forest


def check_embedding(forests: list[SegmentForest], tree: MergedSegmentTree, memory_tokens: int) -> None:
    parents = tree.segment_parent.tolist()
    path: list[int] = []
    for node, parent in enumerate(parents):  # preorder: the parent is on the path of the node before
        while path and path[-1] != parent:
            path.pop()
        assert (path[-1] if path else -1) == parent
        path.append(node)
    budget = max([memory_tokens, *map(peak_of, forests)])
    for forest, segment_of in zip(forests, tree.segment_of, strict=True):
        nodes = np.flatnonzero(segment_of >= 0)
        assert sorted(segment_of[nodes].tolist()) == list(range(len(forest.segment_parent)))
        node_of = {int(segment_of[node]): int(node) for node in nodes}
        for segment, parent in enumerate(forest.segment_parent):
            assert parent < 0 or node_of[parent] in path_of(parents, node_of[segment])
        for node in range(tree.num_segments):
            on_path = [segment_of[above] for above in path_of(parents, node) if segment_of[above] >= 0]
            assert sum(forest.lengths[segment] for segment in on_path) <= budget
    assert (tree.segment_of >= 0).any(axis=0).all()
    for node in range(tree.num_segments):
        present = [(f, s[node]) for f, s in zip(forests, tree.segment_of, strict=True) if s[node] >= 0]
        assert tree.lengths[node] == max(f.lengths[s] for f, s in present)
    longest = [sum(int(tree.lengths[above]) for above in path_of(parents, node)) for node in range(len(parents))]
    assert tree.peak_in_flight_tokens == max(longest, default=0)


@pytest.mark.parametrize("seed", range(20))
def test_every_tree_is_embedded(seed: int) -> None:
    generator = seed_all(seed)
    forests = [random_forest(generator, int(generator.integers(0, 25))) for _ in range(generator.integers(1, 5))]
    memory_tokens = int(generator.integers(0, 1500))
    tree = build_merged_segment_tree(forests, memory_tokens)
    check_embedding(forests, tree, memory_tokens)
    sizes = [len(forest.segment_parent) for forest in forests]
    assert max(sizes) <= tree.num_segments <= sum(sizes)
    again = build_merged_segment_tree(forests, memory_tokens)
    assert np.array_equal(again.segment_of, tree.segment_of)
    assert np.array_equal(again.segment_parent, tree.segment_parent)


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_runs_its_own_tree_in_a_right_order(seed: int) -> None:
    generator = seed_all(100 + seed)
    forests = [random_forest(generator, int(generator.integers(0, 30))) for _ in range(3)]
    tree = build_merged_segment_tree(forests, 600)
    ops = depth_first_schedule(tree)
    for forest, segment_of in zip(forests, tree.segment_of, strict=True):
        rank_ops = [Op(op.kind, int(segment_of[op.segment])) for op in ops if segment_of[op.segment] >= 0]
        alone = MergedSegmentTree(
            np.asarray(forest.segment_parent, dtype=np.int32),
            np.arange(len(forest.lengths), dtype=np.int32)[None],
            np.asarray(forest.lengths, dtype=np.int64),
        )
        _, num_slots = allocate_slots(alone, rank_ops)  # refuses a wrong order
        assert len(rank_ops) == 2 * len(forest.lengths)
        assert num_slots >= peak_of(forest)


def test_equal_trees_cost_nothing_more() -> None:
    forest = random_forest(seed_all(200), 40)
    tree = build_merged_segment_tree([forest] * 4)
    assert tree.num_segments == 40
    assert tree.lengths.sum() == sum(forest.lengths)


def test_idle_ranks_and_no_ranks_with_segments() -> None:
    forest, none = random_forest(seed_all(1), 9), SegmentForest([], [])
    assert build_merged_segment_tree([none, forest, none]).num_segments == 9
    assert build_merged_segment_tree([none, none]).num_segments == 0


def test_memory_makes_trees_of_other_shapes_fit() -> None:
    """A chain and a star: one path in flight lets them share a node only; with more, the star runs inside the chain."""
    chain, star = SegmentForest(list(range(-1, 5)), [10] * 6), SegmentForest([-1] * 20, [10] * 20)
    assert build_merged_segment_tree([chain, star]).num_segments == 20
    fork = SegmentForest([-1] + [0] * 7, [10] * 8)
    sizes = [
        build_merged_segment_tree([fork, SegmentForest([-1, 0] * 4 + [], [10] * 8)], m).num_segments for m in (0, 80)
    ]
    assert sizes[1] <= sizes[0] <= 12
