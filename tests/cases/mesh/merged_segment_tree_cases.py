"""Random segment forests, and the paths and peaks of their segments."""

import numpy as np

from megatron_dta.extras.expert_parallel.planning.merged_segment_tree import SegmentForest


def random_forest(generator: np.random.Generator, count: int) -> SegmentForest:
    """Preorder parents: a new segment hangs off any segment of the last one's path, or is a root."""
    deep = generator.random()
    parents, path = [], []
    for segment in range(count):
        keep = len(path) if generator.random() < deep else generator.integers(0, len(path) + 1)
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return SegmentForest(parents, generator.integers(1, 99, size=count).tolist())


def path_of(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path


def peak_of(forest: SegmentForest) -> int:
    paths = (path_of(list(forest.segment_parent), segment) for segment in range(len(forest.lengths)))
    return max((sum(forest.lengths[segment] for segment in path) for path in paths), default=0)
