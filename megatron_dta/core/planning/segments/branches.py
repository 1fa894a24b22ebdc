"""Joins the single-child nodes of a forest into *branches* and computes the sizes that the segment planner needs.

The planner only reorders siblings, so only nodes with several children matter to it. Sequences that end along a path
(one sample per turn) make many nodes but no branches. All values are Python lists because the planner reads them one
at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dta.core.tree import PrefixTree


@dataclass(frozen=True)
class Branches:
    """The K branches of a forest in preorder. Entry K of ``depth`` and ``children`` is the root above all trees.

    Attributes:
        length: number of tokens in each branch.
        size: number of tokens in its subtree.
        height: number of tokens on the longest path from its first token to a leaf.
        depth: number of tokens on the path from the root to its last token.
        children: indices of its children.
        node_begin: first node of each branch; its nodes are consecutive.
        node_end: one past its last node.
        node_subtree_end: one past the last node of its subtree.
    """

    length: list[int]
    size: list[int]
    height: list[int]
    depth: list[int]
    children: list[list[int]]
    node_begin: list[int]
    node_end: list[int]
    node_subtree_end: list[int]

    @classmethod
    def of(cls, tree: PrefixTree) -> Branches:
        parent = tree.node_parent.astype(np.int64)
        num_children = np.bincount(parent + 1, minlength=tree.num_nodes + 1)[1:]
        # A parent of -1 indexes the last node, which is a leaf and has no children.
        only_child = (parent >= 0) & (num_children[parent] == 1) if len(parent) else np.zeros(0, dtype=bool)
        begin = np.flatnonzero(~only_child)
        end = np.append(begin[1:], tree.num_nodes)[: len(begin)]
        branch_of_node = np.cumsum(~only_child) - 1
        branch_parent = np.where(parent[begin] < 0, len(begin), branch_of_node[parent[begin]]).tolist()
        subtree_end = tree.node_subtree_end[begin]
        depth = tree.node_position[end - 1].astype(np.int64) + tree.node_lengths[end - 1]
        length = (tree.node_start[end] - tree.node_start[begin]).tolist()

        height = list(length)
        children: list[list[int]] = [[] for _ in range(len(begin) + 1)]
        for branch in range(len(begin) - 1, -1, -1):
            above = branch_parent[branch]
            children[above].append(branch)
            if above < len(begin):
                height[above] = max(height[above], length[above] + height[branch])
        for siblings in children:
            siblings.reverse()
        return cls(
            length=length,
            size=(tree.node_start[subtree_end] - tree.node_start[begin]).tolist(),
            height=height,
            depth=[*depth.tolist(), 0],
            children=children,
            node_begin=begin.tolist(),
            node_end=end.tolist(),
            node_subtree_end=subtree_end.tolist(),
        )

    def __len__(self) -> int:
        return len(self.length)
