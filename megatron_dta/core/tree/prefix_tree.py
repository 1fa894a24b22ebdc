"""Stores a prefix forest as arrays: its *stream* of unique tokens in depth-first preorder, and the stream's nodes.

Three integers describe a token of the stream:

    parent[i]       stream index of the token before it in its sequences, -1 at a root
    position[i]     its depth, the same in every sequence through it
    subtree_end[i]  one past the last stream index inside its subtree

Query ``q`` sees key ``k`` exactly if ``k <= q < subtree_end[k]``. A *node* is a maximal run of tokens with one child
each; it also ends where a sequence ends. Inside a node the three integers are constant or count up, so only nodes are
stored. The arrays per token are derived on first use and cached.

Example: the sequences 5 6 7 and 5 6 8 9 have the stream 5 6 7 8 9 with the nodes (5 6), (7) and (8 9), and

    parent       -1  0  1  1  3
    position      0  1  2  2  3
    subtree_end   5  5  3  5  5

Letters in shapes: N unique tokens, M nodes, Q sequences, T tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """A forest of token sequences that share their common prefixes. The arrays must not be modified.

    Nodes are numbered in preorder. Node ``m`` holds the stream tokens ``node_start[m]:node_start[m + 1]``.
    """

    token_ids: np.ndarray  # int32 [N], the stream
    node_start: np.ndarray  # int64 [M + 1]
    node_parent: np.ndarray  # int32 [M], -1 at a root
    node_position: np.ndarray  # int32 [M], position of the node's first token
    node_subtree_end: np.ndarray  # int32 [M], one past the last node of the subtree
    sequence_node: np.ndarray  # int32 [Q], the node that ends with each sequence's last token; duplicates share it
    sequence_lengths: np.ndarray  # int64 [Q]

    @property
    def num_tokens(self) -> int:
        """Number of unique tokens, N."""
        return len(self.token_ids)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, M."""
        return len(self.node_parent)

    @property
    def num_sequences(self) -> int:
        """Number of sequences, including duplicates, Q."""
        return len(self.sequence_node)

    @property
    def num_leaves(self) -> int:
        """Number of nodes without a child."""
        return int(np.count_nonzero(self.node_subtree_end == np.arange(1, self.num_nodes + 1)))

    @cached_property
    def node_lengths(self) -> np.ndarray:
        """Number of tokens in each node, int64 [M]."""
        return np.diff(self.node_start)

    @cached_property
    def node_depth(self) -> np.ndarray:
        """Number of ancestor nodes of each node, int32 [M]: 0 at a root."""
        closed = np.bincount(self.node_subtree_end, minlength=self.num_nodes + 1)[: self.num_nodes]
        return (np.arange(self.num_nodes) - np.cumsum(closed)).astype(np.int32)

    @cached_property
    def parent(self) -> np.ndarray:
        """Stream index of the token before each token in its sequences, -1 at a root: int32 [N]."""
        parent = np.arange(-1, self.num_tokens - 1, dtype=np.int32)
        parent[self.node_start[:-1]] = self._last_token_of_parent()
        return parent

    @cached_property
    def position(self) -> np.ndarray:
        """Number of tokens before each token in its sequences: int32 [N]."""
        first = self.node_position
        last = first + self.node_lengths - 1
        return _count_up(self.num_tokens, self.node_start[:-1], first, last)

    @cached_property
    def subtree_end(self) -> np.ndarray:
        """One past the last stream index inside each token's subtree: int32 [N]."""
        end = self.node_start[self.node_subtree_end].astype(np.int32)
        return np.repeat(end, self.node_lengths)

    def stream_indices(self, sequence: int) -> np.ndarray:
        """Stream indices of one sequence, int32 [T]: ``token_ids[stream_indices(q)]`` is sequence q."""
        return self.stream_indices_of(np.asarray([sequence]))[0]

    def stream_indices_of(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream indices of several sequences, concatenated: (int32 [sum of T], offsets int64 [len + 1])."""
        sequences = np.asarray(sequences, dtype=np.int64)
        offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum(self.sequence_lengths[sequences], out=offsets[1:])
        if len(sequences) == 0:
            return np.zeros(0, dtype=np.int32), offsets
        # Collect every (sequence, node on its path), one level of all paths at a time, from the leaves to the roots.
        nodes, starts = [], []
        node, start = self.sequence_node[sequences], offsets[:-1]
        while len(node):
            nodes.append(node)
            starts.append(start + self.node_position[node])
            up = self.node_parent[node]
            alive = up >= 0
            node, start = up[alive], start[alive]
        node, start = np.concatenate(nodes), np.concatenate(starts)
        by_start = np.argsort(start)
        node, start = node[by_start], start[by_start]
        return _count_up(int(offsets[-1]), start, self.node_start[node], self.node_start[node + 1] - 1), offsets

    def with_node_order(self, order: np.ndarray) -> PrefixTree:
        """The same forest with siblings (and roots) reordered.

        ``order`` [M] lists the current nodes in the new preorder. Raises ValueError if it is not a preorder.
        """
        order = np.asarray(order, dtype=np.int64)
        count = self.num_nodes
        if order.shape != (count,) or not np.array_equal(np.sort(order), np.arange(count)):
            raise ValueError(f"the node order must list each of the {count} nodes once")
        rank = np.empty(count, dtype=np.int32)
        rank[order] = np.arange(count, dtype=np.int32)
        old_parent = self.node_parent[order]
        parent = np.where(old_parent < 0, np.int32(-1), rank[old_parent]) if count else old_parent
        end = (np.arange(count) + self.node_subtree_end[order] - order).astype(np.int32)
        child = np.flatnonzero(parent >= 0)
        # Subtrees keep their sizes, so a nested range that starts at its node contains only the node's descendants.
        if np.any(parent[child] >= child) or np.any(end[child] > end[parent[child]]):
            raise ValueError("the node order is not a depth-first preorder: a subtree is not contiguous")
        lengths = self.node_lengths[order]
        start = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(lengths, out=start[1:])
        old_start = self.node_start[order]
        gather = _count_up(self.num_tokens, start[:-1], old_start, old_start + lengths - 1)
        return PrefixTree(
            token_ids=self.token_ids[gather],
            node_start=start,
            node_parent=parent,
            node_position=self.node_position[order],
            node_subtree_end=end,
            sequence_node=rank[self.sequence_node],
            sequence_lengths=self.sequence_lengths,
        )

    def _last_token_of_parent(self) -> np.ndarray:
        """Stream index of the token before each node's first one, -1 at a root: int64 [M]."""
        return np.where(self.node_parent < 0, -1, self.node_start[self.node_parent + 1] - 1)


def _count_up(total: int, starts: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """int32 [total] of runs that count up by one: run r begins at ``starts[r]`` and has ``first[r]..last[r]``.

    ``starts`` increases from 0, and the runs cover the result. An in-place cumulative sum needs no other array.
    """
    values = np.ones(total, dtype=np.int32)
    if total:
        values[starts[0]] = first[0]
        values[starts[1:]] = first[1:] - last[:-1]
        np.cumsum(values, out=values)
    return values
