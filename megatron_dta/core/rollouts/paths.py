"""Determines which rollouts share which nodes of a sampled tree, from the records alone.

A node is identified by its group and the branches that lead to it. A rollout without ``branches`` was sampled
independently: its path consists of its prompt, which it shares with its group, and one further node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.rollouts.record import Rollout, field_error


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
            # A negative number cannot be the child number of a sampled tree.
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


class NodeCheck:
    """Rejects rollouts that name the same node but differ in its tokens; training them as a tree would alter them.

    ``check`` is called with each rollout of a file in turn.
    """

    def __init__(self) -> None:
        # (node above, or group; branch) -> number of the node, its tokens, whether it is the last one of its path, row.
        self._nodes: dict[tuple, tuple[int, np.ndarray, bool, int]] = {}

    def check(self, rollout: Rollout, row: int) -> None:
        """Raise ``InputError`` if a node's tokens differ from an earlier row's; the longer tokens are kept."""
        if rollout.branches is None or rollout.segment_ends is None:
            return
        above: object = ("group", rollout.group_id)
        begin = 0
        for level, (branch, end) in enumerate(
            zip(rollout.branches.tolist(), rollout.segment_ends.tolist(), strict=True)
        ):
            tokens, last = rollout.token_ids[begin:end], level + 1 == len(rollout.branches)
            known = self._nodes.get((above, branch))
            number = len(self._nodes) if known is None else known[0]
            if known is not None:
                common = min(len(tokens), len(known[1]))
                # A path may be cut within its last node.
                reaches_end = (last or len(tokens) >= len(known[1])) and (known[2] or len(known[1]) >= len(tokens))
                if not reaches_end or not np.array_equal(tokens[:common], known[1][:common]):
                    raise field_error(
                        "branches", f"node {level} has other tokens than in row {known[3]}, which names the same node"
                    )
            if known is None or len(tokens) > len(known[1]) or (known[2] and not last):
                self._nodes[above, branch] = (number, tokens, last, row)
            above, begin = number, end


def decoded_tokens(rollouts: Sequence[Rollout]) -> int:
    """Tokens that were sampled for the rollouts: those of a shared node once."""
    total = sum(rollout.num_trained for rollout in rollouts if rollout.branches is None)
    rollouts = [rollout for rollout in rollouts if rollout.branches is not None]
    tree = tree_paths(rollouts)
    seen: set[int] = set()
    for rollout, path, spans in zip(rollouts, tree.paths, tree.spans, strict=True):
        for node, begin, end in zip(path.tolist(), spans[:-1], spans[1:], strict=True):
            if node not in seen:
                seen.add(node)
                total += int(np.count_nonzero(rollout.loss_mask[begin:end]))
    return total
