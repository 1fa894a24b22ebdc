"""Which rollouts share which nodes of a sampled tree, from the records alone.

A node is named by its group and the branches that lead to it. A rollout without ``branches`` was sampled by itself: its
path is its prompt, which it shares with its group, and a node of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.rollouts.record import Rollout


@dataclass(frozen=True)
class TreePaths:
    """The nodes of Q rollouts' trees; N nodes in all.

    Attributes:
        paths: per rollout, int64 [D]: its nodes, the root of its group first.
        spans: per rollout, int64 [D + 1]: node d holds tokens spans[d] to spans[d + 1] of it.
        parent: int64 [N], -1 at roots.
        depth: int64 [N], 0 at roots.
    """

    paths: list[np.ndarray]
    spans: list[np.ndarray]
    parent: np.ndarray
    depth: np.ndarray

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees, roots included."""
        return len(self.parent)


def tree_paths(rollouts: Sequence[Rollout]) -> TreePaths:
    """The nodes that the records name."""
    nodes: dict[tuple, int] = {}
    parent: list[int] = []
    depth: list[int] = []
    paths, spans = [], []
    for index, rollout in enumerate(rollouts):
        if rollout.branches is None:
            # A tuple of a negative number cannot be a child number of a sampled tree.
            names: list[int] = [0, -1 - index]
            prompt = int(np.argmax(rollout.loss_mask))
            ends = [prompt, len(rollout)]
        else:
            names, ends = rollout.branches.tolist(), rollout.segment_ends.tolist()
        path: list[int] = []
        above = -1
        for level, name in enumerate(names):
            key = (rollout.group_id, name) if above < 0 else (above, name)
            node = nodes.setdefault(key, len(parent))
            if node == len(parent):
                parent.append(above)
                depth.append(level)
            path.append(node)
            above = node
        paths.append(np.array(path, np.int64))
        spans.append(np.array([0, *ends], np.int64))
    return TreePaths(paths, spans, np.array(parent, np.int64), np.array(depth, np.int64))


def decoded_tokens(rollouts: Sequence[Rollout]) -> int:
    """Tokens that were sampled for the rollouts: those of a shared node once."""
    found = tree_paths(rollouts)
    seen: set[int] = set()
    total = 0
    for rollout, path, spans in zip(rollouts, found.paths, found.spans, strict=True):
        for node, begin, end in zip(path.tolist(), spans[:-1], spans[1:], strict=True):
            if node not in seen:
                seen.add(node)
                total += int(np.count_nonzero(rollout.loss_mask[begin:end]))
    return total
