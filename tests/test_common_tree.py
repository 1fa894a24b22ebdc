"""The common tree on random forests: every rank's tree is in it, nothing is in flight longer, and it is small."""

from __future__ import annotations

import time

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.planning.common_tree import CommonTree, SegmentForest, build_common_tree
from megatron_dta.planning.schedule import OpKind, depth_first_schedule


def random_forest(generator: np.random.Generator, count: int) -> SegmentForest:
    """Preorder parents: a new segment hangs off any segment of the last one's path, or is a root."""
    deep = generator.random()
    parents, path = [], []
    for segment in range(count):
        keep = len(path) if generator.random() < deep else generator.integers(0, len(path) + 1)
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return SegmentForest(
        parents, generator.integers(1, 99, size=count).tolist(), (generator.random(count) < 0.3).tolist()
    )


def is_ancestor(parents: list[int], above: int, below: int) -> bool:
    while below >= 0 and below != above:
        below = parents[below]
    return below == above


def check_embedding(forests: list[SegmentForest], tree: CommonTree) -> None:
    parents = tree.segment_parent.tolist()
    assert all(parent < node for node, parent in enumerate(parents))
    path: list[int] = []
    for node, parent in enumerate(parents):  # preorder: the parent is on the path of the node before
        while path and path[-1] != parent:
            path.pop()
        assert (path[-1] if path else -1) == parent
        path.append(node)
    for forest, segment_of in zip(forests, tree.segment_of, strict=True):
        nodes = np.flatnonzero(segment_of >= 0)
        assert segment_of[nodes].tolist() == list(range(len(forest.segment_parent)))
        for a, above in enumerate(nodes.tolist()):
            for b, below in enumerate(nodes.tolist()):
                assert is_ancestor(parents, above, below) == is_ancestor(list(forest.segment_parent), a, b)
    assert (tree.segment_of >= 0).any(axis=0).all()
    for node in range(tree.num_segments):
        present = [(f, s[node]) for f, s in zip(forests, tree.segment_of, strict=True) if s[node] >= 0]
        assert tree.recompute[node] == any(f.recompute[s] for f, s in present)
        assert tree.lengths[node] == max(f.lengths[s] for f, s in present)


@pytest.mark.parametrize("seed", range(60))
def test_every_tree_is_embedded(seed: int) -> None:
    generator = seed_all(seed)
    forests = [random_forest(generator, int(generator.integers(0, 25))) for _ in range(generator.integers(1, 5))]
    tree = build_common_tree(forests)
    check_embedding(forests, tree)
    sizes = [len(forest.segment_parent) for forest in forests]
    assert max(sizes) <= tree.num_segments <= sum(sizes)


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_runs_its_own_depth_first_schedule(seed: int) -> None:
    generator = seed_all(100 + seed)
    forests = [random_forest(generator, int(generator.integers(0, 30))) for _ in range(3)]
    tree = build_common_tree(forests)
    ops = depth_first_schedule(tree)
    for forest, segment_of in zip(forests, tree.segment_of, strict=True):
        own = [(op.kind, segment_of[op.segment]) for op in ops if segment_of[op.segment] >= 0]
        alone = build_common_tree([forest])
        assert own == [(op.kind, op.segment) for op in depth_first_schedule(alone)]
        assert sum(kind is OpKind.BACKWARD for kind, _ in own) == len(forest.segment_parent)


@pytest.mark.parametrize("seed", range(10))
def test_equal_trees_cost_nothing_more(seed: int) -> None:
    forest = random_forest(seed_all(200 + seed), 40)
    tree = build_common_tree([forest] * 4)
    assert tree.segment_parent.tolist() == list(forest.segment_parent)
    assert (tree.segment_of == np.arange(40)).all()


def test_idle_ranks_and_no_ranks_with_segments() -> None:
    forest, none = random_forest(seed_all(1), 9), SegmentForest([], [], [])
    assert build_common_tree([none, forest, none]).segment_parent.tolist() == list(forest.segment_parent)
    assert build_common_tree([none, none]).num_segments == 0


def test_a_root_beside_two_roots_takes_only_itself() -> None:
    """One rank's prompt is shared by all it has, the other has two prompts of half as much."""
    half = [-1, 0, 1, 1, 0, 0]
    two = half + [parent + 6 if parent >= 0 else -1 for parent in half]
    under_one = [-1] + [parent + 1 if parent >= 0 else 0 for parent in two]
    forests = [SegmentForest(parents, [1] * len(parents), [False] * len(parents)) for parents in (two, under_one)]
    assert build_common_tree(forests).num_segments == len(under_one)


def smallest_common_size(first: list[int], second: list[int]) -> int:
    """Size of the smallest tree that holds both forests: alignment of ordered trees (Jiang, Wang and Zhang, 1995), by
    brute force over all ways to open, share and close nodes.
    """
    from functools import cache

    def children(parents: list[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for segment, parent in enumerate(parents):
            found.setdefault(parent, []).append(segment)
        return found

    below = children(first), children(second)

    def size(side: int, forest: tuple[int, ...]) -> int:
        return sum(1 + size(side, tuple(below[side].get(segment, []))) for segment in forest)

    @cache
    def align(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        if not a or not b:
            return size(0, a) + size(1, b)
        (*a_rest, a_last), (*b_rest, b_last) = a, b
        a_below, b_below = tuple(below[0].get(a_last, [])), tuple(below[1].get(b_last, []))
        best = 1 + align(a_below, b_below) + align(tuple(a_rest), tuple(b_rest))
        for cut in range(len(b) + 1):  # a's last node alone, over the last trees of b
            best = min(best, 1 + align(a_below, b[cut:]) + align(tuple(a_rest), b[:cut]))
        for cut in range(len(a) + 1):
            best = min(best, 1 + align(a[cut:], b_below) + align(a[:cut], tuple(b_rest)))
        return best

    return align(tuple(below[0].get(-1, [])), tuple(below[1].get(-1, [])))


def test_close_to_the_smallest_possible() -> None:
    generator = seed_all(7)
    sizes = []
    for _ in range(60):
        forests = [random_forest(generator, int(generator.integers(3, 13))) for _ in range(2)]
        forests = [SegmentForest(f.segment_parent, [1] * len(f.lengths), f.recompute) for f in forests]
        least = smallest_common_size(*(list(forest.segment_parent) for forest in forests))
        sizes.append((build_common_tree(forests).num_segments, least))
    found, least = np.asarray(sizes).sum(axis=0)
    assert all(size >= best for size, best in sizes)
    assert found <= 1.15 * least, (found, least)


def test_many_large_forests_take_little_time() -> None:
    generator = seed_all(8)
    forests = [random_forest(generator, 150) for _ in range(16)]
    start = time.perf_counter()
    build_common_tree(forests)
    assert time.perf_counter() - start < 3
